"""``ablate run --command``: experiments with tiny programs, from the command line to the report."""

import inspect
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lightning_llm.__main__ import main
from lightning_llm.ablate import Report
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.results import load_experiment
from lightning_llm.io.untrusted import shown
from tests.ablate.trees.conftest import commit, git


def loss_of(seed, lr):
    """The loss of a seed, which a learning rate of 3 improves."""
    noise = random.Random(f"{seed} {lr}").gauss(0, 0.002)
    return 3 + random.Random(seed).gauss(0, 0.1) - 0.1 * (lr == 3) + noise


TRAIN = f"""
import argparse, json, os, random, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--out", default=".")
args = parser.parse_args()
{inspect.getsource(loss_of)}
loss = loss_of(args.seed, args.lr)
for step in (10, 20, 30):
    print(f"step {{step}}: val loss {{loss + (30 - step) / 100}}")
"""
PYTHON = sys.executable
COMMAND = f"{PYTHON} train.py --seed={{seed}} {{options}}"
READ = "val loss {number}"
HIGH = ("--vary", "lr=3")
FOLDERS = Path("runs")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)


@pytest.fixture
def ablate(capsys):
    """``ablate(action, …)``: the status, and what is printed to each stream."""

    def run(*words):
        capsys.readouterr()
        return main(["ablate", *words]), *capsys.readouterr()

    return run


@pytest.fixture
def compare(ablate):
    """``compare(more of the program, word, …)``: run an experiment on the command line."""

    def run(more, *words, command=COMMAND, read=("--read", READ), varied=HIGH):
        Path("train.py").write_text(TRAIN + more)
        return ablate("run", "--command", command, *read, *varied, *words)

    return run


def report(name="ablate"):
    return Report.read(FOLDERS / name)


def losses(name="ablate"):
    return {key: result.loss for key, result in load_experiment(FOLDERS / name).results.items()}


def the_line(err):
    lines = [line for line in err.splitlines() if "error" in line]
    assert len(lines) == 1, err
    return lines[0].removeprefix("lightning-llm ablate: error: ")


def truth(seeds, lr=3.0):
    differences = [loss_of(seed, lr) - loss_of(seed, 1.0) for seed in seeds]
    return sum(differences) / len(differences)


def test_a_command_in_a_file_from_trust_to_power(ablate):
    content = {"command": f"{COMMAND} --out={{run}}", "read": f"step {{step}}: {READ}", "pairs": 4}
    Path("e.yaml").write_text(yaml.safe_dump({**content, "variants": {"high": {"lr": 3}}}))
    status, out, err = ablate("run", "e.yaml")
    assert (status, out) == (2, "")
    assert the_line(err).startswith(f"e.yaml names a command, {content['command']!r}: read it, and add --trust-code")
    assert not FOLDERS.exists()
    status, out, err = ablate("run", "e.yaml", "--trust-code")
    assert status == 0
    assert f"lightning-llm ablate: e.yaml: command: {content['command']}\n" in err
    workers = len(os.sched_getaffinity(0))
    assert f"{workers} at a time" in err
    assert "Runs share one folder" not in out
    assert "The baseline with seed 0, trained twice: bit-identical." in out
    assert "\nhigh: better; " in out
    row = report("e")["high"]
    assert row.difference == pytest.approx(truth(range(4)))
    assert "<h2>val_loss during training</h2>" in (FOLDERS / "e" / "report.html").read_text()
    curves = load_experiment(FOLDERS / "e").results[RunKey("high", 1)].curves()
    last = loss_of(1, 3.0)
    assert curves == {"val_loss": [(step, pytest.approx(last + (30 - step) / 100)) for step in (10, 20, 30)]}

    _, out, _ = ablate("status", "runs/e")
    assert "runs/e: 9 runs have ended, 0 train, 0 wait\n" in out
    assert "\nhigh: better; " in out
    (FOLDERS / "e" / "report.json").unlink()
    assert ablate("report", "runs/e")[0] == 0
    assert report("e")["high"] == row
    assert ablate("extend", "runs/e", "--pairs", "2", "--variants", "high")[0] == 0
    row = report("e")["high"]
    assert row.difference == pytest.approx(truth(range(row.pairs)))
    status, out, _ = ablate("power", "--from", "runs/e", "--pairs", "8")
    assert (status, row.pairs) == (0, 6)
    assert f"a pair's difference has a standard deviation of {row.sd:.4g} (high of e, " in out


