"""The cost of a run, as its configs say it, composed as ``fit`` does. It loads no torch."""

import argparse
import dataclasses
import functools
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from lightning_llm.accounting.counts import hidden_matrix_parameters, parameters_by_part
from lightning_llm.accounting.estimate import Optimizer, RunConfig
from lightning_llm.accounting.hardware import Reserve, auto_precision, cpu_features, device_from_part, reserve_for
from lightning_llm.accounting.parts import parts_to_measure
from lightning_llm.accounting.sizing import SIZE_OPTIONS, Sizing, given_options, request_in, sizing_for, with_options
from lightning_llm.accounting.step_settings import (
    CONTEXT_LENGTH,
    GLOBAL_BATCH_SIZE,
    Measured,
    StepSettings,
    weight_dtype,
)
from lightning_llm.io.config_file import (
    MOST,
    Section,
    class_of,
    config_path,
    merged,
    read_config,
    section_of,
    text_of,
    whole_of,
)
from lightning_llm.io.trust import is_custom, is_import_path, refuse_custom
from lightning_llm.io.units import byte_size
from lightning_llm.io.untrusted import file_in, read_json, shown
from lightning_llm.model.config import ModelConfig, config_of_file
from lightning_llm.optim.catalog import OPTIMIZERS, STATE_BYTES
from lightning_llm.runs.directory import CHECKPOINTS, CONFIG
from lightning_llm.runs.options import flat

OWN, OF_TORCH = "lightning_llm.optim.", "torch.optim."
STATE_PER_PARAMETER = {path.rpartition(".")[2]: known.state_per_parameter for path, known in OPTIMIZERS.items()}
VOCABULARY = {"store", "corpus", "path", "tokenizer", "vocab_size", "mixture", "raw_dtype"}  # in data: decide it
SIZES = {"context_length", "global_batch_size"}
SHARDING = ("fsdp2", "fsdp2_deferred", "ModelParallelStrategy", "ShardedStrategy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run and its device: configs, and what overrides their values where it is given."""

    config: Sequence[str]
    gpu: str | None = None
    world_size: int | None = None
    strategy: str | None = None
    gradient_views: bool = False
    precision: str | None = None
    vocab_size: int | None = None
    state_dtype: str | None = None
    reserve: int | None = None
    size: str | None = None
    tokens_per_parameter: float | None = None
    repeat: bool = False
    trust_code: bool = False

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> "RunOptions":
        """Pick them from the options that a command parsed."""
        return cls(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(cls)})


def read_run(options: RunOptions) -> RunConfig:
    """The run that configs and options describe.

    Raises:
        ValueError: An invalid section or option, an unknown device, or an unknown optimizer.
        OSError: A config cannot be read.
    """
    raw: Section = {}
    source = Path()  # the config that decides the vocabulary
    contents = []
    for file in map(Path, map(config_path, options.config)):
        contents.append(content := read_config(file))
        raw = merged(raw, content)
        if VOCABULARY & section_of(content, "data").keys():
            source = file
    raw, sizing, epochs = _sized(contents, raw, options, source)
    data = section_of(raw, "data")
    if not isinstance(document_mask := data.get("document_mask", False), bool):
        raise ValueError(f"data.document_mask must be true or false, got {shown(document_mask)}")
    if is_custom(path := text_of(raw, "data.class_path", OWN)) and not data.keys() >= SIZES:
        raise ValueError(f"data.class_path {path} is not run: add data.context_length and data.global_batch_size")
    if is_custom(path := text_of(raw, "model.class_path", OWN)):
        print(f"model.class_path {path} is counted as a LanguageModel: what it adds is left out", file=sys.stderr)
    config = _architecture(raw, options, source)
    device = None if options.gpu is None else device_from_part(options.gpu)
    precision = options.precision or text_of(raw, "trainer.precision", "auto")
    reason = ""
    if precision == "auto":
        processor = ("the CPU", cpu_features()) if device is None else (device.name, device.flops)
        precision, reason = auto_precision(*processor)
    world_size = _world_size(raw) if options.world_size is None else options.world_size
    if not 1 <= world_size <= MOST:
        raise ValueError(f"--world-size must be from 1 to {MOST}, got {world_size}")
    kind = "cpu" if device is None else "cuda"
    context_length = whole_of(raw, "data.context_length", CONTEXT_LENGTH)
    measured = _measured(config, precision, context_length)
    optimizer = _optimizer(raw, options, config, precision, measured)
    return RunConfig(
        raw=raw,
        sizing=sizing,
        epochs=epochs,
        config=config,
        device=device,
        precision_reason=reason,
        tf32=section_of(raw, "trainer").get("tf32") is True,
        is_compiled=section_of(raw, "model").get("compile_mode") is not None,
        capture=section_of(raw, "trainer").get("capture") is True,
        step=StepSettings(
            rows=1,
            context_length=context_length,
            precision=precision,
            device=kind,
            loss_chunks=whole_of(raw, "model.loss_chunks", least=0),
            document_mask=document_mask,
            state_per_parameter=optimizer.state_per_parameter,
            state_itemsize=STATE_BYTES[optimizer.state_dtype],
            measured=measured,
            strategy=options.strategy or _strategy(raw),
            world_size=world_size,
            gradient_views=options.gradient_views,
        ),
        global_batch_size=whole_of(raw, "data.global_batch_size", GLOBAL_BATCH_SIZE),
        micro_batch_size=whole_of(raw, "data.micro_batch_size"),
        max_steps=max(0, whole_of(raw, "trainer.max_steps", 0, least=-1)),
        optimizer=optimizer,
        reserve=_reserve(raw, options.reserve, kind, world_size),
    )


