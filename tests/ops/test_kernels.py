"""The Triton kernels without a GPU, and what runs on CUDA around them.

- Through the interpreter, in a process of its own: it decides when Triton is imported.
- Compiled ahead of time for GPUs that are not there, as the operators launch them; ptxas says what they need.
- The operators as CUDA runs them on fake tensors: dtypes and shapes are checked, and nothing is computed.
"""

import io
import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager, redirect_stdout
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_llm.model import ModelConfig, Transformer
from lightning_llm.ops import losses, sizes

triton = pytest.importorskip("triton", reason="the kernels need Triton")

# ---- the interpreter

SCRIPT = """
import torch
from test_swiglu import assert_as_good_as_plain as judge_mlp, make_inputs as mlp_inputs
from test_swiglu import memory_optimized, plain as mlp_plain
from test_losses import all_options, assert_as_good_as_plain as judge_loss, make_inputs as loss_inputs, ours, plain
from lightning_llm.ops import kernels, sizes
from lightning_llm.ops.dispatch import kernels_for

kernels.ROW_BLOCK = kernels.VOCAB_BLOCK = 32  # several blocks and a rest in each row
assert kernels_for(torch.empty(1)) is kernels
assert kernels_for(torch.empty(1, dtype=torch.float64)) is None

for dtype in (torch.float32, torch.float16):  # the interpreter cuts float32 off to bf16 where a GPU rounds
    # the width: below a block, a whole number of blocks, one column more
    for shape in ((5, 23, 77), (1, 7, 3), (2, 3, 8, 64), (3, 1, 33)):
        for level in (0, 1):
            judge_mlp(memory_optimized(level, num_chunks=2), mlp_plain, mlp_inputs(shape, with_norm=False), dtype)
    sizes.LOGITS_MULTIPLE["cpu"] = {torch.float32: 1, torch.float16: 16}[dtype]  # rows with a rest, or without
    for options in ({}, {"reduction": "none", "z_loss": 0.1}, {"reduction": "sum", "num_chunks": 3}):
        for shape in ((5, 23, 77), (9, 16, 5), (2, 3, 8, 64), (24, 16, 65)):
            judge_loss(*loss_inputs(shape), dtype, **options)
            judge_loss(*loss_inputs(shape), dtype, **options | all_options(shape))

assert memory_optimized(1)(*mlp_inputs((5, 23, 77), with_norm=False, dtype=torch.bfloat16)).dtype == torch.bfloat16
inputs, targets = loss_inputs((4, 8, 5), torch.float32)  # vocabulary below a block; no bias; no gradients
inputs = [t.detach() * 30 for t in inputs]
torch.testing.assert_close(ours(*inputs, targets), plain(*inputs, targets))
torch.testing.assert_close(ours(*inputs[:2], None, targets), plain(*inputs[:2], None, targets))
for wrong in (-1, 5, 99):
    z, losses = torch.zeros(3, 8)[:, :5], torch.empty(3)
    z.untyped_storage().fill_(0)
    kernels.losses_of_rows(z, None, torch.tensor([0, wrong, 4]), None, 0.0, losses)
    assert losses.isnan().tolist() == [False, True, False], (wrong, losses)
rows = torch.full((3, 8), float("nan"))
rows[:, :5] = torch.arange(15.0).view(3, 5)
plain, padded = rows[:, :5].clone(), rows[:, :5]  # what is in the rest does not count
for z, columns in ((plain, None), (padded, 8)):
    kernels.losses_of_rows(z, None, torch.tensor([0, 1, 4]), torch.ones(3), 0.0, losses, padded=columns)
assert torch.equal(plain, padded) and not losses.isnan().any()
print("kernels agree")
"""


