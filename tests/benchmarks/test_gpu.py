"""``python -m benchmarks.gpu``: a dry run of everything on the CPU, and what it does when something goes wrong."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatch
from multiprocessing import util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import steps, swiglu
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import end_to_end, next_list, operators, runner, second_list, third_list, training
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.runner import Machine, run_part
from benchmarks.plain_gpt import PlainGPT
from benchmarks.rows import Row, read_rows
from benchmarks.workloads import model_config, sizes_of
from lightning_llm.model import Transformer
from tests.docs.markdown import ROOT
from tests.docs.shell import KILLED, PROCESS_ID

PART = """
import os, tempfile, time
from functools import partial
from pathlib import Path
from benchmarks.gpu.runner import Part, Task

def draw(rows, path, title):
    path.write_text(title)

def tasks(machine):
    runs = {"first": good, "raises": bad, "dies": partial(os._exit, 7)}
    if (machine.inputs / "fixed").exists():
        runs = dict.fromkeys(runs, good) | {"hangs": partial(time.sleep, 600)}
    found = [Task(name, 0.2 if name == "hangs" else 30, partial(note, machine, name, runs[name])) for name in runs]
    missing = Task("missing", 30, partial(note, machine, "missing", none), must=True)
    return [*found, missing, Task("long", 10_000, good)]

def note(machine, name, run):
    with (machine.inputs / "log.txt").open("a") as file:
        file.write(name + "\\n")
    Path(tempfile.mkdtemp(), "checkpoint").touch()
    for number in run() or []:
        yield machine.row(f"{name} {number}", [0.1 * number])
    if run is none:
        yield machine.row(name, error="it is not installed", is_missing=True)

def good():
    return [1, 2]

def none():
    return []

def bad():
    raise ValueError("out of luck")

