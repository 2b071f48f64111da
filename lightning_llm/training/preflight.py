"""What can be known to be wrong before the first step. All faults are found before any is reported."""

import dataclasses
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.data.token_store import TokenStore, dtype_for
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.optim.groups import param_groups
from lightning_llm.training.budget import optimizer_state_bytes
from lightning_llm.training.length import total_steps

MANY_EPOCHS = 40  # Muennighoff et al. 2023, arXiv:2305.16264, section 6: further passes are worth almost nothing


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What.
        finding: What was found, in words.
        fault: What is wrong about it and what to do; empty where nothing is.
    """

    name: str
    finding: str
    fault: str = ""


def check_run(model: Any, data: TokenDataModule, trainer: Any, folder: Path) -> list[Check]:
    """Look at everything that the first step and the first checkpoint need.

    Args:
        model: The LanguageModel, before its transformer is made.
        data: Its data; the token store is prepared where it is missing.
        trainer: Lightning's trainer; nothing in it is started.
        folder: Where checkpoints will go.

    Returns:
        All checks, those that failed with their fault. Checks that need a token store are left out without one.
    """
    try:
        store = data.store
    except ValueError as error:
        return [Check("data", "cannot be used", str(error)), _batch(data, trainer), _precision(trainer)]
    found = Check("data", f"{store.path}, {store.dtype}", _store_fault(store))
    transformer = _without_storage(model, store)
    too_large = [
        check for check in _memory(2 * _bytes(transformer), "parameters and gradients", trainer) if check.fault
    ]
    if too_large:  # what follows takes as long as the model is large
        return [found, *too_large]
    checks = [*_devices(trainer), *_budget(model, data, trainer), _batch(data, trainer), _precision(trainer)]
    architecture: ModelConfig = model.architecture
    return [
        found,
        *_fit_together(architecture, data),
        *_initial_weights(model, data),
        *_compiler(model, trainer),
        *(_length(store, split, data.context_length) for split in ("train", "val")),
        *checks,
        *_steps(data, trainer),
        *_memory_and_disk(model, transformer, trainer, folder),
    ]


def data_faults(architecture: ModelConfig, data: TokenDataModule) -> list[str]:
    """Where model and data do not fit together."""
    return [check.fault for check in _fit_together(architecture, data) if check.fault]


def refuse(faults: Iterable[str]) -> None:
    """Raise a ``ValueError`` that lists all faults, if there are any."""
    listed = list(faults)
    if listed:
        raise ValueError("; ".join(listed))


def _budget(model: Any, data: TokenDataModule, trainer: Any) -> Iterator[Check]:
    """The plan, which decides what is checked from here on."""
    if getattr(model, "memory_budget", None) is not None:
        try:
            model.keep_to_budget(data, trainer)
            yield Check("plan", model.plan_summary)
        except ValueError as error:
            yield Check("plan", f"none for {model.memory_budget}", str(error))


def _initial_weights(model: Any, data: TokenDataModule) -> Iterator[Check]:
    """Those of ``init_from``, if they are there: a run that goes on needs them no more."""
    given = getattr(model, "init_from", None)
    if given is not None and Path(given).exists():
        yield Check("weights", f"those of {given}", "; ".join(model.initial_faults(data)))


def _compiler(model: Any, trainer: Any) -> Iterator[Check]:
    """What ``torch.compile`` needs at the first step."""
    mode, device = getattr(model, "compile_mode", None), trainer.strategy.root_device.type
    if mode is None:
        return
    given = f"model.compile_mode {mode}"
    if device == "cuda":
        fault = f"{given} needs the package triton: python -m pip install triton, or leave the option at null"
        yield Check("compiler", "triton", "" if importlib.util.find_spec("triton") else fault)
    else:
        name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as torch looks for it
        path = shutil.which(name)
        fault = f"{given} needs a C++ compiler and finds no {name}: install it, name another in CXX, or take null"
        yield Check("compiler", path or f"no {name}", "" if path else fault)


def _store_fault(store: TokenStore) -> str:
    if (
        store.dtype != dtype_for(store.vocab_size)
        and torch.iinfo(getattr(torch, store.dtype)).max < store.vocab_size - 1
    ):
        return f"token store {store.path}: dtype {store.dtype} cannot hold the {store.vocab_size} ids of its vocabulary"
    return ""


def _fit_together(architecture: ModelConfig, data: TokenDataModule) -> Iterator[Check]:
    longest, ids, vocab_size = architecture.max_position_embeddings, data.vocab_size, architecture.vocab_size
    yield Check(
        "vocabulary",
        f"{ids} ids in the data, {'as many' if vocab_size is None else vocab_size} in the model",
        f"architecture.vocab_size {vocab_size} is smaller than the {ids} ids of the token store: leave it at null to "
        "take the store's"
        if vocab_size is not None and vocab_size < ids
        else "",
    )
    yield Check(
        "context",
        f"{data.context_length} tokens, the model takes {longest}",
        f"data.context_length {data.context_length} is longer than architecture.max_position_embeddings {longest}: "
        "shorten the one or raise the other"
        if data.context_length > longest
        else "",
    )


def _length(store: TokenStore, split: str, context_length: int) -> Check:
    tokens = store.splits[split].tokens
    windows = max(0, (tokens - 1) // context_length)
    fault = (
        f"data.context_length {context_length} is too long for the {split} split of {store.path}: it has {tokens} "
        f"tokens, a window and its last target need {context_length + 1}; take more text or a shorter context"
    )
    return Check(f"{split} text", f"{tokens:,} tokens, {windows:,} windows", "" if windows else fault)


def _batch(data: TokenDataModule, trainer: Any) -> Check:
    devices, micro, whole = trainer.world_size, data.micro_batch_size, data.global_batch_size
    by = f"{devices} device{'s' if devices > 1 else ''}"
    by += "" if micro is None else f" times data.micro_batch_size {micro}"
    found = f"{whole} sequences a step on {by}"
    if whole % (devices * (micro or 1)):
        return Check("batch", found, f"data.global_batch_size {whole} cannot be divided by {by}: change one")
    accumulation = _accumulation(data, trainer)
    given = trainer.accumulate_grad_batches
    if given not in (1, accumulation):
        return Check(
            "batch",
            found,
            f"trainer.accumulate_grad_batches {given} contradicts the {accumulation} micro-batches that follow from "
            "data.global_batch_size: leave it out",
        )
    return Check("batch", f"{found}: {accumulation} micro-batch{'es' if accumulation > 1 else ''}")


def _accumulation(data: TokenDataModule, trainer: Any) -> int:
    """Micro-batches of a step, as the data module will find; 1 where the batch cannot be divided."""
    devices: int = trainer.world_size
    whole = data.global_batch_size
    return max(1, whole // (devices * (data.micro_batch_size or max(1, whole // devices))))


def _devices(trainer: Any) -> Iterator[Check]:
    """On a CPU a device is a process; Lightning takes any number, refusing only GPUs that are not there."""
    cores, asked = os.cpu_count() or 1, trainer.num_devices
    if trainer.strategy.root_device.type == "cpu" and asked > 1:
        fault = f"trainer.devices {asked}: this machine has {cores} cores, and each process needs one; ask for fewer"
        yield Check("devices", f"{asked} processes on {cores} cores", fault if asked > cores else "")


def _precision(trainer: Any) -> Check:
    device = trainer.strategy.root_device
    bf16 = str(trainer.precision).startswith("bf16")
    if device.type == "cuda" and bf16 and not torch.cuda.is_bf16_supported(including_emulation=True):
        return Check("precision", trainer.precision, f"trainer.precision {trainer.precision}: this GPU lacks bf16")
    return Check("precision", f"{trainer.precision} on {device.type}")


def _steps(data: TokenDataModule, trainer: Any) -> Iterator[Check]:
    if data.store.splits["train"].tokens <= data.context_length:
        return
    steps = total_steps(trainer, data, _accumulation(data, trainer))
    if steps is None:
        yield Check("steps", f"of {data.tokens_per_step:,} tokens, until max_time or a signal ends the run")
        return
    epochs = steps / data.steps_per_epoch
    note = ", more than repeated text is worth" if epochs > MANY_EPOCHS else ""
    yield Check("steps", f"{steps:,} steps of {data.tokens_per_step:,} tokens: {epochs:.2f} epochs{note}")


def _without_storage(model: Any, store: TokenStore) -> Transformer:
    architecture: ModelConfig = model.architecture
    if architecture.vocab_size is None:
        architecture = ModelConfig(**{**architecture.to_dict(), "vocab_size": store.vocab_size})
    with torch.device("meta"):
        return Transformer(architecture)


def _bytes(transformer: Transformer) -> int:
    return sum(p.numel() * p.element_size() for p in transformer.parameters())


def _memory_and_disk(model: Any, transformer: Transformer, trainer: Any, folder: Path) -> Iterator[Check]:
    yield _optimizer(model, transformer)
    weights, state = _bytes(transformer), optimizer_state_bytes(model, transformer)
    yield from _memory(2 * weights + state, "parameters, gradients and optimizer state", trainer)
    kept = next((c.keep_last for c in trainer.callbacks if hasattr(c, "keep_last")), None)
    if kept is not None:
        yield _disk(weights + state, kept, folder)


def _optimizer(model: Any, transformer: Transformer) -> Check:
    try:
        return Check("optimizer", type(model.make_optimizer(param_groups(transformer))).__name__)
    except ValueError as error:  # an option out of range
        return Check("optimizer", "cannot be made", f"model.optimizer: {error}")


def _memory(needed: int, of_what: str, trainer: Any) -> Iterator[Check]:
    """Of what is alive all the time, in float32; activations come on top."""
    strategy = trainer.strategy
    device, precision = strategy.root_device, str(trainer.precision)
    there = _memory_of(device)
    if there is None:
        return
    if precision.endswith("-true"):
        needed = needed * int(precision.removeprefix("bf").split("-")[0]) // 32
    if isinstance(strategy, ModelParallelStrategy):
        needed //= trainer.world_size
    processes = trainer.num_devices if device.type == "cpu" else 1  # all of them take it from the same memory
    needed *= processes
    finding = f"{of_what} need {_size(needed)}, {device.type} has {_size(there)}"
    fault = (
        f"the model is too large for the memory: {finding}; choose a smaller hidden_size, num_hidden_layers or "
        "vocab_size, or share it among more devices with --trainer.strategy fsdp2"
    )
    yield Check("memory", finding, fault if needed > there else "")


def _memory_of(device: torch.device) -> int | None:
    """Bytes of a device's memory; ``None`` where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _disk(checkpoint: int, kept: int, folder: Path) -> Check:
    files = kept + 2  # the best one, and the one that is being written while the oldest is still there
    needed = files * checkpoint
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    finding = f"{files} checkpoints need {_size(needed)}, {_size(free)} free at {there}"
    fault = f"the disk is too small: {finding}; free some, keep fewer, or set trainer.default_root_dir elsewhere"
    return Check("disk", finding, fault if needed > free else "")


def _size(number: int) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e8 else f"{number / 1e6:,.1f} MB"
