"""The loss of a step: the mean over the targets of its global batch, however they are spread."""

import copy
import os

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn import functional as F

from lightning_llm import LanguageModel, ModelConfig, Trainer
from lightning_llm.model.transformer import Transformer
from lightning_llm.optim import Constant, clip_grad_norm_, param_groups
from lightning_llm.training.distributed import ShardedStrategy

VOCAB, SEQ, STEPS, GLOBAL = 19, 6, 2, 4  # steps of so many rows
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": SEQ}
CONFIG = ModelConfig(vocab_size=VOCAB, **SIZES)
CLIP = 0.3  # below the norms
OPTIONS = {
    "accelerator": "cpu",
    "max_steps": STEPS,
    "limit_val_batches": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
    "log_every_n_steps": STEPS,
}


def rows(*, masked=True, weighted=False):
    """Of all steps. Some have one target, one has none, most have some."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (2, STEPS * GLOBAL, SEQ), generator=generator)
    kept = torch.tensor([[6], [1], [0], [4], [1], [1], [5], [2]])
    targets = ids[1].where(torch.arange(SEQ) < kept, -100) if masked else ids[1]
    weights = {"weights": torch.rand(targets.shape, generator=generator, dtype=torch.float64)} if weighted else {}
    return {"input_ids": ids[0], "targets": targets, **weights}


class Batches:
    """Micro-batches, of one process or of one of two."""

    def __init__(self, content, size, rank=0, world=1):
        self.content, self.size, self.rank, self.world = content, size, rank, world

    def __len__(self):
        return STEPS * GLOBAL // self.size // self.world

    def __iter__(self):
        for number in range(self.rank, len(self) * self.world, self.world):
            part = slice(number * self.size, (number + 1) * self.size)
            yield {name: values[part] for name, values in self.content.items()}


class OwnLoss(LanguageModel):
    def loss(self, batch):
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["targets"].flatten()).nan_to_num()


def trained(
    size,
    content,
    *,
    rank=0,
    world=1,
    config=CONFIG,
    kind=LanguageModel,
    lr=0.5,
    trainer=pl.Trainer,
    loss_chunks=2,
    **options,
):
    """The trainer and its model after all steps."""

    def optimizer(groups):
        return torch.optim.SGD(groups, lr=lr)

    model = kind(copy.deepcopy(config), optimizer=optimizer, schedule=Constant(), loss_chunks=loss_chunks)
    model.seed = 0
    options = {"precision": "64-true", "accumulate_grad_batches": GLOBAL // size // world, **OPTIONS, **options}
    made = trainer(devices=world, **options)
    made.fit(model, Batches(content, size, rank, world))
    return made, model


def plain_model():
    """As Lightning makes it for 64-true."""
    torch.set_default_dtype(torch.float64)
    try:
        return Transformer(CONFIG, seed=0)
    finally:
        torch.set_default_dtype(torch.float32)


def mean_loss(logits, content, part=slice(None)):
    """The plain formula."""
    targets = content["targets"][part].flatten()
    weights = content["weights"][part].flatten() if "weights" in content else torch.ones(len(targets)).double()
    weights = weights.where(targets != -100, 0)
    return (F.cross_entropy(logits.flatten(0, 1), targets, reduction="none") * weights).sum() / weights.sum()


def truth(content, clip=None, algorithm="norm"):
    """Weights, and the norm of the last step, of plain torch."""
    model = plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        part = slice(step * GLOBAL, (step + 1) * GLOBAL)
        optimizer.zero_grad()
        logits = model.logits(model(content["input_ids"][part]))
        mean_loss(logits, content, part).backward()
        by_norm = clip if clip and algorithm == "norm" else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), by_norm)
        if algorithm == "value" and clip:
            torch.nn.utils.clip_grad_value_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict(), norm


def first_loss(content):
    """Of all targets of all steps, before training."""
    model = plain_model()
    with torch.no_grad():
        logits = model.logits(model(content["input_ids"]))
    return float(mean_loss(logits, content))


def assert_same(model, expected, norm):
    torch.testing.assert_close(model.grad_norm, norm, rtol=1e-9, atol=0)
    for name, value in model.transformer.state_dict().items():
        found = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(found, expected[name], rtol=1e-9, atol=1e-12)


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("clip", [(None, "norm"), (CLIP, "norm"), (0.02, "value"), (0, "norm"), (0, "value")])
def test_the_gradient_is_that_of_the_whole_batch(size, clip):
    content = rows()
    _, model = trained(size, content, gradient_clip_val=clip[0], gradient_clip_algorithm=clip[1])
    expected, norm = truth(content, *clip)
    assert norm > CLIP
    assert_same(model, expected, norm)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("loss_chunks", [0, 2])
def test_weights_of_targets_count_in_the_whole_batch(size, loss_chunks):
    content = rows(weighted=True)
    assert_same(trained(size, content, loss_chunks=loss_chunks)[1], *truth(content))


@pytest.mark.parametrize("size", [1, 4])
def test_a_loss_of_the_users_own_is_weighted_by_its_targets(size):
    content = rows()
    assert_same(trained(size, content, kind=OwnLoss)[1], *truth(content))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("trainer", [pl.Trainer, Trainer])
def test_the_logged_loss_is_that_of_all_targets_since_the_last_entry(size, trainer, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    content = rows(weighted=trainer is Trainer)
    made, _ = trained(size, content, trainer=trainer, lr=0.0)
    assert float(made.callback_metrics["train_loss"]) == pytest.approx(first_loss(content), rel=1e-6)


@pytest.mark.parametrize("size", [1, 4])
def test_full_batches_have_the_bits_of_a_plain_loop(size):
    """With what a mixture of experts adds to the loss too."""
    content = rows(masked=False)
    options = {"num_experts": 2, "top_k": 1, "load_balancing": 0.5}
    config = ModelConfig(vocab_size=VOCAB, mlp={"class_path": "mixture_of_experts", "init_args": options}, **SIZES)
    _, model = trained(size, content, config=config, precision="32-true", gradient_clip_val=CLIP)
    plain = LanguageModel(config, loss_chunks=2)
    plain.seed = 0
    plain.configure_model()
    optimizer = torch.optim.SGD(param_groups(plain), lr=0.5)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]  # a sum has an order
    for number, batch in enumerate(Batches(content, size), start=1):
        (plain.loss(batch) / (GLOBAL // size)).backward()
        if number % (GLOBAL // size) == 0:
            norm = clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(norm, model.grad_norm)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def in_two_processes(rank):
    names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "x"}  # the group is there already
    os.environ.update({name: str(value) for name, value in names.items()})
    contents = {1: rows(), 2: rows(weighted=True)}
    expected = {size: truth(content, CLIP) for size, content in contents.items()}
    initial = first_loss(contents[1])
    torch.set_default_dtype(torch.float64)  # Lightning has no 64-true for FSDP2
    for strategy in (DDPStrategy, ShardedStrategy):
        options = {"rank": rank, "world": 2, "precision": "32-true"}
        for size, content in contents.items():
            made, model = trained(size, content, strategy=strategy(), gradient_clip_val=CLIP, **options)
            assert made.world_size == 2
            assert_same(model, *expected[size])
        made, _ = trained(1, contents[1], strategy=strategy(), lr=0.0, **options)
        assert float(made.callback_metrics["train_loss"]) == pytest.approx(initial, rel=1e-9)


def test_two_processes_have_the_gradient_of_one(two_processes):
    two_processes(in_two_processes)
