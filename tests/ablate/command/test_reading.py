"""Numbers are found in what programs print."""

import json
import math

import pytest

from lightning_llm.ablate.command.reading import Output, Pattern, number_in, visible


@pytest.mark.parametrize(
    ("pattern", "line", "found"),
    [
        ("val loss {number}", "step 100: train loss 2.1, val loss 2.3456", [(None, 2.3456)]),
        ("val loss {number}", "VAL   LOSS\t-1e-3 ", [(None, -0.001)]),
        ("step {step}: {...} val loss {number}", "step 20: train loss 2.1, val loss 3.", [(20, 3.0)]),
        ("loss={number}", "loss=.5 loss=7", [(None, 0.5), (None, 7.0)]),
        ("a.b (x) {{y}} {number}", "a.b (x) {y} 1", [(None, 1.0)]),
        ("a.b {number}", "aXb 1", []),
        ("{number} is the loss", "2.5 is the loss", [(None, 2.5)]),
        ("loss {number}", "loss of 2", []),
    ],
)
def test_a_pattern_finds_numbers(pattern, line, found):
    assert [*Pattern(pattern).matches(line)] == found


@pytest.mark.parametrize("text", ["nan", "NaN", "-nan", "inf", "-Inf", "infinity"])
def test_a_number_may_be_none(text):
    ((_, value),) = Pattern("loss {number}").matches(f"loss {text}")
    assert not math.isfinite(value)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("val_loss: {number}", "val_loss"),
        ("step {step}: val loss {number}", "val_loss"),
        ("{number}", "metric"),
        ("step {step}, {...} val/bpb = {number}", "val/bpb"),
    ],
)
def test_the_words_before_the_number_name_the_metric(pattern, name):
    assert Pattern(pattern).name == name


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("val loss", r"--read 'val loss' needs one \{number\}"),
        ("{number} {number}", r"needs one \{number\}"),
        ("{step} {step} {number}", r"at most one \{step\}"),
        ("{loss}", r"--read has \{loss\}, which is no placeholder: there are \{number\} \(the metric\)"),
    ],
)
def test_a_wrong_pattern_is_one_line(pattern, message):
    with pytest.raises(ValueError, match=message):
        Pattern(pattern)


def test_what_a_terminal_does_not_show_is_not_read():
    assert visible("\x1b[32mloss 1\x1b[0m") == "loss 1"
    assert visible("10%|# |\r100%|##| loss 2\r") == "100%|##| loss 2"
    output = Output(Pattern("loss {number}"))
    for line in ("loss 9\rloss 1", "\x1b[1mloss\x1b[0m 2", "", "bye"):
        output.take(line)
    assert [value for _, value in output.found] == [1.0, 2.0]
    assert output.last == "bye"


def test_a_program_may_tell_what_it_uses():
    output = Output(None)
    for line in ("batches: 1f", "initial_values=2e", "parameters: 25000", "see batches: none", "batches: 3d"):
        output.take(line)
    assert output.told == {"batches": "3d", "initial_values": "2e", "parameters": "25000"}


def test_equal_outputs_have_one_digest():
    def digest(*lines):
        output = Output(None)
        for line in lines:
            output.take(line)
        return output.digest

    assert digest("a", "b") == digest("\x1b[1ma\x1b[0m", "b") != digest("a", "c")


def test_a_file_has_a_number_or_a_curve(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"best": {"loss": 2}, "x.y": 3.5}))
    assert number_in(tmp_path / "a.json", "best.loss") == [(None, 2.0)]
    assert number_in(tmp_path / "a.json", "x.y") == [(None, 3.5)]
    lines = [{"step": 1, "loss": 2.5}, {"step": 2}, {"step": 3, "loss": 1.5}]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert number_in(tmp_path / "a.jsonl", "loss") == [(1, 2.5), (3, 1.5)]
    with pytest.raises(ValueError, match=r"^a.json has no number acc: it has best, x.y$"):
        number_in(tmp_path / "a.json", "acc")
    (tmp_path / "b.json").write_text("loss 2")
    with pytest.raises(ValueError, match=r"^b.json is no JSON: "):
        number_in(tmp_path / "b.json", "loss")