@pytest.mark.slow
def test_kernels_agree_with_the_plain_forms():
    here = os.path.dirname(__file__)
    root = os.path.dirname(os.path.dirname(here))
    path = os.pathsep.join([root, here, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "kernels agree"


# ---- ahead of time

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A100, H100 and H200, B200
CAPABILITIES = [pytest.param(version, marks=pytest.mark.slow) for version in (80, 90, 100)]
# Of each kernel: room for four programs on a multiprocessor, of 65,536 registers; shared memory for sums over the warps
# of a program, and no more; no bytes spilled, but for two registers that ptxas 13.4 saves once per row of the loss
# without gradients (float16, sm_100).
MOST_REGISTERS, MOST_SHARED, MOST_SPILLED = 65_536 // 4, 256, 16


class Launch(NamedTuple):
    """One launch of a kernel: its arguments by name, and options such as ``num_warps``."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def signature(self):
        """The types of the arguments; constants are ``constexpr``."""
        return {name: _type_of(value) for name, value in self.arguments.items() if not self.is_constant(name)} | {
            name: "constexpr" for name in self.arguments if self.is_constant(name)
        }

    def is_constant(self, name):
        by_name = {parameter.name: parameter.is_constexpr for parameter in self.kernel.params}
        return by_name[name] or self.arguments[name] is None

    def compile(self, capability):
        """As a launch on a GPU of that capability compiles it; pointers are aligned, as torch's are.

        Returns:
            What is compiled, and by ptxas registers per thread and bytes spilled.
        """
        aligned = [
            place
            for place, (name, value) in enumerate(self.arguments.items())
            if not self.is_constant(name) and (torch.is_tensor(value) or (type(value) is int and value % 16 == 0))
        ]
        source = triton.compiler.ASTSource(
            self.kernel,
            {name: self.signature[name] for name in self.arguments},
            {name: value for name, value in self.arguments.items() if self.is_constant(name)},
            {(place,): [["tt.divisibility", 16]] for place in aligned},
        )
        target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
        compilation, nvidia = triton.knobs.compilation, triton.knobs.nvidia
        said = io.StringIO()
        with compilation.scope(), nvidia.scope(), redirect_stdout(said):
            compilation.always_compile = nvidia.dump_ptxas_log = True
            compiled = triton.compile(source, target=target, options=self.options)
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said.getvalue())))
        return compiled, int(re.search(r"Used (\d+) registers", said.getvalue())[1]), spilled


def _type_of(value):
    if torch.is_tensor(value):
        return f"*{TYPES[value.dtype]}"
    return "i32" if isinstance(value, int) else "fp32"


@pytest.fixture
def launches(monkeypatch):
    """The launches of all kernels, which are recorded and not done."""
    found = []

    def record(kernel, *args, grid, warmup, **options):
        names = [parameter.name for parameter in kernel.params]
        given = {**dict(zip(names, args, strict=False)), **options}
        assert all(type(size) is int and size > 0 for size in grid)
        found.append(Launch(kernel, {name: given.pop(name) for name in names}, given))

    monkeypatch.setattr(triton.JITFunction, "run", record)
    return found


def variants_of(launches):
    """One launch of each kernel with the same types of arguments."""
    return {
        (launch.kernel.fn, *launch.signature.values(), *(v for v in launch.arguments.values() if v is None)): launch
        for launch in launches
    }


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_for_gpus_that_are_not_here(capability, like_cuda):
    from lightning_llm.ops import kernels

    for dtype in DTYPES:
        with FakeTensorMode():
            train_fake_model(dtype)
            evaluate_fake_loss(dtype)
    variants = variants_of(like_cuda)
    own = {each.fn for each in vars(kernels).values() if isinstance(each, triton.JITFunction)}
    assert {launch.kernel.fn for launch in variants.values()} == own, "a kernel that no operator launches here"
    for launch in variants.values():
        compiled, registers, spilled = launch.compile(capability)
        threads = 32 * compiled.metadata.num_warps
        found = f"{launch.kernel.fn.__name__} {list(launch.signature.values())}: {registers} registers × {threads}"
        assert spilled <= MOST_SPILLED, f"{found}, {spilled} bytes spilled"
        assert registers * threads <= MOST_REGISTERS, found
        assert compiled.metadata.shared <= MOST_SHARED, f"{found}, {compiled.metadata.shared} bytes shared"
        assert vector_accesses(compiled) == {"ld", "st"} - ({"st"} if stores_a_loss_alone(launch) else set()), found


def stores_a_loss_alone(launch):
    return "weight_ptr" in launch.arguments and launch.arguments["weight_ptr"] is None


def vector_accesses(compiled):
    """Whether it loads and stores 16 bytes at once."""
    return set(re.findall(r"(ld|st)\.global\S*\.v(?:4\.[bfu]32|2\.[bfu]64)", compiled.asm["ptx"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_kernels_compile_for_rows_that_are_not_aligned(dtype, like_cuda):
    """Odd widths, and views whose rows begin anywhere: no 16 bytes at once, and room for two programs."""
    with FakeTensorMode():
        train_fake_model(dtype, intermediate_size=2051)
        evaluate_fake_loss(dtype)
    for launch in variants_of(like_cuda).values():
        for name, value in launch.arguments.items():
            if type(value) is int and name != "BLOCK":
                launch.arguments[name] = value | 1
        compiled, registers, spilled = launch.compile(90)
        assert spilled <= MOST_SPILLED
        assert 32 * compiled.metadata.num_warps * registers <= 65_536 // 2
        assert vector_accesses(compiled) == set(), launch.kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_odd_vocabulary_is_read_in_vectors(dtype, like_cuda, monkeypatch):
    found = {}
    for multiple in (1, sizes.LOGITS_MULTIPLE["cpu"]):
        monkeypatch.setattr(sizes, "LOGITS_MULTIPLE", {"cpu": multiple})
        with FakeTensorMode():
            hidden, weight = (torch.empty(rows, 768, dtype=dtype, requires_grad=True) for rows in (600, 50257))
            losses.linear_cross_entropy(hidden, weight, torch.zeros(600, dtype=torch.int64))
        found[multiple] = vector_accesses(like_cuda.pop().compile(90)[0])
    assert found == {1: set(), 64: {"ld", "st"}}


# ---- the operators of CUDA on fake tensors


@pytest.fixture
def like_cuda(monkeypatch, launches):
    """Operators take the kernels and tile sizes of CUDA, on tensors of any device; returns the launches.

    A CPU build of torch has no guard for CUDA devices, without which autograd records nothing there.
    """
    from lightning_llm.ops import kernels

    kernel_users = [module for name, module in sys.modules.items() if name.startswith("lightning_llm.ops.")]
    for module in kernel_users:
        if hasattr(module, "kernels_for"):
            monkeypatch.setattr(module, "kernels_for", lambda tensor: kernels)
    for name, table in vars(sizes).items():
        if isinstance(table, dict) and "cpu" in table:
            monkeypatch.setattr(sizes, name, {"cpu": table["cuda"]} if "cuda" in table else {})
    form = sizes.attention_form
    monkeypatch.setattr(sizes, "attention_form", lambda device, *args, **options: form("cuda", *args, **options))
    for check in ("_check_targets", "check_token_weights"):  # on CUDA they would wait for the values
        monkeypatch.setattr(losses, check, lambda *_: None)
    return launches


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def train_fake_model(dtype, autocast=None, **fields):
    """Forward and backward of a small model of usual widths; returns it."""
    options = {"num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 2, **fields}
    with default_dtype(dtype):
        model = Transformer(ModelConfig(vocab_size=50304, hidden_size=768, **options), seed=0)
    ids = torch.zeros(8, 1024, dtype=torch.int64)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        loss = losses.linear_cross_entropy(model(ids), model.lm_head.weight, ids)
    loss.backward(torch.tensor(2.0))  # not 1, which a CPU need not multiply by
    return model


def evaluate_fake_loss(dtype):
    """The loss without gradients, with a bias; and a smoothed one with both."""
    hidden, weight, bias = (torch.empty(size, dtype=dtype) for size in ((600, 768), (50304, 768), (50304,)))
    targets = torch.zeros(600, dtype=torch.int64)
    losses.linear_cross_entropy(hidden, weight, targets, bias=bias)
    options = {"label_smoothing": 0.1, "vocab_size": 50257, "token_weights": torch.ones(600)}
    losses.linear_cross_entropy(hidden, weight.requires_grad_(), targets, bias=bias, **options)


@pytest.mark.parametrize("few", [False, True], ids=["tiles", "few tokens"])
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, torch.bfloat16), (torch.float16, None)])
def test_a_step_fits_together(dtype, autocast, level, few, like_cuda, monkeypatch):
    monkeypatch.setattr(sizes, "prefers_whole", lambda *_, **__: few)
    with FakeTensorMode():
        model = train_fake_model(dtype, autocast, checkpoint_level=level, qk_norm=True)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert (gradient.dtype, gradient.shape) == (dtype, parameter.shape), name
    count = Counter(launch.kernel.fn.__name__ for launch in like_cuda)
    assert count.keys() == {"_gate_forward", "_gate_backward", "_losses_of_rows"}
    for launch in like_cuda:  # activations are in the dtype of the matmuls, what is summed in float32
        name, first = next(iter(launch.arguments.items()))
        assert first.dtype == (autocast or dtype), launch.kernel
        outputs = {name: value for name, value in launch.arguments.items() if name in ("out_ptr", "loss_ptr")}
        for name, output in outputs.items():
            assert output.dtype == (torch.float32 if name == "loss_ptr" else autocast or dtype), launch.kernel


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_agree_on_a_gpu(dtype):
    from lightning_llm.ops import kernels

    torch.manual_seed(0)
    g, u, da = (torch.randn(130, 5000, device="cuda", dtype=dtype)[:, 3:4099] for _ in range(3))
    out, scratch = torch.empty_like(g), torch.empty_like(g)
    wide = [t.double().requires_grad_() for t in (g, u)]
    a = torch.nn.functional.silu(wide[0]) * wide[1]
    d_g, d_u = torch.autograd.grad(a, wide, da.double())
    kernels.gate_backward(g, u, da, out, scratch)
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
    for got, true in ((out, a), (scratch, d_g), (da, d_u)):
        torch.testing.assert_close(got.double(), true, **tolerance)
    z, index = torch.randn(20, 50257, device="cuda", dtype=dtype), torch.randint(0, 50257, (20,), device="cuda")
    logits, losses = z.double().requires_grad_(), torch.empty(20, device="cuda")
    truth = torch.nn.functional.cross_entropy(logits, index, reduction="none")
    kernels.losses_of_rows(z, None, index, torch.ones(20, device="cuda"), 0.0, losses)
    torch.testing.assert_close(losses.double(), truth, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(z.double(), torch.autograd.grad(truth.sum(), logits)[0], **tolerance)
