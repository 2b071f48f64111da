"""What the report of a step that ran out of memory advises."""

import pytest

from lightning_llm.accounting.counts import hidden_matrix_parameters
from lightning_llm.accounting.step_settings import StepSettings
from lightning_llm.model.config import ModelConfig
from lightning_llm.training.callbacks.memory_advice import Saving, StepCase, advise, cheapest

CONFIG = ModelConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
MUON = "model.optimizer lightning_llm.optim.MuonAdamW"


def muon(**settings):
    """What the advice says of MuonAdamW."""
    advice = advise(StepCase(CONFIG, "AdamW", StepSettings(rows=4, context_length=32, **settings)))
    return {saving.setting: saving for saving in advice.savings}.get(MUON)


def test_the_cheapest_come_first_one_of_each_option():
    savings = [
        Saving("a 1", 10, 0.1, ""),
        Saving("a 2", 100, 0.1, ""),
        Saving("b 1", 5, 0.0, ""),
        Saving("c 1", 9, 0, ""),
    ]
    assert [saving.setting for saving in cheapest(savings)] == ["c 1", "b 1", "a 2"]


@pytest.mark.parametrize(
    ("settings", "bytes_per_parameter"),
    [({}, 4), ({"precision": "bf16-true"}, 2), ({"precision": "bf16-mixed"}, 4)],
)
def test_muon_saves_a_moment_of_each_hidden_matrix(settings, bytes_per_parameter):
    assert muon(**settings).estimated_bytes_saved == bytes_per_parameter * hidden_matrix_parameters(CONFIG)


def test_muon_saves_nothing_where_adamw_has_moments_of_bfloat16():
    assert muon(state_itemsize=2) is None


def test_a_step_orthogonalizes_once_for_all_its_micro_batches():
    alone, accumulated = muon(), muon(accumulation=8)
    assert accumulated.estimated_extra_work == pytest.approx(alone.estimated_extra_work / 8)


def test_processes_that_shard_the_matrices_share_what_muon_saves_and_costs():
    alone, sharded, copied = muon(), muon(strategy="fsdp2", world_size=4), muon(world_size=4)
    assert sharded.estimated_bytes_saved == alone.estimated_bytes_saved // 4
    assert sharded.estimated_extra_work == pytest.approx(alone.estimated_extra_work / 4)
    assert copied == alone
