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

<!-- table: found
variant: {variant}
peak, MiB: {peak_bytes / MiB:.0f} ({peak_bytes / first.peak_bytes:.2f})
ms: {total_s * 1e3:.0f}
-->
| old |
<!-- end of table -->

It takes 9.99<!-- found, ours: {peak_bytes / first.peak_bytes:.2f} --> of the memory.
"""


@pytest.fixture
def rows(tmp_path, monkeypatch):
    (tmp_path / "found.json").write_text(json.dumps({"rows": ROWS}))
    monkeypatch.setattr(tables, "ROWS", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)


def test_the_pages_have_the_numbers_of_the_rows():
    for path in tables.pages():
        text = path.read_text(encoding="utf-8")
        assert tables.rewritten(text) == text, f"python -m benchmarks.tables writes {path.name} again"


@pytest.mark.usefixtures("rows")
def test_a_table_and_a_figure_are_written_again():
    text = tables.rewritten(PAGE)
    assert (
        "| variant | peak, MiB | ms |\n| --- | --- | --- |\n| plain | 4 (1.00) | 500 |\n| ours | 1 (0.25) | – |" in text
    )
    assert "| plain | 2 (1.00) | 250 |\n<!-- end of table -->" in text
    assert "It takes 0.25<!-- found, ours" in text
    assert tables.rewritten(text) == text


@pytest.mark.usefixtures("rows")
def test_rows_can_be_left_out_and_put_together():
    lines = 'each: dtype\nif: shape == "2x3"\ndtype: {dtype}\nours, MiB: {of("ours").peak_bytes / MiB:.0f}'
    assert tables.table("found", lines).splitlines()[2:] == ["| float32 | 1 |", "| bfloat16 | – |"]
    with pytest.raises(ValueError, match="found has no row theirs"):
        tables.figure("found", "theirs", "{ratio}")
    with pytest.raises(ValueError, match=r"there is no lost\.json"):
        tables.table("lost", "variant: {variant}")


@pytest.mark.usefixtures("rows")
def test_a_comment_of_a_config_has_its_figure():
    text = "# validation loss 1.71 [found, plain: {total_s:.2f}]\n"
    assert tables.rewritten(text) == "# validation loss 0.50 [found, plain: {total_s:.2f}]\n"


def test_the_sides_of_an_experiment_are_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "REPORTS", tmp_path)
    variant = {"mean": 1.5, "difference": -0.25, "tuned": {"difference": 0.125}}
    report = {"baseline": {"mean": 1.75}, "variants": {"relu": variant, "gelu": {**variant, "tuned": None}}}
    report |= {"cost": {"sides": {"baseline": {"step_s": 0.5}}}, "tuning": {"sides": {"relu": {"best": 0.01}}}}
    (tmp_path / "mlps.json").write_text(json.dumps(report))
    lines = "side: {variant}\nloss: {mean:.2f}\ndifference: {difference:+.2f}\ntuned: {tuned['difference']:+.3f}"
    assert tables.table("mlps", f"{lines}\ns: {{step['step_s']:.1f}}\nrate: {{rates['best']:.2f}}").splitlines()[
        2:
    ] == [
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
