"""Files that others may have made: what is opened, what is not, and where a link may lead."""

import ast
import os
import socket
from pathlib import Path

import pytest

from lightning_llm.io import untrusted
from lightning_llm.io.atomic import atomic_file, open_to_append
from lightning_llm.io.untrusted import check_links, file_in, open_regular, read_bytes, read_json, read_text

PACKAGE = Path(__file__).parents[2] / "lightning_llm"


def put(kind, path):
    """Something that is no file, or a link to it."""
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.path.relpath(path))  # at most 107 characters
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a socket", "a device"])
def test_what_is_no_file_is_one_line_and_is_not_waited_for(tmp_path, kind):
    path = tmp_path / "given"
    put(kind, path)
    for read in (open_regular, lambda it: read_bytes(it, 10), lambda it: read_text(it, 10), read_json):
        with pytest.raises(ValueError, match=f"^{path} is {kind}, expected a file$"):
            read(path)
    with pytest.raises(ValueError, match="is a link, expected" if kind == "a device" else f"is {kind}, expected"):
        open_to_append(path)


def test_a_fifo_that_is_put_there_after_the_check_is_not_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    real = os.stat
    monkeypatch.setattr(untrusted.os, "stat", lambda path, **options: real(tmp_path / "file"))
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(ValueError, match="is a FIFO"):
        open_regular(tmp_path / "fifo")
    assert len(os.listdir("/dev/fd")) == before


def test_a_file_is_read_up_to_its_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError, match="has 5 bytes, expected at most 4"):
        open_regular(tmp_path / "file", 4)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")


def test_no_file_is_written_through_a_link(tmp_path):
    (tmp_path / "precious").write_text("kept")
    for target in ("precious", "new"):
        link = tmp_path / f"link to {target}"
        link.symlink_to(target)
        with pytest.raises(ValueError, match="is a link, expected a file"):
            open_to_append(link)
        with atomic_file(link) as file:
            file.write(b"ours")
        assert link.read_text() == "ours"
        assert not link.is_symlink()
    assert (tmp_path / "precious").read_text() == "kept"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("place", "fits"), [("blobs/abc", True), ("blobs/../secret", False), ("secret", False)])
def test_a_folder_below_snapshots_links_to_its_blobs_only(tmp_path, place, fits):
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for name in ("blobs/abc", "secret"):
        (tmp_path / name).touch()
    (snapshot / "config.json").symlink_to(tmp_path / place)
    if fits:
        assert file_in(snapshot, "config.json") == snapshot / "config.json"
        return
    with pytest.raises(ValueError, match="points outside the folder"):
        file_in(snapshot, "config.json")


def test_links_that_lead_out_of_a_folder_are_found(tmp_path):
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "newest").symlink_to("17")
    (run / "best.ckpt").symlink_to("/nowhere.ckpt")
    check_links(run, replaced=".ckpt")
    for place in ("turn", "logs/deep", "a.ckpt"):
        (run / place).symlink_to(tmp_path, target_is_directory=True)
        with pytest.raises(ValueError, match=f"{place} is a link that points outside {run}"):
            check_links(run, replaced=".ckpt")
        (run / place).unlink()
    (run / "turn").symlink_to(tmp_path / "does not exist")
    with pytest.raises(ValueError, match="turn is a link"):
        check_links(run, replaced=".ckpt")


# Calls that open a file by a path, in this package: all others go through io.untrusted and io.atomic.
OPENING = {
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "memmap", "fromfile", "safe_open"),
    *("copyfile", "copy2", "torch.load", "np.load", "loadtxt", "genfromtxt", "savefig", "EventAccumulator", "fdopen"),
}
SAFE_OWNERS = ("untrusted", "TokenStore", "archive", "self.run_directory")  # their functions check, or open no path
ALLOWED = {  # where, call: why
    **dict.fromkeys(
        [
            ("accounting/hardware.py", "CPU_INFO.read_text"),
            ("ablate/claims.py", "Path('/proc/sys/kernel/random/boot_id').read_text"),
            ("ablate/fit/cost.py", "Path('/proc/stat').read_text"),
            ("measure/gauges.py", "os.open"),
            ("measure/gauges.py", "(_PROC / 'status').read_text"),
            ("measure/gauges.py", "(_PROC / 'clear_refs').write_text"),
            ("cli/standard_streams.py", "os.open"),
            ("ablate/start_run.py", "os.open"),
            ("ablate/run_process.py", "open"),
            ("io/processes.py", "Path(f'/proc/{process}/stat').read_text"),
            ("same/processes.py", "os.open"),
            ("ablate/command/descendants.py", "file.read_text"),
            ("ablate/command/descendants.py", "Path(f'/proc/{process}/stat').read_text"),
            ("ablate/command/descendants.py", "Path(f'/proc/{process}/smaps_rollup').read_text"),
        ],
        "the system's, by a fixed name",
    ),
    ("io/untrusted.py", "os.open"): "the one place",
    ("io/untrusted.py", "open"): "of a descriptor",
    ("io/atomic.py", "open"): "of a descriptor",
    ("io/atomic.py", "os.open"): "of a folder, to flush it",
    ("io/atomic.py", "shutil.copyfile"): "a checkpoint of this run, to a name that nobody can guess",
    ("cli/standard_streams.py", "open"): "of a descriptor",
    ("cli/errors.py", "open"): "of a descriptor",
    ("ablate/hook/sitecustomize.py", "os.open"): "appended to, in a process of the user's program",
    ("ablate/report/render.py", "drawn.savefig"): "into a file of io.atomic",
    ("ablate/claims.py", "os.open"): "O_EXCL",
    ("ablate/claims.py", "os.fdopen"): "of a descriptor",
    ("ablate/plan.py", "shutil.copyfile"): "the user's own modules, hashed before",
    ("data/token_store.py", "np.memmap"): "of an open file",
    ("data/token_store.py", "np.fromfile"): "checked when the store was opened",
    ("interop/weights.py", "safe_open"): "takes a path only; checked before",
    ("runs/code.py", "path.read_bytes"): "this package",
    ("checkpoints/archives.py", "torch.load"): "takes a path only to map it; checked before",
    ("io/charts.py", "axes[0, 0].figure.savefig"): "into memory",
    ("io/charts.py", "figure.savefig"): "of an open file",
}


def test_files_are_opened_in_one_place():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            is_method = isinstance(node.func, ast.Attribute)
            owner = ast.unparse(node.func.value) if is_method else ""
            is_opening = name in OPENING or f"{owner}.{name}" in OPENING
            if not is_opening or owner in SAFE_OWNERS or (not is_method and name.startswith(("read_", "write_"))):
                continue
            if len(node.args) > 0 and isinstance(node.args[-1], ast.Constant) and node.args[-1].value == "xb":
                continue  # a new file: no link is followed
            found[path.relative_to(PACKAGE).as_posix(), ast.unparse(node.func)] = node.lineno
    unknown = {place: line for place, line in found.items() if place not in ALLOWED}
    assert not unknown, f"open it by io.untrusted or io.atomic, or say here why not: {unknown}"
    assert ALLOWED.keys() == found.keys()


def test_numbers_in_names_are_read_in_one_way():
    files = [path for path in PACKAGE.rglob("*.py") if ".isdigit(" in path.read_text(encoding="utf-8")]
    assert not files, "str.isdigit accepts ², which int() does not: use number_in"
