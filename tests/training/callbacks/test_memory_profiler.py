"""MemoryProfiler in real runs of a tiny model: what it logs and writes, that it changes nothing, what it refuses."""

import json
import os
import subprocess
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from lightning_llm import LanguageModel, ModelConfig, TokenDataModule
from lightning_llm.accounting.step_settings import StepSettings
from lightning_llm.measure.gauges import Reading
from lightning_llm.measure.timeline import CATEGORIES
from lightning_llm.optim import AdamW
from lightning_llm.training.callbacks import MemoryProfiler, memory_advice, memory_profiler
from lightning_llm.training.callbacks.memory_advice import MemoryAdvice, Saving, StepCase, advise
from lightning_llm.training.trainer import Trainer

RUN = "run/version_0"  # below trainer.default_root_dir
HIDDEN, INTERMEDIATE, SEQ, BATCH, LAYERS = 32, 96, 16, 8, 2


class Noted(Logger):
    """Keeps what is logged."""

    name, version = "noted", 0

    def __init__(self, folder):
        super().__init__()
        self.folder, self.metrics = folder, {}

    @property
    def log_dir(self):
        return str(self.folder)

    @property
    def save_dir(self):
        return str(self.folder)

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.metrics.setdefault(step, {}).update(metrics)


def parts(text_file, folder, callbacks=(), *, micro=None, mlp="memory_optimized_swiglu", logger=None, **options):
    seed_everything(1, verbose=False)
    architecture = ModelConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        max_position_embeddings=SEQ,
        mlp=mlp,
    )
    data = TokenDataModule(
        path=str(text_file), tokenizer="char", context_length=SEQ, global_batch_size=BATCH, micro_batch_size=micro
    )
    trainer = Trainer(
        **{
            "max_steps": 4,
            "accelerator": "cpu",
            "precision": "32-true",
            "logger": logger or Noted(folder),
            "callbacks": list(callbacks),
            "log_every_n_steps": 2,
            "limit_val_batches": 2,
            "val_check_interval": 2,
            "enable_progress_bar": False,
            "default_root_dir": str(folder),
            **options,
        }
    )
    return trainer, LanguageModel(architecture), data


def fit(text_file, folder, callbacks=(), **options):
    trainer, model, data = parts(text_file, folder, callbacks, **options)
    trainer.fit(model, data)
    return trainer, model


def report_of(folder, step):
    return json.loads((folder / f"memory/step-{step}.json").read_text())


