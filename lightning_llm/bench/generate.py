"""``lightning-llm bench generate``: tokens per second of decoding, on equal weights and prompts, by turns.

    cached        ``generation.generate``: a cache of keys and values
    recomputed    the whole prefix at each step, as without a cache
    transformers  ``LlamaForCausalLM.generate`` with the same weights; left out where it is not installed

Each samples without filters. The prompt is random, and the time is that of the prompt and all new tokens.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table
from torch import Tensor

from lightning_llm.bench.harness import Request, Row, chosen_names, draw_bars, timed_rows
from lightning_llm.generation.decoding import generate
from lightning_llm.io.console import Console
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer

NAMES = ("layers", "heads", "kv_heads", "hidden", "vocab", "prompt", "new")
SHAPES: dict[str, list[str]] = {}
DEFAULT_SHAPES = ["4x4x4x256x4096x32x256", "8x8x4x512x8192x32x256"]
VARIANTS = ("recomputed", "transformers", "cached")


def run(asked: Request) -> Iterator[Row]:
    """A row for each variant and shape; ``ratio`` is its time over that of the first."""
    known = VARIANTS if find_spec("transformers") else tuple(name for name in VARIANTS if name != "transformers")
    variants = chosen_names(known, asked.variants)
    for text in asked.shapes:
        sizes = _sizes(text)
        for dtype in asked.dtypes:
            runs = _runs(sizes, dtype, asked.device, variants)
            yield from timed_rows("generate", runs, asked, shape=text, dtype=dtype, warmup=1, tokens=sizes["new"])


def _sizes(text: str) -> dict[str, int]:
    parts = text.split("x")
    if len(parts) != len(NAMES) or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"shapes {text!r} must be {' x '.join(NAMES)}, such as {DEFAULT_SHAPES[0]}")
    return dict(zip(NAMES, map(int, parts), strict=True))


def _runs(
    sizes: dict[str, int], dtype: torch.dtype, device: str, variants: Sequence[str]
) -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=sizes["vocab"],
        hidden_size=sizes["hidden"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        max_position_embeddings=sizes["prompt"] + sizes["new"],
    )
    model = Transformer(config).to(device, dtype).eval()
    prompt = torch.randint(sizes["vocab"], (1, sizes["prompt"]), device=device)
    new = sizes["new"]
    runs: dict[str, Callable[[], Any]] = {
        "recomputed": lambda: _recompute(model, prompt, new),
        "cached": lambda: generate(model, prompt, max_new_tokens=new),
    }
    if "transformers" in variants:
        theirs = _transformers_model(model)
        runs["transformers"] = lambda: theirs.generate(
            prompt, max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0, pad_token_id=0
        )
    return {name: runs[name] for name in variants}


@torch.no_grad()
def _recompute(model: Transformer, ids: Tensor, new: int) -> Tensor:
    for _ in range(new):
        probabilities = model.logits(model(ids)[:, -1]).float().softmax(dim=-1)
        ids = torch.cat((ids, torch.multinomial(probabilities, 1)), dim=1)
    return ids


def _transformers_model(model: Transformer) -> Any:
    """The same weights as ``LlamaForCausalLM``: its names are ours, below ``model``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own loading
        theirs = LlamaForCausalLM(LlamaConfig(**{name: getattr(config, name) for name in names}))
    state = {name if name.startswith("lm_head") else f"model.{name}": v for name, v in model.state_dict().items()}
    theirs.load_state_dict(state)
    weight = model.embed_tokens.weight
    moved: Any = theirs  # its types hide that `to` takes what every module's takes
    return moved.to(weight.device, weight.dtype).eval()


def print_table(rows: Sequence[Row], console: Console) -> None:
    """A table for each shape and dtype."""
    for key in dict.fromkeys((row.shape, row.dtype) for row in rows):
        table = Table(Column("variant", no_wrap=True), title=" ".join(key))
        for column in ("tokens/s", "ms/token", "p20", "p80", "times the first"):
            table.add_column(column, justify="right")
        for row in (row for row in rows if (row.shape, row.dtype) == key):
            assert row.total_s is not None
            assert row.tokens_per_s is not None
            new = row.tokens_per_s * row.total_s
            each = (f"{1000 * (s or 0) / new:.2f}" for s in (row.total_s, row.total_p20_s, row.total_p80_s))
            table.add_row(row.variant, f"{row.tokens_per_s:,.0f}", *each, f"{1 / (row.ratio or 1):.2f}")
        console.print(table)


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """A bar of tokens per second for each variant, shape and dtype."""
    values = {f"{row.variant}\n{row.shape} {row.dtype}": row.tokens_per_s or 0.0 for row in rows}
    draw_bars(values, path, title, unit="tokens per second, one sequence")
