"""Every ``python -m benchmarks NAME`` at its smallest: whole rows and a plot; and its mistakes are one line."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import checkpoint, cost, data, mup, overhead, stream, techniques
from benchmarks.__main__ import main
from benchmarks.command_line import BENCHES
from lightning_llm.ops import sizes

LIKE_MUP = {"CONTEXT": 16, "BATCH": 2, "STEPS": 4, "CHECK_STEPS": 3, "VALIDATION": 1, "SEEDS": range(1)}
LIKE_MUP |= {"RATES": [2**-9, 2**-6], "BENCH": replace(mup.BENCH, check=lambda rows: None)}
STEP = "1x2x32x64x32x2x65"
TECHNIQUES = "2x2x32x64x16x8x64"
BASE = {"context": 16, "width": 64, "depth": 1, "vocab": 64, "batch": 1}
NO_BARS = {
    "MOST_FALSE": 1.0,
    "MOST_STRESSED": 1.0,
    "LEAST_POWER": 0.0,
    "MOST_RUNS": 100.0,
}  # few streams bound no share
FIT = ["--trainer.max_steps=2", "--trainer.val_check_interval=2"]

# (words, what is made smaller: module, name, value, how many rows)
SMALLEST = {
    "runs": (["--shapes", "shakespeare", "--", *FIT, "--data.path={text}"], [], 4),
    "baselines": (["--shapes", STEP, "--variants", "transformers", "ours", "--rounds", "1"], [], 2),
    "techniques": (
        ["--shapes", TECHNIQUES, "--rounds", "1", "--variants", "per-head loops", "chunked loss", "fused optimizer"],
        [(techniques, "in_fresh_processes", lambda function, jobs, **_: [function(jobs[0])])],
        3,
    ),
    "overhead": (["--shapes", "5", "--rounds", "1"], [(overhead, "WARM_UP", 2)], len(overhead.VARIANTS)),
    "cost": (["--shapes", "depth=1-2", "--rounds", "1"], [(cost, "BASE", BASE)], 4),
    "memory-scaling": (
        ["--shapes", "1x512x32x512x1", "1x1024x32x512x1"],
        [(sizes, "TILE_BYTES", {"cpu": 256 * 64 * 4}), (sizes, "LONGEST_BLOCK", 256)],
        None,
    ),
    "process-scaling": (["--shapes", "2x64x32x1", "--variants", "1", "2", "--rounds", "1"], [], 4),
    "checkpoint": (["--shapes", "1", "--rounds", "2"], [(checkpoint, "_HIDDEN", 64)], len(checkpoint.VARIANTS)),
    "optimizer": (["--shapes", "1x64x65", "--rounds", "1"], [], None),
    "stream": (
        ["--shapes", "useless", "true"],
        [(stream, name, value) for name, value in {"STREAMS": 3, "IDEAS": 20, "TRUE": 4, **NO_BARS}.items()],
        None,
    ),
    "mup": (
        ["--shapes", "coordinates=16-32", "transfer=16-32", "--text", "{text}"],
        [(mup, name, value) for name, value in LIKE_MUP.items()],
        None,
    ),
    "initial-values": (
        ["--shapes", "3x2", "--text", "{text}"],
        [(mup, name, LIKE_MUP[name]) for name in ("CONTEXT", "BATCH", "VALIDATION")],
        4,
    ),
    "data": (["--variants", "bpe", "tokenizers", "byte", "--shapes", "1MiB", "--rounds", "1"], [], 3),
}
ELSEWHERE = {  # by the tests of what they are for
    "ablate": "test_ablate_looks.py",
    "ladder": "test_ladder.py",
    "faults": "test_faults.py",
    **{name: f"test_{name}.py" for name in ("generate", "loss", "race", "swiglu")},
}


def test_every_benchmark_is_among_them():
    assert {*SMALLEST, *ELSEWHERE} == set(BENCHES)


@pytest.mark.filterwarnings("ignore")  # of the libraries that are measured
@pytest.mark.parametrize("name", SMALLEST)
def test_it_measures_and_draws(name, tmp_path, monkeypatch, text_file, quick_processes):
    words, smaller, count = SMALLEST[name]
    for module, attribute, value in smaller:
        monkeypatch.setattr(module, attribute, value)
    if name == "data":
        corpus = SimpleNamespace(files=[SimpleNamespace(text=text_file.read_text)])
        monkeypatch.setattr(data, "open_corpus", lambda names: corpus)
    if name == "runs":  # they are processes of the command
        monkeypatch.setattr(sys, "executable", quick_processes.python)
        for variable, value in quick_processes.environment.items():
            monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    given = [word.format(text=text_file) for word in words]
    place = given.index("--") if "--" in given else len(given)
    assert main([name, *given[:place], "--json", "rows.json", *given[place:]]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert rows
    assert count in (None, len(rows))
    assert (tmp_path / "rows.png").stat().st_size > 5000 or name == "runs"
    assert not [row for row in rows if row.get("total_s", 1) is not None and row.get("total_s", 1) <= 0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["runs", "--shapes", "hamlet"], "there are quickstart, shakespeare"),
        (["baselines", "--variants", "jax"], "variants 'jax': there are"),
        (["cost", "--shapes", "width=100-200"], "a width must be a multiple of 64"),
        (["data", "--dtype", "bfloat16"], "--dtype bfloat16: data takes only float32"),
        (["faults", "--rounds", "0"], "rounds must be at least 1"),
        (["ladder", "--shapes", "cover"], "transfer"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(words, says, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert "\n" not in error
