"""The named corpus ``recall``: lines of key-value pairs and queries, which only a model that recalls them predicts.

A line such as ``fQ,aX,cB,0cB0fQ0aX;1aX1cB1fQ`` binds each key to a value, and then asks for each key, in another order
each *round*: the multi-query associative recall of Arora et al. 2023, "Zoology" (arXiv 2312.04927, section 4), as text
for ``char``. Keys and values are different in each line, and every line has the same length. Its only repeated bigrams
are a key and its value: before each key is the number of its round, and what is between two rounds occurs once. So
``recall_loss`` is the loss of the answers. ``context_length`` is the length of a line plus 1: with the length itself,
all windows of an epoch would begin at the same place in their lines. Windows begin anywhere in a line, so with one
round, many queries would have nothing before them that answers them.

A model that finds the key's value has a recall loss of 0. One that knows only which values are in the line, and leaves
out those that were asked for in this round, guesses among the rest: ln(pairs!) / pairs, the *chance level*. One layer
of attention needs a size that is exponential in the context to do better (Sanford et al. 2024, "One-layer transformers
fail to solve the induction heads task", arXiv 2408.14332); two layers find a value by an induction head.
"""

import dataclasses
import functools
import math
import operator
import os
import random
import string
import tempfile
from collections.abc import Iterator
from pathlib import Path

KEYS, VALUES = string.ascii_lowercase, string.ascii_uppercase
BETWEEN = ";:!?*+-=/"  # two rounds
MOST_LINES = 10_000_000
MOST_ROUNDS = len(BETWEEN) + 1


@dataclasses.dataclass(frozen=True)
class RecallText:
    """The sizes of a text. The same sizes and seed give the same text.

    Attributes:
        pairs: Of each line.
        rounds: How often a line asks for each key, every time in another order.
        keys: How many different keys there are.
        values: How many different values there are.
        lines: A multiple of 10, so that the validation text, the last tenth, begins with a line.
        seed: Of the text.

    Raises:
        ValueError: A number is out of range.
    """

    pairs: int = 8
    rounds: int = 4
    keys: int = len(KEYS)
    values: int = len(VALUES)
    lines: int = 20_000
    seed: int = 0

    def __post_init__(self) -> None:
        most = {"keys": len(KEYS), "values": len(VALUES), "pairs": min(self.keys, self.values), "rounds": MOST_ROUNDS}
        for name, highest in {**most, "lines": MOST_LINES, "seed": 2**32 - 1}.items():
            number = getattr(self, name)
            lowest = int(name != "seed")
            if not lowest <= number <= highest:
                raise ValueError(f"corpus recall: {name} must be at least {lowest} and at most {highest}, got {number}")
        if self.lines % 10:
            raise ValueError(f"corpus recall: lines must be a multiple of 10, got {self.lines}")

    @classmethod
    def of(cls, words: str) -> "RecallText":
        """The text that options such as ``pairs=4,seed=1`` describe.

        Raises:
            ValueError: One is unknown, or no whole number.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        found: dict[str, int] = {}
        given = words.split(",") if words else []
        for word in given:
            name, _, value = word.partition("=")
            if name not in known or name in found or not value.isdecimal() or len(value) > 12:
                example = f"whole numbers of {', '.join(known)}, such as recall:pairs=4,seed=1"
                raise ValueError(f"corpus recall: expected {example}, got {word}")
            found[name] = int(value)
        return cls(**found)

    @property
    def line_length(self) -> int:
        """Characters of a line, with its end."""
        return 3 * self.pairs * (1 + self.rounds) + self.rounds

    @property
    def chance(self) -> float:
        """The recall loss of a model that knows the values of a line, but not their keys, in nats per token."""
        return math.lgamma(self.pairs + 1) / self.pairs

    def text(self) -> Iterator[str]:
        """One line after another, each with its pairs and its queries."""
        draw = random.Random(self.seed).random  # its sequence is the same in all versions of Python
        for _ in range(self.lines):
            sides = (sorted(side, key=lambda _: draw()) for side in (KEYS[: self.keys], VALUES[: self.values]))
            pairs = [key + value for key, value in zip(*sides, strict=False)][: self.pairs]
            rounds = [sorted(pairs, key=lambda _: draw()) for _ in range(self.rounds)]
            told = "".join(f"{pair}," for pair in pairs)
            asked = ["".join(f"{number}{pair}" for pair in queries) for number, queries in enumerate(rounds)]
            yield told + "".join(map(operator.add, asked, [*BETWEEN[: self.rounds - 1], "\n"]))


@functools.cache
def write_recall(recall: RecallText) -> Path:
    """An unnamed file with the text, which the system deletes when the process ends.

    Raises:
        ValueError: The folder for temporary files cannot be written to.
    """
    try:
        with tempfile.TemporaryFile("w", encoding="utf-8", newline="") as file:
            file.writelines(recall.text())
            file.flush()
            return Path(f"/dev/fd/{os.dup(file.fileno())}")
    except OSError as error:
        raise ValueError(
            f"corpus recall: cannot write to {tempfile.gettempdir()}: {error.strerror or error}"
        ) from error
