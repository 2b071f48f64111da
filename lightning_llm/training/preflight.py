"""Checks before the first step. All errors are found before any is reported."""

import dataclasses
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_llm.accounting.step_settings import divisor
from lightning_llm.data.datamodule import TokenDataModule, data_attribute
from lightning_llm.data.token_store import TokenStore
from lightning_llm.data.validated import asked_limit
from lightning_llm.io.atomic import existing_parent
from lightning_llm.io.options import raise_all
from lightning_llm.io.trust import path_of
from lightning_llm.io.units import decimal_size
from lightning_llm.measure.gauges import device_memory
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.initial_scales import one_of_each_kind, rules_in_words, scales_of_blocks, scales_of_table
from lightning_llm.model.token_order import token_order_lines
from lightning_llm.model.transformer import Transformer
from lightning_llm.statistics.scales import differing_scales
from lightning_llm.training.budget import optimizer_state_bytes
from lightning_llm.training.capture import capture_problems
from lightning_llm.training.environment import DTYPE_OF_PRECISION
from lightning_llm.training.initial_weights import read_initial_weights
from lightning_llm.training.run_length import total_steps

MANY_EPOCHS = 40  # Muennighoff et al. 2023, arXiv:2305.16264, section 6: further passes are worth almost nothing
# the minimum of an option, and what that means
MINIMA: dict[str, tuple[int, str]] = {
    "check_val_every_n_epoch": (1, "for no validation set trainer.limit_val_batches to 0"),
    "log_every_n_steps": (0, "0 logs nothing"),
    "num_sanity_val_steps": (-1, "0 tries none, -1 all"),
    "accumulate_grad_batches": (1, "with token stores it follows from data.global_batch_size"),
    "gradient_clip_val": (0, "0 clips nothing"),
    "min_steps": (0, "0 asks for none"),
    "min_epochs": (0, "0 asks for none"),
}


TOKEN_ORDER, PLAIN_MODULE = "token order", "model"  # names of checks that training prints
LEFT_OUT = "no LanguageModel: no memory or FLOPs in advance, bits per byte, samples, generate, evaluate, or export"


class Check(NamedTuple):
    """The result of one check.

    Attributes:
        name: What was checked.
        finding: What was found, in words.
        problem: What is wrong and what to do; empty if nothing is.
    """

    name: str
    finding: str
    problem: str = ""


# ---- options of the trainer, before it is made


def check_options(options: Mapping[str, Any], callbacks: Sequence[Any]) -> None:
    """Refuse values that would fail in the middle of a run, or do something else. Lightning checks most options itself.

    Args:
        options: As given to the Trainer, by name.
        callbacks: The user's.

    Raises:
        ValueError: With every error.
    """
    problems = [
        f"trainer.{name} must be at least {least}, got {options[name]}: {meaning}"
        for name, (least, meaning) in MINIMA.items()
        if isinstance(options.get(name), int | float) and options[name] < least
    ]
    if options.get("val_check_interval") == 0:
        problems.append(
            "trainer.val_check_interval must be a number of steps above 0 or a fraction above 0, at most 1.0, got 0: "
            "for no validation set trainer.limit_val_batches to 0"
        )
    raise_all([*problems, *_accumulation_problems(callbacks)])


def check_accelerator(accelerator: Any) -> None:
    """Refuse an accelerator that is not here. A name that Lightning does not know is left to it.

    Raises:
        ValueError: torch finds no such device.
    """
    kinds = {"gpu": ("cuda", "mps")}.get(accelerator, (accelerator,)) if isinstance(accelerator, str) else ()
    known = [AcceleratorRegistry[kind]["accelerator"] for kind in kinds if kind in AcceleratorRegistry]
    if known and not any(kind.is_available() for kind in known):
        is_missing = accelerator in ("gpu", "cuda") and torch.version.cuda is None and torch.version.hip is None
        why = "this torch was built without CUDA" if is_missing else "torch finds none here"
        raise ValueError(f"trainer.accelerator {accelerator}: {why}; give --trainer.accelerator cpu, or auto")


