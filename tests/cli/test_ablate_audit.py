"""``lightning-llm ablate audit``."""

import json

import pytest

from lightning_llm.__main__ import main

LOG = "commit\tval_bpb\tstatus\na\t1.0\tkeep\nb\t0.9\tkeep\nc\t0.95\tdiscard\n"


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "results.tsv"
    path.write_text(LOG)
    return str(path)


def test_the_command_prints_sentences_or_numbers(log, capsys):
    assert main(["ablate", "audit", log, "--noise", "0.01"]) == 0
    said = capsys.readouterr().out
    assert "a first run and 2 tries, 1 kept." in said
    assert "these single steps are shown: b (0.1)" in said
    assert main(["ablate", "audit", log, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["keeps"] == 1
    assert main(["ablate", "audit", log, "--metric", "-val_bpb"]) == 0
    assert "higher is better" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nowhere.tsv"], "nowhere.tsv"),
        (["LOG", "--noise", "-1"], "noise (--noise) must be above 0, got -1.0"),
        (["LOG", "--metric", "loss"], "metric (--metric) must be one of val_bpb"),
    ],
)
def test_a_mistake_is_one_line(log, capsys, words, problem):
    assert main(["ablate", "audit", *(log if word == "LOG" else word for word in words)]) == 2
    said = capsys.readouterr()
    assert problem in said.err
    assert said.err.count("\n") == 1
    assert not said.out
