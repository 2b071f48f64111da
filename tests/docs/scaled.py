"""A command of the documents, made small: what stands in it holds, but for sizes and numbers of steps."""

from collections.abc import Sequence
from pathlib import Path

import yaml

MODEL = [
    "--model.architecture.hidden_size=32",
    "--model.architecture.intermediate_size=64",
    "--model.architecture.num_hidden_layers=2",
    "--model.architecture.num_attention_heads=2",
    "--model.architecture.num_key_value_heads=null",
    "--model.architecture.max_position_embeddings=32",
    "--data.context_length=32",
    "--data.global_batch_size=4",
    "--data.micro_batch_size=2",
]
TRAINER = [
    "--trainer.val_check_interval=2",
    "--trainer.limit_val_batches=2",
    "--trainer.log_every_n_steps=1",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
]
STEPS, STEPS_RESUMED = 2, 4
TEXT = ["--data.path=my.txt", "--data.vocab_size=300"]  # in the place of texts that are downloaded or large
PLACEHOLDERS = {"FILE": "my.txt", "S": "1"}
ONCE = ["--rounds", "1"]
BENCHES = {
    "swiglu": ["--shapes", "1x8x8x16x1", *ONCE],
    "loss": ["--shapes", "64x8x200", *ONCE],
    "memory-scaling": ["--shapes", "1x8x8x16x1", "1x16x8x16x1", *ONCE],
    "overhead": ["--shapes", "5", *ONCE],
    "checkpoint": ["--shapes", "1", "--rounds", "2"],
    "optimizer": ["--shapes", "1x64x65", *ONCE],
    "process-scaling": ["--shapes", "2x64x32x1", "--variants", "1", "2", *ONCE],
    "generate": ["--shapes", "2x4x2x32x65x4x12", *ONCE],
    "data": ["--shapes", "1MiB", *ONCE],
    "faults": ONCE,
    "techniques": ["--shapes", "2x2x32x64x16x8x64", "--variants", "per-head loops", "fused optimizer", *ONCE],
    "cost": ["--shapes", "depth=1-2", "--variants", "ours", *ONCE],
    "baselines": ["--shapes", "1x2x32x64x32x2x65", "--variants", "transformers", "ours", *ONCE],
}


def is_whole(config: str) -> bool:
    """Whether a config names a model and data of the reader's own: it needs no other config, and no sizes of ours."""
    return all("class_path" in (yaml.safe_load(config).get(group) or {}) for group in ("model", "data"))


def scaled(words: Sequence[str]) -> list[str]:
    """The words behind ``lightning-llm`` (``bench`` for ``python -m benchmarks``), with what makes the command small.

    Raises:
        KeyError: A bench that is not known here.
    """
    command, *options = (PLACEHOLDERS.get(word, word) for word in words)
    if command in ("fit", "check"):
        if "--print_config" in options or "--help" in options:
            return [command, *options]
        has_text = any(word.startswith(("--data.store", "--data.path", "--data.mixture")) for word in options)
        resumes = any(word.startswith("--ckpt_path") for word in options)
        steps = f"--trainer.max_steps={STEPS_RESUMED if resumes else STEPS}"
        sizes = [*([] if has_text else TEXT), *MODEL]
        if any(word.startswith("--data.class_path") for word in options):  # which takes none of these
            sizes = [word for word in sizes if not word.startswith("--data.")]
        if any(word.endswith(".yaml") and is_whole(Path(word).read_text()) for word in options):
            sizes = []
        return [command, *options, *sizes, *TRAINER, steps]
    if command == "generate":
        return [command, *options, "--max-new-tokens", "4"]
    if command == "evaluate":
        return [command, *options, "--stride", "16"]
    if command == "benchmarks":
        return [command, *options, *BENCHES[options[0]]]
    return [command, *options]