def _sized(
    contents: Sequence[Section], raw: Section, options: RunOptions, source: Path
) -> tuple[Section, Sizing | None, float | None]:
    """The configs with what ``size`` sets, what that is, and the epochs of the run, if its store exists."""
    typed = {name: getattr(options, name) for name in SIZE_OPTIONS if getattr(options, name) not in (None, False)}
    request = request_in(contents, typed)
    raw = {name: value for name, value in raw.items() if name not in SIZE_OPTIONS}
    if request is None:
        return raw, None, None
    base: Section = {"data": {"context_length": CONTEXT_LENGTH, "global_batch_size": GLOBAL_BATCH_SIZE}}
    base = functools.reduce(merged, contents[: request.base_configs], base)
    context_length = whole_of(raw, "data.context_length", CONTEXT_LENGTH)
    known = {"model.architecture.vocab_size": _architecture(raw, options, source).vocab_size}
    found = sizing_for(
        with_options(base, known),
        request.size,
        request.tokens_per_parameter,
        given=given_options(raw, [name for content in contents[request.base_configs :] for name in flat(content)]),
        measure=lambda config: _measured(config, "32-true", context_length),
    )
    from lightning_llm.data.find_store import train_tokens_of

    raw = with_options(raw, found.options)
    train_tokens = train_tokens_of(section_of(raw, "data"))
    if train_tokens and not request.repeat and (problem := found.epoch_problem(train_tokens)):
        raise ValueError(problem)
    return raw, found, found.tokens / train_tokens if train_tokens else None


def _architecture(raw: Section, options: RunOptions, source: Path) -> ModelConfig:
    vocab_size = options.vocab_size
    fields = dict(section_of(raw, "model.architecture"))
    if vocab_size is not None:
        fields["vocab_size"] = vocab_size
    elif fields.get("vocab_size") is None:
        fields["vocab_size"] = _vocab_size_of_data(raw, source)
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    if unknown := [name for name in fields if name not in names]:
        raise ValueError(f"model.architecture.{unknown[0]} is unknown: choose among {', '.join(names)}")
    return config_of_file(fields, "the config", trust_code=options.trust_code)


def _vocab_size_of_data(raw: Section, source: Path) -> int | None:
    """From the store, the run, the tokenizer or the text, whichever has it first; ``None``: none of them."""
    data = section_of(raw, "data")
    store = text_of(raw, "data.store")
    tokenizer = text_of(raw, "data.tokenizer")
    if store and (Path(store) / "meta.json").is_file():  # token_store.META, which loads NumPy
        return cast("int | None", read_json(file_in(Path(store), "meta.json")).get("vocab_size"))
    if (of_run := _vocab_size_of_run(source)) is not None:
        return of_run
    if tokenizer is None or tokenizer == "bpe" or is_custom(text_of(raw, "data.class_path", OWN)):
        return data.get("vocab_size") if tokenizer == "bpe" else None
    from lightning_llm.data.find_store import vocab_size_of_text

    return vocab_size_of_text(data.get("corpus"), data.get("path"), tokenizer)


