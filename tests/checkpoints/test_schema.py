"""Checkpoints from a stranger: edited by hand, or holding code. One line each."""

import copy
import math
import os
from pathlib import Path

import pytest
import torch

from benchmarks.digest import digest
from lightning_llm.checkpoints.compatibility import check_described
from lightning_llm.checkpoints.reading import (
    check_run_checkpoint,
    load_transformer,
    read_checkpoint,
    read_outline,
)
from lightning_llm.checkpoints.schema import RESUME, check_content
from lightning_llm.cli import convert, evaluate, inference
from lightning_llm.cli.train import cli_main
from lightning_llm.optim import AdamW, Constant
from lightning_llm.training import LanguageModel, load_checkpoint, save_checkpoint
from lightning_llm.training.initial_weights import read_initial_weights
from tests.checkpoints.conftest import Code

OPTIONS = [
    "--model.architecture.hidden_size=16",
    "--model.architecture.num_hidden_layers=1",
    "--model.architecture.num_attention_heads=2",
    "--model.architecture.max_position_embeddings=16",
    "--data.tokenizer=char",
    "--data.context_length=8",
    "--data.global_batch_size=4",
    "--trainer.val_check_interval=2",
    "--trainer.limit_val_batches=1",
    "--trainer.log_every_n_steps=1",
    "--trainer.accelerator=cpu",
    "--keep_freed_memory=false",
]
FIT, EPOCH = ("loops", "fit_loop"), ("loops", "fit_loop", "epoch_loop.batch_progress")
GROUP, STATE = ("optimizer_states", 0, "param_groups", 0), ("optimizer_states", 0, "state", 0)
SHAPE, OWN = ("hyper_parameters", "architecture"), ("lightning_llm",)
WEIGHT = ("state_dict", "transformer.embed_tokens.weight")
SCHEDULE = ("lr_schedulers", 0)
GONE = object()


@pytest.fixture(scope="session")
def run(tmp_path_factory, text_file):
    """A run of two steps: its folder, the options that resume it, and what its checkpoint holds."""
    folder, before = tmp_path_factory.mktemp("run"), Path.cwd()
    os.chdir(folder)
    try:
        cli_main(["fit", f"--data.path={text_file}", "--trainer.max_steps=2", *OPTIONS])
        (checkpoint,) = folder.glob("runs/*/*/checkpoints/step-*.ckpt")
        return folder, [f"--data.path={text_file}", *OPTIONS], torch.load(checkpoint, weights_only=True)
    finally:
        os.chdir(before)


@pytest.fixture
def content(run):
    return copy.deepcopy(run[2])


def edited(part, place, new):
    """A copy of nested dicts and lists with another value at a place, or without one."""
    if not place:
        return new
    inner = part[place[0]] if len(place) > 1 else None
    changed = list(part) if isinstance(part, list | tuple) else dict(part)
    if new is GONE and len(place) == 1:
        del changed[place[0]]
    else:
        changed[place[0]] = edited(inner, place[1:], new)
    return tuple(changed) if isinstance(part, tuple) else changed


