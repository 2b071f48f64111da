"""``python -m benchmarks``: its list, and mistakes."""

from importlib import import_module

import pytest

from benchmarks.__main__ import main
from benchmarks.command_line import BENCHES
from benchmarks.harness import Bench


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_of_the_list_is_there_and_reads_its_own_shapes(name):
    bench = import_module(f"benchmarks.{name.replace('-', '_')}").BENCH
    assert isinstance(bench, Bench)
    assert bench.name == name
    assert len(bench.read_shapes(None)) >= len(bench.shapes)
    for shapes in bench.named_shapes.values():
        assert list(bench.read_shapes(shapes)) == list(shapes)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["swiglu", "--shapes", "8x512"], "must be batch x seq x hidden x intermediate x layers, such as"),
        (["loss", "--shapes", "0x1x2"], "must be tokens x hidden x vocab, such as 4096x768x50257, or llama-3-8b"),
        (["swiglu", "--variants", "ours 9", "standard"], "variants 'ours 9': there are standard, notebook 0,"),
        (["swiglu", "--rounds", "0"], "rounds must be at least 1"),
    ],
)
def test_a_users_mistake_is_one_line(words, says, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert len(error.splitlines()) == 1