@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("mlp", ["swiglu", "memory_optimized_swiglu"])
def test_the_run_is_the_same_bit_for_bit(text_file, tmp_path, mlp):
    options = {"mlp": mlp, "micro": 4}
    _, plain = fit(text_file, tmp_path / "a", **options)
    _, profiled = fit(text_file, tmp_path / "b", [MemoryProfiler(every_n_steps=1)], **options)
    assert (tmp_path / "b" / RUN / "memory/step-3.json").is_file()
    for ours, theirs in zip(profiled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_sampled_step_adds_up(text_file, tmp_path):
    _, model = fit(text_file, tmp_path, [MemoryProfiler(every_n_steps=3)])
    assert [path.name for path in sorted((tmp_path / RUN / "memory").glob("*.json"))] == ["step-3.json"]
    report = report_of(tmp_path / RUN, 3)
    weights = sum(4 * p.numel() for p in model.parameters())
    kinds = report["peak"]["by_kind"]
    assert list(kinds) == list(CATEGORIES)
    assert kinds["parameters"] == weights
    assert kinds["optimizer_state"] == 2 * weights
    assert kinds["inputs"] == 2 * 8 * BATCH * SEQ
    for point in (report["peak"], report["saved"]):
        assert sum(point["by_kind"].values()) == sum(point["by_module"].values()) == point["bytes"]
    assert max(phase["peak_bytes"] for phase in report["phases"].values()) == report["peak"]["bytes"]
    assert [phase for _, phase in report["timeline"]["marks"]] == ["forward", "backward", "optimizer"]
    assert max(sum(s["by_kind"].values()) for s in report["timeline"]["samples"]) == report["peak"]["bytes"]
    optimizer = report["phases"]["optimizer"]
    assert optimizer["peak_bytes"] >= 4 * weights > optimizer["live_bytes"]  # gradients die with the step
    head = model.transformer.lm_head.weight
    assert report["saved"]["by_kind"]["gradients"] == head.nbytes  # which the chunked loss makes in forward
    assert {"lm_head", "embed_tokens", "layers.0.mlp", "layers.1.self_attn"} <= set(report["peak"]["by_module"])
    assert not report["compiled"]
    assert (tmp_path / RUN / "memory/step-3.png").stat().st_size > 10_000


def test_the_mlps_differ_where_they_should(text_file, tmp_path):
    reports = {}
    for mlp in ("swiglu", "memory_optimized_swiglu"):
        fit(text_file, tmp_path / mlp, [MemoryProfiler(every_n_steps=2)], mlp=mlp)
        reports[mlp] = report_of(tmp_path / mlp / RUN, 2)["saved"]
    kept = [
        {row["module"]: row["bytes"] for row in report["table"] if row["kind"] == "activations"}
        for report in reports.values()
    ]
    changed = {name: kept[0].get(name, 0) - kept[1].get(name, 0) for name in kept[0].keys() | kept[1].keys()}
    # g, u, silu(g) and their product against g and u
    expected = 2 * 4 * BATCH * SEQ * INTERMEDIATE
    assert {name: size for name, size in changed.items() if size} == {
        f"layers.{layer}.mlp": expected for layer in range(LAYERS)
    }


def test_accumulation_is_one_step(text_file, tmp_path):
    _, model = fit(text_file, tmp_path, [MemoryProfiler(every_n_steps=2)], micro=2)
    report = report_of(tmp_path / RUN, 2)
    marks = [phase for _, phase in report["timeline"]["marks"]]
    assert marks == ["forward", "backward"] * 4 + ["optimizer"]
    weights = sum(4 * p.numel() for p in model.parameters())
    assert report["saved"]["by_kind"]["gradients"] >= weights  # of the micro-batches before


def test_what_is_logged(text_file, tmp_path):
    logger = Noted(tmp_path)
    fit(text_file, tmp_path, [MemoryProfiler(every_n_steps=4)], logger=logger)
    phases = ("forward", "backward", "optimizer")
    names = {f"memory/{phase}_{what}_gib" for phase in phases for what in ("peak", "live")}
    for step in (2, 4):
        found = logger.metrics[step]
        assert names <= found.keys()
        assert 0.01 < found["memory/forward_live_gib"] <= found["memory/forward_peak_gib"] < 100
    assert not [name for name in logger.metrics.get(1, {}) if name.startswith("memory")]
    # validation follows the entry of its step: it is in the next one, or the last
    assert logger.metrics[4]["memory/validation_peak_gib"] > 0
    at_peak = {kind: logger.metrics[4][f"memory/at_peak/{kind}_gib"] for kind in CATEGORIES}
    assert at_peak == {kind: n / 2**30 for kind, n in report_of(tmp_path / RUN, 4)["peak"]["by_kind"].items()}
    assert "memory/at_peak/parameters_gib" not in logger.metrics[2]


def test_an_entry_holds_the_highest_since_the_last(text_file, tmp_path, monkeypatch):
    class Falling:
        source = "made up"
        left = 1000

        def read(self):
            self.left -= 1
            return Reading(self.left, self.left + 500)

    monkeypatch.setattr(memory_profiler, "gauge_for", lambda device: Falling())
    logger = Noted(tmp_path)
    fit(text_file, tmp_path, [MemoryProfiler()], logger=logger, limit_val_batches=0)
    # four readings a step: at its start, and after forward, backward and the optimiser
    for step, first in ((2, 0), (4, 8)):
        found = {name: round(n * 2**30) for name, n in logger.metrics[step].items() if name.startswith("memory/")}
        assert found == {
            f"memory/{phase}_{what}_gib": 1000 - first - place + extra
            for place, phase in ((2, "forward"), (3, "backward"), (4, "optimizer"))
            for what, extra in (("live", 0), ("peak", 500))
        }


def test_tensorboard_gets_the_picture(text_file, tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="", default_hp_metric=False)
    fit(text_file, tmp_path, [MemoryProfiler(every_n_steps=4)], logger=logger)
    events = EventAccumulator(logger.log_dir).Reload()
    (image,) = events.Images("memory")
    assert image.step == 4
    assert image.width > 600


def test_without_sampling_nothing_is_written(text_file, tmp_path):
    fit(text_file, tmp_path, [MemoryProfiler()])
    assert not (tmp_path / RUN / "memory").exists()


def test_hooks_and_mode_are_gone_after_a_sample(text_file, tmp_path):
    _, model = fit(text_file, tmp_path, [MemoryProfiler(every_n_steps=1)])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.transformer.modules())
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("part", ["the model", "a block"])
def test_what_is_compiled_is_not_metered(text_file, tmp_path, part):
    class Compiled(Callback):
        """Says what torch.compile would say of a module, without compiling for a minute."""

        def on_fit_start(self, trainer, pl_module):
            model = pl_module.transformer
            if part == "the model":
                model._compiled_call_impl = model._call_impl
            else:
                model.layers[1]._compiled = type(model.layers[1])._run

    fit(text_file, tmp_path, [Compiled(), MemoryProfiler(every_n_steps=2)])
    report = report_of(tmp_path / RUN, 2)
    assert report["compiled"]
    assert report["counters"]["forward_peak_bytes"] > 0
    assert "peak" not in report
    assert not (tmp_path / RUN / "memory/step-2.png").exists()


