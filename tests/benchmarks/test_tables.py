"""Tables and figures of the pages are those of the rows."""

import json

import pytest

from benchmarks import tables
from lightning_llm.ablate.ratios import StepCost
from lightning_llm.ablate.report.record import (
    VERSION,
    Idea,
    Mean,
    Outcome,
    Pair,
    Predicted,
    Sizes,
    StoredPrediction,
    StreamFacts,
    TunedVariant,
    Tuning,
    Variant,
)
from lightning_llm.ablate.report.record import Row as ReportRow
from lightning_llm.ablate.report.report import Report

ROWS = [
    {"variant": "plain", "shape": "2x3", "dtype": "float32", "peak_bytes": 4 * 2**20, "total_s": 0.5},
    {"variant": "ours", "shape": "2x3", "dtype": "float32", "peak_bytes": 2**20, "total_s": None},
    {"variant": "plain", "shape": "2x3", "dtype": "bfloat16", "peak_bytes": 2 * 2**20, "total_s": 0.25},
]
PAGE = """Text.

| variant | peak, MiB | ms |
| --- | --- | --- |
| old | | |

It takes 9.99 of the memory, and
1,234 of the time.
"""
COLUMNS = {
    "variant": "{variant}",
    "peak, MiB": "{peak_bytes / MiB:.0f} ({peak_bytes / first.peak_bytes:.2f})",
    "ms": "{total_s * 1e3:.0f}",
}
SENTENCE = "takes «found, ours: {peak_bytes / first.peak_bytes:.2f}» of the memory, and «found: {total_s:.2f}» of"
SOURCE = {"tables": [{"rows": "found", "columns": COLUMNS}], "figures": [SENTENCE]}


@pytest.fixture
def rows(tmp_path, monkeypatch):
    (tmp_path / "found.json").write_text(json.dumps({"rows": ROWS}))
    monkeypatch.setattr(tables, "ROWS", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)


def test_the_pages_have_the_numbers_of_the_rows():
    for path, source in tables.pages():
        text = path.read_text(encoding="utf-8")
        assert tables.rewritten(text, source) == text, f"python -m benchmarks.tables writes {path.name} again"


@pytest.mark.usefixtures("rows")
def test_a_table_and_the_figures_of_a_sentence_are_written_again():
    text = tables.rewritten(PAGE, SOURCE)
    assert (
        "| variant | peak, MiB | ms |\n| --- | --- | --- |\n| plain | 4 (1.00) | 500 |\n| ours | 1 (0.25) | – |" in text
    )
    assert "| plain | 2 (1.00) | 250 |\n\nIt takes 0.25 of the memory, and\n0.50 of the time.\n" in text
    assert tables.rewritten(text, SOURCE) == text


@pytest.mark.usefixtures("rows")
def test_tables_with_the_same_columns_are_told_apart_by_their_order():
    sources = [
        {"rows": "found", "if": f"variant == {name!r}", "columns": {"v": "{variant}"}} for name in ("ours", "plain")
    ]
    text = tables.rewritten("| v |\n| --- |\n\nand\n\n| v |\n| --- |\n| old |\n", {"tables": sources})
    assert text == "| v |\n| --- |\n| ours |\n\nand\n\n| v |\n| --- |\n| plain |\n| plain |\n"


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("page", "error"),
    [
        (PAGE.replace("ms |", "s |"), r"0 tables, but 1 sources, with the columns \| variant \| peak, MiB \| ms \|"),
        (PAGE + PAGE.partition("It takes")[0], "2 tables, but 1 sources"),
        (PAGE.replace("takes", "needs"), "0 sentences, instead of one, read: takes … of the memory, and … of"),
        (PAGE + "It takes 1 of the memory, and 2 of it.", "2 sentences, instead of one, read: takes"),
    ],
)
def test_a_source_that_is_not_on_the_page_is_an_error(page, error):
    with pytest.raises(ValueError, match=error):
        tables.rewritten(page, SOURCE)


@pytest.mark.usefixtures("rows")
def test_rows_can_be_left_out_and_put_together():
    columns = {"dtype": "{dtype}", "ours, MiB": '{of("ours").peak_bytes / MiB:.0f}'}
    source = {"rows": "found", "each": "dtype", "if": 'shape == "2x3"', "columns": columns}
    assert tables.table(source).splitlines()[2:] == ["| float32 | 1 |", "| bfloat16 | – |"]
    with pytest.raises(ValueError, match="found has no row theirs"):
        tables.figure("found", "theirs", "{ratio}")
    with pytest.raises(ValueError, match=r"there is no lost\.json"):
        tables.table({"rows": "lost", "columns": {"variant": "{variant}"}})


@pytest.mark.usefixtures("rows")
def test_a_comment_of_a_config_has_its_figure():
    text = "# validation loss 1.71 [found, plain: {total_s:.2f}]\n"
    assert tables.rewritten(text, {}) == "# validation loss 0.50 [found, plain: {total_s:.2f}]\n"


def row(variant, difference, **fields):
    about = {"variant": variant, "metric": "val_loss", "unit": "nats/token", "sentence": "better", "level": 0.95}
    counts = {"pairs": 4, "diverged": 0, "baseline_diverged": 0, "note": "", "warnings": [], "has_ended": True}
    verdict = {"verdict": "better", "direction": "better", "difference": difference}
    return ReportRow(**{**about, **counts, **verdict, **fields})


