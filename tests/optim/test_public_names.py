import pytest

from lightning_llm import optim


def test_every_public_name_is_what_it_says():
    assert dir(optim) == sorted(optim.__all__)
    for name in optim.__all__:
        assert getattr(optim, name).__name__ == name
        assert getattr(optim, name).__module__.startswith("lightning_llm.optim.")


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match=r"module 'lightning_llm\.optim' has no attribute 'nothing'"):
        optim.nothing  # noqa: B018
