"""A step setting costs a field and the place that uses it: one that is added here reaches plan and estimate.

And how a global batch is divided.
"""

import dataclasses
import json

import pytest

from lightning_llm.__main__ import main
from lightning_llm.accounting import estimate as estimates
from lightning_llm.accounting import planner, step_memory
from lightning_llm.accounting.hardware import Reserve
from lightning_llm.accounting.sharding import rank_memory
from lightning_llm.accounting.step_settings import StepSettings, rows_per_micro_batch, weight_dtype
from lightning_llm.accounting.step_time import GENERIC, CostModel
from lightning_llm.model.config import ModelConfig
from lightning_llm.training import run_config

CONFIG = ModelConfig(vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithBuffers(StepSettings):
    """A new setting: bytes that each process holds besides."""

    buffers: int = 0


@pytest.fixture
def with_buffers(monkeypatch):
    """The place that uses it."""

    def shared(config, points, settings):
        memory = rank_memory(config, points, settings)
        return dataclasses.replace(memory, peak=memory.peak + settings.buffers)

    for module in (planner, estimates):
        monkeypatch.setattr(module, "rank_memory", shared)


def planned(**settings):
    step = WithBuffers(rows=1, context_length=32, **settings)
    space = planner.SearchSpace(
        config=CONFIG, cost_model=CostModel(device=GENERIC["cpu"]), step=step, global_batch_size=8
    )
    return planner.Planner(space).fastest(float("inf"))


def test_a_new_setting_reaches_the_plan(with_buffers):
    without, plan = planned(), planned(buffers=1000)
    assert plan.choice == without.choice
    assert plan.memory.peak == without.memory.peak + 1000


def test_a_new_setting_reaches_the_estimate(with_buffers, monkeypatch, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(json.dumps({"model": {"architecture": {"vocab_size": 200}}}))
    words = ["estimate", "--config", str(tmp_path / "config.yaml"), "--json", str(tmp_path / "out.json")]
    peaks = []
    for settings in (WithBuffers, lambda **fields: WithBuffers(**fields, buffers=1000)):
        monkeypatch.setattr(run_config, "StepSettings", settings)
        assert main(words) == 0
        report = json.loads((tmp_path / "out.json").read_text())
        peaks.append((report["memory"]["peak"], report["settings"]["buffers"]))
    (without, _), (peak, buffers) = peaks
    assert (peak, buffers) == (without + 1000, 1000)


def test_the_trace_of_one_process_is_the_same_whatever_processes_share():
    step = StepSettings(rows=2, context_length=32, precision="bf16-mixed", accumulation=3)
    shared = dataclasses.replace(step, strategy="ddp", world_size=4, gradient_views=True, state_itemsize=2)
    assert shared.single_process == step.single_process
    assert step.single_process.precision == "bf16-mixed"
    # FSDP2 gathers in bf16
    assert dataclasses.replace(shared, strategy="fsdp2").single_process.precision == "bf16-true"
    assert dataclasses.replace(step, strategy="fsdp2").single_process == step.single_process


def test_only_one_precision_has_weights_in_bfloat16():
    names = {precision: weight_dtype(precision) for precision in ("32-true", "bf16-mixed", "bf16-true")}
    assert names == {"32-true": "float32", "bf16-mixed": "float32", "bf16-true": "bfloat16"}


def test_step_memory_takes_settings_or_keywords_or_both():
    step = StepSettings(rows=2, context_length=32, loss_chunks=0)
    memory = step_memory(CONFIG, step)
    assert memory == step_memory(CONFIG, rows=2, context_length=32, loss_chunks=0)
    assert memory == step_memory(CONFIG, dataclasses.replace(step, rows=1), rows=2)
    assert step_memory(CONFIG, step, rows=4).peak > memory.peak
    with pytest.raises(TypeError, match="row_count"):
        step_memory(CONFIG, row_count=2, context_length=32)


def test_rows_must_divide_the_global_batch():
    run = estimates.RunConfig(
        raw={},
        config=CONFIG,
        device=None,
        precision_reason="",
        tf32=False,
        step=StepSettings(rows=1, context_length=32, world_size=2),
        global_batch_size=12,
        micro_batch_size=3,
        max_steps=0,
        optimizer=estimates.Optimizer("AdamW", True, 2, None),
        reserve=Reserve(),
    )
    assert (run.step_of(None).rows, run.step_of(None).accumulation) == (6, 1)
    assert (run.step_of(3).rows, run.step_of(3).accumulation) == (3, 2)
    with pytest.raises(ValueError, match=r"12 cannot be divided by 2 devices times data.micro_batch_size 4"):
        run.step_of(4)


@pytest.mark.parametrize(
    ("size", "micro", "devices", "rows"), [(8, None, 1, 8), (8, None, 2, 4), (8, 2, 2, 2), (8, 8, 1, 8)]
)
def test_rows_of_a_micro_batch(size, micro, devices, rows):
    assert rows_per_micro_batch(size, micro, devices) == rows


@pytest.mark.parametrize(
    ("size", "micro", "devices", "by"),
    [
        (8, None, 3, "3 devices"),
        (2, None, 3, "3 devices"),
        (8, 3, 1, "1 device times data.micro_batch_size 3"),
        (8, 8, 2, "2 devices times data.micro_batch_size 8"),
        (8, -1, 1, "1 device times data.micro_batch_size -1"),
    ],
)
def test_a_batch_that_cannot_be_divided(size, micro, devices, by):
    with pytest.raises(ValueError, match=f"^data.global_batch_size {size} cannot be divided by {by}: change one$"):
        rows_per_micro_batch(size, micro, devices)
