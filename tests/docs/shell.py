"""A shell in which ``lightning-llm`` starts at once; for the blocks of a page, its runs are small too.

Importing torch and Lightning takes seconds, a tiny run less than one. So a process imports everything once (``serve``)
and forks for each command. On the shell's path ``lightning-llm`` and ``python`` are clients of it, which hand over
words, folder, environment and streams. A process of several threads cannot be forked safely: this one computes nothing.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.docs.scaled import scaled
from tests.patience import HANGS_S

ROOT = Path(__file__).parents[2]
ADDRESS = "LIGHTNING_LLM_DOCS_SERVER"
PROCESS_ID = "LIGHTNING_LLM_PROCESS_ID"  # the file that a command writes its process id into
KILLED = 70  # the status of a client whose command has ended without one
SINGLE = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
SMALL, WHOLE = "small", "whole"
CLIENT = f"""#!{sys.executable} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(os.environ["{ADDRESS}"])
socket.send_fds(server, [b"x"], [0, 1, 2])
asked = [os.path.basename(sys.argv[0]), sys.argv[1:], os.getcwd(), dict(os.environ)]
server.sendall(json.dumps(asked).encode() + b"\\n")
sys.exit(int(server.recv(16) or b"{KILLED}"))
"""


class Shell:
    """Starts the process; ``run`` gives a script to bash.

    Args:
        size: ``SMALL``: commands are made small; ``WHOLE``: they are run as they are given.
        threads: Environment variables that set the threads of the commands.
    """

    def __init__(self, size: str = SMALL, threads: Mapping[str, str] = SINGLE) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="docs-")  # short: so must be the address of a socket
        folder = Path(self._folder.name)
        for name in ("lightning-llm", "python"):
            (folder / name).write_text(CLIENT)
            (folder / name).chmod(0o755)
        self._address = str(folder / "socket")
        others = {name: value for name, value in os.environ.items() if name not in SINGLE}
        environment = {**others, **threads, "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-m", "tests.docs.shell", self._address, size]
        self._process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "the process that imports everything has ended"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs so that ``python`` and ``lightning-llm`` on its path are quick."""
        path = f"{self._folder.name}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, ADDRESS: self._address, "PYTHONPATH": str(ROOT)}

    @property
    def python(self) -> str:
        """Takes the place of ``sys.executable``, in this environment."""
        return str(Path(self._folder.name, "python"))

    def run(self, script: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a script; what it prints, errors too, is in ``stdout``."""
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            **self.environment,
            "CUDA_VISIBLE_DEVICES": "",  # a page is small everywhere
            "XDG_CACHE_HOME": str(folder / ".cache"),
        }
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANGS_S,
        )

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()


def serve(address: str, size: str) -> None:
    """Fork for each client, until SIGTERM."""
    _import_everything()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            client, _ = listener.accept()
            assert len(list(Path("/proc/self/task").iterdir())) == 1, "several threads: forking is not safe"
            if not os.fork():
                listener.close()
                _be_the_command(client, scaled if size == SMALL else list)
            client.close()


def _import_everything() -> None:
    import torch
    import torch.utils.tensorboard
    import transformers  # noqa: F401

    import lightning_llm.cli.train  # noqa: F401

    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(1)


def _be_the_command(client: socket.socket, sized: Callable[[Sequence[str]], list[str]]) -> NoReturn:
    """In the child: as in a process of its own, up to what is done at its end."""
    _, streams, _, _ = socket.recv_fds(client, 1, 3)
    name, words, folder, environment = json.loads(client.makefile().readline())
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a script ignores it
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [os.path.abspath(path) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.executable = str(Path(environment["PATH"].split(os.pathsep)[0], "python"))  # what it starts is quick too
    if PROCESS_ID in environment:
        Path(os.environ.pop(PROCESS_ID)).write_text(str(os.getpid()))  # not those of the processes that it starts
    status = _status_of(lambda: _python(words, sized) if name == "python" else _command(words, sized))
    threading._shutdown()  # as the interpreter at its end: idle pools are told to stop, then threads are waited for
    for output in (sys.stdout, sys.stderr):
        output.flush()
    client.sendall(str(status).encode())
    os._exit(status)


def _status_of(act: Callable[[], Any]) -> int:
    try:
        act()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _command(words: Sequence[str], sized: Callable[[Sequence[str]], list[str]]) -> None:
    if words[:1] == ["dashboard"]:
        _end_at_once()
    sys.argv = ["lightning-llm", *sized(words)]
    runpy.run_module("lightning_llm", run_name="__main__", alter_sys=True)


def _end_at_once() -> None:
    """TensorBoard on a free port, and Ctrl-C as soon as it shows the runs."""
    from lightning_llm.cli import dashboard

    start = dashboard.start

    def started(folder: Path, port: int) -> str:
        address = start(folder, 0)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return address

    dashboard.start = started


def _python(words: Sequence[str], sized: Callable[[Sequence[str]], list[str]]) -> None:
    words = words[1:] if words[:1] == ["-u"] else words  # as torchrun starts it
    if words[:2] == ["-m", "pip"]:
        print("what is needed is installed")
    elif words[:1] == ["-m"]:
        given = list(words[2:])
        sys.argv = ["", *(sized(["benchmarks", *given])[1:] if words[1] == "benchmarks" else given)]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[:1] == ["-c"]:
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "-c", "exec"), {"__name__": "__main__"})
    elif words and words[0] != "-":
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).absolute().parent))
        runpy.run_path(words[0], run_name="__main__")
    else:
        exec(compile(sys.stdin.read(), "-", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    serve(*sys.argv[1:])
