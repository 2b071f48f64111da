"""A key that is given twice is an error wherever a config is read, and the line says which, where."""

import os
import re

import pytest

from lightning_llm.__main__ import main
from lightning_llm.io.config_file import (
    HostileYAMLError,
    check_yaml,
    class_of,
    read_config,
    section_of,
    text_of,
    value_at,
    whole_of,
)

TWICE = "trainer:\n  max_steps: 3\n  accelerator: cpu\n  max_steps: 4\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TWICE, "'max_steps' is given twice, in lines 2 and 4"),
        ("? [1, 2]\n: 3\n", "a name that is a list or a mapping, in line 1"),
        ("model: {a: 1}\ndata: {}\nmodel: {b: 1}\n", "'model' is given twice, in lines 1 and 3"),
        ("a: [{b: 1, 'b': 2}]", "'b' is given twice, in line 1"),
        ("a: &x {b: {c: 1, c: 2}}\nd: *x\n", "'c' is given twice, in line 1"),
        ("1: a\n2: b\n1: c\n", "'1' is given twice, in lines 1 and 3"),
    ],
)
def test_a_key_given_twice_is_named_with_its_lines(text, says):
    with pytest.raises(HostileYAMLError, match=says):
        check_yaml(text)


def test_what_an_anchor_brings_in_may_be_overridden(tmp_path):
    file = tmp_path / "a.yaml"
    # PyYAML 6.0.4 takes names of one letter from the first anchor; no option has such a name
    file.write_text(
        "first: &first {lr: 1, eps: 2}\nsecond: &second {<<: *first, eps: 3}\nthird: {<<: *second, lr: 1}\n"
    )
    assert read_config(file)["third"] == {"lr": 1, "eps": 3}


