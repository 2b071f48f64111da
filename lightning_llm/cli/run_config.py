"""What the configs of a run say about its cost, read without torch: for ``estimate`` and ``plan``.

Several configs are composed as ``fit`` composes them: later ones win, option by option.
"""

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

from lightning_llm.accounting.counts import hidden_matrix_parameters, parameters_by_part
from lightning_llm.accounting.hardware import Device, auto_precision, byte_size, cpu_features, find_device
from lightning_llm.accounting.planner import STATE_BYTES
from lightning_llm.accounting.sharding import STRATEGIES
from lightning_llm.cli.yaml_files import read_config
from lightning_llm.io.untrusted import file_in, read_json
from lightning_llm.model.config import ModelConfig

# Tensors of a parameter's size that an optimiser keeps for each parameter; Muon's matrices have one instead.
STATE_PER_PARAMETER = {"AdamW": 2, "Adam": 2, "MuonAdamW": 2, "SGD": 0, "RMSprop": 1, "Adagrad": 1, "Lion": 1}
OWN = "lightning_llm.optim."
MOST = 2**40  # of any whole number
SHARDING = ("fsdp2", "ModelParallelStrategy", "ShardedStrategy")

Section = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a run's cost depends on.

    Attributes:
        raw: The configs as one.
        config: The model.
        device: Of the table; ``None`` for a CPU.
        precision: ``32-true``, ``bf16-true`` or ``bf16-mixed``.
        precision_reason: Why that one, where the config leaves it to the machine; else empty.
        context_length: Tokens per row.
        global_batch_size: Rows of a step.
        micro_batch_size: Rows of a forward pass; ``None``: as many as there are for a process.
        loss_chunks: As ``LanguageModel`` takes it.
        world_size: Processes.
        max_steps: Of the config; 0: it does not say.
        strategy: ``ddp`` or ``fsdp2``.
        optimizer: Name of its class.
        is_own_adamw: Whether it is this project's, whose state may be bfloat16.
        state_per_parameter: Tensors of state for each parameter, in its dtype; for MuonAdamW the mean over all.
        state_dtype: Of the state; ``None``: the parameter's, or ``state_per_parameter`` has counted another.
    """

    raw: Section
    config: ModelConfig
    device: Device | None
    precision: str
    precision_reason: str
    context_length: int
    global_batch_size: int
    micro_batch_size: int | None
    loss_chunks: int | None
    world_size: int
    max_steps: int
    strategy: str
    optimizer: str
    is_own_adamw: bool
    state_per_parameter: float
    state_dtype: str | None

    @property
    def device_kind(self) -> str:
        """Type of the device: ``cpu`` or ``cuda``."""
        return "cpu" if self.device is None else "cuda"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which run, on what."""
    parser.add_argument(
        "--config", type=Path, required=True, action="append", metavar="FILE", help="a config for fit; later ones win"
    )
    parser.add_argument("--device", metavar="NAME", help="a GPU of the table, such as H200; default: a CPU")
    parser.add_argument("--world-size", type=int, metavar="N", help="processes; default: those of the config, or 1")
    parser.add_argument("--strategy", choices=STRATEGIES, help="how processes share the model; default: the config's")
    parser.add_argument("--gradient-views", action="store_true", help="DDP's gradients are views of its buckets")
    parser.add_argument("--precision", metavar="P", help="32-true, bf16-true or bf16-mixed; default: the config's")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="token ids, if the config leaves it to the data")
    parser.add_argument(
        "--state-dtype", choices=("bfloat16",), help="of AdamW's averages; default: the config's, or the parameters'"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it")


def size_option(words: str) -> int:
    """A size in bytes, for ``argparse``."""
    try:
        return byte_size(words)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def read_run(options: argparse.Namespace) -> RunConfig:
    """The run that the options of ``add_options`` describe.

    Raises:
        ValueError: A section or option that cannot be, a device that is not listed, an optimiser that is not known.
        OSError: A config cannot be read.
    """
    raw: Section = {}
    for file in options.config:
        raw = merged(raw, read_config(file))
    model, data, trainer = (_section(raw, name) for name in ("model", "data", "trainer"))
    if data.get("document_mask"):
        raise ValueError("data.document_mask is not covered: its masks are not counted; leave it out")
    config = _architecture(_section(model, "architecture"), data, options.vocab_size)
    device = None if options.device is None else find_device(options.device)
    precision = options.precision or _name(trainer, "trainer.precision", "auto")
    reason = ""
    if precision == "auto":
        known = ("the CPU", cpu_features()) if device is None else (device.name, device.flops)
        precision, reason = auto_precision(*known)
    optimizer, is_own, arguments = _optimizer(model)
    state_dtype = options.state_dtype or _name(arguments, "state_dtype")
    if state_dtype not in STATE_BYTES:
        raise ValueError(f"state_dtype {state_dtype!r} is not covered: write bfloat16, or leave it out")
    is_muon = optimizer == "MuonAdamW"
    if state_dtype is not None and not is_own and not (is_muon and options.state_dtype is None):
        instead = "give it in the config's init_args" if is_muon else "leave it out, or change that"
        raise ValueError(f"state_dtype is an option of {OWN}AdamW, the optimizer is {optimizer}: {instead}")
    world_size = _world_size(trainer) if options.world_size is None else options.world_size
    if not 1 <= world_size <= MOST:
        raise ValueError(f"--world-size must be from 1 to {MOST}, got {world_size}")
    return RunConfig(
        raw=raw,
        config=config,
        device=device,
        precision=precision,
        precision_reason=reason,
        context_length=_whole(data, "data.context_length", 256),
        global_batch_size=_whole(data, "data.global_batch_size", 32),
        micro_batch_size=_whole(data, "data.micro_batch_size"),
        loss_chunks=_whole(model, "model.loss_chunks", least=0),
        world_size=world_size,
        max_steps=max(0, _whole(trainer, "trainer.max_steps", 0, least=-1)),
        strategy=options.strategy or _strategy(trainer),
        optimizer=optimizer,
        is_own_adamw=is_own,
        state_per_parameter=_muon_state(config, precision, state_dtype)
        if is_muon
        else state_per_parameter(optimizer, arguments),
        state_dtype=state_dtype if is_own else None,
    )


def merged(first: Section, second: Section) -> Section:
    """Options of two configs: the second's win; options of another class than the first's are not mixed with them."""
    found = dict(first)
    for name, value in second.items():
        before = found.get(name)
        if isinstance(before, dict) and isinstance(value, dict) and _same_class(before, value):
            found[name] = merged(before, value)
        else:
            found[name] = value
    return found


def _same_class(first: Section, second: Section) -> bool:
    return bool(second.get("class_path", first.get("class_path")) == first.get("class_path"))


def state_per_parameter(class_path: str, arguments: Section) -> int:
    """Tensors of a parameter's size that an optimiser keeps for each.

    Raises:
        ValueError: The optimiser is not known.
    """
    name = class_path.rpartition(".")[2]
    if name not in STATE_PER_PARAMETER:
        known = ", ".join(STATE_PER_PARAMETER)
        raise ValueError(f"optimizer {class_path} is not known: its state can be told for {known}")
    return STATE_PER_PARAMETER[name] + (1 if name == "SGD" and arguments.get("momentum") else 0)


def _muon_state(config: ModelConfig, precision: str, state_dtype: str | None) -> float:
    """Numbers of the parameters' dtype per parameter: one for Muon's matrices, two of ``state_dtype`` for the rest."""
    parameters, itemsize = sum(parameters_by_part(config).values()), 2 if precision == "bf16-true" else 4
    matrices = hidden_matrix_parameters(config)
    others = 2 * (parameters - matrices) * (STATE_BYTES[state_dtype] or itemsize)
    return (matrices * itemsize + others) / (parameters * itemsize)


def _section(raw: Section, name: str) -> Section:
    found = raw.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{name} in the config must hold options, got {found!r}")
    return found


def _whole(section: Section, name: str, default: Any = None, *, least: int = 1) -> Any:
    value = section.get(name.rpartition(".")[2], default)
    if value is not default and (type(value) is not int or not least <= value <= MOST):
        raise ValueError(f"{name} must be a whole number from {least} to {MOST}, got {value!r:.80}")
    return value


def _name(section: Section, name: str, default: Any = None) -> Any:
    value = section.get(name.rpartition(".")[2])
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be a name, got {value!r:.80}")
    return default if value is None else value


def _class(section: Section, name: str, default: str = "") -> tuple[str, Section]:
    """The path of a class and its arguments, of ``name: path`` or ``name: {class_path: path, init_args: …}``."""
    given = section.get(name.rpartition(".")[2])
    if not isinstance(given, dict):
        return _name(section, name, default), {}
    return _name(given, f"{name}.class_path", default), _section(given, "init_args")


def _architecture(fields: Section, data: Section, vocab_size: int | None) -> ModelConfig:
    fields = dict(fields)
    if vocab_size is not None:
        fields["vocab_size"] = vocab_size
    elif fields.get("vocab_size") is None:
        store = Path(str(data.get("store") or ""), "meta.json")
        if data.get("store") and store.is_file():
            fields["vocab_size"] = read_json(file_in(store.parent, store.name)).get("vocab_size")
        elif data.get("tokenizer") == "bpe":
            fields["vocab_size"] = data.get("vocab_size")
    known = [field.name for field in dataclasses.fields(ModelConfig)]
    if strange := [name for name in fields if name not in known]:
        raise ValueError(f"model.architecture.{strange[0]} is unknown: choose among {', '.join(known)}")
    return ModelConfig(**fields)


def _optimizer(model: Section) -> tuple[str, bool, Section]:
    path, arguments = _class(model, "model.optimizer", f"{OWN}AdamW")
    state_per_parameter(path, arguments)
    name = path.rpartition(".")[2]
    return name, name == "AdamW" and path.startswith(OWN), arguments


def _world_size(trainer: Section) -> int:
    devices, nodes = trainer.get("devices"), _whole(trainer, "trainer.num_nodes", 1)
    return int(nodes) * (max(1, int(str(devices))) if re.fullmatch("[0-9]{1,9}", str(devices)) else 1)


def _strategy(trainer: Section) -> str:
    return "fsdp2" if _class(trainer, "trainer.strategy")[0].rpartition(".")[2] in SHARDING else "ddp"
