"""``lightning-llm dashboard RUNS``: TensorBoard on this machine only, with runs named by what their configs differ in.

TensorBoard names a run by its path below the folder that it is given. So it is given a temporary folder of links with
the names that are wanted, which lead to the run directories; it keeps showing runs that still train.
"""

import argparse
import socket
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

from lightning_llm.cli.errors import OneLineParser, tool
from lightning_llm.cli.process import interrupts
from lightning_llm.cli.runs import EVENTS, find_runs, run_names

HOST = "127.0.0.1"
KEPT = {"scalars": 10_000, "text": 200, "images": 200}  # entries per curve; TensorBoard's own are 1,000, 10 and 10


def _options(parser: OneLineParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or folders that contain runs")
    parser.add_argument("--port", type=int, default=6006, help="port on 127.0.0.1; 0: any free one (default: 6006)")


@tool(_options)
def run_dashboard(options: argparse.Namespace) -> None:
    """Show runs in TensorBoard, on this machine only, until Ctrl-C."""
    if not 0 <= options.port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, got {options.port}")
    check_port(options.port)
    say = partial(print, "lightning-llm dashboard:", file=sys.stderr)
    runs = find_runs(options.runs, EVENTS, "no TensorBoard events in it (was another logger set?)", say)
    with interrupts.taken("dashboard"), tempfile.TemporaryDirectory(prefix="lightning-llm-dashboard-") as folder:
        try:
            for run, name in zip(runs, run_names(runs), strict=True):
                link = Path(folder, name)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(run.path.resolve(), target_is_directory=True)
                print(f"{name}  {run.path}")
            _serve(Path(folder), options.port, len(runs))
        except KeyboardInterrupt:
            interrupts.hold_off()  # a second signal must not disturb the cleanup
            print()


def check_port(port: int) -> None:
    """Refuse a port that is in use, before TensorBoard is imported.

    Raises:
        ValueError: It is in use, or not allowed.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as TensorBoard's server: not after a closed one
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ValueError(f"--port {port}: {error.strerror}; give another, or --port 0 for any free one") from error


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
    options = {"host": HOST, "port": port, "load_fast": "false", "samples_per_plugin": KEPT}
    board.configure(argv=["tensorboard"], logdir=str(folder), **options)
    try:
        return str(board.launch())
    except program.TensorBoardServerException as error:
        raise ValueError(f"--port {port}: {error.msg}; give another, or --port 0 for any free one") from error


def _serve(folder: Path, port: int, count: int) -> None:
    address = start(folder, port)
    print(f"TensorBoard shows {count} run{'s' if count > 1 else ''} at {address} until Ctrl-C")
    print(f"charts by group: {address}#custom_scalars", flush=True)
    threading.Event().wait()
