"""``lightning-llm import DIR --out CKPT``: a ``transformers`` folder as a checkpoint, its architecture as a config.

(``import`` is a Python keyword, so no module can have this name.)
"""

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lightning_llm.cli.errors import OneLineParser, tool

if TYPE_CHECKING:
    from lightning_llm.interop.reader import ModelFolder


def build_parser() -> OneLineParser:
    """The options."""
    parser = OneLineParser("lightning-llm import", "Turn a Hugging Face model into a checkpoint.")
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="with config.json, safetensors and tokenizer.json")
    add("--out", type=Path, required=True, metavar="CKPT", help="the checkpoint; a config goes to the same folder")
    return parser


@tool(build_parser)
def main(options: argparse.Namespace) -> None:
    """Run the command."""
    # after the options are parsed: a typo is reported without waiting for torch
    from lightning_llm.checkpoints.archives import write_atomically
    from lightning_llm.interop.reader import read_folder

    out: Path = options.out
    config = out.with_name(f"{out.name.removesuffix('.ckpt')}.yaml")
    if out.suffix in (".yaml", ".yml"):
        raise ValueError(f"--out {out}: a checkpoint is not YAML: call it {out.with_suffix('.ckpt')}")
    for path in (out, config):
        if path.exists():
            raise ValueError(f"{path} exists: give another --out, or delete it")
    folder = read_folder(options.folder)
    write_atomically(_checkpoint(folder), out)
    architecture = {name: value for name, value in folder.config.to_dict().items() if value is not None}
    body = yaml.safe_dump({"model": {"architecture": architecture}}, sort_keys=False)
    config.write_text(f"# The architecture of {folder.path.name}, as it was imported.\n{body}", encoding="utf-8")
    for note in folder.notes:
        print(f"note: {note}")
    print(f"{options.folder} -> {out}, {out.stat().st_size / 1e6:,.1f} MB; its architecture: {config}")
    if folder.tokenizer is None:
        print("the folder has no tokenizer: the checkpoint has none either")
    else:
        tokenizer = options.folder / "tokenizer.json"
        print(f"to train it on: lightning-llm prepare TEXT --tokenizer {tokenizer} --out STORE")
        context = f"--data.context_length {min(1024, folder.config.max_position_embeddings)}"
        print(f"  lightning-llm fit --config {config} --model.init_from {out} --data.store STORE {context}")


def _checkpoint(folder: "ModelFolder") -> dict[str, Any]:
    """What ``fit`` would have written, without the state that only training has."""
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
