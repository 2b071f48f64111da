"""``--vary`` and ``--with``: the variants of an experiment on the command line."""

import argparse
from typing import Any


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
