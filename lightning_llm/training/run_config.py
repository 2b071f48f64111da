"""The cost of a run, as its configs say it, composed as ``fit`` does. No torch: ``estimate`` does not wait for it."""

import argparse
import dataclasses
import functools
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from lightning_llm.accounting.counts import hidden_matrix_parameters, parameters_by_part
from lightning_llm.accounting.dial import OPTIONS, Dial, asked_in, dial, given_options, with_options
from lightning_llm.accounting.estimate import Optimizer, RunConfig
from lightning_llm.accounting.hardware import Reserve, auto_precision, cpu_features, device_from_part, reserve_for
from lightning_llm.accounting.parts import parts_to_measure
from lightning_llm.accounting.settings import STATE_BYTES, STRATEGIES, UNMEASURED, Measured, StepSettings
from lightning_llm.data.defaults import CONTEXT_LENGTH, GLOBAL_BATCH_SIZE
from lightning_llm.io.config_file import Section, config_path, merged, read_config
from lightning_llm.io.trust import add_trust_option, is_custom, is_import_path, refuse_custom
from lightning_llm.io.units import byte_size
from lightning_llm.io.untrusted import file_in, read_json, shown
from lightning_llm.model.config import ModelConfig, config_of_file
from lightning_llm.runs.directory import CHECKPOINTS, CONFIG
from lightning_llm.runs.options import flat

# Tensors of a parameter's size that an optimizer keeps for each parameter; MuonAdamW has its own formula below.
STATE_PER_PARAMETER = {"AdamW": 2, "Adam": 2, "MuonAdamW": 2, "SGD": 0, "RMSprop": 1, "Adagrad": 1}  # ours and torch's
OWN, OF_TORCH = "lightning_llm.optim.", "torch.optim."
MOST = 2**40  # of any whole number
VOCABULARY = {"store", "corpus", "path", "tokenizer", "vocab_size", "mixture", "raw_dtype"}  # in data: decide it
SIZES = {"context_length", "global_batch_size"}
SHARDING = ("fsdp2", "fsdp2_deferred", "ModelParallelStrategy", "ShardedStrategy")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which run, on which device."""
    add = parser.add_argument
    configs = "a config for fit, or the config.yaml of a run; repeatable"
    add("--config", "-c", required=True, action="append", metavar="FILE", help=configs)
    add("--device", metavar="NAME", help="a known GPU, or a part of its name, such as h100 (default: a CPU)")
    add("--world-size", type=int, metavar="N", help="processes (default: the config's, or 1)")
    add("--strategy", choices=STRATEGIES, help="how processes share the model (default: the config's)")
    add("--gradient-views", action="store_true", help="gradients are views of DDP's buckets, without a copy")
    add("--precision", metavar="P", help="32-true, bf16-true or bf16-mixed (default: the config's)")
    add("--vocab-size", type=int, metavar="N", help="vocabulary size, if neither config, run, store nor text has it")
    add("--state-dtype", choices=("bfloat16",), help="dtype of AdamW's averages (default: the config's)")
    free = (
        "memory of each device that the plan leaves free (default: the config's; on a GPU for context, libraries, gaps)"
    )
    add("--reserve", type=size_option, metavar="SIZE", help=free)
    add("--size", metavar="N", help="set model and training by this number of parameters, such as 100k")
    each = "with --size: tokens of the run for each parameter (default: the config's, or 10)"
    add("--tokens-per-parameter", "--tokens_per_parameter", type=float, metavar="N", help=each)
    add("--repeat", action="store_true", help="with --size: accept more than 4 epochs over the data")
    add("--json", type=Path, metavar="FILE", help="write all figures to this file")
    add_trust_option(parser, "import and measure classes outside lightning_llm")


def size_option(text: str) -> int:
    """A size in bytes, for ``argparse``."""
    try:
        return byte_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Which run, on which device: configs, and what takes the place of their values where it is given."""

    config: Sequence[str]
    device: str | None = None
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
        """Pick the options of ``add_options`` from those that a command parsed."""
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
        raw, source = merged(raw, content), file if VOCABULARY & _section(content, "data").keys() else source
    raw, dialed, epochs = _dialed(contents, raw, options, source)
    if not isinstance(document_mask := _section(raw, "data").get("document_mask", False), bool):
        raise ValueError(f"data.document_mask must be true or false, got {shown(document_mask)}")
    if is_custom(path := _name(raw, "data.class_path", OWN)) and not _section(raw, "data").keys() >= SIZES:
        raise ValueError(f"data.class_path {path} is not run: add data.context_length and data.global_batch_size")
    if is_custom(path := _name(raw, "model.class_path", OWN)):
        print(f"model.class_path {path} is counted as a LanguageModel: what it adds is left out", file=sys.stderr)
    config = _architecture(raw, options, source)
    device = None if options.device is None else device_from_part(options.device)
    precision, reason = options.precision or _name(raw, "trainer.precision", "auto"), ""
    if precision == "auto":
        processor = ("the CPU", cpu_features()) if device is None else (device.name, device.flops)
        precision, reason = auto_precision(*processor)
    world_size = _world_size(raw) if options.world_size is None else options.world_size
    if not 1 <= world_size <= MOST:
        raise ValueError(f"--world-size must be from 1 to {MOST}, got {world_size}")
    kind = "cpu" if device is None else "cuda"
    context_length = _whole(raw, "data.context_length", CONTEXT_LENGTH)
    measured = _measured(config, precision, context_length)
    optimizer = _optimizer(
        raw, config, precision, measured, state_dtype=options.state_dtype, trust_code=options.trust_code
    )
    return RunConfig(
        raw=raw,
        dial=dialed,
        epochs=epochs,
        config=config,
        device=device,
        precision_reason=reason,
        tf32=_section(raw, "trainer").get("tf32") is True,
        step=StepSettings(
            rows=1,
            context_length=context_length,
            precision=precision,
            device=kind,
            loss_chunks=_whole(raw, "model.loss_chunks", least=0),
            document_mask=document_mask,
            state_per_parameter=optimizer.state_per_parameter,
            state_itemsize=STATE_BYTES[optimizer.state_dtype],
            measured=measured,
            strategy=options.strategy or _strategy(raw),
            world_size=world_size,
            gradient_views=options.gradient_views,
        ),
        global_batch_size=_whole(raw, "data.global_batch_size", GLOBAL_BATCH_SIZE),
        micro_batch_size=_whole(raw, "data.micro_batch_size"),
        max_steps=max(0, _whole(raw, "trainer.max_steps", 0, least=-1)),
        optimizer=optimizer,
        reserve=_reserve(raw, options.reserve, kind, world_size),
    )


