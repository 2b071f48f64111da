"""``lightning-llm same --config FILE --vary OPTION=VALUE``: are two settings of a training step the same function?

``measure/agreement.py`` has the rule, ``same/steps.py`` runs the settings.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_llm.cli.subcommand import OneLineParser, subcommand
from lightning_llm.io.atomic import write_json
from lightning_llm.io.config_file import Section, config_path, merged, parse_yaml, read_config
from lightning_llm.io.trust import add_trust_option, is_custom, is_import_path, trust_and_import
from lightning_llm.io.untrusted import prefixed, shown
from lightning_llm.training.run_config import RunOptions, read_run

if TYPE_CHECKING:
    from lightning_llm.measure.agreement import Finding
    from lightning_llm.same.steps import Setting

Found = Mapping[str, list["Finding"]]  # by precision

ARCHITECTURE_PREFIX = "model.architecture."
ALL = "all"
BASE = "base"
FLOAT64 = "64-true"
LIKE_FLOAT32 = 1e-6  # relative error: 4.7e-8 was measured for LlamaRMSNorm, which computes in float32


class Vary(NamedTuple):
    """An option that can vary.

    Attributes:
        values: What the option without a value, or ``all``, stands for.
        field: The field of a ``Setting`` that it sets; empty: none.
        more: Further values that it takes; ``None``: any whole number of at least 0.
        also: What else it sets.
    """

    values: tuple[Any, ...]
    field: str = ""
    more: tuple[Any, ...] | None = ()
    also: Mapping[str, Any] = MappingProxyType({})


VARIES = {  # and any other option of the architecture
    f"{ARCHITECTURE_PREFIX}checkpoint_level": Vary((0, 1, 2)),
    f"{ARCHITECTURE_PREFIX}recompute": Vary(("mlp", "attention", "block")),
    "model.loss_chunks": Vary((0, 1, 3), "loss_chunks", more=None),
    "data.micro_batch_size": Vary((1, 3), "micro_batch", more=(2, 4)),
    "trainer.precision": Vary(("32-true", "bf16-true", "bf16-mixed"), "precision", more=(FLOAT64,)),
    "model.compile_mode": Vary(("default",), "compile_mode"),
    "model.compile_scope": Vary(("model",), "compile_scope", more=("blocks",), also={"compile_mode": "default"}),
    "trainer.devices": Vary((2,), "processes"),
    "trainer.strategy": Vary(("fsdp2",), "strategy", also={"processes": 2}),
    # the interpreter truncates to bfloat16 where a GPU rounds
    "kernels": Vary(("triton",), also={"interpreted": True, "precision": "32-true"}),
    "decoding": Vary(("cached",), "form"),
    "export": Vary(("transformers",), "form"),
}


def _options(parser: OneLineParser) -> None:
    add = parser.add_argument
    add("--config", "-c", required=True, action="append", metavar="FILE", help="a config for fit; repeatable")
    about = f"an option and the values to compare, or {ALL}; repeatable. Options: {ARCHITECTURE_PREFIX}NAME, "
    about += ", ".join(option for option in VARIES if not option.startswith(ARCHITECTURE_PREFIX))
    add("--vary", action="append", default=[], metavar="OPTION[=VALUE,…]", help=about)
    about = "compare a part with your own function, called as function(part, x, …) instead of the part's forward"
    add("--against", metavar="MODULE:FUNCTION", help=about)
    add("--part", default="mlp", metavar="NAME", help="the part for --against, such as layers.1.mlp (default: mlp)")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="where to compute (default: cpu)")
    add("--table", action="store_true", help="print the modules of every setting, not only of those that differ")
    add("--json", type=Path, metavar="FILE", help="write every comparison to this file")
    add_trust_option(parser, "import classes outside lightning_llm that the config names")


@subcommand(_options, RuntimeError)
def run_same(options: argparse.Namespace) -> int:
    """Say whether settings of a training step compute the same function, and which module differs first."""
    if not options.vary and options.against is None:
        raise ValueError("there is nothing to compare: give --vary or --against")
    raw: Section = reduce(merged, (read_config(Path(config_path(file))) for file in options.config), Section())
    model = raw.get("model")
    path = model.get("class_path") if isinstance(model, dict) else None
    if isinstance(path, str) and is_custom(path):
        raise ValueError(f"model.class_path {path}: same compares the built-in LanguageModel")
    of_all = set(_pairs(ALL)) if ALL in options.vary else set()
    varied = list(dict.fromkeys(pair for word in options.vary for pair in _pairs(word)))
    base = _base(options)
    settings = {BASE: base}
    for option, text in varied:
        name = f"{option.removeprefix(ARCHITECTURE_PREFIX)}={_short(text)}"
        name = name if name not in settings else f"{option.removeprefix(ARCHITECTURE_PREFIX)}={text}"
        try:
            settings[name] = _with(base, option, parse_yaml(text))
        except ValueError as error:
            if (option, text) not in of_all:
                raise ValueError(f"--vary {option}={text}: {error}") from error
            print(f"{name} does not apply: {error}")
    compared = {name: (of_setting, bits) for name, of_setting, bits in _compared(settings, options)}
    found: dict[str, Found] = {name: of_setting for name, (of_setting, _) in compared.items()}
    for name, (of_setting, bits) in compared.items():
        has_same_bits = name != BASE and bits == compared[BASE][1]
        print("\n".join(_in_words(name, of_setting, with_table=options.table, has_same_bits=has_same_bits)))
    if options.json is not None:
        write_json(options.json, {name: _rows(of_setting) for name, of_setting in found.items()})
    return int(any(one.differs for of_setting in found.values() for each in of_setting.values() for one in each))


def _short(text: str) -> str:
    """A value in a line of a table: of a part with arguments, the last word of its class."""
    value = parse_yaml(text) if text[:1] == "{" else text
    path = value.get("class_path") if isinstance(value, dict) else None
    return path.rpartition(".")[2] if isinstance(path, str) else text


def _rows(found: Found) -> dict[str, Any]:
    return {key: [{**one._asdict(), "differs": one.differs} for one in each] for key, each in found.items()}


def _base(options: argparse.Namespace) -> "Setting":
    """The config as a setting at tiny sizes."""
    run = read_run(RunOptions(config=options.config, vocab_size=2, trust_code=options.trust_code))
    import torch

    from lightning_llm.same.steps import SAME_PRECISIONS, Setting
    from lightning_llm.same.tiny_model import tiny_config

    model = run.raw.get("model") or {}
    if run.step.precision not in SAME_PRECISIONS:
        raise ValueError(f"trainer.precision {run.step.precision} is not supported: use {', '.join(SAME_PRECISIONS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA device; compare on cpu")
    if run.config.dropout:
        print("dropout is 0 in this comparison: it is random")
    return Setting(
        config=tiny_config(run.config),
        precision=run.step.precision,
        loss_chunks=run.step.loss_chunks,
        compile_mode=model.get("compile_mode"),
        compile_scope=model.get("compile_scope", "blocks"),
        documents=run.step.document_mask,
        device=options.device,
    )


def _pairs(word: str) -> Iterator[tuple[str, str]]:
    """The options and values that a --vary stands for: (option, value)."""
    name, equals, value = word.partition("=")
    if word == ALL:
        yield from ((option, str(value)) for option, vary in VARIES.items() for value in vary.values)
        return
    option = next((option for option in VARIES if name in (option, option.rpartition(".")[2])), name)
    if option not in VARIES and not (option.startswith(ARCHITECTURE_PREFIX) and equals):
        known = ", ".join([*(each.rpartition(".")[2] for each in VARIES), f"{ARCHITECTURE_PREFIX}NAME=VALUE", ALL])
        raise ValueError(f"--vary {shown(word)} is not supported: choose among {known}")
    values = value.split(",") if equals and value[:1] not in ("[", "{") else [value]
    yield from ((option, each) for each in (values if equals else map(str, VARIES[option].values)))


def _with(base: "Setting", option: str, value: Any) -> "Setting":
    """The base with an option changed."""
    name = option.removeprefix(ARCHITECTURE_PREFIX)
    if name == option:
        vary = VARIES[option]
        if vary.more is None and (type(value) is not int or value < 0):
            raise ValueError("it takes a whole number of at least 0")
        if vary.more is not None and value not in (accepted := sorted((*vary.values, *vary.more), key=str)):
            raise ValueError(f"it takes {', '.join(map(str, accepted))}")
        return dataclasses.replace(base, **({vary.field: value} if vary.field else {}), **vary.also)
    if name not in {field.name for field in dataclasses.fields(base.config)}:
        raise ValueError("there is no such option of the architecture")
    return dataclasses.replace(base, config=dataclasses.replace(base.config, **{name: value}))


def _function(text: str) -> Callable[..., Any]:
    """A function of the user's own; what the command line names is trusted."""
    path = text.replace(":", ".")
    if text.count(":") != 1:
        raise ValueError(f"--against {shown(text)} must be MODULE:FUNCTION, such as my_parts:reference")
    if not is_import_path(path):
        raise ValueError(f"--against {shown(text)} cannot be imported: there is no such module")
    with prefixed(f"--against {shown(text)} cannot be imported", ImportError, AttributeError):
        found: Callable[..., Any] = trust_and_import(path)
    if not callable(found):
        raise ValueError(f"--against {shown(text)} is no function: it is called as function(part, x, …)")
    return found


