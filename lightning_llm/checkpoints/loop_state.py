"""Lightning's loops: where a run is, in optimizer steps, and the counters of a checkpoint's ``loops``.

Lightning documents neither the attributes of its loops nor the keys of their state. Only this file names them;
``tests/test_private_interfaces.py`` says what we rely on. No Lightning is imported: a trained model is read without it.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lightning_llm.io.schema import list_of, one_of, open_record, record, whole

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch import Tensor

FIT_LOOP = "fit_loop"
TRAINING = "epoch_loop.batch_progress"
VALIDATION = "epoch_loop.val_loop.batch_progress"
AUTOMATIC = "epoch_loop.automatic_optimization.optim_progress"
MANUAL = "epoch_loop.manual_optimization.optim_step_progress"

_COUNT = whole()
_STATE = open_record({})
_COUNTS = record({"ready": _COUNT, "completed": _COUNT}, {"started": _COUNT, "processed": _COUNT})
_ALL_COUNTS = record(dict.fromkeys(("ready", "completed", "started", "processed"), _COUNT))
_PROGRESS = record({"total": _COUNTS, "current": _COUNTS})
_BATCHES = record({"total": _ALL_COUNTS, "current": _ALL_COUNTS, "is_last_batch": one_of(True, False)})
_EVALUATION = open_record({"state_dict": _STATE, "batch_progress": _BATCHES})
FIT_LOOP_PARTS = {
    "state_dict": open_record({}, {"combined_loader": list_of(_STATE)}),
    "epoch_loop.state_dict": open_record({}, {"_batches_that_stepped": _COUNT}),
    **dict.fromkeys(("epoch_loop.automatic_optimization.state_dict", "epoch_loop.val_loop.state_dict"), _STATE),
    "epoch_loop.manual_optimization.state_dict": _STATE,
    **dict.fromkeys(("epoch_progress", "epoch_loop.scheduler_progress", MANUAL), _PROGRESS),
    **dict.fromkeys((TRAINING, VALIDATION), _BATCHES),
    AUTOMATIC: open_record({"optimizer": open_record({"step": _PROGRESS, "zero_grad": _PROGRESS})}),
}
LOOPS = open_record(
    {
        FIT_LOOP: open_record(FIT_LOOP_PARTS),
        **dict.fromkeys(("validate_loop", "test_loop"), _EVALUATION),
        "predict_loop": open_record({"state_dict": _STATE, "batch_progress": _PROGRESS}),
    }
)


# ---- of a trainer


def step_is_complete(trainer: "Trainer") -> bool:
    """Whether the current micro-batch is the last of its optimizer step; the last one of an epoch always is."""
    return not trainer.fit_loop.epoch_loop._should_accumulate()


def loss_in(outputs: Any) -> "Tensor | None":
    """The loss that Lightning hands to callbacks after a micro-batch; ``None``: a module that optimizes by itself."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    return None if loss is None else loss.detach()


def micro_batch_of_step(trainer: "Trainer") -> int:
    """The number of the current micro-batch within its optimizer step, from 0."""
    return (trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1) % trainer.accumulate_grad_batches


def micro_batches_started(trainer: "Trainer") -> int:
    """Micro-batches since the start of the run, the current one included."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def validation_follows(trainer: "Trainer") -> bool:
    """Whether Lightning is going to validate after the current micro-batch, by the trainer's validation options."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    every_epochs = trainer.check_val_every_n_epoch
    every = trainer.val_check_batch
    if every is None or every == float("inf") or not trainer.enable_validation:
        return False
    if every_epochs is None:
        return bool(progress.total.ready % every == 0)
    return (trainer.current_epoch + 1) % every_epochs == 0 and bool(progress.current.ready % every == 0)


