"""``lightning-llm export CKPT --to hf DIR``: a trained model as a folder that ``transformers`` loads."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_llm.cli.errors import OneLineParser, tool
from lightning_llm.cli.run_config import read_config, size_option
from lightning_llm.cli.runs import CONFIG, SUMMARY, add_trust, find_checkpoint, run_of, step_in

if TYPE_CHECKING:
    from lightning_llm.interop.writer import RunRecord


def build_parser() -> OneLineParser:
    """The options."""
    parser = OneLineParser("lightning-llm export", "Write a trained model as a folder that transformers loads.")
    parser.add_argument("checkpoint", help="a checkpoint, or a run directory (its best checkpoint, else its newest)")
    parser.add_argument("--to", choices=("hf",), default="hf", help="the format: hf, for transformers (default)")
    parser.add_argument("out", type=Path, metavar="DIR", help="the folder to write; must not exist, or be empty")
    parser.add_argument(
        "--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="of a file of weights (default: 5GB)"
    )
    add_trust(parser)
    return parser


@tool(build_parser)
def main(options: argparse.Namespace) -> None:
    """Run the command."""
    # after the options are parsed: a typo is reported without waiting for torch
    from lightning_llm.checkpoints.reading import load_transformer
    from lightning_llm.interop.writer import export_model

    checkpoint = find_checkpoint(options.checkpoint, Path("runs"))
    model, tokenizer = load_transformer(checkpoint, trust_code=options.trust_code)
    record = _record(checkpoint)
    name = export_model(model, tokenizer, options.out, max_shard_bytes=options.max_shard_size, record=record)
    print(f"{checkpoint} (step {record.step}) -> {options.out}, as {name}")
    if not tokenizer:
        print("the checkpoint holds no tokenizer: the folder has none either")


def _record(checkpoint: Path) -> "RunRecord":
    """What the model card says about the run that the checkpoint is in."""
    from lightning_llm.checkpoints.run_directory import read_summary
    from lightning_llm.interop.writer import METRICS, RunRecord

    run = run_of(checkpoint)
    if run is None:
        return RunRecord(checkpoint.name, step_in(checkpoint))
    metrics = read_summary(run, METRICS) if (run / SUMMARY).is_file() else None
    return RunRecord(checkpoint.name, step_in(checkpoint), metrics, read_config(run / CONFIG))


def _size(words: str) -> int:
    if not (size := size_option(words)):
        raise argparse.ArgumentTypeError(f"{words!r}: a file must hold at least a byte")
    return size
