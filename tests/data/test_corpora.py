import hashlib
import http.server
import os
import threading

import pytest

from lightning_llm.data import corpora, formats
from lightning_llm.data.corpora import open_corpus
from tests.data.conftest import fault, texts

CONTENT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"


def test_stdlib_is_the_source_of_this_python_without_tests():
    corpus = open_corpus(["stdlib"])
    names = [file.name for file in corpus.files]
    assert "stdlib/json/decoder.py" in names
    assert names == sorted(names, key=lambda name: name.split("/"))
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idlelib", "idle_test", "site-packages", "__pycache__"}
    assert 8e6 < corpus.size < 16e6
    decoder = corpus.files[names.index("stdlib/json/decoder.py")]
    assert "class JSONDecoder(object):" in decoder.text()
    assert decoder.size == len(decoder.text().encode())
    assert corpus.fingerprint == open_corpus(["stdlib"]).fingerprint


def test_stdlib_is_all_readable_text():
    assert sum(len(file.text().encode()) for file in open_corpus(["stdlib"]).files) == open_corpus(["stdlib"]).size


def test_stdlib_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(corpora.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert fault(lambda: open_corpus(["stdlib"])).startswith("corpus 'stdlib': no Python source below")


def test_a_folder_of_somebody_else_reads_nothing_outside_it(tmp_path):
    outside, folder = tmp_path / "outside.txt", tmp_path / "texts"
    outside.write_text("secret")
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / "b.txt").symlink_to("a.txt")
    assert texts(folder) == ["a", "a"]
    (folder / "c.txt").symlink_to(outside)
    line = fault(lambda: texts(folder))
    assert line.startswith(f"{folder / 'c.txt'} is a link that points outside {folder}: to read it, give ")
    assert texts(folder / "c.txt") == ["secret"]  # named by the user
    assert texts(folder / "*") == ["a", "a", "secret"]
    shortcut = tmp_path / "shortcut"
    shortcut.symlink_to(folder)
    (folder / "c.txt").unlink()
    assert texts(shortcut) == ["a", "a"]


def test_a_data_set_in_the_cache_of_hugging_face_is_read(tmp_path):
    snapshot, blobs = tmp_path / "datasets--x" / "snapshots" / "0123", tmp_path / "datasets--x" / "blobs"
    (snapshot / "data").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "45").write_text("text")
    (snapshot / "data" / "a.txt").symlink_to("../../../blobs/45")
    assert texts(snapshot) == texts(snapshot / "data") == ["text"]
    (snapshot / "data" / "b.txt").symlink_to(tmp_path)
    (snapshot / "data" / "c.txt").symlink_to(write(tmp_path / "datasets--x" / "other"))
    assert "c.txt is a link that points outside" in fault(lambda: texts(snapshot))


def write(path):
    path.write_text("other")
    return path


def test_file_folder_and_glob_give_documents_in_sorted_order(tmp_path):
    for name, text in {"b.txt": "b", "a/2.md": "a2", "a/10.txt": "a10", "a.txt": "a", ".hidden": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no")
    assert texts(tmp_path / "b.txt") == ["b"]
    assert texts(tmp_path) == ["a10", "a2", "a", "b"]
    assert texts(tmp_path / "*.txt") == ["a", "b"]
    assert texts(tmp_path / "**" / "*.txt") == ["a10", "a", "b"]
    assert texts(tmp_path / "b.txt", tmp_path / "a") == ["b", "a10", "a2"]


def test_text_is_kept_byte_for_byte_whatever_the_pieces(tmp_path, monkeypatch):
    text = "\ufeffé\r\n\u20ac𝕏\t\r ende\n" * 3
    (tmp_path / "text").write_bytes(text.encode())
    for piece_bytes in (1, 2, 3, 5, 7, 1000):
        monkeypatch.setattr(formats, "PIECE_BYTES", piece_bytes)
        assert texts(tmp_path / "text") == [text]


def test_empty_files_among_others_are_left_out(tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "text").write_text("text")
    assert texts(tmp_path) == ["text"]


def test_fingerprint_changes_with_names_and_contents(tmp_path):
    file = tmp_path / "a"
    seen = set()
    for text, changed in (("one", 1), ("two", 2), ("three", 2)):
        file.write_text(text)
        os.utime(file, (changed, changed))
        seen.add(open_corpus([str(tmp_path)]).fingerprint)
    file.rename(tmp_path / "renamed")
    seen.add(open_corpus([str(tmp_path)]).fingerprint)
    (tmp_path / "b").write_text("b")
    seen.add(open_corpus([str(tmp_path)]).fingerprint)
    assert len(seen) == 5


def test_missing_input_names_the_corpora(tmp_path):
    message = fault(lambda: open_corpus([str(tmp_path / "nowhere.txt")]))
    assert "nowhere.txt' is not a file, a folder, a glob that matches a file" in message
    assert "stdlib, shakespeare" in message


def test_no_input():
    assert fault(lambda: open_corpus([])) == "no input: give a corpus, a file, a folder or a glob"


@pytest.mark.parametrize("files", [{"a.txt": b""}, {"folder/a": b"", "folder/b": b""}, {}])
def test_empty_input(tmp_path, files):
    (tmp_path / "folder").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    given = tmp_path / "a.txt" if "a.txt" in files else tmp_path / "folder"
    assert "is empty: no text in" in fault(lambda: open_corpus([str(given)]))


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 4, 1000])
@pytest.mark.parametrize(
    ("content", "byte"),
    [
        (b"plain \xff more", 6),
        ("caf\u00e9".encode("latin-1") + b" au lait", 3),
        (b"ends within \xe2\x82", 12),
        ("\u20ac\u20ac".encode() + b"\xf0\x28", 6),
    ],
)
def test_text_that_is_not_utf8_names_file_and_byte(tmp_path, content, byte, piece_bytes, monkeypatch):
    monkeypatch.setattr(formats, "PIECE_BYTES", piece_bytes)
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    message = fault(lambda: texts(file))
    assert message.startswith(f"{file} is not UTF-8 text: byte {byte}: ")


