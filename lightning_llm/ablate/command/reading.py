"""Numbers in the output of a program: the pattern that finds them, line by line as they are printed. No torch."""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_llm.ablate.command.template import names_in
from lightning_llm.io.untrusted import MIB, read_text, shown

NUMBER = "number"
STEP = "step"
ANY = "..."
PLACEHOLDERS = {NUMBER: "the metric", STEP: "the step that it belongs to", ANY: "any text"}
# What a program may tell: hashes of what it uses, and facts that matching rules compare
TOLD = ("batches", "initial_values")
TOLD_IN_FILE = ("batches", "validation_batches")
FACTS = ("parameters", "flops_per_token", "tokens_per_step")
LARGEST_FILE = 64 * MIB
_PLACEHOLDER = re.compile(r"(\{\{|\}\}|\{[^{}]*\})")
_SHOWN_AS = {
    f"{{{NUMBER}}}": r"(?P<number>[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan\b|inf(?:inity)?\b))",
    f"{{{STEP}}}": r"(?P<step>\d+)",
    f"{{{ANY}}}": r".*?",
    "{{": r"\{",
    "}}": r"\}",
}
_TOLD = re.compile(rf"\s*({'|'.join((*TOLD, *FACTS))})\s*[:=]\s*(\S{{1,200}})\s*")
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


class Match(NamedTuple):
    """A number that was printed.

    Attributes:
        step: That it belongs to; ``None``: the pattern has none.
        value: May be NaN or infinite.
    """

    step: int | None
    value: float


class Pattern:
    """A text with ``{number}``, and perhaps ``{step}``, that is looked for in each line of an output.

    Blanks stand for any blanks, ``{...}`` for any text, ``{{`` for a brace; everything else for itself.

    Args:
        text: As the user gave it.
        source: Names it in errors.

    Raises:
        ValueError: It has no number, or an unknown placeholder.
    """

    def __init__(self, text: str, source: str = "--read") -> None:
        names = names_in(text, PLACEHOLDERS, source)
        if names.count(NUMBER) != 1 or names.count(STEP) > 1:
            problem = "needs one {number}, the metric, and at most one {step}"
            raise ValueError(f"{source} {shown(text)} {problem}, such as 'step {{step}}: val loss {{number}}'")
        self.text = text
        parts = _PLACEHOLDER.split(text)
        self._literal = max(parts[::2], key=lambda part: len(part.strip())).strip().split(" ")[0]
        self._regex = re.compile("".join(map(_regex_of, parts)), re.IGNORECASE)

    @property
    def name(self) -> str:
        """The words before the number, as the name of a metric."""
        before = self.text.partition(f"{{{NUMBER}}}")[0].rpartition("}")[2]
        return "_".join(re.findall(r"[\w/.@-]+", before)).strip("-._/") or "metric"

    def matches(self, line: str) -> Iterator[Match]:
        """All numbers of a line."""
        if self._literal and self._literal.casefold() not in line.casefold():  # 20 times faster than the expression
            return
        for found in self._regex.finditer(line):
            groups = found.groupdict()
            step = groups.get(STEP)
            yield Match(None if step is None else int(step), float(groups[NUMBER]))


def _regex_of(part: str) -> str:
    if part in _SHOWN_AS:
        return _SHOWN_AS[part]
    return r"\s+".join(map(re.escape, re.split(r"\s+", part)))


def visible(line: str) -> str:
    """A line as a terminal shows it: without escape sequences, and without what a carriage return overwrote."""
    segments = [segment for segment in _ESCAPES.sub("", line).split("\r") if segment.strip()]
    return segments[-1] if segments else ""


class Output:
    """Reads the output of one run.

    Args:
        pattern: What is looked for; ``None``: the metric is in a file.

    Attributes:
        found: All numbers, in order.
        told: What the program says of itself, by name.
        last: The last line that has something.
    """

    def __init__(self, pattern: Pattern | None) -> None:
        self._pattern = pattern
        self.found: list[Match] = []
        self.told: dict[str, str] = {}
        self.last = ""
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        """The SHA-256 of all lines: equal ones are of programs that did the same."""
        return self._digest.hexdigest()

    def take(self, line: str) -> None:
        """Read one more line."""
        shown_line = visible(line)
        if not shown_line:
            return
        self.last = shown_line
        self._digest.update(f"{shown_line}\n".encode("utf-8", errors="replace"))
        if self._pattern is not None:
            self.found.extend(self._pattern.matches(shown_line))
        if told := _TOLD.fullmatch(shown_line):
            self.told[told[1]] = told[2]


def told_in(path: Path) -> dict[str, str]:
    """Hashes of the batches of a run in a JSON file, such as ``summary.json`` of ``fit``."""
    try:
        content = json.loads(read_text(path, LARGEST_FILE))
    except (OSError, ValueError):
        return {}
    told = content if isinstance(content, Mapping) else {}
    return {name: told[name] for name in TOLD_IN_FILE if isinstance(told.get(name), str)}


def number_in(path: Path, key: str) -> list[Match]:
    """The numbers of a file that a run wrote: of JSON one, of JSON lines one for each line that has it.

    Args:
        path: The file; one of JSON lines is named ``.jsonl``.
        key: Of the number; dots go into nested ones. Lines with a ``step`` make a curve.

    Raises:
        ValueError: It is no such file, or has no such number.
        OSError: It cannot be read.
    """
    text = read_text(path, LARGEST_FILE)
    try:
        records = [json.loads(line) for line in text.splitlines() if line.strip()] if path.suffix == ".jsonl" else []
        records = records or [json.loads(text)]
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from None
    found = [(record, _at(record, key)) for record in records]
    numbers = [(record, value) for record, value in found if isinstance(value, int | float)]
    if not numbers:
        keys = sorted(str(name) for name in records[-1])[:20] if isinstance(records[-1], Mapping) else []
        raise ValueError(f"{path.name} has no number {key}: it has {', '.join(keys) or 'no keys'}")
    return [Match(_step(record) if len(numbers) > 1 else None, float(value)) for record, value in numbers]


def _at(record: Any, key: str) -> Any:
    if isinstance(record, Mapping) and key in record:
        return record[key]
    for name in key.split("."):
        record = record.get(name) if isinstance(record, Mapping) else None
    return record


def _step(record: Any) -> int | None:
    step = record.get("step") if isinstance(record, Mapping) else None
    return step if type(step) is int else None


def is_finite(value: float | None) -> bool:
    """Whether it is a number that is neither NaN nor infinite."""
    return value is not None and math.isfinite(value)
