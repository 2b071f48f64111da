"""A round of ``benchmarks faults``: a folder with one run in it, and the account of what happened to it.

The run is started, ended by a fault, resumed as a user would, with ``--ckpt_path last``, or started again where
nothing was saved, and compared at its end with an undisturbed one.
"""

import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from benchmarks.commands import last_line
from benchmarks.digest import digest_of
from benchmarks.fault_process import MOMENT, Ended, Run
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.runs.directory import BEST, step_files

STEPS, SAVED_EVERY, MICRO_BATCHES = 12, 2, 2  # micro-batches of a step
PARTS = ("global_step", "state_dict", "optimizer_states", "lr_schedulers")
CURVES = ("train_loss", "val_loss", "learning_rate")
TIME_LIMIT_S = 90.0  # a run takes 2 s; where one of two processes is lost, the other has LOST_S to notice
LOST_S = 30
CONFIG = f"""
model:
  architecture:
    {{hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, max_position_embeddings: 16, dropout: 0.1}}
data:
  {{path: text.txt, store: store, tokenizer: char, context_length: 16, global_batch_size: 8, micro_batch_size: 4}}
trainer:
  accelerator: cpu
  max_steps: {STEPS}
  val_check_interval: 4
  limit_val_batches: 2
  log_every_n_steps: 3
  gradient_clip_val: 1.0
  enable_progress_bar: false
  callbacks:
    - class_path: lightning_llm.training.callbacks.RunCheckpoints
      init_args: {{every_n_steps: {SAVED_EVERY}}}
"""
_TWO = f"""
  devices: 2
  strategy:
    class_path: lightning.pytorch.strategies.DDPStrategy
    init_args: {{process_group_backend: gloo, timeout: "0:00:{LOST_S}"}}
"""
_OF_TWO = {  # as torchrun sets them
    **{"GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
    **{"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none"},
}
_RESUMED = re.compile(r"^Resumed from step (\d+): (\S+)", re.MULTILINE)


class Truth(NamedTuple):
    """What an undisturbed run ends with: parts of its checkpoints by their digests, and its curves."""

    parts: dict[str, str]
    curves: dict[str, list[tuple[int, float]]]


class Stage:
    """A folder in which one run is started, ended and resumed; keeps the account of what happened."""

    def __init__(self, run: Run, folder: Path, data: Path, processes: int = 1) -> None:
        self._run, self.folder, self.processes = run, folder, processes
        self.begun, self.saved = 0, 0  # the newest step that has begun, and that is in a checkpoint
        self.what = ""
        self.injected = self.has_ended = False
        self.resumed = self.refused = self.lost_steps = self.repeated_steps = self.runs = 0
        self.problems: list[str] = []
        self.ended: list[Ended] = []  # the processes of the last run
        self.resumed_file = ""  # of the last run
        self.seconds = 0.0
        folder.mkdir(parents=True)
        config = CONFIG if processes == 1 else CONFIG.replace("micro_batch_size: 4", "micro_batch_size: 2") + _TWO
        (folder / "tiny.yaml").write_text(config, encoding="utf-8")
        shutil.copy2(data / "text.txt", folder)  # with its time, by which a store knows its text
        if (data / "store").exists():
            shutil.copytree(data / "store", folder / "store")

    @property
    def checkpoints(self) -> list[Path]:
        """The numbered ones of the newest run directory, oldest first."""
        return step_files(self.newest_run / "checkpoints")

    @property
    def newest_run(self) -> Path:
        """The run directory that was made last, by its number."""
        versions = sorted(self.folder.glob("runs/tiny/version_*"), key=lambda path: int(path.name.partition("_")[2]))
        return versions[-1] if versions else self.folder / "runs/tiny/version_0"

    def fit(self, *words: str, afresh: bool = False, kill: dict[str, Any] | None = None, **effects: Any) -> Ended:
        """Train, resuming from the last checkpoint if there is one; how its (first) process ended, with all errors.

        Args:
            words: Further options.
            afresh: Start a new run even so.
            kill: ``on``, ``count``, ``after_s`` and ``rank``: when to send SIGKILL to which process.
            effects: As for ``fault_process.inject``, in every process.
        """
        if afresh:
            self.begun = self.saved = 0
        resume, self.runs = (["--ckpt_path", "last"] if self.saved else []), self.runs + 1
        port, arguments = str(find_free_network_port()), ["fit", "--config", "tiny.yaml", *words, *resume]
        threads = torch.get_num_threads() if self.processes == 1 else 1  # as fit, and as torchrun has it
        children: list[dict[str, Any]] = []
        for rank in range(self.processes):
            child = {"folder": str(self.folder), "words": arguments, "threads": threads}
            ranks = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "MASTER_PORT": port, **_OF_TWO}
            child["environment"] = {"COLUMNS": "200", **(ranks if self.processes > 1 else {})}
            killed = kill if kill and kill.get("rank", 0) == rank else None
            told = {"effects": {**effects, MOMENT: killed}, "kill_after_s": killed and killed["after_s"]}
            children.append({**child, **told})
        self.ended = self._run(children, TIME_LIMIT_S)
        for rank, each in enumerate(self.ended):
            written = f"{' '.join(arguments)}\n{each.out}\n{each.error}\nstatus {each.status}\n"
            (self.folder / f"run-{self.runs}-{rank}.txt").write_text(written, encoding="utf-8")
        ran = self.ended[0]._replace(error="".join(each.error for each in self.ended))
        self._look(ran)
        return ran

    def _look(self, ran: Ended) -> None:
        resumed = _RESUMED.search(ran.out)
        self.resumed_file, step = (resumed[2], int(resumed[1])) if resumed else ("", 0)
        self.has_ended = all(each.status == 0 for each in self.ended)
        if None in [each.status for each in self.ended]:
            self.problems.append(f"run {self.runs} did not end within {TIME_LIMIT_S:.0f} s")
        if "Traceback" in ran.error:
            self.problems.append(f"run {self.runs} ended in a stack trace: {last_line(ran.error)}")
        if resumed:
            self.resumed += 1
            self.repeated_steps = max(self.repeated_steps, self.begun - step)
            self.lost_steps = max(self.lost_steps, self.saved - step)
        elif self.saved and self.has_ended:
            self.problems.append(f"run {self.runs} did not report the step that it resumed from")
        newest = dict(note.split() for note in ran.notes if note != MOMENT)
        self.begun, self.saved = int(newest.get("step", self.begun)), int(newest.get("saved", self.saved))

    def expect_refusal(self, ran: Ended, *says: str) -> None:
        """Note whether a run was refused, with a line that says one of these."""
        line = next((line for line in ran.error.splitlines() if any(word in line for word in says)), "")
        if ran.status in (1, 2) and line and "Traceback" not in ran.error:
            self.refused += 1
        else:
            self.problems.append(f"run {self.runs}: status {ran.status} and no message: {last_line(ran.error)!r}")

    def go_on(self) -> None:
        """Run until the end, if it was not reached; nothing stands in the way any more."""
        if not self.has_ended and (ran := self.fit()) and not self.has_ended:
            self.problems.append(f"run {self.runs} ended with {ran.status}: {last_line(ran.error)}")

    def truth(self) -> Truth:
        """What the newest run directory holds.

        Raises:
            ValueError: A checkpoint cannot be read.
            IndexError: There is none.
        """
        content = read_checkpoint(self.checkpoints[-1])
        best = read_checkpoint(self.newest_run / "checkpoints" / BEST)
        parts = {**{name: digest_of(content[name]) for name in PARTS}, f"the step of {BEST}": f"{best['global_step']}"}
        return Truth(parts, _curves(self.newest_run))

    def compare(self, truth: Truth) -> None:
        """Note what differs from an undisturbed run."""
        try:
            ours = self.truth()
        except (ValueError, IndexError, KeyError) as error:
            self.problems.append(f"no result to compare: {type(error).__name__} {error}")
            return
        for name, part in truth.parts.items():
            if ours.parts[name] != part:
                self.problems.append(f"wrong result: {name} differs: {ours.parts[name]} instead of {part}")
        # what several processes had added up before a checkpoint is there as one sum: the last bit may differ
        tolerance = 0.0 if self.processes == 1 else 1e-6
        for name, curve in truth.curves.items():
            own = ours.curves[name]
            if np.shape(own) != np.shape(curve) or not np.allclose(own, curve, rtol=tolerance, atol=0.0):
                self.problems.append(f"wrong curve: {name} is {own} instead of {curve}")
        if left := list(self.newest_run.glob("checkpoints/.*")):
            self.problems.append(f"left behind: {', '.join(path.name for path in left)}")


def _curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    events = EventAccumulator(str(run))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in CURVES}
