"""``trainer.run_dir``: a run in the folder that it names."""

import json
from pathlib import Path

import pytest
import yaml

from lightning_llm.runs.status import run_state

RUN = Path("made/mlp=relu,seed=3")
NAMED = {"trainer.run_dir": str(RUN)}


def test_a_run_is_in_the_folder_that_it_names_and_resumes_there(tiny, capsys, error_line):
    tiny("fit", **NAMED, **{"trainer.max_steps": 3, "trainer.logger": "JSONLinesLogger"})
    assert {path.name for path in RUN.iterdir()} >= {"config.yaml", "summary.json", "checkpoints", "metrics.jsonl"}
    assert not Path("runs").exists()
    assert yaml.safe_load((RUN / "config.yaml").read_text())["trainer"]["run_dir"] is None  # it starts a new run
    with pytest.raises(SystemExit):
        tiny("fit", **NAMED)
    assert f"trainer.run_dir {RUN} exists: add --ckpt_path last" in error_line()
    tiny("fit", "--ckpt_path", "last", **NAMED)
    assert "Resumed from step 3" in capsys.readouterr().out
    assert json.loads((RUN / "summary.json").read_text())["steps"] == 6
    assert [path.name for path in Path("made").iterdir()] == [RUN.name]


def test_a_run_whose_loss_is_nan_has_diverged(tiny):
    with pytest.raises(SystemExit):
        tiny("fit", **NAMED, **{"model.optimizer": "SGD", "model.optimizer.lr": 1e30})
    assert run_state(RUN).description.startswith("diverged (")
    assert run_state(RUN).has_ended
