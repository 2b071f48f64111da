"""Names of a package that are loaded when first used."""

import sys
from importlib import import_module

import pytest

from lightning_llm.lazy import lazy
from lightning_llm.optim import adamw, schedules

FIND, EXPORTED, NAMES = lazy("lightning_llm.optim")


def test_a_name_is_that_of_its_module():
    assert FIND("AdamW") is adamw.AdamW
    assert FIND("groups") is import_module("lightning_llm.optim.groups")  # a module is an attribute too
    assert "AdamW" in NAMES
    assert sorted(NAMES) == NAMES


def test_an_import_of_all_exports_what_its_module_defines():
    assert FIND("cosine_lr") is schedules.cosine_lr
    assert {"cosine_lr", "Schedule", "AdamW"} <= set(EXPORTED())
    assert "cosine_lr" not in NAMES  # known once the module is loaded
    assert not {"dataclasses", "ClassVar", "option"} & set(EXPORTED())  # which the module imports
    assert all(not name.startswith("_") for name in EXPORTED())
    assert FIND("__all__") == EXPORTED()


@pytest.mark.parametrize("name", ["missing", "_decayed_lr", "dataclasses"])
def test_another_name_is_none_of_the_package(name):
    with pytest.raises(AttributeError, match=f"module 'lightning_llm.optim' has no attribute '{name}'"):
        FIND(name)


def test_nothing_is_loaded_before_it_is_used(tmp_path, monkeypatch):
    """Of a package that is not this one only the text is read."""
    (tmp_path / "house").mkdir()
    text = "raise AssertionError\nif TYPE_CHECKING:\n    from lightning_llm.generation.rules import Rule as Own\n"
    (tmp_path / "house" / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    find, exported, names = lazy("house")
    assert exported() == names == ["Own"]
    assert "house" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match=r"lightning_llm\.generation\.rules"):
        find("Own")
