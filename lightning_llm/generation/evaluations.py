"""Evaluations: the loss of a model on each document of a text, as a file, and the differences between two models.

An evaluation has sums for each document, and a hash of its text. So evaluations of other models, also those of earlier
days, can be compared with it document by document. Models of different tokenizers can be compared, too: per byte.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_llm.data.corpora import Corpus
from lightning_llm.data.formats import Document
from lightning_llm.data.prepare import encode_document
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.generation.scoring import Score, score
from lightning_llm.io.progress import Advance, ignore_progress
from lightning_llm.io.schema import NUMBER, SHA256, TEXT, Schema, check, list_of, maybe, open_record, validate, whole
from lightning_llm.io.untrusted import MIB, read_json
from lightning_llm.model.transformer import Transformer
from lightning_llm.statistics.design import FEWEST, Design
from lightning_llm.statistics.estimates import student
from lightning_llm.statistics.ratios import Ratios, compare_ratios

LOSS, BITS = "loss", "bits_per_byte"
MEASURES = (LOSS, "perplexity", BITS, "recall_loss", "other_loss")
LARGEST_FILE = 256 * MIB  # about 500,000 documents
ALPHA = 0.05


@dataclasses.dataclass(frozen=True)
class DocumentScore:
    """Score of a document.

    Attributes:
        name: Its name in messages, such as its file and line.
        sha256: Of its text in UTF-8.
        score: Sums over its predicted tokens.
    """

    name: str
    sha256: str
    score: Score


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores of one model on each document of a text.

    Attributes:
        model: Name of the model.
        context: Tokens in a window.
        stride: Tokens by which it moves.
        tokens_sha256: Of the ids of all documents: where two models agree, their losses per token can be compared.
        documents: In the order of the text.
    """

    model: str
    context: int
    stride: int
    tokens_sha256: str
    documents: list[DocumentScore]

    @property
    def total(self) -> Score:
        """Sums over all documents."""
        total = Score()
        for document in self.documents:
            total += document.score
        return total

    def to_dict(self) -> dict[str, Any]:
        """The content of a file that :func:`read_evaluations` reads."""
        rows = [
            {
                "document": document.name,
                **numbers_of(document.score),
                "nats": document.score.nats,
                "recall_nats": document.score.recall_nats,
                "sha256": document.sha256,
            }
            for document in self.documents
        ]
        settings = {"model": self.model, "context": self.context, "stride": self.stride}
        return {**settings, **numbers_of(self.total), "tokens_sha256": self.tokens_sha256, "documents": rows}


def numbers_of(result: Score) -> dict[str, Any]:
    """The results; null where they are not known, NaN or infinite, which JSON cannot express."""
    named = {name: getattr(result, name) for name in MEASURES}
    finite = {name: value if value is not None and math.isfinite(value) else None for name, value in named.items()}
    return {**finite, "tokens": result.tokens, "recall_tokens": result.recall_tokens, "bytes": result.bytes}


# ---- score a text


