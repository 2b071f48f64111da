"""TensorBoard's event files in a run directory, read within limits. Needs no torch.

A file is a list of records: 8 bytes of length, 4 bytes of its checksum, the content, 4 bytes of its checksum.
"""

import math
import os
import struct
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from lightning_llm.io.untrusted import number_in, open_regular

EVENTS = "events.out.tfevents."
MARK = "tfevents"  # TensorBoard reads every file with this in its name
MOST_VALUES, MOST_BYTES = 1 << 21, 1 << 28  # of a run; 2 million numbers take 120 MB and are read in 5 s
LONGEST = 1 << 16  # bytes of a record with numbers; longer ones are images, texts and histograms
Curve = list[tuple[int, float]]


def put_events_before(run: Path, now_s: int) -> None:
    """TensorBoard sorts event files by the time in their names: give those from the future earlier names."""
    files = sorted(run.glob(f"{EVENTS}*"), key=lambda path: path.name)
    names = [path.name.removeprefix(EVENTS).partition(".") for path in files]
    newest = number_in(names[-1][0]) if names else None
    if newest is not None and newest > now_s:  # in one second no process ends and another starts; in tests they do
        for number, (path, (_, _, rest)) in enumerate(zip(files, names, strict=True)):
            path.rename(path.with_name(f"{EVENTS}{now_s - len(files) + number:010d}.{rest}"))


def event_files(run: Path) -> Iterator[Path]:
    """The event files in a run directory and below, in TensorBoard's order. Links to folders are not followed."""
    for folder, folders, names in os.walk(run):
        folders.sort()
        yield from (Path(folder, name) for name in sorted(names) if MARK in name)


def read_curves(run: Path, wanted: Callable[[str], bool]) -> dict[str, Curve]:
    """Curves by name: (step, value), in the order of steps, without values that are NaN or infinite.

    Where a run was resumed, what it wrote after the step that it resumed from is left out, as TensorBoard does.

    Args:
        run: The run directory.
        wanted: Whether a name is.

    Raises:
        ValueError: An event file is a FIFO or a device, or there are more than ``MOST_VALUES`` numbers.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]

    curves: dict[str, dict[int, float]] = {}
    values = size = 0
    points: list[tuple[int, str]] = []  # a heap: the highest step first, as a negative number
    for path in (path for path in event_files(run) if path.parent == run):
        for record in _records(path):
            try:
                event = Event.FromString(record)
            except DecodeError:
                break  # damaged: TensorBoard stops there too
            values, size = values + max(1, len(event.summary.value)), size + len(record)
            if values > MOST_VALUES or size > MOST_BYTES:
                raise ValueError(f"{run}: the event files have more than {MOST_VALUES} numbers or {MOST_BYTES} bytes")
            if event.session_log.status == SessionLog.START:
                while points and -points[0][0] >= event.step:
                    step, name = heappop(points)
                    del curves[name][-step]
            for value in event.summary.value:
                if value.HasField("simple_value") and math.isfinite(value.simple_value) and wanted(value.tag):
                    curve = curves.setdefault(value.tag, {})
                    if event.step not in curve:
                        heappush(points, (-event.step, value.tag))
                    curve[event.step] = value.simple_value
    return {name: sorted(curve.items()) for name, curve in curves.items()}


def _records(path: Path) -> Iterator[Any]:
    """The contents of the records that may have numbers, up to the first one that is not whole."""
    with open_regular(path) as file:
        left = os.fstat(file.fileno()).st_size
        while left >= 16:
            (length,) = struct.unpack("<Q4x", file.read(12))
            left -= length + 16
            if left >= 0 and length > LONGEST:
                file.seek(length + 4, os.SEEK_CUR)
            elif left >= 0:
                yield file.read(length + 4)[:length]