def test_the_metric_may_be_in_a_file_and_higher_may_be_better(compare):
    code = 'json.dump({"val": {"acc": -loss}}, open(os.path.join(args.out, "result.json"), "w"))\n'
    read = ("--read-file", "result.json", "--key", "val.acc")
    status, out, _ = compare(code, "--metric=-acc", "--pairs", "4", command=f"{COMMAND} --out={{run}}", read=read)
    assert status == 0
    assert "\nlr=3: better; " in out
    assert (
        "a difference is variant minus baseline, higher values are better, so a positive one is an improvement" in out
    )
    row = report()["lr=3"]
    assert row.difference > 0
    assert [pair.baseline for pair in row.by_seed] == pytest.approx([-loss_of(seed, 1.0) for seed in range(4)])
    assert losses()[RunKey("baseline", 2)] == pytest.approx(loss_of(2, 1.0))
    assert [*Path.cwd().glob("*.json")] == []


def test_without_a_folder_of_its_own_one_run_trains_at_a_time(compare):
    status, out, err = compare('open("state", "w").close()', "--pairs", "2", "--workers", "2")
    assert status == 0
    assert "1 at a time" in err
    assert "\nRuns share one folder, so that one runs at a time: {run} in the command gives each its own.\n" in out
    assert "\nA run writes to its folder (state): the next run finds that; {run} is one of its own.\n" in out


def test_reseed_adds_the_seed_to_the_program_s_own(compare):
    code = "random.seed(1)\nprint('loss', random.random() + 0.001 * args.lr)\n"
    command = f"{PYTHON} train.py --seed=1 {{options}}"
    status, out, _ = compare(code, "--reseed", "--pairs", "2", command=command, read=("--read", "loss {number}"))
    assert status == 0
    assert "\n--reseed: the run's seed was added to every seed that the program sets.\n" in out
    expected = {seed: random.Random(1 + seed).random() + 0.001 for seed in range(2)}
    assert {seed: losses()[RunKey("baseline", seed)] for seed in range(2)} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("told", "problem"),
    [("batches", "their training batches differ"), ("initial_values", "their initial values differ")],
)
def test_what_the_program_tells_must_agree_within_a_pair(compare, told, problem):
    status, _, err = compare(f"print('{told}:', args.lr if args.seed else 0)", "--pairs", "3")
    assert status == 2
    assert re.search(f"lr=3,seed=1 and .*baseline,seed=1 are no pair: {problem}", the_line(err))


def test_failures_of_each_kind_count(compare):
    code = """
if args.lr == 3 and args.seed == 1:
    print("val loss nan")
if args.lr == 3 and args.seed == 2:
    sys.exit("out of luck")
if args.lr == 3 and args.seed == 3:
    time.sleep(600)
"""
    status, out, _ = compare(code, "--pairs", "5", "--time-limit", "5s")
    assert status == 0
    assert "\nlr=3,seed=1 diverged: its val_loss is nan.\n" in out
    assert "\nlr=3,seed=2 failed: exit status 1, out of luck.\n" in out
    assert "\nlr=3,seed=3 failed: it took longer than the time limit of 5.0 s.\n" in out
    assert "; 3 of 5 runs of the variant failed to train." in out


@pytest.mark.parametrize(
    ("more", "read", "line"),
    [
        ("", "bpb {number}", "showed no 'bpb {number}'; its last line: step 30: val loss "),
        ("sys.exit(3)", "bpb {number}", "ended with exit status 3; its last line: step 30: val loss "),
    ],
)
def test_a_baseline_that_cannot_be_read_stops_at_once(compare, more, read, line):
    status, _, err = compare(more, "--pairs", "2", read=("--read", read))
    assert status == 2
    assert the_line(err).startswith(f"baseline,seed=0 failed: the program {line}")
    assert losses() == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="has the GPU")
def test_a_program_without_the_gpu_that_it_needs_stops_at_once(compare):
    Path("gpu.py").write_text(f"import torch\ntorch.zeros(1, device='cuda')\n{TRAIN}")
    status, _, err = compare("", "--pairs", "2", command=f"{PYTHON} gpu.py --seed={{seed}} {{options}}")
    assert status == 2
    line = the_line(err)
    assert line.startswith("baseline,seed=0 failed: the program ended with exit status 1; its last line: ")
    assert "CUDA" in line or "NVIDIA" in line
    assert losses() == {}