columns = {"ms": ("total_s", 1e3, ".1f")}
PART = Part(name="toy", tasks=tasks, columns=columns, draw=draw, files=["benchmarks"])
"""


@pytest.fixture
def part(tmp_path, monkeypatch):
    """A part with measurements that go wrong in every way."""
    (tmp_path / "toy_part.py").write_text(PART)
    monkeypatch.syspath_prepend(tmp_path)
    import toy_part

    return toy_part.PART


@pytest.mark.slow  # processes that load everything
def test_rows_are_kept_and_only_what_is_missing_is_measured(part, tmp_path, monkeypatch, capsys):
    machine, out = Machine(inputs=tmp_path, dry_run=True), tmp_path / "out"
    (folders := tmp_path / "tmp").mkdir()
    util.get_temp_dir()  # of sockets, whose paths must be short, and for all tests
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    left = folders / f"{runner.FOLDERS}{2**22 + 1}-of-a-killed-command"  # no process has this number
    (left / "checkpoint").mkdir(parents=True)
    (tmp_path / "commit.txt").write_text("c0ffee\n")
    assert run_part(part, machine, out, command="the command", limit_s=200, only=["*"]) == 1
    record = json.loads((out / "toy-dry-run.json").read_text())
    assert (record["command"], record["files"]) == ("the command", ["benchmarks"])
    found = {}
    for row in record["rows"]:
        found.setdefault(row["task"], []).append((row["variant"], row["total_s"], row.get("error")))
    assert found == {
        "first": [("first 1", 0.1, None), ("first 2", 0.2, None)],
        "raises": [("raises", None, "ValueError: out of luck")],
        "dies": [("dies", None, "its process ended with status 7")],
        "missing": [("missing", None, "it is not installed")],
    }
    assert (tmp_path / "log.txt").read_text().split() == ["missing", "first", "raises", "dies"]  # must-haves first
    assert not list(folders.glob(f"{runner.FOLDERS}*"))
    said = capsys.readouterr().out
    assert "0 of 5 measurements" in said
    assert "not measured, there was no time left: long; run the command again" in said
    assert (out / "toy-dry-run.png").read_text().startswith("toy: ")

    (tmp_path / "log.txt").unlink()
    (tmp_path / "fixed").touch()
    (tmp_path / "toy-dry-run.json").write_text((out / "toy-dry-run.json").read_text())
    moved = tmp_path / "elsewhere"  # the rows of an earlier start may be among the inputs
    assert run_part(part, machine, moved, command="the command", limit_s=200, only=["*"]) == 1
    # those that failed come last, and what must be measured first among them
    assert (tmp_path / "log.txt").read_text().split() == ["hangs", "missing", "raises", "dies"]
    rows = read_rows(moved / "toy-dry-run.json")
    assert {row.variant: row.error for row in rows if row.error and not row.is_missing} == {
        "hangs": "stopped after 1 s"
    }
    assert {row.task for row in rows} == {"first", "raises", "dies", "hangs", "missing"}
    assert "1 of 6 measurements" in capsys.readouterr().out
    assert not list(folders.glob(f"{runner.FOLDERS}*"))

    (tmp_path / "log.txt").unlink()
    chosen = {"command": "the command", "limit_s": 200, "only": ["mis*", "raises"]}
    # an optional package is missing, and what failed once ("dies") is not asked for
    assert run_part(part, machine, tmp_path / "chosen", **chosen) == 0
    assert (tmp_path / "log.txt").read_text().split() == ["missing", "raises"]
    kept = {row.task for row in read_rows(tmp_path / "chosen" / "toy-dry-run.json")}
    assert kept == {"first", "raises", "dies", "missing"}


def test_a_pattern_that_fits_nothing_is_a_mistake(part, tmp_path):
    with pytest.raises(ValueError, match=r"--only 'rises': this part has 'first', 'raises', 'dies', 'missing', 'long'"):
        run_part(part, Machine(inputs=tmp_path), tmp_path, command="", limit_s=1, only=["first", "rises"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--inputs", "nowhere"], "--inputs nowhere is no folder"),
        (["--inputs", "."], "there is no CUDA device: --dry-run runs all of it on the CPU"),
    ],
)
def test_mistakes_are_one_line(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "_install", lambda missing, wheels: [])
    monkeypatch.chdir(tmp_path)
    assert main(["--part", "a", "--out", "out", *words]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_missing_packages_are_installed_from_the_folder_or_named(tmp_path, monkeypatch, capsys):
    asked, there = [], {"rich"}
    monkeypatch.setattr(command, "REQUIRED", {"rich": "rich", "lost": "lost"})
    monkeypatch.setattr(command, "OPTIONAL", {"gone": "gone"})
    monkeypatch.setattr(command, "find_spec", lambda name: name if name in there else None)

    def install(words, **_):
        asked.append(words[-2:])
        there.update({"gone"} & {words[-1]})
        said = "ERROR: No matching distribution found for lost\nWARNING: try again"
        return SimpleNamespace(returncode=words[-1] == "lost", stderr=said)

    monkeypatch.setattr(command.subprocess, "run", install)
    (tmp_path / "wheels").mkdir()
    assert main(["--part", "b", "--out", str(tmp_path / "out"), "--inputs", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert asked == [[str(tmp_path / "wheels"), name] for name in ("lost", "gone")]
    assert said.out == "pip install lost: ERROR: No matching distribution found for lost\nnot installed: lost\n"
    assert f"lost must be installed: put the wheels into {tmp_path / 'wheels'}" in said.err


def test_required_packages_are_those_of_the_project():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.findall(r'^    "([\w\[\]-]+)', text.partition("\ndependencies = [")[2].partition("\n]")[0], re.M)
    assert set(listed) == set(command.REQUIRED.values())


def test_the_parts_measure_what_they_should():
    names = {part: [task.name for task in part.tasks(Machine(inputs=Path()))] for part in (operators, training)}
    assert len(operators.CONFIGS) == 20
    for name in operators.CONFIGS:
        assert f"peak: {name}" in names[operators]
    assert names[operators].index("gpu tests") == 0
    assert {f"MLP {shape} float32" for shape in swiglu.BENCH.named_shapes["notebook"]} < set(names[operators])
    assert operators.LARGEST in swiglu.BENCH.named_shapes["notebook"]
    first_round = {f"{model}, {side}, round 1" for model, sides in training.SIDES.items() for side in sides}
    assert first_round < set(names[training])
    for part in (*names, end_to_end):
        tasks = part.tasks(Machine(inputs=Path()))
        assert len({task.name for task in tasks}) == len(tasks)
        must = [task for task in tasks if task.must]
        assert must
        assert sum(task.seconds for task in must) <= command.LIMIT_S, part


def test_the_second_round_has_the_reverse_order():
    names = [task.name for task in training.tasks(Machine(inputs=Path()))]
    rounds = [[name[:-1] for name in names if name.endswith(f"round {number}")] for number in (1, 2)]
    assert len(rounds[0]) == 11
    assert rounds[1] == rounds[0][::-1]


def _measured(model, variant, speed, **fields):
    origin = {"machine": "NVIDIA H200", "torch": "2.13", "commit": "c0ffee", "code": "1"}
    return Row(**{**origin, "model": model, "variant": variant, "tokens_per_s": speed, "dtype": "bfloat16", **fields})


def test_ours_is_compared_with_the_others_of_its_model():
    rows = [_measured("124 M", training.OURS, 240), _measured("124 M", training.NANOGPT, 200)]
    rows += [_measured("124 M", training.NANOGPT, 100), _measured("1.3 B", training.OURS, 30)]
    rows += [_measured("1.3 B", training.LIGER, 20), _measured("1.3 B", training.NANOGPT, None)]
    training.derive(rows)
    assert (rows[0].over_nanogpt, rows[0].over_transformers) == (240 / 150, None)
    assert (rows[3].over_nanogpt, rows[3].over_transformers) == (None, 1.5)
    for speed, expected in ((15, 1.5), (25, 1.2)):  # the faster of both counts
        training.derive([*rows, _measured("1.3 B", training.TRANSFORMERS, speed)])
        assert rows[3].over_transformers == expected


@pytest.mark.parametrize("other", [{"machine": "NVIDIA H100"}, {"torch": "2.12"}, {"commit": "f00d"}, {"code": "2"}])
def test_ratios_never_mix_cards_versions_or_code(other):
    rows = [_measured("124 M", training.OURS, 240), _measured("124 M", training.NANOGPT, 200, **other)]
    rows.append(_measured("124 M", training.OURS, 100, **other))
    training.derive(rows)
    assert [row.over_nanogpt for row in rows] == [None, None, 0.5]


def test_targets_are_those_of_the_card():
    cards = ("NVIDIA H200", "NVIDIA H100 80GB", "NVIDIA GH200 480GB", "toaster")
    rows = [_measured("124 M", training.OURS, 1, machine=card) for card in cards]
    training.derive(rows)
    found = [row.targets for row in rows]
    assert found == [{"over_nanogpt": 1.0, "over_transformers": 1.2}, {"mfu": 0.45}, None, None]


def test_only_rows_of_the_same_card_torch_and_code_count_as_measured(part, tmp_path, monkeypatch):
    record = runner.Record(part, Machine(inputs=tmp_path, dry_run=True), tmp_path, "the command")
    record.add("first", [vars(Machine(inputs=tmp_path, dry_run=True).row("it", [1.0]))])
    assert record.has("first")
    for name in ("commit_of_package", "package_digest"):
        with monkeypatch.context() as patched:
            patched.setattr(runner, name, lambda: "another")
            assert not runner.Record(part, Machine(inputs=tmp_path, dry_run=True), tmp_path, "").has("first")
    content = json.loads(record.path.read_text())
    for name in ("machine", "torch"):
        changed = {**content, "rows": [{**content["rows"][0], name: "another"}]}
        record.path.write_text(json.dumps(changed))
        again = runner.Record(part, Machine(inputs=tmp_path, dry_run=True), tmp_path, "the command")
        assert not again.has("first")
    again.add("first", [vars(Machine(inputs=tmp_path, dry_run=True).row("it", [2.0]))])
    kept = {row.torch: row.total_s for row in read_rows(record.path)}  # both, next to each other
    assert kept == {"another": 1.0, torch.__version__: 2.0}


def test_the_chosen_tests_are_those_of_the_command(monkeypatch, tmp_path):
    asked = []

    def finish(*words, **_):
        asked.append(words[words.index("-k") + 1] if "-k" in words else None)
        raise RuntimeError("no report")

    monkeypatch.setattr(operators, "finish", finish)
    for tests in (None, "test_one"):
        for chosen in ("", "test_first"):
            with pytest.raises(RuntimeError, match="no report"):
                list(operators.gpu_tests(Machine(inputs=tmp_path, tests=tests), chosen))
    assert asked == [None, "test_first", "test_one", "test_one"]


def test_the_first_tests_exist():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in next_list.FIRST_TESTS.split(" or "):
        assert f"def {name}" in tests


def test_the_sum_of_the_probe_is_that_of_the_loss(tmp_path, monkeypatch):
    """On a CPU, by a stand-in for the sum inside the matmul, which only CUDA has."""
    asked, matmul_into = [], next_list.matmul_into

    def sum_after(*tensors, **options):
        asked.append(options)
        matmul_into(*tensors, **options)

    def sum_inside(total, left, right, *, out_dtype, out):
        matmul_into(out, left, right, accumulate=True)

    monkeypatch.setattr(next_list, "matmul_into", sum_after)
    monkeypatch.setattr(next_list.torch, "addmm", sum_inside)
    rows = {row.variant: row for row in next_list._probes(Machine(inputs=tmp_path, dry_run=True))}
    assert {"accumulate": True} in asked
    assert rows["head's gradient, sum inside"].same_bits


def test_the_lists_fit_their_commands():
    sums = {part: sum(task.seconds for task in part.tasks(Machine(inputs=Path()))) for part in (next_list, second_list)}
    assert sums[next_list] <= 9.3 * 60
    assert sums[second_list] <= 9 * 60


def test_two_states_are_interleaved(tmp_path):
    with pytest.raises(ValueError, match="compared has 0 folders with a lightning_llm: it takes two"):
        third_list.tasks(Machine(inputs=tmp_path))
    for name in ("old", "new"):
        (tmp_path / "compared" / name / "lightning_llm").mkdir(parents=True)
    names = [task.name for task in third_list.tasks(Machine(inputs=tmp_path))]
    assert names[:4] == [f"124 M, {training.OURS}, {turn}" for turn in ("new, 1", "old, 1", "old, 2", "new, 2")]
    rows = [_measured("124 M", training.OURS, 1, state=state, total_s=s) for state, s in (("new", 1.0), ("old", 2.0))]
    rows.append(_measured("124 M", training.OURS, 1, state="old", total_s=9.0, machine="NVIDIA H100"))
    third_list.derive(rows)
    assert [row.over_other for row in rows] == [0.5, 2.0, None]


QUESTIONS = """
import importlib, torch
asked = []
for name in ("is_available", "device_count", "init", "_lazy_init"):
    setattr(torch.cuda, name, lambda *_, name=name: asked.append(name) or 0)
