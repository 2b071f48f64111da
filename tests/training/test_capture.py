"""A captured step on a CPU: a stand-in for CUDA graphs runs what they would replay, into the same tensors each time."""

import math

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_llm import LanguageModel, ModelConfig, Trainer
from lightning_llm.training import capture, module
from lightning_llm.training.capture import CapturedLoss, capture_problems
from tests.tiny_run import assert_same_weights, curves, summary, weights

CONFIG = ModelConfig(vocab_size=19, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, dropout=0.2)
CAPTURE = {"trainer.capture": True}
CONSTANT = {"model.schedule": "lightning_llm.optim.Constant"}
READ = torch.ops.aten._local_scalar_dense.default  # what .item() calls


class StandIn:
    """Behaves as a CUDA graph does: recording changes no value, and a replay changes nothing but values.

    Attributes:
        records: How many functions were recorded.
        replays: How many times one was replayed.
    """

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.records = self.replays = 0

    def record(self, function):
        self.records += 1
        had = [parameter.grad for parameter in self.parameters]
        values = [None if grad is None else grad.clone() for grad in had]
        autocast = torch.is_autocast_enabled("cpu")
        with torch.random.fork_rng(devices=[]):
            outputs = function()
        for grad, value in zip(had, values, strict=True):
            if grad is not None:
                grad.copy_(value)
        gradients = [parameter.grad for parameter in self.parameters]
        is_gradient = [any(output is grad for grad in gradients) for output in outputs]
        static = [each if is_one else each.detach().clone() for each, is_one in zip(outputs, is_gradient, strict=True)]
        for tensor in static:
            if not any(tensor is grad for grad in had):
                tensor.fill_(-1)

        def replay():
            self.replays += 1
            now = [parameter.grad for parameter in self.parameters]
            self.attach(had)
            # what was in force; gradients are off where an autograd function runs
            with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                outputs = function()
            for tensor, output in zip(static, outputs, strict=True):
                if tensor is not output:
                    tensor.copy_(output.detach())
            self.attach(now)

        return static, replay

    def attach(self, gradients):
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient


@pytest.fixture
def stand_ins(monkeypatch):
    """The stand-ins of the runs of a test, which take the place of CUDA graphs."""
    made = []

    def captured(model):
        made.append(StandIn(model))
        return CapturedLoss(model, made[-1])

    monkeypatch.setattr(module, "CapturedLoss", captured)
    for name in ("trainer", "preflight"):
        monkeypatch.setattr(f"lightning_llm.training.{name}.capture_problems", lambda model, trainer: ())
    return made


@pytest.fixture
def both(tiny, stand_ins):
    """``both(**options)``: a run without and a run with capture, and the stand-in of the second."""

    def runs(**options):
        eager = tiny("fit", **options, **{"trainer.default_root_dir": "eager"})
        captured = tiny("fit", **options, **CAPTURE)
        return eager, captured, stand_ins[-1]

    return runs


# ---- the same bits as without


@pytest.mark.parametrize("micro_batch_size", [8, 2])
def test_a_captured_run_has_the_curve_and_the_weights_of_an_eager_one(both, micro_batch_size):
    options = {"data.micro_batch_size": micro_batch_size, "model.architecture.dropout": 0.2}
    eager, captured, stand_in = both(**options)
    assert_same_weights(weights(eager), weights(captured))
    first, second = (curves(run.trainer.log_dir) for run in (eager, captured))
    for name in ("train_loss", "val_loss", "grad_norm"):
        assert first[name] == second[name]
    assert len({loss for _, loss in second["train_loss"]}) == 6  # one tensor would be logged as one number
    micro_batches = 6 * 8 // micro_batch_size
    assert stand_in.replays == 2 * (micro_batches - 1)  # all but the first; the validation between does not count
    assert stand_in.records == (2 if micro_batch_size == 8 else 4)  # a later micro-batch adds to the gradients