ONE, NAN = torch.tensor(1.0), torch.tensor(math.nan)
EDITS = [
    (("state_dict",), GONE, "lacks state_dict"),
    (("state_dict",), [], r"state_dict is \[\], expected a dict"),
    (WEIGHT, GONE, "embed_tokens.weight is missing"),
    (WEIGHT, "x", "embed_tokens.weight is 'x', expected a tensor"),
    (WEIGHT, torch.zeros(3, 3), r"embed_tokens.weight is \(3, 3\) there"),
    (WEIGHT, torch.zeros(35, 16, dtype=torch.int64), "embed_tokens.weight is"),
    (("state_dict", "surplus"), torch.zeros(1), "'surplus' is unexpected"),
    (("state_dict", 7), torch.zeros(1), "a name in state_dict is 7"),
    (("global_step",), GONE, "lacks global_step"),
    (("global_step",), -1, "global_step is -1, expected a whole number from 0"),
    (("global_step",), 2.5, "global_step is 2.5"),
    (("global_step",), True, "global_step is True"),
    (("global_step",), 10**600, "global_step is 1000000000"),
    (("global_step",), 3, "global_step is 3, the loops count 2 steps"),
    (("epoch",), "0", "epoch is '0', expected"),
    (("pytorch-lightning_version",), GONE, "lacks pytorch-lightning_version"),
    (("pytorch-lightning_version",), "0.9.0", "pytorch-lightning_version is '0.9.0'"),
    (("pytorch-lightning_version",), "x", "expected one of Lightning 2"),
    (("hyper_parameters",), GONE, "lacks hyper_parameters.architecture"),
    (("hyper_parameters",), 5, "hyper_parameters is 5, expected an object"),
    (("hyper_parameters", "_instantiator"), "lightning.pytorch.cli.instantiate_module", "_instantiator is"),
    (("hyper_parameters", "loss_chunks"), -1, "loss_chunks is -1"),
    (("hyper_parameters", "optimizer", "class_path"), 1, "optimizer.class_path is 1, expected text"),
    (("hyper_parameters", "optimizer", "init_args"), [], r"init_args is \[\]"),
    (("hyper_parameters", "optimizer", "init_args", "unknown"), 1, "cannot be made"),
    (SHAPE, [], r"architecture is \[\], expected an object"),
    ((*SHAPE, "unknown"), 1, "architecture.unknown is unknown"),
    ((*SHAPE, "hidden_size"), "16", "hidden_size must be a whole number, got '16'"),
    ((*SHAPE, "hidden_size"), 0, "hidden_size must be at least 1"),
    ((*SHAPE, "hidden_size"), 10**18, "hidden_size must be at most"),
    ((*SHAPE, "hidden_size"), 32, "is of another model"),
    ((*SHAPE, "num_hidden_layers"), 10**6, "num_hidden_layers must be at most"),
    ((*SHAPE, "vocab_size"), None, "vocab_size is null"),
    ((*SHAPE, "vocab_size"), 3, "ids, the architecture's vocab_size is 3"),
    ((*SHAPE, "qk_norm"), "yes", "qk_norm must be true or false, got 'yes'"),
    (
        (*SHAPE, "norm"),
        ["rmsnorm"],
        r"norm must be a name, an import path, or class_path and init_args, got \['rmsnorm'\]",
    ),
    ((*SHAPE, "rope_theta"), float("nan"), "rope_theta must be above 0 and finite, got nan"),
    ((*SHAPE, "rope_scaling"), "x", "rope_scaling must be options by name, got 'x'"),
    ((*SHAPE, "mlp"), 3, "mlp must be a name, an import path, or class_path and init_args, got 3"),
    (("loops",), GONE, "lacks loops"),
    ((*FIT,), {}, "loops.fit_loop.state_dict is missing"),
    ((*EPOCH, "is_last_batch"), GONE, "is_last_batch is missing"),
    ((*EPOCH, "current", "ready"), -1, "current.ready is -1"),
    ((*EPOCH, "current", "ready"), 10**6, "current counts ready 1000000"),
    ((*EPOCH, "current", "reset"), 5, "current.reset is unknown"),
    (("loops", "validate_loop"), GONE, "loops.validate_loop is missing"),
    ((*FIT, "state_dict", "combined_loader"), 3, "combined_loader is 3, expected a list"),
    (("callbacks",), [], r"callbacks is \[\]"),
    (("callbacks", "RunCheckpoints", "best_loss"), None, "best_loss is None"),
    (("callbacks", "RunCheckpoints", "best_step"), 9, "best_step is 9, global_step is 2"),
    (("callbacks", "TrainingLog"), {"loss": torch.zeros(2), "steps": 1}, "TrainingLog.loss is .*expected one number"),
    (
        ("callbacks", "TrainingLog"),
        {"loss": ONE, "count": NAN},
        "TrainingLog.count is .*expected one number",
    ),
    (("callbacks", "ResumeDiff", "options", "data.seed"), torch.zeros(2), "data.seed is a tensor"),
    (("callbacks", "InputHashes", "batches"), "x" * 16, "batches is 'xxxxxxxxxxxxxxxx', expected 16 hex digits"),
    (("callbacks", "InputHashes", "initial_values"), {"a": 1}, "initial_values.a is 1, expected text"),
    (("callbacks", "ModelCheckpoint{}"), {"best_model_path": "a/../../b", "best_model_score": None}, "elsewhere"),
    (("optimizer_states",), [], "optimizer_states is a list of 0, expected one"),
    (("optimizer_states", 0), None, r"optimizer_states\[0\] is None"),
    ((*STATE, "exp_avg"), torch.zeros(2), r"exp_avg of parameter 0 has shape \(2,\)"),
    ((*STATE, "exp_avg"), GONE, "is not the same for all parameters"),
    ((*STATE, "step"), float("inf"), "step is inf, global_step is 2"),
    ((*STATE, "step"), [], "step of parameter 0 is"),
    ((*STATE, "step"), 10**6, "step is 1000000, global_step is 2"),
    (("optimizer_states", 0, "state", 99), {}, "in no group"),
    (("optimizer_states", 0, "state", "0"), {}, "a name in"),
    ((*GROUP, "lr"), float("nan"), "lr is nan, expected a number from 0"),
    ((*GROUP, "lr"), GONE, "no lr"),
    ((*GROUP, "betas"), (0.9,), "betas must be two numbers"),
    ((*GROUP, "eps"), "x", "eps is 'x'"),
    ((*GROUP, "params"), [0, 0], "parameters twice"),
    (("lr_schedulers",), [], "lr_schedulers is a list of 0, expected one"),
    ((*SCHEDULE, "last_epoch"), 10**6, "last_epoch is 1000000"),
    ((*SCHEDULE, "base_lrs"), [float("inf")] * 4, r"base_lrs\[0\] is inf"),
    ((*SCHEDULE, "base_lrs"), [], "base_lrs is a list of 0, the optimizer has"),
    ((*SCHEDULE, "step"), 3, r"lr_schedulers\[0\].step is not part of"),
    (("TokenDataModule",), GONE, "lacks TokenDataModule"),
    (("TokenDataModule", "store"), 3, "store is 3, expected text"),
    (OWN, GONE, "lacks lightning_llm"),
    ((*OWN, "format_version"), 99, "format 99, this version reads up to 1: upgrade"),
    ((*OWN, "format_version"), GONE, "format_version is missing"),
    ((*OWN, "tokenizer"), "{}", "expected the text of a tokenizer.json"),
    ((*OWN, "execution", "precision"), "8-bit", "precision is '8-bit', expected"),
]


