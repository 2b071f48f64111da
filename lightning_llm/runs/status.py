"""How a run ended, or that it still trains: ``status.json``, ``summary.json`` and what other files tell. No torch."""

import dataclasses
import os
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_llm.io.atomic import write_json
from lightning_llm.io.processes import is_alive
from lightning_llm.io.schema import BOOL, NUMBER, TEXT, by_name, check, list_of, maybe, open_record, validate, whole
from lightning_llm.io.untrusted import prefixed, read_json
from lightning_llm.runs.directory import CHECKPOINTS, STATUS, SUMMARY, step_files, step_of

RUNNING = "running"
FINISHED = "finished"
INTERRUPTED = "interrupted"
FAILED = "failed"
DIVERGED = "diverged"  # failed by a loss, gradient or weight that is NaN or infinite
ENDED_EARLY = (INTERRUPTED, FAILED, DIVERGED)
KILLED = "killed"  # in words only: a killed process writes no status
_STATUS = open_record(
    {"status": TEXT},
    {"step": whole(), "val_loss": maybe(NUMBER), "reason": TEXT, "host": TEXT, "process": maybe(whole(1, 1 << 30))},
)
_TEXTS = check("texts by name", lambda value: _are_texts(value, ".*"))
_SCALES = by_name(list_of(NUMBER, 2), min_fields=0)
_BY_STEP = check("texts by step", lambda value: _are_texts(value, "[0-9]{1,15}"))


@dataclasses.dataclass(frozen=True)
class RunState:
    """How a run ended, or that it still trains.

    Attributes:
        description: ``finished``, or what :func:`unfinished` begins with.
        has_ended: Whether no process can be training, as far as its status tells.
        step: The last optimizer step that is known; ``None``: none.
        val_loss: Of the last validation that the status has, in nats per token.
    """

    description: str
    has_ended: bool
    step: int | None
    val_loss: float | None


def write_status(run: Path, status: str, *, step: int, val_loss: float | None = None, reason: str = "") -> None:
    """Record the status of a run. A killed run keeps the status of its last validation.

    Args:
        run: Its directory.
        status: One of the five above.
        step: Finished optimizer steps.
        val_loss: Of the last validation, in nats per token.
        reason: Why it ended, in one line.
    """
    facts = {"status": status, "step": step, "val_loss": val_loss, **({"reason": reason} if reason else {})}
    write_json(run / STATUS, {**facts, "host": socket.gethostname(), "process": os.getpid()})


def unfinished(run: Path) -> str | None:
    """The status of a run without a result, in words; ``None`` if it has finished."""
    state = run_state(run)
    if state.description == FINISHED:
        return None
    words = state.description + ("; no checkpoint" if state.step is None else f"; step {state.step}")
    return words + ("" if state.val_loss is None else f", last validation loss {state.val_loss:.4f}")


def run_state(run: Path) -> RunState:
    """State of a run, from ``status.json`` and the names of the other files."""
    facts: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        content = read_json(run / STATUS)
        validate(content, _STATUS, run / STATUS)
        facts = content
    is_finished = (run / SUMMARY).is_file() and facts.get("status") in (None, FINISHED)
    description = FINISHED if is_finished else _how_it_ended(facts)
    steps = [*map(step_of, step_files(run / CHECKPOINTS)), *([facts["step"]] if "step" in facts else [])]
    has_ended = description in (FINISHED, KILLED) or facts.get("status") in (*ENDED_EARLY, FINISHED)
    return RunState(description, has_ended, max(steps, default=None), facts.get("val_loss"))


def _how_it_ended(facts: dict[str, Any]) -> str:
    status, reason = facts.get("status"), facts.get("reason")
    if status in ENDED_EARLY:
        return f"{status} ({reason})" if reason else str(status)
    if status == FINISHED:
        return "ended, without a summary"
    if status != RUNNING:
        return "has not ended yet, or was killed"
    if facts.get("host") != socket.gethostname():
        return f"still trains on {facts.get('host')}, or was killed"
    process = facts.get("process")
    return KILLED if process is None or not is_alive(process) else "still trains"


def read_summary(run: Path, measured: Iterable[str]) -> dict[str, Any]:
    """The content of ``summary.json``.

    Args:
        run: The run's directory.
        measured: Fields that are numbers, or null if they were not measured.

    Raises:
        ValueError: It is damaged.
        OSError: It cannot be read.
    """
    fields = {**dict.fromkeys(measured, maybe(NUMBER)), "threads": maybe(whole()), "changed_on_resume": list_of(TEXT)}
    fields |= dict.fromkeys(("precision", "device", "torch", "numpy", "package"), maybe(TEXT))
    fields |= dict.fromkeys(("tf32", "capture"), maybe(BOOL))
    fields |= {"initial_values": maybe(_TEXTS), "batches_at": maybe(_BY_STEP)}
    fields |= {"initial_rules": maybe(_TEXTS), "initial_scales": maybe(_SCALES)}
    fields |= dict.fromkeys(("batches", "validation_batches"), maybe(TEXT))
    with prefixed(f"{run / SUMMARY} is damaged", ValueError):
        content = read_json(run / SUMMARY, nan_is_null=True)  # older ones contain Infinity
        if "train_loss" in content:  # the name in older ones
            content.setdefault("train_loss_eval", content["train_loss"])
        validate(content, open_record({}, fields), run / SUMMARY)
    return content


def _are_texts(value: Any, names: str) -> bool:
    texts = value.items() if isinstance(value, dict) else [("", None)]
    return all(isinstance(text, str) and re.fullmatch(names, name, re.DOTALL) for name, text in texts)
