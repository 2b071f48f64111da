"""TensorBoard's event files in a run directory, and the curves in them. Needs no torch.

A file is a list of records: 8 bytes of length, 4 bytes of its checksum, the content, 4 bytes of its checksum.
"""

import math
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_llm.io.untrusted import number_in, open_regular

EVENTS = "events.out.tfevents."
EVENT_FILES = f"{EVENTS}*"
MARK = "tfevents"  # TensorBoard reads every file with this in its name
LONGEST = 1 << 16  # bytes of a record with numbers; longer ones are images, texts and histograms
Curve = list[tuple[int, float]]


def put_events_before(run: Path, now_s: int) -> None:
    """TensorBoard sorts event files by the second in their names: give those of this second or later earlier names.

    What follows the second is the process and a number, as text: 10 would come before 9.
    """
    files = sorted(run.glob(EVENT_FILES), key=lambda path: path.name)
    names = [path.name.removeprefix(EVENTS).partition(".") for path in files]
    newest = number_in(names[-1][0]) if names else None
    if newest is not None and newest >= now_s:
        for number, (path, (_, _, rest)) in enumerate(zip(files, names, strict=True)):
            path.rename(path.with_name(f"{EVENTS}{now_s - len(files) + number:010d}.{rest}"))


def event_files(run: Path) -> Iterator[Path]:
    """The event files in a run directory and below, in TensorBoard's order. Links to folders are not followed."""
    for folder, folders, names in os.walk(run):
        folders.sort()
        yield from (Path(folder, name) for name in sorted(names) if MARK in name)


def read_curves(run: Path, is_wanted: Callable[[str], bool]) -> dict[str, Curve]:
    """Curves by name: (step, value), in the order of steps, without values that are NaN or infinite.

    Where a run was resumed, what it wrote after the step that it resumed from is left out, as TensorBoard does.

    Args:
        run: The run directory.
        is_wanted: Whether a name is.

    Raises:
        ValueError: An event file is a FIFO or a device.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]

    points: list[tuple[int, str, float]] = []  # step, name, value; a start of the run has no name
    for path in (path for path in event_files(run) if path.parent == run):
        for record in _records(path):
            try:
                event = Event.FromString(record)
            except DecodeError:
                break  # damaged: TensorBoard stops there too
            field = event.WhichOneof("what")
            step = event.step  # each access costs as much as parsing
            values = event.summary.value if field == "summary" else ()
            if field == "session_log" and event.session_log.status == SessionLog.START:
                points.append((step, "", math.nan))
            for value in values:
                number = value.simple_value if value.HasField("simple_value") else math.nan
                if math.isfinite(number) and is_wanted(value.tag):
                    points.append((step, value.tag, number))
    curves = dict[str, dict[int, float]]()
    resumed_from = math.inf  # the lowest step of the starts that come later
    for step, name, number in reversed(points):
        if math.isnan(number):
            resumed_from = min(resumed_from, step)
        elif step < resumed_from:
            curves.setdefault(name, {}).setdefault(step, number)
    return {name: sorted(curve.items()) for name, curve in curves.items()}


def _records(path: Path) -> Iterator[Any]:
    """The contents of the records that may have numbers, up to the first one that is not whole."""
    with open_regular(path) as file:
        bytes_left = os.fstat(file.fileno()).st_size
        while bytes_left >= 16:
            (length,) = struct.unpack("<Q4x", file.read(12))
            bytes_left -= length + 16
            if bytes_left >= 0 and length > LONGEST:
                file.seek(length + 4, os.SEEK_CUR)
            elif bytes_left >= 0:
                yield file.read(length + 4)[:length]