for module in {modules}:
    importlib.import_module(module)
print(asked)
"""


def test_what_is_loaded_before_a_fork_does_not_ask_for_cuda():
    """Nothing forked from a process that has loaded CUDA can use it."""
    words = [sys.executable, "-c", QUESTIONS.format(modules=runner.PRELOADED)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


COMPILE = """
import sys, torch
from pathlib import Path
from benchmarks.gpu.runner import Machine
from benchmarks.gpu.training import CompiledCode
code = CompiledCode(Machine(inputs=Path("inputs"), out=Path("out")), "124 M, a side")
was_loaded = code.load()
torch.compile(lambda x: (2 * x).sin().sum())(torch.ones(100))
code.save()
print(was_loaded, torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


def test_compiled_code_is_kept_for_another_machine(tmp_path):
    said, script = [], tmp_path / "script.py"
    script.write_text(COMPILE)
    for number in range(2):
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"machine-{number}"), "PYTHONPATH": str(ROOT)}
        (tmp_path / f"machine-{number}").mkdir()
        words = [sys.executable, str(script)]
        done = subprocess.run(
            words, cwd=tmp_path, env={**os.environ, **caches}, capture_output=True, text=True, check=True
        )
        said.append(done.stdout.strip())
        (tmp_path / "out").rename(tmp_path / "inputs") if number == 0 else None
    assert said == ["False 0", "True 1"]


