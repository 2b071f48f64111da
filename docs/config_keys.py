"""Write the tables of docs/config.md: every key of a config with its type, default, unit and one line.

    python docs/config_keys.py

Keys, types and defaults come from the parser of ``lightning-llm fit``, lines from the docstrings of this project's
classes. Lines for Lightning's own options and all units are in this file. A key without a line, or a number without a
unit, is an error.
"""

import dataclasses
import re
import types
from argparse import SUPPRESS
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from lightning_llm import TokenDataModule, optim
from lightning_llm.cli.train import TrainingCLI
from lightning_llm.optim.schedules import SCHEDULES
from lightning_llm.training import LanguageModel, callbacks
from lightning_llm.training.json_logger import JSONLinesLogger
from lightning_llm.training.trainer import Trainer

PAGE = Path(__file__).parent / "config.md"
BEGIN, END = "<!-- tables of docs/config_keys.py -->", "<!-- end of the tables -->"
HEAD = "| key | type | default | unit | meaning |\n|---|---|---|---|---|\n"
SECTIONS = {  # a key belongs to the first section whose prefix it has
    "model.architecture.": "The model's shape: `model.architecture`",
    "model.": "The model's training: `model`",
    "data.": "Data: `data`",
    "trainer.": "The Trainer: `trainer`",
    "": "The run",
}
CLASSES: dict[str, list[type]] = {
    "Optimizers: `model.optimizer`": [optim.AdamW, optim.MuonAdamW],
    "Schedules: `model.schedule`": list(SCHEDULES.values()),
    "Callbacks: `trainer.callbacks`": [
        callbacks.RunCheckpoints,
        callbacks.MemoryProfiler,
        callbacks.SampleText,
        callbacks.Dashboard,
        callbacks.TrainingLog,
    ],
    "Loggers: `trainer.logger`": [JSONLinesLogger],
}
GIVEN = {"params", "folder"}  # arguments of classes that no config sets
# Lines for Lightning's options, and for those whose docstring needs more than one line. Keys of classes: argument.
LINES = {
    "data.store": "Folder of the token store. `null`: a folder in `stores`, named after text and tokenizer.",
    "model.schedule": "The learning rate over the run, as a factor. `null`: `WarmupCosine` with a short warmup.",
    "fused": "Use torch's fused kernel for AdamW. `null`: wherever there is one.",
    "state_dtype": "Dtype of AdamW's two averages. `null`: that of the parameter.",
    "param_rounding": "Rounding of bfloat16 parameters and their averages: `nearest` or `stochastic`.",
    "shape": "Shape of the decay: `sqrt` (1 - √progress) or `linear`.",
    "ckpt_path": "Resume from this checkpoint: `last`, `best`, a run directory or a file.",
    "seed_everything": "Seed of the initial weights, of dropout and of Python's generators. `true`: a random one.",
    "trainer.accelerator": "The hardware: `auto`, `cpu`, `gpu` or `mps`.",
    "trainer.accumulate_grad_batches": "Follows from `data.global_batch_size`; set it for your own data module.",
    "trainer.barebones": "Disable callbacks, logging and checkpoints, to measure the loop alone.",
    "trainer.benchmark": "Let cuDNN time its kernels and choose. `null`: PyTorch's own setting.",
    "trainer.callbacks": "Callbacks to add. A callback of a class that `fit` already uses replaces that one.",
    "trainer.check_val_every_n_epoch": "Validate every N epochs, unless `val_check_interval` counts steps.",
    "trainer.detect_anomaly": "Stop at the first NaN in backward and name its operation. Slow.",
    "trainer.deterministic": "Use only deterministic kernels of PyTorch. `warn`: warn where none exists.",
    "trainer.devices": "Number of devices, or a list of their indices. `auto`: all; one process on a CPU.",
    "trainer.enable_autolog_hparams": "Send the options to the logger when the run starts.",
    "trainer.enable_checkpointing": "Save checkpoints. `null`: yes.",
    "trainer.fast_dev_run": "Run this many batches of training and validation, write no files, and stop.",
    "trainer.gradient_clip_algorithm": "Clip by `norm` or by `value`. `null`: by norm.",
    "trainer.gradient_clip_val": "Clip gradients to this norm (or value). `null`: do not clip.",
    "trainer.inference_mode": "Validate in PyTorch's inference mode, else under `no_grad`.",
    "trainer.limit_predict_batches": "Predict only this many batches, or this fraction of them.",
    "trainer.limit_test_batches": "Test on this many batches, or this fraction of them.",
    "trainer.limit_train_batches": "End each epoch after this many micro-batches, or this fraction of them.",
    "trainer.limit_val_batches": "Validate on N × `data.global_batch_size` windows or this share, evenly spaced.",
    "trainer.log_every_n_steps": "Log loss, learning rate and throughput every N steps. `null`: 50.",
    "trainer.logger": "Where metrics go. `null` or `true`: TensorBoard, in the run directory. `false`: nowhere.",
    "trainer.max_epochs": "Stop after this many passes over the text.",
    "trainer.max_time": "Stop after this time, counted over all resumed parts: `DD:HH:MM:SS`.",
    "trainer.min_epochs": "Do not let a callback stop the run before this many epochs.",
    "trainer.min_steps": "Do not let a callback stop the run before this many steps.",
    "trainer.model_registry": "Name under which Lightning's own service stores the model. Not used here.",
    "trainer.num_nodes": "Number of hosts.",
    "trainer.overfit_batches": "Train on the same few batches again and again, to see whether a model can learn.",
    "trainer.plugins": "Lightning plugins, such as `SLURMEnvironment`.",
    "trainer.profiler": "A Lightning profiler: `simple`, `advanced`, `pytorch`, or a class.",
    "trainer.reload_dataloaders_every_n_epochs": "Rebuild the data loaders every N epochs. 0: never.",
    "trainer.strategy": "How devices share the work: `auto`, `ddp`, `fsdp2`, `fsdp2_deferred`, or a Lightning class.",
    "trainer.sync_batchnorm": "Synchronize batch normalization. The built-in models have none.",
    "trainer.use_distributed_sampler": "Let Lightning split your own data loader between processes.",
    "weights_only": "Leave it out: checkpoints are always read without running code.",
}
# Of every number, and of the few texts that have one. Keys of classes: argument.
UNITS = {
    "seed_everything": "seed",
    "size": "parameters",
    "tokens_per_parameter": "tokens",
    "model.architecture.vocab_size": "token ids",
    "model.architecture.vocab_multiple_of": "rows",
    "model.architecture.hidden_size": "features",
    "model.architecture.intermediate_size": "features",
    "model.architecture.num_hidden_layers": "blocks",
    "model.architecture.num_attention_heads": "heads",
    "model.architecture.num_key_value_heads": "heads",
    "model.architecture.head_dim": "features",
    "model.architecture.max_position_embeddings": "tokens",
    "model.architecture.rms_norm_eps": "mean square",
    "model.architecture.rope_theta": "base",
    "model.architecture.partial_rotary_factor": "fraction",
    "model.architecture.checkpoint_level": "level",
    "model.architecture.dropout": "probability",
    "model.architecture.initializer_range": "standard deviation",
    "model.loss_chunks": "chunks",
    "model.memory_budget": "GiB, MiB, GB …",
    "model.memory_reserve": "GiB, MiB, GB …",
    "data.vocab_size": "token ids",
    "data.context_length": "tokens",
    "data.global_batch_size": "sequences",
    "data.micro_batch_size": "sequences",
    "data.seed": "seed",
    "data.eval_batch_size": "sequences",
    "data.eval_context_length": "tokens",
    "data.num_workers": "processes",
    "data.mixture": "share",
    "trainer.precision": "bits",
    "trainer.max_steps": "steps",
    "trainer.val_check_interval": "steps or fraction",
    "trainer.num_sanity_val_steps": "batches",
    "trainer.devices": "devices",
    "trainer.num_nodes": "hosts",
    "trainer.fast_dev_run": "batches",
    "trainer.max_epochs": "epochs",
    "trainer.min_epochs": "epochs",
    "trainer.min_steps": "steps",
    "trainer.max_time": "days to seconds",
    "trainer.limit_train_batches": "micro-batches or fraction",
    "trainer.limit_val_batches": "N or fraction",
    "trainer.limit_test_batches": "batches or fraction",
    "trainer.limit_predict_batches": "batches or fraction",
    "trainer.overfit_batches": "batches or fraction",
    "trainer.check_val_every_n_epoch": "epochs",
    "trainer.log_every_n_steps": "steps",
    "trainer.accumulate_grad_batches": "micro-batches",
    "trainer.gradient_clip_val": "norm",
    "trainer.reload_dataloaders_every_n_epochs": "epochs",
    "lr": "step size",
    "betas": "decay per step",
    "eps": "root mean square",
    "weight_decay": "fraction of `lr`",
    "momentum": "decay per step",
    "newton_schulz_steps": "iterations",
    "warmup_steps": "steps",
    "decay_steps": "steps",
    "min_lr_ratio": "fraction of `lr`",
    "decay_fraction": "fraction",
    "keep_last": "checkpoints",
    "every_n_steps": "steps",
    "snapshot_at": "step",
    "top": "modules",
    "max_new_tokens": "tokens",
    "temperature": "logits",
    "top_k": "tokens",
    "seed": "seed",
    "histograms_every_n_steps": "steps",
    "peak_tflops": "10¹² FLOP/s",
    "version": "run number",
}


