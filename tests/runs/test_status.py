"""What is known of a run is read from files that may be damaged or somebody else's."""

import json
import os

import pytest

from lightning_llm.runs.directory import STATUS, SUMMARY, start_number_of
from lightning_llm.runs.status import FAILED, FINISHED, read_summary, run_state, unfinished, write_status

KNOWN = "failed (NaN); step 7, last validation loss 2.5000"
UNKNOWN = "has not ended yet, or was killed; no checkpoint"


@pytest.mark.parametrize("instead", ["a FIFO", "a folder", "a link to a device", "a large file"])
def test_a_file_that_is_none_says_nothing_and_is_not_waited_for(tmp_path, instead):
    for name in (STATUS, SUMMARY, "start_number"):
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
    assert start_number_of(tmp_path) == 0
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


def test_the_loss_on_training_text_has_another_name_in_earlier_summaries(tmp_path):
    for content in ({"train_loss": 2.5}, {"train_loss": 3.5, "train_loss_eval": 2.5}):
        (tmp_path / SUMMARY).write_text(json.dumps(content))
        assert read_summary(tmp_path, ["train_loss_eval"])["train_loss_eval"] == 2.5
    (tmp_path / SUMMARY).write_text(json.dumps({"train_loss": "low"}))
    with pytest.raises(ValueError, match="train_loss_eval is 'low'"):
        read_summary(tmp_path, ["train_loss_eval"])


def test_every_leaf_of_a_summary_is_a_number_or_refused(tmp_path, changed_leaves):
    for _, changed in changed_leaves({"val_loss": 2.5, "seconds": 3, "threads": 1, "note": {"a": [1]}}):
        (tmp_path / SUMMARY).write_text(json.dumps(changed))
        try:
            found = read_summary(tmp_path, ["val_loss", "seconds"])
        except ValueError:
            continue
        values = [found.get(name) for name in ("val_loss", "seconds", "threads")]
        assert all(value is None or type(value) in (int, float) for value in values)


def test_a_run_that_has_ended_without_a_summary_is_not_called_killed(tmp_path):
    write_status(tmp_path, FINISHED, step=3)
    state = run_state(tmp_path)
    assert (state.description, state.has_ended, state.step) == ("ended, without a summary", True, 3)
