"""Evaluations per document against a direct computation, one token at a time; their files; comparisons of models."""

import copy
import dataclasses
import hashlib
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_llm import ModelConfig, Transformer
from lightning_llm.data import formats
from lightning_llm.data.corpora import open_corpus
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.generation.evaluations import (
    DocumentScore,
    Evaluation,
    check_texts,
    compare,
    evaluate,
    read_evaluations,
    text_hashes,
)
from lightning_llm.generation.scoring import Score
from lightning_llm.io.atomic import write_json

TEXTS = [
    "To be, or not to be, that is the question: whether 'tis nobler – ",
    "in the mind.",
    "x",
    "to suffer " * 9,
    "the slings and arrows of outrageous fortune",
    "or to take arms against a sea of troubles, and by opposing end them. " * 2,
    "Ay, there's the rub; 漢字.",
]
CONTEXT = 16


def model_of(seed, vocab_size=300, context=CONTEXT):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": context}
    return Transformer(ModelConfig(vocab_size=vocab_size, initializer_range=0.2, **sizes)).eval()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "texts.jsonl"
    lines = ["", *TEXTS, ""]  # empty documents are skipped
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    return open_corpus([str(path)])


@pytest.fixture(scope="module")
def bpe():
    return Tokenizer.train_bpe(TEXTS, 290)


@pytest.fixture(scope="module")
def first(corpus, bpe):
    return evaluate(model_of(0), bpe, corpus, name="first")


@pytest.fixture(scope="module")
def second(corpus, bpe):
    return evaluate(model_of(1), bpe, corpus, name="second")


@pytest.fixture(scope="module")
def bytewise(corpus):
    return evaluate(model_of(2, context=24), Tokenizer.train_byte(), corpus, stride=5, name="bytewise")


def direct(model, ids, stride):
    """Nats of each token but the first, each from the tokens before it in its window alone."""
    context = model.config.max_position_embeddings
    nats = []
    for place in range(1, len(ids)):
        start = max(0, -(-(place - context + 1) // stride)) * stride
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([ids[start:place]])))[0, -1]
        nats.append(-float(torch.log_softmax(logits.double(), -1)[ids[place]]))
    return nats


@pytest.mark.parametrize("name", ["first", "bytewise"])
def test_each_document_has_the_sums_of_a_direct_computation(request, bpe, name):
    evaluation = request.getfixturevalue(name)
    model, tokenizer = (model_of(0), bpe) if name == "first" else (model_of(2, context=24), Tokenizer.train_byte())
    for text, document in zip(TEXTS, evaluation.documents, strict=True):
        ids = tokenizer.encode(text)
        expected = direct(model, ids, 8 if name == "first" else 5)
        assert document.score.nats == pytest.approx(sum(expected), rel=1e-5)
        assert document.score.tokens == len(ids) - 1
        assert document.score.bytes == len(text.encode()) - len(tokenizer.bytes_of(ids[0]))
        assert document.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert evaluation.documents[0].name.endswith("texts.jsonl, line 2")
    assert (evaluation.context, evaluation.stride) == ((16, 8) if name == "first" else (24, 5))
    assert evaluation.total.tokens == sum(document.score.tokens for document in evaluation.documents)


def test_a_document_in_pieces_is_the_same_document(tmp_path, monkeypatch, bpe):
    text = "".join(TEXTS)
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    corpus = open_corpus([str(tmp_path / "text.txt")])
    whole = evaluate(model_of(0), bpe, corpus)
    monkeypatch.setattr(formats, "PIECE_BYTES", 32)
    (document,) = corpus.documents()
    assert len(list(document.pieces())) > 10
    assert evaluate(model_of(0), bpe, corpus) == whole
    assert whole.documents[0].sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert text_hashes(corpus) == [(str(tmp_path / "text.txt"), whole.documents[0].sha256)]


# ---- compare


def by_hand(base, own, sizes, own_sizes, alpha=0.05):
    """Difference and interval by the formulas of the ratio estimator, over documents with a predicted token."""
    ratios = sum(base) / sum(sizes), sum(own) / sum(own_sizes)
    residuals = (np.array(own) - ratios[1] * np.array(own_sizes)) / np.mean(own_sizes)
    residuals -= (np.array(base) - ratios[0] * np.array(sizes)) / np.mean(sizes)
    count = len(base)
    error = math.sqrt((residuals**2).sum() / (count * (count - 1)))
    effective = min(np.sum(x) ** 2 / np.sum(np.square(x)) for x in (sizes, own_sizes))
    difference = ratios[1] - ratios[0]
    half = stats.t.ppf(1 - alpha / 2, effective - 1) * error
    return difference, (difference - half, difference + half)


