"""The cells of a factorial experiment: each is an ordinary variant that sets the options of some of the factors.

A *factor* is a change with a name: one option or several. A *cell* is a set of factors that are set together; the
baseline has none. Which cells there are follows from the number of factors (``statistics.factorial``).
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_llm.ablate.names import AGAIN, BASELINE, NULL
from lightning_llm.ablate.options import Options, flat_options, folder_name
from lightning_llm.io.untrusted import shown
from lightning_llm.statistics.factorial import Cell, cells_of

JOINED = "+"  # between the names of factors in the name of a cell
PAIRS = 16
MOST_NULL = 8  # runs of the null variant
MOST_FACTORS = 12
EXAMPLE = "swiglu:model.architecture.mlp=swiglu"


def named_cells(factors: Sequence[str]) -> dict[Cell, str]:
    """The name of each cell, the baseline first: ``a``, ``b``, ``a+b``."""
    names: dict[Cell, str] = {}
    for cell in cells_of(len(factors)):
        chosen = [name for name, is_set in zip(factors, cell, strict=True) if is_set]
        names[cell] = JOINED.join(chosen) or BASELINE
    return names


def variants_of(factors: Mapping[str, Options]) -> dict[str, Options]:
    """The options of each cell, by its name, without the baseline."""
    found: dict[str, Options] = {}
    for cell, name in named_cells(list(factors)).items():
        if name != BASELINE:
            chosen = [options for options, is_set in zip(factors.values(), cell, strict=True) if is_set]
            found[name] = dict(itertools.chain.from_iterable(options.items() for options in chosen))
    return found


def read_factors(content: Mapping[str, Any], section: str) -> dict[str, Options]:
    """The options of each factor, by dotted name.

    Args:
        content: As a file has them: options by the name of a factor.
        section: Names the key in errors.

    Raises:
        ValueError: They cannot be combined.
    """
    factors = {str(name): flat_options(options) for name, options in content.items()}
    if len(factors) < 2:
        advice = "give two or more, or one change as a variant"
        raise ValueError(f"{section} has one factor, which adds up with nothing: {advice}")
    if len(factors) > MOST_FACTORS:
        raise ValueError(f"{section} has {len(factors)} factors, expected at most {MOST_FACTORS}")
    for name, options in factors.items():
        is_taken = name in (BASELINE, AGAIN, NULL)
        if not name or is_taken or JOINED in name or folder_name(name) != name or name[0] == ".":
            folder = f"the name of a folder without {JOINED}, and not {BASELINE}, {AGAIN} or {NULL}"
            raise ValueError(f"{section}: the factor {shown(name)} must be {folder}")
        if not options:
            raise ValueError(f"{section}: the factor {name} changes nothing: give it an option, such as {EXAMPLE}")
    for (first, its), (second, others) in itertools.combinations(factors.items(), 2):
        for option, other in itertools.product(its, others):
            if f"{option}.".startswith(f"{other}.") or f"{other}.".startswith(f"{option}."):
                both = option if option == other else f"{option} and {other}, one within the other"
                raise ValueError(f"{section}: {first} and {second} set {both}: factors need options of their own")
    return factors


def factors_in(words: Sequence[str]) -> dict[str, Options]:
    """Factors from ``NAME:OPTION=VALUE``; words with the same name are options of one factor.

    Raises:
        ValueError: A word has another form, or a factor has an option twice.
    """
    factors: dict[str, Options] = {}
    for word in words:
        name, colon, assignment = word.partition(":")
        option, equals, value = assignment.partition("=")
        if colon and assignment.startswith("@"):
            advice = "changes of code are compared one at a time, with --against or --revisions"
            raise ValueError(f"--factor {shown(word)} is a revision, and a factor is NAME:OPTION=VALUE: {advice}")
        if not (name and colon and option and equals and value) or "=" in name:
            raise ValueError(f"--factor {shown(word)} must be NAME:OPTION=VALUE, such as {EXAMPLE}")
        options = factors.setdefault(name, {})
        if option in options:
            raise ValueError(f"--factor {name} has {option} twice: a factor has one value of it")
        options[option] = value
    return factors
