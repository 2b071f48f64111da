"""Parameters spread over two processes: the same weights, norms and updates as in one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.checkpoints.sharded import LazyShardedTensor, local_rows, split, write_sharded
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.mlp import SwiGLU
from lightning_llm.model.transformer import Transformer
from lightning_llm.model.unmodified import is_unmodified
from lightning_llm.ops.losses import linear_cross_entropy
from lightning_llm.optim import AdamW, GroupRule, MuonAdamW, apply_group_factors, clip_grad_norm_, muon, param_groups
from lightning_llm.training import distributed
from lightning_llm.training.distributed import (
    ShardedStrategy,
    build_sharded,
    host_group,
    is_sharded,
    share_work,
    strategy_for,
)
from lightning_llm.training.trainer import Trainer

VOCAB = 19  # rows that two processes cannot halve


class OwnMLP(nn.Module):
    """A user's: it draws while it is made, keeps a parameter of a kind that no table fills, and has a buffer."""

    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(config.hidden_size, config.hidden_size)
        nn.init.uniform_(self.inner.weight)
        self.scale = nn.Parameter(torch.rand(config.hidden_size))
        self.register_buffer("shift", torch.rand(config.hidden_size))

    def forward(self, x):
        return self.inner(x) * self.scale + self.shift


def config(**changes):
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 8}
    return ModelConfig(vocab_size=VOCAB, **{**sizes, **changes})


CONFIGS = {
    "swiglu": config(),
    "tied": config(tie_word_embeddings=True, mlp="memory_optimized_swiglu", checkpoint_level=2, qk_norm=True),
    "gpt": config(norm="layernorm", position="learned", mlp="gelu", attention_bias=True, lm_head_bias=True),
    "tied, with bias": config(tie_word_embeddings=True, lm_head_bias=True),
    "own": config(mlp=f"{__name__}.OwnMLP"),
}


