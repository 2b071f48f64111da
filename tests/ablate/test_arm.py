"""An arm of an experiment: the model that it has, the length of its runs, and its name in a sentence."""

from types import SimpleNamespace

import pytest

from lightning_llm.ablate.arm import BASELINE, Arm, titled
from lightning_llm.model.config import ModelConfig


def arm(max_steps=6, vocab_size=None):
    model = SimpleNamespace(architecture=ModelConfig(vocab_size=vocab_size))
    return Arm("gelu", {}, model, SimpleNamespace(vocab_size=65), SimpleNamespace(max_steps=max_steps))


def test_the_vocabulary_is_that_of_the_data_unless_the_config_has_one():
    read = arm()
    assert read.architecture == ModelConfig(vocab_size=65)
    assert read.model.architecture.vocab_size is None  # it is not changed by being asked
    assert arm(vocab_size=70).architecture == ModelConfig(vocab_size=70)


def test_a_run_has_a_known_length():
    assert arm().steps == 6
    for unknown in (-1, 0):
        with pytest.raises(ValueError, match=r"gelu: give trainer.max_steps: a comparison needs runs"):
            _ = arm(max_steps=unknown).steps


def test_the_baseline_has_an_article_and_a_variant_its_name():
    assert (titled(BASELINE), titled("gelu")) == ("the baseline", "gelu")
