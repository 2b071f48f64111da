"""``lightning-llm ablate try``: ideas one after another, with a stand-in for workers, and real runs (slow)."""

import json
import random
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_llm.__main__ import main
from lightning_llm.ablate import Report, reuse
from lightning_llm.ablate.experiment import experiment_of
from lightning_llm.ablate.matching import ARCHITECTURE_PREFIX
from lightning_llm.ablate.names import BASELINE, PLAN, STREAM
from lightning_llm.ablate.options import folder_name, varied
from lightning_llm.ablate.plan import Plan
from lightning_llm.ablate.results import losses_of, results_of
from lightning_llm.ablate.stream import Stream, folder_of
from tests.ablate.test_experiment import ROOT
from tests.cli.conftest import CONFIG
from tests.cli.test_ablate import OWN_MLP, the_line

MLP, EPS = "model.architecture.mlp", "model.architecture.rms_norm_eps"
RELU, GELU = f"{MLP}=relu", f"{MLP}=gelu"
EFFECTS = {"relu": -0.5, "relu2": -0.3}  # of the MLP of a run; of all others nothing


class Trainer:
    """In place of workers: writes what runs would write. ``most``: runs until it is interrupted."""

    def __init__(self):
        self.trained, self.most, self.fails, self.seconds = [], None, "", 1.0

    def __call__(self, plan, workers, left_s):
        if self.fails:
            raise ValueError(self.fails)
        reuse.link_needed(plan)
        spent = 0.0
        while needed := plan.state(losses_of(results_of(plan))).needed:
            if self.most == 0:
                raise KeyboardInterrupt
            if spent >= left_s:
                return
            self.most = None if self.most is None else self.most - 1
            if not reuse.link_unclaimed(plan, needed[0]):  # as a worker does at later looks
                self.trained.append(str(needed[0]))
                self.write(plan, needed[0])
                spent += self.seconds

    def write(self, plan, run):
        folder = plan.run_dir(run)
        folder.mkdir(parents=True)
        architecture = yaml.safe_load(plan.config(run.name).read_text())["model"]["architecture"]
        noise = random.Random(f"{run.seed} {architecture['mlp']} {architecture['rms_norm_eps']}").gauss(0, 0.02)
        loss = 2.0 + 0.01 * (run.seed % 7) + EFFECTS.get(architecture["mlp"], 0.0) + noise
        stream = json.loads((plan.out.parents[1] / STREAM).read_text())
        facts = {"validation_batches": "1", "batches": "2", "steps": plan.variants[run.name].steps}
        facts |= {"initial_values": {"embed": "2x2 float32 00"}, "batches_at": {"4": "3"}}
        facts |= {**stream["environment"], "threads": plan.record.threads, "seconds": self.seconds}
        (folder / "summary.json").write_text(json.dumps({"val_loss": loss, **facts}))
        (folder / "config.yaml").write_text("{}")
        (folder / "status.json").write_text(json.dumps({"status": "finished", "step": 6}))


@pytest.fixture
def trainer(monkeypatch):
    trainer = Trainer()
    monkeypatch.setattr("lightning_llm.cli.ablate_try._train", trainer)
    return trainer


def try_idea(*words, stream="s"):
    return main(["ablate", "try", stream, "--baseline", "base.yaml", *words])


@pytest.fixture(scope="module")
def _interrupted(shared_folder):
    trainer = Trainer()
    trainer.most, trainer.seconds = 3, 60.0
    with shared_folder() as (folder, patch):
        patch.setattr("lightning_llm.cli.ablate_try._train", trainer)
        assert try_idea("--vary", GELU, "--trainer.max_steps", "5") == 130
    return folder


@pytest.fixture(scope="module")
def _rejected(shared_folder, _interrupted):
    with shared_folder(_interrupted) as (folder, patch):
        patch.setattr("lightning_llm.cli.ablate_try._train", Trainer())
        assert main(["ablate", "try", "s"]) == 3
    return folder


def interrupt(*arguments):
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def _ended(shared_folder):
    with shared_folder() as (folder, patch):
        patch.setattr("lightning_llm.cli.ablate_try._train", Trainer())
        patch.setattr("lightning_llm.cli.ablate_try.store_verdict", interrupt)
        assert try_idea("--vary", RELU) == 130
    return folder