def test_utilization_counts_the_flops_of_the_model(monkeypatch):
    config = model_config(sizes_of(training.SHAPES["124 M"], training.baselines.BENCH.sizes, ""))
    monkeypatch.setattr(steps, "describe_machine", lambda device: "NVIDIA H100 80GB HBM3")
    matrices = 12 * (4 * 768**2 + 3 * 768 * 2048) + 768 * 50304
    flops = 6 * matrices + 12 * 12 * 768 * 1024  # all pairs of positions
    assert steps.utilization(config, 1024, 1e6, "cuda", "bfloat16") == pytest.approx(1e6 * flops / 989.5e12)
    monkeypatch.setattr(steps, "describe_machine", lambda device: "a toaster")
    assert steps.utilization(config, 1024, 1e6, "cuda", "bfloat16") is None


def test_the_plain_gpt_has_the_matrices_of_ours():
    config = model_config({"vocab": 65, "hidden": 32, "heads": 2, "layers": 2, "intermediate": 64, "context": 16})

    def elements(model):
        return sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "position" not in name)

    assert elements(PlainGPT(config)) == elements(Transformer(config))


PARTS = {"a": operators, "b": training, "c": end_to_end}
PARTS |= {"next": next_list, "second": second_list, "third": third_list}
# a few of those that differ in their config alone: each is a process
SOME = {
    "a": ("gpu tests", "MLP *", "loss *", "peak: 1.3 B*", "peak: bf16-true", "peak: context 4096"),
    "b": ("124 M, ours, round 1", "124 M, nanogpt (compiled), profile"),
    "c": ("resume", "asynchronous saving", "generation"),
    "next": ("gpu tests", "probes", "124 M, nanogpt (compiled), profile", "Shakespeare, ours, *", "*captured*"),
    "second": ("loss chunks", "124 M, 8 rows, ours, *", "DDP, optimize_ddp off", "FSDP2*", "resume*"),
    "third": ("*old, 1", "*new, 2"),
}
EXCUSED = re.compile("is not installed|has none$|it needs CUDA")  # what the environment of a test may lack


