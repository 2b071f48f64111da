"""Loops that keep changes, on noise whose truth is known; and the bank of runs that they are replayed on."""

import json

import numpy as np
import pytest

from benchmarks import race
from benchmarks.rows import Row, write_rows

PLAIN = race.Noise(np.zeros(3), np.array([0.0, -(1.5**0.5), 1.5**0.5]))  # of standard deviation 1; the first is 0


class Fixed:
    """In place of a generator: nothing varies."""

    def __init__(self, drawn=()):
        self._drawn = iter(drawn)

    def integers(self, count):
        return 0

    def standard_normal(self):
        return 0.0

    def random(self):
        return next(self._drawn)


def bank_of(rng, seed_sd=0.02, draw_sd=0.01, shape=(400, 6)):
    return 2 + seed_sd * rng.standard_normal((shape[0], 1)) + draw_sd * rng.standard_normal(shape)


@pytest.fixture
def noise():
    return race.Noise.of(bank_of(np.random.default_rng(0)))


def test_losses_are_taken_apart_into_seeds_and_draws(noise):
    assert noise.residuals.std() == pytest.approx(0.01, rel=0.03)
    assert noise.seeds.std() == pytest.approx(np.hypot(0.02, 0.01 / 6**0.5), rel=0.1)
    assert noise.seed_sd == pytest.approx(0.02, rel=0.1)
    assert noise.seeds.mean() == pytest.approx(0, abs=1e-12)


def test_a_drawn_residual_has_their_spread_and_can_be_beyond_them(noise):
    drawn = [noise.draw(np.random.default_rng(seed)) for seed in range(4000)]
    assert np.std(drawn) == pytest.approx(noise.residuals.std(), rel=0.05)
    few = race.Noise(np.zeros(1), np.array([-1.0, 1.0]))
    assert min(few.draw(np.random.default_rng(seed)) for seed in range(50)) < -1.0


def test_pairs_share_their_seed_and_their_baseline_runs_once(noise):
    track = race.track_of(0, 0, noise, 1.0)
    differences = [track.pair(place, 0.0) for place in range(60)]
    assert track.runs == 120
    assert np.std(differences) == pytest.approx(track.pair_sd, rel=0.2)  # without what the seeds share
    [track.pair(place, 0.0) for place in range(60)]
    assert track.runs == 180
    track.adopt("idle", 0.0)
    track.pair(0, 0.0)
    assert track.runs == 182  # another baseline, on a seed of its own


def test_ideas_help_harm_or_do_nothing():
    track = race.Track(
        Fixed([0.05, 0.15, 0.5]), Fixed(), race.Noise(np.zeros(3), np.array([0.0, -(1.5**0.5), 1.5**0.5])), 0.5
    )
    effect = 0.5 * track.pair_sd
    assert track.pair_sd == pytest.approx(2**0.5)
    assert [track.idea() for _ in range(3)] == [("helps", -effect), ("harms", effect), ("idle", 0.0)]
    track.adopt("helps", -effect)
    assert track.truth == -effect
    assert track.run(0, effect) == pytest.approx(0)


def test_keeping_what_is_lower_needs_the_floor():
    track = race.Track(
        Fixed(), Fixed(), race.Noise(np.zeros(3), np.array([0.0, -(1.5**0.5), 1.5**0.5])), 1.0
    )  # of a pair: √2
    assert race.KeepIfLower(track, floor=0.0).decide(-0.1) == pytest.approx(0.1)
    loop = race.KeepIfLower(track, floor=1.0)
    assert loop.decide(-1.0) is None
    assert loop.decide(-2.0) == pytest.approx(2.0)
    assert loop.decide(-3.0) is None  # the bar is that of the run that was kept


@pytest.mark.parametrize("name", race.LOOPS)
def test_a_loop_keeps_what_helps_by_much_and_claims_about_what_it_gains(name, noise):
    found = [race.race(race.track_of(0, seed, noise, 6.0), race.LOOPS[name], is_list=True) for seed in range(5)]
    assert np.mean([each["missed"] for each in found]) < 0.4
    for each in found:
        assert each["ideas"] == race.LISTED
        assert each["apparent"] == pytest.approx(each["true"], rel=0.3, abs=6)


def test_where_nothing_helps_only_some_loops_claim_to_gain(noise, monkeypatch):
    monkeypatch.setattr(race, "HELPS", 0.0)
    monkeypatch.setattr(race, "HARMS", 0.0)

    def kept(name):
        tracks = [race.track_of(0, seed, noise, 1.0) for seed in range(8)]
        return np.mean([race.race(track, race.LOOPS[name], is_list=True)["kept"] for track in tracks])

    assert kept("keep if lower") > 2
    assert kept("a gate for each decision") > 0  # at most one in twenty, each by itself
    assert kept("try") == 0


def test_all_loops_get_the_same_ideas(noise):
    tracks = [race.track_of(0, 3, noise, 1.0) for _ in range(2)]
    race.LOOPS["try"](tracks[0]).decide(0.1)
    assert [tracks[0].idea() for _ in range(30)] == [tracks[1].idea() for _ in range(30)]


def test_pairs_without_any_spread_show_nothing():
    assert race.t_of([0.0, 0.0, 0.0]) == 0.0
    assert race.t_of([-1.0, -2.0, -3.0]) == pytest.approx(2 * 3**0.5)


def test_a_gate_spends_all_of_its_level():
    assert race._critical(4) == pytest.approx(1.93, abs=0.03)  # with a reserve for later looks, 2.06


def test_the_budget_ends_a_race(noise, monkeypatch):
    monkeypatch.setattr(race, "BUDGET", 60)
    found = race.race(race.track_of(0, 0, noise, 1.0), race.LOOPS["try"], is_list=False)
    assert 60 <= found["runs"] <= 60 + 2 * 28
    assert found["ideas"] < 20


def test_rows_have_what_each_loop_claims_and_gains(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(race, "RACES", 3)
    monkeypatch.setattr(race, "LISTED", 20)
    monkeypatch.setattr(race, "BANK", tmp_path / "bank.json")
    losses = bank_of(np.random.default_rng(0), shape=(12, 6)).tolist()
    write_rows([Row(variant="25k", losses=losses)], race.BANK, "a test")
    rows = measured("race", "--shapes", "list")
    assert len(rows) == len(race.EFFECTS) * len(race.LOOPS)
    assert rows["25k, 1 sd: keep if lower"]["runs"] == 21
    assert rows["25k, 1 sd: try"]["true_low"] <= rows["25k, 1 sd: try"]["true"] <= rows["25k, 1 sd: try"]["true_high"]


def test_the_bank_trains_each_run_once(measured, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(race, "SIZES", {"25k": (2, 2)})
    trained = []

    def loss(folder, words, job):
        trained.append(job)
        return 2.0 + 0.1 * job[1] + 0.01 * job[2]

    class Pool:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def map(self, function, jobs):
            return [loss(*function.args, job) for job in jobs]

    monkeypatch.setattr(race, "ProcessPoolExecutor", Pool)
    (row,) = measured("race", "--shapes", "bank").values()
    assert len(set(trained)) == 4
    assert row["losses"] == [[2.0, 2.1], [2.01, 2.11]]
    assert row["pair_sd"] == pytest.approx(0.1)


def test_a_run_of_the_bank_is_not_repeated(tmp_path):
    run = tmp_path / "25k,draw=1,seed=2"
    run.mkdir()
    (run / "summary.json").write_text(json.dumps({"val_loss": 1.5}))
    assert race._loss(str(tmp_path), [], ("25k", 1, 2)) == 1.5
