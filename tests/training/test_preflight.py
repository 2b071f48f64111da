"""What is found before the first step: every mistake at once, and nothing is started."""

import re
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_llm import LanguageModel, ModelConfig, TokenDataModule, Trainer
from lightning_llm.__main__ import main
from lightning_llm.training import preflight


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [
        ("val_check_interval", 0, "above 0"),
        ("val_check_interval", 0.0, "above 0"),
        ("val_check_interval", -3, "val_check_interval"),
        ("val_check_interval", 1.5, "val_check_interval"),
        ("check_val_every_n_epoch", 0, "at least 1"),
        ("log_every_n_steps", -1, "at least 0"),
        ("num_sanity_val_steps", -2, "at least -1"),
        ("gradient_clip_val", -1.0, "at least 0"),
        ("min_steps", -1, "at least 0"),
        ("max_steps", -2, "max_steps"),
        ("max_epochs", -3, "max_epochs"),
        ("num_nodes", 0, "num_nodes"),
        ("limit_train_batches", -1, "limit_train_batches"),
    ],
)
def test_a_number_that_cannot_be_is_one_line(tiny, error_line, option, value, accepted):
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", **{f"trainer.{option}": value})
    assert leaving.value.code == 2
    line = error_line()
    assert option in line
    assert accepted in line


def test_an_accumulation_that_changes_is_rejected(tiny, error_line):
    scheduler = "lightning.pytorch.callbacks.GradientAccumulationScheduler"
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", f"--trainer.callbacks+={scheduler}", "--trainer.callbacks.scheduling={0: 1, 1: 2}")
    assert leaving.value.code == 2
    assert "set data.global_batch_size" in error_line()


def test_an_accumulation_that_changes_is_rejected_by_any_trainer(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = TokenDataModule(path=str(text_file), tokenizer="char", context_length=16, global_batch_size=8)
    model = LanguageModel(ModelConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, max_steps=1, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})]
    )
    with pytest.raises(ValueError, match=r"set data\.global_batch_size"):
        trainer.fit(model, data)


def test_nodes_that_cannot_find_each_other_are_not_waited_for(tiny, error_line, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", **{"trainer.num_nodes": 2})
    assert leaving.value.code == 2
    line = error_line()
    assert "trainer.num_nodes 2" in line
    assert "MASTER_ADDR, MASTER_PORT, NODE_RANK not set" in line
    assert "torchrun" in line


@pytest.mark.parametrize(
    ("there", "says"),
    [(2 * 10**5, "parameters and gradients need 0.3 MB, cpu has 0.2 MB"), (4 * 10**5, "optimizer state need 0.6 MB")],
)
def test_a_model_beyond_the_memory_is_refused(refused, monkeypatch, there, says):
    monkeypatch.setattr(preflight, "device_memory", lambda device: there)
    assert says in refused("fit")
    assert says in refused("check")


def test_all_faults_are_said_at_once(refused):
    error = refused(
        "check",
        **{"data.context_length": 40, "data.micro_batch_size": 3, "model.architecture.vocab_size": 3},
    )
    for part in ("context_length 40", "data.micro_batch_size 3", "vocab_size 3"):
        assert part in error


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data.document_mask": True}, "data.document_mask needs an end-of-text token between documents"),
        (
            {"data.micro_batch_size": 4, "trainer.limit_train_batches": 3},
            "trainer.limit_train_batches leaves 3 micro-batches, which is not a multiple of the 2 of an optimizer step",
        ),
        (
            {"trainer.limit_train_batches": 0.001},
            "trainer.limit_train_batches 0.001 of 6 micro-batches is less than one",
        ),
    ],
)
def test_what_the_data_module_would_raise_is_found(refused, changes, says):
    assert says in refused("check", **changes)


def test_without_a_store_the_batch_is_checked(refused, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"a\0b")
    said = refused("check", **{"data.path": "bad.txt", "data.micro_batch_size": 3})
    assert "is binary" in said
    assert "cannot be divided by 1 device times data.micro_batch_size 3" in said


def mixture_of(lengths, text_file):
    """Options for a mixture of stores of these names and lengths, which are made in the current folder."""
    for name, size in lengths.items():
        Path(f"{name}.txt").write_text(text_file.read_text()[:size])
        assert main(["prepare", f"{name}.txt", "--tokenizer=byte", f"--out={name}"]) == 0
    return {"data.path": None, "data.tokenizer": None, "data.mixture": dict.fromkeys(lengths, 1)}


def test_all_stores_of_a_mixture_are_counted(flags, tmp_path, monkeypatch, capsys, text_file):
    monkeypatch.chdir(tmp_path)
    mixture = mixture_of({"a": 1000, "b": 3000}, text_file)
    capsys.readouterr()
    assert main(["check", *flags(**mixture)]) == 0
    table = capsys.readouterr().out
    assert re.findall(r"^ok  data +(\w+), uint16", table, re.MULTILINE) == ["a", "b"]
    assert re.findall("^ok  (.*) windows", table, re.MULTILINE) == [
        "train text  3,600 tokens, 224",
        "val text    400 tokens, 24",
        "validation  all 26",
    ]