def _compared(
    settings: Mapping[str, "Setting"], options: argparse.Namespace
) -> Iterator[tuple[str, Found, Mapping[str, str]]]:
    """Run the settings, and print a line about each; its findings, and the digests of what it has computed."""
    from lightning_llm.measure.timer import num_threads
    from lightning_llm.same.steps import Float64Reference

    with num_threads(1):  # the matmuls are tiny
        function = None if options.against is None else _function(options.against)
        reference = Float64Reference(settings[BASE], options.part, function)
        print(f"{reference.in_words}\nThe largest error of a module, as a multiple of what rounding allows:\n")
        print(f"{'setting':<36} {'precision':<11} {'forward':>9} {'backward':>9}")
        for name, setting in settings.items():
            try:
                found = reference.findings(setting)
            except ValueError as error:
                raise ValueError(str(error) if name == BASE else f"--vary {name}: {error}") from error
            for precision, each in found.items():
                print(f"{name:<36} {precision:<11} {_ratios(each)}")
            yield name, found, reference.digests
        print()


def _ratios(findings: list["Finding"]) -> str:
    """The largest ratio of forward and of backward, as two columns."""
    of_phase = {phase: [one.ratio for one in findings if one.phase == phase] for phase in ("forward", "backward")}
    return " ".join(f"{max(ratios):>9.2g}" if ratios else f"{'-':>9}" for ratios in of_phase.values())


def _in_words(name: str, found: Found, *, with_table: bool, has_same_bits: bool) -> Iterator[str]:
    """The verdict about a setting; the table of modules if it differs."""
    # the precision that is last, float64, hides least
    different = [precision for precision, each in found.items() if any(one.differs for one in each)]
    precision = different[-1] if different else next(iter(found))
    first = next((one for one in found[precision] if one.differs), None)
    if first is None:
        yield f"{name}: same up to rounding{', and the bits of base' if has_same_bits else ''}"
    else:
        error = f"its error is {first.error:.2g} in {precision}, where rounding allows {first.allowed:.2g}"
        in_float32 = precision == FLOAT64 and first.error < LIKE_FLOAT32
        hint = "; so small an error may be that of a part which computes in float32" if in_float32 else ""
        yield f"{name}: {first.module} differs first, in {first.phase} ({first.what}): {error}{hint}"
    if first is None and not with_table:
        return
    yield f"\n  {'module':<36} {'forward':>9} {'backward':>9}   ({precision})"
    for module in dict.fromkeys(one.module for one in found[precision]):
        ratios = _ratios([one for one in found[precision] if one.module == module])
        yield f"  {module:<36} {ratios}{'   differs first' if first and module == first.module else ''}"
    yield ""
