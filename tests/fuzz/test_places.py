"""Artifacts in which a file is something else or a name is taken: an answer or one line, and nothing outside."""

import os
import socket
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import watch
from tests.fuzz.conftest import Subject, amount
from tests.fuzz.test_command_lines import LINES, PARTS

PRECIOUS = "precious\n"
KINDS = ("fifo", "socket", "folder", "device", "sparse", "loop", "outside", "dangling", "text", "empty")
EXPERIMENT = {"status": ["status", "out"], "report": ["report", "out"]}
OF_FILES = [
    *((command, line) for command in LINES if command != "ablate" for line in LINES[command]),
    *(("ablate", line) for line in EXPERIMENT.values()),
    ("compare", ["out"]),
    ("fit", ["--config", "runs/tiny/version_0/config.yaml", "--ckpt_path", "runs/tiny/version_0"]),
    ("check", ["--config", "tiny.yaml", "--model.init_from", "hf"]),
]
# Names that a command may write beside a file, or looks for there
TAKEN = (".{name}.{pid}.tmp", ".{name}.old.tmp", ".{name}.gone.tmp", "lock", "start_number", "job", "version_²", "1²2")


def put(path, kind, outside):
    """Put something at a path, in the place of what is there."""
    if path.is_dir() and not path.is_symlink():
        watch.clear(path)
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener, suppress(OSError):  # a path of more than 108 bytes
            listener.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(3 * 2**30)
    elif kind in ("text", "empty"):
        path.write_text("a text\n" * (kind == "text"))
    else:
        targets = {"device": "/dev/zero", "loop": ".", "outside": outside / "precious.txt", "dangling": outside / "new"}
        path.symlink_to(targets[kind])


def test_a_file_that_is_something_else_is_reported(world):
    subject = Subject("places")

    @amount(20, is_slow=True)
    @given(st.integers(0, 2**32), st.integers(0, 2**32), st.sampled_from(KINDS))
    def draw(which, where, kind):
        command, line = OF_FILES[which % len(OF_FILES)]
        named = [part for part in (*PARTS, "out") if any(part.split("/")[0] in word for word in line)]
        with world.copy(*PARTS, "out") as (root, work):
            outside = root / "outside"
            outside.mkdir()
            (outside / "precious.txt").write_text(PRECIOUS)
            inside = sorted(path for part in named for path in (work / part, *(work / part).rglob("*")))
            files = [path for path in inside if not path.is_dir()] or [work / "tiny.yaml"]
            path = files[where % len(files)]
            if where // len(files) % 3 == 0:
                taken = TAKEN[where // len(files) // 3 % len(TAKEN)]
                path = path.with_name(taken.format(name=path.name, pid=os.getpid()))
            put(path, kind, outside)
            subject.count(True)

            def only_what_was_there():
                assert (outside / "precious.txt").read_text() == PRECIOUS
                assert [file.name for file in outside.iterdir()] == ["precious.txt"]

            story = f"{path.relative_to(work)} is {kind}"
            result = watch.run([command, *line], root, work, story)
            watch.correct(only_what_was_there, command, story)
            subject.succeeded += result.status == 0

    draw()
    subject.check()