def _measured(config: ModelConfig, precision: str, context_length: int) -> Measured:
    """The parts that the accounting does not know: it costs loading torch, and runs their classes."""
    if not parts_to_measure(config):
        return {}
    from lightning_llm.accounting.measured_parts import measure_parts

    return measure_parts(config, precision, context_length)


def _vocab_size_of_run(config: Path) -> int | None:
    """From a checkpoint, if the config is that of a run. This alone imports torch."""
    if config.name != CONFIG or not (paths := sorted((config.parent / CHECKPOINTS).glob("*.ckpt"))):
        return None
    from lightning_llm.checkpoints.reading import read_outline

    for path in paths:
        with suppress(ValueError, OSError):  # a damaged one: the next one has the same vocabulary
            architecture = read_outline(path).get("hyper_parameters", {}).get("architecture", {})
            return cast("int | None", architecture.get("vocab_size"))
    return None


def _optimizer(raw: Section, options: RunOptions, config: ModelConfig, precision: str, measured: Measured) -> Optimizer:
    """Optimizer of a RunConfig and its state."""
    path, arguments = class_of(raw, "model.optimizer", f"{OWN}AdamW")
    name = path.rpartition(".")[2]
    is_known = name in STATE_PER_PARAMETER and ("." not in path or path.startswith((OWN, OF_TORCH)))
    if not is_known:
        return Optimizer(name, False, _measured_state(path, arguments, config, precision, options.trust_code), None)
    dtype = options.state_dtype or text_of(arguments, "state_dtype")
    if dtype not in STATE_BYTES:
        raise ValueError(f"state_dtype {shown(dtype)} is not covered: write bfloat16, or leave it out")
    is_own = name == "AdamW" and path.startswith(OWN)
    is_muon = name == "MuonAdamW"
    if dtype is not None and not is_own and not (is_muon and options.state_dtype is None):
        instead = "give it in the config's init_args" if is_muon else "leave it out, or change that"
        raise ValueError(f"state_dtype is an option of {OWN}AdamW, the optimizer is {name}: {instead}")
    state: float = STATE_PER_PARAMETER[name] + (1 if name == "SGD" and arguments.get("momentum") else 0)
    if is_muon:  # one tensor for Muon's matrices, two of state_dtype for the rest
        parameters = sum(parameters_by_part(config, measured).values())
        itemsize = 2 if weight_dtype(precision) == "bfloat16" else 4
        matrices = hidden_matrix_parameters(config, measured)
        others = 2 * (parameters - matrices) * (STATE_BYTES[dtype] or itemsize)
        state = (matrices * itemsize + others) / (parameters * itemsize)
    return Optimizer(name, is_own, state, dtype if is_own else None)


def _measured_state(path: str, arguments: Section, config: ModelConfig, precision: str, trust_code: bool) -> float:
    """The state of an optimizer that the accounting does not know: it costs loading torch, and runs its class."""
    if not is_import_path(path):
        raise ValueError(f"optimizer {shown(path)} is not known: choose among {', '.join(STATE_PER_PARAMETER)}")
    if not path.startswith(OF_TORCH):
        refuse_custom([path], "the config", trust_code=trust_code)
    from lightning_llm.training.measured_optimizer import state_per_parameter

    return state_per_parameter(path, arguments, config, precision)


def _reserve(raw: Section, reserve: int | None, kind: str, world_size: int) -> Reserve:
    """Memory that tensors do not get; ``reserve`` is --reserve."""
    size = text_of(raw, "model.memory_reserve")
    if reserve is None and size is not None:
        reserve = byte_size(size, "model.memory_reserve")
    return reserve_for(kind, world_size, reserve)


def _strategy(raw: Section) -> str:
    name, arguments = class_of(raw, "trainer.strategy", "")
    if name.rpartition(".")[2] not in SHARDING:
        return "ddp"
    is_deferred = name == "fsdp2_deferred" or arguments.get("defer_reduction") is True
    return "fsdp2_deferred" if is_deferred else "fsdp2"


def _world_size(raw: Section) -> int:
    devices = section_of(raw, "trainer").get("devices")
    nodes = whole_of(raw, "trainer.num_nodes", 1)
    if isinstance(devices, int | str) and re.fullmatch("[0-9]{1,9}", str(devices)):
        return int(nodes) * max(1, int(devices))
    return int(nodes)
