"""A stream's folder: its ideas in order, the baseline as it is now, seeds, and verdicts."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml

from lightning_llm.ablate.idea_runs import confirming_seeds, screening_seeds
from lightning_llm.ablate.names import BASELINE, STREAM
from lightning_llm.ablate.report.from_stream import stream_report
from lightning_llm.ablate.results import results_of, run_seconds, trained_here
from lightning_llm.ablate.stream import (
    CURRENT,
    FIRST,
    Asked,
    Stream,
    StreamRecord,
    asked_of,
    begin,
    experiment_of_idea,
    finish,
    first_seed,
    folder_of,
    is_settled,
    refuse_final,
    settings,
    store_verdict,
    verdict_of,
    write_current,
)
from lightning_llm.statistics.stream import CONFIRMED_AFTER, THOROUGH, StreamRule
from tests.ablate.conftest import work
from tests.ablate.report.test_from_stream import VERDICT

RECORD = StreamRecord(
    asked=Asked(baseline={"base.yaml": "0" * 64}, options=[]),
    alpha=0.05,
    looks=(12, 20),
    minimal_gain=0.0,
    workers=None,
    environment={"package": "1"},
)


@pytest.fixture
def stream(tmp_path, experiment):
    """``stream(effect, name)``: another idea of a stream, trained by the stand-in; its plan."""
    out = tmp_path / "s"
    begin(out, RECORD, {"effect": 0.0})
    (out / "ideas").mkdir()

    def add(effect, name="a", *, stop=(), **config):
        now = Stream.read(out)
        idea = experiment_of_idea(now, name, {"model.x": 1}, match="tokens", because="a reason", again=False)
        variants = {name: {"effect": effect, "options": {"model.x": 1}, **config}}
        plan = experiment(
            variants,
            out=f"s/ideas/{folder_of(now.place, name)}",
            first_seed=idea.first_seed,
            stop=msgspec.structs.replace(idea.stop, **dict(stop)),
            because=idea.because,
            record={"asked": {BASELINE: "base", name: f"{name} {effect}"}},
        )
        work(plan.out)
        return plan

    return add


def end(plan, **stopped):
    verdict = verdict_of(plan, results_of(plan), **stopped)
    store_verdict(plan, verdict)
    write_current(Stream.read(plan.out.parents[1]))
    return verdict


def test_an_adopted_idea_is_the_baseline_from_then_on(stream, tmp_path):
    out = tmp_path / "s"
    assert Stream.read(out).baseline() == out / FIRST
    plan = stream(-0.5)
    assert is_settled(plan, results_of(plan))
    assert yaml.safe_load(Stream.read(out).baseline().read_text())["effect"] == 0.0
    verdict = end(plan)
    assert verdict.verdict == "adopted"
    assert verdict.confirmation.pairs == 12
    assert verdict.confirmation.p <= verdict.level == StreamRule().level(1, 0)
    assert verdict.confirmation.worst >= verdict.confirmation.median
    assert verdict.confirmation.interval[1] < 0
    assert verdict.because == "a reason"
    assert verdict.screen.difference == pytest.approx(-0.5, rel=0.01)
    now = Stream.read(out)
    assert [idea.place for idea in now.adopted] == [1]
    assert yaml.safe_load(now.baseline().read_text())["effect"] == -0.5
    current = (out / CURRENT).read_text()
    assert yaml.safe_load(current)["effect"] == -0.5
    assert "1. a (-0.50" in current
    assert (now.place, now.unfinished) == (2, None)
    assert first_seed(2, 1, again=False) == 1000
    assert now.rule == StreamRule()
    assert now.next_level == StreamRule().level(2, 1)
    assert now.pair_sd == verdict.screen.sd


def test_a_useless_idea_leaves_the_baseline(stream, tmp_path):
    plan = stream(0.1)
    assert Stream.read(tmp_path / "s").unfinished == plan.out
    verdict = end(plan)
    assert (verdict.verdict, verdict.screen.pairs, verdict.confirmation) == ("rejected", 3, None)
    assert verdict.reason.startswith("the screen of 3 pairs found too little: t is -")
    assert verdict.reason.endswith(", and 0.5 is needed")
    now = Stream.read(tmp_path / "s")
    assert now.next_level == StreamRule().level(1, 0)  # no alpha is spent on it
    assert yaml.safe_load(now.baseline().read_text())["effect"] == 0.0
    assert now.unfinished is None
    assert "No idea was adopted yet" in (tmp_path / "s" / CURRENT).read_text()


@pytest.mark.parametrize(
    ("effect", "config", "reason"),
    [
        (0.0, {}, "its runs are bit-identical to the baseline's"),
        (-0.5, {"diverges": [2]}, "one of its runs failed to train"),
        (-0.5, {"diverges": [100_001_501]}, "one of its runs failed to train"),
    ],
)
def test_the_reason_says_why_an_idea_was_rejected(stream, effect, config, reason):
    verdict = end(stream(effect, **config))
    assert (verdict.verdict, verdict.reason) == ("rejected", reason)


def test_an_idea_below_the_minimal_gain_is_given_up_in_the_screen(stream):
    verdict = end(stream(-0.5, stop={"minimal_gain": 2.0}))
    assert (verdict.verdict, verdict.screen.pairs, verdict.confirmation) == ("rejected", 3, None)
    assert verdict.reason == "the screen of 3 pairs excludes a gain of 2"


def test_an_idea_that_is_not_confirmed_takes_a_level(stream, tmp_path):
    verdict = end(stream(-0.5, stop={"level": 0.0}))
    assert verdict.verdict == "rejected"
    assert verdict.confirmation.pairs == 20
    assert verdict.reason == f"20 fresh pairs: p {verdict.confirmation.p:.2g}, above its level of 0"
    assert Stream.read(tmp_path / "s").next_level == StreamRule().level(2, 0)


def test_an_idea_that_is_stopped_says_why_and_a_verdict_is_not_overruled(stream):
    plan = stream(-0.5)
    some = {run: result for run, result in results_of(plan).items() if run.seed < 2}
    assert not is_settled(plan, some)
    stopped = verdict_of(plan, some, stopped="given up")
    assert (stopped.verdict, stopped.reason, stopped.screen.pairs) == ("stopped", "given up", 2)
    assert verdict_of(plan, results_of(plan), stopped="given up").verdict == "adopted"
    none = verdict_of(plan, {}, stopped="given up")
    assert (none.screen.difference, none.screen.interval, none.screen.pairs, none.runs) == (None, None, 0, 0)


def test_a_verdict_has_no_loss_of_a_seed(stream):
    plan = stream(-0.5)
    losses = {str(result.loss) for result in results_of(plan).values()}
    text = json.dumps(msgspec.to_builtins(end(plan)))
    assert losses
    assert not any(loss in text for loss in losses)


def test_the_time_of_runs_leaves_out_those_of_other_ideas(stream):
    plan = stream(0.1)
    assert run_seconds(trained_here(plan, results_of(plan))) == len(results_of(plan)) == 6
    (plan.run_dir(next(iter(results_of(plan)))) / "reused_from").write_text("0001-a\n")
    assert run_seconds(trained_here(plan, results_of(plan))) == 5


def test_the_same_idea_is_found_and_another_one_is_not(stream, tmp_path):
    plan = stream(0.1)
    end(plan)
    now = Stream.read(tmp_path / "s")
    asked = asked_of(plan)
    assert now.same_as(asked).place == 1
    for field in asked:
        assert now.same_as({**asked, field: "another"}) is None


@pytest.mark.parametrize("looks", [CONFIRMED_AFTER, THOROUGH])
def test_no_two_ideas_share_a_seed_that_confirms(looks):
    """Nor do a screen and a confirmation, whatever was adopted before, and with seeds in place of lost ones."""
    record = msgspec.structs.replace(RECORD, looks=looks)
    screens, confirmations = set(), []
    for place in (1, 2, 3, 9_998, 9_999):
        for adopted in {0, 1, place - 1}:
            before = [
                msgspec.structs.replace(VERDICT, place=each, verdict="adopted" if each <= adopted else "rejected")
                for each in range(1, place)
            ]
            for again in (False, True):
                now = Stream(Path("s"), record, before, None)
                keys = {"command": "true {seed}", "read": "loss {number}"}
                idea = experiment_of_idea(now, "a", {}, match="tokens", because="", again=again, base=keys)
                screens |= {*screening_seeds(idea)}
            confirmations.append((place, {*confirming_seeds(idea.stop)}))
    of_places = dict(confirmations)
    assert all(seeds == of_places[place] for place, seeds in confirmations)
    assert all(len(seeds) == 2 * looks[-1] for seeds in of_places.values())
    assert len(set().union(screens, *of_places.values())) == len(screens) + sum(map(len, of_places.values()))


def test_what_is_no_stream_is_one_line(stream, tmp_path):
    end(stream(0.1))
    verdict = tmp_path / "s" / "ideas" / folder_of(1, "a") / "verdict.json"
    content = verdict.read_text()
    verdict.write_text(content.replace('"runs": 6', '"runs": "many"'))
    with pytest.raises(ValueError, match=r"verdict.json is no file of this program: Expected `int`, got `str` - at"):
        Stream.read(tmp_path / "s")
    verdict.write_text(content.replace('"place": 1', '"place": 2'))
    with pytest.raises(ValueError, match="not numbered from 1"):
        Stream.read(tmp_path / "s")
    (tmp_path / "s" / STREAM).unlink()
    with pytest.raises(ValueError, match=r"holds no stream.json: give the folder of a stream"):
        Stream.read(tmp_path / "s")


@pytest.mark.parametrize("because", ["a\nb", "x" * 501])
def test_a_reason_is_one_line(tmp_path, because):
    begin(tmp_path, RECORD, {})
    with pytest.raises(ValueError, match=r"ablate try: because is .*, expected at most 500 printable characters"):
        experiment_of_idea(Stream.read(tmp_path), "a", {"x": 1}, match="tokens", because=because, again=False)


@pytest.mark.parametrize(
    "wrong", [{"alpha": 0.9}, {"minimal_gain": -0.1}, {"minimal_gain": float("nan")}, {"workers": 0}]
)
def test_settings_are_checked(wrong):
    assert settings() == {"alpha": 0.05, "minimal_gain": 0.0, "workers": None, "looks": (12, 20)}
    assert settings(is_thorough=True)["looks"] == (24, 48)
    with pytest.raises(ValueError, match=f"ablate try: {next(iter(wrong))} is"):
        settings(**wrong)


def mean_of(pairs, count):
    """Of the differences of so many pairs whose baseline did not diverge."""
    differences = [pair.difference for pair in pairs if pair.baseline is not None]
    return np.mean(differences[:count])


def test_a_final_stream_publishes_its_losses_and_takes_no_more_ideas(stream, tmp_path):
    for effect, name in ((-0.5, "a"), (0.1, "b")):
        end(stream(effect, name))
    out = tmp_path / "s"
    hidden = stream_report(Stream.read(out))
    assert [row.by_seed for row in hidden.rows] == [[], [], []]
    refuse_final(Stream.read(out))
    finish(Stream.read(out))
    report = stream_report(Stream.read(out))
    better, worse = report.of_kind("result")
    assert (better.verdict, worse.verdict) == ("adopted", "rejected")
    for row in (better, worse):  # the losses give the numbers again
        assert mean_of(row.by_seed, row.pairs) == pytest.approx(row.difference)
    (confirmed,) = report.of_kind("confirmation")
    assert confirmed.variant == better.variant
    assert mean_of(confirmed.by_seed, confirmed.pairs) == pytest.approx(confirmed.difference)
    differences = [pair.difference for pair in confirmed.by_seed][: confirmed.pairs]
    assert StreamRule().p_at(0, differences) == better.idea.p <= better.idea.level
    assert len(confirmed.by_seed) == confirmed.pairs
    with pytest.raises(ValueError, match="is final, and its report has the losses of its seeds: begin another stream"):
        refuse_final(Stream.read(out))


def test_a_stream_with_an_unfinished_idea_cannot_end(stream, tmp_path):
    stream(-0.5)
    with pytest.raises(ValueError, match=r"0001-a has no verdict yet: .* continues it, --give-up ends it"):
        finish(Stream.read(tmp_path / "s"))