def test_losses_that_wait_for_the_log_are_not_overwritten(both):
    _, captured, _ = both(**{"trainer.log_every_n_steps": 3, "data.micro_batch_size": 4})
    assert_curve = curves(captured.trainer.log_dir)["train_loss"]
    each_step = curves(both(**{"data.micro_batch_size": 4})[0].trainer.log_dir)["train_loss"]
    means = [math.fsum(loss for _, loss in each_step[start : start + 3]) / 3 for start in (0, 3)]
    assert [loss for _, loss in assert_curve] == pytest.approx(means, rel=1e-6)


def test_a_resumed_run_has_the_bits_of_a_whole_one(tiny, stand_ins):
    options = {**CAPTURE, "model.architecture.dropout": 0.2, "data.micro_batch_size": 4, **CONSTANT}
    whole = tiny("fit", **options, **{"trainer.default_root_dir": "whole"})
    tiny("fit", **options, **{"trainer.max_steps": 3})
    resumed = tiny("fit", "--ckpt_path=last", **options)
    assert_same_weights(weights(whole), weights(resumed))
    assert stand_ins[-1].replays == 2 * 5  # of six micro-batches


def test_the_step_that_the_memory_profiler_samples_runs_eagerly(both):
    profiler = {"class_path": "lightning_llm.training.callbacks.MemoryProfiler", "init_args": {"every_n_steps": 4}}
    eager, captured, stand_in = both(**{"trainer.callbacks": [profiler]})
    assert_same_weights(weights(eager), weights(captured))
    assert stand_in.replays == 2 * 4  # not the first, not the fourth
    assert (captured.trainer.run_dir / "memory/step-4.json").is_file()
    phases = [f"memory/at_peak/{kind}_gib" for kind in ("parameters", "activations")]
    first, second = (curves(run.trainer.log_dir) for run in (eager, captured))
    for name in phases:
        assert first[name] == second[name]


def test_the_step_of_a_loss_that_is_no_number_is_named(tiny, stand_ins, monkeypatch, capsys):
    start = LanguageModel.on_train_batch_start

    def poison(self, batch, batch_idx):
        if self.global_step == 3:
            with torch.no_grad():
                self.transformer.norm.weight.fill_(math.nan)
        return start(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModel, "on_train_batch_start", poison)
    with pytest.raises(SystemExit):
        tiny("fit", **CAPTURE, **{"trainer.log_every_n_steps": 6, "trainer.val_check_interval": 6})
    assert "train_loss is nan in step 4, micro-batch 0; its batch is in" in capsys.readouterr().err


# ---- micro-batch by micro-batch


def made(**changes):
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(**{**vars(CONFIG), **changes}))
    model.configure_model()
    return model.train()


def batch_of(rows, number=0):
    ids = torch.randint(19, (rows, 9), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids[:, :-1], "targets": ids[:, 1:], "path": "not a tensor"}


def trained(loss_of, model, batches, *, frees=True):
    """The losses of these micro-batches, each a step, or all of one, and the gradients."""
    losses = []
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        loss = loss_of(batch)
        losses.append(loss.detach())
        (loss / 3).backward()
        if frees and number < len(batches) - 1:
            model.zero_grad()
    return losses, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("frees", [True, False], ids=["a step each", "one step"])
@pytest.mark.parametrize("sizes", [[4] * 5, [4, 4, 4, 3, 4, 4, 4], [3, 4, 4]], ids=str)
def test_losses_and_gradients_are_those_of_the_model(frees, sizes):
    batches = [batch_of(rows, number) for number, rows in enumerate(sizes)]
    model, other = made(), made()
    stand_in = StandIn(other)
    losses, gradients = trained(model.loss, model, batches, frees=frees)
    captured, own = trained(CapturedLoss(other, stand_in), other, batches, frees=frees)
    assert torch.equal(torch.stack(losses), torch.stack(captured))
    for gradient, other_gradient in zip(gradients, own, strict=True):
        assert torch.equal(gradient, other_gradient)
    assert stand_in.replays > 0