@pytest.fixture
def interrupted(_interrupted, folder, trainer):
    """The folder with the stream ``s``, whose first idea, gelu, was interrupted after three runs of a minute each."""
    shutil.copytree(_interrupted, folder, dirs_exist_ok=True)
    trainer.trained = [path.name for path in Path("s/ideas/0001-gelu/runs").iterdir()]
    return folder


@pytest.fixture
def rejected(_rejected, folder, trainer):
    """The folder with the stream ``s``, whose first idea, gelu, was rejected."""
    shutil.copytree(_rejected, folder, dirs_exist_ok=True)
    return folder


@pytest.fixture
def ended(_ended, folder, trainer):
    """The folder with the stream ``s``, whose first idea, relu, was interrupted after its last run."""
    shutil.copytree(_ended, folder, dirs_exist_ok=True)
    return folder


def test_an_adopted_idea_is_what_the_next_one_is_compared_with(folder, trainer, capsys):
    assert try_idea("--vary", RELU, "--because", "it is cheaper", "--json") == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["verdict"], verdict["place"], verdict["because"]) == ("adopted", 1, "it is cheaper")
    assert verdict["options"] == {MLP: "relu"}
    assert verdict["match"] == "flops"
    assert verdict["steps"][1] > verdict["steps"][0]  # relu is narrower, and may take more steps
    assert try_idea("--vary", GELU) == 3
    said = capsys.readouterr().out
    assert "gelu: rejected (place 2 of the stream): the screen of 3 pairs found too little: t is " in said
    second = Plan.read(Path("s/ideas/0002-gelu"))
    assert yaml.safe_load(second.config(BASELINE).read_text())["model"]["architecture"]["mlp"] == "relu"
    assert second.variants[BASELINE].steps == verdict["steps"][1]
    assert second.experiment.first_seed == 1000
    assert yaml.safe_load(Path("s/baseline.yaml").read_text())["model"]["architecture"]["mlp"] == "relu"
    assert main(["ablate", "try", "s", "--vary", f"{MLP}=geglu"]) == 3  # the baseline need not be named again
    assert main(["ablate", "status", "s"]) == 0
    status = capsys.readouterr().out
    assert "3 ideas, adopted: 1. relu; " in status
    assert "The next idea is adopted if p is at most 0.0076, after 12 or 20 fresh pairs." in status
    assert main(["ablate", "report", "s"]) == 0
    report = Report.read("s")
    assert [row.verdict for row in report.of_kind("result")] == ["adopted", "rejected", "rejected"]
    (fresh,) = report.of_kind("confirmation")
    assert report.stream.gain == fresh.difference == verdict["confirmation"]["difference"]


@pytest.mark.slow
def test_runs_of_the_baseline_are_shared_until_an_idea_is_adopted(folder, trainer):
    assert try_idea("--vary", GELU) == 3
    assert trainer.trained == [f"{name},seed={seed}" for seed in range(8) for name in ("baseline", "gelu")]
    trainer.trained.clear()
    assert try_idea("--vary", f"{MLP}=geglu") == 3
    assert trainer.trained == [f"geglu,seed={seed}" for seed in range(len(trainer.trained))]
    trainer.trained.clear()
    assert try_idea("--vary", RELU) == 0
    assert "baseline,seed=0" not in trainer.trained
    assert "baseline,seed=100003500" in trainer.trained
    assert try_idea("--vary", f"{EPS}=1e-4") == 3
    assert "baseline,seed=1000" in trainer.trained
    last = Stream.read(Path("s")).verdicts[-1]
    assert last.runs == 2 * last.screen.pairs
    assert last.run_seconds == float(last.runs)


def test_no_output_and_no_file_of_the_stream_shows_the_loss_of_a_seed(ended, trainer, capsys):
    assert main(["ablate", "try", "s"]) == 0
    plan = Plan.read(Path("s/ideas/0001-relu"))
    losses = {f"{result.loss:.4f}" for result in results_of(plan).values()}
    main(["ablate", "status", "s"])
    texts = [*capsys.readouterr(), *(Path("s", name).read_text() for name in ("report.json", "report.html"))]
    assert losses
    assert not any(loss in text for loss in losses for text in texts)
    for words in (["status"], ["report"], ["extend", "--pairs", "2"]):
        assert main(["ablate", words[0], "s/ideas/0001-relu", *words[1:]]) == 2
        line = the_line(capsys)
        assert "is an idea of a stream: lightning-llm ablate status s shows its verdict" in line
        assert not any(loss in line for loss in losses)


