"""Measurements in fresh processes.

Loads no torch: a fresh process imports this module first, and what it imports counts in the memory measured there.
"""

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def in_fresh_processes(
    function: Callable[[Job], Result], jobs: Sequence[Job], *, name: str, environment: Mapping[str, str] | None = None
) -> list[Result]:
    """The results of a function, each job in a new process, all at once; what they print as errors is dropped.

    Args:
        function: At the top of a module. A module that it does not import does not count in its memory.
        jobs: What it is called with.
        name: Of what runs, for the error.
        environment: Variables of the new processes, beside those of this one.

    Raises:
        RuntimeError: A job failed.
    """
    # only here: a fresh process does not need it, and its memory would count
    from unittest.mock import patch

    context = multiprocessing.get_context("spawn")
    with patch.dict(os.environ, environment or {}), ProcessPoolExecutor(len(jobs), context, _without_errors) as pool:
        try:
            return list(pool.map(partial(_call, function), jobs))
        except Exception as error:
            raise RuntimeError(f"{name} failed: {error}") from error


def _call(function: Callable[[Job], Result], job: Job) -> Result:
    """An error comes back as its text: one of the compiler holds modules, which no process can send to another."""
    try:
        return function(job)
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _without_errors() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