def report_in(folder, kind, rows, **fields):
    about = {"metric": "val_loss", "unit": "nats/token", "alpha": 0.05, "level": 0.95}
    report = Report(version=VERSION, kind=kind, name=kind, rows=rows, **about, **fields)
    (folder / f"{kind}.json").write_text(report.to_json())


def test_the_variants_of_an_experiment_are_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "REPORTS", tmp_path)
    means = {"baseline": Mean(1.75, 0.125), "relu": Mean(1.5), "gelu": Mean(1.5)}
    variants = {name: Variant(means={"val_loss": mean}) for name, mean in means.items()}
    variants["baseline"].step = StepCost(
        **dict.fromkeys(StepCost.__struct_fields__[:6], 0.5), ratio_interval=None, peak_bytes=None
    )
    rows = [
        row("relu", -0.25, mean=1.5, by_seed=[Pair(0, 1.75, 1.5)]),
        row("relu", 0.125, kind="tuned"),
        row("relu", 0.0625, kind="secondary", metric="recall_loss"),
        row("null", 0.0, kind="null", sd=0.25),
        row("gelu", -0.25, mean=1.5, by_seed=[Pair(0, 1.75, 1.25)]),
    ]
    tuned = {"untuned": 0.02, "values": [0.01], "losses": [1.5], "best_loss": 1.5, "is_bracketed": True}
    tuning = Tuning(option="lr", seeds=[0], variants={"relu": TunedVariant(best=0.01, **tuned)}, runs=1, run_seconds=1)
    report_in(tmp_path, "experiment", rows, variants=variants, tuning=tuning)
    columns = {
        "side": "{variant}",
        "loss": "{mean:.2f}",
        "difference": "{difference:+.2f}",
        "tuned": "{tuned['difference']:+.3f}",
        "secondary": "{secondary['recall_loss']['difference']:+.4f}",
        "seed 0": "{by_seed[0]['variant']}",
        "s": "{step['step_s']:.1f}",
        "rate": "{rates['best']:.2f}",
        "sd": "{sd_over_seeds:.3f}",
        "null": "{null_sd}",
    }
    assert tables.table({"rows": "experiment", "columns": columns}).splitlines()[2:] == [
        "| baseline | 1.75 | – | – | – | – | 0.5 | – | 0.125 | 0.25 |",
        "| relu | 1.50 | -0.25 | +0.125 | +0.0625 | 1.5 | – | 0.01 | – | 0.25 |",
        "| gelu | 1.50 | -0.25 | – | – | 1.25 | – | – | – | 0.25 |",
    ]


def test_variants_at_several_sizes_and_ideas_of_a_stream_are_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "REPORTS", tmp_path)
    rows = [
        row("relu", -0.5 + place / 8, size=size, compute=compute, sd=0.01)
        for place, (size, compute) in enumerate((("25k", 1e9), ("50k", 4e9), ("100k", 1.6e10)))
    ]
    predicted = Predicted(difference=-0.125, interval=(-0.25, 0.0), prediction_interval=(-0.5, 0.25), answer="holds")
    outcomes = {"relu": Outcome(predicted=predicted, observed=-0.0625, is_hit=True, has_ended=True)}
    stored = StoredPrediction(size="200k", compute=6.4e10, hash="", variants=outcomes)
    sizes = Sizes(sizes={}, pairs=4, level=0.9, target_compute=6.4e10, predicted={"relu": predicted})
    sizes.predictions = [stored]
    report_in(tmp_path, "sizes", rows, variants={"baseline": Variant(), "relu": Variant()}, sizes=sizes)
    columns = {
        "side": "{variant} of {report}",
        "first": "{sizes[0]['difference']:+.3f}",
        "target": "{difference:+.3f}",
        "promised": "{predicted['prediction_interval'][0]:+.2f}",
        "observed": "{observed:+.4f}: {is_hit}",
        "by the present method": "{present['answer']}",
    }
    assert tables.table({"rows": "sizes", "columns": columns}).splitlines()[2:] == [
        "| relu of sizes | -0.500 | -0.125 | -0.50 | -0.0625: True | holds |"
    ]
    facts = {"options": {"a.mlp": "relu"}, "e_value": 1.0, "threshold": 40.0, "runs": 8, "run_seconds": 1.0}
    idea = Idea(place=2, because="it is simpler", plan="", match="tokens", **facts)
    report_in(tmp_path, "stream", [row("relu", -0.5, idea=idea)], stream=StreamFacts(rule="lond", most=8))
    columns = {"place": "{place}", "because": "{because}", "option": "{[*options][0]}", "d": "{difference}"}
    assert tables.table({"rows": "stream", "columns": columns}).splitlines()[2:] == [
        "| 2 | it is simpler | a.mlp | -0.5 |"
    ]


def test_rows_older_than_their_code_are_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "ROWS", tmp_path)
    (tmp_path / "old.json").write_text(json.dumps({"commit": None}))
    (tmp_path / "lost.json").write_text(
        json.dumps({"commit": "0" * 40, "files": ["README.md"], "date": "", "rows": []})
    )
    assert tables.main(["--stale"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"lost.json: commit {'0' * 40} is unknown here",
        "old.json: names no commit",
    ]
