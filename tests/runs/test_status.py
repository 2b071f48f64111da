"""What is known of a run is read from files that may be damaged or somebody else's."""

import json
import os

import pytest

from lightning_llm.runs.directory import (
    FAILED,
    STATUS,
    SUMMARY,
    read_summary,
    take_turn,
    turn_of,
    unfinished,
    write_status,
)
from lightning_llm.training.json_logger import JSONLinesLogger

KNOWN = "failed (NaN); step 7, last validation loss 2.5000"
UNKNOWN = "has not ended yet, or was killed; no checkpoint"


@pytest.mark.parametrize("instead", ["a FIFO", "a folder", "a link to a device", "a large file"])
def test_a_file_that_is_none_says_nothing_and_is_not_waited_for(tmp_path, instead):
    for name in (STATUS, SUMMARY, "turn"):
        file = tmp_path / name
        if instead == "a FIFO":
            os.mkfifo(file)
        elif instead == "a folder":
            file.mkdir()
        elif instead == "a large file":
            file.touch()
            os.truncate(file, 1 << 40)
        else:
            file.symlink_to("/dev/zero")
    assert unfinished(tmp_path) == (None if instead == "a large file" else UNKNOWN)
    assert turn_of(tmp_path) == 0
    with pytest.raises(ValueError, match="is damaged"):
        read_summary(tmp_path, ["val_loss"])


def test_every_leaf_of_a_status_has_its_meaning_or_says_nothing(tmp_path, changed_leaves):
    write_status(tmp_path, FAILED, step=7, val_loss=2.5, reason="NaN")
    said = set()
    for label, changed in changed_leaves(json.loads((tmp_path / STATUS).read_text())):
        (tmp_path / STATUS).write_text(json.dumps(changed))
        words = unfinished(tmp_path)
        said.add(words)
        if words in (KNOWN, UNKNOWN):
            continue
        field, what = label.split()
        assert what not in ("nan", "retyped", "null") or (field, what) == ("val_loss", "null"), label
    assert {KNOWN, UNKNOWN} < said
    assert len(said) < 15


def test_every_leaf_of_a_summary_is_a_number_or_refused(tmp_path, changed_leaves):
    for _, changed in changed_leaves({"val_loss": 2.5, "seconds": 3, "threads": 1, "note": {"a": [1]}}):
        (tmp_path / SUMMARY).write_text(json.dumps(changed))
        try:
            found = read_summary(tmp_path, ["val_loss", "seconds"])
        except ValueError:
            continue
        values = [found.get(name) for name in ("val_loss", "seconds", "threads")]
        assert all(value is None or type(value) in (int, float) for value in values)


@pytest.mark.parametrize("content", ["-1", "9" * 5000, "\udcff", "1e9", ""])
def test_a_turn_that_is_no_number_is_none(tmp_path, content):
    runs = [tmp_path / "version_0", tmp_path / "version_1"]
    for run in runs:
        run.mkdir()
    (runs[0] / "turn").write_text(content, errors="surrogateescape")
    take_turn(runs[1])
    assert turn_of(runs[1]) >= 0


@pytest.mark.parametrize(
    "line", ["[]", "null", "{", '{"step": "x"}', '{"step": NaN}', '{"step": -1}', '{"step": true}', "[" * 100_000]
)
def test_a_run_that_goes_on_cuts_metrics_at_a_damaged_line(tmp_path, line):
    folder = tmp_path / "run" / "version_0"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 2.0}}\n{line}\n{{"step": 2, "loss": 1.0}}\n')
    JSONLinesLogger(str(tmp_path), version=0).log_metrics({"loss": 0.5}, step=3)
    assert (folder / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.0}\n{"step": 3, "loss": 0.5}\n'
