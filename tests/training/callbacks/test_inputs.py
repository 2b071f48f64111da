"""Hashes of what a run used: they see every change, and neither micro-batches nor a resume."""

import hashlib
import json

import pytest
import torch

from lightning_llm.checkpoints.loop_state import step_is_complete
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.data.batches import IGNORED
from lightning_llm.statistics.pairing import mismatch
from lightning_llm.training.callbacks import InputHashes, StopOnSignal
from lightning_llm.training.callbacks.inputs import _parts, is_kept, tensor_hash

FEW = {"trainer.limit_val_batches": 2, "data.eval_batch_size": 8}
MANY = {"trainer.max_steps": 41, "trainer.val_check_interval": 41}  # of steps 33 to 41 not each is kept


@pytest.fixture
def summary(tiny, tmp_path):
    """``summary("name", option=value, …)``: the summary of a tiny run in a folder of that name."""

    def of(name, *words, **changes):
        tiny("fit", *words, **{"trainer.default_root_dir": name, "trainer.max_steps": 3, **FEW, **changes})
        return json.loads((tmp_path / name / "run" / "version_0" / "summary.json").read_text())

    return of


def hashed(ids, targets=None, number=0):
    batch = {"input_ids": torch.tensor(ids), "targets": torch.tensor(ids if targets is None else targets) + 1}
    rows = len(ids)
    return InputHashes()._hash(
        *_parts(batch), None if number is None else torch.arange(number * rows, (number + 1) * rows)
    )


def test_every_token_target_and_place_counts():
    ids = [[1, 2, 3], [4, 5, 6]]
    others = [
        hashed([[1, 2, 3], [4, 5, 7]]),
        hashed([[0, 2, 3], [4, 5, 6]]),
        hashed([[1, 2, 3], [4, 5, 6]], targets=[[1, 2, 3], [4, 5, 0]]),
        hashed([[2, 1, 3], [4, 5, 6]]),
        hashed([[4, 5, 6], [1, 2, 3]]),
        hashed(ids, number=1),
        hashed([[1, 2], [4, 5]]),
    ]
    assert len({int(each) for each in [hashed(ids), *others]}) == 8
    # repeated rows in another order: a sum of rows weighted by their places would not tell these apart
    a, b = [1, 2, 3], [4, 5, 6]
    assert hashed([a, b, b, a]) != hashed([b, a, a, b])


def test_sequences_count_by_their_number_in_the_run():
    ids = torch.arange(24).view(8, 3).tolist()
    halves = hashed(ids[:4], number=0) + hashed(ids[4:], number=1)
    assert halves == hashed(ids) == sum(hashed([row], number=number) for number, row in enumerate(ids))


def test_validation_counts_each_target_once_in_any_order():
    ids = [[1, 2, 3], [4, 5, 6]]
    assert hashed(ids, number=None) == hashed(ids[::-1], number=None) != hashed(ids[:1], number=None)
    padded = {"input_ids": torch.tensor(ids), "targets": torch.full((2, 3), IGNORED)}
    assert InputHashes()._hash(*_parts(padded)) == 0


def test_a_tensor_has_shape_dtype_and_hash():
    value = torch.zeros(2, 3)
    assert tensor_hash(value) == f"2x3 float32 {hashlib.sha256(bytes(24)).hexdigest()[:16]}"
    different = [value + 1e-30, value.view(3, 2), value.bfloat16(), torch.zeros(())]
    assert len({tensor_hash(each) for each in [value, *different]}) == 5
    assert tensor_hash(torch.zeros(3, 2).t()) == tensor_hash(value)


def test_two_runs_of_one_seed_are_a_pair_and_others_are_not(summary):
    first = summary("a")
    wider = summary("b", **{"model.optimizer.lr": 0.01, "model.architecture.intermediate_size": 96})
    assert mismatch(first, wider) == ""
    assert len(first["batches"]) == len(first["validation_batches"]) == 16
    assert wider["initial_values"].keys() == first["initial_values"].keys()
    assert first["initial_values"]["transformer.embed_tokens.weight"].split()[1] == "float32"
    assert mismatch(first, summary("c", **{"data.seed": 2})) == "their training batches differ"
    assert mismatch(first, summary("d", **{"trainer.limit_val_batches": 1})) == "their validation batches differ"
    assert "their initial values differ: transformer." in mismatch(first, summary("e", **{"seed_everything": 2}))


@pytest.mark.parametrize("waiting", [0, 600])
def test_batches_that_wait_have_the_same_hash(summary, monkeypatch, waiting):
    first = summary("a", **MANY, **{"data.micro_batch_size": 4})
    monkeypatch.setattr("lightning_llm.training.callbacks.inputs.WAITING", waiting)
    second = summary("b", **MANY, **{"data.micro_batch_size": 4})
    assert first["batches"] == second["batches"] != first["batches_at"]["40"]
    assert first["batches_at"] == second["batches_at"]


def test_a_batch_that_is_changed_during_a_step_has_the_hash_of_its_beginning(summary, monkeypatch):
    whole = summary("a", **MANY)
    monkeypatch.setattr(
        StopOnSignal, "on_train_batch_end", lambda self, trainer, module, out, batch, index: batch["input_ids"].zero_()
    )
    assert summary("b", **MANY)["batches"] == whole["batches"]


NAMES = ("initial_values", "batches", "validation_batches", "batches_at")


