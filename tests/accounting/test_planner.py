"""The planner: its plans against measured steps, against trying everything, and against one another."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_llm.accounting import find_device, step_memory
from lightning_llm.accounting.hardware import Reserve
from lightning_llm.accounting.measured_parts import measure_parts
from lightning_llm.accounting.planner import Planner, SearchSpace, StepChoice, choose, configured, divisors, row_counts
from lightning_llm.accounting.step_settings import StepSettings
from lightning_llm.accounting.step_time import GENERIC, CostModel
from lightning_llm.model.config import ModelConfig
from lightning_llm.ops.sizes import PLANNED_CHUNK_BYTES, loss_rows
from tests.accounting.test_memory import drawn, second_step

pytestmark = pytest.mark.usefixtures("traced_once")

CPU = CostModel(device=GENERIC["cpu"])
GPU = CostModel(device=find_device("H200"))


def model(**changes):
    sizes = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return ModelConfig(**{**sizes, "intermediate_size": 256, **changes})


def space(config=None, *, global_batch_size=12, strategies=("ddp",), cost_model=CPU, **settings):
    """The settings of a step, and what may be chosen."""
    choices = {name: settings.pop(name) for name in ("loss_chunks", "state_dtypes", "reserve") if name in settings}
    settings.setdefault("context_length", 64)
    return SearchSpace(
        config=config or model(),
        cost_model=cost_model,
        step=StepSettings(rows=1, device="cuda" if cost_model is GPU else "cpu", **settings),
        global_batch_size=global_batch_size,
        strategies=strategies,
        **choices,
    )


@st.composite
def spaces(draw):
    """Small ones, of all kinds of model."""
    pick = st.sampled_from
    mlp = draw(pick(["memory_optimized_swiglu", "memory_optimized_swiglu", "swiglu", "gelu"]))
    config = model(
        vocab_size=draw(pick([60, 900])),
        hidden_size=draw(pick([32, 96])),
        num_hidden_layers=draw(pick([1, 2])),
        mlp=mlp,
        norm=draw(pick(["rmsnorm", "layernorm"])),
        tie_word_embeddings=draw(st.booleans()),
    )
    return space(
        config,
        global_batch_size=draw(pick([1, 4, 12])),
        context_length=draw(pick([48, 128])),
        precision=draw(pick(["32-true", "bf16-true", "bf16-mixed"])),
    )


def budget_within(planner, share):
    """A memory between the least that does and what the fastest of all needs."""
    least, most = planner.smallest().memory.peak, planner.fastest(float("inf")).memory.peak
    return round(least + share * (most - least))


def measured(planned, choice):
    """Bytes at the peak of a real step: parameters, state, and all else."""
    config = configured(planned.config, choice)
    return sum(
        second_step(
            config,
            rows=choice.rows,
            context_length=planned.step.context_length,
            precision=planned.step.precision,
            loss_chunks=choice.loss_chunks,
            accumulation=min(2, planned.global_batch_size // choice.rows),
        )
    )


@pytest.mark.slow
@drawn(8)
@given(spaces(), st.floats(0.01, 0.9))
def test_a_plan_fits_when_run_and_the_next_larger_micro_batch_does_not(planned, share):
    planner = Planner(planned)
    budget = budget_within(planner, share)
    chosen = choose(planner, budget)
    assert measured(planned, chosen.choice) <= budget * 1.005  # the prediction's error where it uses all there is
    larger = [rows for rows in planner.rows if rows > chosen.choice.rows]
    if larger and chosen.choice.rows >= planned.global_batch_size // 4:
        more = dataclasses.replace(chosen.choice, rows=larger[0])
        is_slower = planner.time_of(more).seconds >= chosen.time.seconds
        assert is_slower or measured(planned, more) > budget


class Gated(nn.Module):
    """An MLP that the accounting does not know."""

    def __init__(self, config):
        super().__init__()
        self.wide = nn.Linear(config.hidden_size, config.intermediate_size)
        self.narrow = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        wide = self.wide(x)
        return self.narrow(wide.tanh() * wide.sigmoid())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_plan_with_an_mlp_of_the_users_own_fits_too(precision, share):
    config = model(vocab_size=60, hidden_size=64, num_hidden_layers=2, mlp=f"{__name__}.Gated")
    planned = space(config, global_batch_size=12, context_length=128, precision=precision)
    with pytest.raises(ValueError, match="has no formula"):
        Planner(planned)
    step = dataclasses.replace(planned.step, measured=measure_parts(config, precision, 16))
    planner = Planner(dataclasses.replace(planned, step=step))
    budget = budget_within(planner, share)
    chosen = choose(planner, budget)
    assert chosen.choice.rows < 12 or chosen.choice.recompute != "none"
    assert 0.9 * chosen.memory.peak <= measured(planned, chosen.choice) <= 1.05 * budget


def everything(planner):
    """All choices of a space."""
    planned = planner.space
    recompute = ("none", "attention", "block") if len(planner.levels) > 1 else ("none", "mlp", "attention", "block")
    choices = itertools.product(
        planner.rows, planner.levels, recompute, planned.loss_chunks, planned.state_dtypes, planned.strategies
    )
    return [StepChoice(*choice) for choice in choices]


@pytest.mark.slow
@drawn(4)
@given(spaces(), st.floats(0, 1.1))
def test_the_search_finds_what_trying_everything_finds(planned, share):
    planner = Planner(planned)
    budget = budget_within(planner, share)
    found = planner.fastest(budget).time.seconds
    fitting = [s for s in everything(planner) if planner.plan(s).memory.peak <= budget]
    assert found == min(planner.time_of(s).seconds for s in fitting)


def test_trying_everything_with_several_processes():
    shared = space(
        model(num_hidden_layers=2),
        cost_model=GPU,
        world_size=2,
        strategies=("ddp", "fsdp2"),
        state_dtypes=(None, "bfloat16"),
        precision="bf16-mixed",
    )
    planner = Planner(shared)
    for share in (0, 0.1, 0.3, 0.6):
        budget = budget_within(planner, share)
        fitting = [s for s in everything(planner) if planner.memory_of(s).peak <= budget]
        assert planner.fastest(budget).time.seconds == min(planner.time_of(s).seconds for s in fitting)


@pytest.mark.slow
@drawn(3)
@given(spaces(), st.lists(st.floats(0, 1.5), min_size=3, max_size=5))
def test_more_memory_is_never_slower(planned, shares):
    planner = Planner(planned)
    seconds = [planner.fastest(budget_within(planner, share)).time.seconds for share in sorted(shares)]
    assert seconds == sorted(seconds, reverse=True)
    frontier = planner.frontier(budget_within(planner, max(shares)))
    assert [plan.memory.peak for plan in frontier] == sorted(plan.memory.peak for plan in frontier)
    assert all(slow.time.seconds > fast.time.seconds for slow, fast in itertools.pairwise(frontier))


def test_on_cuda_a_plan_has_chunks_of_the_loss_that_are_small(monkeypatch):
    config = model(vocab_size=50_257)
    settings = {"context_length": 1024, "precision": "bf16-mixed", "loss_chunks": (None,)}
    planner = Planner(space(config, global_batch_size=8, cost_model=GPU, **settings))
    chosen = choose(planner, 10 * 2**30).choice
    rows = loss_rows(chosen.rows * 1024, 50_257, 2, "cuda", chosen.loss_chunks)
    assert 64 * 2**20 < rows * 50_257 * 2 <= PLANNED_CHUNK_BYTES["cuda"]
    largest = Planner(space(config, global_batch_size=8, cost_model=GPU, **{**settings, "loss_chunks": (1,)}))
    assert planner.memory_of(chosen).peak < largest.memory_of(dataclasses.replace(chosen, loss_chunks=1)).peak
    small = Planner(space(model(), cost_model=GPU, loss_chunks=(None,)))
    assert choose(small, 10 * 2**30).choice.loss_chunks is None  # one chunk in any case
    on_cpu = Planner(space(config, global_batch_size=8, **settings))
    assert choose(on_cpu, 10 * 2**30).choice.loss_chunks is None


def test_the_memory_of_a_plan_is_that_of_the_accounting():
    planner = Planner(space())
    chosen = choose(planner, budget_within(planner, 0.4))
    whole = step_memory(
        configured(planner.space.config, chosen.choice),
        rows=chosen.choice.rows,
        context_length=64,
        loss_chunks=chosen.choice.loss_chunks,
        accumulation=chosen.accumulation,
    )
    assert chosen.memory.peak == whole.peak
    assert chosen.memory.optimizer_state == whole.optimizer_state


def test_too_little_memory_says_the_least_that_does():
    planner = Planner(space())
    least = planner.smallest().memory.peak
    with pytest.raises(ValueError, match=f"memory of 1,000 bytes is too little: the smallest that fits is {least:,}"):
        choose(planner, 1000)
    assert choose(planner, least).memory.peak <= least
    with pytest.raises(ValueError, match="too little"):
        choose(planner, least - 1)


def test_a_plan_leaves_its_reserve_free():
    reserve = Reserve(fixed=10_000, share=0.05)
    free, planner = Planner(space()), Planner(space(reserve=reserve))
    budget = choose(free, budget_within(free, 0.4)).memory.peak
    chosen = choose(planner, budget)
    assert chosen.needed == reserve.around(chosen.memory.peak) <= budget
    assert choose(free, budget).memory.peak == choose(free, budget).needed == budget
    assert all(plan.needed == reserve.around(plan.memory.peak) for plan in planner.frontier(budget))
    least = planner.smallest().needed
    assert choose(planner, least).needed <= least
    with pytest.raises(ValueError, match=f"the smallest that fits is {least:,}"):
        choose(planner, least - 1)


def test_reducing_once_is_faster_and_needs_more_where_there_are_several_micro_batches():
    shared = space(
        model(num_hidden_layers=2),
        cost_model=GPU,
        world_size=2,
        strategies=("fsdp2", "fsdp2_deferred"),
        loss_chunks=(0,),
    )
    one = {"checkpoint_level": 0, "recompute": "none", "loss_chunks": 0, "state_dtype": None}
    planner = Planner(shared)
    for rows in (1, 6):
        each, once = (planner.plan(StepChoice(rows=rows, strategy=name, **one)) for name in shared.strategies)
        if rows == 6:
            assert (each.memory, each.time) == (once.memory, once.time)
        else:
            assert once.memory.peak > each.memory.peak
            assert once.memory.gradients == 2 * each.memory.gradients
            assert once.time.communication < each.time.communication
    assert planner.fastest(float("inf"), lambda choice: choice.rows == 1).choice.strategy == "fsdp2_deferred"


def test_a_batch_that_processes_cannot_share_is_refused():
    with pytest.raises(ValueError, match="global_batch_size 12 cannot be divided by 5 devices"):
        Planner(space(world_size=5))


def test_levels_are_only_for_models_whose_layers_all_have_them():
    optimized, mixed = model(), model(layers=[{"mlp": "gelu"}, {}])
    assert [Planner(space(config)).levels for config in (optimized, mixed)] == [(0, 1, 2), (0,)]
    smallest = Planner(space(mixed)).smallest()
    whole = step_memory(configured(mixed, smallest.choice), Planner(space(mixed)).step_of(smallest.choice))
    assert smallest.memory.peak == whole.peak


def test_of_very_many_divisors_some_are_tried():
    assert row_counts(720) == divisors(720)
    assert len(divisors(5040)) == 60
    assert len(row_counts(5040)) <= 36
    rows = row_counts(720_720)
    assert len(divisors(720_720)) == 240
    assert rows[0] == 1
    assert rows[-1] == 720_720
    assert set(rows) < set(divisors(720_720))
    assert len(rows) <= 36
    assert max(after / before for before, after in itertools.pairwise(rows)) <= 2


def test_all_rows_at_once_are_found_where_few_rows_save_as_many_logits():
    """One row of 512 tokens has one chunk of logits; 105 rows save little more, since each chunk is as large."""
    config = model(vocab_size=32_768, num_hidden_layers=1, mlp="swiglu")
    planner = Planner(space(config, global_batch_size=105, cost_model=GPU, context_length=512, precision="bf16-mixed"))
    whole = planner.plan(StepChoice(105, 0, "block", None, None, "ddp"))
    assert planner.fastest(whole.needed).time.seconds <= whole.time.seconds