def test_models_of_one_tokenizer_differ_as_by_hand(first, second):
    (comparison,) = compare([first, second])
    sides = [[document.score for document in each.documents if document.score.tokens] for each in (first, second)]
    nats = [[score.nats for score in side] for side in sides]
    for metric, unit, size in (("loss", 1, "tokens"), ("bits_per_byte", math.log(2), "bytes")):
        sizes = [[getattr(score, size) for score in side] for side in sides]
        values = [[value / unit for value in side] for side in nats]
        difference, interval = by_hand(*values, *sizes)
        found = comparison.differences[metric]
        assert found.difference == pytest.approx(difference)
        assert found.interval == pytest.approx(interval)
    assert comparison.differences["loss"].difference == pytest.approx(second.total.loss - first.total.loss)
    assert (comparison.baseline, comparison.model, comparison.documents) == ("first", "second", 6)
    assert [*comparison.differences] == ["loss", "bits_per_byte"]
    assert any("which do not count: 1." in note for note in comparison.notes)


def test_models_of_different_tokenizers_are_compared_by_bits_per_byte(first, bytewise):
    (comparison,) = compare([first, bytewise])
    assert [*comparison.differences] == ["bits_per_byte"]
    both = [
        (own.score, other.score)
        for own, other in zip(first.documents, bytewise.documents, strict=True)
        if own.score.tokens or other.score.tokens
    ]
    values = [[pair[side].nats / math.log(2) for pair in both] for side in (0, 1)]
    difference, interval = by_hand(*values, *([pair[side].bytes for pair in both] for side in (0, 1)))
    found = comparison.differences["bits_per_byte"]
    assert found.difference == pytest.approx(difference)
    assert found.difference == pytest.approx(bytewise.total.bits_per_byte - first.total.bits_per_byte)
    assert found.interval == pytest.approx(interval)
    said = " ".join(comparison.notes)
    assert "The tokens differ" in said
    assert "The windows differ: context 16, stride 8 and context 24, stride 5." in said
    assert f"Bytes that were predicted differ: {first.total.bytes} and {bytewise.total.bytes}." in said


def made(nats, tokens=None, name="made"):
    """An evaluation with these sums, of 10 tokens and 30 bytes per document unless given."""
    tokens = [10] * len(nats) if tokens is None else tokens
    rows = [
        DocumentScore(f"line {number}", f"{number:064x}", Score(each, count, 3 * count))
        for number, (each, count) in enumerate(zip(nats, tokens, strict=True))
    ]
    return Evaluation(name, 16, 8, "0" * 64, rows)


BASE = [30.0, 31.0, 29.0, 30.5, 29.5]


@pytest.mark.parametrize(
    ("changes", "verdict"), [([1, 1.1, 0.9, 1, 1.05], "worse"), ([-1, -1.1, -0.9, -1, -1.05], "better")]
)
def test_an_interval_on_one_side_of_zero_is_a_verdict(changes, verdict):
    own = [value + change for value, change in zip(BASE, changes, strict=True)]
    (comparison,) = compare([made(BASE), made(own)])
    assert comparison.verdict == verdict
    (flipped,) = compare([made(own), made(BASE)])
    assert flipped.verdict == {"worse": "better", "better": "worse"}[verdict]
    (unsure,) = compare([made(BASE), made([30.5, 30.0, 29.5, 30.0, 29.6])])
    assert unsure.verdict == "undecided"
    (few,) = compare([made(BASE[:3]), made(own[:3])])
    assert few.verdict == "undecided"
    assert "a verdict needs at least 4" in few.notes[-1]


def test_several_models_share_alpha():
    others = [made([value + change for value, change in zip(BASE, (0, 1, 0, 1, 0.5), strict=True)]) for _ in range(3)]
    (alone,) = compare([made(BASE), others[0]])
    together = compare([made(BASE), *others])
    assert (alone.level, [each.level for each in together]) == (0.95, [pytest.approx(1 - 0.05 / 3)] * 3)
    low, high = (np.array(each.differences["loss"].interval) for each in (alone, together[0]))
    middle = alone.differences["loss"].difference
    ratio = stats.t.ppf(1 - 0.05 / 6, 4) / stats.t.ppf(0.975, 4)
    assert (high - middle) == pytest.approx((low - middle) * ratio)


def test_without_an_interval_a_note_says_why():
    (one,) = compare([made([30.0]), made([31.0])])
    assert one.differences["loss"].difference == pytest.approx(0.1)
    assert one.differences["loss"].interval is None
    assert one.verdict is None
    assert "only one document, so there is no interval" in one.notes[-1]
    (alike,) = compare([made(BASE), made(BASE)])
    assert (alike.differences["loss"].difference, alike.differences["loss"].interval) == (0, None)
    assert "The losses differ in no document" in alike.notes[-1]
    (uneven,) = compare([made(BASE, [1000, 1, 1, 1, 1]), made([31.0, 30.0, 30.0, 30.0, 30.0], [1000, 1, 1, 1, 1])])
    assert uneven.differences["loss"].interval is None
    assert "One document has most of the text" in uneven.notes[-1]


