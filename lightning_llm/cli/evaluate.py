"""``lightning-llm evaluate``: how likely models find texts, with a strided window, and how much two models differ.

Several models are compared document by document with the first one. A file of an earlier ``evaluate --json`` may be
given in place of a model.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_llm.cli.subcommand import OneLineParser, subcommand
from lightning_llm.data.corpora import Corpus, open_corpus
from lightning_llm.io.atomic import write_json
from lightning_llm.io.progress import progress_bar
from lightning_llm.io.trust import add_trust_option
from lightning_llm.io.untrusted import open_regular
from lightning_llm.runs.find import RUNS, check_device, find_checkpoint, named_checkpoint, open_model

if TYPE_CHECKING:
    from lightning_llm.generation.evaluations import Difference, Evaluation, ModelComparison

MODELS = (
    "a checkpoint, a run directory (its best checkpoint, else its newest), an exported or Hugging Face folder, or the "
    "file of an earlier evaluate --json; several are compared with the first one"
)
UNITS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
COVERED = (
    "An interval holds for these models on other documents like these. It does not cover training with another seed: "
    "lightning-llm ablate compares several seeds."
)

# Imports inside the functions come after the options are parsed: a typo is reported without waiting for torch.


def _evaluate_options(parser: OneLineParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help=MODELS)
    add("--device", default="cpu", help="cpu, cuda, or mps (default: cpu)")
    add_trust_option(parser)
    add("--data", nargs="+", metavar="FILE", help="any input of `prepare`: files, folders, …")
    add("--text-key", metavar="NAME", help="key of the text in .jsonl and .parquet (default: text)")
    add("--stride", type=int, metavar="N", help="tokens by which the window moves (default: half the context)")
    add("--per-document", action="store_true", help="also print one line per document")
    add("--json", type=Path, metavar="FILE", help="write the numbers to this file")


@subcommand(_evaluate_options, RuntimeError)
def run_evaluate(options: argparse.Namespace) -> None:
    """Measure loss, perplexity, and bits per byte of models on texts, and compare them document by document.

    With several models, each is compared with the first one. The difference has a 95% interval, whose units are
    documents. Models with different tokenizers are compared by bits per byte.
    """
    corpus = None if options.data is None else open_corpus(options.data, text_key=options.text_key)
    paths = {name: named_checkpoint(name, RUNS) for name in options.models}
    files = {name: path for name, path in paths.items() if _is_evaluation(path)}
    models = [name for name in options.models if name not in files]
    if models and corpus is None:
        raise ValueError(f"--data is missing: {models[0]} is a model and needs a text: give --data FILE")
    from lightning_llm.generation.evaluations import check_texts, compare, read_evaluations, text_hashes

    earlier = {name: read_evaluations(path) for name, path in files.items()}
    if len(options.models) > 1:
        _check_models(models, options.device)
    if files and corpus is not None:  # a wrong text is reported before a model is evaluated for hours
        texts = text_hashes(corpus)
        for evaluation in (each for of_file in earlier.values() for each in of_file):
            check_texts(f"--data {' '.join(options.data)}", texts, evaluation)
    evaluations: list[Evaluation] = []
    for name in options.models:
        evaluations += earlier[name] if name in files else [_evaluated(name, corpus, options)]
    comparisons = compare(evaluations) if len(evaluations) > 1 else []
    for evaluation in evaluations:
        _print(evaluation, f"{evaluation.model}: " if comparisons else "", per_document=options.per_document)
    for comparison in comparisons:
        _print_comparison(comparison)
    if any(difference.interval for comparison in comparisons for difference in comparison.differences.values()):
        print(f"\n{COVERED}")
    if options.json is not None:
        _write(options.json, evaluations, comparisons)


def _is_evaluation(path: Path) -> bool:
    """Whether a path is a file of JSON, such as an earlier evaluation, and no checkpoint."""
    if not path.is_file():
        return False
    if path.suffix == ".json":
        return True
    with open_regular(path) as file:
        return file.read(1) == b"{"


def _check_models(names: Sequence[str], device: str) -> None:
    """Report what is no model before another one is evaluated."""
    check_device(device)
    from lightning_llm.interop.reader import is_model_folder, read_folder

    for name in names:
        if is_model_folder(Path(name)):
            read_folder(name)
        else:
            find_checkpoint(name, RUNS, lambda line: None)


def _evaluated(name: str, corpus: Corpus | None, options: argparse.Namespace) -> "Evaluation":
    from lightning_llm.generation.evaluations import evaluate

    assert corpus is not None
    model, tokenizer = open_model(name, options.device, trust_code=options.trust_code)
    with progress_bar(corpus.size, True) as phase:
        advance = phase("evaluating" if len(options.models) == 1 else f"evaluating {name}")
        found = evaluate(model, tokenizer, corpus, stride=options.stride, name=name, advance=advance)
    if before := tokenizer.boundaries.before:
        of_model = "" if len(options.models) == 1 else f"{name}: "
        begin = f"{tokenizer.token(before[-1])!r} ({before[-1]})"
        print(f"{of_model}each text begins with {begin}, as in training", file=sys.stderr)
    return found


# ---- output


def _print(evaluation: "Evaluation", prefix: str, *, per_document: bool) -> None:
    from lightning_llm.generation.evaluations import numbers_of

    if per_document:
        for document in evaluation.documents:
            print(f"{prefix}{document.name}: {_line(numbers_of(document.score))}")
    print(f"{prefix}{_line(numbers_of(evaluation.total))}")


def _line(numbers: Mapping[str, Any]) -> str:
    from lightning_llm.generation.evaluations import MEASURES

    names = [name for name in MEASURES if numbers[name] is not None]
    results = [f"{name.replace('_', ' ')} {_shown(name, numbers[name])}" for name in names]
    return ", ".join([*results, f"{numbers['tokens']:,} tokens, {numbers['bytes']:,} bytes"])


def _shown(measure: str, value: float) -> str:
    """A number with four decimals; a perplexity, which may be of any size, with as many as it is worth."""
    digits = max(0, 4 - len(f"{value:.0f}")) if measure == "perplexity" and value >= 10 else 4
    return f"{value:,.{digits}f}"


def _print_comparison(comparison: "ModelComparison") -> None:
    documents = "1 document" if comparison.documents == 1 else f"{comparison.documents:,} documents"
    print(f"\n{comparison.model} minus {comparison.baseline}, {documents}:")
    verdict = "" if comparison.verdict is None else f": {comparison.verdict}"
    for metric, difference in comparison.differences.items():
        print(f"  {_in_words(difference, comparison.level)} {UNITS[metric]}{verdict}")
        verdict = ""  # of the first metric
    for note in comparison.notes:
        print(f"  {note}")


def _in_words(difference: "Difference", level: float) -> str:
    interval = ""
    if difference.interval is not None:
        low, high = difference.interval
        interval = f" ({100 * level:.3g}% interval {low:+.4f} to {high:+.4f})"
    return f"{difference.difference:+.4f}{interval}"


def _write(path: Path, evaluations: Sequence["Evaluation"], comparisons: Sequence["ModelComparison"]) -> None:
    rows = [evaluation.to_dict() for evaluation in evaluations]
    if comparisons:
        write_json(path, {"models": rows, "comparisons": [dataclasses.asdict(each) for each in comparisons]})
    else:
        write_json(path, rows[0])
