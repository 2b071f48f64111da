"""Speed in the log: parts that add up to the whole, tokens that are the trained ones, and no peak that is a guess."""

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_llm.accounting import find_device, step_flops
from lightning_llm.data import batches
from lightning_llm.data.batches import WindowReader
from lightning_llm.measure import timer
from lightning_llm.training import metrics
from lightning_llm.training.callbacks.throughput import TrainingLog, Utilization, utilization_of
from lightning_llm.training.module import LanguageModel

PARTS = ("data", "forward", "backward", "optimizer", "other")


def curves(cli):
    events = EventAccumulator(cli.trainer.log_dir)
    events.Reload()
    return {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_the_parts_of_a_step_add_up_to_it(tiny):
    found = curves(tiny("fit", **{"data.micro_batch_size": 2, "trainer.log_every_n_steps": 2}))
    for entry, step_s in enumerate(found["throughput/step_s"]):
        parts = {part: found[f"time/{part}_s"][entry] for part in PARTS}
        assert all(seconds > 0 for seconds in parts.values())
        assert sum(parts.values()) == pytest.approx(step_s, rel=1e-5)
        assert found["throughput/tokens_per_second"][entry] == pytest.approx(8 * 16 / step_s, rel=1e-5)
        stall = found["throughput/data_stall_percent"][entry]
        assert stall == pytest.approx(100 * parts["data"] / step_s, rel=1e-5)
    assert "throughput/mfu_percent" not in found  # no peak is known for a CPU


def test_without_log_steps_no_marks_are_held(tiny):
    cli = tiny("fit", **{"data.micro_batch_size": 2, "trainer.log_every_n_steps": 0})
    (log,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, TrainingLog))
    held = log._clock.take()
    assert "forward" not in held
    assert "optimizer" not in held


def test_what_is_logged_is_there_for_callbacks_of_lightning(tiny):
    stop = {
        "class_path": "lightning.pytorch.callbacks.EarlyStopping",
        "init_args": {"monitor": "train_loss", "stopping_threshold": 100},
    }
    cli = tiny("fit", **{"trainer.callbacks": [stop]})
    assert cli.trainer.global_step == 3  # the first validation, after which Lightning lets it look
    metrics, found = cli.trainer.callback_metrics, curves(cli)
    for name in ("train_loss", "learning_rate", "grad_norm", "throughput/tokens_per_second"):
        assert metrics[name].item() == found[name][-1], name


@pytest.fixture
def clock(monkeypatch):
    """A clock for those who read it here: each reading takes a second, and a test adds what it likes."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            self.now += 1
            return self.now

    clock = Clock()
    for module in (batches, timer):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_slow_data_is_seen_as_a_stall(tiny, monkeypatch, clock):
    quick = WindowReader.__call__

    def slow(self, starts):
        clock.now += 1000
        return quick(self, starts)

    monkeypatch.setattr(WindowReader, "__call__", slow)
    found = curves(tiny("fit", **{"trainer.max_steps": 3, "trainer.val_check_interval": 100}))
    assert found["time/data_s"][1:] == [1001, 1001]  # the two readings around it are a second apart
    assert min(found["throughput/data_stall_percent"]) > 95


def test_saving_and_validating_count_nowhere(tiny, monkeypatch, clock):
    saving, validating = Strategy.save_checkpoint, LanguageModel.validation_step

    def slow(function):
        def slowly(*args, **kwargs):
            clock.now += 1000
            return function(*args, **kwargs)

        return slowly

    monkeypatch.setattr(Strategy, "save_checkpoint", slow(saving))
    monkeypatch.setattr(LanguageModel, "validation_step", slow(validating))
    found = curves(tiny("fit", **{"trainer.val_check_interval": 1, "trainer.max_steps": 3}))
    assert clock.now > 6000
    assert max(found["throughput/step_s"]) < 100


def test_a_given_peak_gives_both_utilizations(tiny, tmp_path):
    log = {"class_path": "lightning_llm.training.callbacks.TrainingLog", "init_args": {"peak_tflops": 0.5}}
    changes = {"trainer.callbacks": [log], "model.architecture.checkpoint_level": 1}
    cli = tiny("fit", **changes)
    assert sum(isinstance(callback, TrainingLog) for callback in cli.trainer.callbacks) == 1
    found, config = curves(cli), cli.model.architecture
    flops = step_flops(config, tokens=8 * 16, context_length=16)
    for step_s, mfu, hfu in zip(
        *(found[f"throughput/{name}"] for name in ("step_s", "mfu_percent", "hfu_percent")), strict=True
    ):
        assert mfu == pytest.approx(100 * flops.model / 0.5e12 / step_s, rel=1e-5)
        assert hfu / mfu == pytest.approx(flops.hardware / flops.model, rel=1e-5)
        assert hfu > mfu


@pytest.mark.parametrize("peak", [0, -1.0])
def test_a_peak_must_be_positive(peak):
    with pytest.raises(ValueError, match=f"peak_tflops must be above 0, got {peak}"):
        TrainingLog(peak_tflops=peak)


class FakeTrainer:
    """As much of a trainer on GPUs as a peak depends on."""

    def __init__(self, precision, device="cuda"):
        self.precision, self.world_size = precision, 4
        self.strategy = type("Strategy", (), {"root_device": torch.device(device)})
        self.datamodule = type("Data", (), {"tokens_per_step": 1024, "context_length": 16})


@pytest.mark.parametrize(
    ("name", "precision", "says"),
    [
        ("NVIDIA H200", "bf16-mixed", "peak 989.5 TFLOP/s in bfloat16 (NVIDIA H200 data sheet (2024))"),
        ("NVIDIA H200", "32-true", "peak 67 TFLOP/s in float32"),
        ("Tesla T4", "bf16-true", "no MFU: Tesla T4 has no bfloat16 matrix multiplications"),
        ("Quantum 9000", "bf16-mixed", "no MFU: device 'Quantum 9000' is not in the table"),
    ],
)
def test_peaks_of_gpus(monkeypatch, tiny, name, precision, says):
    config = tiny("fit", **{"trainer.max_steps": 1}).model.architecture
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = utilization_of(FakeTrainer(precision), config, None)
    assert found.note.startswith(says)
    assert found.percent(1.0).keys() == (set() if "no MFU" in says else {metrics.MFU, metrics.HFU})
    if "no MFU" not in says:
        dtype = "bfloat16" if "bf16" in precision else "float32"
        assert found.peak == 4 * find_device(name).flops[dtype]


def test_without_a_known_model_or_device_there_is_a_reason():
    assert utilization_of(FakeTrainer("32-true"), None, None).note.startswith("no MFU: ")
    assert Utilization(None, 1.0, "").percent(1.0) == {}