@pytest.mark.slow
def test_the_same_idea_is_refused_unless_it_is_wanted_again(folder, trainer, capsys):
    assert try_idea("--vary", GELU) == 3
    first = capsys.readouterr().out
    trained = len(trainer.trained)
    assert try_idea("--vary", GELU) == 3  # the same command says it again: it may have been killed before
    assert capsys.readouterr().out == first
    assert len(trainer.trained) == trained
    assert try_idea("--vary", f"{MLP}=geglu") == 3
    capsys.readouterr()
    assert try_idea("--vary", GELU) == 2
    assert "this idea was tried before (place 1, rejected): --again tries it on fresh seeds" in the_line(capsys)
    trainer.trained.clear()
    assert try_idea("--vary", GELU, "--again") == 3
    assert trainer.trained[:2] == ["baseline,seed=100003000", "gelu,seed=100003000"]
    assert all(int(run.rpartition("=")[2]) >= 100_003_000 for run in trainer.trained)
    assert try_idea("--vary", GELU, "--match", "tokens") == 3  # another comparison
    width = f"parameters={ARCHITECTURE_PREFIX}intermediate_size"
    capsys.readouterr()
    assert try_idea("--vary", GELU, "--match", width) == 3
    last = capsys.readouterr().out
    assert f"Same {width}" in last
    assert try_idea("--vary", GELU, "--match", width) == 3  # said again
    assert capsys.readouterr().out == last
    assert [verdict.place for verdict in Stream.read(Path("s")).verdicts] == [1, 2, 3, 4, 5]


def test_an_idea_that_was_interrupted_is_continued(interrupted, trainer, capsys):
    assert try_idea("--vary", RELU) == 2
    assert "0001-gelu is another idea, and has no verdict yet: lightning-llm ablate try s continues" in the_line(capsys)
    trainer.most = 2
    assert main(["ablate", "try", "s"]) == 130
    trainer.most = None
    assert try_idea("--vary", GELU) == 3
    assert len(trainer.trained) == len(set(trainer.trained)) == 16
    assert [verdict.place for verdict in Stream.read(Path("s")).verdicts] == [1]
    trainer.most = 3
    assert try_idea("--vary", RELU) == 130
    assert "; the same command again continues" in capsys.readouterr().err
    assert "0002-relu has no verdict yet" in (main(["ablate", "status", "s"]), capsys.readouterr().out)[1]
    assert main(["ablate", "try", "s", "--give-up"]) == 3
    assert "relu: stopped (place 2 of the stream): given up." in capsys.readouterr().out
    assert main(["ablate", "try", "s", "--give-up"]) == 2
    assert "no idea of it was interrupted: give one with --vary" in the_line(capsys)


def test_a_run_that_fails_leaves_the_idea_without_a_verdict(interrupted, trainer, capsys):
    trainer.fails = "gelu,seed=0 failed: no space"
    assert try_idea("--vary", GELU) == 1
    assert "gelu,seed=0 failed: no space; lightning-llm ablate try s tries again, and with --give-up" in the_line(
        capsys
    )
    assert Stream.read(Path("s")).verdicts == []
    trainer.fails = ""
    assert try_idea("--vary", GELU) == 3


