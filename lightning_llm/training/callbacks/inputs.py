"""Hashes of what a run really used: its initial values and its batches. Runs with equal ones can be compared in pairs.

``summary.json`` has them:

``initial_values``      for each parameter its shape, its dtype, and 16 digits of the SHA-256 of its bytes before the
                        first step
``initial_rules``       the parameters that the constructor of a custom part set (``kept``), and those that start
                        smaller since they write to the residual stream (``residual``)
``initial_scales``      by role of a matrix, its scale and the number of its elements (``model.initial_scales``)
``batches``             of the token ids and targets of all training sequences so far, each with its number in the run;
                        of batches of another form, of all tensors of each batch
``batches_at``          the same after certain steps, and at the end: two runs of other lengths can compare their common
                        part
``validation_batches``  of those of the last validation, in any order

A hash of batches is the sum of a 64-bit hash of each sequence, modulo 2^64 (an incremental hash: Bellare and Micciancio
1997). Sums of parts of a run add up, so the hash does not depend on micro-batches or processes, and a resumed run has
the hash of an uninterrupted one: checkpoints contain the sum. It is computed on the device and read at a save; on a CPU
by NumPy, for several small batches together. SHA-256 reads 1 GB of weights per second. It finds accidental differences,
and is no protection against forgery.

The steps of ``batches_at`` depend on nothing but the step that the run has reached (:func:`is_kept`), so that an
interrupted and resumed run has the same ones. Any two runs share the powers of two; if one is at most twice as long as
the other, they share a step in the last eighth of the shorter one. Nothing is read from the device until a save.
"""

import hashlib
import itertools
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_llm.checkpoints.loop_state import micro_batch_of_step, step_is_complete
from lightning_llm.data.batches import IGNORED
from lightning_llm.model.initial_scales import initial_rules, initial_scales
from lightning_llm.model.transformer import Transformer
from lightning_llm.statistics.pairing import (
    BATCHES,
    BATCHES_AT,
    INITIAL_RULES,
    INITIAL_SCALES,
    INITIAL_VALUES,
    VALIDATION_BATCHES,
)

WAITING = 1 << 14  # tokens of small batches that are hashed together
MULTIPLES = 32  # a power of two: at most so many evenly spaced steps have a hash

