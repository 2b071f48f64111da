import gzip
import io
import itertools
import json
import os
import sys

import pytest

from lightning_llm.data import corpora, formats
from lightning_llm.data.corpora import open_corpus
from tests.data.conftest import fault, texts

TEXTS = ["first é\n", "second \u20ac", "third 𝕏\nof two lines"]


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def write(path, content):
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(content) // 2  # two frames
        content = b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:]))
    path.write_bytes(content)
    return path


@pytest.fixture(params=[1, 7, 1 << 20])
def _pieces(request, monkeypatch):
    monkeypatch.setattr(formats, "PIECE_BYTES", request.param)
    monkeypatch.setattr(formats, "_COMPRESSED_BYTES", request.param)


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_text_and_json_lines_come_back(tmp_path, suffix):
    text = write(tmp_path / f"text.txt{suffix}", "".join(TEXTS).encode())
    assert texts(text) == ["".join(TEXTS)]
    records = [{"text": TEXTS[0], "other": 1}, {"text": ""}, {"text": TEXTS[1]}, {"text": TEXTS[2]}]
    content = lines(records).replace(b"\n", b"\n\n", 1)  # an empty line
    assert texts(write(tmp_path / f"a.jsonl{suffix}", content)) == TEXTS
    assert texts(write(tmp_path / f"b.jsonl{suffix}", content[:-1])) == TEXTS  # the last one without a newline


def test_other_key(tmp_path):
    file = write(tmp_path / "a.jsonl", lines([{"body": "b", "text": "t"}]))
    assert texts(file, text_key="body") == ["b"]


