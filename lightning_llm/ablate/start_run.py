"""Starts a command in a copy of a process that has imported torch. Executed by its path: the package is the tree's.

It gets ``job`` as a global: the arguments of :func:`execute`.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait


def execute(
    main: str, arguments: Sequence[str], folder: str, environment: Mapping[str, str], cores: Sequence[int], log: str
) -> None:
    """Execute a file as ``python`` would, in a session of its own.

    Args:
        main: The file; its folder comes first in the path of imports.
        arguments: Of the command.
        folder: Where it runs.
        environment: All that it finds.
        cores: Those that it may use; empty: all.
        log: The file that its output is appended to.
    """
    os.setsid()  # Ctrl-C reaches it through the process that started it, once
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    for number in (1, 2):
        os.dup2(output, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.argv = [main, *arguments]
    sys.path.insert(0, os.path.dirname(main))
    try:
        runpy.run_path(main, run_name="__main__")
    finally:
        if sys.version_info < (3, 13):  # from then on, multiprocessing does it
            atexit._run_exitfuncs()


def end_with_parent() -> None:
    """Send SIGTERM to this process when the one that started it has ended: a run then saves and ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


if "job" in globals():
    execute(**globals()["job"])
