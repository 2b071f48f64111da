"""``lightning-llm fit`` as the program of an experiment. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.program import Ended, Process, Program, Promises, Run
from lightning_llm.ablate.run_process import RunProcess, start_server
from lightning_llm.ablate.slots import Slot
from lightning_llm.io.records import read_record
from lightning_llm.io.untrusted import read_json
from lightning_llm.runs.directory import CHECKPOINTS, STATUS, WINDOWS
from lightning_llm.runs.event_files import read_curves
from lightning_llm.runs.status import DIVERGED, FINISHED, read_summary, run_state
from lightning_llm.statistics import pairing
from lightning_llm.training.metrics import LOSSES, TRAIN_LOSS, TRAIN_LOSS_EVAL, VAL_LOSS

MAIN = "fit.py"  # in the tree: what a run executes. Its folder comes first in the path of imports
NUMBERS = (*LOSSES, TRAIN_LOSS_EVAL, "seconds", "peak_memory_gib", "steps", "tokens")

CURVES = (TRAIN_LOSS, VAL_LOSS)


class Windows(msgspec.Struct, frozen=True):
    """The content of ``windows.json``: sums over blocks of validation windows.

    Attributes:
        step: Of the validation.
        windows: How many each block has.
        tokens: How many these have.
        nats: Their sum.
    """

    step: int
    windows: list[int]
    tokens: list[int]
    nats: list[float]


class Fit(Program):
    """Runs of ``fit``: their pairs share batches and initial values, and they continue from their checkpoints."""

    name: ClassVar[str] = "fit"
    promises = Promises(same_batches=True, same_initial_values=True, measured_cost=True, resumes=True)

    def start(self, run: Run, slot: Slot) -> Process:
        """Start or continue a run, with the code of the tree, in the folder where the experiment was planned."""
        seed = run.key.seed
        arguments = [
            f"--config={run.config}",
            f"--seed_everything={seed}",
            f"--{self.plan.experiment.seed_option}={seed}",
        ]
        arguments += [f"--{name}={value}" for name, value in run.options.items()]
        arguments += [f"--trainer.run_dir={run.folder}"]
        if run.folder.exists():
            arguments.append("--ckpt_path=last")
        return RunProcess(
            self.tree / MAIN,
            ["fit", *arguments],
            log=run.log,
            threads=self.plan.record.threads,
            folder=self.plan.record.start_folder,
            environment=slot.environment,
            cores=slot.cores,
        )

    def warm_up(self) -> None:
        """Let the server of processes begin to import."""
        start_server(self.plan.record.threads)

    def result(self, folder: Path) -> Ended | None:
        """The content of its ``summary.json``, or the reason in its ``status.json``."""
        state = run_state(folder).description
        if state == FINISHED:
            return Ended(read_summary(folder, NUMBERS))
        if state.startswith(DIVERGED):
            return Ended({}, f"{DIVERGED}: {read_json(folder / STATUS).get('reason', '')}")
        return None

    def can_resume(self, folder: Path) -> bool:
        """Whether it has a checkpoint; data of another class may not continue with the batches that come next."""
        return self._is_known and any(not path.name.startswith(".") for path in (folder / CHECKPOINTS).glob("*.ckpt"))

    def curves(self, folder: Path) -> dict[str, list[tuple[int, float]]]:
        """``train_loss`` and ``val_loss``, from TensorBoard's files."""
        return read_curves(folder, CURVES.__contains__)

    def windows(self, folder: Path) -> Mapping[str, Any] | None:
        """The content of ``windows.json``.

        Raises:
            ValueError: The file is damaged.
        """
        path = folder / WINDOWS
        if not path.is_file():
            return None
        windows = read_record(path, Windows)
        if not len(windows.windows) == len(windows.tokens) == len(windows.nats):
            raise ValueError(f"{path}: windows, tokens and nats differ in length")
        return msgspec.to_builtins(windows)  # type: ignore[no-any-return]

    def notes(self, results: Mapping[RunKey, Any]) -> list[str]:
        """A line for each variant whose pairs do not share all that those of others do."""
        planned = self.plan.record.variants
        lines = [f"{name}: {each.unshared}." for name, each in planned.items() if each.unshared]
        return lines + [f"{name}: {line}" for name, line in self._seen_in_hashes(results).items()]

    def _seen_in_hashes(self, results: Mapping[RunKey, Any]) -> dict[str, str]:
        """Lines about the training batches of variants with custom data, by their hashes."""
        found: dict[str, str] = {}
        first = self.plan.experiment.first_seed
        of_seeds = {
            key.seed: each.summary.get(pairing.BATCHES) for key, each in results.items() if key.name == BASELINE
        }
        if not self._is_known and len(of_seeds) > 1 and len({*of_seeds.values()}) == 1:
            found[BASELINE] = (
                f"all seeds have the same training batches: {self.plan.experiment.seed_option} is not used."
            )
        base = self.plan.record.variants[BASELINE]
        for name, planned in self.plan.record.variants.items():
            other = results.get(RunKey(name, first))
            if planned.unshared or pairing.BATCHES not in planned.excused or other is None:
                continue
            is_same = of_seeds.get(first) == other.summary.get(pairing.BATCHES)
            amount = ""
            if not is_same and None in (each.facts.get("tokens_per_step") for each in (base, planned)):
                amount = f"; it trains {planned.steps} steps, on an amount of data that is not known"
            found[name] = f"by their hashes, its pairs share {'the' if is_same else 'no'} training batches{amount}."
        return found

    @property
    def measures(self) -> bool:
        """Only for a ``LanguageModel`` on token data."""
        return self._is_known

    @property
    def _is_known(self) -> bool:
        return all(planned.is_known for planned in self.plan.record.variants.values())

    def start_measuring(self, log: Path) -> Process | None:
        """Start ``ablate measure`` with the code of the tree."""
        if not self.measures:
            return None
        words = ["ablate", "measure", str(self.plan.out.resolve())]
        return RunProcess(self.tree / MAIN, words, log=log, threads=self.plan.record.threads)
