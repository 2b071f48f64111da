"""Data of one's own, whose epochs end with a step of fewer micro-batches: a resumed run counts them exactly."""

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.optim import Constant
from lightning_llm.training.module import LanguageModel
from lightning_llm.training.trainer import Trainer
from tests.tiny_run import assert_same_weights

MODEL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 8}


def trained(folder, validated, checkpoint=None, **options):
    """Epochs of two steps, of 4 and of 1 micro-batches: the weights at the end."""
    torch.manual_seed(1)
    model = LanguageModel(architecture={**MODEL, "vocab_size": 16, "dropout": 0.3}, schedule=Constant())
    ids = torch.arange(5 * 8).reshape(5, 8) % 13
    batches = [{"input_ids": row[None], "targets": row[None] + 1} for row in ids]
    note = LambdaCallback(
        on_validation_end=lambda trainer, module: validated.append(trainer.fit_loop.total_batch_idx + 1)
    )
    trainer = Trainer(
        run_dir=str(folder), accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[note],
        accumulate_grad_batches=4, check_val_every_n_epoch=None, val_check_interval=2, **options,
    )  # fmt: skip
    loaders = [torch.utils.data.DataLoader(batches, batch_size=None) for _ in range(2)]
    trainer.fit(model, *loaders, ckpt_path=checkpoint)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_dropout_and_validations_of_a_resumed_run_are_those_of_an_uninterrupted_one(tmp_path):
    at, parts = [], []
    whole = trained(tmp_path / "whole", at, max_epochs=5)
    trained(tmp_path / "parts", parts, max_epochs=3)
    checkpoint = tmp_path / "parts" / "checkpoints" / "step-00000006.ckpt"
    assert read_checkpoint(checkpoint)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"] == 15
    resumed = trained(tmp_path / "resumed", parts, str(checkpoint), max_epochs=5)
    assert_same_weights(whole, resumed)
    assert parts == at == [8, 16, 24]
