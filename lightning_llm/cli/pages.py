"""The page that explains a command or an option: what a line about a mistake ends with."""

import re

FIRST = "docs/quickstart.md"
COMMANDS = {
    "fit": FIRST,
    "check": "docs/resume.md",
    "validate": "docs/generation.md",
    "test": "docs/generation.md",
    "predict": "docs/generation.md",
    "prepare": "docs/data.md",
    "tokenizer": "docs/generation.md",
    "data": "docs/data.md",
    "generate": "docs/generation.md",
    "evaluate": "docs/generation.md",
    "export": "docs/interop.md",
    "import": "docs/interop.md",
    "consolidate": "docs/distributed.md",
    "dashboard": "docs/dashboard.md",
    "compare": "docs/dashboard.md",
    "estimate": "docs/accounting.md",
    "plan": "docs/accounting.md",
    "bench": "docs/benchmarks.md",
}
ABOUT = {  # of the commands whose options are those of Lightning's Trainer; with what `fit` says for all
    "fit": "Train a model: prepare the text if need be, train, validate, save, and print a sample.",
    "check": "Look at everything that fit looks at before its first step, and start nothing.",
    "validate": "Loss, perplexity and bits per byte of a checkpoint (--ckpt_path) on the validation text.",
    "test": "Loss, perplexity and bits per byte of a checkpoint (--ckpt_path) on the test text.",
    "predict": "The likeliest continuation of each of --data.predict_prompts, as JSON lines.",
}
SYNTAX = (
    "Every option can stand in a YAML file (--config; of several, the later wins) or on the command line, which wins "
    "over the files. Its name is its path in the file: 'trainer: {max_steps: 100}' is --trainer.max_steps 100. "
    "--print_config shows all of them with their values. --trust-code lets model.init_from name classes from outside "
    "lightning_llm."
)
# By page, the words of a message that lead there from commands that have options of many kinds. The first one counts.
WITH_OPTIONS = ("fit", "check", "validate", "test", "predict")
OPTIONS = {
    "docs/accounting.md": ("memory_budget",),
    "docs/dashboard.md": ("logger", "SampleText", "Dashboard", "JSONLinesLogger"),
    "docs/data.md": (
        *("corpus", "data.path", "store", "mixture", "raw_dtype", "dtype", "document_mask", "context_length"),
        *("global_batch_size", "micro_batch_size", "eval_batch_size", "num_workers", "predict_prompts", "UTF-8"),
    ),
    "docs/distributed.md": (
        *("devices", "num_nodes", "strategy", "MASTER_ADDR", "processes"),
        *("has lost the others", "could not reach the others"),
    ),
    "docs/extending.md": ("mlp", "optimizer", "schedule", "callbacks"),
    "docs/interop.md": ("init_from", "rope_scaling"),
    "docs/memory-optimised.md": ("checkpoint_level", "recompute", "loss_chunks"),
    "docs/memory.md": ("MemoryProfiler", "out of memory"),
    "docs/speed.md": ("compile_mode", "keep_freed_memory", "precision"),
    "docs/reference/model.md": (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "max_position_embeddings", "norm", "rms_norm_eps", "position", "rope_theta", "qk_norm"),
        *("dropout", "attention_bias", "mlp_bias", "lm_head_bias", "tie_word_embeddings", "initializer_range"),
        "architecture",
    ),
    "docs/resume.md": ("ckpt_path", "checkpoint", "checkpoints", "weights_only", "disk", "stopped"),
}
_PAGES = {word: page for page, words in OPTIONS.items() for word in words}
_LONGEST_FIRST = "|".join(map(re.escape, sorted(_PAGES, key=len, reverse=True)))
_WORD = re.compile(rf"(?<![\w.])(?:[\w.]*\.)?({_LONGEST_FIRST})(?!\w)")  # perhaps with its section, as in data.store


def with_page(command: str, line: str) -> str:
    """One line, with the page behind it.

    Args:
        command: The word behind ``lightning-llm``.
        line: What is wrong; line breaks in it become spaces.
    """
    line = " ".join(line.split())
    told = [found[1] for found in _WORD.finditer(line)] if command in WITH_OPTIONS else []
    # the name of a class, which stands in capitals, says more than the option that it was given to
    word = next((word for word in told if word[0].isupper()), next(iter(told), None))
    return f"{line} ({COMMANDS.get(command, FIRST) if word is None else _PAGES[word]})"
