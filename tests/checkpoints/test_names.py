"""Only names that a run gives its checkpoints have a step."""

from pathlib import Path

import pytest

from lightning_llm.checkpoints.names import step_files, step_name, step_of


@pytest.mark.parametrize("step", [0, 7, 10**8])
def test_a_step_is_read_from_the_name_that_it_gets(step):
    assert step_of(Path("checkpoints", step_name(step))) == step


@pytest.mark.parametrize("name", ["best.ckpt", "step-7.ckpt", "step-0000000².ckpt", "epoch=0-step=7.ckpt"])
def test_other_names_have_none(name):
    assert step_of(Path(name)) == -1


def test_the_files_of_a_folder_are_in_the_order_of_their_steps(tmp_path):
    for name in (step_name(10**8), step_name(3), "step-9.ckpt", "best.ckpt", ".step-00000004.ckpt.tmp"):
        (tmp_path / name).touch()
    assert [path.name for path in step_files(tmp_path)] == [step_name(3), step_name(10**8)]