def check_nodes(environment: ClusterEnvironment, num_nodes: int) -> None:
    """Refuse several nodes that cannot find each other, instead of waiting for them.

    Raises:
        ValueError: Neither a launcher nor environment variables say where process 0 is.
    """
    if num_nodes == 1 or type(environment) is not LightningEnvironment:  # a launcher's, or the user's own
        return
    variables = {**os.environ, "NODE_RANK": os.environ.get("NODE_RANK") or os.environ.get("GROUP_RANK")}
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if not variables.get(name)]:
        raise ValueError(
            f"trainer.num_nodes {num_nodes}: the other nodes cannot find this process, so it would wait for them "
            f"forever: {', '.join(missing)} not set. Start the command on every node with torchrun or SLURM "
            "(docs/distributed.md), or set these variables there"
        )


def check_setup(model: Any, trainer: Any) -> None:
    """Refuse a model that cannot be compiled as asked for, and token data that do not fit it.

    Raises:
        ValueError: With every error.
    """
    data = getattr(trainer, "datamodule", None)
    problems = [*_compile_problems(model, trainer), *_tf32_problems(trainer)]
    problems += [check.problem for check in _fit_together(model.architecture, data) if check.problem]
    raise_all([*problems, *(_accumulation_problems(trainer.callbacks) if isinstance(data, TokenDataModule) else ())])


def check_batch(batch: Any) -> None:
    """Refuse a batch of other data than ``LanguageModel`` trains on.

    Raises:
        ValueError: It is no dict with ``input_ids`` and ``targets``.
    """
    if not isinstance(batch, Mapping) or not {"input_ids", "targets"} <= batch.keys():
        got = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(f"a batch of the data must be a dict with input_ids and targets, got {got}")


def _compile_problems(model: Any, trainer: Any) -> Iterator[str]:
    if model.compile_scope == "model" and model.compile_mode is None:
        yield "model.compile_scope model compiles nothing while model.compile_mode is null: set it, such as to default"
    elif model.compile_scope == "model" and isinstance(trainer.strategy, ModelParallelStrategy):
        yield "model.compile_scope model is not for FSDP2, which gathers the weights block by block: use blocks"
    if model.compile_mode not in (None, "default"):
        try:
            torch.compile(check_batch, mode=model.compile_mode)  # compiles nothing until it is called
        except RuntimeError:
            yield f"model.compile_mode {model.compile_mode} is not a mode of torch {torch.__version__}: use default"


def _accumulation_problems(callbacks: Sequence[Any]) -> Iterator[str]:
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
        yield (
            "trainer.callbacks: GradientAccumulationScheduler would change the micro-batches of a step, and with them "
            "the batch size and every interval in steps: leave it out and set data.global_batch_size"
        )


# ---- a run, before its first step


