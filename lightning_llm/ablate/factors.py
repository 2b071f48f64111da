"""The cells of a factorial experiment: each is an ordinary variant that has the changes of some of the factors.

A *factor* is a change with a name: options, or a revision of the code (``@REV``). A *cell* is a set of factors that are
set together; the baseline has none. Which cells there are follows from the number of factors
(``statistics.factorial``). The code of a cell is the baseline's, into which the revisions of its factors are merged.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_llm.ablate.command.spec import Tree
from lightning_llm.ablate.names import AGAIN, BASELINE, NULL
from lightning_llm.ablate.options import Options, flat_options, folder_name
from lightning_llm.io.untrusted import shown
from lightning_llm.statistics.factorial import Cell, cells_of

JOINED = "+"  # between the names of factors in the name of a cell
PAIRS = 16
MOST_NULL = 8  # runs of the null variant
MOST_FACTORS = 12
EXAMPLE = "swiglu:model.architecture.mlp=swiglu"
OF_REVISION = "@"  # before the revision of a factor
FORMS = f"NAME:OPTION=VALUE or NAME:{OF_REVISION}REV"
Factor = Options | str  # options by dotted name, or a revision after OF_REVISION


def named_cells(factors: Sequence[str]) -> dict[Cell, str]:
    """The name of each cell, the baseline first: ``a``, ``b``, ``a+b``."""
    names: dict[Cell, str] = {}
    for cell in cells_of(len(factors)):
        chosen = [name for name, is_set in zip(factors, cell, strict=True) if is_set]
        names[cell] = JOINED.join(chosen) or BASELINE
    return names


def variants_of(factors: Mapping[str, Factor]) -> dict[str, Options]:
    """The options of each cell, by its name, without the baseline."""
    return {
        name: dict(itertools.chain.from_iterable(each.items() for each in chosen if not isinstance(each, str)))
        for name, chosen in _chosen(factors)
        if name != BASELINE
    }


def trees_of(factors: Mapping[str, Factor], against: str) -> dict[str, Tree]:
    """The code of the baseline and of each cell, by its name; empty: no factor is a revision.

    Args:
        factors: By name.
        against: The revision of the baseline.
    """
    if not any(isinstance(factor, str) for factor in factors.values()):
        return {}
    return {
        name: Tree(
            revision=against, merged=tuple(each.removeprefix(OF_REVISION) for each in chosen if isinstance(each, str))
        )
        for name, chosen in _chosen(factors)
    }


def _chosen(factors: Mapping[str, Factor]) -> Iterator[tuple[str, list[Factor]]]:
    """The name of each cell, and the factors that are set in it."""
    for cell, name in named_cells(list(factors)).items():
        yield name, [factor for factor, is_set in zip(factors.values(), cell, strict=True) if is_set]


def read_factors(content: Mapping[str, Any], section: str) -> dict[str, Factor]:
    """The factors by name, their options by dotted name.

    Args:
        content: As a file has them: options, or a revision, by the name of a factor.
        section: Names the key in errors.

    Raises:
        ValueError: They cannot be combined.
    """
    factors = {str(name): its if isinstance(its, str) else flat_options(its) for name, its in content.items()}
    if len(factors) < 2:
        advice = "give two or more, or one change as a variant"
        raise ValueError(f"{section} has one factor, which adds up with nothing: {advice}")
    if len(factors) > MOST_FACTORS:
        raise ValueError(f"{section} has {len(factors)} factors, expected at most {MOST_FACTORS}")
    for name, factor in factors.items():
        is_taken = name in (BASELINE, AGAIN, NULL)
        if not name or is_taken or JOINED in name or folder_name(name) != name or name[0] == ".":
            folder = f"the name of a folder without {JOINED}, and not {BASELINE}, {AGAIN} or {NULL}"
            raise ValueError(f"{section}: the factor {shown(name)} must be {folder}")
        if not factor:
            raise ValueError(f"{section}: the factor {name} changes nothing: give it an option, such as {EXAMPLE}")
    for (first, its), (second, others) in itertools.combinations(factors.items(), 2):
        if isinstance(its, str) or isinstance(others, str):
            if its == others:
                raise ValueError(f"{section}: {first} and {second} are {its}: factors need revisions of their own")
            continue
        for option, other in itertools.product(its, others):
            if f"{option}.".startswith(f"{other}.") or f"{other}.".startswith(f"{option}."):
                both = option if option == other else f"{option} and {other}, one within the other"
                raise ValueError(f"{section}: {first} and {second} set {both}: factors need options of their own")
    return factors


def names_revision(value: object) -> bool:
    """Whether a factor is a revision."""
    return isinstance(value, str) and value.startswith(OF_REVISION) and value != OF_REVISION


def factors_in(words: Sequence[str]) -> dict[str, Factor]:
    """Factors from ``NAME:OPTION=VALUE`` or ``NAME:@REV``; words with the same name are options of one factor.

    Raises:
        ValueError: A word has another form, or a factor has an option twice.
    """
    factors: dict[str, Factor] = {}
    for word in words:
        name, colon, assignment = word.partition(":")
        option, equals, value = assignment.partition("=")
        is_revision = names_revision(assignment)
        if not (name and colon) or "=" in name or not (is_revision or (option and equals and value)):
            raise ValueError(f"--factor {shown(word)} must be {FORMS}, such as {EXAMPLE}")
        its = factors.get(name)
        if its is None:
            factors[name] = assignment if is_revision else {option: value}
        elif is_revision or isinstance(its, str):
            raise ValueError(f"--factor {name} is given twice: a revision is a factor of its own")
        elif option in its:
            raise ValueError(f"--factor {name} has {option} twice: a factor has one value of it")
        else:
            its[option] = value
    return factors