def test_a_budget_is_that_of_the_whole_stream(interrupted, trainer, capsys):
    shutil.rmtree("s/ideas/0001-gelu/runs")  # as if it was interrupted before its first run
    trainer.trained.clear()
    trainer.seconds = 60.0
    assert try_idea("--vary", GELU, "--budget", "2m") == 3
    assert "stopped (place 1 of the stream): the budget of 2m is used up." in capsys.readouterr().out
    assert len(trainer.trained) == 2
    assert try_idea("--vary", RELU, "--budget", "2m") == 2
    assert "--budget 2m is used up: the runs of s took 2.0 minutes; give more" in the_line(capsys)
    assert [path.name for path in Path("s/ideas").iterdir()] == ["0001-gelu"]
    assert try_idea("--vary", RELU, "--budget", "5h") == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--vary", f"{MLP}=rleu"], "rleu"),
        (["--vary", "model.architecture.mpl=relu"], "did you mean --model.architecture.mlp"),
        (["--vary", MLP], "must be OPTION=VALUE"),
        (["--vary", RELU, "--minimal-gain", "-0.1"], "minimal_gain is -0.1"),
        (["--vary", RELU, "--alpha", "0.7"], "alpha is 0.7"),
        (["--vary", RELU, "--budget", "soon"], "--budget 'soon' is no time"),
        (["--vary", RELU, "--because", "x" * 501], "because"),
        (["--vary", RELU, "--match", "luck"], "luck"),
        (["--vary", "trainer.max_steps=9"], "has trainer.max_steps 9, which is 1.50 times the flops of the baseline"),
        (["--vary", "seed_everything=9"], "is set by the experiment"),
        (["--vary", RELU, "--baseline", "none.yaml"], "none.yaml"),
        (["--vary", RELU, "--with", GELU], f"--vary and --with give {MLP} twice"),
        (["--vary", RELU, "--vary", GELU], "try takes one idea, and --with OPTION=VALUE adds an option to it"),
        (["--with", RELU], "give it after the --vary whose variant it belongs to"),
        (["--vary", "x.y=a: b: c"], "x.y"),
        (["--vary", RELU, "--because", "caf\udce9"], "is no UTF-8"),
        (["--vary", RELU, "--because", "a\nb"], "because"),
        ([], "s holds no idea yet: give --baseline CONFIG and --vary"),
        (["--give-up"], "s holds no idea yet"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_folder(folder, trainer, capsys, words, says):
    assert try_idea(*words) == 2
    assert says in the_line(capsys)
    assert not Path("s").exists()


def test_a_stream_stays_what_it_began_as(rejected, trainer, capsys, monkeypatch):
    for words, says in (
        (["--alpha", "0.1"], "--alpha is not what s began with"),
        (["--alpha", "0.0"], "--alpha is not what s began with"),
        (["--minimal-gain", "0.1"], "--minimal-gain is not what s began with"),
        (["--thorough"], "--thorough is not what s began with"),
        (["--trainer.max_steps", "7"], "--trainer.max_steps is not what s began with"),
    ):
        assert try_idea("--vary", RELU, *words) == 2
        assert says in the_line(capsys)
    Path("base.yaml").write_text(yaml.safe_dump(CONFIG) + "# changed\n")
    assert try_idea("--vary", RELU) == 2
    assert "--baseline is not what s began with" in the_line(capsys)
    monkeypatch.setattr("lightning_llm.cli.ablate_fit.environment", lambda base: {"package": "another"})
    assert main(["ablate", "try", "s", "--vary", RELU]) == 2
    line = the_line(capsys)
    assert "s began with another" in line
    assert "restore it, or begin another stream" in line
    assert [path.name for path in Path("s/ideas").iterdir()] == ["0001-gelu"]


def test_the_text_of_a_stream_stays_too(rejected, trainer, capsys):
    Path("text.txt").write_text(Path("text.txt").read_text() * 2)
    assert try_idea("--vary", RELU) == 2
    assert "s began with another text" in the_line(capsys)


@pytest.mark.slow
def test_two_calls_at_once_wait_for_each_other(folder):
    command = [
        sys.executable,
        "-m",
        "lightning_llm",
        "ablate",
        "try",
        "s",
        "--baseline",
        "base.yaml",
        "--minimal-gain",
        "9",
    ]
    processes = [
        subprocess.Popen([*command, "--vary", idea], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for idea in (RELU, GELU)
    ]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode in (0, 3), errors
    verdicts = Stream.read(Path("s")).verdicts
    assert [verdict.place for verdict in verdicts] == [1, 2]
    assert {verdict.name for verdict in verdicts} == {"relu", "gelu"}


def test_a_folder_that_holds_something_else_is_left_alone(folder, trainer, capsys):
    Path("s").mkdir()
    Path("s/precious.txt").write_text("kept")
    assert try_idea("--vary", RELU) == 2
    assert "s holds precious.txt and no stream.json: give a new folder, or that of a stream" in the_line(capsys)
    assert [path.name for path in Path("s").iterdir()] == ["precious.txt"]
    Path("t").mkdir()
    assert try_idea("--vary", f"{MLP}=rleu", stream="t") == 2
    assert list(Path("t").iterdir()) == []
    assert try_idea("--vary", GELU, stream="t") == 3


@pytest.mark.slow
def test_a_stream_without_an_idea_begins_anew(folder, trainer):
    trainer.most = 0
    assert try_idea("--vary", GELU, "--trainer.max_steps=5") == 130
    for path in Path("s/ideas").iterdir():
        path.rename(folder / path.name)
    trainer.most = None
    assert try_idea("--vary", GELU, "--trainer.max_steps", "4") == 3
    assert try_idea("--vary", RELU, "--trainer.max_steps=4") == 0  # one word or two
    assert yaml.safe_load(Path("s/first.yaml").read_text())["trainer"]["max_steps"] == 4


def diverge(trainer, variant, seeds):
    """Let runs of a variant with these seeds diverge."""
    write = trainer.write

    def instead(plan, run):
        write(plan, run)
        if run.name == variant and run.seed in seeds:
            status = {"status": "diverged", "step": 3, "reason": "loss is nan"}
            (plan.run_dir(run) / "status.json").write_text(json.dumps(status))

    trainer.write = instead


@pytest.mark.slow
def test_a_baseline_that_diverges_costs_its_pairs_alone(folder, trainer, capsys):
    diverge(trainer, BASELINE, {1})
    assert try_idea("--vary", RELU, "--json") == 0
    assert json.loads(capsys.readouterr().out)["screen"]["pairs"] == 8
    diverge(trainer, BASELINE, range(1000, 1024))
    assert try_idea("--vary", GELU) == 3
    assert (
        "gelu: stopped (place 2 of the stream): too many runs of the baseline failed to train."
        in capsys.readouterr().out
    )
    assert main(["ablate", "status", "s"]) == 0


@pytest.mark.slow
def test_runs_that_are_no_pairs_can_be_given_up(interrupted, trainer, capsys):
    summary = Path("s/ideas/0001-gelu/runs/gelu,seed=0/summary.json")
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"device": "another"}))
    assert main(["ablate", "try", "s"]) in (1, 2)
    assert "are no pair" in the_line(capsys)
    assert main(["ablate", "try", "s", "--give-up"]) == 3
    assert try_idea("--vary", RELU) == 0


