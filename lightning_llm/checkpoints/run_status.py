"""How a run stands: ``status.json`` in its directory. Needs no torch.

``fit`` says there that it has begun, and how it ended where it can. A kill leaves what the last validation left.
"""

import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_llm.io.atomic import write_json
from lightning_llm.io.untrusted import NUMBER, TEXT, maybe, read_json, record, validate, whole

STATUS, SUMMARY = "status.json", "summary.json"
RUNNING, FINISHED, INTERRUPTED, FAILED = "running", "finished", "interrupted", "failed"
_STATUS = record(
    {"status": TEXT},
    {"step": whole(), "val_loss": maybe(NUMBER), "reason": TEXT, "host": TEXT, "process": maybe(whole(1, 1 << 30))},
    others=True,
)


def write_status(run: Path, status: str, *, step: int, val_loss: float | None = None, reason: str = "") -> None:
    """Say how the run stands.

    Args:
        run: Its directory.
        status: One of the four above.
        step: Optimizer steps done.
        val_loss: Of the last validation, in nats per token.
        reason: Why it ended, in one line.
    """
    facts: dict[str, Any] = {"status": status, "step": step, "val_loss": val_loss}
    facts |= {"reason": reason} if reason else {}
    write_json(run / STATUS, {**facts, "host": socket.gethostname(), "process": os.getpid()})


def unfinished(run: Path) -> str | None:
    """What is known of a run that has no result, in words; ``None`` for one that has finished."""
    facts = _read(run / STATUS)
    status = facts.get("status")
    if (run / SUMMARY).is_file() and status in (None, FINISHED):
        return None
    words = _how_it_ended(facts)
    steps = [int(found[1]) for path in run.glob("checkpoints/step-*.ckpt") if (found := re.search(r"(\d+)", path.name))]
    steps += [facts["step"]] if "step" in facts else []
    words += f"; step {max(steps)}" if steps else "; no checkpoint"
    loss = facts.get("val_loss")
    return words + ("" if loss is None else f", last validation loss {loss:.4f}")


def _how_it_ended(facts: dict[str, Any]) -> str:
    status, reason = facts.get("status"), facts.get("reason")
    if status in (INTERRUPTED, FAILED):
        return f"{status} ({reason})" if reason else str(status)
    if status != RUNNING:
        return "has not ended yet, or was killed"
    if facts.get("host") != socket.gethostname():
        return f"still trains on {facts.get('host')}, or was killed"
    return "still trains" if _is_alive(facts.get("process")) else "killed"


def _is_alive(process: Any) -> bool:
    try:
        os.kill(int(process), 0)
    except PermissionError:
        return True
    except (OSError, TypeError, ValueError):
        return False
    return True


def read_summary(run: Path, measured: Iterable[str]) -> dict[str, Any]:
    """What ``summary.json`` says.

    Args:
        run: The run's directory.
        measured: Fields that are numbers, or null where nothing was measured.

    Raises:
        ValueError: It is damaged.
        OSError: It cannot be read.
    """
    numbers = dict.fromkeys(measured, maybe(NUMBER))
    try:
        content = read_json(run / SUMMARY, nan_is_null=True)  # older ones say Infinity
        validate(content, record({}, {**numbers, "threads": maybe(whole())}, others=True), run / SUMMARY, "")
    except ValueError as error:
        raise ValueError(f"{run / SUMMARY} is damaged: {error}") from error
    return content


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
        validate(content, _STATUS, path, "")
    except (OSError, ValueError):
        return {}
    return content