def check_run(model: Any, data: Any, trainer: Any, folder: Path) -> Iterator[Check]:
    """Check everything that the first step and the first checkpoint need.

    Args:
        model: The LanguageModel, before its transformer is made.
        data: Its data; a missing token store is prepared. Nothing of another class is called but its properties.
        trainer: Lightning's trainer; nothing in it is started.
        folder: Where checkpoints will go.

    Yields:
        All checks. Those that need a token store, or a vocabulary that is not known yet, are left out without one.
    """
    is_token_data = isinstance(data, TokenDataModule)
    problems = dict(data.problems(trainer)) if is_token_data else {}
    if "data" in problems:
        yield Check("data", "cannot be used", problems["data"])
        yield _batch(data, trainer, problems)
        yield _precision(trainer)
        return
    if is_token_data:
        yield from map(_store, (source.store for source in data.sources))
    else:
        yield Check("data", path_of(type(data)))
    if getattr(model, "architecture", None) is None:  # a plain LightningModule
        yield from _of_plain_module(model, data, trainer, problems)
        return
    vocab_size = model.architecture.vocab_size or data_attribute(data, "vocab_size")
    if vocab_size is None:
        yield from _fit_together(model.architecture, data)
        yield from _budget(model, data, trainer)
        yield _precision(trainer)
        return
    with torch.device("meta"):
        transformer = Transformer(dataclasses.replace(model.architecture, vocab_size=vocab_size))
    number, _, kind = str(trainer.precision).partition("-")
    if kind == "true":  # in the others, parameters are float32
        transformer.to(DTYPE_OF_PRECISION[number])
    weights = sum(p.nbytes for p in transformer.parameters())
    memory = list(_memory(2 * weights, "parameters and gradients", trainer))
    if any(check.problem for check in memory):  # the other checks take as long as the model is large
        yield from memory
        return
    yield from _fit_together(model.architecture, data)
    yield from _initial_weights(model, data)
    yield from _initial_values(model)
    yield from _compiler(model, trainer)
    yield from (Check("capture", "of the training step", problem) for problem in capture_problems(model, trainer))
    if is_token_data:
        yield from _texts(data, trainer, problems)
    yield from _devices(trainer)
    yield from _budget(model, data, trainer)  # it may choose the micro-batch, which decides what follows
    if is_token_data:
        problems = dict(data.problems(trainer))
        yield _batch(data, trainer, problems)
    yield _precision(trainer)
    if is_token_data:
        yield from _steps(data, trainer, problems)
    yield from _memory_and_disk(model, transformer, weights, trainer, folder)


def _of_plain_module(model: Any, data: Any, trainer: Any, problems: Mapping[str, str]) -> Iterator[Check]:
    """Checks of a module that is no ``LanguageModel``; the first one says what is left out of its runs."""
    name = path_of(type(model))
    problem = ""
    for method in ("training_step", "configure_optimizers"):
        if not is_overridden(method, model):
            problem = problem or f"model.class_path {name} has no {method}, which training calls: add it"
    yield Check(PLAIN_MODULE, name if problem else f"{name}; {LEFT_OUT}", problem)
    if isinstance(data, TokenDataModule):
        yield from _texts(data, trainer, problems)
        yield _batch(data, trainer, problems)
    yield from _devices(trainer)
    yield _precision(trainer)


def _fit_together(architecture: ModelConfig, data: Any) -> Iterator[Check]:
    """Whether model and data fit together: context and vocabulary."""
    longest, vocab_size = architecture.max_position_embeddings, architecture.vocab_size
    if (ids := data_attribute(data, "vocab_size")) is not None:
        problem = (
            f"architecture.vocab_size {vocab_size} is smaller than the {ids} ids of the data: leave it at null to "
            "take the data's"
        )
        finding = f"{ids} ids in the data, {'as many' if vocab_size is None else vocab_size} in the model"
        yield Check("vocabulary", finding, problem if vocab_size is not None and vocab_size < ids else "")
    for name in ("context_length", "eval_context_length"):
        if (tokens := data_attribute(data, name)) is not None:
            problem = (
                f"data.{name} {tokens} is longer than architecture.max_position_embeddings {longest}: "
                "shorten the one or raise the other"
            )
            yield Check("context", f"{tokens} tokens, the model takes {longest}", problem if tokens > longest else "")


def _initial_weights(model: Any, data: Any) -> Iterator[Check]:
    """Check the weights of ``init_from``, if they exist: a resumed run does not need them."""
    init_from = getattr(model, "init_from", None)
    if init_from is not None and Path(init_from).exists():
        try:
            problem = read_initial_weights(init_from).problem(model.architecture, data)
        except ValueError as error:
            problem = str(error)
        yield Check("weights", f"those of {init_from}", problem)


