"""``lightning-llm import DIR --out CKPT``: a folder of ``transformers`` as a checkpoint, its architecture as a config.

(``import`` is a word of Python's own, so that no module can have its name.)
"""

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lightning_llm.cli.parser import OneLineParser, run_tool

if TYPE_CHECKING:
    from lightning_llm.interop.reader import ModelFolder


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = OneLineParser("lightning-llm import", "Turn a model of transformers into a checkpoint.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="with config.json, safetensors and tokenizer.json")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="CKPT",
        help="the checkpoint to write; its architecture goes beside it, as a config that ends in .yaml",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    return run_tool(build_parser(), argv, _import)


def _import(options: argparse.Namespace) -> None:
    # after the options are read: a typing mistake is answered without waiting for torch
    from lightning_llm.checkpoints.archives import write_atomically
    from lightning_llm.interop.reader import read_folder

    out: Path = options.out
    beside = out.with_name(f"{out.name.removesuffix('.ckpt')}.yaml")
    if out.suffix in (".yaml", ".yml"):
        raise ValueError(f"--out {out}: a checkpoint is no YAML: call it {out.with_suffix('.ckpt')}")
    for path in (out, beside):
        if path.exists():
            raise ValueError(f"{path} exists: give another --out, or remove it")
    folder = read_folder(options.folder)
    write_atomically(_checkpoint(folder), out)
    beside.write_text(_config(folder), encoding="utf-8")
    for note in folder.notes:
        print(f"note: {note}")
    print(f"{options.folder} -> {out}, {out.stat().st_size / 1e6:,.1f} MB; its architecture: {beside}")
    if folder.tokenizer is None:
        print("the folder has no tokenizer: the checkpoint has none either")
    else:
        tokenizer = options.folder / "tokenizer.json"
        print(f"to train it on: lightning-llm prepare TEXT --tokenizer {tokenizer} --out STORE")
        context = f"--data.context_length {min(1024, folder.config.max_position_embeddings)}"
        print(f"  lightning-llm fit --config {beside} --model.init_from {out} --data.store STORE {context}")


def _checkpoint(folder: "ModelFolder") -> dict[str, Any]:
    """What ``fit`` would have written, without what training has beside weights."""
    from lightning_llm.checkpoints.schema import FORMAT, FORMAT_VERSION
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
        FORMAT: {"format_version": FORMAT_VERSION, "tokenizer": folder.tokenizer},
    }


def _config(folder: "ModelFolder") -> str:
    architecture = {name: value for name, value in folder.config.to_dict().items() if value is not None}
    return f"# The architecture of {folder.path.name}, as it was imported.\n" + yaml.safe_dump(
        {"model": {"architecture": architecture}}, sort_keys=False
    )
