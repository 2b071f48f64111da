"""Tables of losses: both layouts in every format, and what is wrong in one line."""

import json
import math
import re

import pytest

from lightning_llm.ablate import table
from lightning_llm.ablate.table import read_table, table_of

TRUTH = {"baseline": {0: 3.2, 1: 3.25, 7: 3.1}, "gelu": {0: 3.1, 1: 3.2, 7: math.inf}}
LONG = "variant,seed,val_loss\ngelu,7,inf\nbaseline,0,3.2\nbaseline,1,3.25\nbaseline,7,3.1\ngelu,0,3.1\ngelu,1,3.2\n"
WIDE = "seed,baseline,gelu\n0,3.2,3.1\n1,3.25,3.2\n7,3.1,inf\n"
OBJECTS = [dict(zip(("variant", "seed", "val_loss"), line.split(","), strict=True)) for line in LONG.split()[1:]]
LINES = [{"seed": int(row["seed"]), "variant": row["variant"], "val_loss": float(row["val_loss"])} for row in OBJECTS]


@pytest.fixture
def losses(tmp_path):
    """The losses in a file."""

    def read(content, metric=None, name="runs.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_table(path).losses(metric)

    return read


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", LONG),
        ("a.csv", WIDE),
        ("a.tsv", LONG.replace(",", "\t")),
        ("a.txt", WIDE.replace(",", "\t")),
        ("a.csv", LONG.replace(",", ";")),
        ("a.csv", "\ufeff" + LONG.replace("variant", "Group").replace("\n", "\r\n")),  # as a spreadsheet writes it
        ("a.csv", "".join(f"{n - 1 if n else ''},{line}\n" for n, line in enumerate(LONG.split()))),  # as pandas does
        ("a.csv", "".join(f"{n - 1 if n else ''},{line}\n" for n, line in enumerate(WIDE.split()))),
        ("a.csv", LONG.replace("seed", " seed ").replace("7", " 7.0").replace("inf", "NaN") + "\n\n"),
        ("a.csv", WIDE.replace("gelu", '"gelu"')),
        ("a.tsv", LONG.replace("val_loss", "loss, nats").replace(",", "\t").replace("\t nats", ", nats")),
        ("a.jsonl", "\n".join(map(json.dumps, LINES))),  # json.dumps writes Infinity
        ("a.log", "\n".join(map(json.dumps, LINES)).replace("Infinity", "null")),
        (
            "a.ndjson",
            '{"seed": 0, "baseline": 3.2, "gelu": 3.1}\n{"gelu": 3.2, "baseline": 3.25, "seed": 1}\n'
            '{"seed": 7, "baseline": 3.1, "gelu": null}',
        ),
    ],
)
def test_every_format_and_layout_has_the_same_losses(losses, name, content):
    found = losses(content, name=name)
    assert found.by_variant.keys() == TRUTH.keys()
    for variant, runs in TRUTH.items():
        assert found.by_variant[variant].keys() == runs.keys()
        own = [found.by_variant[variant][seed] for seed in runs]
        assert own == pytest.approx(
            [value if math.isfinite(value) else math.nan for value in runs.values()], nan_ok=True
        )
    assert found.has_seeds
    assert found.metric == next((title for title in ("val_loss", "loss, nats") if title in content), "loss")


def test_a_metric_is_chosen_among_several_columns(losses):
    content = "variant,seed,steps,loss\na,0,10,1.5\nb,0,20,2.5\n"
    assert losses(content, "loss").by_variant == {"a": {0: 1.5}, "b": {0: 2.5}}
    negated = losses(content, "-steps")  # higher is better
    assert (negated.by_variant, negated.metric) == ({"a": {0: -10.0}, "b": {0: -20.0}}, "-steps")
    with pytest.raises(
        ValueError, match=r"has several columns: give metric \(--metric\) as one of steps, loss, with a minus before it"
    ):
        losses(content)
    with pytest.raises(ValueError, match=r"^metric must be one of steps, loss: .*runs.csv has no column 'seed'$"):
        losses(content, "seed")


def test_the_numbers_of_a_wide_table_have_any_name(losses):
    assert losses(WIDE, "bpb").metric == "bpb"
    assert losses(WIDE, "-bpb").by_variant["baseline"][0] == -3.2


