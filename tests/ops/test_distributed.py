"""The operators in wrapped models on two processes: gradient accumulation without synchronisation, and sharding."""

import contextlib

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lightning_llm.ops.losses import linear_cross_entropy
from lightning_llm.ops.swiglu import memory_optimized_swiglu, swiglu_reference

VOCAB, HIDDEN, WIDTH, TOKENS = 19, 12, 20, 6


class Model(nn.Module):
    """Embedding, two MLPs, tied head, by the operators or by their plain forms."""

    def __init__(self, *, memory_optimized):
        super().__init__()
        torch.manual_seed(0)
        self.memory_optimized = memory_optimized
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.mlps = nn.ModuleList(MLP(level, memory_optimized=memory_optimized) for level in (0, 1, 2))

    def forward(self, ids, targets):
        x = self.embed(ids)
        for mlp in self.mlps:
            y = mlp(x)
            y += x  # FSDP2 hangs its hooks on what a module returns: on a view they would be lost here
            x = y
        if self.memory_optimized:
            return linear_cross_entropy(x, self.embed.weight, targets, num_chunks=2)
        return F.cross_entropy(F.linear(x, self.embed.weight), targets)


class MLP(nn.Module):
    def __init__(self, level, *, memory_optimized):
        super().__init__()
        self.level, self.memory_optimized = level, memory_optimized
        self.norm = nn.Parameter(torch.rand(HIDDEN) + 1)
        shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        self.gate, self.up, self.down = (nn.Parameter(torch.randn(s) / 4) for s in shapes)

    def forward(self, x):
        weights = (self.gate, self.up, self.down)
        if self.memory_optimized:
            return memory_optimized_swiglu(
                x, *weights, checkpoint_level=self.level, num_chunks=3, norm_weight=self.norm
            )
        return swiglu_reference(F.rms_norm(x, (HIDDEN,), self.norm, 1e-6), *weights)


def batch(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, VOCAB, (2, TOKENS), generator=generator)


def expected_gradients():
    """Of the mean over two processes, summed over two micro-batches."""
    model = Model(memory_optimized=False)
    for rank in range(2):
        for step in range(2):
            (model(*batch(rank, step)) / 2).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def compare_gradients(rank):
    expected = expected_gradients()

    replicated = DistributedDataParallel(Model(memory_optimized=True))
    for step in range(2):
        with replicated.no_sync() if step == 0 else contextlib.nullcontext():
            replicated(*batch(rank, step)).backward()
    for name, parameter in replicated.module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])

    sharded = Model(memory_optimized=True)
    for mlp in sharded.mlps:
        fully_shard(mlp)
    fully_shard(sharded)
    for step in range(2):
        sharded(*batch(rank, step)).backward()
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name])


def test_replicated_and_sharded_gradients_equal_the_plain_ones(two_processes):
    two_processes(compare_gradients)