def test_gradients_stay_where_they_are():
    model = made()
    loss_of, places = CapturedLoss(model, StandIn(model)), set()
    for number in range(6):
        loss_of(batch_of(4, number)).backward()
        places.add(tuple(parameter.grad.data_ptr() for parameter in model.parameters()))
        if number == 0:
            places.clear()  # it ran eagerly
        model.zero_grad()
    assert len(places) == 1


def test_dropout_follows_the_seed_and_not_what_was_drawn_before():
    model = made()
    loss_of = CapturedLoss(model, StandIn(model))
    losses = []
    for seed in (1, 2, 2, 3, 2):
        torch.manual_seed(seed)
        losses.append(loss_of(batch_of(4)).item())
    assert losses[1] == losses[2] == losses[4]
    assert len(set(losses)) == 3


def test_the_count_of_each_micro_batch_is_its_own():
    model = made()
    loss_of, counts = CapturedLoss(model, StandIn(model)), []
    for number in range(4):
        batch = batch_of(4)
        batch["targets"] = batch["targets"].clone()
        batch["targets"][:, number:] = -100
        loss_of(batch)
        counts.append(model.loss_count)
    assert [int(count) for count in counts] == [0, 4, 8, 12]


def test_a_weight_that_moves_is_recorded_again():
    model, other = made(), made()
    stand_in = StandIn(other)
    loss_of = CapturedLoss(other, stand_in)
    for number in range(6):
        if number == 3:
            for each in (model, other):
                each.transformer.norm.weight.data = 2 * each.transformer.norm.weight.data
        torch.manual_seed(number)
        loss = model.loss(batch_of(4, number))
        torch.manual_seed(number)
        assert torch.equal(loss, loss_of(batch_of(4, number)))
    assert stand_in.records == 4  # forward and backward, twice


def test_gradients_that_were_freed_after_the_forward_pass_do_not_return():
    """Lightning calls ``zero_grad`` between forward and backward."""
    model, other = made(), made()
    loss_of = CapturedLoss(other, StandIn(other))
    for number in range(4):
        for each, function in ((model, model.loss), (other, loss_of)):
            torch.manual_seed(number)
            loss = function(batch_of(4, number))
            each.zero_grad()
            loss.backward()
    for parameter, own in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter.grad, own.grad)


def test_nothing_that_autocast_has_cast_before_is_recorded(monkeypatch):
    model, caches = made(), []
    loss = model.loss

    def noting(batch):
        caches.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        return loss(batch)

    monkeypatch.setattr(model, "loss", noting)
    loss_of = CapturedLoss(model, StandIn(model))
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            loss_of(batch_of(4))
    assert caches == [(True, True), (True, False), (True, False)]  # eager, recorded, replayed


def test_what_was_recorded_under_autocast_holds_there_alone():
    model, other = made(dropout=0.0), made(dropout=0.0)
    loss_of = CapturedLoss(other, StandIn(other))
    for enabled in (True, True, False, True, False, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert torch.equal(model.loss(batch_of(4)), loss_of(batch_of(4)))


# ---- what cannot be captured


class Reads(nn.Module):
    """An MLP that reads a value."""

    def __init__(self, config):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x):
        return self.up_proj(x) * (2.0 if x.sum().item() > 0 else 1.0)