def tables() -> str:
    """All tables, as Markdown."""
    sections: dict[str, list[str]] = {title: [] for title in SECTIONS.values()}
    for key, *columns in keys_of(fit_parser()):
        prefix = next(prefix for prefix in SECTIONS if key.startswith(prefix))
        sections[SECTIONS[prefix]].append(row(f"`{key.removeprefix(prefix)}`", *columns))
    parts = [f"## {title}\n\n{HEAD}{''.join(rows)}" for title, rows in sections.items()]
    for title, classes in CLASSES.items():
        parts.append(f"## {title}\n")
        parts += [
            f"`{path_of(kind)}`\n\n{HEAD}{''.join(row(f'`{k}`', *c) for k, *c in keys_of(of_class(kind)))}"
            for kind in classes
        ]
    return "\n".join(parts)


def path_of(kind: type) -> str:
    """The import path by which a config names a class: the shortest public one."""
    for package in ("lightning_llm.optim", "lightning_llm.training.callbacks"):
        if kind.__module__.startswith(package):
            return f"{package}.{kind.__name__}"
    return f"{kind.__module__}.{kind.__name__}"


def keys_of(parser: ArgumentParser) -> Iterator[tuple[str, str, str, str, str]]:
    """Key, type, default, unit and line of each option of a parser.

    Raises:
        ValueError: A key has no line, or a number has no unit.
    """
    for action in parser._actions:
        key, hint = action.dest, getattr(action, "_typehint", None)
        if hint is None or key.endswith(".help") or key in GIVEN:
            continue
        line, unit = LINES.get(key) or one_line(action.help or ""), UNITS.get(key, "")
        if not line:
            raise ValueError(f"{key} has no line: describe it in its class's docstring, or in LINES of {__file__}")
        if not unit and any(kind in (int, float) for kind in members(hint)):
            raise ValueError(f"{key} is a number without a unit: add it to UNITS of {__file__}")
        default = "required" if action.required else "" if action.default == SUPPRESS else value(action.default)
        yield key, " or ".join(dict.fromkeys(name(kind) for kind in members(hint))), default, unit, line