def test_a_short_source_of_a_mixture_is_found(refused, tmp_path, text_file):
    said = refused("check", **mixture_of({"long": None, "short": 120}, text_file))
    assert "too long for the val split of short" in said
    assert "of long" not in said


def test_what_compiling_needs_is_named(refused, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = refused("fit", **{"model.compile_mode": "default"})
    assert "model.compile_mode default needs a C++ compiler and finds no no-such-compiler: install it" in said


def test_a_mode_that_this_torch_lacks_is_named():
    model = LanguageModel(ModelConfig(vocab_size=19, hidden_size=8, num_attention_heads=2), compile_mode="of-tomorrow")
    with pytest.raises(
        ValueError, match=r"^model.compile_mode of-tomorrow is not a mode of torch 2\.\S+: use default$"
    ):
        preflight.check_setup(model, Trainer(accelerator="cpu", barebones=True))


@pytest.mark.parametrize("command", ["fit", "check"])
def test_what_tf32_and_a_compiled_model_need_is_named(refused, command):
    said = refused(command, **{"trainer.tf32": True, "model.compile_scope": "model"})
    assert "trainer.tf32 true needs an NVIDIA GPU of compute capability 8.0 or later, got cpu: leave it out" in said
    assert "model.compile_scope model compiles nothing while model.compile_mode is null: set it" in said
    sharded = {"model.compile_mode": "default", "trainer.strategy": "fsdp2"}
    said = refused(command, **{"model.compile_scope": "model", **sharded})
    assert "model.compile_scope model is not for FSDP2, which gathers the weights block by block: use blocks" in said


@pytest.mark.parametrize(("precision", "size"), [("32-true", "1.7"), ("bf16-true", "0.8"), ("64-true", "3.4")])
def test_too_small_a_disk_is_named(refused, monkeypatch, precision, size):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000, total=1000))
    said = refused("check", **{"trainer.precision": precision})
    assert f"the disk is too small: 4 checkpoints need {size} MB" in said


def test_check_says_what_it_looked_at_and_starts_nothing(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", *flags()]) == 0
    out, _ = capsys.readouterr()
    assert out.splitlines()[-1] == "ok"
    for word in ("data", "vocabulary", "context", "train text", "val text", "batch", "precision", "epochs", "free at"):
        assert word in out
    assert not (tmp_path / "runs").exists()


def test_the_estimate_of_a_checkpoint_is_close(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", *flags()]) == 0
    said = re.search(r"4 checkpoints need ([\d.]+) MB", capsys.readouterr().out)
    assert main(["fit", *flags()]) == 0
    written = (tmp_path / "runs/run/version_0/checkpoints/best.ckpt").stat().st_size
    assert float(said[1]) / 4 * 1e6 == pytest.approx(written, rel=0.25)


def test_check_takes_the_config_of_a_run(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *flags()]) == 0
    config = Path("runs/run/version_0/config.yaml")
    assert yaml.safe_load(config.read_text())["trainer"]["max_steps"] == 6
    assert main(["check", "--config", str(config)]) == 0


PARTS = "tests.model.test_initial_values"


def test_check_says_who_sets_the_initial_values_of_custom_parts(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", *flags(**{"model.architecture.mlp": f"{PARTS}.Zeros"})]) == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "layers.0.mlp: down writes to the residual stream (the part returns its output)" in said
    assert "its constructor set down.weight" in said
    assert "MLP output weights start at 0 times the table's scale" in said
    assert main(["check", *flags()]) == 0
    assert "initial values" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("NewMemory", "sets map to other values each time"),
        ("DeclaresText", "residual_outputs must be a tuple of paths"),
    ],
)
def test_a_custom_part_without_known_initial_values_is_found(refused, part, says):
    line = refused("check", **{"model.architecture.mlp": f"{PARTS}.{part}"})
    assert f"mlp '{PARTS}.{part}'" in line
    assert says in line


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize("option", ["default_root_dir", "run_dir"])
def test_a_folder_that_can_hold_no_file_is_not_called_a_small_disk(refused, option):
    said = refused("check", **{f"trainer.{option}": "/proc/nope"})
    assert "no checkpoint can be saved in /proc/nope: /proc cannot be written to; set trainer.default_root_dir" in said


@pytest.mark.parametrize("accelerator", ["gpu", "cuda", "mps", "tpu"])
def test_an_accelerator_that_is_not_here_is_named_with_what_to_give(refused, monkeypatch, accelerator):
    for kind in (CUDAAccelerator, MPSAccelerator):
        monkeypatch.setattr(kind, "is_available", staticmethod(lambda: False))
    said = refused("check", **{"trainer.accelerator": accelerator})
    assert f"error: trainer.accelerator {accelerator}: " in said
    assert said.partition(" (docs/")[0].endswith("; give --trainer.accelerator cpu, or auto")
    with pytest.raises(ValueError, match=f"accelerator {accelerator}: "):
        Trainer(accelerator=accelerator)
