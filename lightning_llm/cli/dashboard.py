"""``lightning-llm dashboard RUNS``: TensorBoard on this machine only, with runs named by what their configs differ in.

TensorBoard names a run by its folder below the one it is given. So it is given a temporary folder of links, which lead
to the run directories and have the names that are wanted; a run that still trains goes on being shown.
"""

import argparse
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_llm.cli.interrupts import ENDING
from lightning_llm.cli.parser import OneLineParser, run_tool
from lightning_llm.cli.run_table import EVENTS, Run, find_runs, run_names

HOST = "127.0.0.1"
KEPT = {"scalars": 10_000, "text": 200, "images": 200}  # entries per curve; TensorBoard's own are 1,000, 10 and 10


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = OneLineParser("lightning-llm dashboard", "Show runs in TensorBoard, on this machine only, until Ctrl-C.")
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or folders that hold some")
    parser.add_argument(
        "--port", type=int, default=6006, help="port on 127.0.0.1; 0 takes any free one (default: 6006)"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    return run_tool(build_parser(), argv, _show)


def _show(options: argparse.Namespace) -> None:
    if not 0 <= options.port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, got {options.port}")
    runs = find_runs(options.runs, EVENTS, "no TensorBoard events in it (was another logger set?)", _say)
    with _stopped_by_signals(), tempfile.TemporaryDirectory(prefix="lightning-llm-dashboard-") as folder:
        _link(runs, Path(folder))
        _serve(Path(folder), options.port, len(runs))


def start(folder: Path, port: int) -> str:
    """Start TensorBoard in a thread of this process.

    Args:
        folder: What it shows.
        port: 0 for any free one.

    Returns:
        Its address.

    Raises:
        ValueError: The port is in use.
    """
    from tensorboard import default, program  # type: ignore[import-untyped]

    # its own plugins, which read event files only: the projector sends any file that a run's projector_config names
    board = program.TensorBoard(plugins=default.get_static_plugins())
    # load_fast would start a second server, on a port of its own
    board.configure(
        argv=["tensorboard"], logdir=str(folder), host=HOST, port=port, load_fast="false", samples_per_plugin=KEPT
    )
    try:
        return str(board.launch())
    except program.TensorBoardServerException as error:
        raise ValueError(f"--port {port}: {error.msg}; give another, or --port 0 for any free one") from error


def _link(runs: Sequence[Run], folder: Path) -> None:
    for run, name in zip(runs, run_names(runs), strict=True):
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(run.path.resolve(), target_is_directory=True)
        print(f"{name}  {run.path}")


def _serve(folder: Path, port: int, count: int) -> None:
    try:
        address = start(folder, port)
        print(f"TensorBoard shows {count} run{'s' if count > 1 else ''} at {address} until Ctrl-C")
        print(f"charts by group: {address}#custom_scalars", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        print()


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """They raise ``KeyboardInterrupt``, once: a second one must not disturb the clearing up. Ignored ones stay so."""
    numbers = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]

    def stop(received: int, frame: Any) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    print(f"lightning-llm dashboard: {line}", file=sys.stderr)