def _dialed(
    contents: Sequence[Section], raw: Section, options: RunOptions, source: Path
) -> tuple[Section, Dial | None, float | None]:
    """The configs with what ``size`` sets, what that is, and the epochs of the run, if its store exists."""
    typed = {name: getattr(options, name) for name in OPTIONS if getattr(options, name) not in (None, False)}
    asked = asked_in(contents, typed)
    raw = {name: value for name, value in raw.items() if name not in OPTIONS}
    if asked is None:
        return raw, None, None
    base: Section = {"data": {"context_length": CONTEXT_LENGTH, "global_batch_size": GLOBAL_BATCH_SIZE}}
    base = functools.reduce(merged, contents[: asked.base_configs], base)
    context_length = _whole(raw, "data.context_length", CONTEXT_LENGTH)
    known = {"model.architecture.vocab_size": _architecture(raw, options, source).vocab_size}
    found = dial(
        with_options(base, known),
        asked.size,
        asked.tokens_per_parameter,
        given=given_options(raw, [name for content in contents[asked.base_configs :] for name in flat(content)]),
        measure=lambda config: _measured(config, "32-true", context_length),
    )
    raw = with_options(raw, found.options)
    train_tokens = _train_tokens(raw)
    if train_tokens and not asked.repeat and (fault := found.epoch_fault(train_tokens)):
        raise ValueError(fault)
    return raw, found, found.tokens / train_tokens if train_tokens else None


