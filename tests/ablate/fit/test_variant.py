"""A variant as ``fit`` reads it: the model that it has, and the length of its runs."""

from types import SimpleNamespace

import pytest

from lightning_llm.ablate.fit.variant import Variant
from lightning_llm.model.config import ModelConfig


def variant(max_steps=6, vocab_size=None, **model):
    model = SimpleNamespace(architecture=ModelConfig(vocab_size=vocab_size), **model)
    return Variant("gelu", {}, model, SimpleNamespace(vocab_size=65), SimpleNamespace(max_steps=max_steps))


def test_the_vocabulary_is_that_of_the_data_unless_the_config_has_one():
    read = variant()
    assert read.architecture == ModelConfig(vocab_size=65)
    assert read.model.architecture.vocab_size is None  # it is not changed by being asked
    assert variant(vocab_size=70).architecture == ModelConfig(vocab_size=70)


def test_a_run_has_a_known_length():
    assert variant().steps == 6
    for unknown in (-1, 0):
        with pytest.raises(ValueError, match=r"gelu: give trainer.max_steps: a comparison needs runs"):
            _ = variant(max_steps=unknown).steps


def test_initial_weights_are_drawn_unless_they_have_a_source():
    assert variant().initial_weights == ""
    assert variant(init_from=None).initial_weights == ""
    assert variant(init_from="a.ckpt").initial_weights == "a.ckpt"
