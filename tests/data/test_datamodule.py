"""The data module, alone and under Lightning's Trainer: what it serves, where it resumes, what it rejects."""

import copy
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerState

from lightning_llm.checkpoints.loop_state import rescale_batch_progress
from lightning_llm.data.batches import IGNORED
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.data.mixture import train_order
from lightning_llm.data.order import window_starts
from lightning_llm.data.token_store import TokenStore
from lightning_llm.data.token_store_writer import TokenStoreWriter
from lightning_llm.data.tokenizers import Tokenizer
from tests.data.conftest import fault

CONTEXT = 7


class Recorder(LightningModule):
    """A model of one weight that notes the first token of each window it is given, by optimiser step."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.steps: dict[int, list[int]] = {}
        self.updates: list[int] = []  # windows that went into each update
        self.since = 0
        self.evaluated = {number: [] for number in range(4)}

    def training_step(self, batch, batch_idx):
        self.steps.setdefault(self.global_step, []).extend(batch["input_ids"][:, 0].tolist())
        self.since += len(batch["input_ids"])
        return self.weight * batch["input_ids"].double().mean()

    def on_before_optimizer_step(self, optimizer):
        self.updates.append(self.since)
        self.since = 0

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if not self.trainer.sanity_checking:
            self.evaluated[dataloader_idx].append(batch)

    def test_step(self, batch, batch_idx):
        self.evaluated[0].append(batch)

    def predict_step(self, batch, batch_idx):
        return batch["prompt"], batch["input_ids"]

    def on_load_checkpoint(self, checkpoint):
        if self.trainer.state.fn == "fit":
            rescale_batch_progress(checkpoint, self.trainer.accumulate_grad_batches)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Save(Callback):
    """Saves where it is told to, and may then stop as a killed process would: without a word."""

    def __init__(self, path, hook, number):
        self.path, self.hook, self.number, self.calls = path, hook, number, 0

    def _called(self, hook, trainer):
        self.calls += hook == self.hook
        if hook == self.hook and self.calls == self.number:
            trainer.save_checkpoint(self.path)
            raise KilledError

    def on_train_batch_start(self, trainer, *_):
        self._called("batch start", trainer)

    def on_before_zero_grad(self, trainer, *_):
        self._called("zero grad", trainer)

    def on_train_batch_end(self, trainer, *_):
        self._called("batch end", trainer)

    def on_validation_end(self, trainer, *_):
        if not trainer.sanity_checking:
            self._called("validation end", trainer)

    def on_train_epoch_end(self, trainer, *_):
        self._called("epoch end", trainer)


class KilledError(Exception):
    pass


def make_trainer(**options):
    return Trainer(
        **{
            "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "max_steps": 12,
            "check_val_every_n_epoch": None, "val_check_interval": 10**6, **options
        }
    )  # fmt: skip


def make_data(store, **options):
    return TokenDataModule(
        **{"store": str(store.path), "context_length": CONTEXT, "global_batch_size": 8, "seed": 5, **options}
    )


def fit(data, ckpt_path=None, callbacks=(), **options):
    model = Recorder()
    model.trained_by = make_trainer(callbacks=list(callbacks), **options)
    model.trained_by.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return model


def expected_steps(store, steps, global_batch_size=8):
    num_tokens = store.splits["train"].tokens
    return {
        step: window_starts(
            step, seed=5, global_batch_size=global_batch_size, context_length=CONTEXT, num_tokens=num_tokens
        ).tolist()
        for step in steps
    }


@pytest.fixture
def store(make_store):
    return make_store(train=1000, val=100)


# ---- what it serves


def test_windows_of_an_evaluation_do_not_depend_on_the_context_of_training(store):
    def targets(data):
        model = Recorder()
        make_trainer().validate(model, data, verbose=False)
        return [batch["targets"] for batch in model.evaluated[0]]

    short, long = (make_data(store, context_length=length, eval_context_length=5) for length in (5, 20))
    assert [rows.shape for rows in targets(short)] == [(8, 5), (8, 5), (3, 5), (1, 4)]  # 99 targets
    for mine, others in zip(targets(short), targets(long), strict=True):
        assert torch.equal(mine, others)
    assert long.tokens_per_step == 8 * 20
    assert next(iter(fit(long, max_steps=1).steps.values())) == next(
        iter(fit(make_data(store, context_length=20), max_steps=1).steps.values())
    )


def test_a_window_of_an_evaluation_must_fit_too(store):
    with pytest.raises(ValueError, match=r"data\.eval_context_length 100 is too long for the val split"):
        make_data(store, eval_context_length=100).setup("validate")
    with pytest.raises(ValueError, match="eval_context_length must be at least 1, got 0"):
        make_data(store, eval_context_length=0)


def test_without_a_trainer_it_serves_one_epoch(store):
    data = make_data(store, micro_batch_size=4)
    data.prepare_data()
    data.setup("fit")
    assert data.accumulation == 2
    assert data.steps_per_epoch == (999 // CONTEXT) // 8 == 17
    assert data.tokens_per_step == 8 * CONTEXT
    assert data.vocab_size == 1000
    assert data.bytes_per_token == 2
    batches = list(data.train_dataloader())
    assert len(batches) == len(data.train_dataloader()) == 34
    assert {tuple(batch["input_ids"].shape) for batch in batches} == {(4, CONTEXT)}
    starts = torch.cat([batch["input_ids"][:, 0] for batch in batches]).reshape(17, 8)
    assert dict(enumerate(starts.tolist())) == expected_steps(store, range(17))


@pytest.mark.parametrize("micro_batch_size", [None, 8, 4, 1])
def test_optimiser_steps_take_the_windows_of_the_order(store, micro_batch_size):
    model = fit(make_data(store, micro_batch_size=micro_batch_size))
    assert model.steps == expected_steps(store, range(12))
    assert model.updates == [8] * 12
    assert model.trained_by.accumulate_grad_batches == 8 // (micro_batch_size or 8)


def test_length_is_that_of_the_run(store):
    model = fit(make_data(store, micro_batch_size=2), max_steps=40)
    assert model.trained_by.num_training_batches == 160
    assert model.trained_by.current_epoch in (0, 1)
    assert model.steps == expected_steps(store, range(40))


@pytest.mark.parametrize("max_steps", [-1, 1000, 40])
def test_epochs_are_counted_where_they_limit_the_run(store, max_steps):
    model = fit(
        make_data(store, micro_batch_size=4), max_epochs=3, max_steps=max_steps, check_val_every_n_epoch=1,
        val_check_interval=1.0
    )  # fmt: skip
    assert model.steps == expected_steps(store, range(min(3 * 17, max_steps % 10**6)))


def test_batch_larger_than_the_text_repeats_windows_within_a_step(make_store):
    store = make_store(train=30)
    model = fit(make_data(store), max_steps=3)
    assert model.steps == expected_steps(store, range(3))


def test_validation_scores_each_target_once_and_estimates_training_loss_alike(store):
    model = fit(make_data(store, eval_batch_size=5), val_check_interval=6)
    validation, training = (model.evaluated[number][: len(model.evaluated[number]) // 2] for number in (0, 1))
    assert torch.cat([batch["targets"].flatten() for batch in validation]).tolist() == list(range(1, 100))
    assert (
        [len(batch["targets"]) for batch in validation] == [5, 5, 4, 1] == [len(batch["targets"]) for batch in training]
    )
    starts = torch.cat([batch["input_ids"][:, 0] for batch in training]).tolist()
    assert starts == np.linspace(0, 1000 - 1 - CONTEXT, 15).astype(int).tolist()
    again = model.evaluated[1][len(training) :]
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(training, again, strict=True))


SPACED = [0, 2, 4, 6, 8, 10, 12, 14]  # 8 of 15 windows: the last of each eighth


@pytest.mark.parametrize("limit", [1, 0.55])
@pytest.mark.parametrize("size", [{}, {"eval_batch_size": 5}, {"micro_batch_size": 1}, {"num_workers": 1}])
def test_a_limit_counts_windows_spaced_over_the_validation_text(store, limit, size, capsys):
    trainer = make_trainer(limit_val_batches=limit, val_check_interval=12 * (8 if "micro_batch_size" in size else 1))
    model, data = Recorder(), make_data(store, **size)
    trainer.fit(model, datamodule=data)
    assert capsys.readouterr().out.startswith("Validates 8 of 15 windows of the validation text, evenly spaced.\n")
    found = [torch.cat([batch["input_ids"][:, 0] for batch in model.evaluated[number]]).tolist() for number in (0, 1)]
    assert found[0] == [CONTEXT * place for place in SPACED]
    assert found[1] == np.linspace(0, 1000 - 1 - CONTEXT, 8).astype(int).tolist()
    assert trainer.limit_val_batches == limit  # as it was, for other data
    model.evaluated[0].clear()
    trainer.validate(model, datamodule=data, verbose=False)
    again = torch.cat([batch["input_ids"][:, 0] for batch in model.evaluated[0]]).tolist()
    assert again == found[0]


def test_after_an_error_the_trainer_has_its_limit_again(store):
    class Fails(Recorder):
        def training_step(self, *args):
            raise RuntimeError("planted")

    trainer = make_trainer(limit_val_batches=1)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit(Fails(), datamodule=make_data(store))
    assert trainer.limit_val_batches == 1
    assert type(trainer.limit_val_batches) is int


def test_a_limit_beyond_the_text_or_none_is_all_of_it(store, capsys):
    for limit in (2, 1.0, None):
        model = fit(make_data(store), val_check_interval=12, limit_val_batches=limit)
        assert torch.cat([batch["targets"].flatten() for batch in model.evaluated[0]]).tolist() == list(range(1, 100))
        assert "Validates all 15 windows of the validation text.\n" in capsys.readouterr().out


def test_a_limit_is_shared_by_a_mixture_which_validates_each_store(make_store, capsys):
    stores = [make_store(1000, tokens, vocab_size=1000, name=f"part{tokens}") for tokens in (20, 1000)]
    data = mixed(stores)
    model = fit(data, val_check_interval=12, limit_val_batches=1)
    counts = [sum(len(batch["targets"]) for batch in model.evaluated[number]) for number in range(4)]
    assert counts == [1, 8, 1, 8]
    assert "Validates 9 of 146 windows" in capsys.readouterr().out


def test_a_fraction_of_less_than_a_window_is_refused(store):
    message = r"trainer\.limit_val_batches 0\.05 of 15 windows of the validation text is less than one"
    trainer = make_trainer(limit_val_batches=0.05)
    assert [(name, bool(re.match(message, text))) for name, text in make_data(store).problems(trainer)] == [
        ("validation", True)
    ]
    with pytest.raises(ValueError, match=message):
        trainer.fit(Recorder(), datamodule=make_data(store))


def test_test_split(make_store):
    model, data = Recorder(), make_data(make_store(test=50))
    make_trainer().test(model, datamodule=data, verbose=False)
    assert torch.cat([batch["targets"].flatten() for batch in model.evaluated[0]]).tolist() == list(range(1, 50))


def test_validate_alone(store):
    model = Recorder()
    make_trainer().validate(model, datamodule=make_data(store, global_batch_size=3), verbose=False)
    assert torch.cat([batch["targets"].flatten() for batch in model.evaluated[0]]).tolist() == list(range(1, 100))


def test_predict_prompts(store):
    data = make_data(store, predict_prompts=["ab", "c"])
    outputs = make_trainer().predict(Recorder(), datamodule=data)
    assert [(prompt, ids.tolist()) for prompt, ids in outputs] == [("ab", [[97, 98]]), ("c", [[99]])]


def test_overfit_batches_repeats_the_first_ones(store):
    model = fit(make_data(store, micro_batch_size=4), max_steps=6, overfit_batches=4)
    first = expected_steps(store, range(2))
    assert model.steps == {step: first[step % 2] for step in range(6)}


def test_raw_files_are_read_as_they_are(store):
    (store.path / "meta.json").unlink()
    data = make_data(store, raw_dtype="uint16", vocab_size=1000)
    assert fit(data).steps == expected_steps(store, range(12))
    assert data.tokenizer is None
    assert data.bytes_per_token is None
    assert data.vocab_size == 1000


def test_missing_store_is_prepared_by_fit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a text to train on\n" * 50)
    data = TokenDataModule(path="text.txt", tokenizer="char", context_length=CONTEXT, global_batch_size=8)
    model = fit(data, max_steps=2)
    assert model.updates == [8, 8]
    assert data.tokenizer.kind == "char"
    assert data.store.path.parent.name == "stores"


# ---- mixtures and documents


def mixed(stores, weights=(3, 1), **options):
    mixture = {str(store.path): weight for store, weight in zip(stores, weights, strict=True)}
    return TokenDataModule(mixture=mixture, context_length=CONTEXT, global_batch_size=8, seed=5, **options)


@pytest.fixture
def mixable(make_store):
    """Two stores with one vocabulary and different tokens: below 1000, and from 1000 on."""
    ids = np.arange(1000, 1400)
    return [
        make_store(1000, 100, 50, vocab_size=1400, name="a"),
        make_store(ids, ids[:60], 30, vocab_size=1400, name="b"),
    ]


def test_a_mixture_gives_each_source_its_share_in_its_own_order(mixable):
    model = fit(mixed(mixable), max_steps=40)
    starts = [start for step in range(40) for start in model.steps[step]]
    first = [start for start in starts if start < 1000]
    assert abs(len(first) - 240) <= 3
    assert first == list(itertools.chain(*expected_steps(mixable[0], range(40)).values()))[: len(first)]
    halved = fit(mixed(mixable, micro_batch_size=4), max_steps=40)
    assert halved.steps == model.steps


@pytest.mark.parametrize(("weights", "trained"), [((1, 0), 0), ((0, 1), 1)])
def test_a_source_without_a_share_is_validated_alone(mixable, weights, trained):
    data = mixed(mixable, weights=weights)
    model = fit(data, max_steps=40)
    starts = [start for step in range(40) for start in model.steps[step]]
    assert {start >= 1000 for start in starts} == {bool(trained)}
    alone = mixable[trained].splits["train"].tokens - 1
    assert data.steps_per_epoch == max(1, alone // CONTEXT // 8)
    data.setup("fit")
    targets = [sorted(torch.cat([b["targets"].flatten() for b in loader]).tolist()) for loader in data.val_dataloader()]
    assert targets[:2] == [list(range(1, 100)), list(range(1001, 1060))]


def test_sources_of_one_length_are_read_in_different_orders(make_store):
    data = mixed([make_store(1000, 100, name="a"), make_store(1000, 100, name="b")], weights=(1, 1))
    order = train_order(data.sources, CONTEXT, 5)
    first, second = (order._orders[number].starts(0, 100).tolist() for number in range(2))
    assert sorted(first) != first != second
    assert first == train_order(data.sources[:1], CONTEXT, 5).starts(0, 100).tolist()


def test_a_mixture_is_evaluated_source_by_source(mixable):
    data = mixed(mixable)
    data.setup("fit")
    loaders = data.val_dataloader()
    targets = [sorted(torch.cat([b["targets"].flatten() for b in loader]).tolist()) for loader in loaders]
    assert targets[:2] == [list(range(1, 100)), list(range(1001, 1060))]
    assert max(targets[2]) < 1000 <= min(targets[3])
    assert [len(part) for part in targets[2:]] == [len(part) for part in targets[:2]] or len(targets[2]) >= 98
    data.setup("test")
    assert [max(max(b["targets"].flatten().tolist()) for b in loader) for loader in data.test_dataloader()] == [49, 29]


def test_a_mixture_that_makes_no_sense_is_refused(mixable, make_store, tmp_path):
    other = make_store(100, 50, vocab_size=200, name="other")
    assert "weights must be 0 or more, and one above 0, got " in fault(
        lambda: mixed(mixable, weights=(1, -1)).setup("fit")
    )
    assert "none above 0" in fault(lambda: mixed(mixable, weights=(0, 0)).setup("fit"))
    assert "nan" in fault(lambda: mixed(mixable, weights=(1, float("nan"))).setup("fit"))
    assert "data.mixture is empty" in fault(lambda: mixed([], weights=()).setup("fit"))
    assert "does not exist" in fault(lambda: TokenDataModule(mixture={str(tmp_path / "no"): 1}).setup("fit"))
    assert "leave out path, store" in fault(lambda: TokenDataModule(mixture={"a": 1}, store="b"))
    short = make_store(CONTEXT, 50, vocab_size=1400, name="short")
    assert "too long for the train split" in fault(lambda: mixed([mixable[0], short]).setup("fit"))
    (other.path / "tokenizer.json").write_text(Tokenizer.train_char(["abc"]).to_str())
    assert "tokenizer.json does not belong" in fault(lambda: mixed([mixable[0], other]).setup("fit"))
    tokenizer = Tokenizer.train_char(["abc"]).to_str()
    with TokenStoreWriter(tmp_path / "abc", vocab_size=3, tokenizer=tokenizer, source={}) as writer:
        for split in ("train", "val"):
            writer.write(split, np.zeros(50, dtype=np.uint16), text_bytes=50, documents=1)
    message = fault(lambda: TokenDataModule(mixture={str(mixable[0].path): 1, str(tmp_path / "abc"): 1}).setup("fit"))
    assert "(1400 ids)" in message
    assert "(3 ids) were made with different tokenizers: prepare one with --tokenizer" in message


def test_documents_are_numbered_from_their_end_of_text(make_store, tmp_path):
    tokenizer = Tokenizer.train_bpe(["some text, some more text"] * 20, 300)
    eos = tokenizer.eos_token_id
    ids = np.full(200, 65)
    ids[[3, 50, 51, 120]] = eos
    source = {"eos_token_id": eos}
    with TokenStoreWriter(tmp_path / "docs", vocab_size=300, tokenizer=tokenizer.to_str(), source=source) as writer:
        for split in ("train", "val"):
            writer.write(split, ids, text_bytes=200, documents=5)
    data = TokenDataModule(store=str(tmp_path / "docs"), context_length=100, global_batch_size=1, document_mask=True)
    data.setup("validate")
    batch = next(iter(data.val_dataloader()[0]))
    assert batch["documents"].shape == batch["input_ids"].shape
    assert batch["documents"][0].tolist() == [0] * 3 + [1] * 47 + [2] + [3] * 49  # the token itself begins one
    plain = TokenDataModule(store=str(tmp_path / "docs"), context_length=100, global_batch_size=1)
    assert "documents" not in next(iter(plain.val_dataloader()[0]))


def test_documents_need_an_end_of_text(store):
    assert "needs an end-of-text token between documents" in fault(
        lambda: make_data(store, document_mask=True).setup("fit")
    )


# ---- where it resumes


PLACES = [
    ("batch end", 1), ("batch end", 6), ("batch end", 7), ("batch end", 24), ("batch start", 1), ("batch start", 6),
    ("batch start", 9), ("zero grad", 5), ("validation end", 1), ("validation end", 2),
]  # fmt: skip


@pytest.mark.parametrize("resumed_micro_batch_size", [4, 8, 2])
@pytest.mark.parametrize(("hook", "number"), PLACES)
def test_interrupted_run_goes_on_with_the_next_step(store, tmp_path, hook, number, resumed_micro_batch_size):
    path, options = tmp_path / "run.ckpt", {"val_check_interval": 6}
    with pytest.raises(KilledError):
        fit(make_data(store, micro_batch_size=4), callbacks=[Save(path, hook, number)], **options)
    done = torch.load(path, weights_only=True)["TokenDataModule"]["optimizer_steps"]
    options["val_check_interval"] *= 4 // resumed_micro_batch_size or 1
    model = fit(make_data(store, micro_batch_size=resumed_micro_batch_size), ckpt_path=path, **options)
    assert model.trained_by.global_step == 12
    assert model.steps == expected_steps(store, range(done, 12))
    assert model.updates == [8] * (12 - done)
    counted = model.trained_by.fit_loop.epoch_loop.batch_progress.total
    assert counted.processed == 12 * 8 // resumed_micro_batch_size


@pytest.mark.parametrize(
    ("hook", "number"), [("batch end", 40), ("batch end", 34), ("epoch end", 1), ("batch start", 36)]
)
def test_interrupted_run_of_several_epochs_goes_on(store, tmp_path, hook, number):
    options = {"max_steps": -1, "max_epochs": 3, "check_val_every_n_epoch": 1, "val_check_interval": 1.0}
    with pytest.raises(KilledError):
        fit(make_data(store, micro_batch_size=4), callbacks=[Save(tmp_path / "a", hook, number)], **options)
    done = number // 2 if hook == "batch end" else 17
    model = fit(make_data(store, micro_batch_size=4), ckpt_path=tmp_path / "a", **options)
    assert model.steps == expected_steps(store, range(done, 51))


def test_finished_run_can_be_made_longer(store, tmp_path):
    first = fit(make_data(store, micro_batch_size=4), max_steps=5)
    first.trained_by.save_checkpoint(tmp_path / "a")
    model = fit(make_data(store, micro_batch_size=4), ckpt_path=tmp_path / "a", max_steps=9)
    assert model.steps == expected_steps(store, range(5, 9))


def test_run_saved_at_the_end_of_its_last_batch_can_be_made_longer(store, tmp_path):
    with pytest.raises(KilledError):
        fit(make_data(store, micro_batch_size=4), max_steps=5, callbacks=[Save(tmp_path / "a", "batch end", 10)])
    model = fit(make_data(store, micro_batch_size=4), ckpt_path=tmp_path / "a", max_steps=9)
    assert model.steps == expected_steps(store, range(5, 9))


def test_state_is_plain_and_says_what_the_run_read(store, tmp_path):
    model = fit(make_data(store, micro_batch_size=2), max_steps=3)
    state = model.trained_by.datamodule.state_dict()
    assert state == {
        "optimizer_steps": 3, "accumulation": 4, "global_batch_size": 8, "context_length": CONTEXT, "seed": 5,
        "store": store.fingerprint,
    }  # fmt: skip
    data = make_data(store)
    data.load_state_dict(state)
    assert data.loaded_state == state
    assert data.position == 3
    data.setup("fit")
    assert next(iter(data.train_dataloader()))["input_ids"][:, 0].tolist() == expected_steps(store, [3])[3]


def test_resuming_on_other_tokens_is_refused_evaluating_is_not(store, make_store, tmp_path):
    model = fit(make_data(store), max_steps=3)
    model.trained_by.save_checkpoint(tmp_path / "a")
    other = make_store(train=1001, name="other")
    message = fault(lambda: fit(make_data(other), ckpt_path=tmp_path / "a"))
    assert f"the checkpoint was trained on token store {store.fingerprint}, data.store {other.path} is" in message
    make_trainer().validate(Recorder(), datamodule=make_data(other), ckpt_path=tmp_path / "a", verbose=False)


def progress(total, current):
    names = ("ready", "started", "processed", "completed")
    return {scope: dict(zip(names, counts, strict=True)) for scope, counts in (("total", total), ("current", current))}


@pytest.mark.parametrize(
    ("before", "steps", "after"),
    [
        ((8, 8, 8, 8), 4, (20, 20, 20, 20)),  # between batches
        ((8, 8, 8, 7), 4, (20, 20, 20, 19)),  # at the end of a batch
        ((9, 9, 9, 9), 4, (20, 20, 20, 20)),  # half a step was accumulated
        ((9, 9, 8, 8), 4, (20, 20, 20, 20)),  # within a batch
        ((8, 8, 7, 7), 4, (20, 20, 20, 20)),  # within a batch, after its update
    ],
)
@pytest.mark.parametrize("manual", [False, True])
def test_counts_are_rewritten_to_whole_steps(before, steps, after, manual):
    idle, busy = progress((0,) * 4, (0,) * 4), progress((steps + 17,) * 4, (steps,) * 4)
    loops = {
        "epoch_loop.batch_progress": progress(tuple(count + 34 for count in before), before),
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": idle if manual else busy}},
        "epoch_loop.manual_optimization.optim_step_progress": busy if manual else idle,
    }
    checkpoint = {"loops": {"fit_loop": copy.deepcopy(loops)}}
    rescale_batch_progress(checkpoint, 5)
    expected = progress(tuple(count + 85 for count in after), after)
    assert checkpoint["loops"]["fit_loop"] == {**loops, "epoch_loop.batch_progress": expected}


# ---- what it refuses


@pytest.mark.parametrize("name", ["context_length", "global_batch_size", "micro_batch_size", "eval_batch_size"])
def test_sizes_below_one(name):
    assert fault(lambda: TokenDataModule(**{name: 0})) == f"{name} must be at least 1, got 0"


def test_faults_are_reported_together():
    message = fault(lambda: TokenDataModule(context_length=0, num_workers=-1, raw_dtype="uint16"))
    assert [part.split()[0] for part in message.split("; ")] == ["context_length", "num_workers", "raw_dtype"]


@pytest.mark.parametrize(("split", "sizes"), [("train", (CONTEXT, 100)), ("val", (1000, CONTEXT))])
@pytest.mark.parametrize("stage", ["fit", "validate", None])
def test_text_shorter_than_a_window(make_store, split, sizes, stage):
    data = make_data(make_store(*sizes))
    message = fault(lambda: data.setup(stage))
    assert f"data.context_length {CONTEXT} is too long for the {split} split of" in message
    assert f"it has {CONTEXT} tokens, a window and its last target need {CONTEXT + 1}" in message


def test_text_of_exactly_one_window(make_store):
    model = fit(make_data(make_store(train=CONTEXT + 1, val=CONTEXT + 1), global_batch_size=2), max_steps=2)
    assert model.steps == {0: [0, 0], 1: [0, 0]}


def test_micro_batches_that_do_not_divide_the_global_batch(store):
    message = fault(lambda: make_data(store, micro_batch_size=3).setup("fit"))
    assert message == "data.global_batch_size 8 cannot be divided by 1 device times data.micro_batch_size 3: change one"


class Devices:
    """What the module asks a trainer of several devices."""

    accumulate_grad_batches, max_epochs, max_steps = 1, None, 10
    limit_train_batches = limit_val_batches = 1.0
    global_step, state = 0, TrainerState(fn="fit")

    def __init__(self, rank, world_size):
        self.distributed_sampler_kwargs = {"rank": rank, "num_replicas": world_size}
        self.strategy = type("Strategy", (), {"root_device": torch.device("cpu")})()


@pytest.mark.parametrize("micro_batch_size", [None, 2, 1])
def test_devices_share_each_step(store, micro_batch_size):
    served = []
    for rank in range(2):
        data = make_data(store, micro_batch_size=micro_batch_size)
        data.trainer = Devices(rank, 2)
        data.setup("fit")
        assert data.trainer.accumulate_grad_batches == data.accumulation == 4 // (micro_batch_size or 4)
        served.append(list(data.train_dataloader()))
        assert len(served[-1]) == 10 * data.accumulation
    together = [row for batches in zip(*served, strict=True) for batch in batches for row in batch["input_ids"][:, 0]]
    steps = itertools.zip_longest(*[iter(torch.stack(together).tolist())] * 8)
    assert dict(enumerate(map(list, steps))) == expected_steps(store, range(10))


def test_devices_share_validation(store):
    targets = []
    for rank in range(3):
        data = make_data(store, global_batch_size=9, eval_batch_size=4)
        data.trainer = Devices(rank, 3)
        data.setup("fit")
        validation, training = data.val_dataloader()
        assert len(validation) == len(training) == 2
        targets += [batch["targets"].flatten() for batch in validation]
    targets = torch.cat(targets)
    assert sorted(targets[targets != IGNORED].tolist()) == list(range(1, 100))


def test_only_the_first_process_of_a_machine_prepares(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text to make a store from\n" * 30)
    processes = []
    for rank in range(2):
        processes.append(TokenDataModule(path="text.txt", tokenizer="char", context_length=4))
        processes[rank].trainer = Devices(rank, 2)
        processes[rank].trainer.local_rank = rank
        processes[rank].trainer.state = TrainerState()
    assert "does not exist: make it with lightning-llm prepare" in fault(lambda: processes[1].setup("fit"))
    processes[0].prepare_data()
    Path("text.txt").write_text("changed while the other process was on its way\n" * 30)
    for process in processes:
        process.setup("fit")
    assert processes[0].store == processes[1].store
    processes[0].prepare_data()  # as a later evaluation does
    assert TokenStore.open(processes[0].store.path) == processes[0].store
    assert capsys.readouterr().out.count("Preparing") == 1


def test_devices_that_do_not_divide_the_global_batch(store):
    data = make_data(store)
    data.trainer = Devices(0, 3)
    assert fault(lambda: data.setup("fit")) == "data.global_batch_size 8 cannot be divided by 3 devices: change one"


def test_accumulation_that_contradicts_the_batch_sizes(store):
    message = fault(lambda: fit(make_data(store, micro_batch_size=4), accumulate_grad_batches=3))
    assert message.startswith("trainer.accumulate_grad_batches 3 contradicts the 2 micro-batches")


@pytest.mark.parametrize("limit", [3, 0.04])
def test_epoch_that_would_end_within_a_step(store, limit):
    options = {"limit_train_batches": limit, "max_steps": -1, "max_epochs": 2}
    message = fault(lambda: fit(make_data(store, micro_batch_size=4), **options))
    assert "which is not a multiple of the 2 of an optimizer step" in message


def test_test_split_that_is_not_there(store):
    assert "has no test split" in fault(lambda: make_trainer().test(Recorder(), datamodule=make_data(store)))


def test_prediction_without_prompts_or_tokenizer(store):
    assert fault(lambda: make_trainer().predict(Recorder(), datamodule=make_data(store))).startswith("predict needs")
    (store.path / "meta.json").unlink()
    data = make_data(store, raw_dtype="uint16", vocab_size=1000, predict_prompts=["a"])
    assert "no tokenizer to encode prompts with" in fault(data.predict_dataloader)


def test_prompt_that_the_tokenizer_cannot_encode(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("abc" * 50)
    data = TokenDataModule(path="text.txt", tokenizer="char", predict_prompts=["abd"])
    assert "character 'd'" in fault(data.predict_dataloader)


def test_damaged_store(store):
    (store.path / "tokenizer.json").write_text(Tokenizer.train_char(["abc"]).to_str())
    assert "tokenizer.json does not belong to it" in fault(lambda: fit(make_data(store)))
