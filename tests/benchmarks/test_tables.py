"""Tables and figures of the pages are those of the rows."""

import json

import pytest

from benchmarks import tables

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


def test_the_variants_of_an_experiment_are_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "REPORTS", tmp_path)
    variant = {"mean": 1.5, "difference": -0.25, "tuned": {"difference": 0.125}}
    report = {"baseline": {"mean": 1.75}, "variants": {"relu": variant, "gelu": {**variant, "tuned": None}}}
    report["aa"] = {"null_sd": 0.25}
    report |= {"cost": {"variants": {"baseline": {"step_s": 0.5}}}, "tuning": {"variants": {"relu": {"best": 0.01}}}}
    (tmp_path / "mlps.json").write_text(json.dumps(report))
    columns = {
        "side": "{variant}",
        "loss": "{mean:.2f}",
        "difference": "{difference:+.2f}",
        "tuned": "{tuned['difference']:+.3f}",
        "s": "{step['step_s']:.1f}",
        "rate": "{rates['best']:.2f}",
    }
    assert tables.table({"rows": "mlps", "columns": columns}).splitlines()[2:] == [
        "| baseline | 1.75 | – | – | 0.5 | – |",
        "| relu | 1.50 | -0.25 | +0.125 | – | 0.01 |",
        "| gelu | 1.50 | -0.25 | – | – | – |",
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
