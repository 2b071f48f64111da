"""TensorBoard's event files in a run directory: their order, and the curves in them. Needs no torch."""

import os
from collections.abc import Callable
from pathlib import Path

from lightning_llm.io.untrusted import check_regular, number_in

EVENTS = "events.out.tfevents."
_MARK = "tfevents"  # TensorBoard reads every file with this in its name


def put_events_before(run: Path, now_s: int) -> None:
    """TensorBoard sorts event files by the time in their names: give those from the future earlier names."""
    files = sorted(run.glob(f"{EVENTS}*"), key=lambda path: path.name)
    names = [path.name.removeprefix(EVENTS).partition(".") for path in files]
    newest = number_in(names[-1][0]) if names else None
    if newest is not None and newest > now_s:  # in one second no process ends and another starts; in tests they do
        for place, (path, (_, _, rest)) in enumerate(zip(files, names, strict=True)):
            path.rename(path.with_name(f"{EVENTS}{now_s - len(files) + place:010d}.{rest}"))


def check_events(run: Path) -> None:
    """Reject an event file that is a FIFO or a device: TensorBoard would wait for it.

    Raises:
        ValueError: There is one in the run directory or below.
    """
    for folder, _, names in os.walk(run):
        for name in names:
            if _MARK in name:
                check_regular(Path(folder, name))


def read_curves(run: Path, wanted: Callable[[str], bool]) -> dict[str, list[tuple[int, float]]]:
    """Curves by name: (step, value). Reading them takes a while.

    Args:
        run: The run directory.
        wanted: Whether a name is.

    Raises:
        ValueError: As :func:`check_events`.
    """
    check_events(run)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    names = filter(wanted, events.Tags()["scalars"])
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}
