"""Batches of windows from a token file: in training order, or one after another for evaluation.

Plain iterables with a length, made for Lightning's loops: it takes them as they are, and adds neither a sampler nor a
warning. A batch is ``{"input_ids", "targets"}``, int64, both (rows, context_length); a target is the token behind its
input. Where documents are told apart it has ``"documents"`` too: their number within the row, for each input.
Assembling one is a single gather from the memory-mapped file (7 µs for 32 x 256 tokens on a server CPU).
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_llm.data.mixture import MixtureOrder, first_tokens, source_slices
from lightning_llm.data.order import WindowOrder
from lightning_llm.data.token_store import Tokens, check_mapped, map_tokens
from lightning_llm.data.tokenizers import Tokenizer

Batch = dict[str, Tensor]
Starts = NDArray[np.int64]

IGNORED = -100  # a target that no loss counts, as in torch.nn.functional.cross_entropy

_SEQUENCES_ORDERED_AT_ONCE = 4096  # the order costs 0.1 ms for 32 sequences and 0.3 ms for 4,096


class WindowReader:
    """Reads windows of a token file. Cheap to send to a worker process: it maps the file where it is used.

    Args:
        file: Raw token ids.
        dtype: ``uint16`` or ``uint32``.
        context_length: Targets per window.
        vocab_size: Ids are checked against it in every batch: beyond it, an embedding fails in riddles on a GPU.
        document_start: The id that begins a document. If given, batches also say which document each token belongs to.
        num_tokens: How many the file must hold when it is mapped. Default: as many as it does.
    """

    def __init__(
        self,
        file: Path,
        *,
        dtype: str,
        context_length: int,
        vocab_size: int,
        document_start: int | None = None,
        num_tokens: int | None = None,
    ) -> None:
        self._file, self._dtype, self._vocab_size, self._num_tokens = file, dtype, vocab_size, num_tokens
        self.context_length, self._document_start = context_length, document_start

    @functools.cached_property
    def tokens(self) -> Tokens:
        """The file, memory-mapped."""
        return map_tokens(self._file, self._dtype, self._num_tokens)

    @functools.cached_property
    def _windows(self) -> Tokens:
        """Every window as a row of a view, (starts, context_length + 1)."""
        return np.lib.stride_tricks.sliding_window_view(self.tokens, self.context_length + 1)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("tokens", "_windows")}

    def __call__(self, starts: Starts) -> Batch:
        """The windows that start at these tokens.

        Raises:
            ValueError: If one of their ids is not in the vocabulary, or the file has become shorter.
        """
        return self.batch(self.rows(starts))

    def rows(self, starts: Starts) -> Tokens:
        """The raw windows, (rows, context_length + 1)."""
        check_mapped(self.tokens, self._file)
        rows: Tokens = self._windows[starts]
        return rows

    def tail(self, start: int) -> Batch:
        """What follows the last whole window, as a batch of one shorter row."""
        check_mapped(self.tokens, self._file)
        return self.batch(self.tokens[start:][None])

    def batch(self, rows: Tokens) -> Batch:
        """Raw windows as tensors. Errors as in calling."""
        if (largest := int(rows.max())) >= self._vocab_size:
            raise ValueError(
                f"{self._file} holds token id {largest}, but vocab_size is {self._vocab_size}: prepare the store again"
            )
        batch = {
            "input_ids": torch.from_numpy(rows[:, :-1].astype(np.int64)),
            "targets": torch.from_numpy(rows[:, 1:].astype(np.int64)),
        }
        if self._document_start is not None:
            batch["documents"] = (batch["input_ids"] == self._document_start).cumsum(1)
        return batch


class MixtureReader:
    """Reads windows of several token files that are addressed as if they lay end to end.

    Args:
        readers: Of each file; their windows are of one length and vocabulary.
        sizes: Tokens of each file.
    """

    def __init__(self, readers: Sequence[WindowReader], sizes: Sequence[int]) -> None:
        self._readers, self._first_tokens = list(readers), first_tokens(sizes)

    def __call__(self, starts: Starts) -> Batch:
        """The windows that start at these positions. Errors as of :class:`WindowReader`."""
        first = self._readers[0]
        rows = np.empty((len(starts), first.context_length + 1), dtype=first.tokens.dtype)
        for number, here in enumerate(source_slices(starts, self._first_tokens)):
            if here.size:
                rows[here] = self._readers[number].rows(starts[here] - self._first_tokens[number])
        return first.batch(rows)


class TrainBatches(Dataset[Batch]):
    """The micro-batches of one rank, in the order of the run.

    Of the sequences of an optimiser step, micro-batch ``m`` of rank ``r`` takes ``micro_batch_size`` in a row, from
    number ``(m * world_size + r) * micro_batch_size`` on. Together all ranks and micro-batches take each once.

    Args:
        reader: Of the training tokens.
        order: Of their windows.
        global_batch_size: Sequences per optimiser step.
        micro_batch_size: Sequences per batch.
        rank: Number of this process.
        world_size: Number of processes.
        length: Micro-batches from the start of the run (or of Lightning's epoch) to its end, however many of them are
            past: Lightning adds what is past to what it fetches, and compares with this.
        position: Asked at the start of each iteration: optimiser steps that are past.
        workers: Processes that read ahead; 0 reads in this one.
        pin_memory: Put batches where a GPU can fetch them while it computes.
        repeat: Go through the first ``repeat`` micro-batches again and again (Lightning's ``overfit_batches``); 0: not.

    Attributes:
        waited_s: Seconds that iterating took so far: what training had to wait for its data.
    """

    def __init__(
        self,
        reader: WindowReader | MixtureReader,
        order: WindowOrder | MixtureOrder,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        length: int,
        position: Callable[[], int],
        workers: int = 0,
        pin_memory: bool = False,
        repeat: int = 0,
    ) -> None:
        self._reader, self._order, self._length, self._position = reader, order, length, position
        self._global, self._micro, self._rank, self._world = global_batch_size, micro_batch_size, rank, world_size
        self._accumulation = global_batch_size // (micro_batch_size * world_size)
        self._workers, self._pin_memory, self._repeat = workers, pin_memory, repeat
        self.waited_s = 0.0
        self._ordered: tuple[int, Starts] = (-1, np.empty((0, 0), dtype=np.int64))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        first = 0 if self._repeat else self._position() * self._accumulation
        numbers = range(first, first + self._length)  # Lightning stops where its count says
        batches: Iterator[Batch] = (_pinned(self[number]) if self._pin_memory else self[number] for number in numbers)
        if self._workers:
            workers, pin = self._workers, self._pin_memory
            batches = iter(DataLoader(self, batch_size=None, sampler=numbers, num_workers=workers, pin_memory=pin))
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            self.waited_s += time.perf_counter() - before
            if batch is None:
                return
            yield batch

    def __getitem__(self, number: int) -> Batch:
        """Micro-batch ``number`` of the run."""
        step, micro = divmod(number % self._repeat if self._repeat else number, self._accumulation)
        start = (micro * self._world + self._rank) * self._micro
        return self._reader(self._starts(step)[start : start + self._micro])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_position": None}  # only iterating asks it, and it reaches into the trainer

    def _starts(self, step: int) -> Starts:
        """Window starts of an optimiser step, (global_batch_size,)."""
        steps = max(1, _SEQUENCES_ORDERED_AT_ONCE // self._global)
        block, row = divmod(step, steps)
        if self._ordered[0] != block:
            starts = self._order.starts(block * steps * self._global, steps * self._global)
            self._ordered = block, starts.reshape(steps, self._global)
        starts_of_step: Starts = self._ordered[1][row]
        return starts_of_step

    def state_dict(self) -> dict[str, Any]:
        """Empty: says to Lightning that resuming is taken care of (the position comes from its own counters)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


class EvalBatches:
    """One rank's share of the batches of an evaluation.

    Each rank has equally many, since a model that is spread over ranks must be run by all of them together: where there
    are not enough, a rank runs the first batch once more with every target ignored.

    Args:
        batches: Makes batch number ``n`` of all ranks together.
        count: How many there are.
        rank: Number of this process.
        world_size: Number of processes.
        pin_memory: Put batches where a GPU can fetch them while it computes.
    """

    def __init__(
        self, batches: Callable[[int], Batch], count: int, *, rank: int, world_size: int, pin_memory: bool = False
    ) -> None:
        self._batches, self._count, self._rank, self._world = batches, count, rank, world_size
        self._pin_memory = pin_memory

    def __len__(self) -> int:
        return -(-self._count // self._world)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self._rank, len(self) * self._world, self._world):
            batch = self._batches(number if number < self._count else 0)
            if number >= self._count:
                batch = {**batch, "targets": torch.full_like(batch["targets"], IGNORED)}
            yield _pinned(batch) if self._pin_memory else batch


class PromptBatches:
    """Prompts as batches of one row: ``{"input_ids": (1, tokens), "prompt": text}``.

    Args:
        tokenizer: Encodes them.
        prompts: Texts; an empty one starts from the end-of-text token.

    Raises:
        ValueError: If the tokenizer cannot encode one, or has nothing to start an empty one from.
    """

    def __init__(self, tokenizer: Tokenizer, prompts: list[str]) -> None:
        self._batches = []
        for prompt in prompts:
            ids = tokenizer.encode(prompt)
            if not ids:
                if tokenizer.eos_token_id is None:
                    raise ValueError(f"an empty prompt needs end of text, which tokenizer {tokenizer.kind!r} lacks")
                ids = [tokenizer.eos_token_id]
            self._batches.append({"input_ids": torch.tensor([ids]), "prompt": prompt})

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._batches)


def every_target_once(reader: WindowReader, batch_size: int, **share: Any) -> EvalBatches:
    """Windows one after another: each of the ``tokens - 1`` targets is in exactly one batch of exactly one rank.

    The last batch of whole windows may have fewer rows; a rest shorter than a window comes last, as one short row.

    Args:
        reader: Of the tokens.
        batch_size: Windows per batch.
        **share: ``rank``, ``world_size`` and ``pin_memory`` of :class:`EvalBatches`.
    """
    context, num_windows = reader.context_length, (len(reader.tokens) - 1) // reader.context_length
    starts = np.arange(num_windows, dtype=np.int64) * context

    def batch(number: int) -> Batch:
        rows = starts[number * batch_size : (number + 1) * batch_size]
        return reader(rows) if len(rows) else reader.tail(num_windows * context)

    return EvalBatches(batch, len(rows_per_batch(reader, batch_size)), **share)


def evenly_spaced(reader: WindowReader, rows: list[int], *, used: int | None = None, **share: Any) -> EvalBatches:
    """Windows from fixed places, spread evenly over the file: an estimate over all of it.

    Args:
        reader: Of the tokens.
        rows: Windows of each batch, such as :func:`rows_per_batch` of another split.
        used: How many of the batches will be used: they are spread evenly, and so is what follows them.
        **share: As in :func:`every_target_once`.
    """
    last = len(reader.tokens) - 1 - reader.context_length
    places = [np.linspace(0, last, sum(part)).astype(np.int64) for part in (rows[:used], rows[used:] if used else [])]
    starts = np.split(np.concatenate(places), np.cumsum(rows)[:-1])
    return EvalBatches(lambda number: reader(starts[number]), len(rows), **share)


def rows_per_batch(reader: WindowReader, batch_size: int) -> list[int]:
    """Rows of each batch of :func:`every_target_once`, of all ranks together."""
    windows, over = divmod(len(reader.tokens) - 1, reader.context_length)
    rows = [min(batch_size, windows - first) for first in range(0, windows, batch_size)]
    return rows + [1] * (over > 0)


def _pinned(batch: Batch) -> Batch:
    return {name: ids.pin_memory() for name, ids in batch.items()}
