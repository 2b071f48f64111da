"""The attributed meter: whose bytes are alive, by kind and module; and the timeline of a step."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_llm import ModelConfig, Transformer
from lightning_llm.measure.attribution import AttributedMeter, is_out_of_memory, module_label
from lightning_llm.measure.gauges import ResidentGauge, gauge_for
from lightning_llm.measure.meter import MemoryMeter
from lightning_llm.measure.timeline import CATEGORIES
from lightning_llm.ops import linear_cross_entropy
from lightning_llm.optim import AdamW

WIDE = 40


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict(
            {"layers": nn.ModuleList(nn.ModuleDict({"a": nn.Linear(WIDE, WIDE, bias=False)}) for _ in range(2))}
        )
        self.recompute = False

    def forward(self, x):
        for layer in self.body["layers"]:
            x = checkpoint(self.part, layer, x, use_reentrant=False) if self.recompute else self.part(layer, x)
        return x.square().mean()

    def part(self, layer, x):
        return layer["a"](x).exp()


def step(model, optimizer, x, meter):
    meter.begin("forward")
    with meter:
        loss = model(x)
        optimizer.zero_grad()
        meter.begin("backward")
        loss.backward()
        meter.begin("optimizer")
        optimizer.step()
    meter.close()


def test_every_byte_has_its_kind_and_module():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(10, WIDE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    meter = AttributedMeter(model, [optimizer], {"x": [x]})
    step(model, optimizer, x, meter)
    timeline = meter.timeline()
    weight, activation = 4 * WIDE * WIDE, 4 * 10 * WIDE
    a, b = "layers.0.a", "layers.1.a"
    assert timeline.saved.table == {
        ("parameters", a): weight,
        ("parameters", b): weight,
        ("inputs", "batch"): activation,
        # exp is outside of the linear modules: it belongs to nothing but the whole
        ("activations", "loss"): 2 * activation + 4,
    }
    (end,) = timeline.points([len(timeline._events) - 1])
    for kind in ("parameters", "gradients", "optimizer_state"):
        assert (end.table[kind, a], end.table[kind, b]) == (weight, weight)
    assert end.by_category() | {"activations": 0, "temporary": 0} == dict.fromkeys(CATEGORIES, 0) | {
        "parameters": 2 * weight,
        "gradients": 2 * weight,
        "optimizer_state": 2 * weight,
        "inputs": activation,
    }


@pytest.mark.parametrize("mlp", ["swiglu", "memory_optimized_swiglu"])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_the_peak_is_that_of_the_plain_meter(monkeypatch, mlp, recompute):
    """In each of three steps: with and without state of the optimiser, old gradients and all."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, mlp=mlp, recompute=recompute
    )
    model, ids = Transformer(config), torch.randint(0, 50, (4, 16))
    optimizer = AdamW(model.parameters())
    model(ids)  # the mask is kept for all runs
    for _ in range(3):
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        plain = MemoryMeter(exclude=[model, ids, *state, *gradients])
        meter = AttributedMeter(model, [optimizer], ids)
        meter.begin("forward")
        with plain, meter:
            loss = linear_cross_entropy(model(ids), model.lm_head.weight, ids)
            meter.begin("backward")
            loss.backward()
            meter.begin("optimizer")
            optimizer.step()
        meter.close()
        timeline = meter.timeline()
        held = plain.excluded_bytes + timeline.peak.by_category()["other"]
        assert timeline.peak.total_bytes == pytest.approx(plain.peak_bytes + held, rel=1e-9)
        assert max(p["peak_bytes"] for p in timeline.phases().values()) == timeline.peak.total_bytes
        assert {"lm_head", "layers.1.mlp", "layers.0.self_attn", "embed_tokens"} <= timeline.peak.by_module().keys()
        monkeypatch.setattr("lightning_llm.measure.timeline.SAMPLES", 10_000)
        backward = [m for m in timeline.samples() if m.phase == "backward"]
        names = {name for moment in backward for (kind, name) in moment.table if kind == "temporary"}
        assert {"layers.0.mlp", "layers.1.self_attn"} <= names
        del loss, plain, state, gradients