def test_a_resumed_run_has_the_hashes_of_an_uninterrupted_one(summary, monkeypatch):
    whole = summary("whole")

    def save(self, trainer, *args):
        if trainer.global_step == 1 and not step_is_complete(trainer):  # a run from there starts this step again
            trainer.save_checkpoint("within.ckpt")

    with monkeypatch.context() as patch:
        patch.setattr(StopOnSignal, "on_train_batch_end", save)
        summary("a", **{"data.micro_batch_size": 4, "trainer.max_steps": 2})
    assert read_checkpoint("within.ckpt")["global_step"] == 1
    smaller = {"data.micro_batch_size": 2, "data.eval_batch_size": 4}  # the same windows are validated
    rest = summary("b", "--ckpt_path=within.ckpt", **smaller)
    assert [rest[name] for name in NAMES] == [whole[name] for name in NAMES]
    assert list(whole["batches_at"]) == ["1", "2", "3"]
    assert whole["batches_at"]["3"] == whole["batches"] != whole["batches_at"]["2"]
    last = summary("a", "--ckpt_path=last")
    assert [last[name] for name in NAMES] == [whole[name] for name in NAMES]
    again = summary("a", "--ckpt_path=last")  # no steps are left
    assert [again[name] for name in NAMES] == [whole[name] for name in NAMES]


def test_a_checkpoint_of_an_earlier_version_has_no_hashes_to_continue(summary, tmp_path):
    summary("old", **{"trainer.max_steps": 2})
    (path,) = (tmp_path / "old").glob("run/*/checkpoints/step-*.ckpt")
    content = read_checkpoint(path)
    assert content["callbacks"].pop("InputHashes")["batches"]
    torch.save(content, path)
    found = summary("old", f"--ckpt_path={path}")
    assert found["batches"] is found["initial_values"] is found["batches_at"] is None
    assert len(found["validation_batches"]) == 16


def test_a_checkpoint_without_hashes_by_step_continues_with_those_it_has(summary, tmp_path):
    whole = summary("whole")
    summary("old", **{"trainer.max_steps": 2})
    (path,) = (tmp_path / "old").glob("run/*/checkpoints/step-*.ckpt")
    content = read_checkpoint(path)
    assert content["callbacks"]["InputHashes"].pop("batches_at").keys() == {"1", "2"}
    assert content["callbacks"]["InputHashes"].pop("initial_rules") == whole["initial_rules"]
    torch.save(content, path)
    found = summary("old", f"--ckpt_path={path}")
    assert found["batches_at"] == {"3": whole["batches"]}
    assert found["initial_rules"] is None  # not known, and not that no parameter has a rule
    assert not mismatch(found, whole)


def test_runs_of_other_lengths_are_a_pair_if_their_common_batches_are_the_same(summary, monkeypatch):
    monkeypatch.setattr("lightning_llm.training.callbacks.inputs.MULTIPLES", 4)  # few steps are kept
    first = summary("a", **{"trainer.max_steps": 7, "data.micro_batch_size": 4})
    longer = {"trainer.max_steps": 9, "trainer.val_check_interval": 2, "model.architecture.mlp": "relu"}
    second = summary("b", **longer)
    assert (list(first["batches_at"]), list(second["batches_at"])) == (
        ["1", "2", "4", "6", "7"],
        ["1", "2", "4", "8", "9"],
    )
    assert mismatch(first, second) == ""
    assert mismatch(first, summary("c", **longer, **{"data.seed": 2})) == "their training batches up to step 4 differ"


def test_the_steps_of_a_hash_depend_on_the_step_reached_alone():
    kept = {0: set()}
    for reached in range(1, 3000):
        kept[reached] = {step for step in (*kept[reached - 1], reached) if is_kept(step, reached)}
        assert kept[reached] == {step for step in range(1, reached + 1) if is_kept(step, reached)}
        assert len(kept[reached]) < 64
    for short in range(1, 1500):
        for long in (short + 1, short * 3 // 2, 2 * short):
            assert max(kept[short] & kept[long]) >= short * 7 / 8
    reached, spacing = 10**9, 1 << 25
    assert [step for step in range(0, reached, spacing) if not is_kept(step, reached)] == []
    assert not is_kept(spacing + 1, reached)
    assert not is_kept(spacing * 3 // 2, reached)
    assert reached // spacing + spacing.bit_length() < 64


def test_no_step_waits_for_the_device(summary, monkeypatch):
    read = []
    monkeypatch.setattr(
        InputHashes, "_read", lambda self, trainer, parts: read.append(len(parts)) or ["0" * 16] * len(parts)
    )
    summary("a", **{"trainer.max_steps": 7, "trainer.val_check_interval": 7})
    assert read == [1, 8, 1]  # validation batches; at the save, the sum and 7 steps; at the end


@pytest.mark.parametrize("field", ["threads", "package"])
def test_a_run_that_was_resumed_under_other_conditions_is_no_pair(summary, monkeypatch, field):
    whole = summary("whole")
    assert {"torch", "numpy", "package", "precision", "threads", "device"} <= whole.keys()
    assert (whole["torch"], len(whole["package"]), whole["changed_on_resume"]) == (torch.__version__, 16, [])
    with monkeypatch.context() as patch:
        if field == "threads":
            patch.setattr(torch, "get_num_threads", lambda: 7)
        else:
            patch.setattr("lightning_llm.training.environment._own_code", lambda: "7" * 16)
        summary("a", **{"trainer.max_steps": 2})
    resumed = summary("a", "--ckpt_path=last")
    old = 7 if field == "threads" else "7" * 16
    change = f"step 2: {field}: {old} -> {whole[field]}"
    assert resumed["changed_on_resume"] == [change, "step 2: trainer.max_steps: 2 -> 3"]
    assert mismatch(whole, resumed).endswith(f"({change})")
    again = summary("a", "--ckpt_path=last")
    assert change in again["changed_on_resume"]  # the checkpoint remembers
