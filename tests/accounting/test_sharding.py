"""DDP and FSDP2: the formulas, and FSDP2's against two real processes."""

import itertools
import weakref

import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_llm.accounting import step_memory
from lightning_llm.accounting.sharding import rank_memory
from lightning_llm.accounting.step_settings import StepSettings
from lightning_llm.measure.meter import parts_of
from lightning_llm.model.config import ModelConfig
from lightning_llm.ops.losses import linear_cross_entropy
from lightning_llm.optim import AdamW, param_groups
from lightning_llm.training.distributed import build_sharded, strategy_for

CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=128,
)
PRECISIONS = ("32-true", "bf16-mixed")
WAYS = (("fsdp2", 1), ("fsdp2", 2), ("fsdp2_deferred", 2))  # strategy, micro-batches
TOLERANCE = 0.1
STEP = {"rows": 2, "context_length": 32}


def predicted(precision="32-true", strategy="fsdp2", accumulation=1, **options):
    run = {**STEP, "precision": precision, "strategy": strategy, "accumulation": accumulation, "world_size": 2}
    settings = StepSettings(**{**run, **options})
    memory = step_memory(CONFIG, settings.single_process, state_per_parameter=2)
    return memory, rank_memory(CONFIG, memory, settings)


def test_ddp_adds_its_buckets():
    memory, shared = predicted(strategy="ddp")
    assert shared.peak == memory.peak + memory.gradients
    assert shared.peak_point == memory.peak_point
    views = predicted(strategy="ddp", gradient_views=True)[1]
    assert views.buckets == 0
    # no copies, but what the gradients are views of is there in forward too
    assert memory.peak < views.peak <= memory.peak + memory.gradients
    assert (
        views.peak
        == memory.gradients + max(live.without_gradients for live in memory.points.values()) + views.optimizer_state
    )
    assert predicted(strategy="ddp", world_size=1)[1].peak == memory.peak


def test_shares_shrink_with_the_processes():
    memory, shared = predicted(world_size=8)
    assert shared.parameters == memory.parameters / 8 == shared.gradients
    assert shared.optimizer_state == memory.optimizer_state / 8
    assert predicted(world_size=4)[1].peak > shared.peak
    assert predicted(world_size=8, state_itemsize=2)[1].optimizer_state == memory.optimizer_state / 16


def test_mixed_precision_gathers_half_the_bytes():
    assert predicted("bf16-mixed")[1].gathered == predicted()[1].gathered / 2


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ValueError, match="strategy 'zero' is not covered: choose one of ddp, fsdp2"):
        predicted(strategy="zero")


class Weigher(TorchDispatchMode):
    """Bytes of all storages that are alive, asked again at each operator: FSDP2 frees by resizing, unseen by others."""

    def __init__(self, tensors):
        super().__init__()
        self.storages, self.peak = weakref.WeakValueDictionary(), 0
        self.watch(tensors)

    def watch(self, tensors):
        for tensor in tensors:
            for part in parts_of(tensor):
                storage = part.untyped_storage()
                self.storages[storage._cdata] = storage

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self.watch(leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor))
        self.peak = max(self.peak, sum(storage.nbytes() for storage in list(self.storages.values())))
        return out


def sharded_steps(rank, results):
    """The peaks of a second step on one of two processes, by precision and what is reduced when."""
    results[rank] = {(precision, *way): sharded_step(precision, *way) for precision in PRECISIONS for way in WAYS}


def sharded_step(precision, strategy, accumulation):
    """Under the meter's rules, in LanguageModel's order."""
    dtype = torch.bfloat16 if precision == "bf16-mixed" else None
    model = build_sharded(CONFIG, init_device_mesh("cpu", (2,)), torch.device("cpu"), seed=0, param_dtype=dtype)
    made = strategy_for(strategy)
    made.model = model
    optimizer = AdamW(param_groups(model))
    ids = torch.randint(CONFIG.vocab_size, (STEP["rows"], STEP["context_length"]))

    def micro_batch():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            loss = linear_cross_entropy(model(ids), model.lm_head.weight, ids)
        loss.backward()

    def step():
        for _ in range(accumulation - 1):
            with made.block_backward_sync():
                micro_batch()
            is_reduced = all(parameter.grad is not None for parameter in model.parameters())
            assert is_reduced is (strategy == "fsdp2")
        micro_batch()
        optimizer.step()
        optimizer.zero_grad()

    step()
    held = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    held += list(model.parameters())
    with Weigher(held) as weigher:
        del held
        step()
    return weigher.peak


def test_fsdp2_on_two_processes(two_processes):
    results = mp.Manager().dict()
    two_processes(sharded_steps, results)
    assert len(results) == 2
    for measured, precision, way in itertools.product(results.values(), PRECISIONS, WAYS):
        assert measured[(precision, *way)] == pytest.approx(predicted(precision, *way)[1].peak, rel=TOLERANCE), way