def evaluate(
    model: Transformer,
    tokenizer: Tokenizer,
    corpus: Corpus,
    *,
    stride: int | None = None,
    name: str = "model",
    advance: Advance = ignore_progress,
) -> Evaluation:
    """Evaluate a model on each document of a text.

    A document is read as in training, with the tokens that the tokenizer puts around a text. It starts with an empty
    context. Its first token is not predicted. Where it is one of the document, its bytes do not count either.

    Args:
        model: In evaluation mode.
        tokenizer: The model's.
        corpus: The text.
        stride: Tokens by which a window moves. ``None``: half the context.
        name: Name of the model in messages.
        advance: Called with the number of bytes that were read.

    Raises:
        ValueError: As :func:`~lightning_llm.generation.scoring.score`, the text cannot be read, the tokenizer has ids
            that the model lacks, or no token can be predicted.
    """
    ids_hash = hashlib.sha256()
    documents = []
    for document in corpus.documents(advance):
        digest = hashlib.sha256()
        hashed = dataclasses.replace(document, rest=_hashed(document, digest.update))
        scored = _score(model, tokenizer, hashed, stride, ids_hash.update)
        documents.append(DocumentScore(document.name, digest.hexdigest(), scored))
    context = model.config.max_position_embeddings
    stride = max(1, context // 2) if stride is None else stride
    evaluation = Evaluation(name, context, stride, ids_hash.hexdigest(), documents)
    if not evaluation.total.tokens:
        inputs = ", ".join(corpus.inputs)
        raise ValueError(f"{inputs}: too few tokens: each token is predicted from those before it")
    return evaluation


def text_hashes(corpus: Corpus) -> list[tuple[str, str]]:
    """Name and SHA-256 of each document of a text. Errors as those of ``Corpus.documents``."""
    found = []
    for document in corpus.documents():
        digest = hashlib.sha256()
        for _ in _hashed(document, digest.update):
            pass
        found.append((document.name, digest.hexdigest()))
    return found


def _hashed(document: Document, update: Any) -> Iterator[str]:
    """The pieces after the first one, while the hash gets all of them."""
    update(document.first.encode())
    for piece in document.rest:
        update(piece.encode())
        yield piece


def _score(model: Transformer, tokenizer: Tokenizer, document: Document, stride: int | None, update: Any) -> Score:
    size = 0

    def ids() -> Iterator[int]:
        nonlocal size
        last: list[int] = []
        for numbers, text_bytes in encode_document(tokenizer, document):
            size += text_bytes
            if not last and numbers:
                yield from (begin := tokenizer.begin_of(numbers))
                size -= 0 if begin else _bytes_at_start(document.first, tokenizer.bytes_of(numbers[0]))
            yield from numbers
            last = numbers or last
        after = list(tokenizer.boundaries.after)
        if last and last[-len(after) :] != after:
            yield from after

    try:
        result = score(model, _ids_hashed(ids(), update), stride=stride)
    except IndexError as error:
        vocabulary = f"the model's vocabulary of {model.config.vocab_size}"
        raise ValueError(f"the tokenizer has ids beyond {vocabulary}") from error
    return dataclasses.replace(result, bytes=size)


def _ids_hashed(ids: Iterable[int], update: Any) -> Iterator[int]:
    """The ids, while the hash gets them and how many they are: a document is not a part of another one."""
    block: list[int] = []
    count = 0
    for each in ids:
        block.append(each)
        if len(block) == 1 << 12:
            update(np.array(block, dtype="<u4").tobytes())
            count += len(block)
            block = []
        yield each
    update(np.array(block, dtype="<u4").tobytes())
    update((count + len(block)).to_bytes(8, "little"))


def _bytes_at_start(text: str, token: bytes) -> int:
    """How many bytes of a text its first token stands for: some tokenizers put a space before the text."""
    is_added = token.startswith(b" ") and not text.startswith(" ")
    return len(token) - is_added


# ---- files

_COUNT = whole()
_NATS = maybe(check("a number from 0 on", lambda value: not list(NUMBER(value, "")) and value >= 0))
_DOCUMENT = open_record(
    {
        "document": TEXT,
        "nats": _NATS,
        "tokens": _COUNT,
        "bytes": _COUNT,
        "recall_nats": _NATS,
        "recall_tokens": _COUNT,
        "sha256": SHA256,
    }
)


def _documents(value: Any, name: str) -> Iterable[str]:
    """Schema of the documents: sums agree with one another."""
    problems = [*list_of(_DOCUMENT)(value, name)]
    if problems:
        return problems
    if not sum(row["tokens"] for row in value):
        return [f"{name} have no token that was predicted"]
    return [
        f"{name}[{number}] has {row['recall_tokens']} recall_tokens of {row['tokens']} tokens"
        for number, row in enumerate(value)
        if row["recall_tokens"] > row["tokens"]
    ]


_EVALUATION: Schema = open_record(
    {"model": TEXT, "context": whole(2), "stride": whole(1), "tokens_sha256": SHA256, "documents": _documents}
)


def _evaluations(value: Any, name: str) -> Iterable[str]:
    """Schema of several evaluations: at least one."""
    return [f"{name} is empty"] if value == [] else list_of(_EVALUATION)(value, name)


_EVALUATIONS = open_record({"models": _evaluations})


def read_evaluations(path: Path) -> list[Evaluation]:
    """Read what ``lightning-llm evaluate --json`` has written: one evaluation or several.

    Raises:
        ValueError: It is damaged, too large, or of a version that wrote no documents.
    """
    content = read_json(path, LARGEST_FILE)
    has_several = "models" in content
    validate(content, _EVALUATIONS if has_several else _EVALUATION, path, "evaluate the model again with --json")
    if not has_several:
        return [_evaluation_of(content, str(path))]
    return [_evaluation_of(each, f"{path}: {each['model']}") for each in content["models"]]


def _evaluation_of(content: Mapping[str, Any], name: str) -> Evaluation:
    def number(value: float | None) -> float:
        return math.nan if value is None else float(value)

    documents = [
        DocumentScore(
            row["document"],
            row["sha256"],
            Score(number(row["nats"]), row["tokens"], row["bytes"], number(row["recall_nats"]), row["recall_tokens"]),
        )
        for row in content["documents"]
    ]
    return Evaluation(name, content["context"], content["stride"], content["tokens_sha256"], documents)


# ---- compare


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of one metric between two models.

    Attributes:
        difference: Model minus baseline.
        interval: Of the difference; ``None``: there is none.
        error: Standard error.
        freedom: Degrees of freedom of the t interval.
    """

    difference: float
    interval: tuple[float, float] | None
    error: float | None
    freedom: float | None


@dataclasses.dataclass(frozen=True)
class ModelComparison:
    """Comparison of a model with another one on the same documents.

    Attributes:
        baseline: Name of the other one.
        model: Name of the model.
        documents: Number of documents with a predicted token.
        level: Probability with which an interval contains the true difference.
        differences: By metric: ``loss`` in nats per token, if both read the same tokens, and ``bits_per_byte``. The
            first one decides.
        verdict: ``better``, ``worse`` or ``undecided``; ``None`` if the losses do not differ, or nothing is compared.
        notes: What a reader must know, a sentence each.
    """

    baseline: str
    model: str
    documents: int
    level: float
    differences: dict[str, Difference]
    verdict: str | None
    notes: list[str]


def check_texts(name: str, texts: Sequence[tuple[str, str]], evaluation: Evaluation) -> None:
    """Check that an evaluation is of a text.

    Args:
        name: Name of the text, or of what was evaluated on it.
        texts: Name and SHA-256 of each of its documents.
        evaluation: The evaluation.

    Raises:
        ValueError: It is of another text; the message names the first document that differs.
    """
    advice = "compare models on one text, with its documents in one order"
    for number, ((of_text, expected), own) in enumerate(zip(texts, evaluation.documents, strict=False), start=1):
        if own.sha256 != expected:
            problem = f"document {number} of {evaluation.model} ({own.name}) is not that of {name} ({of_text})"
            raise ValueError(f"{problem}: {advice}")
    if len(texts) != len(evaluation.documents):
        counts = f"{evaluation.model} has {len(evaluation.documents)} documents, and {name} has {len(texts)}"
        raise ValueError(f"{counts}: {advice}")


def compare(evaluations: Sequence[Evaluation], *, alpha: float = ALPHA) -> list[ModelComparison]:
    """Compare models with the first one, document by document.

    The intervals are those of :mod:`lightning_llm.statistics.ratios`. They are for other documents like these; a model
    that is trained again with another seed is another model. Several models share ``alpha`` (Bonferroni).

    Args:
        evaluations: Two or more, of the same text.
        alpha: Probability that any of the intervals of the deciding metric misses the true difference.

    Raises:
        ValueError: They are not of the same text.
    """
    first, *others = evaluations
    texts = [(document.name, document.sha256) for document in first.documents]
    for other in others:
        check_texts(first.model, texts, other)
    return [_compared(first, other, alpha / len(others)) for other in others]


def _compared(baseline: Evaluation, model: Evaluation, alpha: float) -> ModelComparison:
    pairs = [
        (own.score, other.score)
        for own, other in zip(baseline.documents, model.documents, strict=True)
        if own.score.tokens or other.score.tokens
    ]
    notes = _notes(baseline, model, len(baseline.documents) - len(pairs))
    comparison = ModelComparison(baseline.model, model.model, len(pairs), 1 - alpha, {}, None, notes)
    sides = tuple(zip(*pairs, strict=True))
    nats = [[score.nats for score in side] for side in sides]
    for side, evaluation in zip(nats, (baseline, model), strict=True):
        if count := sum(not math.isfinite(value) for value in side):
            where = f"in {count} of {len(pairs)} documents"
            notes.append(f"Not compared: the loss of {evaluation.model} is NaN or infinite {where}.")
            return comparison
    sizes = {LOSS: [[score.tokens for score in side] for side in sides]}
    sizes[BITS] = [[score.bytes for score in side] for side in sides]
    if baseline.tokens_sha256 != model.tokens_sha256:
        del sizes[LOSS]
        notes.append("The tokens differ, so losses per token cannot be compared: bits per byte decide.")
    units = {LOSS: 1.0, BITS: math.log(2)}
    found: dict[str, Ratios] = {}
    for metric, (base_sizes, own_sizes) in sizes.items():
        if sum(base_sizes) and sum(own_sizes):
            values = [[value / units[metric] for value in side] for side in nats]
            found[metric] = compare_ratios(values[0], base_sizes, values[1], own_sizes)
    if not found:
        notes.append("Not compared: no byte of the text was predicted.")
        return comparison
    differences = {metric: _difference(ratios, alpha) for metric, ratios in found.items()}
    deciding = next(iter(found.values()))
    interval = next(iter(differences.values())).interval
    verdict = None
    if interval is not None:
        verdict = Design(alpha).answer(*interval, math.floor(deciding.effective_units)).word
    notes += _notes_of_interval(deciding, interval)
    return dataclasses.replace(comparison, differences=differences, verdict=verdict)


def _difference(ratios: Ratios, alpha: float) -> Difference:
    if ratios.estimate is None:
        return Difference(ratios.difference, None, None, None)
    estimate = ratios.estimate
    # with less than one degree of freedom, the error of the error has no bound that would be of use
    interval = estimate.interval(float(student(alpha, estimate.freedom))) if estimate.freedom >= 1 else None
    return Difference(ratios.difference, interval, estimate.error, estimate.freedom)


def _notes(baseline: Evaluation, model: Evaluation, too_short: int) -> list[str]:
    notes = []
    if too_short:
        notes.append(f"Documents too short for a predicted token, which do not count: {too_short:,}.")
    windows = [f"context {each.context}, stride {each.stride}" for each in (baseline, model)]
    if windows[0] != windows[1]:
        notes.append(f"The windows differ: {windows[0]} and {windows[1]}. A loss depends on them.")
    sizes = [each.total.bytes for each in (baseline, model)]
    if sizes[0] != sizes[1]:
        what = "The first token of a document is not predicted, unless the tokenizer puts one before it"
        notes.append(f"Bytes that were predicted differ: {sizes[0]:,} and {sizes[1]:,}. {what}.")
    return notes


def _notes_of_interval(ratios: Ratios, interval: tuple[float, float] | None) -> list[str]:
    if ratios.units == 1:
        how = "several files, or .jsonl or .parquet with one document per line or row"
        return [f"There is only one document, so there is no interval: documents are the units. Give {how}."]
    if ratios.estimate is None:
        return ["The losses differ in no document, or by the same amount per token in each: there is no interval."]
    if interval is None:
        return ["One document has most of the text, so there is no interval: documents are the units."]
    effective = f"{ratios.effective_units:.1f} of the same length"
    if ratios.effective_units < FEWEST:
        return [f"These documents count for {effective}: a verdict needs at least {FEWEST}."]
    if ratios.is_doubtful:
        return [f"Lengths vary: these documents count for {effective}, and the interval may be too narrow."]
    return []
