"""Runs one command on changed files and holds what must be so: a correct result or one line, and nothing else done."""

import contextlib
import io
import os
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch

from lightning_llm.__main__ import main
from lightning_llm.cli.errors import reports

SECONDS, WAITING = 60, 180  # of computing, which others on the machine do not change; and in all, for what waits
CLOCKS = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}
LARGE = 2**22  # bytes of a file that is not compared
MEMORY = 2 * 2**30  # of address space beyond what the process has
TRUST = "--trust-code"  # a draw whose words hold it may import the canary
PACKAGE = "/lightning_llm/"
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PATHS_OF = {  # audit events that change files: which of their arguments are paths
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "shutil.rmtree"), (0,)),
    **dict.fromkeys(("os.rename", "os.link"), (0, 1)),
    "os.symlink": (1,),
}
STARTING = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.forkpty",
    "os.spawn",
    "pty.spawn",
)
REACHING = ("socket.connect", "socket.getaddrinfo", "urllib.Request")

# In a line for a user these are a mistake of ours: what Python says of its own operations
PYTHONS_WORDS = re.compile(
    r"not supported between|object has no attribute|unsupported operand|is not iterable|unexpected keyword argument"
    r"|positional argument|arguments converted during|is not subscriptable|is not callable|indices must be|unhashable"
    r"|must be a mapping|not enough values|too many values|required argument|string pattern on|cannot be interpreted as"
    r"|int too large|maximum recursion|out of range$|can't multiply"
)


NOTE = re.compile(  # what a command says before it can know of an error
    r"^lightning-llm \w+: \S+ imports |^step \d+  loss |^Preparing stores/"
    r"| is counted as a LanguageModel: what it adds is left out$"
)


class Failure(AssertionError):
    """A draw did what must not be.

    Attributes:
        signature: The same for failures of one cause: exception and innermost own line, or what was done.
    """

    def __init__(self, signature: str, story: str) -> None:
        super().__init__(f"{signature}\n{story}")
        self.signature = re.sub(r"\d{6,}[\w.]*", "N", signature)


class TooSlowError(BaseException):
    """Raised by the alarm; no handler of errors takes it."""


