"""A signal at every batch boundary, again after the resume, and once more: each checkpoint resumes to the same bits."""

import itertools
import os
import random
import signal
from contextlib import suppress

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.runs.find import checkpoint_in
from lightning_llm.training.callbacks.signals import Interrupted
from lightning_llm.training.module import LanguageModel
from lightning_llm.training.trainer import Trainer
from tests.tiny_run import assert_same_weights

NUMBERS = (signal.SIGTERM, signal.SIGINT)
STEPS = 12
PAIRS_OF_BOUNDARY, TRIPLES_OF_LAYOUT = 1, 4
MODEL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 8}
DATA = {"tokenizer": "byte", "context_length": 8, "global_batch_size": 4, "micro_batch_size": 2}
LAYOUTS = {
    "by steps": {"max_steps": STEPS, "val_check_interval": 4},
    # validations after steps 4, 8 and 12, two micro-batches per step; epochs end after steps 6 and 12
    "within an epoch": {"max_epochs": 2, "limit_train_batches": 12, "val_check_interval": 4},
    # validations at the ends of three epochs
    "at the end of an epoch": {"max_epochs": 3, "limit_train_batches": 8, "val_check_interval": 1.0},
}


class Signals(Callback):
    """Sends SIGTERM or SIGINT to this process at one of the batch boundaries of a run, and counts them."""

    def __init__(self, at):
        self.at, self.seen = at, 0

    def on_train_batch_end(self, *args, **kwargs):
        if self.seen == self.at:
            os.kill(os.getpid(), NUMBERS[self.at % 2])
        self.seen += 1

    on_validation_batch_end = on_train_batch_end


class KilledError(Exception):
    """A signal outside training, as in a sanity check: nothing is saved."""


def killed(number, frame):
    raise KilledError


class Runs:
    """Starts and resumes of one run. A checkpoint of the same content continues in the same way: each is run once."""

    def __init__(self, folder, text, layout):
        self.folder, self.text, self.layout = folder, text, layout
        self.legs, self.same, self.numbers = {}, {}, itertools.count()

    def go(self, checkpoint, at=None):
        """Resume a checkpoint, or start: (the newest checkpoint, boundaries passed, weights at the end if it ends)."""
        if (checkpoint, at) not in self.legs:
            self.legs[checkpoint, at] = self._go(checkpoint, at)
        return self.legs[checkpoint, at]

    def _go(self, checkpoint, at):
        folder, signals, weights = self.folder / f"{next(self.numbers)}", Signals(at), None
        torch.manual_seed(1)
        model = LanguageModel(architecture=dict(MODEL))
        data = TokenDataModule(path=str(self.text), **DATA)
        trainer = Trainer(
            **self.layout, run_dir=str(folder), accelerator="cpu", callbacks=[signals], logger=False,
            num_sanity_val_steps=1, limit_val_batches=2, enable_progress_bar=False,
        )  # fmt: skip
        try:
            trainer.fit(model, data, ckpt_path=checkpoint)
            assert trainer.global_step == STEPS
            weights = {name: value.clone() for name, value in model.state_dict().items()}
        except (Interrupted, KilledError):
            assert at is not None
        with suppress(ValueError):  # nothing was saved
            checkpoint = checkpoint_in(folder, prefer_best=False)
            checkpoint = self.same.setdefault(plain(torch.load(checkpoint, weights_only=True)), checkpoint)
        return checkpoint, signals.seen, weights


def plain(content):
    """What two checkpoints of the same content have in common."""
    if isinstance(content, dict):
        return tuple((name, plain(value)) for name, value in content.items() if name not in ("start_number", "seconds"))
    if isinstance(content, list | tuple):
        return tuple(map(plain, content))
    return str(content.tolist()) if isinstance(content, torch.Tensor) else str(content)


@pytest.fixture(scope="module", params=LAYOUTS)
def runs_of_layout(request, tmp_path_factory, text_file):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(text_file.read_text()[:3000])
    return Runs(folder, folder / "text.txt", LAYOUTS[request.param])


@pytest.fixture
def runs(runs_of_layout, monkeypatch, default_signals):
    """The runs of one layout, each once in all tests."""
    monkeypatch.chdir(runs_of_layout.folder)
    for number in NUMBERS:
        signal.signal(number, killed)
    return runs_of_layout


def interrupted(runs, checkpoint, at):
    """The checkpoint after a signal there, from which the run must end as without signals; and what boundaries follow.

    ``checkpoint`` ``None``: the start of the run.
    """
    checkpoint, _, _ = runs.go(checkpoint, at)
    _, following, weights = runs.go(checkpoint)
    assert_same_weights(runs.go(None)[2], weights)
    return checkpoint, following


# boundaries 0 and 1 are of the sanity check, 2 to 9 of four steps, 10 to 13 of a validation, 17 is the sixth step's end
@pytest.mark.parametrize("signals", [(0,), (9, 1, 0), (11, 2, 1), (17, 1, 1)])
def test_after_up_to_three_signals_a_run_ends_as_without(runs, signals):
    checkpoint = None
    for at in signals:
        checkpoint, _ = interrupted(runs, checkpoint, at)


@pytest.mark.slow
def test_after_any_signal_and_drawn_pairs_and_triples_a_run_ends_as_without(runs):
    """Each boundary once; after each, some second ones; and triples. All pairs and 200 triples have passed once."""
    boundaries, draw = runs.go(None)[1], random.Random(0)
    for at in range(boundaries):
        checkpoint, following = interrupted(runs, None, at)
        for again in draw.sample(range(following), min(following, PAIRS_OF_BOUNDARY)):
            interrupted(runs, checkpoint, again)
    for _ in range(TRIPLES_OF_LAYOUT):
        checkpoint, following = None, boundaries
        for _ in range(3):
            if following:
                checkpoint, following = interrupted(runs, checkpoint, draw.randrange(following))
