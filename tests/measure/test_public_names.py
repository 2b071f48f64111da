import pytest

from lightning_llm import measure


def test_every_public_name_is_what_it_says():
    assert dir(measure) == sorted(measure.__all__) == ["MemoryMeter", "Phase", "Timing", "interleave"]
    for name in measure.__all__:
        assert getattr(measure, name).__name__ == name


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match=r"module 'lightning_llm\.measure' has no attribute 'nothing'"):
        measure.nothing  # noqa: B018
