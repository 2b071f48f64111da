"""The result of a run is read from a file that may be damaged or somebody else's."""

import json

from lightning_llm.runs.directory import SUMMARY
from lightning_llm.runs.summary import read_summary


def test_every_leaf_of_a_summary_is_a_number_or_refused(tmp_path, changed_leaves):
    for _, changed in changed_leaves({"val_loss": 2.5, "seconds": 3, "threads": 1, "note": {"a": [1]}}):
        (tmp_path / SUMMARY).write_text(json.dumps(changed))
        try:
            found = read_summary(tmp_path, ["val_loss", "seconds"])
        except ValueError:
            continue
        values = [found.get(name) for name in ("val_loss", "seconds", "threads")]
        assert all(value is None or type(value) in (int, float) for value in values)