def test_an_ignored_seed_stops_it(compare):
    Path("same.py").write_text("print('val loss 3.25')")
    status, _, err = compare("", "--pairs", "3", command=f"{PYTHON} same.py {{seed}} {{options}}")
    assert status == 2
    line = "(the baseline|lr=3) has the same val_loss 3.25 with seeds 0 and 1: the seed does nothing"  # who was first
    assert re.match(line, the_line(err))
    assert not (FOLDERS / "ablate" / "runs" / "baseline,seed=2").exists()


def test_a_mistyped_command_is_corrected_under_the_same_name(compare):
    assert compare("", "--pairs", "2", read=("--read", "loss: {number}"))[0] == 2
    assert compare("", "--pairs", "2")[0] == 0
    for words, changed in (
        (("--time-limit", "9m"), "another --time-limit (None, now 540.0)"),
        (("--read", f"{{...}} {READ}"), f"another --read ({shown(READ)}, now '{{...}} {READ}')"),
    ):
        read = words if words[0] == "--read" else READS
        status, _, err = compare("", "--pairs", "2", *(() if words == read else words), read=read)
        assert status == 2
        assert the_line(err).startswith(f"runs/ablate has a plan with {changed}, which makes a new experiment")
    assert load_experiment(FOLDERS / "ablate").plan.experiment.command.time_limit_s is None


READS = ("--read", READ)


