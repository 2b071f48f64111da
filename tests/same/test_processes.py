"""Functions in processes of their own."""

import os

import pytest

from lightning_llm.same.processes import in_fresh_processes


def _fail(job):
    raise ValueError(f"job {job} is bad")


def test_a_fresh_process_loads_only_what_its_function_needs():
    """What it loads counts in the memory that is measured there."""
    jobs = ["sorted(__import__('sys').modules)", "[__import__('os').environ['OF_THE_JOB']]"]
    modules, variable = in_fresh_processes(eval, jobs, name="it", environment={"OF_THE_JOB": "yes"})
    assert "lightning_llm.same.processes" in modules
    assert not {"torch", "numpy", "unittest.mock"} & {*modules}
    assert variable == ["yes"]
    assert "OF_THE_JOB" not in os.environ


def test_a_job_that_fails_is_named():
    with pytest.raises(RuntimeError, match="the bench failed: ValueError: job 3 is bad"):
        in_fresh_processes(_fail, [3], name="the bench")


def _fail_with_a_module(job):
    error = ValueError("job is bad")
    error.module = os
    raise error


def test_an_error_that_cannot_be_sent_is_named_too():
    with pytest.raises(RuntimeError, match="the bench failed: ValueError: job is bad"):
        in_fresh_processes(_fail_with_a_module, [3], name="the bench")


def _die(job):
    os._exit(3)


def test_a_process_that_dies_is_named():
    with pytest.raises(RuntimeError, match="the bench failed: A process in the process pool was terminated abruptly"):
        in_fresh_processes(_die, [3], name="the bench")
