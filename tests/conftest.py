"""Fixtures: a small text to train on, and guards that fail a test which leaks state into the next."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import random
import shutil
import signal
from datetime import timedelta
from multiprocessing import forkserver
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_llm.io.trust import TRUSTED
from tests.docs.shell import WHOLE, Shell
from tests.patience import HANGS_S

pytest_plugins = ["tests.tiny_run", "tests.figures"]
needs_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

torch.set_num_threads(1)  # tests run side by side: two processes of two threads each on two cores take 20 times as long


# pytest's own notes; Lightning's seed, layout and threads for its subprocesses, and what its import sets for CUDA;
# torch's compiler, its Triton, and its OpenMP runtime; what the command sets for OpenMP where it is called as its own
# process would call it
WRITTEN_BY_LIBRARIES = (
    "PYTEST_",
    "PL_",
    "LT_",
    "TORCHINDUCTOR",
    "_TORCHINDUCTOR",
    "KMP_",
    "OMP_",
    "GOMP_",
    "PYTORCH_NVML_",
    "TRITON_",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Each worker begins with slow tests: it is given one block of the list at first, and takes others' when idle."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = [item for item in items if item.get_closest_marker("slow")]
    quick = [item for item in items if not item.get_closest_marker("slow")]
    share = -(-len(items) // workers)
    blocks = [slow[worker::workers] for worker in range(workers)]
    for block in blocks:
        room = share - len(block)
        block += quick[:room]
        del quick[:room]
    items[:] = [item for block in [*blocks, quick] for item in block]


def pytest_collection_finish():
    """What is there when the tests begin stays: garbage collections pass it by, which saves a sixth of the CPU time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # or extension modules say at the end that their objects are still there


@pytest.fixture(autouse=True)
def _trusts_no_more_than_before():
    """What a test lets this process import, no later one may."""
    earlier = set(TRUSTED)
    yield
    TRUSTED.clear()
    TRUSTED.update(earlier)


@pytest.fixture(autouse=True)
def _no_leaks():
    """A test must leave the environment, the process group and torch's switches as it found them."""
    environment = dict(os.environ)
    yield
    torch.set_num_threads(1)  # Lightning sets as many as there are cores for a strategy of several processes
    changed = {name for name in environment.keys() | os.environ.keys() if environment.get(name) != os.environ.get(name)}
    for name in changed:
        if name in environment:
            os.environ[name] = environment[name]
        else:
            del os.environ[name]
    leaked = {name for name in changed if not name.startswith(WRITTEN_BY_LIBRARIES)}
    assert not leaked, f"left in the environment: {sorted(leaked)}"
    assert not (torch.distributed.is_available() and torch.distributed.is_initialized()), "left a process group"
    assert not torch.are_deterministic_algorithms_enabled(), "left deterministic algorithms on"
    assert torch.is_grad_enabled(), "left gradients off"


@pytest.fixture
def fake_cuda():
    """``fake_cuda(autocast=dtype)``: on any machine, CUDA tensors without numbers; they cannot require gradients."""

    @contextlib.contextmanager
    def mode(autocast=None):
        before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", autocast is not None)
        torch.set_autocast_dtype("cuda", autocast or before[1])
        try:
            with FakeTensorMode():
                yield
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])

    return mode


@pytest.fixture
def default_signals():
    """As at a terminal: jobs that a script starts in the background ignore Ctrl-C, those of nohup SIGHUP."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def obeying_permissions():
    """Files without permission are closed to the test, even if root runs it: its right to ignore them is laid aside."""
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the call, this thread: capget(2)
    data = (ctypes.c_uint32 * 6)()  # twice effective, permitted, inheritable
    assert libc.capget(header, data) == 0, os.strerror(ctypes.get_errno())
    before = data[0]
    data[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())
    yield
    data[0] = before
    assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())


def _changed_leaves(content, path=()):
    """Every leaf and every container of JSON content, each changed in seven ways: (what was done, new content)."""
    found = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in found:
        for name, new in (
            ("dropped", ...), ("null", None), ("retyped", [] if isinstance(value, str) else "text"), ("negative", -1),
            ("huge", 10**15), ("nan", float("nan")), ("empty", ""),
        ):  # fmt: skip
            if isinstance(content, dict):
                changed = {k: new if k == key else v for k, v in content.items() if k != key or new is not ...}
            else:
                changed = [new if k == key else v for k, v in enumerate(content) if k != key or new is not ...]
            yield f"{'.'.join(map(str, (*path, key)))} {name}", changed
        for label, inner in _changed_leaves(value, (*path, key)):
            whole = dict(content) if isinstance(content, dict) else list(content)
            whole[key] = inner
            yield label, whole


@pytest.fixture(scope="session")
def changed_leaves():
    """``changed_leaves(content)``: each value in JSON content dropped, null, retyped, -1, 10**15, NaN and empty."""
    return _changed_leaves


def _in_group(rank, folder, work, *args):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=HANGS_S))
    work(rank, *args)
    dist.barrier()  # a process that leaves early takes the connection from the other
    # torch's caches keep groups of sharded models alive; Python's ending may abort at their threads (pytorch#179291)
    os._exit(0)


@pytest.fixture(scope="session")
def _imported_once():
    """A process to fork from: importing torch and Lightning takes each process seven seconds."""
    multiprocessing.set_forkserver_preload(["lightning_llm.training.trainer", "tests.conftest", "hypothesis"])
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with patch.dict(os.environ, single):  # a process of several threads cannot be forked safely
        forkserver.ensure_running()


@pytest.fixture
def two_processes(tmp_path, _imported_once):
    """``two_processes(work, …)`` runs ``work(rank, …)`` in two processes of a gloo group."""

    def run(work, *args):
        processes = {"nprocs": 2, "start_method": "forkserver"}
        torch.multiprocessing.start_processes(_in_group, (str(tmp_path), work, *args), **processes)

    return run


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """About 40 kB of made-up sentences: enough structure to learn, nobody's words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 6))) for _ in range(60)]
    lines = [" ".join(rng.choices(words, k=8)).capitalize() + "." for _ in range(1000)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def put_instead(tmp_path):
    """``put_instead(file, "a FIFO")``: move a file away and put a FIFO, a folder or a link in its place."""

    def put(file, instead):
        shutil.move(file, tmp_path / "outside")
        if instead == "a FIFO":
            os.mkfifo(file)
        elif instead == "a folder":
            file.mkdir()
        else:
            file.symlink_to(
                {"a link outside": tmp_path / "outside", "a link to a device": "/dev/zero"}.get(instead, file)
            )

    return put


@pytest.fixture(scope="session")
def quick_processes():
    """A ``Shell`` whose commands are forked from a process that has imported everything, and compute in one thread."""
    shell = Shell(WHOLE)
    yield shell
    shell.close()


TRACES = {}


@pytest.fixture
def traced_once(monkeypatch):
    """Lets planners of all tests share their traces, which take most of a test's time."""
    from lightning_llm.accounting import planner

    def trace(config, settings, traced=planner.memory_trace):
        key = repr((config, settings))
        if key not in TRACES:
            TRACES[key] = traced(config, settings)
        return TRACES[key]

    monkeypatch.setattr(planner, "memory_trace", trace)
