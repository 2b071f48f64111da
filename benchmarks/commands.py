"""Other processes of a benchmark, such as ``lightning-llm fit``: they are started as a user starts them. No torch."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def start(*words: str, folder: Path, log: Path, without: Sequence[str] = (), **more: str) -> subprocess.Popen[bytes]:
    """``python -m WORD …`` in a folder; what it writes is appended to a file.

    Its environment is that of this process without some variables, and with more of them.
    """
    clean = {name: value for name, value in environment(**more).items() if name in more or name not in without}
    with log.open("ab") as output:
        command = [sys.executable, "-m", *words]
        return subprocess.Popen(command, cwd=folder, env=clean, stdout=output, stderr=output)


def finish(*words: str, folder: str | Path = ".", **more: str) -> tuple[str, float]:
    """What ``python -m WORD …`` writes to its standard output, and the seconds of the whole command.

    Raises:
        RuntimeError: It failed, with the last line that it wrote.
    """
    begun, command = time.perf_counter(), [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=folder, env=environment(**more), capture_output=True, text=True)
    seconds = time.perf_counter() - begun
    if done.returncode:
        raise RuntimeError(last_line(done.stderr or done.stdout))
    return done.stdout, seconds


def environment(**more: str) -> dict[str, str]:
    """That of this process, with this clone first in the path of Python, and more variables."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def last_line(text: str) -> str:
    """The last one that is not empty."""
    return (text.strip().splitlines() or ["no output"])[-1]
