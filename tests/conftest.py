"""Fixtures: a small text to train on, and guards that fail a test which leaks state into the next."""

import os
import random

import pytest
import torch

torch.set_num_threads(1)  # tests run side by side: two processes of two threads each on two cores take 20 times as long


# pytest's own notes, Lightning's seed and the layout for its subprocesses, torch's compiler cache and OpenMP runtime
WRITTEN_BY_LIBRARIES = ("PYTEST_", "PL_", "LT_", "TORCHINDUCTOR", "_TORCHINDUCTOR", "KMP_")


@pytest.fixture(autouse=True)
def _no_leaks():
    """A test must leave the environment, the process group and torch's switches as it found them."""
    environment = dict(os.environ)
    yield
    changed = {name for name in environment.keys() | os.environ.keys() if environment.get(name) != os.environ.get(name)}
    for name in changed:
        if name in environment:
            os.environ[name] = environment[name]
        else:
            del os.environ[name]
    leaked = {name for name in changed if not name.startswith(WRITTEN_BY_LIBRARIES)}
    assert not leaked, f"left in the environment: {sorted(leaked)}"
    assert not (torch.distributed.is_available() and torch.distributed.is_initialized()), "left a process group"
    assert not torch.are_deterministic_algorithms_enabled(), "left deterministic algorithms on"
    assert torch.is_grad_enabled(), "left gradients off"


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """About 40 kB of made-up sentences: enough structure to learn, nobody's words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 6))) for _ in range(60)]
    lines = [" ".join(rng.choices(words, k=8)).capitalize() + "." for _ in range(1000)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