@pytest.mark.parametrize(("place", "new", "says"), EDITS, ids=range(len(EDITS)))
def test_an_edit_is_one_line(content, tmp_path, place, new, says):
    torch.save(edited(content, place, new), tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=says) as refusal:
        check_run_checkpoint(tmp_path / "x.ckpt")
    assert str(tmp_path / "x.ckpt") in str(refusal.value) or "cannot be made" in says
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 1000


COUNTERS = {"ready": 58, "started": 58, "processed": 56, "completed": 56}
OF_VALIDATION = ("loops", "fit_loop", "epoch_loop.val_loop.batch_progress", "total")


def test_what_lightnings_loops_count_matters_to_a_resumed_run_alone(content, tmp_path):
    path = tmp_path / "x.ckpt"
    torch.save(edited(content, (*EPOCH, "total"), COUNTERS), path)
    with pytest.raises(ValueError, match=r"batch_progress\.total counts ready 58"):
        check_run_checkpoint(path)
    load_transformer(path)
    LanguageModel.load_from_checkpoint(path)
    read_checkpoint(path)
    torch.save(edited(content, ("loops",), 3), path)
    load_transformer(path)


def test_a_run_resumes_whatever_the_counters_of_validation_are(content, tmp_path):
    torch.save(edited(content, OF_VALIDATION, COUNTERS), tmp_path / "x.ckpt")
    check_run_checkpoint(tmp_path / "x.ckpt")


def places(part, place=()):
    if place:
        yield place
    inner = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list | tuple) else ()
    for name, each in inner:
        yield from places(each, (*place, name))


NEW = (GONE, None, "x", -1, 2**52, 10**30, float("nan"), [1, [2]], {"reset": 3}, torch.zeros(2, 3))


def refusal_of(changed):
    try:
        check_content(changed, "x", (*RESUME, "TokenDataModule"))
        check_described(changed, "x")
    except ValueError as error:
        return str(error)
    return None


