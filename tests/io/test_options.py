import dataclasses
from typing import Literal

import pytest

from lightning_llm.io.options import check_options, number, option


@dataclasses.dataclass(frozen=True)
class Options:
    name: str = option(dataclasses.MISSING, "a name", lambda value: isinstance(value, str) and value != "")
    share: float = number(0.5, "from 0 to 1", lambda value: 0 <= value <= 1)
    kind: Literal["a", "b"] = "a"


def test_all_problems_are_reported_at_once():
    check_options(Options("x"))
    with pytest.raises(ValueError, match="; ") as caught:
        check_options(Options("", share="much", kind="c"))
    assert str(caught.value).split("; ") == [
        "name must be a name, got ''",
        "share must be from 0 to 1, got 'much'",
        "kind 'c' is unknown: choose one of a, b",
    ]
    with pytest.raises(ValueError, match=r"^share must be from 0 to 1, got True$"):
        check_options(Options("x", share=True))
