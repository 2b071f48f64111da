"""What an experiment needs next, from its plan and the runs that have ended."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lightning_llm.ablate.experiment import Experiment, Looks
from lightning_llm.ablate.next_runs import Extension, RunKey, state_of

EXPERIMENT = Experiment(name="test", variants={"a": {}, "b": {}}, stop=Looks(pairs=(4, 6)), delta=None, alpha=0.05)


def losses(pairs, effects, names=("baseline", "null", "a", "b"), first=0):
    """The same noise for all but for a little: an effect of 1 is found with four pairs, one of 0 with none."""
    found = {RunKey("baseline-again", first): 3.0}
    for seed in range(first, first + pairs):
        for name in names:
            found[RunKey(name, seed)] = (
                3.0 + 0.1 * seed + effects.get(name, 0.0) + 1e-4 * (-1) ** seed * (name != "baseline")
            )
    return found


def names(runs):
    return [str(run) for run in runs]


def test_the_same_again_comes_first_then_the_seeds_of_the_first_look():
    state = state_of(EXPERIMENT, {})
    assert names(state.needed)[:6] == [
        *("baseline,seed=0", "baseline-again,seed=0", "null,seed=0", "a,seed=0", "b,seed=0"),
        *("baseline,seed=1",),
    ]
    assert len(state.needed) == 1 + 4 * 4
    assert (state.look, state.verdicts, state.unfinished, state.null) == (4, {}, ["a", "b"], None)


def test_seeds_begin_where_the_plan_says():
    state = state_of(replace(EXPERIMENT, first_seed=1000), {})
    assert names(state.needed)[:3] == ["baseline,seed=1000", "baseline-again,seed=1000", "null,seed=1000"]
    assert state.needed[-1] == RunKey("b", 1003)
    ended = state_of(replace(EXPERIMENT, first_seed=1000), losses(4, {"a": -1.0, "b": 1.0}, first=1000))
    assert (ended.needed, ended.verdicts["a"].verdict) == ([], "better")


def test_what_has_ended_is_not_needed_again_in_whatever_order():
    ended = losses(4, {})
    del ended[RunKey("a", 1)], ended[RunKey("baseline-again", 0)]
    assert names(state_of(EXPERIMENT, ended).needed) == ["baseline-again,seed=0", "a,seed=1"]


def test_only_what_is_undecided_gets_the_seeds_of_the_next_look():
    state = state_of(EXPERIMENT, losses(4, {"a": -1.0}))
    assert names(state.needed) == ["baseline,seed=4", "b,seed=4", "baseline,seed=5", "b,seed=5"]
    assert {name: each.verdict for name, each in state.verdicts.items()} == {"a": "better", "b": "undecided"}
    assert state.verdicts["a"].rule == "look 1"
    assert (state.null.verdict, state.null.pairs) == ("undecided", 4)  # judged alone, as an A/A test


def test_it_ends_when_all_verdicts_are_in():
    state = state_of(EXPERIMENT, losses(4, {"a": -1.0, "b": 1.0}))
    assert state.needed == []
    assert {name: each.verdict for name, each in state.verdicts.items()} == {"a": "better", "b": "worse"}
    assert state.unfinished == []


def test_a_goal_of_half_width_takes_more_pairs_than_a_verdict():
    state = state_of(replace(EXPERIMENT, stop=Looks(pairs=(4, 6), half_width=1e-9)), losses(4, {"a": -1.0, "b": 1.0}))
    assert {run.name for run in state.needed} == {"baseline", "a", "b"}
    assert state_of(replace(EXPERIMENT, stop=Looks(pairs=(4, 6), half_width=0.1)), losses(4, {})).needed == []


def test_it_ends_when_the_seeds_are_used_up_and_continues_with_added_ones():
    ended = losses(6, {"a": -1.0})
    state = state_of(EXPERIMENT, ended)
    assert (state.needed, state.unfinished, state.look) == ([], ["b"], 6)
    more = state_of(
        EXPERIMENT, ended, extensions=[Extension(2), Extension(5)]
    )  # up to further looks, at 9 and 14 pairs
    assert names(more.needed)[:4] == ["baseline,seed=6", "b,seed=6", "baseline,seed=7", "b,seed=7"]
    assert (len(more.needed), more.look) == (6, 9)
    state = state_of(EXPERIMENT, losses(14, {"a": -1.0}), extensions=[Extension(2), Extension(5)])
    assert state.needed == []
    assert state.verdicts["a"].pairs == 4  # it was decided before
    assert (state.verdicts["b"].pairs, state.verdicts["b"].rule) == (14, "look 4")


def test_pairs_are_added_for_a_variant_that_has_a_verdict():
    ended = losses(4, {"a": -1.0, "b": 1.0})
    more = state_of(EXPERIMENT, ended, extensions=[Extension(2, ("b",))])
    assert names(more.needed) == ["baseline,seed=4", "b,seed=4", "baseline,seed=5", "b,seed=5"]
    state = state_of(EXPERIMENT, losses(6, {"a": -1.0, "b": 1.0}), extensions=[Extension(2, ("b",))])
    assert (state.verdicts["a"].pairs, state.verdicts["b"].pairs) == (4, 6)
    assert state.verdicts["b"].rule == "look 2"  # six pairs were planned, whoever asks for them
    assert state.needed == []


def test_each_variant_gets_the_seeds_up_to_its_own_look():
    ended = losses(6, {"a": -1.0})  # decided after 4 pairs, b not after 6
    for seed in (4, 5):
        del ended[RunKey("a", seed)]
    more = state_of(EXPERIMENT, ended, extensions=[Extension(2, ("a", "b"))])
    assert names(more.needed) == [
        "a,seed=4",
        "a,seed=5",
        *(f"{name},seed={s}" for s in (6, 7, 8) for name in ("baseline", "b")),
    ]


def test_a_diverged_run_is_counted_and_its_variant_gets_more_seeds_until_the_counts_decide():
    ended = losses(4, {}) | {RunKey("b", 1): None}
    state = state_of(EXPERIMENT, ended)
    assert {run.name for run in state.needed} == {"baseline", "a", "b"}
    assert (state.verdicts["b"].verdict, state.verdicts["b"].diverged) == ("undecided", 1)
    lost = state_of(EXPERIMENT, losses(4, {"a": 1.0}) | {RunKey("b", seed): None for seed in range(4)})
    assert (lost.verdicts["b"].verdict, lost.needed) == ("worse", [])  # 4 of 4 against 0 of 8 of baseline and null
    copies = {RunKey("null", seed): 3.0 + 0.1 * seed for seed in range(4)}  # as with model.init_from
    same = state_of(EXPERIMENT, losses(4, {"a": 1.0}) | {RunKey("b", seed): None for seed in range(4)} | copies)
    assert same.verdicts["b"].verdict == "undecided"  # 4 of 4 against 0 of 4: copies are no runs of their own


def test_a_diverged_run_of_the_baseline_silences_no_variant():
    found = state_of(EXPERIMENT, losses(6, {"a": -1.0, "b": 1.0}) | {RunKey("baseline", 1): None})
    assert {name: each.verdict for name, each in found.verdicts.items()} == {"a": "better", "b": "worse"}


def test_a_null_run_that_diverged_changes_no_verdict():
    assert state_of(EXPERIMENT, losses(4, {"a": 1.0, "b": 1.0}) | {RunKey("null", 0): None}).needed == []


EFFECTS = st.fixed_dictionaries({name: st.sampled_from([-1.0, -1e-4, 0.0, 1.0]) for name in ("a", "b")})
EXTENSIONS = st.lists(st.builds(Extension, st.integers(1, 5), st.sampled_from([None, ("a",), ("a", "b")])), max_size=2)


@settings(deadline=None, max_examples=60)
@given(EFFECTS, EXTENSIONS, st.integers(0, 2**31), st.floats(0, 0.2))
def test_it_ends_whatever_ends_first_and_what_it_did_not_need_changes_nothing(effects, extensions, seed, lost):
    rng = random.Random(seed)
    results = {run: None if rng.random() < lost else loss for run, loss in losses(40, effects).items()}
    results[RunKey("baseline-again", 0)] = 3.0
    ended = {}
    for _ in range(400):
        state = state_of(EXPERIMENT, ended, extensions=extensions)
        if not state.needed:
            break
        assert not set(state.needed) & ended.keys()
        some = rng.sample(state.needed, rng.randint(1, len(state.needed)))
        ended |= {run: results[run] for run in some}
    assert state.needed == []
    assert state == state_of(EXPERIMENT, results, extensions=extensions)
    assert all(verdict.pairs in state.looks for verdict in state.verdicts.values())