def test_any_leaf_may_be_anything(content):
    """The reader accepts it with the same meaning, as a field that older versions lack, or raises a ValueError."""
    listed = [place for place in places(content) if not {"tokenizer", "ResumeDiff"} & {*map(str, place)}]
    listed = [place for place in listed if place[:3] != STATE[:3] or place[3:4] in ((), (0,))]
    found = {}
    for number, place in enumerate(listed):
        for new in NEW[number % 2 :: 2]:  # every other one: its neighbor gets the rest
            found[place, str(new)] = refusal_of(edited(content, place, new))
    accepted = [place for (place, _), refusal in found.items() if refusal is None]
    assert len(accepted) < len(found) / 4
    assert not {place[0] for place in accepted} & {"state_dict", "global_step", "pytorch-lightning_version"}
    assert not [refusal for refusal in found.values() if refusal and "\n" in refusal]


def refused_line(capsys, call):
    """What a command prints where it refuses: one line, status 2."""
    try:
        status = call()
    except SystemExit as leaving:
        status = leaving.code
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if "error:" in line]
    assert status == 2, error
    assert len(lines) == 1, error
    assert "Traceback" not in error
    return lines[0]


def commands(path, options, tmp_path):
    """Every command that reads a checkpoint, by name; none may leave anything."""
    text = next(option.removeprefix("--data.path=") for option in options if option.startswith("--data.path="))
    trained = [f"--trainer.default_root_dir={tmp_path / 'out'}", *options]
    return {
        "fit": lambda: cli_main(["fit", f"--ckpt_path={path}", "--trainer.max_steps=3", *trained]),
        "check": lambda: cli_main(["check", f"--ckpt_path={path}", "--trainer.max_steps=3", *trained]),
        "validate": lambda: cli_main(["validate", f"--ckpt_path={path}", *trained]),
        "init_from": lambda: cli_main(["fit", f"--model.init_from={path}", "--trainer.max_steps=1", *trained]),
        "generate": lambda: inference.run_generate([str(path), "--prompt", "A", "--max-new-tokens", "1"]),
        "evaluate": lambda: evaluate.run_evaluate([str(path), "--data", text]),
        "export": lambda: convert.run_export([str(path), str(tmp_path / "out")]),
        "consolidate": lambda: convert.run_consolidate([str(path), "--out", str(tmp_path / "out")]),
    }


@pytest.mark.parametrize("harm", ["code", "an edit"])
def test_every_command_refuses_with_one_line(run, content, tmp_path, monkeypatch, capsys, harm):
    folder, options, _ = run
    monkeypatch.chdir(folder)
    path = tmp_path / "x.ckpt"
    if harm == "code":
        content["callbacks"]["Evil"] = Code(tmp_path / "ran")
    else:
        content["state_dict"][WEIGHT[1]] = "x"
    torch.save(content, path)
    for name, call in commands(path, options, tmp_path).items():
        line = refused_line(capsys, call)
        assert ("running its code" if harm == "code" else "expected a tensor") in line, name
        assert sorted(os.listdir(tmp_path)) == ["x.ckpt"], name


def test_python_refuses_it_too(content, tmp_path):
    path = tmp_path / "x.ckpt"
    torch.save({**content, "callbacks": Code(tmp_path / "ran")}, path)
    for read in (
        LanguageModel.load_from_checkpoint,
        read_checkpoint,
        read_outline,
        load_transformer,
        digest,
        lambda path: read_initial_weights(str(path)),
        lambda path: load_checkpoint(path, torch.nn.Linear(1, 1), AdamW([torch.nn.Parameter(torch.zeros(1))])),
    ):
        with pytest.raises(ValueError, match=r"posix\.mkdir"):
            read(path)
    assert not (tmp_path / "ran").exists()


def test_a_model_is_loaded_and_an_instantiator_is_not_called(content, tmp_path):
    torch.save(content, tmp_path / "x.ckpt")
    assert LanguageModel.load_from_checkpoint(tmp_path / "x.ckpt", schedule=Constant()).architecture.hidden_size == 16
    torch.save(edited(content, ("hyper_parameters", "_instantiator"), "builtins.print"), tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="_instantiator is"):
        LanguageModel.load_from_checkpoint(tmp_path / "x.ckpt")


def test_a_plain_loops_state_is_of_its_parameters(tmp_path):
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer = AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(model, optimizer, 1, tmp_path / "x.pt")
    content = torch.load(tmp_path / "x.pt", weights_only=True)
    content["optimizer"]["state"][0]["exp_avg"] = torch.zeros(5)
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 has shape \(5,\)"):
        load_checkpoint(tmp_path / "x.pt", other, AdamW(other.parameters()))
