"""The first command on a GPU: what decides the next changes, in 9.3 minutes, in this order.

The first tests, the probes, and the steps of 124 M with clock, power, and the host's time; then the same steps as CUDA
graphs, with the standard MLP, and compiled as one; then the small model and the large one.
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch.nn import functional as F

from benchmarks.gpu import training
from benchmarks.gpu.operators import gpu_tests
from benchmarks.gpu.runner import Machine, Part, Task
from benchmarks.gpu.training import AS_ONE, CAPTURED, CAPTURED_EAGER, EAGER, NANOGPT, OURS, STANDARD, step
from benchmarks.rows import Row
from lightning_llm.measure.timer import interleave
from lightning_llm.ops.dispatch import matmul_into

# Two that failed on a GPU once, and those that no GPU has run yet.
FIRST_TESTS = "test_flex_attention or test_cuda_graphs or test_cuda_refuses or test_on_cuda_the_layout"
SHAKESPEARE_STEPS = 300


def tasks(machine: Machine) -> list[Task]:
    """The measurements, in the order in which they are made."""
    with_profile = partial(step, machine, is_profiled=True)
    shakespeare = partial(step, machine, "Shakespeare", timed=SHAKESPEARE_STEPS)
    found = [
        Task("gpu tests", 20, partial(gpu_tests, machine, FIRST_TESTS)),
        Task("probes", 10, partial(_probes, machine)),
        with_profile("124 M", OURS, 93),
        with_profile("124 M", NANOGPT, 75),
        with_profile("124 M", CAPTURED, 55),
        step(machine, "124 M", STANDARD, 60),
        step(machine, "124 M", AS_ONE, 72),
        shakespeare(EAGER, 25),
        shakespeare(OURS, 30),
        shakespeare(CAPTURED_EAGER, 23),
        with_profile("1.3 B", OURS, 60),
        step(machine, "1.3 B, 8 rows", OURS, 35),
    ]
    return [task._replace(must=True) for task in found]


def _probes(machine: Machine) -> Iterator[Row]:
    """The head's gradient summed inside the matmul or after it, and attention on two layouts of its inputs."""
    device = machine.device
    tokens, hidden, vocab, batch, heads, seq, size = (
        (64, 32, 65, 2, 2, 16, 16)
        if machine.dry_run
        else (
            *(8192, 768, 50304),
            *(32, 12, 1024, 64),
        )
    )
    d_logits = torch.randn(tokens, vocab, device=device, dtype=torch.bfloat16)
    states = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    first = torch.randn(vocab, hidden, device=device)
    total = first.clone()

    def inside(out: torch.Tensor) -> None:
        torch.addmm(out, d_logits.T, states, out_dtype=torch.float32, out=out)

    def after(out: torch.Tensor) -> None:
        matmul_into(out, d_logits.T, states, accumulate=True)  # as the loss does it

    try:
        mine, theirs = first.clone(), first.clone()
        inside(mine)
        after(theirs)
    except (RuntimeError, TypeError) as error:
        reason = textwrap.shorten(str(error), 80, placeholder="…")
        yield machine.row("head's gradient", outcome=f"no sum inside the matmul: {reason}")
    else:
        sums: dict[str, Callable[[], object]] = {
            "head's gradient, sum after": partial(after, total),
            "head's gradient, sum inside": partial(inside, total),
        }
        yield from _timed(machine, sums, same_bits=torch.equal(mine, theirs))
    made = [torch.randn(batch, seq, heads, size, device=device, dtype=torch.bfloat16) for _ in range(3)]
    strided = [x.transpose(1, 2) for x in made]
    contiguous = [x.contiguous() for x in strided]

    def attention(inputs: list[torch.Tensor]) -> torch.Tensor:
        query, key, value = inputs
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)

    layouts = {
        "attention, (batch, heads, seq, size)": partial(attention, contiguous),
        "attention, (batch, seq, heads, size)": partial(attention, strided),
    }
    yield from _timed(machine, layouts, same_bits=torch.equal(attention(contiguous), attention(strided)))


def _timed(machine: Machine, functions: Mapping[str, Callable[[], object]], same_bits: bool) -> Iterator[Row]:
    timings = interleave(functions, rounds=2 if machine.dry_run else 200, device=machine.device, budget_s=4.0)
    for name, timing in timings.items():
        yield machine.row(name, timing, same_bits=same_bits)


PART = Part(
    name="next",
    tasks=tasks,
    columns={
        **training.PART.columns,
        "same bits": (lambda row: None if row.same_bits is None else ("no", "yes")[row.same_bits], 1, ""),
        "outcome": ("outcome", 1, ""),
    },
    draw=training.draw,
    files=training.PART.files,
    complete=training.derive,
)