def _initial_values(model: Any) -> Iterator[Check]:
    """Where the initial values of custom parts come from; the constructors run here, on the CPU."""
    config = model.architecture
    seed = model.seed or 0
    if not config.custom_parts:
        return
    try:
        blocks = one_of_each_kind(config, seed)
        lines = rules_in_words(blocks, config, seed)
        ignored = token_order_lines(blocks, config)
        scales = scales_of_blocks(blocks, config)
    except ValueError as error:
        yield Check("initial values", "of a custom part", str(error))
        return
    lines += differing_scales(scales, scales_of_table(scales, config), "the table's")
    yield from (Check("initial values", line) for line in lines)
    yield from (Check(TOKEN_ORDER, line) for line in ignored)


def _compiler(model: Any, trainer: Any) -> Iterator[Check]:
    """Check what ``torch.compile`` needs at the first step."""
    mode = getattr(model, "compile_mode", None)
    for problem in _compile_problems(model, trainer):
        yield Check("compiled", f"as one: {model.compile_scope}", problem)
    if mode is None:
        return
    if trainer.strategy.root_device.type == "cuda":
        finding = "triton"
        is_there = importlib.util.find_spec("triton") is not None
        problem = "needs the package triton: python -m pip install triton, or leave the option at null"
    else:
        name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as torch looks for it
        path = shutil.which(name)
        finding = path or f"no {name}"
        is_there = path is not None
        problem = f"needs a C++ compiler and finds no {name}: install it, name another in CXX, or use null"
    yield Check("compiler", finding, "" if is_there else f"model.compile_mode {mode} {problem}")


def _store(store: TokenStore) -> Check:
    is_small = torch.iinfo(getattr(torch, store.dtype)).max < store.vocab_size - 1
    problem = f"token store {store.path}: {store.dtype} cannot hold the {store.vocab_size} ids of its vocabulary"
    return Check("data", f"{store.path}, {store.dtype}", problem if is_small else "")


