"""The text at the end of a run is an extra: nothing about it decides how the run ends."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from lightning_llm.__main__ import main
from lightning_llm.cli import training_output


def result():
    return json.loads(Path("runs/run/version_0/summary.json").read_text())


def test_raw_files_have_no_sample_and_the_run_succeeds(tiny, tmp_path, capsys):
    (tmp_path / "raw").mkdir()
    for split, size in (("train", 4000), ("val", 400)):
        (np.arange(size) % 50).astype("<u2").tofile(tmp_path / "raw" / f"{split}.bin")
    options = {"data.path": None, "data.store": "raw", "data.raw_dtype": "uint16", "data.vocab_size": 50}
    tiny("fit", **options)
    out = capsys.readouterr().out
    assert "no sample  the data have no tokenizer to print text" in out
    assert out.index("no sample") < out.index("next")
    assert result()["steps"] == 6


def test_text_without_a_newline_is_continued_from_its_first_character(tiny, tmp_path, text_file, capsys):
    (tmp_path / "line.txt").write_text("!" + text_file.read_text().replace("\n", " "))
    tiny("fit", **{"data.path": "line.txt"})
    out = capsys.readouterr().out
    assert "no sample" not in out
    assert out.split("a sample\n")[1].startswith("!")
    assert result()["steps"] == 6


@pytest.mark.parametrize("error", [RuntimeError("out of\n memory [bold]"), IndexError(), MemoryError()])
def test_what_goes_wrong_in_generating_is_a_line(tiny, monkeypatch, capsys, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(training_output, "generate", fail)
    cli = tiny("fit")
    reason = " ".join(str(error).split()) or type(error).__name__
    assert f"no sample  {reason}\n" in capsys.readouterr().out
    assert result()["steps"] == 6
    assert cli.model.training


@pytest.mark.parametrize("tokenizer", ["char", "byte"])
def test_the_next_commands_can_be_typed_as_they_are(tiny, capsys, tokenizer):
    tiny("fit", **{"data.tokenizer": tokenizer, "trainer.max_steps": 1})
    command = capsys.readouterr().out.partition("lightning-llm generate ")[2].splitlines()[0]
    assert "--prompt" in command
    assert main(["generate", *shlex.split(command)]) == 0


@pytest.mark.parametrize(
    ("text", "tokenizer"),
    [
        ("春眠不觉晓处处闻啼鸟夜来风雨声花落知多少" * 200, "char"),  # no spaces
        ("春眠不觉晓处处闻啼鸟夜来风雨声花落知多少" * 200, "byte"),  # the context ends in a character
        ("-- --temperature " * 300, "char"),
        ("\x1b[1m\x07- " * 500, "char"),
        ("  " * 2000, "char"),
    ],
)
def test_the_next_commands_work_whatever_the_text_and_the_folder_are(tiny, tmp_path, capsys, text, tokenizer):
    (tmp_path / "odd.txt").write_text(text)
    options = {"data.path": "odd.txt", "data.tokenizer": tokenizer, "trainer.default_root_dir": "-ru ns~"}
    tiny("fit", **{**options, "trainer.max_steps": 1})
    commands = capsys.readouterr().out.partition("\nnext\n")[2].splitlines()
    generate, validate, dashboard = (shlex.split(command)[1:] for command in commands)
    assert all(len(word) < 50 for word in generate)
    assert main(generate) == 0
    assert main(validate) == 0
    assert dashboard[0] == "dashboard"
    assert Path(dashboard[1]).is_dir()


def test_a_sample_of_blank_lines_is_short(tiny, monkeypatch, capsys):
    for text, shown in (("\na\n\n \n\n  b\nc\n\n", "a\n\n  b\nc\n"), ("\n" * 40, "only blank lines\n")):
        monkeypatch.setattr(training_output, "_sample", lambda model, data, text=text: text)
        tiny("fit", **{"trainer.max_steps": 1})
        assert capsys.readouterr().out.partition("\na sample\n")[2].partition("\nnext\n")[0] == shown