@pytest.mark.slow
def test_an_idea_whose_plan_cannot_be_read_is_set_aside(interrupted, trainer, capsys):
    Path("s/ideas/0001-gelu", PLAN).write_text("{")
    assert main(["ablate", "try", "s", "--give-up"]) == 2
    line = the_line(capsys)
    assert f"s/ideas/0001-gelu/{PLAN} is no file of this program" in line
    assert "the idea was taken out of the stream, to s/damaged/0001-gelu-" in line
    assert len(list(Path("s/damaged").iterdir())) == 1
    assert try_idea("--vary", RELU) == 0


def test_what_is_continued_is_checked_too(interrupted, trainer, capsys):
    Path("text.txt").write_text(Path("text.txt").read_text() * 2)
    assert main(["ablate", "try", "s"]) == 2
    assert "s began with another text" in the_line(capsys)


@pytest.mark.slow
def test_an_adopted_precision_and_adopted_code_belong_to_the_baseline(folder, trainer, capsys, monkeypatch):
    Path("try_mlp.py").write_text(OWN_MLP)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(EFFECTS, "try_mlp.OwnMLP", -0.5)
    assert try_idea("--vary", f"{MLP}=try_mlp.OwnMLP", "--match", "tokens") == 0
    assert try_idea("--vary", f"{EPS}=1e-4", "--match", "tokens") == 3
    Path("try_mlp.py").write_text(OWN_MLP.replace("relu", "sigmoid"))
    capsys.readouterr()
    assert try_idea("--vary", f"{EPS}=1e-3", "--match", "tokens") == 2
    assert "try_mlp.py has changed since it was adopted: restore it from s/ideas/0001-" in the_line(capsys)