# The constants of SplitMix64 (Steele, Lea and Flood 2014, figure 16), as signed numbers
_GOLDEN, _FIRST, _SECOND = (bits - (1 << 64) for bits in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class InputHashes(Callback):
    """Records the hashes of initial values and batches, for ``summary.json`` and across resumes.

    Attributes:
        initial_values: For each parameter by name; ``None`` if they are not known.
        initial_rules: By name, ``kept`` or ``residual``; all others follow the table. ``None`` if they are not known.
        initial_scales: By role, scale and number of elements.
        batches: Of the training batches, known at the end of training; ``None`` if they cannot be hashed.
        batches_at: Of the training batches up to some of the steps, as of the last save.
        validation_batches: Of the last validation.
    """

    def __init__(self) -> None:
        self.initial_values: dict[str, str] | None = None
        self.initial_rules: dict[str, str] | None = None
        self.initial_scales: dict[str, list[float]] = {}
        self.batches: str | None = None
        self.batches_at: dict[int, str] = {}
        self.validation_batches: str | None = None
        self._sum: Tensor | None = None  # of the completed steps; of all processes together or of this one
        self._at: dict[int, Tensor] = {}  # sums after certain steps that no save has read yet
        self._step: Tensor | None = None  # of the step in progress, which a resumed run starts again
        self._waiting: list[tuple[Any, ...]] = []  # token ids, targets and numbers of batches without a hash yet
        self._completed = 0  # how many of these are of completed steps
        self._validation: Tensor | int | None = None
        self._weights: dict[tuple[int, torch.device], Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hash the initial values; in a resumed run, continue the sum of its checkpoint."""
        if trainer.global_step == 0:
            self.initial_values = {name: tensor_hash(value) for name, value in pl_module.named_parameters()}
            self._describe_initial_values(pl_module)
            self._sum = torch.zeros((), dtype=torch.int64, device=pl_module.device)
            self.batches_at = {}
        elif self.batches is not None:
            of_all = int.from_bytes(bytes.fromhex(self.batches), "big", signed=True) if trainer.is_global_zero else 0
            self._sum = torch.tensor(of_all, device=pl_module.device)
        self._step = None
        self._at = {}
        self._waiting = []
        self._completed = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Add the sequences of this micro-batch, each with its number in the run."""
        if self._sum is None:
            return
        replicas = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        micro = trainer.global_step * trainer.accumulate_grad_batches + micro_batch_of_step(trainer)
        if (parts := _parts(batch)) is None:
            number = micro * replicas["num_replicas"] + replicas["rank"]
            self._add_other(_hash_of_other(batch, number), pl_module.device)
            return
        ids, targets = parts
        first = (micro * replicas["num_replicas"] + replicas["rank"]) * len(ids)
        if ids.device.type == "cpu" and ids.numel() < WAITING:  # copied, since the user's code may change the batch
            self._waiting.append((ids.numpy().copy(), targets.numpy().copy(), np.arange(first, first + len(ids))))
        else:
            hashes = self._hash(ids, targets, torch.arange(first, first + len(ids), device=ids.device))
            self._step = hashes if self._step is None else self._step + hashes

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """At the end of a step, its batches count."""
        if self._sum is None or not step_is_complete(trainer):
            return
        if self._step is not None:
            self._sum = self._sum + self._step
            self._step = None
        self._completed = len(self._waiting)
        is_wanted = is_kept(step := trainer.global_step, step)
        if is_wanted or (self._waiting and self._completed * self._waiting[0][0].size >= WAITING):
            self._hash_waiting()
        if is_wanted:
            self._at = {place: part for place, part in self._at.items() if is_kept(place, step)}
            self._at[step] = self._sum

    def _add_other(self, hashes: Tensor | None, device: torch.device) -> None:
        """Add the hash of a batch of another form; without one, those of the run are not known."""
        if hashes is None:
            self._sum = self.batches = None
        else:
            hashes = hashes.to(device)
            self._step = hashes if self._step is None else self._step + hashes

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batches = self._read_training(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation = 0

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._validation is not None:
            parts = _parts(batch)
            hashes = _hash_of_other(batch) if parts is None else self._hash(*parts)
            self._validation = None if hashes is None else self._validation + hashes.to(pl_module.device)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        hashes = self._validation
        self.validation_batches = self._read(trainer, [hashes])[0] if isinstance(hashes, Tensor) else None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the sum of the completed steps, the same in every process."""
        if self.initial_values is not None and (batches := self._read_training(trainer)) is not None:
            at = {str(step): value for step, value in self.batches_at.items()}
            state = {INITIAL_VALUES: self.initial_values, BATCHES: batches, BATCHES_AT: at}
            if self.initial_rules is not None:
                state |= {INITIAL_RULES: self.initial_rules, INITIAL_SCALES: self.initial_scales}
            checkpoint["callbacks"][self.state_key] = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.initial_values = state_dict[INITIAL_VALUES]
        self.batches = state_dict[BATCHES]
        self.batches_at = {int(step): value for step, value in state_dict.get(BATCHES_AT, {}).items()}
        self.initial_rules = state_dict.get(INITIAL_RULES)
        self.initial_scales = state_dict.get(INITIAL_SCALES, {})

    def record(self, steps: int) -> dict[str, Any]:
        """The hashes for ``summary.json``.

        Args:
            steps: Optimizer steps of the run.
        """
        fields = (INITIAL_VALUES, INITIAL_RULES, INITIAL_SCALES, BATCHES, VALIDATION_BATCHES)
        hashes = {name: getattr(self, name) for name in fields}
        if self.batches is None:
            return {**hashes, BATCHES_AT: None}
        return {**hashes, BATCHES_AT: {str(step): at for step, at in {**self.batches_at, steps: self.batches}.items()}}

    def _describe_initial_values(self, module: Any) -> None:
        transformer = getattr(module, "transformer", None)
        if isinstance(transformer, Transformer):
            self.initial_rules = {f"transformer.{name}": rule for name, rule in initial_rules(transformer).items()}
            is_loaded = getattr(module, "init_from", None) is not None
            scales = initial_scales(transformer, transformer.config, is_loaded=is_loaded)
            self.initial_scales = {role: list(scale) for role, scale in scales.items()}

    def _hash_waiting(self) -> None:
        """Add the batches of completed steps that wait."""
        completed = self._waiting[: self._completed]
        self._waiting = self._waiting[self._completed :]
        self._completed = 0
        for _, alike in itertools.groupby(completed, lambda parts: parts[0].shape[1]):
            hashes = self._hash(*(torch.from_numpy(np.concatenate(part)) for part in zip(*alike, strict=True)))
            self._sum = hashes if self._sum is None else self._sum + hashes

    def _hash(self, ids: Tensor, targets: Tensor, numbers: Tensor | None = None) -> Tensor:
        """The sum of the hashes of sequences.

        Args:
            ids: (rows, seq).
            targets: (rows, seq).
            numbers: Of the sequences in the run. ``None``: the order does not count, nor do rows without any target.
        """
        operands: list[Any] = [ids, targets, *self._weights_of(ids.shape[1], ids.device), numbers]
        is_on_cpu = ids.device.type == "cpu"
        if is_on_cpu:
            operands = [None if operand is None else operand.numpy() for operand in operands]
        ids, targets, of_ids, of_targets, numbers = operands
        hashes = _mixed((ids * of_ids + targets * of_targets).sum(1) + (0 if numbers is None else numbers * _GOLDEN))
        if numbers is None:
            hashes = hashes * (targets != IGNORED).any(1)
        return torch.from_numpy(hashes.sum(keepdims=True))[0] if is_on_cpu else hashes.sum()

    def _weights_of(self, length: int, device: torch.device) -> Tensor:
        """A multiplier of each id and of each target, by its place: (2, length)."""
        if (length, device) not in self._weights:
            places = torch.arange(1, 2 * length + 1, device=device).view(2, length)
            self._weights[length, device] = _mixed(places * _GOLDEN) | 1  # odd: no bit of a token is lost
        return self._weights[length, device]

    def _read_training(self, trainer: Trainer) -> str | None:
        """The hash of the completed steps; with it, those of ``batches_at``. All processes must ask."""
        if self._sum is None:
            return None
        self._hash_waiting()
        batches, *sums = self._read(trainer, [self._sum, *self._at.values()])
        hashes = {**self.batches_at, **dict(zip(self._at, sums, strict=True))}
        self.batches_at = {step: value for step, value in hashes.items() if is_kept(step, trainer.global_step)}
        self._at = {}
        return batches

    @staticmethod
    def _read(trainer: Trainer, parts: list[Tensor]) -> list[str]:
        """Sums over all processes, which must all ask, each as 16 hex digits."""
        sums: list[int] = trainer.strategy.reduce(torch.stack(parts), reduce_op="sum").tolist()
        return [f"{part % (1 << 64):016x}" for part in sums]


def _parts(batch: Any) -> tuple[Tensor, Tensor] | None:
    """Token ids and targets of a batch, both (rows, seq); ``None``: it has none."""
    try:
        ids, targets = batch["input_ids"], batch["targets"]
        _rows, _length = ids.shape
    except (KeyError, TypeError, IndexError, ValueError, AttributeError):  # the user's own data
        return None
    return ids, targets


def _hash_of_other(batch: Any, number: int | None = None) -> Tensor | None:
    """The sum of the hashes of a batch of any other form: of each row, if all its tensors have rows, else of all.

    Args:
        batch: Nested lists, tuples and dicts with tensors, of which dimension 0 counts rows.
        number: Of the batch among those of the run. ``None``: the order does not count.

    Returns:
        ``None``: it has no tensors.
    """
    tensors: list[Tensor] = []
    apply_to_collection(batch, Tensor, tensors.append)
    if not tensors:
        return None
    has_rows = all(tensor.dim() for tensor in tensors) and len({len(tensor) for tensor in tensors}) == 1
    flat = [tensor.detach().cpu().contiguous() for tensor in tensors]
    flat = [tensor.reshape(len(tensor) if has_rows and len(tensor) else 1, -1) for tensor in flat]
    parts = [tensor.view(torch.uint8).numpy() if tensor.numel() else np.empty((len(tensor), 0)) for tensor in flat]
    digests = [hashlib.sha256(b"".join(part[row].tobytes() for part in parts)).digest() for row in range(len(parts[0]))]
    hashes = np.array([int.from_bytes(digest[:8], "big", signed=True) for digest in digests], dtype=np.int64)
    if number is not None:
        hashes = hashes + np.arange(number * len(hashes), (number + 1) * len(hashes)) * _GOLDEN
    return torch.from_numpy(_mixed(hashes).sum(keepdims=True))[0]


def is_kept(step: int, reached: int) -> bool:
    """Whether a run that has reached a step still has the hash of an earlier one.

    It has those of all powers of two, and of the multiples of the smallest power of two that leaves at most
    ``MULTIPLES`` of them: fewer than 64 steps in 10^9. What is not kept once is never kept later.
    """
    spacing = 1 << max(0, (reached - 1).bit_length() - MULTIPLES.bit_length() + 1)
    return step % spacing == 0 or step & (step - 1) == 0


def tensor_hash(tensor: Tensor) -> str:
    """Shape, dtype and 16 hex digits of the SHA-256 of the bytes, as ``128x384 float32 9f86d081884c7d65``.

    Of a sharded tensor, which all processes must ask for, the whole is hashed.
    """
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    content = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    shape = "x".join(map(str, whole.shape))
    dtype = str(whole.dtype).removeprefix("torch.")
    return f"{shape} {dtype} {hashlib.sha256(content.data).hexdigest()[:16]}"


def _mixed(value: Any) -> Any:
    """Mix like the finalizer of SplitMix64, with arithmetic shifts: every bit in moves every bit out. Integers wrap."""
    value = (value ^ (value >> 30)) * _FIRST
    value = (value ^ (value >> 27)) * _SECOND
    return value ^ (value >> 31)