@pytest.mark.slow
@pytest.mark.parametrize("letter", PARTS)
def test_a_dry_run_measures_everything(letter, tmp_path, text_file, quick_processes):
    """The whole command, whose runs start at once; one part is killed after its first rows, and started again."""
    part, inputs, out = PARTS[letter], tmp_path / "inputs", tmp_path / "out"
    inputs.mkdir()
    (inputs / "tinyshakespeare.txt").write_bytes(text_file.read_bytes())
    for state in ("old", "new"):
        shutil.copytree(ROOT / "lightning_llm", inputs / "compared" / state / "lightning_llm")
    words = [quick_processes.python, "-m", "benchmarks.gpu", "--part", letter, "--dry-run"]
    words += ["--inputs", str(inputs), "--out", str(out)]
    tasks = {task.name for task in part.tasks(Machine(inputs=inputs, dry_run=True))}
    tasks = {name for name in tasks if any(fnmatch(name, pattern) for pattern in SOME[letter])}
    words += ["--only", *SOME[letter]]
    assert len(tasks) >= len(SOME[letter])
    # not the compiler's own cache, in which a kill leaves a half-written file; and other tests take the cores
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}
    environment = {**clean, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment |= {**quick_processes.environment, PROCESS_ID: str(tmp_path / "process")}
    path = out / f"{part.PART.name}-dry-run.json"
    first = None
    if part is training:
        with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as process:
            while process.poll() is None and not path.exists():
                time.sleep(0.1)
            os.kill(int((tmp_path / "process").read_text()), signal.SIGKILL)
            assert process.wait() == KILLED
        first = read_rows(path)[0]
    done = subprocess.run([*words, "--limit-s", "1500"], cwd=ROOT, env=environment, capture_output=True, text=True)
    rows = read_rows(path)
    failed = {row.variant: row.error for row in rows if row.error and not EXCUSED.search(row.error)}
    assert not failed, done.stderr
    assert "not measured" not in done.stdout
    assert {row.task for row in rows} == tasks
    if first is not None:
        again = vars(next(row for row in rows if (row.task, row.variant) == (first.task, first.variant)))
        assert {**again, **vars(first)} == again  # it may be completed from rows that came later
    assert path.with_suffix(".png").is_file(), f"{done.stdout}\n{done.stderr}"
    assert path.with_suffix(".png").stat().st_size > 5000
    assert json.loads(path.read_text())["command"] == f"python -m benchmarks.gpu --part {letter} --dry-run"
    if part is third_list:
        assert all(row.package == str(inputs / "compared" / row.state) for row in rows)
    if part is end_to_end:
        assert all(row.same_bits for row in rows if row.variant.startswith("resume"))
