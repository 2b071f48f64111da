"""``lightning-llm bench``: its benches, and mistakes."""

from importlib import import_module

import pytest

from benchmarks.__main__ import BENCHES as BENCHMARKS
from lightning_llm.__main__ import main
from lightning_llm.bench.harness import Bench
from lightning_llm.cli.bench import BENCHES


@pytest.mark.parametrize(
    ("package", "name"),
    [*(("lightning_llm.bench", name) for name in BENCHES), *(("benchmarks", name) for name in BENCHMARKS)],
)
def test_every_bench_of_the_list_is_there_and_reads_its_own_shapes(package, name):
    bench = import_module(f"{package}.{name.replace('-', '_')}").BENCH
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
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert len(error.splitlines()) == 1