def _train_tokens(raw: Section) -> int | None:
    """Tokens of the training text, if its stores exist."""
    data = _section(raw, "data")
    from lightning_llm.data.find_store import DEFAULT_CORPUS, default_store
    from lightning_llm.data.prepare import DEFAULT_TOKENIZER, DEFAULT_VOCAB_SIZE
    from lightning_llm.data.token_store import META, read_meta

    text = str(data.get("path") or data.get("corpus") or DEFAULT_CORPUS)
    tokenizer = str(data.get("tokenizer") or DEFAULT_TOKENIZER)
    ids = data.get("vocab_size") or DEFAULT_VOCAB_SIZE
    stores = data.get("mixture") or [data.get("store") or default_store([text], tokenizer, ids)]
    if data.get("raw_dtype") or not all((Path(store) / META).is_file() for store in stores):
        return None
    return sum(int(read_meta(Path(store))["splits"]["train"]["tokens"]) for store in stores)


def _section(raw: Section, name: str) -> Section:
    """The options below a dotted name; none if the config does not have it."""
    section: Any = raw
    for part in name.split("."):
        section = section.get(part, {})
        if section is None:
            return {}
        if not isinstance(section, dict):
            raise ValueError(f"{part} in the config must have options, got {shown(section)}")
    return cast(Section, section)


def _whole(raw: Section, name: str, default: Any = None, *, least: int = 1) -> Any:
    section, _, option = name.rpartition(".")
    value = _section(raw, section).get(option, default)
    if value is not default and (type(value) is not int or not least <= value <= MOST):
        raise ValueError(f"{name} must be a whole number from {least} to {MOST}, got {shown(value)}")
    return value


def _name(raw: Section, name: str, default: Any = None) -> Any:
    section, _, option = name.rpartition(".")
    value = _section(raw, section).get(option)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be a name, got {shown(value)}")
    return default if value is None else value


def _class(raw: Section, name: str, default: str) -> tuple[str, Section]:
    """The path of a class and its arguments, from ``name: path`` or ``name: {class_path: path, init_args: …}``."""
    section, _, option = name.rpartition(".")
    if isinstance(_section(raw, section).get(option), dict):
        return _name(raw, f"{name}.class_path", default), _section(raw, f"{name}.init_args")
    return _name(raw, name, default), {}


def _architecture(raw: Section, options: RunOptions, source: Path) -> ModelConfig:
    vocab_size = options.vocab_size
    fields = dict(_section(raw, "model.architecture"))
    if vocab_size is not None:
        fields["vocab_size"] = vocab_size
    elif fields.get("vocab_size") is None:
        fields["vocab_size"] = _vocab_size_of_data(raw, source)
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    if unknown := [name for name in fields if name not in names]:
        raise ValueError(f"model.architecture.{unknown[0]} is unknown: choose among {', '.join(names)}")
    return config_of_file(fields, "the config", trust_code=options.trust_code)


def _vocab_size_of_data(raw: Section, source: Path) -> Any:
    """From the store, the run, the tokenizer or the text, whichever has it first; ``None``: none of them."""
    data, store = _section(raw, "data"), _name(raw, "data.store")
    if store and (of_store := _vocab_size_of_store(Path(store))) is not None:
        return of_store
    if (of_run := _vocab_size_of_run(source)) is not None:
        return of_run
    tokenizer, path = _name(raw, "data.tokenizer"), data.get("path")
    if tokenizer is None or tokenizer == "bpe" or is_custom(_name(raw, "data.class_path", OWN)):
        return data.get("vocab_size") if tokenizer == "bpe" else None
    from lightning_llm.data.corpora import open_corpus
    from lightning_llm.data.find_store import DEFAULT_CORPUS, default_store
    from lightning_llm.data.tokenizers import Tokenizer

    if tokenizer != "char":
        return (Tokenizer.train_byte() if tokenizer == "byte" else Tokenizer.from_file(tokenizer)).vocab_size
    text = str(path or data.get("corpus") or DEFAULT_CORPUS)
    if (of_store := _vocab_size_of_store(default_store([text], tokenizer, 0))) is not None:
        return of_store
    if not path and text != DEFAULT_CORPUS:
        return None  # it may have to be downloaded
    documents = open_corpus([text]).documents()
    return Tokenizer.train_char(piece for document in documents for piece in document.pieces()).vocab_size