class RunsOut(Callback):
    """In step 2, in the middle of backward, memory runs out as it does on a CPU."""

    def __init__(self, error):
        self.error = error

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 1:
            pl_module.transformer.layers[1].mlp.register_forward_hook(self.fail)

    def fail(self, *args):
        raise self.error


@pytest.mark.parametrize("every", [1, None])
def test_out_of_memory_is_explained(text_file, tmp_path, capsys, monkeypatch, every):
    runs = []
    current = {"peak": {"by_kind": dict.fromkeys(CATEGORIES, 1), "by_module": {"x": 7}, "table": []}}
    savings = [Saving(f"option.{n} {n}", n * 2**20, 0.0, "a note") for n in range(1, 5)]
    monkeypatch.setattr(memory_advice, "advise", lambda run: runs.append(run) or MemoryAdvice(current, savings, []))
    error = torch.OutOfMemoryError("CUDA out of memory.") if every else RuntimeError("DefaultCPUAllocator: no memory")
    with pytest.raises(type(error)):
        fit(text_file, tmp_path, [MemoryProfiler(every_n_steps=every), RunsOut(error)], mlp="swiglu")
    said = capsys.readouterr().err
    assert "Out of memory in step 2 of rank 0" in said
    assert (tmp_path / RUN / "memory/out-of-memory.txt").read_text().strip() in said
    report = json.loads((tmp_path / RUN / "memory/out-of-memory.json").read_text())
    assert report["peak"]["by_kind"]["optimizer_state"] == 2 * report["peak"]["by_kind"]["parameters"] > 0
    assert report["peak"]["by_kind"]["inputs"] == 2 * 8 * BATCH * SEQ
    assert (report["peak"]["by_kind"]["activations"] > 0) is (every == 1)
    assert [setting["setting"] for setting in report["settings"]] == ["option.4 4", "option.3 3", "option.2 2"]
    assert "1. option.4 4: saves 4.0 MiB, no more arithmetic; a note" in said
    (run,) = runs
    assert (run.optimizer, run.step) == ("AdamW", StepSettings(rows=BATCH, context_length=SEQ))
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_advice_is_for_the_trainers_step_and_counts_float16_as_bfloat16():
    strategy = SimpleNamespace(root_device=torch.device("cuda"), kind="fsdp2")
    trainer = SimpleNamespace(strategy=strategy, precision="16-mixed", world_size=2, accumulate_grad_batches=3)
    trainer.optimizers = [AdamW([nn.Parameter(torch.zeros(2))], state_dtype="bfloat16")]
    model = SimpleNamespace(architecture=ModelConfig(vocab_size=10), loss_chunks=4)
    run = memory_advice._case_of(trainer, model, {"input_ids": torch.zeros(BATCH, SEQ)})
    of_trainer = {"precision": "bf16-mixed", "device": "cuda", "world_size": 2, "accumulation": 3}
    of_trainer |= {"strategy": "fsdp2", "state_itemsize": 2}
    assert run.step == StepSettings(rows=BATCH, context_length=SEQ, loss_chunks=4, **of_trainer)


def test_other_errors_are_left_alone(text_file, tmp_path, capsys):
    with pytest.raises(RuntimeError, match="something else"):
        fit(text_file, tmp_path, [MemoryProfiler(every_n_steps=1), RunsOut(RuntimeError("something else"))])
    assert "Out of memory" not in capsys.readouterr().err
    assert torch._C._len_torch_dispatch_stack() == 0


class OwnMLP(nn.Module):
    """An MLP that the accounting does not know."""

    def __init__(self, config):
        super().__init__()
        self.widen = nn.Linear(config.hidden_size, config.intermediate_size)
        self.narrow = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        """Saves three tensors of the intermediate width: tanh's output, the sigmoid's, and their product."""
        wide = self.widen(x)
        return self.narrow(wide.tanh() * wide.sigmoid())


