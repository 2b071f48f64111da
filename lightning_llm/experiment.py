"""Experiments in Python: what ``lightning-llm ablate run`` does, for a notebook or a script."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.ablate.experiment import experiment_of
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.report.from_folder import report_in
from lightning_llm.ablate.report.report import Report
from lightning_llm.cli.ablate_run import PROG
from lightning_llm.io.atomic import write_text
from lightning_llm.io.config_file import read_config
from lightning_llm.io.shell import shell_path
from lightning_llm.io.trust import TRUST_CODE

SOURCE = "Experiment"  # in messages about its arguments
PREFIX = f"{PROG}: error: "  # of the line that says why the command failed


class Experiment:
    """An experiment: a baseline, variants of it, and what is compared.

    ``Experiment(baseline="quickstart", variants={"gelu": {"model.architecture.mlp": "gelu"}}).run()`` trains the runs
    in processes of their own and returns the report, which shows itself in a notebook.

    Args:
        file: An experiment file (YAML); ``None``: the keys say all.
        trust_code: Whether to run the command that the file names; what the keys name is yours.
        keys: The keys of such a file, such as ``baseline``, ``variants``, ``command``, ``pairs``, ``metric``, ``out``;
            they override those of the file.

    Raises:
        ValueError: A key is unknown or wrong.
        OSError: The file cannot be read.
    """

    def __init__(self, file: str | Path | None = None, *, trust_code: bool = False, **keys: Any) -> None:
        of_file = {} if file is None else read_config(Path(file))
        name = "ablate" if file is None else Path(file).stem
        self._content = {"name": name, **of_file, **keys}
        self._is_trusted = trust_code or file is None
        self._asked = experiment_of(self._content, SOURCE if file is None else file, name)

    @property
    def folder(self) -> Path:
        """The folder of the experiment: ``out``, or ``runs/NAME``."""
        return Path(self._asked.folder)

    def run(self, *, workers: int | None = None) -> Report:
        """Train the runs until the verdicts, and report; what has ended before is not trained again.

        Progress is printed. An interrupted run resumes with the next call.

        Args:
            workers: Parallel runs; ``None``: one per GPU or core.

        Raises:
            RuntimeError: The experiment cannot be planned, or its runs fail; the message is that of the command.
        """
        command = [sys.executable, "-m", "lightning_llm", "ablate", "run"]
        more = [TRUST_CODE] if self._is_trusted else []
        more += [] if workers is None else ["--workers", str(workers)]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{self._asked.name}.yaml"
            write_text(file, yaml.safe_dump(self._content, sort_keys=False))
            status, problem = _run([*command, str(file), *more], file)
        if status:
            raise RuntimeError(problem or f"lightning-llm ablate run ended with status {status}")
        return self.report()

    def report(self) -> Report:
        """The report as it is now, also while runs train.

        Raises:
            ValueError: Nothing was run yet.
        """
        if not self.folder.is_dir():
            raise ValueError(f"{shell_path(str(self.folder))} does not exist yet: call run first")
        return report_in(self.folder)

    def __repr__(self) -> str:
        variants = ", ".join(self._asked.variants)
        return f"Experiment({self._asked.name!r}: {BASELINE} against {variants}, in {self.folder})"


def _run(command: list[str], file: Path) -> tuple[int, str]:
    """Run a command and print its progress; its exit status, and its error, which is not printed.

    Args:
        command: Its words.
        file: Among them, which only this process knows: lines name the experiment in its place.
    """
    if sys.stderr is sys.__stderr__ and os.isatty(2):  # a terminal, where the command draws a bar
        return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode, ""
    problem = ""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace"
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                line = line.replace(str(file), SOURCE)
                if line.startswith(PREFIX):
                    problem = line.removeprefix(PREFIX).strip()
                else:
                    print(line, end="", flush=True)
        except KeyboardInterrupt:  # the command got it, too, or gets it now: its runs save, and it ends
            process.terminate()
            raise
    return process.returncode, problem
