"""``python -m benchmarks generate``: tokens per second of decoding, on equal weights and prompts, interleaved.

    cached        ``generation.generate``: a cache of keys and values
    recomputed    the whole prefix at each step, as without a cache
    transformers  ``LlamaForCausalLM.generate`` with the same weights; left out where it is not installed

Each samples without filters. The prompt is random, and the time is that of the prompt and all new tokens.
"""

import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.charts import HIGHER, Measure, bar_plot
from benchmarks.harness import Bench, Request, timed_rows
from benchmarks.rows import Columns, Row, columns
from benchmarks.workloads import llama, model_config
from lightning_llm.generation.decoding import generate
from lightning_llm.model.transformer import Transformer

VARIANTS = ("recomputed", "transformers", "cached")
COLUMNS: Columns = {
    **columns("tokens/s"),
    "ms/token": (lambda row: 1 / row.tokens_per_s if row.tokens_per_s else None, 1e3, ".2f"),
    **columns("total ms", "p20", "p80"),
    "speed over the first": (lambda row: 1 / row.ratio if row.ratio else None, 1, ".2f"),
}
draw = bar_plot(Measure("tokens_per_s", 1, f"tokens/s, one sequence{HIGHER}"))


def run(request: Request) -> Iterator[Row]:
    """A row for each variant; ``ratio`` is its time over that of the first."""
    variants = request.chosen(name for name in VARIANTS if name != "transformers" or find_spec(name))
    sizes, new = request.sizes, request.sizes["new"]
    torch.manual_seed(0)
    model = Transformer(model_config({**sizes, "context": sizes["prompt"] + new}))
    model.to(request.device, getattr(torch, request.dtype)).eval()
    prompt = torch.randint(sizes["vocab"], (1, sizes["prompt"]), device=request.device)
    runs: dict[str, Callable[[], Any]] = {
        "recomputed": lambda: _recompute(model, prompt, new),
        "cached": lambda: generate(model, prompt, max_new_tokens=new),
    }
    if "transformers" in variants:
        theirs, options = _transformers_model(model), {"do_sample": True, "top_k": 0, "pad_token_id": 0}
        runs["transformers"] = lambda: theirs.generate(prompt, max_new_tokens=new, min_new_tokens=new, **options)
    yield from timed_rows({name: runs[name] for name in variants}, request, warmup=1, tokens=new)


@torch.no_grad()
def _recompute(model: Transformer, ids: Tensor, new: int) -> Tensor:
    for _ in range(new):
        probabilities = model.logits(model(ids)[:, -1]).float().softmax(dim=-1)
        ids = torch.cat((ids, torch.multinomial(probabilities, 1)), dim=1)
    return ids


def _transformers_model(model: Transformer) -> Any:
    """The same weights as ``LlamaForCausalLM``: its names are ours, below ``model``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own loading
        theirs = llama(model.config)
    state = {name if name.startswith("lm_head") else f"model.{name}": v for name, v in model.state_dict().items()}
    theirs.load_state_dict(state)
    weight = model.embed_tokens.weight
    return theirs.to(weight.device, weight.dtype).eval()


BENCH = Bench(
    run=run,
    shapes=["4x4x4x256x4096x32x256", "8x8x4x512x8192x32x256"],
    sizes=("layers", "heads", "kv_heads", "hidden", "vocab", "prompt", "new"),
    columns=COLUMNS,
    draw=draw,
    files=("lightning_llm/generation", "lightning_llm/model"),
)
