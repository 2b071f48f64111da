"""Processes that execute the code of an experiment: runs, and the measurement of their cost.

Importing torch and Lightning takes 6 s of CPU time, and a run of 100 steps of a small model 1.1 s. So a server process
imports them once, and each run is a copy of it (``multiprocessing``'s forkserver). The server never imports this
package: a copy puts the tree that its code is read from first on the path of imports.
"""

import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver, util
from pathlib import Path
from types import ModuleType

from lightning_llm.ablate.program import Process
from lightning_llm.io.processes import await_ends, is_alive
from lightning_llm.io.untrusted import open_regular

PRELOADED = ["torch.utils.tensorboard", "lightning.pytorch.cli", "tokenizers", "safetensors.torch", "scipy.stats"]
START = Path(__file__).with_name("start_run.py")
SAVING_S = 600.0  # a fit that was asked to end saves a checkpoint first
SHORT_FOLDER, LONGEST_FOLDER = "/tmp", 60
SERVER_LOST = 255  # the status that multiprocessing reports when the server was killed
THREADS = "OMP_NUM_THREADS"  # read by torch's libraries when they are loaded
_OF_THREADS = ("OMP_", "MKL_")
_OF_SERVER = {"OPENBLAS_NUM_THREADS": "1"}  # NumPy's library would start its threads, which a copy would not have


class RunProcess:
    """A command of a tree, in a session of its own. It ends when this process ends, after it has saved.

    Args:
        main: The file to execute, such as ``fit.py`` of a frozen tree.
        arguments: Of the command.
        log: Its output is appended to this file.
        threads: Of the libraries that compute.
        folder: Where it runs.
        environment: What it finds besides the variables of this process.
        cores: Those that it may use; empty: all.
    """

    def __init__(
        self,
        main: Path,
        arguments: Sequence[str],
        *,
        log: Path,
        threads: int,
        folder: str | Path = ".",
        environment: Mapping[str, str] | None = None,
        cores: Sequence[int] = (),
    ) -> None:
        log.parent.mkdir(exist_ok=True)
        job = {
            "main": str(main.resolve()),
            "arguments": list(arguments),
            "folder": str(Path(folder).resolve()),
            "environment": {**environment_of_run(threads), **(environment or {})},
            "cores": list(cores),
            "log": str(log.resolve()),
        }
        # a function of the standard library: the server has not imported this package
        self._process = multiprocessing.get_context("forkserver").Process(
            target=runpy.run_path, args=(str(START), {"job": job}, START.stem)
        )
        with _server(threads):
            self._process.start()
        self.pid = int(self._process.pid or 0)

    @property
    def sentinel(self) -> int | None:
        """Ready when it has ended, for ``multiprocessing.connection.wait``; ``None``: its server was killed."""
        return None if self._process.exitcode == SERVER_LOST else self._process.sentinel

    def status(self, wait_s: float = 0.0) -> int | None:
        """Its exit status, or minus the signal that ended it; ``None``: it still runs after so many seconds."""
        self._process.join(wait_s)
        if self._process.exitcode != SERVER_LOST:
            return self._process.exitcode
        await_ends([self.pid], wait_s)
        return None if is_alive(self.pid) else -signal.SIGKILL

    def wait(self) -> int:
        """Its exit status, or minus the signal that ended it, once it has ended."""
        while (status := self.status(60.0)) is None:
            pass
        return status

    def ask_to_end(self) -> None:
        """Send SIGTERM: a run saves first."""
        self._send(signal.SIGTERM)

    def await_end(self, patience_s: float = SAVING_S) -> None:
        """Wait until it has ended; it is killed if it has not by then."""
        if self.status(patience_s) is None:
            self._send(signal.SIGKILL)
            self.wait()

    def _send(self, number: int) -> None:
        if self.status() is None:
            with suppress(ProcessLookupError):  # it has just ended
                try:
                    os.killpg(self.pid, number)
                except ProcessLookupError:  # it has no session yet
                    os.kill(self.pid, number)


def wait_for_one(processes: Sequence[Process], wait_s: float) -> None:
    """Wait until one of several processes has ended, or so many seconds."""
    sentinels = [process.sentinel for process in processes]
    connection.wait([sentinel for sentinel in sentinels if sentinel is not None], wait_s)


def environment_of_run(threads: int) -> dict[str, str]:
    """This process's environment with so many threads, without a trace of SLURM.

    Lightning in a run would take the signals of a SLURM job for its own, and queue the job a second time.
    """
    others = {name: value for name, value in os.environ.items() if not name.startswith((*_OF_THREADS, "SLURM_"))}
    return {**others, THREADS: str(threads)}


def start_server(threads: int) -> None:
    """Let the server begin to import, so that the first run need not wait for it."""
    with _server(threads):
        pass


def last_line(log: Path) -> str:
    """The last line of an output."""
    with open_regular(log) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


_threads_of_server: int | None = None


@contextmanager
def _server(threads: int) -> Iterator[None]:
    """The server runs, with so many threads; it was started with them, since libraries read that number once."""
    global _threads_of_server
    environment = dict(os.environ)
    main = sys.modules["__main__"]
    try:
        for name in [name for name in os.environ if name.startswith(_OF_THREADS)]:
            del os.environ[name]
        os.environ.update(_OF_SERVER | {THREADS: str(threads)})
        sys.modules["__main__"] = ModuleType("__main__")  # multiprocessing would import this process's there
        if _threads_of_server != threads:  # or a server of somebody else's in this process, with other imports
            forkserver._forkserver._stop()  # type: ignore[attr-defined]
        _threads_of_server = threads
        forkserver.set_forkserver_preload(PRELOADED)
        _use_short_folder()
        with _silent_in(os.sep):  # in the current folder, its files would come before the modules of their names
            forkserver.ensure_running()
        yield
    finally:
        sys.modules["__main__"] = main
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def _silent_in(folder: str) -> Iterator[None]:
    """Let what is started run in this folder and print nothing: libraries have much to say when they are imported."""
    current = os.getcwd()
    outputs = [os.dup(number) for number in (1, 2)]
    try:
        os.chdir(folder)
        with open(os.devnull, "w", encoding="ascii") as null:
            for number in (1, 2):
                os.dup2(null.fileno(), number)
        yield
    finally:
        for number, output in zip((1, 2), outputs, strict=True):
            os.dup2(output, number)
            os.close(output)
        os.chdir(current)


def _use_short_folder() -> None:
    """Let multiprocessing make its sockets in a folder whose path is short enough for one.

    Those of a user's ``TMPDIR`` may be longer than the 108 bytes of a socket's name.
    """
    config = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    if len(os.fsencode(config.get("tempdir") or tempfile.gettempdir())) > LONGEST_FOLDER:
        config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir=SHORT_FOLDER)
        util.Finalize(None, shutil.rmtree, args=(config["tempdir"], True), exitpriority=-100)