def row(*columns: str) -> str:
    """A row of a table."""
    return "| " + " | ".join(column.replace("|", "\\|") for column in columns) + " |\n"


def one_line(text: str) -> str:
    """The first sentence of a docstring's entry, and what it says of the default."""
    text = re.sub(r" \([^()]*\b(?:19|20)\d\d\b[^()]*\)", "", " ".join(text.split()))  # citations stay in the reference
    text = text.replace("``None``", "`null`").replace("``", "`").replace("Null:", "`null`:")
    first, *others = re.split(r"(?<=[.])\s+(?=[A-Z`])", text)
    return " ".join([first, *(other for other in others[:1] if re.match(r"`null`|Default", other))])


def members(hint: Any) -> list[Any]:
    """The alternatives of a type, and of what a tuple or a mapping holds; a class of arguments counts as one."""
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for each in get_args(hint) for kind in members(each)]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [hint]


def name(kind: Any) -> str:
    """A type in the words of a config."""
    if "Untyped" in str(kind):
        return "str"
    plain = {bool: "true or false", int: "int", float: "float", str: "str", type(None): "null"}
    if isinstance(kind, str):
        return f"`{kind}`"
    if kind in plain:
        return plain[kind]
    if get_origin(kind) is list:
        return f"list of {' or '.join(dict.fromkeys(map(name, members(get_args(kind)[0]))))}"
    if get_origin(kind) is tuple:
        return f"list of {len(get_args(kind))} {name(get_args(kind)[0])}"
    if get_origin(kind) is dict or dataclasses.is_dataclass(kind):
        return "mapping"
    if get_origin(kind) is Callable or get_origin(kind) is type(lambda: 0):
        return "class"
    return {"Path": "str", "timedelta": "str"}.get(getattr(kind, "__name__", ""), "class")


def value(default: Any) -> str:
    """A default as a config has it."""
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    if isinstance(default, dict):
        return f"`{default['class_path']}`"
    if isinstance(default, str):
        return "`" + default.replace("\n", "\\n") + "`"
    return f"[{', '.join(map(value, default))}]" if isinstance(default, Iterable) else f"{default:g}"


def of_class(kind: type) -> ArgumentParser:
    """A parser of what a class takes."""
    parser = ArgumentParser()
    parser.add_class_arguments(kind, None)
    return parser


class _FitParser(Exception):
    def __init__(self, parser: LightningArgumentParser) -> None:
        super().__init__()
        self.parser = parser


class _OnlyTheParser(TrainingCLI):
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        raise _FitParser(self._parser("fit"))


def fit_parser() -> LightningArgumentParser:
    """The parser of ``lightning-llm fit``; nothing is run."""
    try:
        _OnlyTheParser(
            LanguageModel,
            TokenDataModule,
            trainer_class=Trainer,
            seed_everything_default=1337,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=["fit"],
        )
    except _FitParser as made:
        return made.parser
    raise AssertionError("LightningCLI parses no arguments")


def page(text: str) -> str:
    """The page with its tables written again."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
