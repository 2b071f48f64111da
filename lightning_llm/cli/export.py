"""``lightning-llm export CKPT --to hf DIR``: a trained model as a folder that ``transformers`` loads."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_llm.accounting.hardware import byte_size
from lightning_llm.cli.model_argument import add_trust
from lightning_llm.cli.parser import OneLineParser, run_tool
from lightning_llm.cli.yaml_files import read_config

if TYPE_CHECKING:
    from lightning_llm.interop.model_card import RunRecord


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = OneLineParser("lightning-llm export", "Write a trained model as a folder that transformers loads.")
    parser.add_argument("checkpoint", help="a checkpoint, or a run directory (takes its best, else its newest)")
    parser.add_argument("--to", choices=("hf",), default="hf", help="the format: hf, for transformers (default)")
    parser.add_argument("out", type=Path, metavar="DIR", help="the folder to write; must not exist, or be empty")
    parser.add_argument(
        "--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="of a file of weights (default: 5GB)"
    )
    add_trust(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    return run_tool(build_parser(), argv, _export)


def _export(options: argparse.Namespace) -> None:
    # after the options are read: a typing mistake is answered without waiting for torch
    from lightning_llm.checkpoints.reading import load_transformer
    from lightning_llm.cli.runs import find_checkpoint
    from lightning_llm.interop.writer import export_model

    checkpoint = find_checkpoint(options.checkpoint, Path("runs"))
    model, tokenizer = load_transformer(checkpoint, trust_code=options.trust_code)
    record = _record(checkpoint)
    name = export_model(model, tokenizer, options.out, max_shard_bytes=options.max_shard_size, record=record)
    print(f"{checkpoint} (step {record.step}) -> {options.out}, as {name}")
    if not tokenizer:
        print("the checkpoint holds no tokenizer: the folder has none either")


def _record(checkpoint: Path) -> "RunRecord":
    """What the model card tells of the run that the checkpoint lies in."""
    from lightning_llm.checkpoints.run_directory import read_summary
    from lightning_llm.cli.runs import CONFIG, SUMMARY, run_of, step_in
    from lightning_llm.interop.model_card import METRICS, RunRecord

    run = run_of(checkpoint)
    name, step = checkpoint.name, step_in(checkpoint)
    if run is None:
        return RunRecord(name, step)
    metrics = read_summary(run, METRICS) if (run / SUMMARY).is_file() else None
    config = read_config(run / CONFIG)
    return RunRecord(name, step, metrics, config)


def _size(words: str) -> int:
    try:
        size = byte_size(words)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < 1:
        raise argparse.ArgumentTypeError(f"{words!r}: a file must hold at least a byte")
    return size