@pytest.mark.parametrize("piece_bytes", [2, 1000])
def test_binary_input_names_file_and_byte(tmp_path, piece_bytes, monkeypatch):
    monkeypatch.setattr(formats, "PIECE_BYTES", piece_bytes)
    file = tmp_path / "model.bin"
    file.write_bytes(b"text\0\1\2")
    assert fault(lambda: texts(file)) == f"{file} is binary, not UTF-8 text: byte 4 is NUL"


def test_file_that_goes_away_while_preparing(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("text")
    document = open_corpus([str(file)]).files[0]
    file.unlink()
    assert fault(document.text) == f"cannot read {file}: No such file or directory"


def test_folder_without_permission(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", refuse)
    assert fault(lambda: open_corpus([str(tmp_path)])) == f"cannot read {tmp_path}: Permission denied"


def test_file_without_permission(tmp_path, obeying_permissions):
    file = tmp_path / "text.txt"
    file.write_text("text")
    file.chmod(0)
    assert fault(lambda: texts(file)) == f"cannot read {file}: Permission denied"


class Server(http.server.BaseHTTPRequestHandler):
    content = CONTENT

    def do_GET(self):
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[:10] if self.path == "/cut" else CONTENT)

    def log_message(self, *_):
        pass


@pytest.fixture
def url(monkeypatch):
    """A server on this machine that has a small file with its checksum declared as Shakespeare's."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(corpora, "SHAKESPEARE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(corpora, "SHAKESPEARE_SIZE", len(CONTENT))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_download_is_kept_and_not_repeated(url, tmp_path):
    file = corpora.download_shakespeare(tmp_path / "cache", f"{url}/file")
    assert file.read_bytes() == CONTENT
    assert corpora.download_shakespeare(tmp_path / "cache", "http://127.0.0.1:9/nobody") == file
    assert os.listdir(tmp_path / "cache") == ["tinyshakespeare.txt"]


def test_damaged_cache_is_downloaded_again(url, tmp_path):
    (tmp_path / "tinyshakespeare.txt").write_bytes(CONTENT[:-1])
    assert corpora.download_shakespeare(tmp_path, f"{url}/file").read_bytes() == CONTENT


def test_cache_is_below_xdg_cache_home(url, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = corpora.download_shakespeare(url=f"{url}/file")
    assert file == tmp_path / "lightning-llm" / "tinyshakespeare.txt"


def test_wrong_checksum_is_refused_and_nothing_kept(url, tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "SHAKESPEARE_SHA256", "0" * 64)
    message = fault(lambda: corpora.download_shakespeare(tmp_path, f"{url}/file"))
    assert f"sent {len(CONTENT)} bytes with sha256 {hashlib.sha256(CONTENT).hexdigest()}, not the" in message
    assert os.listdir(tmp_path) == []


def test_download_that_breaks_off_is_refused_and_nothing_kept(url, tmp_path):
    message = fault(lambda: corpora.download_shakespeare(tmp_path, f"{url}/cut"))
    assert "/cut sent 10 bytes with sha256 " in message
    assert os.listdir(tmp_path) == []


def test_download_that_fails_says_what_to_do(url, tmp_path):
    message = fault(lambda: corpora.download_shakespeare(tmp_path, f"{url}/missing"))
    assert message.startswith(f"corpus 'shakespeare' cannot be downloaded from {url}/missing (Not Found)")
    assert "give it as data.path" in message
    assert os.listdir(tmp_path) == []


def test_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        url = f"http://127.0.0.1:{server.server_port}/file"  # nobody listens there once it is closed
    message = fault(lambda: corpora.download_shakespeare(tmp_path, url))
    assert "cannot be downloaded" in message
    assert "Connection refused" in message


def test_shakespeare_is_downloaded_when_read_not_when_named(url, tmp_path, monkeypatch):
    monkeypatch.setattr(corpora.download_shakespeare, "__defaults__", (None, f"{url}/file"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    corpus = open_corpus(["shakespeare"])
    assert not (tmp_path / "cache").exists()
    assert corpus.files[0].text() == CONTENT.decode()
    assert corpus.size == len(CONTENT)


def test_shakespeare_is_the_file_that_everybody_uses():
    assert corpora.SHAKESPEARE_SIZE == 1_115_394
    assert corpora.SHAKESPEARE_SHA256 == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
    assert corpora.SHAKESPEARE_URL.endswith("/karpathy/char-rnn/master/data/tinyshakespeare/input.txt")


def test_fingerprint_is_that_of_the_content_whatever_the_times_say(tmp_path):
    for name, text in (("a", "one"), ("b", "two")):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (1, 1))
    before = open_corpus([str(tmp_path)]).fingerprint
    os.utime(tmp_path / "a", (5, 5))
    assert open_corpus([str(tmp_path)]).fingerprint == before
    (tmp_path / "a").write_text("eno")
    os.utime(tmp_path / "a", (5, 5))
    assert open_corpus([str(tmp_path)]).fingerprint != before


def test_fingerprint_of_a_file_that_cannot_be_read(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("text")
    corpus = open_corpus([str(file)])
    file.unlink()
    assert fault(lambda: corpus.fingerprint) == f"cannot read {file}: No such file or directory"