@pytest.mark.parametrize("mlp", ["swiglu", f"{__name__}.OwnMLP"])
def test_the_estimate_is_what_a_step_takes(text_file, tmp_path, mlp):
    """Against the meter on a real step: activations to 2 %, the peak without optimizer state to 5 %."""
    _, model = fit(text_file, tmp_path, [MemoryProfiler(every_n_steps=2)], mlp=mlp)
    report = report_of(tmp_path / RUN, 2)
    run = StepCase(model.architecture, "AdamW", StepSettings(rows=BATCH, context_length=SEQ))
    found = advise(run)
    assert found is not None
    real = report["saved"]["by_kind"]["activations"]
    assert found.current["saved"]["by_kind"]["activations"] == pytest.approx(real, rel=0.02)
    peak = max(report["phases"][phase]["peak_bytes"] for phase in ("forward", "backward"))
    others = report["peak"]["by_kind"]["optimizer_state"] + report["peak"]["by_kind"]["inputs"]
    assert found.current["peak"]["bytes"] == pytest.approx(peak - others, rel=0.05)
    saved = {saving.setting: saving for saving in found.savings}
    assert saved["data.micro_batch_size 4"].estimated_bytes_saved > 0
    if mlp == "swiglu":
        level = saved["model.architecture.mlp memory_optimized_swiglu with checkpoint_level 1"]
        assert level.estimated_extra_work > 0
        # a layer's four matrices of the intermediate width; what the other layers' buffers take at the peak comes off
        assert 0 < level.estimated_bytes_saved <= LAYERS * 4 * 4 * BATCH * SEQ * INTERMEDIATE
    assert found.remarks == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every_n_steps": 0}, "MemoryProfiler.every_n_steps must be a whole number of at least 1 or null, got 0"),
        ({"every_n_steps": -5}, "every_n_steps must be .* got -5"),
        ({"snapshot_at": 0}, "snapshot_at must be .* got 0"),
        ({"every_n_steps": 1.5, "top": None}, "every_n_steps .* got 1.5; MemoryProfiler.top .* at least 1, got None"),
    ],
)
def test_intervals_are_checked(options, says):
    with pytest.raises(ValueError, match=says):
        MemoryProfiler(**options)


def test_a_run_directory_that_cannot_be_written_to_is_named_first(text_file, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/memory").write_text("no folder")
    trainer, model, data = parts(text_file, tmp_path, [MemoryProfiler()])
    trainer.run_directory.take(tmp_path / "old")
    with pytest.raises(ValueError, match=r"MemoryProfiler cannot write to .*old/memory: set another log directory"):
        trainer.fit(model, data)


def test_a_snapshot_needs_cuda(text_file, tmp_path):
    with pytest.raises(ValueError, match=r"MemoryProfiler\.snapshot_at 2: the snapshot is CUDA's, this run is on cpu"):
        fit(text_file, tmp_path, [MemoryProfiler(snapshot_at=2)])


@pytest.mark.slow
def test_every_process_has_its_own_and_the_first_logs_the_maximum(text_file, tmp_path, quick_processes):
    profiler = {
        "class_path": "lightning_llm.training.callbacks.MemoryProfiler",
        "init_args": {"every_n_steps": 2},
    }
    architecture = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2}
    words = [
        *(f"--model.architecture.{name}={value}" for name, value in architecture.items()),
        *(f"--data.path={text_file}", "--data.tokenizer=char", f"--data.context_length={SEQ}"),
        *("--data.global_batch_size=8", "--data.micro_batch_size=2", "--trainer.devices=2", "--trainer.strategy=ddp"),
        *("--trainer.accelerator=cpu", "--trainer.precision=32-true", "--trainer.max_steps=2"),
        *("--trainer.log_every_n_steps=1", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"),
        f"--trainer.callbacks+={json.dumps(profiler)}",
    ]
    command = [quick_processes.python, "-m", "lightning_llm", "fit", *words]
    environment = {**os.environ, **quick_processes.environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs/run/version_0"
    reports = [report_of(run, 2), json.loads((run / "memory/rank-1/step-2.json").read_text())]
    assert [report["rank"] for report in reports] == [0, 1]
    for report in reports:
        assert [phase for _, phase in report["timeline"]["marks"]] == [*("forward", "backward") * 2, "optimizer"]
        assert sum(report["peak"]["by_kind"].values()) == report["peak"]["bytes"]
    assert (run / "memory/rank-1/step-2.png").is_file()
    events = EventAccumulator(str(run)).Reload()
    for phase in ("forward", "backward", "optimizer"):
        (logged,) = [event.value for event in events.Scalars(f"memory/{phase}_peak_gib") if event.step == 2]
        most = max(report["counters"][f"{phase}_peak_bytes"] for report in reports)
        assert logged == pytest.approx(most / 2**30, rel=1e-6)
    (logged,) = [event.value for event in events.Scalars("memory/at_peak/activations_gib")]
    assert logged == pytest.approx(max(r["peak"]["by_kind"]["activations"] for r in reports) / 2**30, rel=1e-6)
