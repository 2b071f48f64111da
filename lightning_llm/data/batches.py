"""Batches of windows from a token file: in training order, one after another for evaluation, or at random.

1. :class:`WindowReader` reads windows of one file. A batch is ``{"input_ids", "targets"}``, int64, both
   (rows, context_length); a target is the token after its input. With a document mask it also has ``"documents"``: for
   each input, the index of its document within the row. Assembling a batch is a single gather from the memory-mapped
   file (7 µs for 32 x 256 tokens on a server CPU).
2. :class:`TrainBatches` and :class:`EvalBatches` are plain iterables with a length, made for Lightning's loops: it
   takes them as they are, and adds neither a sampler nor a warning.
3. :func:`sample_batch` draws random windows, for raw training loops without an order.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_llm.data.order import check_window
from lightning_llm.data.token_store import Tokens, TokenStore, check_mapped
from lightning_llm.data.tokenizers import Tokenizer

Batch = dict[str, Tensor]
Starts = NDArray[np.int64]

IGNORED = -100  # a target that no loss counts, as in torch.nn.functional.cross_entropy

_SEQUENCES_ORDERED_AT_ONCE = 4096  # or one micro-batch: the order costs 0.1 ms for 32 sequences and 0.3 ms for 4,096


@dataclasses.dataclass(eq=False)
class WindowReader:
    """Reads windows of a split. Cheap to send to a worker process, which maps the file itself.

    Args:
        store: The token store.
        split: Name of the split.
        context_length: Targets per window.
        document_start: The id that begins a document. If given, batches also say which document each token belongs to.

    Raises:
        ValueError: If there is no such split, or it is shorter than one window and its last target.
    """

    store: TokenStore
    split: str
    context_length: int
    document_start: int | None = None

    def __post_init__(self) -> None:
        tokens = len(self.store.tokens(self.split))
        check_window(tokens, self.context_length, f"the {self.split} split of {self.store.path}")

    @functools.cached_property
    def tokens(self) -> Tokens:
        """The token ids of the split, memory-mapped."""
        return self.store.tokens(self.split)

    @functools.cached_property
    def _windows(self) -> Tokens:
        """Every window as a row of a view, (starts, context_length + 1)."""
        return np.lib.stride_tricks.sliding_window_view(self.tokens, self.context_length + 1)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("tokens", "_windows")}

    def __call__(self, starts: Starts) -> Batch:
        """The windows that start at these tokens.

        Raises:
            ValueError: If one of their ids is not in the vocabulary, or the file was truncated.
        """
        return self.batch(self.rows(starts))

    def rows(self, starts: Starts) -> Tokens:
        """The raw windows, (rows, context_length + 1)."""
        check_mapped(self.tokens, self.store.file(self.split))
        rows: Tokens = self._windows[starts]
        return rows

    def tail(self, start: int) -> Batch:
        """The tokens from ``start`` to the end, as a batch of one row."""
        check_mapped(self.tokens, self.store.file(self.split))
        return self.batch(self.tokens[start:][None])

    def batch(self, rows: Tokens) -> Batch:
        """Raw windows as tensors. Errors as in :meth:`__call__`."""
        if (largest := int(rows.max())) >= self.store.vocab_size:  # an embedding's error on a GPU would be obscure
            file = self.store.file(self.split)
            size = self.store.vocab_size
            raise ValueError(f"{file} has token id {largest}, but vocab_size is {size}: prepare it again")
        input_ids, targets = (torch.from_numpy(ids.astype(np.int64)) for ids in (rows[:, :-1], rows[:, 1:]))
        batch = {"input_ids": input_ids, "targets": targets}
        if self.document_start is not None:
            batch["documents"] = (input_ids == self.document_start).cumsum(1)
        return batch


@dataclasses.dataclass(frozen=True)
class Share:
    """Share of a process in the batches.

    Attributes:
        rank: Of this process.
        world_size: Number of processes.
        pin_memory: Copy batches to pinned memory, so that a GPU can fetch them while it computes.
    """

    rank: int = 0
    world_size: int = 1
    pin_memory: bool = False


@dataclasses.dataclass(eq=False)
class TrainBatches(Dataset[Batch]):
    """The micro-batches of one rank, in the order of the run.

    Of the sequences of an optimizer step, micro-batch ``m`` of rank ``r`` takes ``micro_batch_size`` in a row, from
    number ``(m * world_size + r) * micro_batch_size`` on. Together all ranks and micro-batches take each once.

    Args:
        reader: Reads the windows that start at given tokens.
        starts: Returns the windows of ``count`` sequences from number ``first`` on, as ``WindowOrder.starts``.
        global_batch_size: Sequences per optimizer step.
        micro_batch_size: Sequences per batch.
        length: Micro-batches from the start of the run (or of Lightning's epoch) to its end, including the completed
            ones: Lightning adds the completed ones to those it fetches, and compares with this.
        position: Called at the start of each iteration; returns the number of completed optimizer steps.
        share: Of this process.
        workers: Processes that read ahead; 0 reads in this one.
        repeat: Repeat the first ``repeat`` micro-batches (Lightning's ``overfit_batches``); 0: never.

    Attributes:
        waited_s: Seconds that training has waited for data so far.
    """

    reader: Callable[[Starts], Batch]
    starts: Callable[[int, int], Starts]
    _: dataclasses.KW_ONLY
    global_batch_size: int
    micro_batch_size: int
    length: int
    position: Callable[[], int] | None
    share: Share = Share()
    workers: int = 0
    repeat: int = 0

    def __post_init__(self) -> None:
        self.waited_s = 0.0
        self._ordered: tuple[int, Starts] = (-1, np.empty(0, dtype=np.int64))  # number of a block, and its windows

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        assert self.position is not None
        accumulation = self.global_batch_size // (self.micro_batch_size * self.share.world_size)
        first = 0 if self.repeat else self.position() * accumulation
        numbers = range(first, first + self.length)  # Lightning stops by its own count
        batches: Iterator[Batch] = (_pinned(self[number], self.share.pin_memory) for number in numbers)
        if self.workers:
            options: dict[str, Any] = {"num_workers": self.workers, "pin_memory": self.share.pin_memory}
            batches = iter(DataLoader(self, batch_size=None, sampler=numbers, **options))
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            self.waited_s += time.perf_counter() - before
            if batch is None:
                return
            yield batch

    def __getitem__(self, number: int) -> Batch:
        """Micro-batch ``number`` of the run."""
        number = number % self.repeat if self.repeat else number
        size = self.micro_batch_size * max(1, _SEQUENCES_ORDERED_AT_ONCE // self.micro_batch_size)
        block, first = divmod((number * self.share.world_size + self.share.rank) * self.micro_batch_size, size)
        if self._ordered[0] != block:
            self._ordered = block, self.starts(block * size, size)
        return self.reader(self._ordered[1][first : first + self.micro_batch_size])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "position": None}  # used only for iterating, and it refers to the trainer

    def state_dict(self) -> dict[str, Any]:
        """Empty: tells Lightning that the loader can resume (its position comes from Lightning's own counters)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the state is empty."""


@dataclasses.dataclass(eq=False)
class EvalBatches:
    """One rank's batches of an evaluation.

    All ranks have the same number of batches, since a sharded model must be run by all of them together. A rank with
    too few runs the first batch again with every target ignored.

    Args:
        batches: Returns a batch by its number among the ``count`` batches of all ranks together.
        count: Number of batches of all ranks together.
        share: Of this process.
        rows: Rows of each batch of all ranks together, if the rows follow each other in the text.
    """

    batches: Callable[[int], Batch]
    count: int
    share: Share
    rows: list[int] | None = None

    def __len__(self) -> int:
        return -(-self.count // self.share.world_size)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.share.rank, len(self) * self.share.world_size, self.share.world_size):
            batch = self.batches(number if number < self.count else 0)
            if number >= self.count:
                batch = {**batch, "targets": torch.full_like(batch["targets"], IGNORED)}
            yield _pinned(batch, self.share.pin_memory)


def prompt_batches(tokenizer: Tokenizer, prompts: list[str]) -> EvalBatches:
    """Prompts as batches of one row, ``{"input_ids": (1, tokens), "prompt": text}``. An empty one is the end of text.

    Raises:
        ValueError: If the tokenizer cannot encode a prompt, or a prompt is empty and there is no end-of-text token.
    """
    batches: list[dict[str, Any]] = []
    for prompt in prompts:
        ids = tokenizer.encode_prompt(prompt)
        if not ids and tokenizer.eos_token_id is None:
            raise ValueError(f"an empty prompt needs end of text, which tokenizer {tokenizer.kind!r} lacks")
        batches.append({"input_ids": torch.tensor([ids or [tokenizer.eos_token_id]]), "prompt": prompt})
    return EvalBatches(lambda number: batches[number], len(batches), Share())


def every_target_once(
    reader: WindowReader, batch_size: int, share: Share, windows: Starts | None = None
) -> EvalBatches:
    """Windows one after another: each of the ``tokens - 1`` targets is in exactly one batch of exactly one rank.

    The last batch of whole windows may have fewer rows. A remainder shorter than a window comes last, as one short row.

    Args:
        reader: Of the text.
        batch_size: Rows per batch.
        share: Of this process.
        windows: The numbers of the windows to serve, ascending. ``None``: all of the :func:`windows_of` text.
    """
    context = reader.context_length
    whole = (len(reader.tokens) - 1) // reader.context_length
    numbers = np.arange(windows_of(reader), dtype=np.int64) if windows is None else windows
    starts = numbers[numbers < whole] * context

    def batch(number: int) -> Batch:
        rows = starts[number * batch_size : (number + 1) * batch_size]
        return reader(rows) if len(rows) else reader.tail(whole * context)

    rows = [min(batch_size, len(starts) - first) for first in range(0, len(starts), batch_size)]
    rows += [1] * (len(starts) < len(numbers))
    return EvalBatches(batch, len(rows), share, rows)


def evenly_spaced(reader: WindowReader, rows: list[int], share: Share) -> EvalBatches:
    """Windows at fixed positions, spread evenly over the file: an estimate for all of it.

    Batch ``n`` has ``rows[n]`` windows, such as the ``rows`` of :func:`every_target_once` of another split.
    """
    last = len(reader.tokens) - 1 - reader.context_length
    starts = np.split(np.linspace(0, last, sum(rows)).astype(np.int64), np.cumsum(rows)[:-1])
    return EvalBatches(lambda number: reader(starts[number]), len(rows), share)


def windows_of(reader: WindowReader) -> int:
    """How many windows hold each target once; the last one may be shorter."""
    return -(-(len(reader.tokens) - 1) // reader.context_length)


def limited_batches(length: int, limit: int | float) -> int:
    """Batches that Lightning uses under one of its ``limit_*_batches``: an int is a number, a float is a share."""
    return min(length, limit) if isinstance(limit, int) else int(length * limit)


def _pinned(batch: Batch, pin_memory: bool) -> Batch:
    return {name: ids.pin_memory() for name, ids in batch.items()} if pin_memory else batch


def sample_batch(
    tokens: NDArray[np.integer[Any]] | Tensor,
    batch_size: int,
    context_length: int,
    device: str | torch.device,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Random windows: each start is equally likely, drawn with replacement.

    Args:
        tokens: Ids, shape (tokens,), of any integer type; of a memory map only the windows are read.
        batch_size: Number of windows.
        context_length: Tokens per window.
        device: Device of the batch, such as ``cpu`` or ``cuda:0``.
        generator: Source of the starts. ``None``: torch's global generator.

    Returns:
        Inputs and targets, int64, both of shape (batch_size, context_length); a target is the token after its input.

    Raises:
        ValueError: If there is no window: fewer than ``context_length + 1`` tokens.
    """
    num_starts = len(tokens) - context_length
    if num_starts < 1 or context_length < 1 or batch_size < 1:
        raise ValueError(
            f"cannot take {batch_size} windows of context_length {context_length} from {len(tokens)} tokens: "
            f"both must be at least 1, and a window with its last target needs {context_length + 1} tokens"
        )
    where = generator.device if generator is not None else torch.device("cpu")
    starts = torch.randint(num_starts, (batch_size, 1), generator=generator, device=where).cpu()
    places = starts + torch.arange(context_length + 1)  # (batch, seq + 1)
    if isinstance(tokens, Tensor):
        windows = tokens[places.to(tokens.device)].long()
    else:
        windows = torch.from_numpy(np.asarray(tokens[places.numpy()]).astype(np.int64))
    windows = windows.to(device)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