def is_log_step(trainer: "Trainer") -> bool:
    """Whether ``trainer.log_every_n_steps`` asks for an entry after this optimizer step."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector, unseen by mypy
    return every > 0 and trainer.global_step % every == 0


def begin_next_epoch(trainer: "Trainer") -> None:
    """In a run resumed from the last batch of an epoch, make the next batch begin an epoch.

    Lightning counts the epoch as finished then, but not the next one as begun: a run that is saved within that one and
    resumed again would start it over, and train more steps than it was asked to. Call it in ``on_train_start``.
    """
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress.current
    if loop.restarted_mid_epoch and epochs.processed == epochs.ready:
        loop.reset_restart_stage()


# ---- of a checkpoint


def rescale_batch_progress(
    checkpoint: dict[str, Any], new_accumulation: int, saved_accumulation: int | None = None
) -> None:
    """Rewrite Lightning's counts of micro-batches in a checkpoint for another number of them per optimizer step.

    Without it, a run resumed with twice as many would take its next step after half of them. A checkpoint does not hold
    the gradient of an unfinished step: that step starts again, also at the same number. Call it in
    ``LightningModule.on_load_checkpoint``, before Lightning restores its loops.

    Args:
        checkpoint: As Lightning loaded it; changed in place.
        new_accumulation: Micro-batches per optimizer step from now on.
        saved_accumulation: Those of the run that saved it. If it is the same number, the count stays exact after epochs
            whose last step had fewer; otherwise each step counts as whole.
    """
    loop = checkpoint["loops"][FIT_LOOP]
    steps = max(_step_counts(loop), key=lambda progress: int(progress["total"]["completed"]))
    progress = loop[TRAINING]
    counts = progress["current"]
    # Lightning tells by `completed` lagging behind that the checkpoint was written at the end of a batch.
    at_end = counts["ready"] == counts["processed"] == counts["completed"] + 1
    in_steps = {scope: steps[scope]["completed"] * new_accumulation for scope in ("total", "current")}
    if saved_accumulation == new_accumulation:
        unfinished = max(0, counts["ready"] - in_steps["current"])
        in_steps = {scope: progress[scope]["ready"] - unfinished for scope in in_steps}
    for scope, batches in in_steps.items():
        progress[scope].update(ready=batches, started=batches, processed=batches, completed=batches - at_end)


def set_validation_due(checkpoint: dict[str, Any], is_due: bool) -> None:
    """Make a resumed run validate first, or not, before its next step.

    Lightning takes a validation that had not begun for done, and finishes one that had begun without its first batches.
    Marked as just begun, it starts over. Lightning's own counts of validation batches do not matter then: after such a
    start, their total stays one ahead until the epoch ends.
    """
    progress = checkpoint["loops"][FIT_LOOP][VALIDATION]
    for scope in ("total", "current"):
        progress[scope] = {"ready": int(is_due), "started": int(is_due), "processed": 0, "completed": 0}
    progress["is_last_batch"] = False


def loop_problems(loops: Mapping[str, Any], global_step: int | None) -> Iterator[str]:
    """Counters from which no run can resume: they contradict each other or ``global_step``.

    Lightning takes the step from the counters. Those of validation do not count: see :func:`set_validation_due`.
    """
    for name, counts in _counts(loops[FIT_LOOP], f"loops.{FIT_LOOP}"):
        order = [counts[counter] for counter in ("ready", "started", "processed", "completed") if counter in counts]
        is_consistent = order == sorted(order, reverse=True) and order[0] <= order[-1] + 1
        if not is_consistent and not name.startswith(f"loops.{FIT_LOOP}.{VALIDATION}."):
            yield f"{name} counts {', '.join(f'{counter} {count}' for counter, count in counts.items())}"
    steps = [progress["total"]["completed"] for progress in _step_counts(loops[FIT_LOOP])]
    if global_step is not None and global_step not in steps:
        yield f"global_step is {global_step}, the loops count {max(steps)} steps"


def _step_counts(fit_loop: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [fit_loop[AUTOMATIC]["optimizer"]["step"], fit_loop[MANUAL]]


def _counts(progress: Mapping[str, Any], where: str) -> Iterator[tuple[str, dict[str, int]]]:
    for name, inner in progress.items():
        if isinstance(inner, dict):
            yield from [(f"{where}.{name}", inner)] if "ready" in inner else _counts(inner, f"{where}.{name}")
