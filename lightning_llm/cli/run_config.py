"""Configs as files: read strictly, composed as ``fit`` composes them, and what they say about the cost of a run.

A key that is given twice is an error, where YAML's readers use the last one. So is what would take too much memory or
time: aliases that multiply, deep nesting, numbers of thousands of digits, large files. No torch: ``estimate`` and
``plan`` do not wait for it.
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from lightning_llm.accounting.counts import MeasuredMLP, hidden_matrix_parameters, parameters_by_part
from lightning_llm.accounting.hardware import Device, auto_precision, byte_size, cpu_features, device_from_part
from lightning_llm.accounting.memory import STRATEGIES
from lightning_llm.accounting.planner import STATE_BYTES
from lightning_llm.checkpoints.run_directory import CHECKPOINTS, CONFIG
from lightning_llm.io.untrusted import file_in, read_json, read_text, shown
from lightning_llm.model.config import BUILT_IN_MLPS, ModelConfig, config_of_file, is_foreign

LARGEST = 1 << 18  # bytes of a config; the largest of this project has 3,000
MOST_NODES = 100_000  # an alias counts as what it stands for
DEEPEST = 40
_LONGEST_NUMBER = 100  # characters
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if libyaml is installed

# Tensors of a parameter's size that an optimizer keeps for each parameter; MuonAdamW has its own formula below.
STATE_PER_PARAMETER = {"AdamW": 2, "Adam": 2, "MuonAdamW": 2, "SGD": 0, "RMSprop": 1, "Adagrad": 1, "Lion": 1}
OWN = "lightning_llm.optim."
MOST = 2**40  # of any whole number
VOCABULARY = {"store", "corpus", "path", "tokenizer", "vocab_size", "mixture", "raw_dtype"}  # in data: decide it
SIZES = {"context_length", "global_batch_size"}
SHARDING = ("fsdp2", "ModelParallelStrategy", "ShardedStrategy")

Section = dict[str, Any]

# ---- files


class HostileYAMLError(ValueError):
    """A key is given twice in one mapping, or a limit is exceeded; the text says where."""


def read_config(file: Path) -> Section:
    """The options in a config file.

    Raises:
        ValueError: It is not YAML, gives a key twice, exceeds a limit, or holds something else than options by name.
            The message has the file's name.
        OSError: It cannot be read.
    """
    try:
        text = read_text(file, LARGEST)
    except ValueError as error:
        raise ValueError(f"config {error}") from error
    try:
        check_yaml(text)
        content = yaml.load(text, Loader=_LOADER)
    except HostileYAMLError as error:
        raise ValueError(f"config {file}: {error}") from error
    except (yaml.YAMLError, ValueError) as error:  # such as a date in month 99
        raise ValueError(f"config {file} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"config {file} must hold options by name, such as 'trainer:', got {shown(content)}")
    return content


def check_yaml(text: str) -> None:
    """Look for keys that are given twice, and for what exceeds a limit, without constructing any value.

    Raises:
        HostileYAMLError: One was found.
        yaml.YAMLError: The text is not YAML, or has tags.
    """
    depth = 0
    parsed: Iterator[Any] = yaml.parse(text, Loader=_LOADER)
    for event in parsed:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise HostileYAMLError(f"nested more than {DEEPEST} levels deep, in line {event.start_mark.line + 1}")
        if getattr(event, "tag", None) is not None:
            raise yaml.YAMLError(f"tag {event.tag!r} in line {event.start_mark.line + 1} is not accepted: leave it out")
    if (node := yaml.compose(text, Loader=_LOADER)) is not None:
        _size(node, {})


def _size(node: yaml.Node, sizes: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Nodes and levels of a tree; an alias counts as what it stands for."""
    if id(node) in sizes:
        return sizes[id(node)]
    line = node.start_mark.line + 1
    sizes[id(node)] = (MOST_NODES, DEEPEST)  # until it is known: for an anchor that contains itself
    nodes, levels, children = 1, 0, []
    if isinstance(node, yaml.MappingNode):
        _refuse_repeated([key for key, _ in node.value])
        children = [each for pair in node.value for each in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    elif node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
        raise HostileYAMLError(f"a number of {len(node.value)} characters, in line {line}")
    for child in children:
        below = _size(child, sizes)
        nodes, levels = nodes + below[0], max(levels, 1 + below[1])
    if nodes > MOST_NODES or levels > DEEPEST:
        raise HostileYAMLError(
            f"aliases expand to more than {MOST_NODES} values or {DEEPEST} levels, in line {line}: write less"
        )
    sizes[id(node)] = (nodes, levels)
    return nodes, levels


def _refuse_repeated(keys: list[yaml.Node]) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key in keys:
        if isinstance(key, yaml.ScalarNode):
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                where = f"line {line}" if lines[name] == line else f"lines {lines[name]} and {line}"
                raise HostileYAMLError(f"{key.value!r} is given twice, in {where}: leave one out")
            lines[name] = line


# ---- a run


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a run's cost depends on.

    Attributes:
        raw: The configs as one.
        config: The model.
        device: From the table of devices; ``None`` for a CPU.
        precision: ``32-true``, ``bf16-true`` or ``bf16-mixed``.
        precision_reason: Why that one, if the config leaves it to the machine; else empty.
        context_length: Tokens per row.
        global_batch_size: Rows of a step.
        micro_batch_size: Rows of a forward pass; ``None``: all rows of a process.
        loss_chunks: As ``LanguageModel`` takes it.
        world_size: Processes.
        max_steps: From the config; 0: it does not say.
        strategy: ``ddp`` or ``fsdp2``.
        optimizer: Name of its class.
        is_own_adamw: Whether it is this project's, whose state may be bfloat16.
        state_per_parameter: Tensors of state for each parameter, in its dtype; for MuonAdamW the mean over all.
        state_dtype: Of the state; ``None``: the parameter's, or ``state_per_parameter`` already accounts for another.
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
    mlp: MeasuredMLP | None

    @property
    def device_kind(self) -> Literal["cpu", "cuda"]:
        """Type of the device: ``cpu`` or ``cuda``."""
        return "cpu" if self.device is None else "cuda"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which run, on which device."""
    add = parser.add_argument
    configs = "a config for fit, or the config.yaml of a run; repeatable"
    add("--config", "-c", type=Path, required=True, action="append", metavar="FILE", help=configs)
    add("--device", metavar="NAME", help="a known GPU, or a part of its name, such as h100 (default: a CPU)")
    add("--world-size", type=int, metavar="N", help="processes (default: the config's, or 1)")
    add("--strategy", choices=STRATEGIES, help="how processes share the model (default: the config's)")
    add("--gradient-views", action="store_true", help="gradients are views of DDP's buckets, without a copy")
    add("--precision", metavar="P", help="32-true, bf16-true or bf16-mixed (default: the config's)")
    add("--vocab-size", type=int, metavar="N", help="vocabulary size, if neither config, store nor run has it")
    add("--state-dtype", choices=("bfloat16",), help="dtype of AdamW's averages (default: the config's)")
    add("--json", type=Path, metavar="FILE", help="write all figures to this file")
    add("--trust-code", action="store_true", help="import and measure an MLP class outside lightning_llm")


def size_option(words: str) -> int:
    """A size in bytes, for ``argparse``."""
    try:
        return byte_size(words)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def read_run(options: argparse.Namespace) -> RunConfig:
    """The run that the options of ``add_options`` describe.

    Raises:
        ValueError: An invalid section or option, an unknown device, or an unknown optimizer.
        OSError: A config cannot be read.
    """
    raw: Section = {}
    source = Path()  # the config that decides the vocabulary
    for file in options.config:
        content = read_config(file)
        raw, source = merged(raw, content), file if VOCABULARY & _section(content, "data").keys() else source
    if _section(raw, "data").get("document_mask"):
        raise ValueError("data.document_mask is not covered: its masks are not counted; leave it out")
    if is_foreign(path := _name(raw, "data.class_path", OWN)) and not _section(raw, "data").keys() >= SIZES:
        raise ValueError(f"data.class_path {path} is not run: add data.context_length and data.global_batch_size")
    if is_foreign(path := _name(raw, "model.class_path", OWN)):
        print(f"model.class_path {path} is counted as a LanguageModel: what it adds is left out", file=sys.stderr)
    config = _architecture(raw, options, source)
    device = None if options.device is None else device_from_part(options.device)
    precision, reason = options.precision or _name(raw, "trainer.precision", "auto"), ""
    if precision == "auto":
        known = ("the CPU", cpu_features()) if device is None else (device.name, device.flops)
        precision, reason = auto_precision(*known)
    world_size = _world_size(raw) if options.world_size is None else options.world_size
    if not 1 <= world_size <= MOST:
        raise ValueError(f"--world-size must be from 1 to {MOST}, got {world_size}")
    is_sharded = _class(raw, "trainer.strategy", "")[0].rpartition(".")[2] in SHARDING
    return RunConfig(
        raw=raw,
        config=config,
        device=device,
        precision=precision,
        precision_reason=reason,
        context_length=_whole(raw, "data.context_length", 256),
        global_batch_size=_whole(raw, "data.global_batch_size", 32),
        micro_batch_size=_whole(raw, "data.micro_batch_size"),
        loss_chunks=_whole(raw, "model.loss_chunks", least=0),
        world_size=world_size,
        max_steps=max(0, _whole(raw, "trainer.max_steps", 0, least=-1)),
        strategy=options.strategy or ("fsdp2" if is_sharded else "ddp"),
        **_optimizer(raw, config, precision, options.state_dtype, mlp := _measured(config, precision)),
        mlp=mlp,
    )


def merged(first: Section, second: Section) -> Section:
    """Options of two configs: the second overrides; options of another class than the first's are not mixed in."""
    found = dict(first)
    for name, value in second.items():
        before = found.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            is_same_class = value.get("class_path", before.get("class_path")) == before.get("class_path")
            found[name] = merged(before, value) if is_same_class else value
        else:
            found[name] = value
    return found


def _section(raw: Section, name: str) -> Section:
    """The options below a dotted name; none if the config does not have it."""
    section: Any = raw
    for part in name.split("."):
        section = section.get(part, {})
        if section is None:
            return {}
        if not isinstance(section, dict):
            raise ValueError(f"{part} in the config must hold options, got {section!r}")
    return cast(Section, section)


def _whole(raw: Section, name: str, default: Any = None, *, least: int = 1) -> Any:
    section, _, option = name.rpartition(".")
    value = _section(raw, section).get(option, default)
    if value is not default and (type(value) is not int or not least <= value <= MOST):
        raise ValueError(f"{name} must be a whole number from {least} to {MOST}, got {value!r:.80}")
    return value


def _name(raw: Section, name: str, default: Any = None) -> Any:
    section, _, option = name.rpartition(".")
    value = _section(raw, section).get(option)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be a name, got {value!r:.80}")
    return default if value is None else value


def _class(raw: Section, name: str, default: str) -> tuple[str, Section]:
    """The path of a class and its arguments, from ``name: path`` or ``name: {class_path: path, init_args: …}``."""
    section, _, option = name.rpartition(".")
    if isinstance(_section(raw, section).get(option), dict):
        return _name(raw, f"{name}.class_path", default), _section(raw, f"{name}.init_args")
    return _name(raw, name, default), {}


def _architecture(raw: Section, options: argparse.Namespace, source: Path) -> ModelConfig:
    vocab_size = options.vocab_size
    fields, data = dict(_section(raw, "model.architecture")), _section(raw, "data")
    if vocab_size is not None:
        fields["vocab_size"] = vocab_size
    elif fields.get("vocab_size") is None:
        store = Path(str(data.get("store") or ""), "meta.json")
        if data.get("store") and store.is_file():
            fields["vocab_size"] = read_json(file_in(store.parent, store.name)).get("vocab_size")
        elif (of_run := _vocab_size_of_run(source)) is not None:
            fields["vocab_size"] = of_run
        elif data.get("tokenizer") == "bpe":
            fields["vocab_size"] = data.get("vocab_size")
    known = [field.name for field in dataclasses.fields(ModelConfig)]
    if unknown := [name for name in fields if name not in known]:
        raise ValueError(f"model.architecture.{unknown[0]} is unknown: choose among {', '.join(known)}")
    return config_of_file(fields, "the config", trust_code=options.trust_code)


def _measured(config: ModelConfig, precision: str) -> MeasuredMLP | None:
    """Of an MLP that the accounting does not know: it costs loading torch, and runs the class."""
    if config.mlp in BUILT_IN_MLPS:
        return None
    from lightning_llm.training.measured_mlp import measure_mlp

    return measure_mlp(config, precision)


def _vocab_size_of_run(config: Path) -> int | None:
    """From a checkpoint, if the config is that of a run. This alone imports torch."""
    for path in sorted((config.parent / CHECKPOINTS).glob("*.ckpt")) if config.name == CONFIG else ():
        from lightning_llm.checkpoints.reading import read_outline

        with suppress(ValueError, OSError):  # a damaged one: the next one has the same vocabulary
            architecture = read_outline(path).get("hyper_parameters", {}).get("architecture", {})
            return cast("int | None", architecture.get("vocab_size"))
    return None


def _optimizer(
    raw: Section, config: ModelConfig, precision: str, asked: str | None, mlp: MeasuredMLP | None
) -> dict[str, Any]:
    """The four fields of a RunConfig about the optimizer and its state; ``asked`` is --state-dtype."""
    path, arguments = _class(raw, "model.optimizer", f"{OWN}AdamW")
    name = path.rpartition(".")[2]
    if name not in STATE_PER_PARAMETER:
        raise ValueError(f"optimizer {path} is not known: choose among {', '.join(STATE_PER_PARAMETER)}")
    dtype = asked or _name({"optimizer": arguments}, "optimizer.state_dtype")
    if dtype not in STATE_BYTES:
        raise ValueError(f"state_dtype {dtype!r} is not covered: write bfloat16, or leave it out")
    is_own, is_muon = name == "AdamW" and path.startswith(OWN), name == "MuonAdamW"
    if dtype is not None and not is_own and not (is_muon and asked is None):
        instead = "give it in the config's init_args" if is_muon else "leave it out, or change that"
        raise ValueError(f"state_dtype is an option of {OWN}AdamW, the optimizer is {name}: {instead}")
    state: float = STATE_PER_PARAMETER[name] + (1 if name == "SGD" and arguments.get("momentum") else 0)
    if is_muon:  # one tensor for Muon's matrices, two of state_dtype for the rest
        parameters, itemsize = sum(parameters_by_part(config, mlp).values()), 2 if precision == "bf16-true" else 4
        matrices = hidden_matrix_parameters(config)
        others = 2 * (parameters - matrices) * (STATE_BYTES[dtype] or itemsize)
        state = (matrices * itemsize + others) / (parameters * itemsize)
    own_dtype = dtype if is_own else None
    return {"optimizer": name, "is_own_adamw": is_own, "state_per_parameter": state, "state_dtype": own_dtype}


def _world_size(raw: Section) -> int:
    devices, nodes = _section(raw, "trainer").get("devices"), _whole(raw, "trainer.num_nodes", 1)
    return int(nodes) * (max(1, int(str(devices))) if re.fullmatch("[0-9]{1,9}", str(devices)) else 1)
