"""The LightningDataModule: token stores in, batches out.

The file reads top to bottom, in Lightning's order:

1. ``__init__`` checks the options.
2. ``prepare_data`` prepares a missing store (``prepare.py``), once per node. What was opened is never made again.
3. ``setup`` opens and checks the stores in every process, and sets the trainer's number of micro-batches per step.
4. ``train_dataloader`` and the other loaders return batches (``batches.py``) in the order of ``order.py``.
5. ``state_dict`` and ``load_state_dict`` describe the data in a checkpoint. The position of the run is Lightning's own,
   in optimizer steps: a run that is resumed with another number of devices or another micro-batch size sees the same
   tokens in each step. ``rescale_batch_progress`` (``checkpoints/loop_state.py``) converts Lightning's counts.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only

from lightning_llm.accounting.step_settings import CONTEXT_LENGTH, GLOBAL_BATCH_SIZE, rows_per_micro_batch
from lightning_llm.data import batches
from lightning_llm.data.batches import EvalBatches, Share, Starts, TrainBatches, WindowReader, limited_batches
from lightning_llm.data.find_store import find_or_prepare
from lightning_llm.data.mixture import MixtureSource, fingerprint, open_mixture, train_order, train_reader
from lightning_llm.data.order import check_window
from lightning_llm.data.prepare import DEFAULT_TOKENIZER, DEFAULT_VOCAB_SIZE
from lightning_llm.data.store_tokenizer import end_of_documents, open_tokenizer
from lightning_llm.data.token_store import TokenStore
from lightning_llm.data.tokenizers import LARGEST_VOCABULARY, Tokenizer
from lightning_llm.data.validated import ServedWindows, Validated, asked_limit, is_whole, text_bytes, validated_windows
from lightning_llm.io.options import raise_all

_SPLITS = {"fit": ("train", "val"), "validate": ("train", "val"), "test": ("test",), "predict": ()}


class TokenDataModule(LightningDataModule):
    """Serves windows of token stores as batches ``{"input_ids", "targets"}``, int64, (rows, context_length).

    Args:
        corpus: Text if no path is given: ``stdlib`` (the source of Python's standard library, always available),
            ``shakespeare`` (downloaded once), or ``recall`` (synthetic; with options: ``recall:pairs=4,seed=1``).
            Default: ``stdlib`` if neither path nor store is given.
        path: Text: a UTF-8 file, a folder, or a glob.
        store: Folder of the token store. If it does not exist, it is prepared from the path or corpus given with it; a
            corpus in a config does not count. Default: a folder in ``stores``, named after text and tokenizer.
        tokenizer: ``char``, ``byte``, ``bpe`` (trained on the text) or the path of a ``tokenizer.json``.
        vocab_size: Number of token ids of ``bpe``, or of the files that ``raw_dtype`` reads.
        context_length: Tokens per window.
        global_batch_size: Windows per optimizer step, over all devices; determines gradient accumulation.
        micro_batch_size: Windows per forward pass of one device. Default: all of the device's share of a step.
        seed: Seed of the order of the training windows.
        eval_batch_size: Windows per forward pass of one device in validation and test. Default: the micro-batch size.
        eval_context_length: Tokens per window in validation and test. Default: ``context_length``.
        num_workers: Processes that read training batches ahead. 0, reading in the training process, is fast enough.
        raw_dtype: ``uint16`` or ``uint32``: ``store`` has plain train.bin and val.bin, as nanoGPT writes them.
        predict_prompts: Texts that ``predict`` continues.
        mixture: Instead of one store: folders of prepared stores, each with its share of the training sequences, such
            as ``{stores/web: 0.7, stores/code: 0.3}``. They must have been made with one tokenizer. One with a share of
            0 is validated, and not trained on.
        document_mask: Keep attention and positions within each document; batches then have ``"documents"``. A document
            begins with the end-of-text token before it.

    Attributes:
        accumulation: Micro-batches per optimizer step, known after ``setup``.
        loaded_state: This module's state in the checkpoint that the run was resumed from; empty otherwise.

    Raises:
        ValueError: If a number is out of range; by ``setup``, if store, batch sizes and devices do not fit together.
    """

    def __init__(
        self,
        corpus: str | None = None,
        path: str | None = None,
        store: str | None = None,
        tokenizer: str = DEFAULT_TOKENIZER,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        context_length: int = CONTEXT_LENGTH,
        global_batch_size: int = GLOBAL_BATCH_SIZE,
        micro_batch_size: int | None = None,
        seed: int = 1337,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        raw_dtype: str | None = None,
        predict_prompts: list[str] | None = None,
        mixture: dict[str, float] | None = None,
        document_mask: bool = False,
        eval_context_length: int | None = None,
    ) -> None:
        super().__init__()
        text = {"corpus": corpus, "path": path, "store": store, "tokenizer": tokenizer, "vocab_size": vocab_size}
        self._text: dict[str, Any] = text
        self.context_length = context_length
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.seed = seed
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.raw_dtype = raw_dtype
        self.predict_prompts = predict_prompts
        self.mixture = mixture
        self.document_mask = document_mask
        self.eval_context_length = eval_context_length
        self.accumulation = 1
        self.loaded_state: dict[str, Any] = {}
        self._bytes: dict[Any, list[float | None]] = {}  # per validated token of each source, by limit
        raise_all(self._option_problems())

    def _option_problems(self) -> Iterator[str]:
        derived = ("micro_batch_size", "eval_batch_size", "eval_context_length")
        for name in ("context_length", "global_batch_size", *derived):
            size = getattr(self, name)
            is_derived = size is None and name in derived
            if not is_derived and (not size or size < 1):
                yield f"{name} must be at least 1, got {size}"
        vocab_size, path, store = (self._text[name] for name in ("vocab_size", "path", "store"))
        if self.num_workers < 0:
            yield f"num_workers must be at least 0, got {self.num_workers}"
        if not 0 < vocab_size <= LARGEST_VOCABULARY:
            yield f"vocab_size must be at least 1 and at most {LARGEST_VOCABULARY}, got {vocab_size}"
        if self.raw_dtype is not None and store is None:
            yield "raw_dtype needs store, the folder with train.bin and val.bin"
        if self.mixture is not None and (path, store, self.raw_dtype) != (None, None, None):
            yield "mixture names the stores: leave out path, store and raw_dtype"

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that may change a result, by name."""
        names = ("context_length", "global_batch_size", "micro_batch_size", "seed", "eval_batch_size", "raw_dtype")
        more = ("mixture", "document_mask", "eval_context_length")
        return {**self._text, **{name: getattr(self, name) for name in (*names, *more)}}

    # ---- stores and their properties

    @functools.cached_property
    def sources(self) -> list[MixtureSource]:
        """The token stores, opened (and prepared, if needed) on first use. Errors as in ``setup``."""
        if self.mixture is not None:
            return open_mixture(self.mixture)
        if self.raw_dtype is not None:
            folder, vocab_size = self._text["store"], self._text["vocab_size"]
            store = TokenStore.open_raw(folder, vocab_size=vocab_size, dtype=self.raw_dtype)
        else:
            prepare = getattr(self.trainer, "local_rank", 0) == 0  # the first process of each machine, before others
            store = find_or_prepare(**self._text, prepare=prepare, progress=True, log=self._print)
        return [MixtureSource(store.path.name, store)]

    @rank_zero_only
    def _print(self, line: str) -> None:
        """Prints a line. In an evaluation, standard output is for the results alone."""
        evaluates = self.trainer is not None and self.trainer.state.fn not in (None, "fit")
        print(line, file=sys.stderr if evaluates else sys.stdout, flush=True)

    @property
    def store(self) -> TokenStore:
        """The token store; of a mixture the first."""
        return self.sources[0].store

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the store."""
        return self.store.vocab_size

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the store; ``None`` for raw files, which have none."""
        return open_tokenizer(self.store)

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes per token of the (first) validation split, for bits per byte; ``None`` for raw files."""
        return self.store.bytes_per_token("val")

    @property
    def eval_length(self) -> int:
        """Tokens per window in validation and test."""
        return self.eval_context_length or self.context_length

    @property
    def tokens_per_step(self) -> int:
        """Targets of one optimizer step."""
        return self.global_batch_size * self.context_length

    @property
    def steps_per_epoch(self) -> int:
        """Whole optimizer steps in the windows of one epoch, at least 1."""
        windows = sum(source.windows(self.context_length) for source in self.sources)
        return max(1, windows // self.global_batch_size)

    @property
    def position(self) -> int:
        """Completed optimizer steps: Lightning's own count, saved and restored with its loops."""
        if self.trainer is not None:
            return self.trainer.global_step
        return int(self.loaded_state.get("optimizer_steps", 0))

    # ---- prepare_data and setup

    def prepare_data(self) -> None:
        """Prepares the store if it is missing. Lightning calls it in one process per node."""
        _ = self.sources

    def setup(self, stage: str | None = None) -> None:
        """Opens the store and checks it against the options.

        Raises:
            ValueError: If a store is damaged, a split is shorter than one window, ``document_mask`` is set and the
                tokenizer has no end of text, the global batch size is not a multiple of micro-batch size times devices,
                or ``trainer.accumulate_grad_batches`` contradicts it.
        """
        self._document_start()
        for split in _SPLITS.get(stage or "fit", ()):
            self._check_windows(split)
        if stage in (None, "fit", "validate"):
            self._serve_validated(self.trainer)
        if stage in (None, "fit"):
            keep_to_budget = getattr(getattr(self.trainer, "lightning_module", None), "keep_to_budget", None)
            if keep_to_budget is not None:  # it may choose the micro-batch size, which the rest depends on
                keep_to_budget(self, self.trainer)
            self.accumulation = self.micro_batches(self.trainer, self._share().world_size)
            if self.trainer is not None:
                self.trainer.accumulate_grad_batches = self.accumulation

    def problems(self, trainer: Any) -> Iterator[tuple[str, str]]:
        """Errors that ``setup`` and ``train_dataloader`` would raise with this trainer; nothing is started in it.

        Yields:
            A subject, such as ``train`` for the text of that split, and the error.
        """
        checks: dict[str, Callable[[], object]] = {
            "batch": lambda: self.micro_batches(trainer, trainer.world_size),
            "data": lambda: self.sources,
            "documents": self._document_start,
            "train": lambda: self._check_windows("train"),
            "val": lambda: self._check_windows("val"),
            "validation": lambda: self.validated(trainer) if asked_limit(trainer) != 0 else None,
            "epoch": lambda: self._train_length(trainer, self.micro_batches(trainer, trainer.world_size)),
        }
        for subject, check in checks.items():
            try:
                check()
            except ValueError as error:
                yield subject, str(error)
                if subject == "data":  # all others ask the stores
                    return

    def micro_batches(self, trainer: Any, devices: int) -> int:
        """Micro-batches of an optimizer step that these devices share.

        Raises:
            ValueError: They cannot share it, or ``trainer.accumulate_grad_batches`` is another number.
        """
        rows = rows_per_micro_batch(self.global_batch_size, self.micro_batch_size, devices)
        accumulation = self.global_batch_size // (rows * devices)
        if trainer is not None and trainer.accumulate_grad_batches not in (1, accumulation):
            raise ValueError(
                f"trainer.accumulate_grad_batches {trainer.accumulate_grad_batches} contradicts the "
                f"{accumulation} micro-batches that follow from data.global_batch_size: leave it out"
            )
        return accumulation

    def _document_start(self) -> int | None:
        """The end-of-text token if there is a document mask."""
        if not self.document_mask:
            return None
        ends = []
        for store in (source.store for source in self.sources):
            if (end := end_of_documents(store, self.tokenizer)) is None:
                raise ValueError(
                    f"data.document_mask needs an end-of-text token between documents, and {store.path} has none: "
                    "leave the option out, or prepare several documents with tokenizer bpe, or with --end-of-text"
                )
            ends.append(end)
        return ends[0]

    def _share(self) -> Share:
        """This process's share of the data; the same for processes that share one sharded model."""
        trainer = self.trainer
        if trainer is None:
            return Share()
        replicas = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        pin_memory = trainer.strategy.root_device.type == "cuda" and torch.cuda.is_available()
        return Share(replicas["rank"], replicas["num_replicas"], pin_memory)

    # ---- loaders

    def train_dataloader(self) -> TrainBatches:
        """Micro-batches of this process from the current position on.

        Its length counts from the start: of the run if ``trainer.max_steps`` limits it, otherwise of an epoch.

        Raises:
            ValueError: If Lightning would end an epoch within an optimizer step.
        """
        share = self._share()
        length, repeat = self._train_length(self.trainer, self.accumulation)
        return TrainBatches(
            train_reader(self.sources, self.context_length, self._document_start()),
            train_order(self.sources, self.context_length, self.seed).starts,
            global_batch_size=self.global_batch_size,
            micro_batch_size=rows_per_micro_batch(self.global_batch_size, self.micro_batch_size, share.world_size),
            length=length,
            position=lambda: self.position,
            workers=self.num_workers,
            repeat=repeat,
            share=share,
        )

    def _train_length(self, trainer: Any, accumulation: int) -> tuple[int, int]:
        """Micro-batches of the run or of an epoch, and how many of them ``overfit_batches`` repeats."""
        length = self.steps_per_epoch * accumulation
        if trainer is None:
            return length, 0
        if trainer.max_steps > 0 and trainer.max_epochs in (None, -1):
            length = trainer.max_steps * accumulation
        limit = trainer.limit_train_batches
        limited = limited_batches(length, limit)
        if not limited and limit:
            raise ValueError(
                f"trainer.limit_train_batches {limit} of {length} micro-batches is less than one: "
                f"use at least {accumulation}/{length}, or a whole number"
            )
        if limited % accumulation:
            raise ValueError(
                f"trainer.limit_train_batches leaves {limited} micro-batches, which is not a multiple of the "
                f"{accumulation} of an optimizer step: the last step would see a part of its gradient"
            )
        return length, limited if getattr(trainer, "overfit_batches", 0) else 0

    def val_dataloader(self) -> list[EvalBatches]:
        """For each source the validation windows (:meth:`validated`); then as many across its training split.

        With several processes, some batches may have all targets ignored (-100), so that all have the same number.
        """
        share = self._share()
        size = self._eval_batch_size()
        validation, training = [], []
        for source, windows in zip(self.sources, self.validated(self.trainer).of_sources, strict=True):
            served = batches.every_target_once(self._reader(source, "val"), size, share, windows)
            validation.append(served)
            training.append(batches.evenly_spaced(self._reader(source, "train"), served.rows or [], share))
        return validation + training

    def validated(self, trainer: Any) -> Validated:
        """The windows that are validated under ``trainer.limit_val_batches``; without a trainer, all.

        Raises:
            ValueError: Its fraction is less than one window.
        """
        windows = [batches.windows_of(self._reader(source, "val")) for source in self.sources]
        return validated_windows(windows, asked_limit(trainer), self.global_batch_size)

    def validated_bytes(self, trainer: Any) -> list[float | None]:
        """UTF-8 bytes per validated token of each source; ``None`` for raw files."""
        limit = asked_limit(trainer)
        if is_whole(limit):
            return [source.store.bytes_per_token("val") for source in self.sources]
        if limit not in self._bytes:
            of_sources = zip(self.sources, self.validated(trainer).of_sources, strict=True)
            self._bytes[limit] = [self._bytes_of(source, windows) for source, windows in of_sources]
        return self._bytes[limit]

    def _bytes_of(self, source: MixtureSource, windows: Starts) -> float | None:
        """UTF-8 bytes per token of some windows of the validation text."""
        if self.tokenizer is None:
            return None
        context = self.eval_length
        tokens = source.store.tokens("val")
        rows = [tokens[start : start + context + 1] for start in (windows * context).tolist()]
        around, end = self.tokenizer.boundaries, source.store.eos_token_id
        no_text = {*around.before, *around.after, *(() if end is None else (end,))}
        size = text_bytes(self.tokenizer, rows, no_text)
        return size / sum(len(row) - 1 for row in rows)

    def _serve_validated(self, trainer: Any) -> None:
        """Let the data alone limit the validation: Lightning's limit would cut it again, by batches of any size."""
        if trainer is None or (limit := asked_limit(trainer)) == 0:
            return
        validated = self.validated(trainer)
        trainer.limit_val_batches = ServedWindows(limit)
        if trainer.state.fn == "fit":
            self._print(f"Validates {validated.in_words()}.")

    def teardown(self, stage: str) -> None:
        """Give the trainer its limit back: other data may follow."""
        self._give_limit_back()

    def on_exception(self, exception: BaseException) -> None:
        """Give it back after an error, too: then Lightning calls no ``teardown``."""
        self._give_limit_back()

    def _give_limit_back(self) -> None:
        if self.trainer is not None:
            self.trainer.limit_val_batches = asked_limit(self.trainer)

    def test_dataloader(self) -> list[EvalBatches]:
        """For each source, every target of the test split once.

        Raises:
            ValueError: If a store has no test split.
        """
        share = self._share()
        size = self._eval_batch_size()
        return [batches.every_target_once(self._reader(source, "test"), size, share) for source in self.sources]

    def predict_dataloader(self) -> EvalBatches:
        """Each of ``predict_prompts`` as ``{"input_ids": (1, tokens), "prompt": its text}``.

        Raises:
            ValueError: If there are no prompts, or no tokenizer, or it cannot encode one of them.
        """
        if not self.predict_prompts:
            raise ValueError("predict needs data.predict_prompts, the texts to continue")
        if self.tokenizer is None:
            raise ValueError(f"token store {self.store.path} is of raw files: no tokenizer to encode prompts with")
        share = self._share()
        return batches.prompt_batches(self.tokenizer, self.predict_prompts[share.rank :: share.world_size])

    def _reader(self, source: MixtureSource, split: str) -> WindowReader:
        """The windows of an evaluation."""
        return WindowReader(source.store, split, self.eval_length, self._document_start())

    def _check_windows(self, split: str) -> None:
        """Refuse a split that is shorter than a window of it."""
        lengths = {"context_length": self.context_length} if split == "train" else {}
        name = "context_length" if self.eval_context_length is None else "eval_context_length"
        lengths[name] = self.eval_length  # the training text is evaluated too
        for source, (option, length) in itertools.product(self.sources, lengths.items()):
            text = f"the {split} split of {source.store.path}"
            check_window(len(source.store.tokens(split)), length, text, f"data.{option}")

    def _eval_batch_size(self) -> int:
        everything = max(1, self.global_batch_size // self._share().world_size)
        return self.eval_batch_size or self.micro_batch_size or everything

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The data of the run for a checkpoint: plain values, the same in every process."""
        return {
            "optimizer_steps": self.position,
            "accumulation": self.accumulation,
            "global_batch_size": self.global_batch_size,
            "context_length": self.context_length,
            "seed": self.seed,
            "store": fingerprint(self.sources),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state of a checkpoint; the position itself is in Lightning's loops.

        Raises:
            ValueError: If training would continue on other token stores; ``ResumeDiff`` compares other options.
        """
        self.loaded_state = dict(state_dict)
        fitting = self.trainer is not None and self.trainer.state.fn == "fit"
        if fitting and state_dict.get("store") != fingerprint(self.sources):
            paths = " + ".join(str(source.store.path) for source in self.sources)
            raise ValueError(
                f"the checkpoint was trained on token store {state_dict.get('store')}, data.store {paths} is "
                f"{fingerprint(self.sources)}: other text or another tokenizer; use the store that it was trained on"
            )


def data_attribute(data: Any, name: str) -> Any:
    """An attribute of a data module, perhaps of the user's own class; ``None`` if it has none of this name.

    A property of another class may fail before the ``setup`` that makes what it reads.
    """
    if isinstance(data, TokenDataModule):
        return getattr(data, name)
    try:
        return getattr(data, name, None)
    except Exception:
        return None


def tokenizer_of(data: Any) -> Tokenizer | None:
    """The tokenizer of a data module, if it is one that a checkpoint can hold."""
    tokenizer = data_attribute(data, "tokenizer")
    return tokenizer if isinstance(tokenizer, Tokenizer) else None