def batch(rank, step):
    return torch.randint(0, VOCAB, (2, 2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


def step(model, optimizer, batches, max_norm):
    """One optimiser step; the norm before clipping."""
    optimizer.zero_grad()
    for ids, targets in batches:
        hidden = model(ids)
        assert is_unmodified(model.lm_head, nn.Linear)  # LanguageModel.loss reads its weight
        loss = linear_cross_entropy(hidden, model.lm_head.weight, targets, bias=model.lm_head.bias, num_chunks=3)
        (loss / len(batches)).backward()
    norm = clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return norm


def whole(content):
    return content.full_tensor() if hasattr(content, "full_tensor") else content


def refuse(*_):
    raise AssertionError("the standard path")


def in_two_processes(rank, folder):
    SwiGLU.forward = refuse  # in a process of its own
    mesh = init_device_mesh("cpu", (2,))
    group = dist.new_group(backend="gloo")

    def agree(failed):
        vote = torch.tensor(int(failed))
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=group)
        return bool(vote)

    for name, shape in CONFIGS.items():
        plain = Transformer(shape, seed=3)
        sharded = build_sharded(shape, mesh, torch.device("cpu"), seed=3)
        assert is_sharded(sharded)
        assert all(hasattr(param, "to_local") for param in sharded.parameters())
        expected, found = plain.state_dict(), sharded.state_dict()
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert torch.equal(whole(found[key]), value), (name, key)

        optimizer_class = MuonAdamW if name == "swiglu" else AdamW
        extra = {"newton_schulz_dtype": "float32"} if name == "swiglu" else {}
        rules = [GroupRule(pattern="layers.1", lr_factor=0.5)] if name == "gpt" else []
        both = [param_groups(model, rules=rules) for model in (plain, sharded)]
        assert [group["name"] for group in both[0]] == [group["name"] for group in both[1]]
        optimizers = [apply_group_factors(optimizer_class(groups, lr=0.01, **extra)) for groups in both]
        for turn, max_norm in enumerate((float("inf"), 0.1, 0.1)):
            theirs = step(plain, optimizers[0], [batch(0, turn), batch(1, turn)], max_norm)
            ours = step(sharded, optimizers[1], [batch(rank, turn)], max_norm)
            assert type(ours) is torch.Tensor  # stands beside losses, in whatever process
            torch.testing.assert_close(ours, theirs)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(whole(sharded.state_dict()[key]), value)

        shards = {}
        content = {"state_dict": sharded.state_dict(), "optimizer_states": [optimizers[1].state_dict()], "step": 3}
        rest = split(content, shards)
        path = Path(folder) / f"{name}.ckpt"
        write_sharded(rest, shards, path, process=rank, processes=2, agree=agree)
        read, lazy = read_checkpoint(path), read_checkpoint(path, mmap=True)
        assert read["step"] == 3
        for key, value in sharded.state_dict().items():
            assert torch.equal(read["state_dict"][key], whole(value)), key
            if isinstance(lazy["state_dict"][key], LazyShardedTensor):
                start, rows = local_rows(value)
                assert torch.equal(lazy["state_dict"][key].between(start, start + len(rows)), rows)
        optimizer_class(param_groups(plain, rules=rules), **extra).load_state_dict(read["optimizer_states"][0])
        if shape.tie_word_embeddings:
            weights = read["state_dict"]
            assert weights["lm_head.weight"].data_ptr() == weights["embed_tokens.weight"].data_ptr()


def test_two_processes_have_and_train_the_weights_of_one(two_processes, tmp_path):
    two_processes(in_two_processes, str(tmp_path))


def compiled_in_two_processes(rank):
    SwiGLU.forward = refuse  # in a process of its own
    shape = config(mlp="memory_optimized_swiglu", recompute="block")
    plain, replicated = Transformer(shape, seed=3), Transformer(shape, seed=3)
    sharded = build_sharded(shape, init_device_mesh("cpu", (2,)), torch.device("cpu"), seed=3)
    for model in (sharded, replicated):
        model.compile_blocks()
        for layer in model.layers:  # as that does, but for the backend: inductor takes ten times as long
            layer.compile(backend="aot_eager")
    wrapped = DistributedDataParallel(replicated)
    optimizers = [AdamW(param_groups(model), lr=0.01) for model in (plain, sharded, replicated)]
    for turn in range(3):
        step(plain, optimizers[0], [batch(0, turn), batch(1, turn)], 0.1)
        step(sharded, optimizers[1], [batch(rank, turn)], 0.1)
        optimizers[2].zero_grad()
        ids, targets = batch(rank, turn)
        nn.functional.cross_entropy(replicated.lm_head(wrapped(ids)).flatten(0, 1), targets.flatten()).backward()
        clip_grad_norm_(replicated.parameters(), 0.1)
        optimizers[2].step()
    for key, value in plain.state_dict().items():
        for model in (sharded, replicated):
            torch.testing.assert_close(whole(model.state_dict()[key]), value, msg=f"{key} differs")


@pytest.mark.slow
def test_compiled_blocks_in_two_processes_train_the_weights_of_one(two_processes):
    two_processes(compiled_in_two_processes)


def muon_in_two_processes(rank):
    orthogonalized, newton_schulz = [], muon.newton_schulz
    muon.newton_schulz = lambda matrices, **options: (
        orthogonalized.append(len(matrices)),
        newton_schulz(matrices, **options),
    )[1]
    shape, mesh = config(intermediate_size=21, num_hidden_layers=3), init_device_mesh("cpu", (2,))
    plain, copied = Transformer(shape, seed=3), Transformer(shape, seed=3)
    sharded = build_sharded(shape, mesh, torch.device("cpu"), seed=3)
    made = [
        MuonAdamW(param_groups(model), lr=0.01, newton_schulz_dtype="float32") for model in (plain, copied, sharded)
    ]
    strategy = DDPStrategy(parallel_devices=2 * [torch.device("cpu")], cluster_environment=LightningEnvironment())
    assert share_work(made[1], SimpleNamespace(strategy=strategy, world_size=2)) is made[1]
    matrices = 7 * shape.num_hidden_layers  # q, k, v, o, gate, up, down
    for turn in range(2):
        batches = [batch(0, turn), batch(1, turn)]
        for model, optimizer, own in zip(
            (plain, copied, sharded), made, (batches, batches, [batches[rank]]), strict=True
        ):
            orthogonalized.clear()
            step(model, optimizer, own, 0.1)
            counts = torch.tensor(orthogonalized).sum()
            assert (counts == matrices) == (model is plain)
            dist.all_reduce(counts)
            assert counts == matrices * (2 if model is plain else 1)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(copied.state_dict()[key], value)
        torch.testing.assert_close(whole(sharded.state_dict()[key]), value)
    for value in copied.state_dict().values():
        others = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(others, value)
        assert torch.equal(*others)


def test_processes_share_the_work_of_muon(two_processes):
    two_processes(muon_in_two_processes)


@pytest.mark.parametrize(("backends", "made"), [("cpu:gloo,cuda:gloo", 0), ("cpu:gloo,cuda:nccl", 0), ("cuda:nccl", 1)])
def test_a_group_of_gloo_is_made_once_and_only_beside_another_backend(monkeypatch, backends, made):
    groups = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD="the default"))
    monkeypatch.setattr(dist, "new_group", lambda **options: groups.append(options) or "another")
    distributed._gloo_group.cache_clear()
    several, alone = (SimpleNamespace(world_size=size, _timeout=7) for size in (2, 1))
    assert {host_group(several) for _ in range(3)} == {"another" if made else "the default"}
    assert groups == made * [{"backend": "gloo", "timeout": 7}]
    assert host_group(alone) is None
    distributed._gloo_group.cache_clear()


def test_no_process_holds_two_whole_blocks_while_the_model_is_made():
    whole = []

    def on_block(block):
        assert all(len(list(layer.parameters())) == 0 for layer in whole)
        for module in block.modules():
            for name, _ in list(module.named_parameters(recurse=False)):
                delattr(module, name)  # as sharding leaves a part of it
        whole.append(block)

    assert len(Transformer(config(num_hidden_layers=5), on_block=on_block).layers) == len(whole) == 5


@pytest.mark.parametrize("given", ["fsdp", "fsdp_cpu_offload"])
def test_fsdp1_is_refused_with_what_to_write(given):
    with pytest.raises(ValueError, match=f"trainer.strategy {given} is FSDP1.*write fsdp2"):
        Trainer(strategy=given, accelerator="cpu")


def test_lightnings_own_strategy_is_sharded_by_rows():
    from lightning.pytorch.strategies import ModelParallelStrategy

    made = strategy_for(ModelParallelStrategy(data_parallel_size=2, save_distributed_checkpoint=False))
    assert isinstance(made, ShardedStrategy)
    assert not made._save_distributed_checkpoint
    with pytest.raises(ValueError, match="tensor_parallel_size 2: the model has no plan"):
        strategy_for(ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2))
    assert strategy_for("ddp") == "ddp"
    assert [strategy_for(name).kind for name in ("fsdp2", "fsdp2_deferred")] == ["fsdp2", "fsdp2_deferred"]


def test_a_size_that_the_devices_do_not_make_is_refused():
    trainer = Trainer(strategy=ShardedStrategy(data_parallel_size=2), accelerator="cpu", devices=1, precision="32-true")
    with pytest.raises(ValueError, match="data_parallel_size 2 with a total of 1 device"):
        trainer.strategy.setup_environment()