@pytest.mark.slow
def test_an_adopted_precision_does_not_end_the_stream(folder, trainer):
    write = trainer.write

    def better(plan, run):
        write(plan, run)
        summary = json.loads((plan.run_dir(run) / "summary.json").read_text())
        precision = yaml.safe_load(plan.config(run.name).read_text())["trainer"]["precision"]
        summary |= {"precision": precision, "val_loss": summary["val_loss"] - 0.5 * (precision == "64-true")}
        (plan.run_dir(run) / "summary.json").write_text(json.dumps(summary))

    trainer.write = better
    words = ["--trainer.precision=32-true", "--match", "tokens"]
    assert try_idea("--vary", "trainer.precision=64-true", *words) == 0
    assert try_idea("--vary", GELU, *words) == 3


@pytest.mark.slow
def test_a_report_that_cannot_be_written_changes_no_status(rejected, trainer, capsys):
    Path("s/report.html").unlink()
    Path("s/report.html").mkdir()
    assert try_idea("--vary", RELU) == 0
    assert "s/report.json was not written" in capsys.readouterr().err


def test_a_final_stream_is_reported_with_its_losses_and_takes_no_more_ideas(rejected, trainer, capsys):
    assert main(["ablate", "report", "s", "--final"]) == 0
    assert "It is final: report.json has the values of all pairs" in capsys.readouterr().out
    assert len(Report.read("s")["gelu"].by_seed) >= 3
    assert try_idea("--vary", RELU) == 2
    assert "s is final, and its report has the losses of its seeds: begin another stream" in the_line(capsys)
    assert main(["ablate", "report", "s/ideas/0001-gelu", "--final"]) == 2
    assert "--final ends a stream of ideas, and s/ideas/0001-gelu is none: leave it out" in the_line(capsys)


@pytest.mark.slow
def test_an_experiment_of_what_one_pair_would_have_kept(folder, trainer):
    assert try_idea("--vary", RELU) == 0
    assert try_idea("--vary", f"{EPS}=1e-4") == 3
    script = runpy.run_path(str(ROOT / "examples" / "streams" / "keep_if_lower.py"))
    for pair in (1, 2, 3):
        content = script["experiment"](Path("s"), pair)
        made = experiment_of(content, "the script", "both")
        assert made.variants["adopted"] == {MLP: "relu"}
        assert made.variants["kept_if_lower"].keys() <= {MLP, EPS}
        plan = Plan.read(Path("s/ideas/0002-rms_norm_eps=1e-4"))
        is_lower = script["difference"](plan, pair) < 0
        assert (EPS in made.variants["kept_if_lower"]) == is_lower
    assert made.match == "flops"


def test_names_of_long_values_in_any_script_fit_a_folder_and_differ():
    words = ["a.b=" + "語" * 70, "a.c=" + "語" * 70]
    names = {folder_name(next(iter(varied([[*words, f"a.d={end}"]])))) for end in ("x", "y")}
    assert len(names) == 2
    assert all(len(folder_of(1, name).encode()) < 200 for name in names)


def test_all_runs_have_ended_is_no_reason_to_give_up(ended, trainer, capsys):
    assert main(["ablate", "try", "s", "--give-up"]) == 2
    assert "the runs of 0001-relu have ended: lightning-llm ablate try s says its verdict" in the_line(capsys)
    assert main(["ablate", "try", "s"]) == 0


def test_a_call_that_waited_for_one_that_was_killed_finishes_its_idea_first(interrupted, trainer, capsys, monkeypatch):
    monkeypatch.setattr("lightning_llm.cli.ablate_try.is_locked", lambda out: True)  # until the lock is free
    assert try_idea("--vary", RELU, "--json") == 0
    shown = capsys.readouterr()
    assert "finishing that idea first" in shown.err
    assert "gelu: rejected" in shown.err
    assert json.loads(shown.out)["name"] == "relu"
    assert [(each.place, each.name) for each in Stream.read(Path("s")).verdicts] == [(1, "gelu"), (2, "relu")]
    assert len(trainer.trained) == len(set(trainer.trained))


def test_an_idea_of_a_killed_call_is_not_ended_by_the_budget_of_another(interrupted, trainer, capsys, monkeypatch):
    trainer.seconds = 60.0
    monkeypatch.setattr("lightning_llm.cli.ablate_try.is_locked", lambda out: True)
    assert try_idea("--vary", RELU, "--budget", "2m") == 2
    said = the_line(capsys)
    assert "--budget 2m is used up: lightning-llm ablate try s continues 0001-gelu with more" in said
    assert Stream.read(Path("s")).verdicts == []
