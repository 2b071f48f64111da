"""``fit``, ``validate``, ``test``, ``predict`` through ``cli_main``, the way a user runs them."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.profilers import SimpleProfiler

from lightning_llm import Transformer
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.cli.command_line import resume_command
from lightning_llm.cli.train import cli_main
from lightning_llm.training.callbacks import StopOnSignal
from lightning_llm.training.environment import choose_precision
from lightning_llm.training.trainer import NoProfiler
from tests.tiny_run import assert_same_weights, summary, weights


def one_line(capsys):
    """The error that was printed: one line, no stack trace."""
    error = capsys.readouterr().err.strip()
    assert "Traceback" not in error
    lines = [line for line in error.splitlines() if "error:" in line]
    assert len(lines) == 1, error
    return lines[0]


def test_fit_leaves_a_complete_run_directory(tiny, capsys):
    cli = tiny("fit")
    run = Path(cli.trainer.log_dir)
    assert run == Path("runs/run/version_0")
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "best.ckpt",
        "step-00000003.ckpt",
        "step-00000006.ckpt",
    }
    assert list(run.glob("events.out.tfevents*"))
    result = summary(cli)
    assert result["steps"] == 6
    assert result["tokens"] == 6 * 8 * 16
    assert result["checkpoint"] == str(run / "checkpoints" / "step-00000006.ckpt")
    assert result["perplexity"] == pytest.approx(torch.tensor(result["val_loss"]).exp().item())
    # one byte per character here, so bits per byte are the nats in bits
    assert result["bits_per_byte"] == pytest.approx(result["val_loss"] / torch.log(torch.tensor(2.0)).item())
    said = capsys.readouterr().out
    precision = f"precision {cli.trainer.precision} ("
    for word in ("parameters", "6 of 128 tokens (8 × 16)", precision, "validation loss", "generate"):
        assert word in said


def test_a_run_without_a_validation_leaves_json(tiny):
    cli = tiny("fit", **{"trainer.limit_val_batches": 0, "trainer.max_steps": 1})
    text = Path(cli.trainer.log_dir, "summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["best_val_loss"] is None


def test_the_saved_config_runs_again_to_the_same_bits(tiny):
    first = tiny("fit")
    again = cli_main(["fit", "--config", f"{first.trainer.log_dir}/config.yaml"])
    assert again.trainer.log_dir != first.trainer.log_dir
    assert_same_weights(weights(first), weights(again))


def test_fit_takes_the_seed_of_seed_everything(tiny):
    torch.manual_seed(1)
    still = {"model.optimizer.lr": 0.0, "trainer.max_steps": 1, "seed_everything": 3}
    for change in ({}, {"model.architecture.mlp": "relu"}):
        made = tiny("fit", **still, **change).model
        expected = Transformer(made.architecture, seed=3).state_dict()
        assert made.transformer.state_dict().keys() == expected.keys()
        for name, value in made.transformer.state_dict().items():
            assert torch.equal(value, expected[name]), name


def test_training_learns(tiny):
    cli = tiny("fit", **{"trainer.max_steps": 60, "trainer.val_check_interval": 60, "model.optimizer.lr": 0.01})
    assert summary(cli)["val_loss"] < 2.6  # uniform over the alphabet is ln 32 = 3.4


@pytest.mark.parametrize("kind", ["memory_optimized_swiglu", "gelu"])
def test_each_mlp_learns_one_batch_by_heart(kind):
    from lightning_llm import LanguageModel, ModelConfig
    from lightning_llm.optim import AdamW

    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=32, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16, mlp=kind
    )
    model = LanguageModel(config)
    model.configure_model()
    tokens = torch.randint(0, 32, (8, 17))
    batch = {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:]}
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(300):
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def test_standard_and_memory_optimised_mlp_give_the_same_curve(tiny):
    curves = []
    for mlp in ("swiglu", "memory_optimized_swiglu"):
        cli = tiny("fit", **{"model.architecture.mlp": mlp, "trainer.max_steps": 30, "trainer.val_check_interval": 30})
        curves.append(summary(cli)["val_loss"])
    assert curves[0] == pytest.approx(curves[1], abs=1e-4)


def test_same_seed_same_bits_and_another_seed_others(tiny):
    first, second = weights(tiny("fit")), weights(tiny("fit"))
    assert_same_weights(first, second)
    other = weights(tiny("fit", seed_everything=7))
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what torch.compile says of itself
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_compiled_blocks_learn_the_same_and_resume_to_the_same_bits(tiny, dropout, capsys):
    options = {"model.architecture.dropout": dropout, "model.schedule.class_path": "lightning_llm.optim.Constant"}
    compiled = {**options, "model.compile_mode": "default", "trainer.default_root_dir": "compiled"}
    whole = tiny("fit", **compiled)
    assert all(layer.is_compiled for layer in whole.model.transformer.layers)
    assert "wait until the blocks are compiled (mode default)" in " ".join(capsys.readouterr().out.split())
    if not dropout:  # the compiler draws what is dropped in its own way
        assert summary(whole)["val_loss"] == pytest.approx(summary(tiny("fit", **options))["val_loss"], abs=1e-4)
    changed = {**compiled, "trainer.default_root_dir": "other"}
    tiny("fit", **{**changed, "trainer.max_steps": 3})
    rest = tiny("fit", "--ckpt_path=last", **changed)
    assert_same_weights(weights(whole), weights(rest))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_resumed_equals_uninterrupted_bit_for_bit(tiny, dropout):
    options = {"model.architecture.dropout": dropout, "model.schedule.class_path": "lightning_llm.optim.Constant"}
    whole = tiny("fit", **options)
    tiny("fit", **{**options, "trainer.max_steps": 3, "trainer.default_root_dir": "other"})
    rest = tiny("fit", "--ckpt_path=last", **{**options, "trainer.default_root_dir": "other"})
    assert rest.trainer.log_dir == "other/run/version_0"
    assert_same_weights(weights(whole), weights(rest))


def test_resumed_with_other_micro_batches_takes_the_same_steps(tiny):
    options = {"model.schedule.class_path": "lightning_llm.optim.Constant", "trainer.precision": "32-true"}
    whole = tiny("fit", **options)
    tiny("fit", **{**options, "trainer.max_steps": 3, "data.micro_batch_size": 4, "trainer.default_root_dir": "other"})
    rest = tiny(
        "fit", "--ckpt_path=last", **{**options, "data.micro_batch_size": 2, "trainer.default_root_dir": "other"}
    )
    assert rest.trainer.global_step == 6
    assert summary(rest)["val_loss"] == pytest.approx(summary(whole)["val_loss"], rel=1e-5)


def test_micro_batches_change_nothing_but_rounding(tiny):
    whole, parts = tiny("fit"), tiny("fit", **{"data.micro_batch_size": 2})
    assert parts.trainer.accumulate_grad_batches == 4
    assert parts.trainer.global_step == 6
    assert summary(whole)["val_loss"] == pytest.approx(summary(parts)["val_loss"], rel=1e-5)


def test_logged_curve_is_the_mean_per_optimiser_step(tiny):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cli = tiny("fit", **{"data.micro_batch_size": 2})
    events = EventAccumulator(cli.trainer.log_dir)
    events.Reload()
    assert [event.step for event in events.Scalars("train_loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("val_loss")] == [3, 6]
    assert events.Scalars("train_loss")[0].value == pytest.approx(3.4, abs=0.3)  # ln 32 before anything is learnt
    for name in ("learning_rate", "grad_norm", "throughput/tokens_per_second", "train_loss_eval", "val_perplexity"):
        assert events.Scalars(name), name
    assert events.Scalars("val_bits_per_byte")


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("torch.optim.AdamW", {"lr": 0.001}),
        ("torch.optim.SGD", {"lr": 0.1, "momentum": 0.9}),
        ("lightning_llm.optim.MuonAdamW", {"lr": 0.01}),
    ],
)
def test_any_optimiser_by_class_path(tiny, optimizer, options):
    flags = {f"model.optimizer.{name}": value for name, value in options.items()}
    cli = tiny("fit", **{"model.optimizer": optimizer, **flags})
    made = type(cli.trainer.optimizers[0])
    assert f"{made.__module__}.{made.__name__}".endswith(optimizer.rpartition(".")[2])
    assert cli.trainer.optimizers[0].param_groups[0]["initial_lr"] == options["lr"]


@pytest.mark.parametrize(
    ("schedule", "last"),
    [
        (
            {"class_path": "lightning_llm.optim.WarmupCosine", "init_args": {"warmup_steps": 2, "min_lr_ratio": 0.5}},
            0.5,
        ),
        ({"class_path": "lightning_llm.optim.WarmupLinear", "init_args": {"min_lr_ratio": 0.25}}, 0.25),
        ({"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 3, "gamma": 0.5}}, 0.5),
    ],
)
def test_any_schedule_by_class_path(tiny, schedule, last, tmp_path):
    config = tmp_path / "schedule.yaml"
    config.write_text(yaml.safe_dump({"model": {"schedule": schedule}}))
    rates = []
    original = torch.optim.AdamW.step

    def noting(self, closure=None):
        if self.param_groups[0]["params"][0].device.type != "meta":  # the preflight's step, which moves nothing
            rates.append(self.param_groups[0]["lr"])
        return original(self, closure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", noting)
        tiny("fit", f"--config={config}", **{"model.optimizer": "torch.optim.AdamW", "model.optimizer.lr": 0.01})
    assert rates[-1] == pytest.approx(0.01 * last)
    assert len(rates) == 6


def test_validate_and_predict_take_the_run_directory(tiny, capsys):
    cli = tiny("fit")
    capsys.readouterr()
    again = cli_main(["validate", "--ckpt_path", cli.trainer.log_dir])
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    losses = {"val_loss", "val_perplexity", "val_bits_per_byte", "train_loss_eval"}
    assert printed.keys() == losses | {"val_recall_loss", "val_other_loss", "val_recall_share"}
    assert float(printed["val_loss"]) == pytest.approx(summary(cli)["best_val_loss"], abs=1e-6)
    assert again.trainer.callback_metrics["val_loss"].item() == pytest.approx(summary(cli)["best_val_loss"], rel=1e-6)


def test_predict_prints_a_json_line_for_each_prompt(tiny, capsys):
    cli = tiny("fit")
    capsys.readouterr()
    cli_main(["predict", "--ckpt_path", cli.trainer.log_dir, '--data.predict_prompts=["Abc", "De fg"]'])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["Abc", "De fg"]
    assert all(line["text"].startswith(line["prompt"]) for line in lines)
    assert [len(line["text"]) - len(line["prompt"]) for line in lines] == [100, 100]


@pytest.mark.parametrize(
    ("words", "says"), [(["test"], "test split"), (["predict"], "data.predict_prompts"), (["validate", "fit"], "fit")]
)
def test_what_a_command_needs_is_said(tiny, capsys, words, says):
    cli = tiny("fit")
    with pytest.raises(SystemExit):
        cli_main([*words, "--ckpt_path", cli.trainer.log_dir])
    assert says in one_line(capsys)


def test_evaluating_needs_a_checkpoint(tiny, capsys):
    with pytest.raises(SystemExit):
        tiny("validate")
    assert "validate needs a trained model" in one_line(capsys)


def test_a_checkpoint_of_another_architecture_is_refused(finished, tiny, capsys):
    with pytest.raises(SystemExit):
        tiny("fit", "--ckpt_path=last", **{"model.architecture.hidden_size": 48})
    assert "hidden_size is 32 there and 48 here" in one_line(capsys)


def test_the_other_swiglu_may_go_on_from_a_checkpoint(tiny):
    tiny("fit", **{"trainer.max_steps": 3})
    cli = tiny("fit", "--ckpt_path=last", **{"model.architecture.mlp": "memory_optimized_swiglu"})
    assert cli.trainer.global_step == 6
    assert cli.model.architecture.mlp == "memory_optimized_swiglu"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.architecture.hidden_size": 33}, "hidden_size 33 is not divisible by num_attention_heads 2"),
        ({"model.architecture.num_key_value_heads": 3}, "is not a multiple of num_key_value_heads 3"),
        ({"model.architecture.mlp": "swigloo"}, "mlp 'swigloo' is unknown"),
        ({"model.architecture.norm": "batchnorm"}, "norm"),
        ({"model.architecture.checkpoint_level": 7}, "checkpoint_level must be one of"),
        ({"model.architecture.depth": 3}, "depth"),
        ({"model.architecture.max_position_embeddings": 8}, "context_length 16"),
        ({"model.architecture.vocab_size": 3}, "vocab_size 3"),
        ({"model.optimizer.lr": "fast"}, "lr"),
        ({"data.context_length": 10**6}, "context_length"),
        ({"data.global_batch_size": 0}, "global_batch_size"),
        ({"data.micro_batch_size": 3}, "global_batch_size 8 cannot be divided"),
        ({"data.path": "no-such-file.txt"}, "no-such-file.txt"),
        ({"data.path": "null", "data.corpus": "bible"}, "bible"),
        ({"data.tokenizer": "words"}, "words"),
        ({"trainer.precision": "3-bit"}, "precision"),
        ({"trainer.devices": 0}, "device"),
        ({"ckpt_path": "last"}, "no checkpoint in"),
        ({"ckpt_path": "nowhere.ckpt"}, "no such file"),
        ({"ckpt_path": "http://localhost/x.ckpt"}, "is a URL"),
        ({"weights_only": False, "ckpt_path": "last"}, "would run code"),
    ],
)
def test_a_users_mistake_is_one_line(tiny, capsys, changes, says):
    changes = {name: value for name, value in changes.items() if value is not None}
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", **changes)
    assert leaving.value.code == 2
    assert says in one_line(capsys)
    assert not list(Path("runs").glob("**/*.ckpt"))


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    ("number", "while_validating"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, False)]
)
def test_a_signal_leaves_a_checkpoint_that_goes_on_to_the_same_bits(
    tiny, number, while_validating, monkeypatch, capsys
):
    options = {"model.schedule.class_path": "lightning_llm.optim.Constant"}
    whole = tiny("fit", **options)
    name = "on_validation_batch_end" if while_validating else "on_train_batch_end"
    original, sent = getattr(StopOnSignal, name), []

    def sending(self, trainer, *args, **kwargs):
        if trainer.global_step >= 3 and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        original(self, trainer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(StopOnSignal, name, sending)
        with pytest.raises(SystemExit) as leaving:
            tiny("fit", **{**options, "trainer.default_root_dir": "other"})
    assert leaving.value.code == 128 + number
    said = capsys.readouterr().err
    assert "after step 3" in said
    assert "--ckpt_path last" in said
    rest = tiny("fit", "--ckpt_path=last", **{**options, "trainer.default_root_dir": "other"})
    assert_same_weights(weights(whole), weights(rest))
    best = read_checkpoint("other/run/version_0/checkpoints/best.ckpt")
    assert best["global_step"] in (3, 6)


def test_a_config_at_an_address_is_not_fetched(monkeypatch, capsys):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("something was asked for over the network"))
    with pytest.raises(SystemExit) as leaving:
        cli_main(["fit", "--config", "http://127.0.0.1:9/config.yaml"])
    assert leaving.value.code == 2
    assert "http://127.0.0.1:9/config.yaml" in one_line(capsys)


def test_code_in_a_checkpoint_is_never_run(tiny, tmp_path, capsys):
    class Malicious:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"state_dict": Malicious()}, tmp_path / "bad.ckpt")
    with pytest.raises(SystemExit):
        tiny("fit", f"--ckpt_path={tmp_path / 'bad.ckpt'}")
    assert "is rejected" in one_line(capsys)
    assert not (tmp_path / "ran").exists()


def test_a_truncated_checkpoint_is_named(tiny, capsys):
    cli = tiny("fit")
    newest = Path(cli.trainer.log_dir) / "checkpoints" / "step-00000006.ckpt"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    with pytest.raises(SystemExit):
        tiny("fit", f"--ckpt_path={newest}")
    assert "truncated or damaged" in one_line(capsys)


@pytest.mark.parametrize(
    "given", [[], ["--ckpt_path", "runs/a/version_0"], ["--ckpt_path=best"], ["--ckpt_path", "last"]]
)
def test_an_interrupted_run_names_a_command_that_goes_on(given):
    words = ["fit", "--config", "my runs/a.yaml", *given, "--trainer.max_steps", "9"]
    command = shlex.split(resume_command(words))
    assert command[-2:] == ["--ckpt_path", "last"]
    assert command[:-2] == ["lightning-llm", "fit", "--config", "my runs/a.yaml", "--trainer.max_steps", "9"]


def test_help_answers_without_torch():
    code = "import sys; from lightning_llm.__main__ import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for word in ("fit", "validate", "test", "predict", "prepare", "generate"):
        assert word in done.stdout


def test_steps_between_validations_stay_steps_when_the_trainer_trains_again(tiny):
    cli = tiny("fit", **{"data.micro_batch_size": 2, "trainer.max_steps": 4, "trainer.val_check_interval": 2})
    trainer, validated = cli.trainer, []
    trainer.callbacks.append(LambdaCallback(on_validation_start=lambda *of: validated.append(trainer.global_step)))
    trainer.fit_loop.epoch_loop.max_steps = 10
    trainer.fit(cli.model, datamodule=cli.datamodule)
    assert validated == [6, 8, 10]


@pytest.mark.parametrize(("given", "used"), [(None, NoProfiler), ("simple", SimpleProfiler)])
def test_a_profiler_is_used_if_asked_for(tiny, given, used):
    run = tiny("fit", **{"trainer.max_steps": 2, "trainer.profiler": given})
    assert type(run.trainer.profiler) is used
    if given:
        timed = run.trainer.profiler.recorded_durations
        assert len(timed["run_training_batch"]) == 2
        assert len(timed["[Callback]TrainingLog.on_train_batch_end"]) == 2


def test_a_notebook_does_not_touch_the_gpus_that_its_processes_will_use(monkeypatch):
    def touched():
        raise AssertionError("a process that is forked from this one could not use CUDA")

    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_lazy_init", touched)
    assert choose_precision("auto")[0] == "bf16-mixed"