@pytest.mark.parametrize(
    ("command", "words", "line"),
    [
        ("x", (*READS, *HIGH), "--command has no {seed}: put {seed} where it takes its seed, or give --reseed"),
        ("x {sed} {options}", (*READS, *HIGH), "--command has {sed}, which is no placeholder: there are {seed} ("),
        (COMMAND, (*READS, *HIGH, "--reseed"), "--reseed is for a command without {seed}, and this one has it"),
        (COMMAND, HIGH, "--read is missing, which says where the metric of a run is: --read 'val loss {number}'"),
        (COMMAND, ("--read", "loss", *HIGH), "--read 'loss' needs one {number}, the metric, and at most one {step}"),
        (COMMAND, ("--read", "{number} {nr}", *HIGH), "--read has {nr}, which is no placeholder: there are {number}"),
        (COMMAND, ("--read-file", "r.json", *HIGH), "--read-file is given without --key"),
        (COMMAND, ("--key", "loss", *HIGH), "--key is given without --read-file"),
        (COMMAND, ("--read-file", "../r.json", "--key", "a", *HIGH), "--read-file '../r.json' must be a path below"),
        (COMMAND, (*READS, "--read-file", "r", "--key", "a", *HIGH), "--read and --read-file say where the metric is"),
        (COMMAND, READS, "the command line: nothing is compared"),
        (f"{PYTHON} train.py {{seed}}", (*READS, *HIGH), "--command has no {options}, where lr=3 would go"),
        ("cd x && y {seed} {options}", (*READS, *HIGH), "--command has 'cd', which needs a shell"),
        ("A=1 y {seed} {options}", (*READS, *HIGH), "--command has 'A=1', which needs a shell"),
        ("y '{seed} {options}", (*READS, *HIGH), '--command "y \'{seed} {options}" cannot be split into words'),
        ("", (*READS, *HIGH), "--command is empty"),
        ("pyton {seed} {options}", (*READS, *HIGH), "--command: 'pyton' is no program here: give its path"),
        (f"{PYTHON} trian.py {{seed}} {{options}}", (*READS, *HIGH), "--command: there is no file 'trian.py' in "),
        (COMMAND, (*READS, *HIGH, "--baseline", "b.yaml"), "the command line: baseline names configs of fit"),
        (COMMAND, (*READS, *HIGH, "--trainer.max_steps", "3"), "--trainer.max_steps is an option of fit"),
        (COMMAND, (*READS, *HIGH, "--time-limit", "5y"), "--time-limit '5y' is no time"),
        (COMMAND, (*READS, *HIGH, "--option=--{name}"), "--option '--{name}' needs {name} and {value}"),
        (COMMAND, (*READS, *HIGH, "--match", "time"), "match time of a command needs the option that says how"),
        (COMMAND, (*READS, *HIGH, "--null"), "--vary and --null say what is compared in two ways"),
        (COMMAND, (*READS, *HIGH, "--against", "HEAD"), "--vary and --against say what is compared in two ways"),
        (COMMAND, (*READS, *HIGH, "--link", "data"), "--link is for trees of revisions"),
        (COMMAND, (*READS, *HIGH, "--setup", "make"), "--setup is for trees of revisions"),
        (COMMAND, (*READS, *HIGH, "--keep-trees"), "--keep-trees is for trees of revisions"),
        (COMMAND, (*READS, *HIGH, "--resume", "-r"), "--resume '-r' needs {resume} in the command, and {run}"),
        (f"{COMMAND} {{resume}}", (*READS, *HIGH, "--resume", "-r"), "--resume '-r' needs {resume} in the command"),
        (f"{COMMAND} {{resume}}", (*READS, *HIGH), "--command has {resume}: --resume says what it becomes"),
        (f"{COMMAND} {{resume}} {{run}}", (*READS, *HIGH, "--resume", "-r {resume}"), "--resume '-r {resume}' has"),
        (f"{COMMAND} {{resume}} {{run}}", (*READS, *HIGH, "--resume", "-r {rum}"), "--resume has {rum}, which"),
        (COMMAND, (*READS, *HIGH, "--gpus-per-run", "0"), "the command line: gpus_per_run is 0, expected"),
        (COMMAND, (*READS, *HIGH, "--pairs", "1"), "the command line: pairs 1: one pair has no interval"),
        (COMMAND, (*READS, "--vary", "lr=3", "--vary", "lr=3"), "--vary lr=3: the variant lr=3 is given twice"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_leaves_nothing(ablate, command, words, line):
    status, out, err = ablate("run", "--command", command, *words)
    assert (status, out) == (2, "")
    assert the_line(err).startswith(line)
    assert the_line(err).endswith(" (docs/any-program.md)")
    assert not FOLDERS.exists()


def test_a_command_needs_quotes(ablate):
    status, _, err = ablate("run", "--command", *COMMAND.split(), *READS, *HIGH)
    assert status == 2
    assert the_line(err).startswith(f"--command {PYTHON}: put the whole command in quotes")


def test_a_value_may_begin_with_a_minus(compare):
    assert compare("", "--pairs", "2", "--metric", "-score")[0] == 0
    assert (report().metric, report().higher_is_better) == ("score", True)


def test_options_of_a_command_need_one(ablate):
    status, _, err = ablate("run", *READS, *HIGH)
    assert status == 2
    assert "or --command TEXT (any program that trains)" in the_line(err)
    assert not FOLDERS.exists()


# ---- slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "any_program"
SMALL = "--max_iters=60 --eval_interval=60 --n_embd=32 --block_size=32"


@pytest.fixture
def _example():
    """A fresh repository with the example."""
    for name in ("train.py", "input.txt"):
        shutil.copy(EXAMPLE / name, name)
    git(Path.cwd(), "init", "--quiet")
    commit(Path.cwd(), {".gitignore": "runs\n"})


@pytest.mark.slow
@pytest.mark.usefixtures("_example")
def test_the_example_has_a_verdict_on_an_option_and_on_a_diff(ablate):
    read = ("--read", "step {step}: val loss {number}", "--pairs", "4")
    command = f"{PYTHON} train.py --seed={{seed}} --out_dir={{run}} {SMALL} {{options}}"
    status, out, _ = ablate("run", "--command", command, *read, "--vary", "learning_rate=0.01")
    assert status == 0
    assert "\nlearning_rate=0.01: better; " in out
    assert "The baseline with seed 0, trained twice: bit-identical." in out
    assert Path(FOLDERS / "ablate" / "files" / "baseline-0" / "ckpt.pt").exists()
    source = Path("train.py").read_text()
    assert source.count("default=1e-3") == 1
    Path("train.py").write_text(source.replace("default=1e-3", "default=1e-5"))
    command = f"{PYTHON} train.py --seed={{seed}} {SMALL}"
    status, out, _ = ablate("run", "--command", command, *read, "--against", "HEAD", "--name", "diff")
    assert status == 0
    assert "\nworking-tree: worse; " in out
    assert "Files that a run leaves in its tree (out) were moved to left in the folder of its run." in out


@pytest.mark.slow
@pytest.mark.usefixtures("_example")
def test_a_stream_on_the_example_adopts_what_helps_and_nothing_else(ablate):
    """A planted good diff, and a useless one, which changes bits but nothing else."""
    source = Path("train.py").read_text()
    begun = (
        "--command",
        f"{PYTHON} train.py --seed={{seed}} {SMALL}",
        "--read",
        "val loss {number}",
        "--against",
        "HEAD",
    )

    def edited(old, new):
        assert Path("train.py").read_text().count(old) == 1
        Path("train.py").write_text(Path("train.py").read_text().replace(old, new))

    edited("x = x + self.proj(", "x = self.proj(")  # the same sum, the other way round
    edited(".reshape(batch, seq, hidden))\n", ".reshape(batch, seq, hidden)) + x\n")
    edited("F.scaled_dot_product_attention(q, k, v, is_causal=True)", "attention(q, k, v)")
    edited(
        "class Block(",
        "def attention(q, k, v):\n"
        "    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5\n"
        "    future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).triu(1)\n"
        "    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v\n\n\n"
        "class Block(",
    )
    status, out, _ = ablate("try", "s", *begun, "--json")
    verdict = json.loads(out)
    assert (status, verdict["verdict"]) == (3, "rejected")
    assert abs(verdict["screen"]["difference"]) < 1e-3
    Path("train.py").write_text(source)
    edited("default=1e-3", "default=1e-2")
    status, out, _ = ablate("try", "s", "--json")
    assert (status, json.loads(out)["verdict"]) == (0, "adopted")
    assert json.loads(out)["confirmation"]["difference"] < -0.1


LIGHTNING = """
import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.lr = lr

    def loss(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def training_step(self, batch, index):
        return self.loss(batch)

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


lightning.seed_everything(1)
x = torch.randn(64, 4)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Regression(float(sys.argv[1].partition("=")[2])), data, data)
print("val_loss:", trainer.callback_metrics["val_loss"].item())
"""


@pytest.mark.slow
def test_a_lightning_script_without_a_seed_is_reseeded(ablate):
    Path("fit.py").write_text(LIGHTNING)
    command = (PYTHON, "fit.py", "--lr=0.01")
    alone = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    Path("e.yaml").write_text(
        yaml.safe_dump(
            {
                "command": f"{PYTHON} fit.py {{options}}",
                "read": "val_loss: {number}",
                "reseed": True,
                "pairs": 4,
                "options": {"lr": 0.01},
                "variants": {"high": {"lr": 0.1}},
            }
        )
    )
    status, out, _ = ablate("run", "e.yaml", "--trust-code")
    assert status == 0
    assert "\nhigh: better; " in out
    assert "The baseline with seed 0, trained twice: bit-identical." in out
    assert losses("e")[RunKey("baseline", 0)] == float(re.search(r"val_loss: (\S+)", alone)[1])


def test_a_baseline_that_fails_with_every_seed_stops_the_experiment(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.py").write_text("import sys\nprint('loss', sys.argv[1])\nsys.exit('--x=1' not in sys.argv)\n")
    words = ["--command", "python run.py {seed} {options}", "--read", "loss {number}", "--vary", "x=1"]
    assert main(["ablate", "run", *words]) == 2
    said = capsys.readouterr().err
    assert "all 3 runs of the baseline failed, the last one so: failed: exit status 1, loss 0; see " in said
    assert len(list(Path("runs/ablate/runs").glob("*/summary.json"))) < 8


@pytest.mark.parametrize("metric", ["", "-", "a\nb"])
def test_a_metric_needs_a_name(tmp_path, monkeypatch, capsys, metric):
    monkeypatch.chdir(tmp_path)
    words = ["--command", "python run.py {seed} {options}", "--read", "loss {number}", "--vary", "x=1"]
    assert main(["ablate", "run", *words, f"--metric={metric}"]) == 2
    assert "metric is " in capsys.readouterr().err
    assert not Path("runs").exists()


def test_code_that_was_edited_meanwhile_is_no_part_of_an_option_experiment(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("part.py").write_text("LOSS = 3\n")
    Path("run.py").write_text("import sys, part\nprint('loss', part.LOSS + hash(str(sys.argv)) % 1000 / 1e5)\n")
    words = ["ablate", "run", "--command", "python run.py {seed} {options}", "--read", "loss {number}", "--vary", "x=1"]
    assert main([*words, "--pairs", "2"]) == 0
    Path("part.py").write_text("LOSS = 4\n")
    assert main(["ablate", "extend", "runs/ablate", "--pairs", "2"]) == 2
    assert "is no longer that of the plan, which would mix two versions" in capsys.readouterr().err
    assert main([*words, "--pairs", "2"]) == 2
    assert "has a plan with another code of the baseline" in capsys.readouterr().err
    assert main([*words, "--pairs", "2", "--name", "second"]) == 0
    assert "not independent" not in capsys.readouterr().err