def test_recomputed_activations_are_temporary_and_hooks_keep_their_count():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(10, WIDE)
    model.recompute = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = AttributedMeter(model, [optimizer], x)
    step(model, optimizer, x, meter)
    kept = meter.timeline().saved
    assert kept.by_category()["activations"] == 4 * 10 * WIDE + 4 * 10 * WIDE + 4  # between the two parts, output, loss
    assert meter._running == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_recomputation_that_stops_early_leaves_its_module():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDE, WIDE)

        def forward(self, x):
            return self.linear(x.exp())  # the second forward ends inside of linear, with an exception

    model, x = nn.ModuleDict({"part": Part()}), torch.randn(10, WIDE, requires_grad=True)
    meter = AttributedMeter(model, inputs=x)
    meter.begin("forward")
    with meter:
        loss = checkpoint(model["part"], x, use_reentrant=False).sum()
        meter.begin("backward")
        loss.backward()
        assert meter._running == []
    meter.close()


def test_the_gradients_are_the_same_bits():
    def gradients(metered):
        torch.manual_seed(0)
        config = ModelConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
        model, ids = Transformer(config), torch.arange(32).view(2, 16)
        meter = AttributedMeter(model, inputs=ids)
        meter.begin("forward")
        if metered:
            meter.__enter__()
        loss = linear_cross_entropy(model(ids), model.lm_head.weight, ids)
        meter.begin("backward")
        loss.backward()
        if metered:
            meter.__exit__(None, None, None)
        meter.close()
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


def test_what_the_allocator_holds_beside_is_other():
    model = Model()
    known = sum(4 * p.numel() for p in model.parameters())
    meter = AttributedMeter(model, unseen_bytes=known + 1000)
    before = torch.ones(100)
    meter.begin("forward")
    with meter:
        before.add_(1)  # 400 of the 1000 are met
    meter.close()
    timeline = meter.timeline()
    assert timeline.peak.by_category()["other"] == 1000
    held = [event for event in timeline._events if event.operator == 0]
    assert sum(event.change for event in held) == known + 1000  # all of it from the beginning


def test_other_devices_do_not_count():
    model = Model()
    meter = AttributedMeter(model, inputs=[torch.empty(1000, device="meta")])
    meter.begin("forward")
    with meter:
        there, here = torch.empty(1000, device="meta"), torch.empty(10)
    meter.close()
    assert meter.timeline().peak.total_bytes == sum(4 * p.numel() for p in model.parameters()) + 40
    del there, here


def test_where_memory_ran_out_is_known():
    class Greedy(nn.Module):
        def forward(self, x):
            return torch.empty(2**60, dtype=torch.uint8)

    model = nn.ModuleDict({"first": nn.Linear(2, 2), "greedy": Greedy()})
    meter = AttributedMeter(model)
    meter.begin("forward")
    with pytest.raises(RuntimeError) as caught, meter:
        model["greedy"](torch.ones(2))
    meter.close()
    assert is_out_of_memory(caught.value)
    assert meter.failed_in == ("greedy", "aten.empty.memory_format")
    assert not is_out_of_memory(RuntimeError("other"))


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("transformer.layers.3.mlp.gate_proj", "layers.3.mlp"),
        ("transformer.layers.3", "layers.3"),
        ("transformer.lm_head", "lm_head"),
        ("transformer", "transformer"),
        ("other.part", "other"),
        ("", "loss"),
    ],
)
def test_labels(name, label):
    assert module_label(name, "transformer") == label


def test_the_resident_gauge_sees_what_is_touched():
    gauge = gauge_for(torch.device("cpu"))
    assert isinstance(gauge, ResidentGauge)
    before = gauge.read()
    held = torch.ones(2**26, dtype=torch.uint8)
    after = gauge.read()
    assert after.live_bytes - before.live_bytes > 0.9 * held.numel()
    assert after.peak_bytes >= after.live_bytes
    del held
    assert gauge.read().peak_bytes >= after.live_bytes  # it was there when the stretch began


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("mlp", ["swiglu", "memory_optimized_swiglu"])
def test_cuda_peak_agrees_with_the_allocator(mlp):
    config = ModelConfig(vocab_size=4096, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, mlp=mlp)
    model, ids = Transformer(config).cuda(), torch.randint(0, 4096, (8, 512), device="cuda")
    optimizer = AdamW(model.parameters())
    for _ in range(3):  # the libraries' workspaces and the optimiser's state are made in the first
        torch.cuda.synchronize()
        meter = AttributedMeter(model, [optimizer], ids, torch.cuda.memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        meter.begin("forward")
        with meter:
            loss = linear_cross_entropy(model(ids), model.lm_head.weight, ids)
            optimizer.zero_grad()
            meter.begin("backward")
            loss.backward()
            meter.begin("optimizer")
            optimizer.step()
        meter.close()
        measured = torch.cuda.max_memory_allocated()
        del loss
    peak = meter.timeline().peak
    assert sum(peak.by_category().values()) == pytest.approx(measured, rel=0.02)