class RefusingReads(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is READ:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return function(*args, **(kwargs or {}))


class Strict(StandIn):
    """Refuses to read a value, as CUDA does while it records."""

    def record(self, function):
        with RefusingReads():
            return super().record(function)


def test_a_part_that_reads_a_value_is_one_line():
    model = made(mlp=f"{__name__}.Reads")
    loss_of = CapturedLoss(model, Strict(model))
    loss_of(batch_of(4))
    line = r"^trainer.capture true: the training step cannot be recorded \(operation not permitted when stream is "
    with pytest.raises(
        ValueError, match=line + r"capturing\)\. A part that reads a value .* leave trainer.capture out$"
    ):
        loss_of(batch_of(4))


def test_memory_that_runs_out_stays_what_it_is():
    class Full(StandIn):
        def record(self, function):
            raise torch.OutOfMemoryError("full")

    model = made()
    loss_of = CapturedLoss(model, Full(model))
    loss_of(batch_of(4))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        loss_of(batch_of(4))


class OwnLoss(LanguageModel):
    def loss(self, batch):
        return super().loss(batch)


class Cuda:
    """A trainer with one GPU, as far as the checks can see."""

    capture = True

    def __init__(self, strategy=None):
        self.strategy = strategy or pl.strategies.SingleDeviceStrategy("cuda:0")


def test_what_can_be_captured_has_no_problems():
    assert not list(capture_problems(LanguageModel(CONFIG), Cuda()))


@pytest.mark.parametrize(
    ("model", "strategy", "expected"),
    [
        (LanguageModel(CONFIG), pl.strategies.DDPStrategy(), "is for one device, got DDPStrategy"),
        (LanguageModel(CONFIG), pl.strategies.ModelParallelStrategy(), "is for one device, got ModelParallelStrategy"),
        (LanguageModel(CONFIG), pl.strategies.SingleDeviceStrategy("cpu"), "needs a GPU with CUDA, this run is on cpu"),
        (OwnLoss(CONFIG), None, "the loss of LanguageModel, and OwnLoss has its own"),
        (BoringModel(), None, "the training_step of LanguageModel, and BoringModel has"),
        (
            LanguageModel(ModelConfig(vocab_size=19, hidden_size=8, num_attention_heads=2, mlp="mixture_of_experts")),
            None,
            "cannot record architecture.mlp mixture_of_experts",
        ),
    ],
)
def test_what_cannot_be_captured_is_one_line(model, strategy, expected):
    if strategy is not None and type(strategy) is not pl.strategies.SingleDeviceStrategy:
        strategy._parallel_devices = [torch.device("cuda:0")]
        strategy._accelerator = pl.accelerators.CUDAAccelerator()
        type(strategy).root_device.fget(strategy)
    problems = list(capture_problems(model, Cuda(strategy)))
    assert len(problems) == 1
    assert expected in problems[0]
    assert problems[0].startswith("trainer.capture true ")
    assert ": leave it out" in problems[0]


def test_a_run_on_a_cpu_is_refused_by_its_name(refused):
    assert "trainer.capture true needs a GPU with CUDA, this run is on cpu" in refused("fit", **CAPTURE)


def test_python_refuses_it_too():
    trainer = Trainer(accelerator="cpu", capture=True, barebones=True)
    with pytest.raises(ValueError, match=r"^trainer.capture true needs a GPU with CUDA"):
        trainer.fit(LanguageModel(CONFIG))


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("micro_batch_size", [8, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_cuda_graphs_have_the_bits_of_an_eager_run(tiny, micro_batch_size, precision):
    options = {"data.micro_batch_size": micro_batch_size, "model.architecture.dropout": 0.2}
    options |= {"trainer.accelerator": "gpu", "trainer.deterministic": True, "trainer.precision": precision}
    eager = tiny("fit", **options, **{"trainer.default_root_dir": "eager"})
    captured = tiny("fit", **options, **CAPTURE)
    assert summary(captured)["capture"] is True
    assert_same_weights(weights(eager), weights(captured))
    first, second = (curves(run.trainer.log_dir) for run in (eager, captured))
    for name in ("train_loss", "val_loss", "grad_norm"):
        assert first[name] == second[name]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_refuses_a_part_that_reads_a_value():
    model = made(mlp=f"{__name__}.Reads").to("cuda")
    loss_of = CapturedLoss(model, capture.CudaGraphs())
    batch = {name: value.cuda() for name, value in batch_of(4).items() if name != "path"}
    loss_of(batch).backward()
    with pytest.raises(ValueError, match=r"^trainer.capture true: the training step cannot be recorded"):
        loss_of(batch)
