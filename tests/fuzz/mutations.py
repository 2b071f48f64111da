"""Edits of valid files: what a stranger, a damaged disk or a typing mistake makes of them.

An edit is drawn without knowing the file; it finds its place when it is applied, so that one strategy serves all files.
"""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

CANARY = "canary_parts.Part"  # a module in the folder of each draw, which notes that it was imported
PATHS = ("../../x", "/etc/passwd", "/dev/zero", ".", "", "a/../../x", "~", "file:///etc/passwd", "http://127.0.0.1:9/x")
IMPORTS = ("os.system", CANARY, "builtins.exec", "subprocess.Popen", "torch.nn.Linear", "canary_parts")
INSIDE = (
    "lightning_llm.cli.standard_streams.os.system",
    "lightning_llm.ablate.slurm.subprocess.Popen",
    "lightning_llm.x.y",
)
SHELL = {"args": "touch made-by-a-shell", "shell": True}
CONTROL = ("\x1b[31mred", "two\nlines\r", "\x00", "\ud800", "\u202egnp.exe", "[red]markup[/]", "x" * 5000, "é∕\u2028")
EXTREME = (0, 1, 10**6, 10**15, 2**63, -(2**63), 10**400, 1e308, 1e-320, float("nan"), float("inf"), -float("inf"))
KINDS = (
    *("drop", "duplicate", "retype", "negate", "extreme", "extreme", "control", "path", "import"),
    *("class", "resolved", "text", "nest", "swap", "huge"),
)
RAW_KINDS = ("truncate", "flip", "insert", "repeat", "aliases", "depth")


@dataclasses.dataclass(frozen=True)
class Edit:
    """What is done, where (a number that is taken modulo the places there are), and with which of its values."""

    kind: str
    place: int
    choice: int


def edits(kinds: Sequence[str] = KINDS, most: int = 3) -> st.SearchStrategy[list[Edit]]:
    """One to ``most`` edits. From one number: hypothesis would draw the same places again and again."""

    def made(seed: int) -> list[Edit]:
        chance = Random(seed)
        numbers = range(chance.randint(1, most))
        return [Edit(chance.choice(kinds), chance.randrange(2**16), chance.randrange(2**16)) for _ in numbers]

    return st.integers(0, 2**32 - 1).map(made)


def raw_edits() -> st.SearchStrategy[list[Edit]]:
    """An edit of bytes, for one draw in six; else none."""
    return edits(RAW_KINDS, most=1).map(lambda found: found if found[0].choice % 6 == 0 else [])