HOSTILE = {
    "an anchor that holds itself": ("a: &a [*a, {b: 1}]", "aliases nest more than 40 levels"),
    "a mapping that holds itself": ("a: &a {b: *a}", "aliases nest more than 40 levels"),
    "a chain of aliases": (
        "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 60)),
        "aliases nest more than 40 levels deep, in line 41",
    ),
    "lists in lists": ("a: " + "[" * 500, "nested more than 40 levels deep, in line 1"),
    "very many lists in lists": ("a: " + "[" * 20_000, "nest"),  # "nesting depth" in PyYAML's words since 6.0.4
    "mappings in mappings": ("\n".join(" " * n + "a:" for n in range(400)), "nested more than 40 levels"),
    "dashes": ("- " * 20_000 + "x", "nested more than 40 levels"),
    "digits": (f"a: {'9' * 5000}", "a number of 5000 characters, in line 1"),
    "minutes": (f"a: {'1:' * 20_000}1", "a number of 40001 characters"),
    "hex digits": (f"a: 0x{'f' * 9000}", "a number of 9002 characters"),
    "date": ("a: 2001-99-99", "is not YAML: month must be in 1..12"),
    "an object": (
        "a: !!python/object/apply:os.system [touch ran]",
        "os.system' in line 1 is not accepted",
    ),
    "another tag": ("a: !!bool x", "'tag:yaml.org,2002:bool' in line 1 is not accepted"),
    "a set": ("a: !!set {b}", "is not accepted: leave it out"),
    "a list as a key": ("? [a]\n: b", "a name that is a list or a mapping, in line 1"),
    "an unknown alias": ("a: *b", "undefined alias"),
    "two documents": ("a: 1\n---\nb: 2", "expected a single document"),
    "NUL": ("a: \x00", "is not YAML"),
    "escape": ("a: \x1b[31m", "is not YAML"),
    "a merge of a number": ("<<: 5", "expected a mapping"),
    "a large file": ("a: " + "x" * (1 << 18), "has 262147 bytes, expected at most 262144"),
    "a list": ("- a", "must have options by name"),
    "a long text": ("x" * 100_000, "must have options by name, such as 'trainer:', got 'xxx"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_config_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, says = HOSTILE[name]
    file = tmp_path / "hostile.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        read_config(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert os.listdir(tmp_path) == ["hostile.yaml"]


def test_a_config_that_is_no_utf8_is_named(tmp_path):
    file = tmp_path / "bytes.yaml"
    file.write_bytes(b"a: \xff")
    with pytest.raises(ValueError, match=r"bytes\.yaml is not UTF-8 text: byte 3"):
        read_config(file)


@pytest.mark.parametrize("words", [["check"], ["estimate"], ["plan", "--memory", "1GiB"]])
@pytest.mark.parametrize(
    "name",
    ["a mapping that holds itself", "lists in lists", "very many lists in lists", "an object", "a FIFO", "a device"],
)
def test_the_command_prints_one_line(words, name, tmp_path, monkeypatch, error_line):
    monkeypatch.chdir(tmp_path)
    if name == "a FIFO":
        os.mkfifo("c.yaml")
    elif name == "a device":
        os.symlink("/dev/zero", "c.yaml")
    else:
        (tmp_path / "c.yaml").write_text(HOSTILE[name][0])
    assert main([*words, "--config", "c.yaml"]) == 2
    assert "c.yaml" in error_line()
    assert os.listdir(tmp_path) == ["c.yaml"]


def test_a_value_of_an_option_has_the_same_limits(error_line):
    assert main(["check", "--data={c: " + "[" * 50 + "]" * 50 + "}"]) == 2
    assert "nested more than 40 levels deep" in error_line()
    assert main(["check", "--data={a: &a [*a]}"]) == 2
    assert "aliases nest more than 40 levels deep" in error_line()


@pytest.mark.parametrize("where", ["option", "config", "file of a config"])
@pytest.mark.parametrize("option", ["model.optimizer", "model.architecture", "trainer.logger", "data.path"])
def test_a_fifo_that_an_option_names_is_not_waited_for(option, where, tmp_path, monkeypatch, error_line):
    """The parser reads the options of a class from any file that stands in their place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo("folder/fifo")
    section, name = option.split(".")
    if where == "option":
        words = [f"--{option}", "folder/fifo"]
    else:
        (tmp_path / "folder" / "a.yaml").write_text(f"{section}: {{{name}: fifo}}")
        (tmp_path / "folder" / "b.yaml").write_text("trainer: {callbacks: c.yaml}")
        (tmp_path / "folder" / "c.yaml").write_text("- [fifo, c.yaml]" if where == "config" else "{a: fifo, b: c.yaml}")
        words = ["--config", "folder/a.yaml" if where == "config" else "folder/b.yaml"]
    assert main(["check", *words]) == 2
    assert "folder/fifo is a FIFO, expected a file" in error_line()


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


def test_values_by_their_dotted_names():
    arguments = {"lr": 0.1}
    config = {
        "a": {"b": {"c": 3, "d": "x", "e": None}, "f": None},
        "g": {"class_path": "my.Own", "init_args": arguments},
    }
    assert section_of(config, "a.b") == config["a"]["b"]
    assert section_of(config, "a.f") == section_of(config, "a.z") == {}
    assert (value_at(config, "a.b.c"), value_at(config, "a.b.e", 7), value_at(config, "a.b.c.d", 7)) == (3, None, 7)
    assert (whole_of(config, "a.b.c"), whole_of(config, "a.b.z", 7)) == (3, 7)
    assert (text_of(config, "a.b.d"), text_of(config, "a.b.e", "default")) == ("x", "default")
    assert class_of(config, "g", "none") == ("my.Own", arguments)
    assert class_of(config, "a.b.d", "none") == ("x", {})
    assert class_of(config, "z", "none") == ("none", {})


@pytest.mark.parametrize(
    ("read", "name", "says"),
    [
        (section_of, "a.d", "d in the config must have options, got 'x'"),
        (whole_of, "a.d", "a.d must be a whole number from 1 to 1099511627776, got 'x'"),
        (whole_of, "a.c", "a.c must be a whole number from 1 to .*, got 0"),
        (whole_of, "a.t", "a.t must be a whole number from 1 to .*, got True"),
        (text_of, "a.c", "a.c must be a name, got 0"),
    ],
)
def test_a_value_of_another_kind_is_named(read, name, says):
    with pytest.raises(ValueError, match=says):
        read({"a": {"c": 0, "d": "x", "t": True}}, name)