def test_lengths_that_vary_too_much_for_their_number_are_said():
    tokens = [30, 8, 8, 8, 8, 8, 8]
    base = [3.0 * count for count in tokens]
    own = [value + count * (0.1 + 0.01 * index) for index, (value, count) in enumerate(zip(base, tokens, strict=True))]
    (comparison,) = compare([made(base, tokens), made(own, tokens)])
    assert comparison.verdict == "worse"
    assert "Lengths vary: these documents count for 4.7 of the same length" in comparison.notes[-1]


def test_a_loss_that_is_not_finite_is_not_compared():
    (comparison,) = compare([made(BASE), made([math.nan, *BASE[1:]], name="broken")])
    assert (comparison.differences, comparison.verdict) == ({}, None)
    assert comparison.notes == ["Not compared: the loss of broken is NaN or infinite in 1 of 5 documents."]


def test_another_text_is_named(first, second):
    changed = copy.copy(second.documents)
    changed[3] = dataclasses.replace(changed[3], sha256="0" * 64)
    with pytest.raises(ValueError, match=r"document 4 of second \(.*line 5\) is not that of first \(.*line 5\)"):
        compare([first, dataclasses.replace(second, documents=changed)])
    with pytest.raises(ValueError, match="second has 5 documents, and first has 7"):
        compare([first, dataclasses.replace(second, documents=second.documents[:5])])


def test_the_text_of_an_evaluation_is_that_of_its_corpus(first, corpus):
    check_texts("the text", text_hashes(corpus), first)


# ---- files


def test_a_file_has_all_that_a_comparison_needs(tmp_path, first, second, bytewise):
    write_json(tmp_path / "first.json", first.to_dict())
    write_json(tmp_path / "others.json", {"models": [second.to_dict(), bytewise.to_dict()]})
    names = [str(tmp_path / name) for name in ("first.json", "others.json")]
    (own,) = read_evaluations(tmp_path / "first.json")
    others = read_evaluations(tmp_path / "others.json")
    assert own == dataclasses.replace(first, model=names[0])
    assert others[0] == dataclasses.replace(second, model=f"{names[1]}: second")
    assert others[1].documents == bytewise.documents
    expected = [each.differences for each in compare([first, second, bytewise])]
    assert [each.differences for each in compare([own, *others])] == expected


def test_a_loss_that_is_not_finite_is_null_in_a_file(tmp_path):
    write_json(tmp_path / "broken.json", made([math.nan, 1.0]).to_dict())
    (found,) = read_evaluations(tmp_path / "broken.json")
    assert math.isnan(found.documents[0].score.nats)
    assert found.documents[1].score.nats == 1.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"documents": None}, "documents is None, expected a list"),
        ({"documents": []}, "documents have no token that was predicted"),
        ({"context": 0}, "context is 0"),
        ({"tokens_sha256": "x"}, "tokens_sha256 is 'x', expected 64 hex digits"),
        ({"nats": -1.0}, r"documents\[1\].nats is -1.0, expected a number from 0 on"),
        ({"nats": 1e200}, r"documents\[1\].nats is 1e\+200"),
        ({"tokens": 1.5}, r"documents\[1\].tokens is 1.5, expected a whole number"),
        ({"bytes": -3}, r"documents\[1\].bytes is -3"),
        ({"sha256": 7}, r"documents\[1\].sha256 is 7"),
        ({"recall_tokens": 11}, r"documents\[1\] has 11 recall_tokens of 10 tokens"),
        ({"models": []}, "models is empty"),
        ({"models": 3}, "models is 3, expected a list"),
        ({"models": [{}]}, r"models\[0\].model is missing"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, change, says):
    content = made(BASE).to_dict()
    ((name, value),) = change.items()
    (content if name in ("documents", "context", "tokens_sha256", "models") else content["documents"][1])[name] = value
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=says) as error:
        read_evaluations(path)
    assert str(error.value).startswith(f"{path}: ")
    assert len(str(error.value).splitlines()) == 1


def test_a_file_of_an_older_version_is_one_line(tmp_path):
    content = made(BASE).to_dict()
    for name in ("model", "tokens_sha256", "documents"):
        del content[name]
    (tmp_path / "old.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="documents is missing; evaluate the model again with --json"):
        read_evaluations(tmp_path / "old.json")