def test_seeds_that_are_not_known_are_places(losses):
    wide = losses("a,b\n1,2\n3,\n")
    assert (wide.by_variant, wide.has_seeds) == ({"a": {0: 1.0, 1: 3.0}, "b": {0: 2.0}}, False)
    long = losses("variant,loss\na,1\nb,2\na,3\n")
    assert (long.by_variant, long.has_seeds) == (wide.by_variant, False)
    assert losses("seed,a\nx,1\n1e3,2\n007,3\n").by_variant == {"a": {"x": 1.0, 1000: 2.0, 7: 3.0}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "runs.csv is empty, expected CSV, TSV, or JSON lines with a row for each run"),
        (" \n\n", "runs.csv is empty, "),
        (b"PK\x03\x04\x00\xff", "runs.csv is not UTF-8 text: byte 5"),
        (b"a,b\n1,\x002\n", "runs.csv is a binary file, expected CSV, TSV, or JSON lines"),
        ("variant,seed,loss\n", "runs.csv has no rows below its column names"),
        ("0,3.2,3.1\n1,3.3,3.2\n", "runs.csv has no column names in its first line, but numbers: a table has"),
        ("baseline,0,3.2\nbaseline,1,3.3\n", "line 2, column 'baseline': 'baseline' is not a number; .* a table"),
        ("variant,seed\na,0\n", "runs.csv has no column with a metric: a table has"),
        ("variant,seed,loss\na,0,3.2\na,1,OOM\n", "line 3, column 'loss': 'OOM' is not a number; expected"),
        ("seed,a,b\n0,3.2,3.1\n1,3.2,3_1\n", "line 3, column 'b': '3_1' is not a number; .* failed$"),
        ("variant;seed;loss\na;0;3,2\n", "line 2, column 'loss': '3,2' is not a number"),
        ('{"variant": "a", "seed": 0, "loss": true}\n', "line 1, column 'loss': True is not a number"),
        ('{"variant": "a", "seed": 0, "loss": [1]}\n', r"line 1, column 'loss': \[1\] is not a number"),
        ('{"variant": "a", "seed": 0, "loss": 1' + "0" * 400 + "}\n", "line 1, column 'loss': .* is not a number"),
        ("variant,seed,loss\na,0,3.2\nb,0,3.1\na,0,3.3\n", "line 4: 'a' with seed 0 is in line 2 too; each run"),
        ("seed,a\n0,1\n0,2\n", "line 3: seed 0 is in line 2 too; each seed has one row"),
        ("variant,seed,loss\na,0,\n", "line 2: 'loss' is empty; write nan for a run that failed, or leave the row out"),
        ('{"variant": "a", "seed": 0}\n{"variant": "a", "seed": 1, "loss": 1}\n', "line 1: 'loss' is empty"),
        ("variant,seed,loss\n,0,3\n", "line 2: the variant is empty, expected a name"),
        ("variant,seed,loss\na,,3\n", "line 2: the seed is empty, expected a number or a name"),
        ("seed,a,a\n0,1,2\n", "runs.csv has two columns 'a': rename one"),
        ("seed,a,b\n0,1\n", "line 2 has 2 cells under 3 column names: cells are separated by ','"),
        ('seed,a\n0,"' + "1" * 200_000 + '"\n', "line 2 is not CSV that can be read: field larger"),
        ("[1, 2]", "runs.csv begins with a list, expected JSON lines: one object per line, or CSV or TSV"),
        ('{"variant": "a"}\n{"variant"', "runs.csv, line 2 is not JSON that can be read"),
        ('{"variant": "a"}\n[]', r"runs.csv, line 2 holds \[\], expected an object"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_place(losses, content, says):
    with pytest.raises(ValueError, match=says) as raised:
        losses(content)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_a_huge_file_is_not_read(tmp_path):
    with open(tmp_path / "huge.csv", "wb") as file:
        file.truncate(table.LARGEST + 1)
    with pytest.raises(ValueError, match=f"has {table.LARGEST + 1} bytes, expected at most {table.LARGEST}"):
        read_table(tmp_path / "huge.csv")
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "missing.csv"))):
        read_table(tmp_path / "missing.csv")


def test_rows_by_name_need_not_have_the_same_columns():
    found = table_of([{"a": 1.0, "b": None}, {"b": 2.0}], "rows", ["1", "2"])
    assert (found.columns, found.rows) == (["a", "b"], [[1.0, None], [None, 2.0]])