def places(tree: Any, outer: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value below the root, leaves and branches."""
    if isinstance(tree, dict):
        inner: Any = tree.items()
    elif isinstance(tree, list | tuple):
        inner = enumerate(tree[:8])
    else:
        return
    for key, value in inner:
        yield (*outer, key)
        yield from places(value, (*outer, key))


def edited(tree: Any, drawn: Sequence[Edit], allowed: Callable[[tuple[Any, ...]], bool] = lambda keys: True) -> Any:
    """A changed copy of the tree, and the keys of what was changed."""
    tree, touched = _mutable(copy.deepcopy(tree)), []
    for edit in drawn:
        found = [keys for keys in places(tree) if allowed(keys)]
        if found:
            keys = found[edit.place % len(found)]
            _apply(tree, keys, edit)
            touched.append(keys)
    return tree, touched


def _mutable(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _mutable(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_mutable(value) for value in tree]
    return tree


def _apply(tree: Any, keys: tuple[Any, ...], edit: Edit) -> None:
    *outer, last = keys
    for key in outer:
        tree = tree[key]
    if edit.kind == "drop":
        del tree[last]
    elif edit.kind == "duplicate":
        if isinstance(tree, list):
            tree.append(copy.deepcopy(tree[last]))
        else:
            name = f"{last}_2" if edit.choice % 2 else last + 1 if isinstance(last, int) else last.upper()
            tree[name] = copy.deepcopy(tree[last])
    elif edit.kind == "swap":  # with a value from elsewhere in the same branch
        others = list(tree if isinstance(tree, dict) else range(len(tree)))
        other = others[edit.choice % len(others)]
        tree[last], tree[other] = tree[other], tree[last]
    else:
        tree[last] = changed(tree[last], edit)


def changed(value: Any, edit: Edit) -> Any:
    """Another value."""
    if isinstance(value, torch.Tensor):
        return _changed_tensor(value, edit)
    if edit.kind == "negate":
        return -value - (value == 0) if isinstance(value, int | float) else -1
    if edit.kind == "retype":
        return _pick([str(value), [value], {"x": value}, None, True, 1.5, "", [], {}, b"bytes".hex()], edit)
    if edit.kind == "class":
        return _pick([{"class_path": CANARY}, {"class_path": "os.system", "init_args": {"command": "x"}}], edit)
    if edit.kind == "resolved":  # a name inside this package that is something else's
        path = _pick(INSIDE, edit)
        spec = {"class_path": path, "init_args": SHELL}
        return (path, spec, [spec])[edit.choice // len(INSIDE) % 3]
    if edit.kind == "text":  # a parser may read it as the options that it describes
        inner = _pick([{"class_path": CANARY}, [{"class_path": CANARY}], {"class_path": INSIDE[1]}, [value]], edit)
        return _pick([json.dumps(inner, default=str), f"!!python/name:{CANARY}", "file:canary.yaml"], edit)
    if edit.kind == "huge":
        return _pick(["ab/" * 60_000, list(range(20_000)), {f"k{n}": n for n in range(20_000)}, "9" * 4000], edit)
    if edit.kind == "nest":
        nested: Any = value
        for _ in range(_pick([1, 20, 60], edit)):  # deeper by raw edits: writers of YAML recurse
            nested = [nested] if edit.choice % 2 else {"x": nested}
        return nested
    return _pick({"extreme": EXTREME, "control": CONTROL, "path": PATHS, "import": IMPORTS}[edit.kind], edit)


def _changed_tensor(value: torch.Tensor, edit: Edit) -> Any:
    if edit.kind in ("retype", "class", "resolved", "text", "huge", "import", "path", "control"):
        types = (torch.float64, torch.int64, torch.bool, torch.complex64, torch.float16)
        return _pick([*(value.to(dtype) for dtype in types), value.tolist(), str(value), None, value.to_sparse()], edit)
    if edit.kind == "negate":
        return -value
    if edit.kind == "nest":
        return value[None]
    wide = torch.zeros(1).expand(10**9)
    odd = [
        value.flatten(),
        value[:0] if value.dim() else value[None],
        wide,
        torch.tensor(3.0),
        torch.cat([value.flatten()] * 2),
    ]
    if value.is_floating_point():
        odd += [torch.full_like(value, number) for number in (float("nan"), float("inf"), 1e30)]
    return _pick(odd, edit)


def _pick(values: Sequence[Any], edit: Edit) -> Any:
    return values[edit.choice % len(values)]


def edited_bytes(content: bytes, drawn: Sequence[Edit]) -> bytes:
    """A changed file."""
    for edit in drawn:
        place = edit.place * max(1, len(content)) // 2**16
        if edit.kind == "truncate":
            content = content[:place]
        elif edit.kind == "flip":
            content = (
                content[:place]
                + bytes(byte ^ (1 << edit.choice % 8) for byte in content[place : place + 1])
                + (content[place + 1 :])
            )
        elif edit.kind == "insert":
            content = (
                content[:place]
                + _pick([b"\x00", b"\xff\xfe", b"{", b"*a", b"\t", b"\x1b", b": "], edit)
                + (content[place:])
            )
        elif edit.kind == "repeat":
            content = content[:place] + content
        elif edit.kind == "aliases":
            content += b"\n" + _aliases(edit)
        elif edit.kind == "depth":
            count = _pick([100, 3000, 100_000], edit)
            content = b"[" * count + (content if edit.choice % 2 else b"]" * count)
    return content


def _aliases(edit: Edit) -> bytes:
    return _pick([b"data: &a [x, x]\nb: *a", b"data: &a {store: *a}", b"data: &a [*a]", b"<<: *nowhere"], edit)


VALUE_KINDS = ("extreme", "negate", "control", "path", "import", "class", "resolved", "text")
WORD_KINDS = (*VALUE_KINDS, *VALUE_KINDS, "drop", "duplicate", "nest")


def edited_words(words: Sequence[str], drawn: Sequence[Edit], keep: int) -> list[str]:
    """A changed command line; its first words stay. Numbers become numbers, so that options take most of them."""
    found = list(words)
    for edit in drawn:
        values = [place for place in range(keep, len(found)) if "=" in found[place] or not found[place].startswith("-")]
        if not values:
            continue
        place = values[edit.place % len(values)]
        name, equals, value = found[place].rpartition("=") if found[place].startswith("-") else ("", "", found[place])
        has_name = place > keep and found[place - 1].startswith("--") and "=" not in found[place - 1] + found[place]
        pair = slice(place - has_name, place + 1)
        if edit.kind == "drop":
            del found[pair]
        elif edit.kind == "duplicate":
            found += found[pair]
        elif edit.kind == "nest":
            found[place] = f"--{found[place]}"
        else:
            found[place] = f"{name}{equals}{_changed_word(value, edit)}"
    return found


def _changed_word(word: str, edit: Edit) -> str:
    if word.lstrip("-").isdigit():
        return str(_pick([0, -1, 1, 2, 7, 10**6, 10**15, 2**63, -(2**63), int(word) + 1, -int(word)], edit))
    if word.replace(".", "").isdigit():
        return str(_pick([0.0, -1.0, 1.0, 2.5, 1e-300, 1e308, float("nan"), float("inf"), -float("inf"), 1], edit))
    if edit.kind in ("class", "resolved", "text"):
        made = changed(None, edit)
        return made if isinstance(made, str) else json.dumps(made)
    return _pick({"control": CONTROL, "import": IMPORTS}.get(edit.kind, PATHS), edit)[:3000]
