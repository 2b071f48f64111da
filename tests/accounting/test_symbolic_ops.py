"""Each operator on symbolic tensors against the meter on the real one: saved bytes, peaks of forward and backward."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from lightning_llm.accounting import step_memory
from lightning_llm.accounting.symbolic import AllocationLog, Count
from lightning_llm.accounting.symbolic_ops import Operators
from lightning_llm.measure import MemoryMeter
from lightning_llm.model.config import ModelConfig
from lightning_llm.ops import sizes
from lightning_llm.ops.attention import causal_attention
from lightning_llm.ops.losses import linear_cross_entropy
from lightning_llm.ops.norm import rms_norm
from lightning_llm.ops.rotation import rotate_halves
from lightning_llm.ops.span_attention import Spans, span_attention
from lightning_llm.ops.swiglu import memory_optimized_swiglu

TOKENS, HIDDEN, WIDE, VOCAB, HEADS, SEQ = 600, 64, 192, 300, 4, 150
X, GATE, DOWN, SMALL = (TOKENS, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE), (HIDDEN,)
HEADED, TABLE = (HEADS, SEQ, HIDDEN), (VOCAB, HIDDEN)
ONE_SPAN = Spans(torch.zeros(1, SEQ, dtype=torch.int64))
TOLERANCE = {"abs": 256, "rel": 0.02}  # scalars and vectors of indices, which the engine leaves out
TURN = torch.ones(SEQ, HIDDEN // 2), torch.zeros(SEQ, HIDDEN // 2)
count = Count
IDS = torch.zeros(TOKENS, dtype=torch.int64)
SHAPE = (count(TOKENS), count(HIDDEN), count(WIDE))

# name: the shapes of the inputs, the symbolic operator, and the real one; in the order of symbolic_ops.py
CASES = {
    "add": ((X, X), lambda ops, x, y: ops.add(x, y), lambda x, y: x + y),
    "multiply": ((X, X), lambda ops, x, y: ops.multiply(x, y), lambda x, y: x * y),
    "silu": ((X,), lambda ops, x: ops.activation(x), F.silu),
    "relu": ((X,), lambda ops, x: ops.activation(x, saves_output=True), F.relu),
    "linear": ((X, GATE), lambda ops, x, w: ops.linear(x, (w, None), TOKENS * WIDE), F.linear),
    "embedding": ((TABLE,), lambda ops, w: ops.embedding(w, TOKENS * HIDDEN), lambda w: F.embedding(IDS, w)),
    "layer_norm": (
        (X, SMALL, SMALL),
        lambda ops, x, *weights: ops.fused_norm(x, [*weights], count(TOKENS), statistics=2),
        lambda x, w, b: F.layer_norm(x, SMALL, w, b),
    ),
    "cross_entropy": (
        ((TOKENS, VOCAB),),
        lambda ops, x: ops.cross_entropy(x),
        lambda x: F.cross_entropy(x.float(), IDS),
    ),
    "rotate": ((HEADED,), lambda ops, x: ops.rotate(x, x, x), lambda x: rotate_halves(x, *TURN)),
    "rms_norm": (
        (X, SMALL),
        lambda ops, x, w: ops.rms_norm(x, w, count(TOKENS)),
        lambda x, w: rms_norm(x, w, 1e-6),
    ),
    "causal_attention": (
        (HEADED,) * 3,
        lambda ops, q, k, v: ops.causal_attention(q, k, v, (count(HEADS), count(SEQ), count(HIDDEN))),
        lambda q, k, v: causal_attention(q[None], k[None], v[None]),
    ),
    **{
        f"span_attention with {kv_heads} heads of keys": (
            (HEADED, *[(kv_heads, SEQ, HIDDEN)] * 2),
            lambda ops, q, k, v, kv_heads=kv_heads: ops.span_attention(q, k, v, (1, HEADS, SEQ, kv_heads, HIDDEN)),
            lambda q, k, v: span_attention(q[None], k[None], v[None], ONE_SPAN),
        )
        for kv_heads in (HEADS, 2)
    },
    **{
        f"swiglu at level {level}": (
            (X, GATE, GATE, DOWN, *([SMALL] if level == 2 else [])),
            lambda ops, x, *w, level=level: ops.swiglu(x, (*w, *[None] * (4 - len(w))), SHAPE, saves=level == 0),
            lambda x, g, u, d, norm=None, level=level: memory_optimized_swiglu(
                x, g, u, d, checkpoint_level=level, norm_weight=norm
            ),
        )
        for level in (0, 1, 2)
    },
    "linear_cross_entropy": (
        (X, TABLE),
        lambda ops, x, w: ops.linear_cross_entropy(x, (w, None), count(TOKENS), count(VOCAB), 3),
        lambda x, w: linear_cross_entropy(x, w, IDS, num_chunks=3),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_an_operator_against_the_meter(name, dtype):
    shapes, symbolic, real = CASES[name]
    tensors = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    if name == "causal_attention":
        real(*tensors)  # its mask is cached: the model's, not the operator's
    with MemoryMeter(exclude=[*tensors, IDS, ONE_SPAN.start, *TURN]) as meter:
        with meter.phase("forward") as forward:
            out = real(*tensors)
        dy = torch.ones_like(out)
        with meter.phase("backward") as backward:
            gradients = torch.autograd.grad(out, tensors, dy)
    del gradients

    log = AllocationLog()
    ops = Operators(log, "cpu", "32-true" if dtype == torch.float32 else "bf16-true")
    inputs = [ops.parameter(count(tensor.numel())) for tensor in tensors]
    start = log.total
    log.reset_peak()
    result = symbolic(ops, *inputs)
    assert log.total - start == pytest.approx(forward.end_bytes, **TOLERANCE)
    assert log.peak - start == pytest.approx(forward.peak_bytes, **TOLERANCE)
    log.reset_peak()
    held = result.view()  # by the caller, as the meter's step does
    ops.backward(result)
    dy_bytes = 0 if out.dim() == 0 else dy.nbytes  # the engine starts from a scalar
    assert log.peak - start + dy_bytes == pytest.approx(backward.peak_bytes, **TOLERANCE)
    del held


def test_the_rest_of_each_row_of_logits_is_counted(monkeypatch):
    monkeypatch.setattr(sizes, "LOGITS_MULTIPLE", {"cpu": 256})  # rows of 512 for a vocabulary of 300
    test_an_operator_against_the_meter("linear_cross_entropy", torch.float32)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_norm_of_bf16_queries_with_a_float32_weight(device, monkeypatch):
    """The Function computes it on both devices; torch's kernel takes one dtype."""
    monkeypatch.setattr(sizes, "NORM_BYTES", {"cpu": 2**15, "cuda": 2**15})
    x = torch.zeros(X, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(SMALL, requires_grad=True)
    with MemoryMeter(exclude=[x, weight]) as meter:
        with meter.phase("forward") as forward, torch.autocast("cpu", torch.bfloat16):
            out = rms_norm(x, weight, 1e-6)
        dy = torch.ones_like(out)
        with meter.phase("backward") as backward:
            gradients = torch.autograd.grad(out, (x, weight), dy)
    del gradients
    log = AllocationLog()
    ops = Operators(log, device, "bf16-mixed")
    inputs = ops.parameter(count(x.numel())), ops.parameter(count(weight.numel()))
    inputs[0].itemsize = 2
    start = log.total
    log.reset_peak()
    result = ops.rms_norm(*inputs, count(TOKENS))
    assert log.total - start == pytest.approx(forward.end_bytes, **TOLERANCE)
    assert log.peak - start == pytest.approx(forward.peak_bytes, **TOLERANCE)
    log.reset_peak()
    held = result.view()
    ops.backward(result)
    assert log.peak - start + dy.nbytes == pytest.approx(backward.peak_bytes, **TOLERANCE)
    del held


RESIDENT_TOLERANCE = 0.02
RESIDENT = """
import torch
from lightning_llm.measure.gauges import high_water_bytes, resident_bytes, restart_high_water
from lightning_llm.model.config import ModelConfig
from lightning_llm.training.module import LanguageModel
module = LanguageModel(ModelConfig(**{fields}), loss_chunks=0)
module.configure_model()
ids = torch.zeros({rows}, {length}, dtype=torch.int64)
def step(rows):  # in LanguageModel's order
    loss = module.loss({{"input_ids": ids[:rows], "targets": ids[:rows]}})
    loss.backward()
    module.zero_grad()
step(1)  # libraries' buffers
start = resident_bytes()
restart_high_water()
step({rows})
print(high_water_bytes() - start)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("mlp", ["memory_optimized_swiglu"])
def test_against_the_resident_high_water_of_a_process(mlp):
    """312 and 378 MiB of a step with freed memory returned: measured 0.4 % less than predicted, held to 2 %."""
    fields = {
        "vocab_size": 2000,
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "mlp": mlp,
        "max_position_embeddings": 1024,
    }
    rows, length = 8, 512
    code = RESIDENT.format(fields=fields, rows=rows, length=length)
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}  # glibc returns what is freed
    environment = {**os.environ, **allocator}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    memory = step_memory(ModelConfig(**fields), rows=rows, context_length=length, loss_chunks=0, state_per_parameter=0)
    predicted = memory.peak - memory.parameters
    assert int(done.stdout) == pytest.approx(predicted, rel=RESIDENT_TOLERANCE)
