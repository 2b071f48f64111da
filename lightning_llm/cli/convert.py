"""``lightning-llm export``, ``import`` and ``consolidate``: checkpoints to and from other formats.

``export`` writes a folder that ``transformers`` loads, ``import`` makes a checkpoint and a config from such a folder,
``consolidate`` merges the shards of a checkpoint.
"""

import argparse
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lightning_llm.cli.subcommand import OneLineParser, size_option, subcommand
from lightning_llm.io.atomic import write_text
from lightning_llm.io.config_file import read_config
from lightning_llm.io.shell import shell_option, shell_path
from lightning_llm.io.trust import add_trust_option
from lightning_llm.io.untrusted import file_name
from lightning_llm.runs.directory import CONFIG, SUMMARY
from lightning_llm.runs.find import RUNS, find_checkpoint, run_of, step_in
from lightning_llm.runs.status import read_summary

if TYPE_CHECKING:
    from lightning_llm.interop.reader import ModelFolder

CHECKPOINT = "a checkpoint, or a run directory (its best checkpoint, else its newest)"

# Imports inside the functions come after the options are parsed: a typo is reported without waiting for torch.


def _export_options(parser: OneLineParser) -> None:
    add = parser.add_argument
    add("checkpoint", help=CHECKPOINT)
    add("out", type=Path, metavar="DIR", help="the folder to write; must not exist, or be empty")
    add("--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="largest file of weights (default: 5GB)")
    add_trust_option(parser)


def _size(words: str) -> int:
    if not (size := size_option(words)):
        raise argparse.ArgumentTypeError(f"{words!r}: a file must hold at least a byte")
    return size


@subcommand(_export_options)
def run_export(options: argparse.Namespace) -> None:
    """Write a trained model as a folder that transformers loads."""
    checkpoint = find_checkpoint(options.checkpoint, RUNS)
    from lightning_llm.checkpoints.reading import load_transformer
    from lightning_llm.interop.writer import METRICS, SourceRun, export_model

    model, tokenizer = load_transformer(checkpoint, trust_code=options.trust_code)
    record = SourceRun(checkpoint.name, step_in(checkpoint))
    if run := run_of(checkpoint):
        metrics = read_summary(run, METRICS) if (run / SUMMARY).is_file() else None
        record = SourceRun(record.checkpoint, record.step, metrics, read_config(run / CONFIG))
    name = export_model(model, tokenizer, options.out, max_shard_bytes=options.max_shard_size, record=record)
    print(f"{checkpoint} (step {record.step}) -> {options.out}, as {name}")
    if not tokenizer:
        print("the checkpoint holds no tokenizer: the folder has none either")


def _import_options(parser: OneLineParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="folder with config.json, safetensors, and tokenizer.json")
    add("--out", type=Path, required=True, metavar="CKPT", help="file to write; a config is written next to it")


@subcommand(_import_options)
def run_import(options: argparse.Namespace) -> None:
    """Turn a Hugging Face model into a checkpoint."""
    out: Path = options.out
    config = out.with_name(f"{out.name.removesuffix('.ckpt')}.yaml")
    if out.suffix in (".yaml", ".yml"):
        raise ValueError(f"--out {out}: a checkpoint is not YAML: call it {out.with_suffix('.ckpt')}")
    for path in (out, config):
        if os.path.lexists(path):
            raise ValueError(f"{path} exists: give another --out, or delete it")
    if not options.folder.is_dir():
        raise ValueError(f"{options.folder} is not a folder: give one with config.json and the weights")
    from lightning_llm.checkpoints.archives import write_atomically
    from lightning_llm.interop.reader import read_folder

    folder = read_folder(options.folder)
    write_atomically(_checkpoint(folder), out)
    architecture = {name: value for name, value in folder.config.to_dict().items() if value is not None}
    body = yaml.safe_dump({"model": {"architecture": architecture}}, sort_keys=False)
    write_text(config, f"# The architecture of {file_name(folder.path.name)}, as it was imported.\n{body}")
    for note in folder.notes:
        print(f"note: {note}")
    print(f"{options.folder} -> {out}, {out.stat().st_size / 1e6:,.1f} MB; its architecture: {config}")
    if folder.tokenizer is None:
        print("the folder has no tokenizer: the checkpoint has none either")
    else:
        tokenizer = f"--tokenizer {shell_path(options.folder / 'tokenizer.json')}{_boundary_options(folder)}"
        print(f"to train it on: lightning-llm prepare TEXT {tokenizer} --out STORE")
        weights = f"--config {shell_path(config)} --model.init_from {shell_path(out)}"
        context = f"--data.context_length {min(1024, folder.config.max_position_embeddings)}"
        print(f"  lightning-llm fit {weights} --data.store STORE {context}")


def _boundary_options(folder: "ModelFolder") -> str:
    """Options of ``prepare`` for tokens around a text that the folder names in another file than tokenizer.json."""
    from lightning_llm.data.tokenizers import NO_TOKEN, Tokenizer

    written = Tokenizer.from_file(folder.path / "tokenizer.json")
    used = Tokenizer.from_str(folder.tokenizer or "")
    options = ""
    if used.begin_of_text != written.begin_of_text:
        options += f" {shell_option('--begin-of-text', used.begin_of_text or NO_TOKEN)}"
    if used.eos_token_id is not None and used.eos_token_id != written.eos_token_id:
        options += f" {shell_option('--end-of-text', used.token(used.eos_token_id))}"
    return options


def _checkpoint(folder: "ModelFolder") -> dict[str, Any]:
    """Checkpoint that ``fit`` would have written, without the state that only training has."""
    from lightning_llm.checkpoints.schema import FORMAT, own_part
    from lightning_llm.model.weights import only_finite

    state = {f"transformer.{name}": tensor for name, tensor in only_finite(folder.tensors(), folder.path)}
    if folder.config.tie_word_embeddings:
        state["transformer.lm_head.weight"] = state["transformer.embed_tokens.weight"]
    return {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": version("lightning"),
        "state_dict": state,
        "hyper_parameters": {"architecture": folder.config.to_dict(), "loss_chunks": None},
        FORMAT: own_part(folder.tokenizer),
    }


def _consolidate_options(parser: OneLineParser) -> None:
    parser.add_argument("checkpoint", help=CHECKPOINT)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write; must not exist")


@subcommand(_consolidate_options)
def run_consolidate(options: argparse.Namespace) -> None:
    """Merge the shards of a checkpoint into one file."""
    out: Path = options.out
    if os.path.lexists(out):
        raise ValueError(f"--out {out} exists: give another name, or delete it")
    checkpoint = find_checkpoint(options.checkpoint, RUNS)
    from lightning_llm.checkpoints.archives import write_atomically
    from lightning_llm.checkpoints.reading import read_checkpoint

    content = read_checkpoint(checkpoint, needs=("state_dict",))
    write_atomically(content, out)
    print(f"{checkpoint} (step {content.get('global_step', '?')}) -> {out}, {out.stat().st_size / 1e6:,.1f} MB")
