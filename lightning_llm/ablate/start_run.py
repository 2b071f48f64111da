"""Starts a command in a copy of a process that has imported torch. Executed by its path: the package is the tree's.

It gets ``job`` as a global: ``main``, the file to execute; ``arguments`` of it; ``folder`` and ``environment`` to run
in; ``cores``, empty for all; and ``log``, the file that takes the output.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from multiprocessing.connection import wait


def execute(main, arguments, folder, environment, cores, log):  # type: ignore[no-untyped-def]  # noqa: D103
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


def end_with_parent():  # type: ignore[no-untyped-def]  # noqa: D103
    wait([multiprocessing.parent_process().sentinel])  # type: ignore[union-attr]
    os.kill(os.getpid(), signal.SIGTERM)


if "job" in globals():
    execute(**globals()["job"])  # type: ignore[no-untyped-call]
