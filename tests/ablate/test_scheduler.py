"""What an experiment needs next, from its plan and the runs that have ended."""

from lightning_llm.ablate.scheduler import Rules, Run, state_of

RULES = Rules(["a", "b"], [2, 4], None, 0.05)


def losses(pairs, effects, sides=("baseline", "null", "a", "b")):
    """The same noise on both sides but for a little: an effect of 1 is found with two pairs, one of 0 with none."""
    found = {Run("baseline-again", 0): 3.0}
    for seed in range(pairs):
        for name in sides:
            found[Run(name, seed)] = (
                3.0 + 0.1 * seed + effects.get(name, 0.0) + 1e-4 * (-1) ** seed * (name != "baseline")
            )
    return found


def test_the_same_again_comes_first_then_the_seeds_of_the_first_look():
    state = state_of(RULES, {})
    assert [str(run) for run in state.needed] == [
        *("baseline,seed=0", "baseline-again,seed=0", "null,seed=0", "a,seed=0", "b,seed=0"),
        *("baseline,seed=1", "null,seed=1", "a,seed=1", "b,seed=1"),
    ]
    assert (state.look, state.verdicts, state.undecided) == (2, {}, ["a", "b"])


def test_what_has_ended_is_not_needed_again_in_whatever_order():
    ended = losses(2, {})
    del ended[Run("a", 1)], ended[Run("baseline-again", 0)]
    assert [str(run) for run in state_of(RULES, ended).needed] == ["baseline-again,seed=0", "a,seed=1"]


def test_only_what_is_undecided_gets_the_seeds_of_the_next_look():
    state = state_of(RULES, losses(2, {"a": -1.0}))
    assert [str(run) for run in state.needed] == ["baseline,seed=2", "b,seed=2", "baseline,seed=3", "b,seed=3"]
    assert {name: each.verdict for name, each in state.verdicts.items()} == {"a": "better", "b": "undecided"}
    assert state.verdicts["a"].rule == "look 1 of 2"


def test_it_ends_when_all_verdicts_are_in():
    state = state_of(RULES, losses(2, {"a": -1.0, "b": 1.0}))
    assert state.needed == []
    assert {name: each.verdict for name, each in state.verdicts.items()} == {"a": "better", "b": "worse"}
    assert state.undecided == []


def test_it_ends_when_the_seeds_are_used_up_and_continues_with_added_ones():
    ended = losses(4, {"a": -1.0})
    state = state_of(RULES, ended)
    assert (state.needed, state.undecided, state.look) == ([], ["b"], 4)
    more = state_of(RULES._replace(added=[2, 1]), ended)
    assert [str(run) for run in more.needed] == ["baseline,seed=4", "b,seed=4", "baseline,seed=5", "b,seed=5"]
    state = state_of(RULES._replace(added=[2, 1]), losses(7, {"a": -1.0}))
    assert state.needed == []
    assert state.verdicts["a"].pairs == 2  # it was decided before
    assert (state.verdicts["b"].pairs, state.verdicts["b"].rule) == (7, "e-process")


def test_a_diverged_run_is_counted_and_its_variant_gets_no_more_seeds():
    ended = losses(2, {}) | {Run("b", 1): None}
    state = state_of(RULES, ended)
    assert {run.name for run in state.needed} == {"baseline", "a"}
    assert (state.verdicts["b"].verdict, state.verdicts["b"].diverged) == ("undecided", 1)
    assert state_of(RULES, losses(2, {"a": -1.0}) | {Run("baseline", 1): None}).needed == []


def test_a_null_run_that_diverged_changes_no_verdict():
    assert state_of(RULES, losses(2, {"a": 1.0, "b": 1.0}) | {Run("null", 0): None}).needed == []
