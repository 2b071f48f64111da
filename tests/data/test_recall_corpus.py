"""The corpus ``recall``: the answers are the only repeated bigrams, and its chance level is that of guessing."""

import itertools
import math
import re

import numpy as np
import pytest
import torch

from lightning_llm.data.bigrams import repeated_bigrams
from lightning_llm.data.corpora import NAMED_CORPORA, is_named, open_corpus
from lightning_llm.data.find_store import find_or_prepare
from lightning_llm.data.recall_corpus import BETWEEN, RecallText
from lightning_llm.data.tokenizers import Tokenizer
from tests.data.conftest import fault

FIRST = ["zO,pJ,dU,0zO0pJ0dU;1pJ1dU1zO\n", "rN,nZ,mU,0mU0rN0nZ;1mU1rN1nZ\n"]  # two lines of three pairs


def test_the_text_is_a_function_of_its_options():
    first = list(itertools.islice(RecallText(pairs=3, rounds=2).text(), 2))
    assert first == FIRST
    assert next(RecallText(pairs=3, rounds=1).text()) == "zO,pJ,dU,0zO0pJ0dU\n"
    corpus = open_corpus(["recall:pairs=3,rounds=2,lines=20"])
    text = corpus.files[0].text()
    assert text.startswith("".join(first))
    assert len(text) == corpus.size == 20 * RecallText(pairs=3, rounds=2).line_length
    assert corpus.fingerprint == open_corpus(["recall:pairs=3,rounds=2,lines=20"]).fingerprint
    assert corpus.fingerprint != open_corpus(["recall:pairs=3,rounds=2,lines=20,seed=1"]).fingerprint


def parts_of(line):
    """The pairs of a line, and the queries of each of its rounds."""
    told, asked = line.removesuffix("\n").split(",0")
    rounds = re.split(f"[{re.escape(BETWEEN)}]", f"0{asked}")
    assert [set(queries[::3]) for queries in rounds] == [{str(number)} for number in range(len(rounds))]
    return told.split(","), [[queries[i + 1 : i + 3] for i in range(0, len(queries), 3)] for queries in rounds]


@pytest.mark.parametrize(
    "sizes", [{}, {"pairs": 1}, {"pairs": 26, "rounds": 10}, {"pairs": 5, "keys": 5, "values": 9, "rounds": 1}]
)
def test_each_round_asks_once_for_each_key_of_its_line(sizes):
    recall = RecallText(lines=200, **sizes)
    orders = set()
    for line in recall.text():
        assert len(line) == recall.line_length
        pairs, rounds = parts_of(line)
        assert len(rounds) == recall.rounds
        assert all(sorted(queries) == sorted(pairs) for queries in rounds)
        assert len({key for key, _ in pairs}) == len({value for _, value in pairs}) == recall.pairs
        orders |= {tuple(map(pairs.index, queries)) for queries in rounds}
    assert len(orders) > min(math.factorial(recall.pairs), 200) // 2


@pytest.mark.parametrize("rounds", [1, 4])
def test_windows_of_the_validation_text_are_lines_whose_repeated_bigrams_are_the_answers(tmp_path, rounds):
    name = f"pairs=4,rounds={rounds},lines=30"
    recall = RecallText.of(name)
    store = find_or_prepare(corpus=f"recall:{name}", store=str(tmp_path / "store"), tokenizer="char")
    tokenizer = Tokenizer.from_file(tmp_path / "store" / "tokenizer.json")
    ids = torch.from_numpy(np.array(store.tokens("val"), dtype=np.int64))
    assert len(ids) == 3 * recall.line_length
    lines = ids.view(3, -1)
    repeated = repeated_bigrams(lines[:, :-1], lines[:, 1:])
    for line, answers in zip(lines.tolist(), repeated, strict=True):
        text = tokenizer.decode(line)
        found = "".join(text[1:][place] for place in answers.nonzero().flatten().tolist())
        assert found == "".join(value for queries in parts_of(text)[1] for _, value in queries)


def test_the_chance_level_is_the_mean_of_guessing_among_the_values_that_are_left():
    assert RecallText(pairs=4).chance == pytest.approx(sum(math.log(left) for left in (4, 3, 2, 1)) / 4)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("recall:pairs=27", "corpus recall: pairs must be at least 1 and at most 26, got 27"),
        ("recall:keys=4", "corpus recall: pairs must be at least 1 and at most 4, got 8"),
        ("recall:rounds=11", "corpus recall: rounds must be at least 1 and at most 10, got 11"),
        ("recall:lines=15", "corpus recall: lines must be a multiple of 10, got 15"),
        ("recall:lines=0", "corpus recall: lines must be at least 1 and at most 10000000, got 0"),
        (
            "recall:seed=-1",
            "expected whole numbers of pairs, rounds, keys, values, lines, seed, such as recall:pairs=4,seed=1, ",
        ),
        ("recall:paris=4", "got paris=4"),
        ("recall:pairs=4,pairs=5", "got pairs=5"),
        ("recall:lines", "got lines"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, name, says):
    line = fault(lambda: find_or_prepare(corpus=name, store=str(tmp_path / "store")))
    assert says in line
    assert "\n" not in line


def test_only_this_corpus_takes_options():
    assert list(NAMED_CORPORA) == ["stdlib", "shakespeare", "recall"]
    assert [is_named(given) for given in ("recall", "recall:pairs=2", "stdlib", "stdlib:x", "x:recall")] == [
        *(True, True, True, False, False)
    ]


def test_a_folder_that_cannot_be_written_to_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    assert fault(lambda: open_corpus(["recall:lines=40"]).fingerprint).startswith("corpus recall: cannot write to ")