def test_key_without_use_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    assert "--text-key 'body' is for JSON lines" in fault(lambda: texts(tmp_path / "a.txt", text_key="body"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": ', "line 3, is not JSON: Expecting value at character 9"),
        (b'{"body": "a", "id": 1}', "line 3, has no key 'text', only 'body', 'id': set the text's key with --text-key"),
        (b"{}", "line 3, has no key 'text', only none"),
        (b'{"text": 5}', "line 3, has int under key 'text', not text"),
        (b'{"text": null}', "line 3, has NoneType under key 'text', not text"),
        (b'["text"]', "line 3, is not a JSON object with the key 'text', but list"),
        (b'{"text": "\xff"}', "line 3, is not UTF-8 text: byte 10 of the line"),
        (b'{"text": "\\ud800"}', "line 3, has half of a surrogate pair under key 'text'"),
        (b"[" * 100_000, "line 3, is not JSON"),
        (b"1" * 10_000, "line 3, is not JSON that can be read"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_bad_line_is_named(tmp_path, line, says, suffix):
    good = lines([{"text": "a"}])
    file = write(tmp_path / f"a.jsonl{suffix}", good + b"\n" + line + b"\n" + good)
    assert f"{file}, {says}" in fault(lambda: texts(file))


def test_bad_line_is_named_when_reading_began_within_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "PIECE_BYTES", 50)
    content = lines([{"text": "a"}] * 40) + b"5\n"
    file = write(tmp_path / "a.jsonl", content)
    corpus = open_corpus([str(file)])
    assert "line 41, is not a JSON object" in fault(lambda: list(corpus.files[0].documents(start=300)))


def test_line_of_absurd_length(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "LONGEST_LINE", 100)
    monkeypatch.setattr(formats, "PIECE_BYTES", 64)
    file = write(tmp_path / "a.jsonl", lines([{"text": "a"}, {"text": "b" * 300}]))
    assert "line 2, is longer than" in fault(lambda: texts(file))


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("count", [1, 2, 3, 7, 200])
def test_byte_ranges_share_the_lines(tmp_path, count):
    expected = [f"{n}" * (n % 9 + 1) for n in range(40)]
    file = open_corpus([str(write(tmp_path / "a.jsonl", lines({"text": text} for text in expected)))]).files[0]
    ends = [file.size * n // count for n in range(count + 1)]
    parts = [[d.first for d in file.documents(start=a, stop=b)] for a, b in itertools.pairwise(ends) if a < b]
    assert [text for part in parts for text in part] == expected


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.txt.zst"])
@pytest.mark.parametrize("damage", ["cut", "other", "changed"])
def test_broken_compressed_file(tmp_path, name, damage):
    content = lines([{"text": f"line {n * n}"} for n in range(1000)])
    file = write(tmp_path / name, content)
    packed = bytearray(file.read_bytes())
    if damage == "changed":
        packed[len(packed) // 4] ^= 0xFF
        if name.endswith(".zst"):
            packed[:4] = b"\0\0\0\0"
    file.write_bytes({"cut": packed[: len(packed) // 3], "other": b"plain text", "changed": packed}[damage])
    assert f"{file} is damaged, or not a .{file.suffix[1:]} file: " in fault(lambda: texts(file))


def test_compressed_text_that_is_not_utf8_names_the_byte(tmp_path):
    file = write(tmp_path / "a.gz", b"text \xff")
    assert f"{file} is not UTF-8 text: byte 5" in fault(lambda: texts(file))


def test_compressed_nothing_is_no_document(tmp_path):
    assert texts(write(tmp_path / "a.gz", b"")) == []


def test_progress_counts_the_bytes_on_the_disk(tmp_path):
    content = lines([{"text": f"line {n}"} for n in range(1000)])
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        file, seen = open_corpus([str(write(tmp_path / name, content))]).files[0], []
        list(file.documents(seen.append))
        assert sum(seen) == file.size


def parquet(path, columns, row_group_size=3):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)
    return path


@pytest.mark.parametrize("count", [1, 2, 5])
def test_parquet(tmp_path, count):
    expected = [f"row {n}" for n in range(10)]
    file = open_corpus([str(parquet(tmp_path / "a.parquet", {"text": expected, "n": range(10)}))]).files[0]
    ends = [file.size * n // count for n in range(count + 1)]
    parts = [[d.first for d in file.documents(start=a, stop=b)] for a, b in itertools.pairwise(ends)]
    assert [text for part in parts for text in part] == expected


def test_parquet_faults(tmp_path):
    file = parquet(tmp_path / "a.parquet", {"body": ["a"], "n": [1]})
    assert f"{file} has no column 'text', only 'body', 'n'" in fault(lambda: texts(file))
    assert "column 'n' has int64, not text" in fault(lambda: texts(file, text_key="n"))
    file = parquet(tmp_path / "b.parquet", {"text": ["a", "b", "c", "d", None]})
    assert f"{file}, row 4: column 'text' is null" in fault(lambda: texts(file))
    file.write_bytes(file.read_bytes()[:-20])
    assert f"{file} is damaged, or not a .parquet file" in fault(lambda: texts(file))
    assert "decompress it first" in fault(lambda: texts(write(tmp_path / "c.parquet.gz", b"a")))


def test_texts_that_a_parquet_dictionary_repeats_are_not_in_memory_at_once(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr(formats, "_ROWS_BYTES", 10_000)
    path = parquet(tmp_path / "a.parquet", {"text": ["ab" * 1000, "cd" * 1000] * 500}, row_group_size=1000)
    file = open_corpus([str(path)]).files[0]
    before = pyarrow.total_allocated_bytes()
    for document in file.documents():
        assert document.first[:2] in ("ab", "cd")
        assert pyarrow.total_allocated_bytes() < before + 64 * 2000  # less than 64 rows


@pytest.mark.parametrize(("name", "package"), [("a.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_missing_package_says_what_to_install(tmp_path, name, package, monkeypatch):
    (tmp_path / name).write_bytes(b"content")
    for module in (package, f"{package}.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    assert f"needs the package {package}: python -m pip install {package}" in fault(lambda: texts(tmp_path / name))


class Stdin:
    def __init__(self, content):
        self.buffer = io.BytesIO(content)


@pytest.mark.parametrize(("key", "expected"), [(None, ['{"body": "é"}\n{"body": "b"}']), ("body", ["é", "b"])])
def test_standard_input_can_be_read_twice(tmp_path, monkeypatch, key, expected):
    monkeypatch.setattr(corpora.sys, "stdin", Stdin('{"body": "é"}\n{"body": "b"}'.encode()))
    corpus = open_corpus(["-"], text_key=key, spool_dir=tmp_path / "new")
    for _ in range(2):
        assert ["".join(document.pieces()) for document in corpus.documents()] == expected
    assert list((tmp_path / "new").iterdir()) == []  # it has no name


def test_standard_input_faults(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora.sys, "stdin", Stdin(b""))
    assert "the standard input is empty" in fault(lambda: open_corpus(["-"]))
    monkeypatch.setattr(corpora.sys, "stdin", Stdin(b"a\xff"))
    corpus = open_corpus(["-"])
    assert "stdin is not UTF-8 text: byte 1" in fault(lambda: list(corpus.documents()))
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(corpora.sys, "stdin", Stdin(b"a"))
    assert "cannot save the standard input" in fault(lambda: open_corpus(["-"], spool_dir=tmp_path / "file" / "x"))


def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo.txt")
    assert "fifo.txt is a FIFO, expected a file" in fault(lambda: open_corpus([str(tmp_path / "fifo.txt")]))
    assert "/dev/zero is a device, expected a file" in fault(lambda: open_corpus(["/dev/zero"]))