def _texts(data: TokenDataModule, trainer: Any, problems: Mapping[str, str]) -> Iterator[Check]:
    for split in ("train", "val"):
        tokens = [source.store.splits[split].tokens for source in data.sources]
        length = data.context_length if split == "train" else data.eval_length
        windows = sum(max(0, (number - 1) // length) for number in tokens)
        yield Check(f"{split} text", f"{sum(tokens):,} tokens, {windows:,} windows", problems.get(split, ""))
    if problem := problems.get("validation"):
        yield Check("validation", "of no window", problem)
    elif "val" not in problems:
        is_off = asked_limit(trainer) == 0
        yield Check("validation", "none" if is_off else data.validated(trainer).in_words())
    if "documents" in problems:
        yield Check("documents", "no end of text", problems["documents"])


def _devices(trainer: Any) -> Iterator[Check]:
    """On a CPU a device is a process; Lightning accepts any number of them."""
    cores = os.cpu_count() or 1
    devices = trainer.num_devices
    if trainer.strategy.root_device.type == "cpu" and devices > 1:
        problem = f"trainer.devices {devices}: this machine has {cores} cores, each process needs one; ask for fewer"
        yield Check("devices", f"{devices} processes on {cores} cores", problem if devices > cores else "")


def _budget(model: Any, data: Any, trainer: Any) -> Iterator[Check]:
    if (budget := getattr(model, "budget", None)) is not None:
        try:
            model.keep_to_budget(data, trainer)
            yield Check("plan", str(budget))
        except ValueError as error:
            yield Check("plan", f"none for {budget.size}", str(error))


def _batch(data: TokenDataModule, trainer: Any, problems: Mapping[str, str]) -> Check:
    finding = f"{data.global_batch_size} sequences a step on {divisor(data.micro_batch_size, trainer.world_size)}"
    if problem := problems.get("batch", problems.get("epoch")):
        return Check("batch", finding, problem)
    accumulation = data.micro_batches(trainer, trainer.world_size)
    return Check("batch", f"{finding}: {accumulation} micro-batch{'es' if accumulation > 1 else ''}")


def _precision(trainer: Any) -> Check:
    device = trainer.strategy.root_device
    precision = str(trainer.precision)
    lacks_bf16 = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=True)
    problems = [f"trainer.precision {precision}: this GPU lacks bf16"] if lacks_bf16 and precision[:4] == "bf16" else []
    finding = f"{precision}{', TF32' if trainer.tf32 else ''} on {device.type}"
    return Check("precision", finding, "; ".join([*problems, *_tf32_problems(trainer)]))


def _tf32_problems(trainer: Any) -> Iterator[str]:
    if not getattr(trainer, "tf32", None):
        return
    device = trainer.strategy.root_device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        yield f"trainer.tf32 true needs an NVIDIA GPU of compute capability 8.0 or later, got {name}: leave it out"


def _steps(data: TokenDataModule, trainer: Any, problems: Mapping[str, str]) -> Iterator[Check]:
    if problems:
        return
    size = f"of {data.tokens_per_step:,} tokens"
    if (steps := total_steps(trainer, data, data.micro_batches(trainer, trainer.world_size))) is None:
        yield Check("steps", f"{size}, until max_time or a signal ends the run")
    else:
        epochs = steps / data.steps_per_epoch
        note = ", more than repeated text is worth" if epochs > MANY_EPOCHS else ""
        train_tokens = sum(source.store.splits["train"].tokens for source in data.sources)
        problem = trainer.sizing.epoch_problem(train_tokens) if trainer.sizing else ""
        yield Check("steps", f"{steps:,} steps {size}: {epochs:.2f} epochs{note}", problem)


def _memory_and_disk(model: Any, transformer: Transformer, weights: int, trainer: Any, folder: Path) -> Iterator[Check]:
    option = "groups"
    try:
        groups = model.groups_of(transformer)
        option = "optimizer"
        yield Check("optimizer", type(model.optimizer_over(groups)).__name__)
    except ValueError as error:  # a pattern that decides nothing, an option out of range
        yield Check("optimizer", "cannot be made", f"model.{option}: {error}")
    state = optimizer_state_bytes(model, transformer)
    yield from _memory(2 * weights + state, "parameters, gradients and optimizer state", trainer)
    keep_last = next((c.keep_last for c in trainer.callbacks if hasattr(c, "keep_last")), None)
    if keep_last is not None:
        files = keep_last + 2  # the best one, and the one that is written before the oldest is deleted
        needed = files * (weights + state)
        there = existing_parent(folder)
        free = shutil.disk_usage(there).free
        finding = f"{files} checkpoints need {decimal_size(needed)}, {decimal_size(free)} free at {there}"
        elsewhere = "set trainer.default_root_dir elsewhere"
        problem = f"the disk is too small: {finding}; free some, keep fewer, or {elsewhere}" if needed > free else ""
        if not shutil.disk_usage(there).total or not os.access(there, os.W_OK):  # such as /proc, or read-only
            problem = f"no checkpoint can be saved in {folder}: {there} cannot be written to; {elsewhere}"
        yield Check("disk", finding, problem)


def _memory(needed: int, of_what: str, trainer: Any) -> Iterator[Check]:
    """Check the memory for what is allocated all the time; activations come on top."""
    device = trainer.strategy.root_device
    available = device_memory(device)
    if available is None:
        return
    if isinstance(trainer.strategy, ModelParallelStrategy):
        needed //= trainer.world_size
    needed *= trainer.num_devices if device.type == "cpu" else 1  # all processes share the host memory
    finding = f"{of_what} need {decimal_size(needed)}, {device.type} has {decimal_size(available)}"
    problem = (
        f"the model is too large for the memory: {finding}; choose a smaller hidden_size, num_hidden_layers or "
        "vocab_size, or shard it over more devices with --trainer.strategy fsdp2"
    )
    yield Check("memory", finding, problem if needed > available else "")
