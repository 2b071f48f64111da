"""``lightning-llm ablate try`` with a command: ideas are its options, or the code of the working tree."""

import json
import subprocess
from pathlib import Path

import pytest

from lightning_llm.__main__ import main

PROGRAM = """
import argparse, random
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()
noise = random.Random(args.seed).gauss(0, 0.02), random.Random(f"{args.seed} {args.lr}").gauss(0, 0.001)
print(f"val loss {3 - args.lr + sum(noise)}")
"""
COMMAND = "python train.py --seed={seed} {options} # {run}"
OF_TREE = ["--command", "python train.py --seed={seed}", "--read", "val loss {number}", "--against", "HEAD"]
OF_OPTIONS = ["--command", "sh -c 'python train.py --seed={seed} {options} # {run}'", "--read", "val loss {number}"]


def git(*words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *identity, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    git("init", "-q")
    git("add", "train.py")
    git("commit", "-qm", "first")
    return tmp_path


def try_idea(*words):
    return main(["ablate", "try", "s", *words])


def edit(old, new):
    text = Path("train.py").read_text()
    assert old in text
    Path("train.py").write_text(text.replace(old, new))


@pytest.mark.slow
def test_ideas_of_a_command_are_its_options(repository, capsys):
    assert try_idea(*OF_OPTIONS, "--vary", "lr=0.3", "--json") == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["verdict"], verdict["unit"], verdict["options"]) == ("adopted", "val_loss", {"lr": "0.3"})
    assert verdict["confirmation"]["difference"] == pytest.approx(-0.2, abs=0.01)
    assert try_idea("--vary", "lr=0.1", "--json") == 3  # the baseline has 0.3 now
    assert json.loads(capsys.readouterr().out)["screen"]["difference"] == pytest.approx(0.2, abs=0.01)
    assert "lr: '0.3'" in Path("s/baseline.yaml").read_text()
    assert try_idea("--vary", "lr=0.2") == 3
    assert [path.name for path in sorted(Path("s/ideas").iterdir())] == ["0001-lr=0.3", "0002-lr=0.1", "0003-lr=0.2"]
    reused = [path.parent.name for path in Path("s/ideas/0003-lr=0.2/runs").glob("*/reused_from")]
    assert all(name.startswith("baseline,seed=") for name in reused)
    assert len(reused) == 3


def test_ideas_are_the_code_of_the_working_tree(repository, capsys):
    before = git("status", "--porcelain"), git("rev-parse", "HEAD")
    edit("3 - args.lr", "3.0 - args.lr")
    Path("notes.txt").write_text("mine")
    assert try_idea(*OF_TREE) == 3
    said = capsys.readouterr().out
    assert "rejected (place 1 of the stream)" in said
    assert "Screen: difference +0.0000 (95% interval +0.0000 to +0.0000) val_loss after 3 pairs." in said
    assert "its runs are bit-identical to the baseline's" in said
    back = next(line for line in said.splitlines() if line.startswith("To take it back: ")).partition(": ")[2]
    assert main(["ablate", "status", "s"]) == 0
    assert f"To take it back: {back}\n" in capsys.readouterr().out
    subprocess.run(back, shell=True, check=True)
    assert (Path("train.py").read_text(), Path("notes.txt").read_text()) == (PROGRAM, "mine")
    Path("notes.txt").unlink()
    edit("3 - args.lr", "2.9 - args.lr")
    assert try_idea() == 0
    assert "adopted (place 2 of the stream)" in capsys.readouterr().out
    assert try_idea() == 2
    assert "has no difference from the baseline of the stream" in capsys.readouterr().err
    edit("2.9 - args.lr", "3.0 - args.lr")  # known, but not on this baseline
    assert try_idea() == 3
    assert try_idea("--json") == 3  # from the journal
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["place"] == 3
    assert (len(list(Path("s/ideas").iterdir())), git("rev-parse", "HEAD")) == (3, before[1])
    assert git("status", "--porcelain") == " M train.py\n"  # the stream hides itself
    assert main(["ablate", "report", "s"]) == 0
    assert main(["ablate", "status", "s"]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (OF_OPTIONS, "s: neither of --vary and --against: an idea is --vary OPTION=VALUE"),
        ([*OF_TREE, "--vary", "lr=1"], "s: both of --vary and --against"),
        ([*OF_OPTIONS, "--vary", "lr=1", "--baseline", "a.yaml"], "--baseline is for fit, and --command is in place"),
        ([*OF_OPTIONS[:2], "--vary", "lr=1"], "--read is missing"),
        ([*OF_OPTIONS, "--vary", "lr=1", "--match", "flops"], "match flops is for configs of fit"),
        ([*OF_TREE[:4], "--against", "nowhere"], "'nowhere' is not a revision of the repository"),
        (OF_TREE, "the working tree has no difference from the baseline of the stream"),
        ([*OF_TREE[:4], "--revisions", "HEAD"], "--revisions is for ablate run"),
        (["--against", "HEAD"], "--against needs --command, which says what trains"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_stream(repository, capsys, words, says):
    assert try_idea(*words) == 2
    assert says in capsys.readouterr().err
    assert not Path("s").exists()


@pytest.mark.slow
def test_another_revision_or_command_than_the_first_is_refused(repository, capsys):
    edit("3 - args.lr", "3.0 - args.lr")
    assert try_idea(*OF_TREE) == 3
    edit("3.0 - args.lr", "3.1 - args.lr")
    for words, says in (
        (["--against", "HEAD~1"], "--against HEAD~1 is not what the stream began with"),
        (["--command", "python other.py {seed}", *OF_TREE[2:]], "--command is not what s began with"),
    ):
        assert try_idea(*words) == 2
        assert says in capsys.readouterr().err
    assert try_idea("--against", "HEAD") == 3


def test_an_idea_whose_program_fails_can_be_given_up(repository, capsys):
    edit("3 - args.lr", "nothing - args.lr")
    assert try_idea(*OF_TREE) == 1
    assert "NameError: name 'nothing' is not defined" in capsys.readouterr().err
    edit("nothing - args.lr", "3.1 - args.lr")
    assert try_idea() == 1  # the idea that waits is the old one
    assert "edits since then are not looked at; --give-up ends it" in capsys.readouterr().err
    assert try_idea("--give-up") == 3
    assert try_idea() == 3
