"""``lightning-llm dashboard RUNS``: TensorBoard on this machine only, with short names of runs.

TensorBoard names a run by its path below the folder that it is given. So it is given a temporary folder with the names
that are wanted, and in each links to the run's event files. New ones are added while it runs. It sees nothing else of a
run: it would follow links to folders, even in a circle.
"""

import argparse
import re
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning_llm.cli.interrupts import interrupts
from lightning_llm.cli.subcommand import OneLineParser, subcommand
from lightning_llm.io.shell import shell_path
from lightning_llm.io.untrusted import check_regular
from lightning_llm.runs.event_files import EVENT_FILES, event_files
from lightning_llm.runs.find import find_runs
from lightning_llm.runs.names import run_names

HOST = "127.0.0.1"
RELOAD_S = 5.0  # as TensorBoard's own
OWN_NAMES = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?", re.IGNORECASE)  # any port: ssh forwards others
# TensorBoard smooths each curve by 0.6, which hides losses. No option and no event file changes that, only addresses:
# its first part for Time Series; its second, which no server sees, for Custom Scalars and Scalars.
UNSMOOTHED, UNSMOOTHED_CHARTS = "?smoothing=0", "&_smoothingWeight=0"
KEPT = {"scalars": 10_000, "text": 200, "images": 200}  # entries per curve; TensorBoard's own are 1,000, 10 and 10


def _options(parser: OneLineParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or folders that contain runs")
    parser.add_argument("--port", type=int, default=6006, help="port on 127.0.0.1; 0: any free one (default: 6006)")


@subcommand(_options)
def run_dashboard(options: argparse.Namespace) -> None:
    """Show runs in TensorBoard, on this machine only, until Ctrl-C."""
    if not 0 <= options.port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, got {options.port}")
    check_port(options.port)
    log = partial(print, "lightning-llm dashboard:", file=sys.stderr)
    message = "no TensorBoard events in it (was another logger set?)"
    runs = find_runs(options.runs, EVENT_FILES, message, log, with_experiments=True)
    with interrupts.handling("dashboard"), tempfile.TemporaryDirectory(prefix="lightning-llm-dashboard-") as folder:
        try:
            names = {Path(folder, name): run.path for run, name in zip(runs, run_names(runs), strict=True)}
            for links, path in names.items():
                link_events(path, links)
                print(f"{links.relative_to(folder)}  {shell_path(path)}")
            _serve(Path(folder), options.port, names)
        except KeyboardInterrupt:
            interrupts.ignore_signals()  # a second signal must not disturb the cleanup
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
    from tensorboard import program  # type: ignore[import-untyped]

    from lightning_llm.cli.dashboard_charts import plugins

    board = program.TensorBoard(
        plugins=plugins(),
        server_class=lambda app, flags: program.WerkzeugServer(_for_this_machine(_unsmoothed(app)), flags),
    )
    # load_fast would start a second server, on a port of its own
    options = {"host": HOST, "port": port, "load_fast": "false", "samples_per_plugin": KEPT}
    board.configure(argv=["tensorboard"], logdir=str(folder), **options)
    try:
        return str(board.launch())
    except program.TensorBoardServerException as error:
        raise ValueError(f"--port {port}: {error.msg}; give another, or --port 0 for any free one") from error


def link_events(run: Path, folder: Path) -> None:
    """Put a link to each event file of a run that has none yet into a folder, in folders as in the run."""
    for path in event_files(run):
        link = folder / path.relative_to(run)
        if path.exists() and not link.is_symlink():
            check_regular(path)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())


def remove_links(folder: Path) -> None:
    """Remove the links to a run that was deleted. TensorBoard forgets a run whose folder is gone."""
    shutil.rmtree(folder, ignore_errors=True)


def _unsmoothed(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Sends the address without options to the one without smoothing; the browser keeps the part for the tab."""

    def redirecting(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO") == "/" and not environ.get("QUERY_STRING"):
            start_response("302 Found", [("Location", f"/{UNSMOOTHED}"), ("Content-Length", "0")])
            return []
        return app(environ, start_response)

    return redirecting


def _for_this_machine(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Answers only requests that name this machine: a web page may point a name of its own at 127.0.0.1 to read all."""

    def checked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if OWN_NAMES.fullmatch(environ.get("HTTP_HOST", "")):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"The dashboard answers at localhost, 127.0.0.1 and [::1] only.\n"]

    return checked


def _serve(folder: Path, port: int, names: Mapping[Path, Path]) -> None:
    address = start(folder, port)
    print(f"TensorBoard shows {len(names)} run{'s' if len(names) > 1 else ''} at {address} until Ctrl-C")
    print(f"charts by group, without smoothing: {address}{UNSMOOTHED}#custom_scalars{UNSMOOTHED_CHARTS}", flush=True)
    while not threading.Event().wait(RELOAD_S):
        for links, path in names.items():
            if path.is_dir():
                link_events(path, links)
            else:
                remove_links(links)
