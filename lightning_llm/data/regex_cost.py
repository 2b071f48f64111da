"""Cost of matching a regular expression: some take hours, since they try every way to match."""

import math
import re
from typing import NamedTuple

RUN = 256  # length of the run of equal characters in which matches are counted
MOST_REPEATS = 1000  # of one part
_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
_GROUP = re.compile(r"\((?:\?(?:[:=!>]|<[=!]|<[A-Za-z_]\w*>|[im]*(?:-[im]+)?:))?")
_ESCAPE = re.compile(r"\\(?:[pPx]\{[^{}]*\}|u[0-9A-Fa-f]{4}|[dDwWsShHbBAzZGntrfveax0]|[^A-Za-z0-9])", re.DOTALL)
_FLAGS = re.compile(r"\(\?i\)")


class Cost(NamedTuple):
    """Cost of a part of a pattern at one place of a run of :data:`RUN` equal characters.

    Attributes:
        ways: In which it matches, all of which are tried if what follows does not match.
        alone: Of these, the ways that are tried if nothing follows that may not match.
        steps: Of one way, other than the characters of the run.
        is_sure: Whether it always matches, if only nothing.
        takes: Whether each match has at least one character.
    """

    ways: float = 1
    alone: float = 1
    steps: float = 1
    is_sure: bool = False
    takes: bool = False


_UNKNOWN = Cost(math.inf, math.inf)


def cost_of(pattern: str) -> Cost:
    """Cost of a pattern; infinite for unsupported syntax, such as back-references.

    Only a repeat before something that may not match is tried in all its ways: ``a+b`` has as many as the run is
    long, ``a+a+b`` its square, but ``a+b*`` one. A search of a run of n characters takes at most n² / RUN x ``alone``.
    """
    flags = _FLAGS.match(pattern)  # elsewhere it changes what the bars divide
    cost, end = _alternatives(pattern, flags.end() if flags else 0, 0)
    return cost._replace(alone=cost.alone * max(1, cost.steps / MOST_REPEATS)) if end == len(pattern) else _UNKNOWN


def _alternatives(pattern: str, place: int, depth: int) -> tuple[Cost, int]:
    """The cost of the alternatives that begin at a position, and their end."""
    alternatives: list[list[Cost]] = [[]]
    while place < len(pattern) and pattern[place] != ")" and depth < 30:
        if pattern[place] == "|":
            alternatives.append([])
            place += 1
            continue
        item, place = _repeated(pattern, *_item(pattern, place, depth))
        alternatives[-1].append(item)
    costs = [_sequence(items) for items in alternatives]
    ways, alone, steps = (sum(each) for each in list(zip(*costs, strict=True))[:3])
    return Cost(ways, alone, steps, any(c.is_sure for c in costs), all(c.takes for c in costs)), place


def _sequence(items: list[Cost]) -> Cost:
    last = max((place for place, item in enumerate(items) if not item.is_sure), default=0)
    tried = math.prod(item.ways for item in items[:last]) * math.prod(item.alone for item in items[last : last + 1])
    alone = tried + sum(item.alone - 1 for item in items[last + 1 :])
    ways = math.prod(item.ways for item in items)
    steps = sum(item.steps for item in items)
    return Cost(ways, alone, steps, all(item.is_sure for item in items), any(item.takes for item in items))


def _item(pattern: str, place: int, depth: int) -> tuple[Cost, int]:
    unknown = _UNKNOWN, len(pattern)
    if pattern[place] == "[":
        return _class(pattern, place)
    if pattern[place] == "\\":
        escape = _ESCAPE.match(pattern, place)
        return (Cost(takes=escape[0][1] not in "bBAzZG"), escape.end()) if escape else unknown
    if pattern[place] != "(":
        return Cost(takes=pattern[place] not in "^$"), place + 1
    group = _GROUP.match(pattern, place)
    if group is None or pattern[group.end() : group.end() + 1] == "?":
        return unknown
    cost, end = _alternatives(pattern, group.end(), depth + 1)
    if pattern[end : end + 1] != ")":
        return unknown
    is_look = group[0].endswith(("=", "!"))  # a look behind must end at this place, so that all its ways are tried
    return Cost(cost.ways, cost.ways, cost.steps) if is_look else cost, end + 1


def _class(pattern: str, place: int) -> tuple[Cost, int]:
    """Skips a character class, which may contain others."""
    depth = 0
    while place < len(pattern):
        if pattern[place] == "\\":
            escape = _ESCAPE.match(pattern, place)
            if not escape:
                break
            place = escape.end() - 1
        elif pattern[place] == "[":
            if pattern[place + 1 : place + 2] == "]" or pattern[place + 1 : place + 3] == "^]":
                break  # whether this bracket is literal depends on the dialect
            depth += 1
        elif pattern[place] == "]":
            depth -= 1
            if not depth:
                return Cost(takes=True), place + 1
        place += 1
    return _UNKNOWN, len(pattern)


def _repeated(pattern: str, item: Cost, place: int) -> tuple[Cost, int]:
    found = _QUANTIFIER.match(pattern, place)
    if not found or found[0] in ("{}", "{,}"):
        return item, place
    place = found.end()
    if found[0] == "?":
        item = Cost(item.ways + 1, item.alone + 1, item.steps, is_sure=True)
    else:
        low, high = (int((found[n] or "0")[:9]) for n in (1, 3))
        is_open = found[0] in "*+" or (bool(found[2]) and not found[3])
        most = RUN if is_open else max(low, high)
        is_fixed = not is_open and not found[2]
        ways = math.inf if item.ways > 1 or max(low, high) > MOST_REPEATS else 1.0 if is_fixed else float(max(1, most))
        is_sure = found[0] == "*" or (found[0] != "+" and low == 0 and not is_fixed)
        # a repeat of one way gives none of its characters back unless what follows does not match
        alone = 1.0 if ways < math.inf else ways
        takes = item.takes and (found[0] == "+" or low > 0)
        item = Cost(ways, alone, item.steps * max(1, low, high), is_sure, takes)
    if found[0] in "*+?" and pattern[place : place + 1] in ("?", "+"):  # lazy, possessive
        place += 1
    return (_UNKNOWN if _QUANTIFIER.match(pattern, place) else item), place
