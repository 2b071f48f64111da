"""The page about audits has what the stored numbers of public logs say."""

import json

import pytest

from benchmarks.public_logs import NUMBERS, PAGE, pooled, table_of_loops, table_of_submissions, written

STORED = json.loads(NUMBERS.read_text(encoding="utf-8"))
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_tables_of_the_page_are_current():
    assert written(TEXT) == TEXT, "write them again: python -m benchmarks.public_logs"


def test_the_sentences_of_the_page_say_what_the_numbers_say():
    prose = " ".join(TEXT.split())
    entries = STORED["benchmark"]
    several = sum(len(losses) > 1 for *_, losses in entries)
    sd, freedom = pooled(entries)
    runs = sum(len(losses) for *_, losses in entries)
    assert f"{runs} runs in {len(entries)} entries" in prose
    assert f"{several} entries have two runs or more" in prose
    assert f"{sd:.4f} nats ({freedom} degrees of freedom)" in prose
    for each, shown in ((1, "0.003"), (5, "0.0014"), (10, "0.001")):
        assert round(1.96 * sd * (2 / each) ** 0.5, len(shown) - 2) == float(shown)
        assert shown in prose
    rows = [row.strip("| ").split(" | ") for row in table_of_submissions(entries).splitlines()[2:]]
    clear = [row for row in rows if row[3][0] == row[3].split(" to ")[1][0]]
    misled = [int(row[4].rstrip("%")) for row in clear if row[4] != "0%"]
    assert f"In {len(clear)} of {len(rows)} pairs" in prose
    assert f"In {len(misled)} of these {len(clear)}" in prose
    assert f"a probability of {min(misled)}% to {max(misled)}%" in prose


def test_a_changed_number_changes_the_tables():
    loops = json.loads(json.dumps(STORED["loops"]))
    loops[0]["rows"][-1][2] = "discard"
    assert table_of_loops(loops) != table_of_loops(STORED["loops"])


def test_a_page_without_the_place_of_a_table_is_an_error():
    with pytest.raises(ValueError, match=r"audit\.md has no place for loops"):
        written("# Audit")