class Watch:
    """Audit hook that refuses and notes what a command must not do. Python cannot remove it; it rests between draws."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.asked: list[str] = []
        self.found: list[str] = []
        sys.addaudithook(self._audit)

    @contextlib.contextmanager
    def over(self, folder: Path, words: Sequence[str]) -> Iterator[None]:
        """While a draw runs in this folder; what the command line asks for is refused but not held against it."""
        values = [os.path.expanduser(word.partition("=")[2] or word) for word in words]
        whole = [os.path.realpath(value) for value in values if value.startswith("/")]
        beside = [os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.") for path in whole]  # being written
        self.asked = [*whole, *beside]
        self.found, self.folder = [], os.path.realpath(folder)
        try:
            yield
        finally:
            self.folder = None

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITING:
                self._check(event, path)
        elif event in PATHS_OF:
            for number in PATHS_OF[event]:
                self._check(event, arguments[number])
        elif event in STARTING or event in REACHING:
            self._refuse(f"{event} {arguments[0]!r}")

    def _check(self, event: str, path: Any) -> None:
        if isinstance(path, int) or path is None:
            return
        whole = os.path.realpath(os.path.abspath(os.fsdecode(path)))
        if whole.startswith(f"{self.folder}/") or whole == "/dev/null" or "__pycache__" in whole:
            return
        if event == "os.mkdir" and os.path.isdir(whole):  # with exist_ok: nothing is made
            return
        if not whole.startswith((*self.asked,)):
            self._refuse(f"{event} {whole}")
        raise PermissionError(13, "Permission denied", os.fsdecode(path))

    def _refuse(self, what: str) -> None:
        self.found.append(f"{what} by {_own_frame(traceback.extract_stack())}")
        raise PermissionError(13, f"Permission denied: {what}")


WATCH = Watch()


class Result:
    """What a command answered."""

    def __init__(self, status: int, out: str, err: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        self.status, self.out, self.err = status, out, err
        self.before, self.after = before, after

    @property
    def made(self) -> list[str]:
        """Paths that were not there, or were something else."""
        return [name for name, content in self.after.items() if self.before.get(name) != content]


def run(words: Sequence[str], root: Path, work: Path, story: str) -> Result:
    """Run a command in ``work``, which is below the draw's own folder ``root``.

    Raises:
        Failure: It broke one of the rules that hold for all commands.
    """
    before = contents(root)
    out, err = io.StringIO(), io.StringIO()
    began, failure = time.monotonic(), None
    status: Any = None
    with _surroundings(root, work), WATCH.over(root, words), _limits():
        streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        with streams[0], streams[1]:
            try:
                status = _called(words)
            except SystemExit as leaving:
                status = leaving.code
            except TooSlowError as error:
                failure = f"more than {SECONDS} s in {_own_frame(traceback.extract_tb(error.__traceback__))}"
            except BaseException as error:
                place = _own_frame(traceback.extract_tb(error.__traceback__))
                failure = f"{type(error).__name__} at {place}: {' '.join(str(error).split())[:200]}"
    canaries = [name for name in sys.modules if name.startswith("canary_parts")]
    for name in canaries:
        del sys.modules[name]
    after = contents(root)
    result = Result(status, out.getvalue(), err.getvalue(), before, after)
    line = " ".join(map(repr, words))
    told = f"{story}\n$ lightning-llm {line}\n{result.err[-2000:]}\nafter {time.monotonic() - began:.1f} s"
    is_named = TRUST in words or "canary_parts" in " ".join(words)  # typed: that is trusted
    if canaries and not is_named and " imports canary_parts" not in result.err:
        raise Failure("code run: the canary was imported", told)
    if WATCH.found:
        raise Failure(f"code run or outside: {WATCH.found[0]}", told)
    if failure:
        raise Failure(failure, told)
    _check_answer(result, words[0] if words else "", told)
    return result


def _called(words: Sequence[str]) -> int:
    try:
        with mock.patch.object(reports, "unexpected", _raise):  # the last resort is for what is not found here
            return main(words)
    finally:  # the alarm must not ring while what came of it is written down
        silence()


def silence() -> None:
    for clock in CLOCKS:
        signal.setitimer(clock, 0)


def _raise(command: str, failure: Exception) -> NoReturn:
    raise failure


def _check_answer(result: Result, command: str, told: str) -> None:
    lines = [line for line in result.err.splitlines() if line and not NOTE.search(line)]
    if "Traceback" in result.err:
        raise Failure(f"traceback: {lines[-1][:120]}", told)
    if result.status == 0:
        return
    if result.status not in (1, 2) or (result.status == 1 and ": stopped: " not in result.err):
        raise Failure(f"status {result.status}: {' '.join(lines)[-160:]}", told)
    start = f"lightning-llm {command}".rstrip()
    if result.status == 2 and (len(lines) != 1 or not lines[0].startswith(start)):
        raise Failure(f"not one line: {' | '.join(lines)[:160]}", told)
    if words := PYTHONS_WORDS.search(result.err):
        raise Failure(f"Python's own words, {command}: {words[0]}: {result.err.strip()[-160:]}", told)
    left = [name for name in result.made if not _is_whole(name, result)]
    gone = [name for name in result.before if name not in result.after]
    if result.status == 2 and (left or gone):
        raise Failure(f"left behind by {command}: {left[:3]}, gone: {gone[:3]}", told)


def _is_whole(name: str, result: Result) -> bool:
    """A token store may have been prepared, whole, before the mistake was met."""
    parts = Path(name).parts
    return "stores" in parts and ".tmp" not in name and any("meta.json" in each for each in result.made)


def contents(folder: Path) -> dict[str, Any]:
    """Every file of a folder by its path; folders too."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = path.readlink() if path.is_symlink() else _content(path)
    return found


def _content(path: Path) -> Any:
    """Of a small file; of anything else, what it is and its size."""
    details = path.stat()
    if stat.S_ISREG(details.st_mode) and details.st_size < LARGE:
        return path.read_bytes()
    return None if path.is_dir() else (details.st_mode, details.st_size)


@contextlib.contextmanager
def _surroundings(root: Path, work: Path) -> Iterator[None]:
    before = os.getcwd()
    environment, path, stdin = dict(os.environ), list(sys.path), sys.stdin
    os.chdir(work)
    sys.path.append(str(work))  # as a process of its own looks for the user's parts
    sys.stdin = io.StringIO("")
    tempfile.tempdir = str(root)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(root / "inductor")
    try:
        yield
    finally:
        os.chdir(before)
        tempfile.tempdir = None
        sys.path[:], sys.stdin = path, stdin
        os.environ.clear()
        os.environ.update(environment)
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.autograd.set_detect_anomaly(False)


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Time and memory: a draw that takes more is interrupted where it is."""

    def ring(number: int, frame: Any) -> None:
        raise TooSlowError

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    before = [signal.signal(number, ring) for number in CLOCKS.values()]
    for clock, seconds in zip(CLOCKS, (SECONDS, WAITING), strict=True):
        signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        silence()
        for number, handler in zip(CLOCKS.values(), before, strict=True):
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _own_frame(frames: Sequence[traceback.FrameSummary]) -> str:
    own = [frame for frame in frames if PACKAGE in frame.filename and "/tests/" not in frame.filename]
    if not own:
        return "no frame of ours"
    return f"{own[-1].filename.rpartition(PACKAGE)[2]}:{own[-1].name}"


def clear(folder: Path) -> None:
    """Remove what a draw has left."""
    shutil.rmtree(folder, ignore_errors=True)


def correct(check: Any, command: str, story: str) -> None:
    """Run the assertions about a result; whatever they raise is a failure of the draw."""
    try:
        check()
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise Failure(f"wrong result of {command}: {what}", story) from error
