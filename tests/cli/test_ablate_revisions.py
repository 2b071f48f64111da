"""``ablate run --against`` and ``--revisions``: the code of a repository is compared, and nothing of it is touched."""

import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.ablate import Report
from lightning_llm.ablate.command.descendants import descendants
from lightning_llm.ablate.results import load_experiment
from tests.ablate.trees.conftest import commit, content_of, git, put
from tests.patience import HANGS_S

# A change of the gain shifts the loss, by a little more or less with each seed
TRAIN = """
import os, random, sys
seed = int(sys.argv[1])
GAIN = 0
loss = random.Random(seed).gauss(3, 0.1) - GAIN * (1 + seed / 1000)
print("val loss", loss)
"""
BETTER = TRAIN.replace("GAIN = 0", "GAIN = 1")
PYTHON = sys.executable
COMMAND = f"{PYTHON} train.py {{seed}}"
OUT = Path("runs/ablate")
VARIANT = "working-tree"


@pytest.fixture(autouse=True)
def his(tmp_path, monkeypatch):
    """His repository, which is the current folder: a program is committed."""
    (tmp_path / "gitconfig").write_text("[init]\n\tdefaultBranch = main\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    folder = tmp_path / "his"
    folder.mkdir()
    git(folder, "init", "--quiet")
    commit(folder, {"train.py": TRAIN, ".gitignore": "runs\ndata\nbuilt\n"})
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def compare(capsys):
    """``compare(word, …)``: run an experiment, by default of the working tree; the status, and what is printed."""

    def run(*words, command=COMMAND, against=("--against", "HEAD"), pairs=2):
        capsys.readouterr()
        options = ("--command", command, "--read", "val loss {number}", "--pairs", str(pairs))
        return main(["ablate", "run", *options, *against, *words]), *capsys.readouterr()

    return run


def rows(out=OUT):
    """What was found of each variant, by name, as JSON has it."""
    return {row.variant: dataclasses.asdict(row) for row in Report.read(out).of_kind("result")}


def losses(out=OUT):
    return {str(key): result.loss for key, result in load_experiment(out).results.items()}


def loss_of(seed, gain):
    return random.Random(seed).gauss(3, 0.1) - gain * (1 + seed / 1000)


def expected(gains, pairs=2):
    """The losses of all runs, by the gain of each variant."""
    again = {"baseline-again,seed=0": loss_of(0, gains["baseline"])}
    runs = {f"{name},seed={seed}": loss_of(seed, gain) for name, gain in gains.items() for seed in range(pairs)}
    return pytest.approx({**runs, **again})


def the_line(err):
    lines = [line for line in err.splitlines() if "error" in line]
    assert len(lines) == 1, err
    return lines[0].removeprefix("lightning-llm ablate: error: ")


def trees():
    return [*OUT.glob("trees/*/*/tree")]


def test_the_working_tree_is_compared_and_nothing_of_the_user_s_is_touched(his, compare):
    commit(his, {"staged": "1", "removed": "1", "half": "1"})
    put(his, {"half": "stashed"})
    git(his, "stash")
    put(his, {"staged": "2", "half": "2", "train.py": BETTER, "untracked": "1"})
    git(his, "add", "staged", "half")
    git(his, "rm", "--quiet", "--cached", "removed")
    put(his, {"half": "3"})
    (his / ".git" / "hooks" / "post-checkout").write_text("#!/bin/sh\ntouch hooked\n")
    (his / ".git" / "hooks" / "post-checkout").chmod(0o755)
    os.utime(his / "train.py", (1, 1))  # git's index has another time: a plain git status would write it
    before = content_of(his)
    status, out, _ = compare(pairs=4)
    assert status == 0
    assert content_of(his, ["runs"]) == before
    assert "\nworking-tree: better; " in out
    assert losses() == expected({"baseline": 0, VARIANT: 1}, pairs=4)
    patch = (OUT / "diffs" / "working-tree.patch").read_text()
    assert "+GAIN = 1" in patch
    assert "b/untracked" in patch
    assert trees() == []


@pytest.fixture
def parts(his):
    """Branches that change a gain each, of files of their own; the loss has an interaction of both."""
    files = {"one.py": "GAIN = 0", "two.py": "GAIN = 0"}
    train = """
import argparse, random
import one, two
parser = argparse.ArgumentParser()
parser.add_argument("seed", type=int)
parser.add_argument("--lr", type=float, default=0)
given = parser.parse_args()
gain = one.GAIN + two.GAIN - one.GAIN * two.GAIN + given.lr
print("val loss", random.Random(given.seed).gauss(3, 0.1) - gain * (1 + given.seed / 1000))
"""
    commit(his, {"train.py": train, **files})
    for name, gain in (("one", 0.5), ("two", 0.25)):
        git(his, "checkout", "--quiet", "-b", name, "main")
        commit(his, {f"{name}.py": f"GAIN = {gain}"})
    git(his, "checkout", "--quiet", "main")
    return his


def test_factors_that_are_revisions_are_merged(parts, compare):
    before = content_of(parts)
    factors = [f"--factor={factor}" for factor in ("one:@one", "two:@two", "fast:lr=0.125")]
    words = {"command": f"{PYTHON} train.py {{seed}} {{options}}", "against": ("--against", "main")}
    status, out, _ = compare(*factors, pairs=4, **words)
    assert status == 0
    assert content_of(parts, ["runs"]) == before
    gains = {"baseline": 0, "one": 0.5, "two": 0.25, "one+two": 0.625}
    gains |= {"fast" if name == "baseline" else f"{name}+fast": gain + 0.125 for name, gain in gains.items()}
    assert losses() == expected(gains, pairs=4)
    assert "one × two: 0.1252 less together than apart (" in out
    assert "one × fast: whether they add up is not shown" in out
    assert "\ntwo+fast: main + two (" in out
    assert "\nfast: lr=0.125\n" in out
    assert sorted(path.name for path in (OUT / "diffs").glob("*+*.patch")) == [
        *("one+fast.patch", "one+two+fast.patch", "one+two.patch", "two+fast.patch"),
    ]
    assert not (OUT / "diffs" / "fast.patch").exists()
    report = Report.read(OUT)
    assert report.design.revisions["one+two"].startswith("main + one + two (")
    assert trees() == []


def test_factors_that_conflict_are_one_line_and_leave_nothing(parts, compare):
    git(parts, "checkout", "--quiet", "-b", "other", "main")
    commit(parts, {"one.py": "GAIN = 0.75"})
    factors = ["--factor=one:@one", "--factor=other:@other"]
    status, _, err = compare(*factors, against=("--against", "main"))
    assert status == 2
    assert the_line(err).startswith("'other' conflicts with 'one' in one.py: change one of them")
    assert not OUT.exists()


def test_factors_need_the_revision_that_they_change(parts, compare):
    factors = ["--factor=one:@one", "--factor=two:@two"]
    status, _, err = compare(*factors, against=())
    assert status == 2
    assert "--factor has the revision @one: give --against REV too, the code that it changes" in the_line(err)


def test_a_factor_without_a_change_is_one_line(parts, compare):
    for revision, says in (("main", "main adds nothing to main: "), ("one~0", "one adds nothing to main + one~0: ")):
        status, _, err = compare("--factor=one:@one", f"--factor=two:@{revision}", against=("--against", "main"))
        assert status == 2
        assert the_line(err).startswith(says)
        assert not OUT.exists()
    git(parts, "checkout", "--quiet", "two")
    git(parts, "merge", "--quiet", "-m", "both", "one")
    git(parts, "checkout", "--quiet", "main")
    status, _, err = compare("--factor=one:@one", "--factor=two:@two", against=("--against", "main"))
    assert status == 2
    assert the_line(err).startswith("one adds nothing to main + two: ")


def test_a_killed_command_leaves_nothing_behind_and_continues(his, tmp_path, compare):
    code = """
import os, sys, time
started, free = map(os.path.abspath, sys.argv[2:])
with open(started, "a") as file:
    file.write(f"{os.getpid()}\\n")
open("state", "x").close()  # which fails where the killed run has left it
while len(open(started).readlines()) > 1 and not os.path.exists(free):
    time.sleep(0.05)
"""
    started, free = tmp_path / "started", tmp_path / "free"
    commit(his, {"train.py": TRAIN + code})
    put(his, {"train.py": BETTER + code})
    before = content_of(his)
    command = f"{COMMAND} {started} {free}"
    words = ["ablate", "run", "--command", command, "--read", "val loss {number}", "--pairs", "2", "--against", "HEAD"]
    with subprocess.Popen(
        [PYTHON, "-m", "lightning_llm", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            await_true(lambda: len(pids(started)) > 1 or process.poll() is not None)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    await_true(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids(started)))
    assert content_of(his, ["runs"]) == before
    free.touch()
    assert compare(command=command)[0] == 0
    assert content_of(his, ["runs"]) == before
    assert losses() == expected({"baseline": 0, VARIANT: 1})
    assert trees() == []


def pids(started):
    return started.read_text().split("\n")[:-1] if started.exists() else []


def await_true(is_true):
    deadline = time.monotonic() + HANGS_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("is_inside", [False, True])
def test_an_editable_install_is_that_of_the_tree(his, tmp_path, compare, is_inside):
    code = TRAIN.replace("GAIN = 0", "from pkg import GAIN")
    commit(his, {"train.py": code, "src/pkg/__init__.py": "GAIN = 0\n", ".gitignore": "runs\n.venv\n"})
    put(his, {"src/pkg/__init__.py": "GAIN = 1\n"})
    environment = (his if is_inside else tmp_path) / ".venv"
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", "--system-site-packages", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "pkg.pth").write_text(f"{his / 'src'}\n")
    python = Path(os.path.relpath(environment, his)) if is_inside else environment
    words = ("--link", ".venv") if is_inside else ()
    assert compare(*words, command=f"{python / 'bin' / 'python'} train.py {{seed}}")[0] == 0
    assert losses() == expected({"baseline": 0, VARIANT: 1})


def test_code_that_is_imported_from_the_user_s_folder_stops_it(his, compare, monkeypatch):
    code = "import os, sys; sys.path.insert(0, os.environ['SOURCES'])" + TRAIN.replace(
        "GAIN = 0", "from pkg import GAIN"
    )
    commit(his, {"train.py": code, "src/pkg/__init__.py": "GAIN = 0\n"})
    put(his, {"src/pkg/__init__.py": "GAIN = 1\n"})
    monkeypatch.setenv("SOURCES", str(his / "src"))
    status, _, err = compare()
    assert status == 2
    problem = f"the program imported {his}/src/pkg/__init__.py, not the file of its revision"
    assert problem in the_line(err)
    assert losses() == {}


def test_ignored_data_is_linked(his, compare):
    code = 'open("data/values").close()\n'
    commit(his, {"train.py": code + TRAIN})
    put(his, {"train.py": code + BETTER, "data/values": "1"})
    status, _, err = compare()
    print(err)
    assert status == 2
    assert "--link data" in the_line(err)
    status, _, err = compare("--link", "data")
    assert status == 0, err
    assert losses() == expected({"baseline": 0, VARIANT: 1})


def test_trees_stay_if_the_user_keeps_them(his, compare):
    put(his, {"train.py": BETTER})
    assert compare("--keep-trees")[0] == 0
    codes = {tree.joinpath("train.py").read_text() for tree in trees()}
    assert codes == {TRAIN, BETTER}


def test_a_comment_has_no_effect(his, compare):
    put(his, {"train.py": f"{TRAIN}# a comment\n"})
    status, out, _ = compare(pairs=4)
    assert status == 0
    line = r"working-tree: neither better nor worse is shown; .*the change has no effect on the output"
    assert re.search(line, out)


def test_an_edit_that_does_nothing_stops_a_program_that_is_not_python(his, compare):
    commit(his, {"train.sh": 'echo "val loss 3.$1"\n'})
    put(his, {"train.sh": 'echo "val loss 3.$1"  # a comment\n'})
    status, _, err = compare(command="sh train.sh {seed}")
    assert status == 2
    problem = "the change has no effect on the output: does the command run the code of this folder?"
    assert the_line(err).startswith(f"working-tree: {problem}")


def test_what_a_run_leaves_and_changes_is_named_and_the_next_starts_clean(his, compare):
    code = """
from pathlib import Path
if Path("state").exists() or Path("tracked").read_text() != "1":
    sys.exit("this is not clean")
Path("state").touch()
Path("tracked").write_text("2")
with open("data/values", "a") as file:
    file.write("3")
"""
    commit(his, {"train.py": TRAIN + code, "tracked": "1"})
    put(his, {"train.py": BETTER + code, "data/values": "1"})
    status, out, _ = compare("--link", "data", "--workers", "1", pairs=3)
    assert status == 0
    assert losses() == expected({"baseline": 0, VARIANT: 1}, pairs=3)
    assert "\nFiles that a run leaves in its tree (state) were moved to left in the folder of its run.\n" in out
    assert "\nA run changed files that git tracks (tracked): they were restored.\n" in out
    assert "\nA run changed what --link leads to (data/values), which all runs share.\n" in out
    assert (OUT / "runs" / "working-tree,seed=1" / "left" / "state").exists()
    assert (his / "tracked").read_text() == "1"
    assert not (his / "state").exists()


def test_compiled_code_is_built_once_in_each_tree(his, tmp_path, compare):
    code = TRAIN.replace("GAIN = 0", 'GAIN = int(open("built").read())')
    build = f"""open("built", "w").write(open("gain.c").read()); open("{tmp_path / "builds"}", "a").write("x")"""
    commit(his, {"train.py": code, "build.py": build, "gain.c": "0"})
    put(his, {"gain.c": "1"})
    status, _, err = compare()
    assert status == 2
    print(err)
    assert "gain.c" in the_line(err)
    assert "--setup" in the_line(err)
    assert not Path("runs").exists()
    assert compare("--setup", f"{PYTHON} build.py", "--workers", "1", pairs=3)[0] == 0
    assert losses() == expected({"baseline": 0, VARIANT: 1}, pairs=3)
    assert (tmp_path / "builds").read_text() == "xx"


def test_a_command_in_a_subfolder_starts_there(his, compare, monkeypatch):
    code = TRAIN.replace("GAIN = 0", 'GAIN = int(open("../gain").read())')
    commit(his, {"sub/train.py": code, "gain": "0"})
    put(his, {"gain": "1"})
    monkeypatch.chdir(his / "sub")
    assert compare()[0] == 0
    assert losses() == expected({"baseline": 0, VARIANT: 1})


def test_several_revisions_are_compared_with_the_first(his, compare):
    for gain in (1, 2, 3):
        commit(his, {"train.py": TRAIN.replace("GAIN = 0", f"GAIN = {gain}")})
        git(his, "tag", f"v{gain}")
    put(his, {"train.py": "this is not run"})
    assert compare(against=("--revisions", "v1", "v2", "HEAD"))[0] == 0
    assert losses() == expected({"baseline": 1, "v2": 2, "HEAD": 3})


def test_a_command_is_compared_with_itself(compare):
    status, out, _ = compare(against=("--null",), pairs=4)
    assert status == 0
    assert "unchanged: neither better nor worse is shown; " in out
    assert losses() == expected({"baseline": 0, "unchanged": 0}, pairs=4)


@pytest.mark.parametrize(
    ("against", "words", "line"),
    [
        (("--against", "HAD"), (), "'HAD' is not a revision of the repository "),
        (("--against", "HEAD", "--null"), (), "--against and --null say what is compared in two ways: give one"),
        (("--revisions", "HEAD"), (), "--revisions has one, which is compared with nothing"),
        (("--revisions", "HEAD", "main", "main"), (), "--revisions has one twice"),
        (("--revisions", "HEAD", "main"), (), "main has no difference from HEAD"),
        (("--against", "HEAD"), ("--link", "none"), "--link got 'none', but "),
        (("--against", "HEAD"), ("--link", "/etc"), "--link got '/etc', expected a path in "),
        (("--against", "HEAD"), ("--link", "train.py"), "--link got 'train.py', but the tree has train.py"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(his, compare, against, words, line):
    put(his, {"train.py": BETTER})
    before = content_of(his)
    status, out, err = compare(*words, against=against)
    assert (status, out) == (2, "")
    assert the_line(err).startswith(line)
    assert content_of(his) == before


def test_there_must_be_a_repository_and_a_difference(his, compare, tmp_path, monkeypatch):
    status, _, err = compare()
    assert status == 2
    assert the_line(err).startswith("the working tree has no difference from HEAD: change a file, or give --null")
    assert not Path("runs").exists()
    monkeypatch.chdir(tmp_path)
    put(tmp_path, {"train.py": TRAIN})
    assert the_line(compare()[2]).startswith(f"{tmp_path} is in no git repository")
    assert not Path("runs").exists()


KINDS = ("command", "supervisor", "program", "program", "supervisor")


@pytest.mark.slow
def test_kills_change_no_number(his, compare):
    """Ten, at random times, of the command, of supervisors and of programs; a killed command is run again."""
    code = "import time\ntime.sleep(0.3)\nopen('state', 'x').close()\n"
    commit(his, {"train.py": code + TRAIN})
    put(his, {"train.py": code + BETTER})
    before = content_of(his)
    command = f"{COMMAND} {{run}}"
    assert compare("--name", "undisturbed", command=command, pairs=8)[0] == 0
    words = ["ablate", "run", "--command", command, "--read", "val loss {number}", "--pairs", "8", "--against", "HEAD"]
    dice = random.Random(0)
    left = [*KINDS, *KINDS]
    dice.shuffle(left)
    killed = []  # programs
    while left:
        with subprocess.Popen(
            [PYTHON, "-m", "lightning_llm", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            while left and process.poll() is None:
                time.sleep(dice.uniform(0.0, 0.3))
                if victims := victims_of(process.pid, left[0], killed):
                    os.kill(*dice.choice(victims))
                    if left.pop(0) == "command":
                        break
            process.kill()
            error = process.stderr.read().decode()
        assert process.returncode == -signal.SIGKILL, error
        assert "error" not in error
        await_true(lambda: not any(f"{OUT.resolve()}/" in words_of(pid) for pid in all_processes()))
    assert compare(command=command, pairs=8)[0] == 0
    undisturbed = Path("runs/undisturbed")
    assert losses() == losses(undisturbed)
    for key in ("by_seed", "interval", "diverged"):
        assert rows()[VARIANT][key] == rows(undisturbed)[VARIANT][key]
    assert content_of(his, ["runs"]) == before
    assert trees() == []


def victims_of(command, kind, killed):
    """The processes of a kind, with the signal, while a program runs; of each run's programs one, since two count."""
    running = {pid: words_of(pid) for pid in descendants(command)}
    programs = [pid for pid, words in running.items() if words.startswith(f"{PYTHON} train.py")]  # git names it too
    if kind == "command":
        return [(command, signal.SIGKILL)] if programs else []
    if kind == "supervisor":
        return [(pid, signal.SIGKILL) for pid, words in running.items() if "command.supervise" in words]
    new = [pid for pid in programs if running[pid] not in killed]
    killed += [running[pid] for pid in new[:1]]
    return [(pid, signal.SIGKILL) for pid in new[:1]]


def words_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:  # it has just ended
        return ""


def all_processes():
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]
