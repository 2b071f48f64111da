"""TensorBoard's event files: their order, restarts, and files that are none."""

import os
import random
import struct

import pytest
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from lightning_llm.__main__ import main
from lightning_llm.runs.event_files import put_events_before, read_curves


def events(run):
    return sorted(path.name for path in run.glob("events*"))


def test_event_files_from_a_clock_ahead_get_earlier_names_in_their_order(tmp_path):
    for time, rest in ((5000, "a"), (6000, "b")):
        (tmp_path / f"events.out.tfevents.{time:010d}.host.{rest}").write_text(rest)
    put_events_before(tmp_path, 6001)
    assert events(tmp_path) == ["events.out.tfevents.0000005000.host.a", "events.out.tfevents.0000006000.host.b"]
    put_events_before(tmp_path, 5999)
    assert events(tmp_path) == ["events.out.tfevents.0000005997.host.a", "events.out.tfevents.0000005998.host.b"]
    assert (tmp_path / "events.out.tfevents.0000005997.host.a").read_text() == "a"


def test_event_files_of_the_same_second_get_earlier_names(tmp_path):
    (tmp_path / "events.out.tfevents.0000006000.host.9").touch()
    put_events_before(tmp_path, 6000)
    (tmp_path / "events.out.tfevents.0000006000.host.10").touch()
    assert events(tmp_path) == ["events.out.tfevents.0000005999.host.9", "events.out.tfevents.0000006000.host.10"]


def test_event_files_with_no_time_in_their_names_are_left_alone(tmp_path):
    for name in ("abc", "²", "0000006000"):
        (tmp_path / f"events.out.tfevents.{name}.host").touch()
        before = events(tmp_path)
        put_events_before(tmp_path, 6000)
        assert events(tmp_path) == before


def test_restarts_leave_what_the_last_of_them_has_kept(tmp_path):
    draw, expected = random.Random(3), dict[str, dict[int, float]]()
    with (tmp_path / "events.out.tfevents.1.host").open("wb") as file:
        for number in range(400):
            step = draw.randrange(30)
            if draw.random() < 0.2:
                event = Event(step=step, session_log=SessionLog(status=SessionLog.START))
                expected = {tag: {n: y for n, y in curve.items() if n < step} for tag, curve in expected.items()}
            else:
                tag = draw.choice("ab")
                event = Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=number)]))
                expected.setdefault(tag, {})[step] = number
            record = event.SerializeToString()
            file.write(struct.pack("<Q4x", len(record)) + record + b"\0" * 4)
    curves = read_curves(tmp_path, lambda name: True)
    assert curves == {tag: sorted(curve.items()) for tag, curve in expected.items()}
    assert sum(map(len, curves.values())) > 5


@pytest.mark.parametrize("place", ["events.out.tfevents.1.host", "below/a.tfevents"])
def test_an_event_file_that_is_a_fifo_is_one_line(tmp_path, place, capsys):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / "config.yaml").write_text("seed_everything: 1\n")
    os.mkfifo(tmp_path / place)
    if place[0] == "e":  # those below are not of the run itself
        with pytest.raises(ValueError, match="is a FIFO, expected a file"):
            read_curves(tmp_path, bool)
    (tmp_path / "events.out.tfevents.0.host").touch()
    assert main(["dashboard", str(tmp_path)]) == 2
    assert f"{tmp_path / place} is a FIFO, expected a file" in capsys.readouterr().err


def test_only_wanted_curves_are_read(tmp_path):
    with (tmp_path / "events.out.tfevents.1.host").open("wb") as file:
        for step in range(5):
            values = [Summary.Value(tag=tag, simple_value=step) for tag in ("a", "b", "c")[: 3 - step // 4]]
            record = Event(step=step, summary=Summary(value=values)).SerializeToString()
            file.write(struct.pack("<Q4x", len(record)) + record + b"\0" * 4)
    assert read_curves(tmp_path, "c".__eq__) == {"c": [(step, step) for step in range(4)]}