def _vocab_size_of_store(store: Path) -> int | None:
    is_there = (store / "meta.json").is_file()
    return read_json(file_in(store, "meta.json")).get("vocab_size") if is_there else None


def _measured(config: ModelConfig, precision: str, context_length: int) -> Measured:
    """The parts that the accounting does not know: it costs loading torch, and runs their classes."""
    if not parts_to_measure(config):
        return UNMEASURED
    from lightning_llm.training.measured_parts import measure_parts

    return measure_parts(config, precision, context_length)


def _vocab_size_of_run(config: Path) -> int | None:
    """From a checkpoint, if the config is that of a run. This alone imports torch."""
    if config.name != CONFIG or not (paths := sorted((config.parent / CHECKPOINTS).glob("*.ckpt"))):
        return None
    from lightning_llm.checkpoints.reading import in_time, read_outline

    for path in in_time(paths):
        with suppress(ValueError, OSError):  # a damaged one: the next one has the same vocabulary
            architecture = read_outline(path).get("hyper_parameters", {}).get("architecture", {})
            return cast("int | None", architecture.get("vocab_size"))
    return None


def _optimizer(
    raw: Section, config: ModelConfig, precision: str, measured: Measured, *, state_dtype: str | None, trust_code: bool
) -> Optimizer:
    """What a RunConfig says about the optimizer and its state; ``state_dtype`` is --state-dtype."""
    path, arguments = _class(raw, "model.optimizer", f"{OWN}AdamW")
    name = path.rpartition(".")[2]
    is_known = name in STATE_PER_PARAMETER and ("." not in path or path.startswith((OWN, OF_TORCH)))
    if not is_known:
        return Optimizer(name, False, _measured_state(path, arguments, config, precision, trust_code), None)
    dtype = state_dtype or _name({"optimizer": arguments}, "optimizer.state_dtype")
    if dtype not in STATE_BYTES:
        raise ValueError(f"state_dtype {shown(dtype)} is not covered: write bfloat16, or leave it out")
    is_own, is_muon = name == "AdamW" and path.startswith(OWN), name == "MuonAdamW"
    if dtype is not None and not is_own and not (is_muon and state_dtype is None):
        instead = "give it in the config's init_args" if is_muon else "leave it out, or change that"
        raise ValueError(f"state_dtype is an option of {OWN}AdamW, the optimizer is {name}: {instead}")
    state: float = STATE_PER_PARAMETER[name] + (1 if name == "SGD" and arguments.get("momentum") else 0)
    if is_muon:  # one tensor for Muon's matrices, two of state_dtype for the rest
        parameters, itemsize = sum(parameters_by_part(config, measured).values()), 2 if precision == "bf16-true" else 4
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
    """What tensors do not get; ``reserve`` is --reserve."""
    size = _name(raw, "model.memory_reserve")
    try:
        return reserve_for(kind, world_size, byte_size(size) if reserve is None and size is not None else reserve)
    except ValueError as error:
        raise ValueError(f"model.memory_reserve {error}") from error


def _strategy(raw: Section) -> str:
    name, arguments = _class(raw, "trainer.strategy", "")
    if name.rpartition(".")[2] not in SHARDING:
        return "ddp"
    is_deferred = name == "fsdp2_deferred" or arguments.get("defer_reduction") is True
    return "fsdp2_deferred" if is_deferred else "fsdp2"


def _world_size(raw: Section) -> int:
    devices, nodes = _section(raw, "trainer").get("devices"), _whole(raw, "trainer.num_nodes", 1)
    if isinstance(devices, int | str) and re.fullmatch("[0-9]{1,9}", str(devices)):
        return int(nodes) * max(1, int(devices))
    return int(nodes)
