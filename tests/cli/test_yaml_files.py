"""A key that is given twice is an error wherever a config is read, and the line says which, where."""

import pytest

from lightning_llm.__main__ import main
from lightning_llm.cli.yaml_files import RepeatedKeyError, check_keys, read_config

TWICE = "trainer:\n  max_steps: 3\n  accelerator: cpu\n  max_steps: 4\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TWICE, "'max_steps' is given twice, in lines 2 and 4"),
        ("model: {a: 1}\ndata: {}\nmodel: {b: 1}\n", "'model' is given twice, in lines 1 and 3"),
        ("a: [{b: 1, 'b': 2}]", "'b' is given twice, in line 1"),
        ("a: &x {b: {c: 1, c: 2}}\nd: *x\n", "'c' is given twice, in line 1"),
        ("1: a\n2: b\n1: c\n", "'1' is given twice, in lines 1 and 3"),
    ],
)
def test_a_key_given_twice_is_named_with_its_lines(text, says):
    with pytest.raises(RepeatedKeyError, match=says):
        check_keys(text)


def test_what_an_anchor_brings_in_may_be_overridden(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("first: &first {a: 1, b: 2}\nsecond: &second {<<: *first, b: 3}\nthird: {<<: *second, a: 1}\n")
    assert read_config(file)["third"] == {"a": 1, "b": 3}


def test_an_anchor_may_hold_itself():
    check_keys("a: &a [*a, {b: 1}]")


@pytest.mark.parametrize(
    "words",
    [
        ["fit", "--config", "twice.yaml"],
        ["validate", "--ckpt_path", "last", "--config=twice.yaml"],
        ["check", "--trainer", "section.yaml"],
        ["estimate", "--config", "twice.yaml"],
        ["plan", "--config", "twice.yaml", "--memory", "1GiB"],
        ["compare", "run"],
        ["dashboard", "run"],
    ],
)
def test_every_command_names_file_key_and_lines(words, tmp_path, monkeypatch, error_line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "twice.yaml").write_text(TWICE)
    (tmp_path / "section.yaml").write_text("max_steps: 3\n\n\nmax_steps: 4\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(TWICE)
    (run / "summary.json").write_text("{}")
    (run / "events.out.tfevents.1.host").write_bytes(b"")
    assert main(words) == 2
    line = error_line()
    file = next((word.removeprefix("--config=") for word in words if word.endswith(".yaml")), "run/config.yaml")
    assert f"config {file}: 'max_steps' is given twice, in lines " in line


@pytest.mark.parametrize(
    "words",
    [
        "--trainer={max_steps: 3, max_steps: 4}",
        "--trainer.callbacks+={class_path: lightning_llm.training.callbacks.SampleText, init_args: {seed: 1, seed: 2}}",
    ],
)
def test_a_value_of_an_option_is_read_as_strictly(words, error_line):
    assert main(["check", words]) == 2
    assert "is given twice, in line 1" in error_line()
