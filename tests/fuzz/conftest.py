"""A tiny world of valid files: a text, a store, a run, an exported folder, configs. Draws work on copies of parts."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import yaml
from hypothesis import HealthCheck, Phase, settings

from benchmarks.harness import describe_machine
from lightning_llm.__main__ import main
from lightning_llm.cli import dashboard
from tests.ablate.conftest import frozen, work
from tests.fuzz import watch

FACTOR = float(os.environ.get("LIGHTNING_LLM_FUZZ", "1"))  # times as many draws
IN_CI = 4  # by .ci/run: up to so many times, the same draws each time; beyond, new ones
CONFIG = {
    "seed_everything": 1,
    "keep_freed_memory": False,
    "model": {
        "architecture": {
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 16,
            "norm": "rmsnorm",
            "rope_theta": 1000.0,
            "mlp": "memory_optimized_swiglu",
            "checkpoint_level": [0, 1],
            "qk_norm": True,
            "dropout": 0.0,
        },
        "optimizer": {
            "class_path": "lightning_llm.optim.AdamW",
            "init_args": {"lr": 0.001, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "schedule": {"class_path": "lightning_llm.optim.WarmupCosine", "init_args": {"warmup_steps": 1}},
        "loss_chunks": 2,
    },
    "data": {"store": "stores/s", "context_length": 8, "global_batch_size": 4, "micro_batch_size": 2, "seed": 3},
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "precision": "32-true",
        "max_steps": 2,
        "val_check_interval": 1,
        "limit_val_batches": 2,
        "log_every_n_steps": 1,
        "gradient_clip_val": 1.0,
        "callbacks": [
            {
                "class_path": "lightning_llm.training.callbacks.SampleText",
                "init_args": {"every_n_steps": 2, "prompt": "a", "max_new_tokens": 2},
            }
        ],
    },
}
SMALL = {
    "model": {"architecture": {"vocab_size": 280, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}},
    "data": {"mixture": {"stores/s": 0.5, "stores/t": 0.5}, "context_length": 4, "global_batch_size": 2},
    "trainer": {"accelerator": "cpu", "max_steps": 2, "limit_val_batches": 1, "val_check_interval": 2},
}
SMALL["trainer"]["log_every_n_steps"] = 1  # fewer steps than an interval: a warning, which the tests make an error
TEXT = "".join(f"{'abcdefghij'[n % 10] * (n % 7 + 1)} {n * n % 97}\n" for n in range(300))
CANARY = "class Part:\n    pass\n"


class World:
    """Where the valid files are, and a copy of some of them for each draw."""

    def __init__(self, template: Path, draws: Path) -> None:
        self.template, self.draws, self.count = template, draws, 0

    @contextmanager
    def copy(self, *parts: str) -> Iterator[tuple[Path, Path]]:
        """A fresh folder, and one two levels below, where ``../../x`` still leads into it, with copies of the parts."""
        self.count += 1
        root = self.draws / str(self.count)
        work = root / "a" / "b"
        work.mkdir(parents=True)
        (work / "canary_parts.py").write_text(CANARY, encoding="utf-8")
        for part in parts:
            source, target = self.template / part, work / part
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                shutil.copyfile(source, target)
        try:
            with mock.patch.dict(os.environ, HOME=str(work)):  # a draw may read all of ~, which may hold gigabytes
                yield root, work
        finally:
            watch.clear(root)


class Subject:
    """Counts the draws of a subject, and those whose file the format's own parser still reads."""

    def __init__(self, name: str) -> None:
        self.name, self.drawn, self.parsed, self.succeeded = name, 0, 0, 0

    def count(self, is_parsed: bool) -> None:
        self.drawn += 1
        self.parsed += is_parsed

    def check(self) -> None:
        """At least half of the draws got beyond the parser, or they would test nobody but it; some went well."""
        assert self.drawn >= 10
        assert 2 * self.parsed >= self.drawn, f"{self.name}: {self.parsed} of {self.drawn} are readable"
        assert self.succeeded, f"{self.name}: no command has ended well: correct results were never looked at"


def amount(draws: int, is_slow: bool = False) -> settings:
    """So many draws: by hand, other ones each time. Not shrunk: a draw has three edits at most.

    ``is_slow``: a draw takes seconds, so that .ci/run has no more of them than the quick tests.
    """
    factor = min(1, FACTOR) if is_slow and FACTOR <= IN_CI else FACTOR
    return settings(
        max_examples=max(10, int(draws * factor)),
        derandomize=FACTOR <= IN_CI,
        database=None,
        deadline=None,  # watch.SECONDS is the bound
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=[HealthCheck.too_slow],
    )


def succeed(words: Sequence[str]) -> None:
    assert main(words) == 0, words


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    template, before = tmp_path_factory.mktemp("template"), Path.cwd()
    os.chdir(template)
    try:
        Path("text.txt").write_text(TEXT, encoding="utf-8")
        Path("tiny.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
        Path("small.yaml").write_text(yaml.safe_dump(SMALL), encoding="utf-8")
        bpe = ["--tokenizer", "bpe", "--vocab-size", "280", "--begin-of-text", "<|endoftext|>"]
        succeed(["prepare", "text.txt", *bpe, "--test-fraction", "0.1", "--out", "stores/s"])
        succeed(["prepare", "text.txt", "--tokenizer", "stores/s/tokenizer.json", "--out", "stores/t"])
        for part in ("1/2", "2/2"):
            succeed(["prepare", "text.txt", "--tokenizer", "byte", "--out", "shards/u", "--shard", part])
        succeed(["fit", "--config", "tiny.yaml"])
        describe_machine("cpu")  # asks uname, once in a process
        succeed(["export", "runs/tiny/version_0", "hf", "--max-shard-size", "8KB"])
        work(frozen(template, {"a": {"effect": -0.5}, "b": {"effect": 0.0}}, delta=0.01).out)
    finally:
        os.chdir(before)
    return World(template, tmp_path_factory.mktemp("draws"))


@pytest.fixture(scope="session", autouse=True)
def _dashboard_without_server():
    """It would serve until Ctrl-C."""
    patch = pytest.MonkeyPatch()
    patch.setattr(dashboard, "_serve", lambda folder, port, count: None)
    yield
    patch.undo()
