"""``--vary`` and ``--with``: the variants of an experiment on the command line."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_llm.ablate.command.spec import KEYS
from lightning_llm.training.metrics import LOSSES


def add_variants(parser: argparse.ArgumentParser, about: str) -> None:
    """Add both options; ``vary`` gets a list of ``OPTION=VALUE`` for each variant.

    Args:
        parser: Of ``run``, ``power`` or ``try``.
        about: What ``--vary`` says about itself.
    """
    parser.add_argument("--vary", action=_Vary, default=[], metavar="OPTION=VALUE", help=about)
    joined = "a further option of the variant before it; repeatable"
    parser.add_argument("--with", action=_With, dest="vary", default=[], metavar="OPTION=VALUE", help=joined)


class _Vary(argparse.Action):
    """Begins a variant."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        namespace.vary = [*namespace.vary, [value]]


class _With(argparse.Action):
    """Joins an option to the last variant."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        if not namespace.vary:
            raise argparse.ArgumentError(self, f"{value}: give it after the --vary whose variant it belongs to")
        namespace.vary = [*namespace.vary[:-1], [*namespace.vary[-1], value]]


def add_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command in place of ``fit``, to ``run``, ``power`` or ``try``."""
    group = parser.add_argument_group("a command in place of fit")
    add = group.add_argument
    about = "what trains, such as 'python train.py --seed={seed} {options}'; also {run} (a folder of the run's own)"
    add("--command", metavar="TEXT", help=f"{about}, {{device}}, {{port}}, {{tree}}")
    about = "where the metric is in the output, such as 'step {step}: val loss {number}'; {...} is any text"
    add("--read", metavar="PATTERN", help=about)
    add("--read-file", metavar="FILE", help="the JSON file in {run} that has the metric, in place of --read")
    add("--key", metavar="KEY", help="of the metric in --read-file; dots go into nested ones")
    about = "add the run's seed to every seed that the program sets: for one without an option for it"
    add("--reseed", action="store_true", default=None, help=about)
    add("--option", metavar="FORM", help="how an option is written (default: --{name}={value})")
    about = "what {resume} in the command becomes in a run that was interrupted, such as --init_from=resume"
    add("--resume", metavar="TEXT", help=about)
    add("--time-limit", metavar="TIME", help="of a run, such as 30m; one that takes longer has failed")
    add("--gpus-per-run", type=int, metavar="N", help="GPUs that each run sees (default: 1)")
    about = "compare the working tree of this git repository with a revision of it"
    add("--against", metavar="REV", help=about)
    add("--revisions", nargs="+", metavar="REV", help="compare revisions with the first of them")
    about = "compare the command with itself: what a verdict says without any change"
    add("--null", action="store_true", default=None, dest="unchanged", help=about)
    about = "a file or folder that git ignores, such as data, which every tree gets a link to; repeatable"
    add("--link", action="append", metavar="PATH", help=about)
    add("--setup", metavar="TEXT", help="what is executed once in each tree, such as 'python setup.py build_ext -i'")
    about = "keep the trees when the experiment has ended"
    add("--keep-trees", action="store_true", default=None, help=about)


def command_in(options: argparse.Namespace) -> dict[str, Any]:
    """The keys of an experiment that these options give.

    Raises:
        ValueError: One is given without the other that it belongs to.
    """
    keys = {name: getattr(options, name) for name in (*KEYS, "unchanged")}
    file, key = options.read_file, options.key
    if (file is None) != (key is None):
        given, missing = ("--read-file", "--key") if key is None else ("--key", "--read-file")
        raise ValueError(f"{given} is given without {missing}: a file has its metric by a key")
    if file is not None:
        if options.read is not None:
            raise ValueError("--read and --read-file say where the metric is in two ways: give one")
        keys["read"] = {"file": file, "key": key}
    return {name: value for name, value in keys.items() if value is not None}


def fit_as_command(configs: Sequence[str], of_fit: Sequence[str], metric: str | None) -> dict[str, Any]:
    """``fit`` as a command, for revisions of the code: each tree has its own configs, parts and package.

    Args:
        configs: Of the baseline, relative to the current folder.
        of_fit: Further options.
        metric: ``None``: the default one.
    """
    words = [sys.executable, "-m", "lightning_llm", "fit", *(f"--config={config}" for config in configs), *of_fit]
    own = "--seed_everything={seed} --data.seed={seed} --trainer.run_dir={run}/fit --trainer.enable_progress_bar=false"
    escaped = shlex.join(words).replace("{", "{{").replace("}", "}}")
    key = metric or next(iter(LOSSES))
    keys: dict[str, Any] = {"command": f"{escaped} {own} {{options}}", "read": {"file": "fit/summary.json", "key": key}}
    return {**keys, "link": ["stores"]} if Path("stores").is_dir() else keys  # or each tree prepares the text again
