"""The tables of docs/config.md: what the script writes, whole, and nothing without a line or a unit."""

import re
import runpy

import pytest

from tests.docs.markdown import ROOT

PAGE = ROOT / "docs" / "config.md"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "docs" / "config_keys.py"), run_name="config_keys")


def test_the_tables_of_the_config_keys_are_current(script):
    text = PAGE.read_text(encoding="utf-8")
    assert script["page"](text) == text, "write them again: python docs/config_keys.py"


def test_every_option_of_fit_is_in_a_table_once(script):
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.*?) \| (.+) \|$", script["tables"](), re.M)
    tables = script["tables"]().split("## Optimizers")[0]
    named = [
        f"{section}.{key}" if section else key
        for section, part in re.findall(r"^## [^:\n]+(?:: `([\w.]+)`)?\n(.+?)(?=^## |\Z)", tables, re.M | re.S)
        for key in re.findall(r"^\| `(\w+)`", part, re.M)
    ]
    options = [key for key, *_ in script["keys_of"](script["fit_parser"]())]
    assert sorted(named) == sorted(options)
    assert {"model.architecture.mlp", "data.mixture", "trainer.max_steps", "keep_freed_memory"} <= set(named)
    assert len(rows) > len(options)
    assert all(line[0].isupper() or line[0] in "`0123456789" for *_, line in rows)


def test_no_line_and_no_unit_is_left_over(script):
    names = {key for key, *_ in script["keys_of"](script["fit_parser"]())}
    names |= {key for kinds in script["CLASSES"].values() for kind in kinds for key, *_ in made(script, kind)}
    assert set(script["LINES"]) | set(script["UNITS"]) <= names


def made(script, kind):
    return list(script["keys_of"](script["of_class"](kind)))


class Undocumented:
    def __init__(self, size: int = 1) -> None: ...


class Unitless:
    """It has a line.

    Args:
        amount: How large it is.
    """

    def __init__(self, amount: int | None = 1) -> None: ...


class Documented:
    """It has a line, and needs no unit.

    Args:
        kind: What it is. ``None``: nothing. And more of it (Somebody 2001).
    """

    def __init__(self, kind: str | None = "a") -> None: ...


@pytest.mark.parametrize(("kind", "message"), [(Undocumented, "size has no line"), (Unitless, "amount is a number")])
def test_a_key_without_line_or_unit_is_an_error(script, kind, message):
    with pytest.raises(ValueError, match=message):
        made(script, kind)


def test_a_row_has_type_default_and_the_first_sentence(script):
    assert made(script, Documented) == [("kind", "str or null", "`a`", "", "What it is. `null`: nothing.")]
