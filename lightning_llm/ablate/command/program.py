"""A command as the program of an experiment. No torch."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lightning_llm.ablate.command import template
from lightning_llm.ablate.command.process import SupervisedProcess
from lightning_llm.ablate.command.reading import TOLD
from lightning_llm.ablate.command.revisions import write_diffs
from lightning_llm.ablate.command.source import code_of
from lightning_llm.ablate.command.spec import Command
from lightning_llm.ablate.command.supervise import CURVE, Job
from lightning_llm.ablate.command.workplace import Place, remove_trees
from lightning_llm.ablate.names import AGAIN, BASELINE, titled
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import Plan, code_hash, digest
from lightning_llm.ablate.program import Ended, Process, Program, Promises, Run, log_of
from lightning_llm.ablate.run_process import THREADS, environment_of_run
from lightning_llm.ablate.slots import VISIBLE, Slot
from lightning_llm.io.atomic import write_text
from lightning_llm.io.config_file import read_config
from lightning_llm.io.untrusted import file_name, read_json
from lightning_llm.runs.directory import STATUS
from lightning_llm.runs.status import DIVERGED, FAILED, FINISHED, read_summary, run_state

IGNORED = ".gitignore"
FILES = "files"  # of all runs: each has a folder there, whose name no program takes for an option
SEEDS_THAT_DIFFER = 3
FEWEST_FOR_LOAD, LOAD_P = 8, 0.01
OPTIONS, TREE = "options", "tree"  # in the config of a variant


class CommandProgram(Program):
    """Runs of a command: what they share besides their seed, only the program knows."""

    name: ClassVar[str] = "command"
    promises = Promises()

    @property
    def command(self) -> Command:
        """The command."""
        command = self.plan.experiment.command
        assert command is not None
        return command

    def start(self, run: Run, slot: Slot) -> Process:
        """Start a run, with a supervisor of its own."""
        command = self.command
        variant = run.key.name
        if not command.trees and code_hash(code_of(command)) != self.plan.record.code:
            problem = f"the code in {command.folder} is no longer that of the plan, which would mix two versions"
            raise ValueError(f"{problem}: restore it from {self.tree}, or begin another experiment with another --name")
        options = {**self.plan.experiment.options, **read_config(run.config)[OPTIONS]}
        device = self.plan.record.accelerator
        files = self.plan.out.resolve() / FILES / f"{file_name(variant).replace('=', '-')}-{run.key.seed}"
        values: dict[str, str | list[str]] = {
            template.SEED: str(run.key.seed),
            template.RUN: str(files),
            template.OPTIONS: template.option_words(options, command.option),
            template.DEVICE: device,
        }
        return SupervisedProcess(
            Job(
                run=str(run.key),
                run_folder=str(run.folder),
                files=str(files),
                log=str(run.log.resolve()),
                words=list(command.words),
                values=values,
                resume=list(command.resume),
                metric=self.plan.experiment.metric,
                read=command.read,
                file=command.file,
                key=command.key,
                place=self._place(run),
                environment=environment_of(self.plan, slot),
                gpus=slot.environment.get(VISIBLE, ""),
                cores=list(slot.cores),
                threads=self.plan.record.threads,
                time_limit_s=command.time_limit_s,
            )
        )

    def _place(self, run: Run) -> Place:
        command = self.command
        variant = BASELINE if run.key.name == AGAIN else run.key.name
        tree = command.trees.get(variant)
        return Place(
            folder=command.folder,
            out=str(self.plan.out.resolve()),
            run_folder=str(run.folder),
            is_first=run.key.seed == self.plan.experiment.first_seed,
            reseed=run.key.seed if command.reseed else None,
            store=str(self._store),
            tree="" if tree is None else tree.hash,
            links=command.links,
            setup=command.setup,
            sources=command.sources,
        )

    @property
    def _store(self) -> Path:
        return self.command.store_in(self.plan.out.resolve())

    def keep_record(self) -> None:
        """Write what each revision changes, and hide the experiment from git, so that it is in no later revision."""
        command = self.command
        top = self._store.parent if command.is_shared else self.plan.out
        write_text(top / IGNORED, "*\n")
        if self.command.trees:
            write_diffs(self.command, self.plan.out)

    def tidy(self) -> None:
        """Remove the trees, unless the user keeps them. A stream needs that of its baseline again."""
        command = self.command
        if not command.keep_trees:
            remove_trees(self._store, [command.trees[BASELINE].hash] if command.trees and command.is_shared else ())

    def result(self, folder: Path) -> Ended | None:
        """The content of its ``summary.json``, and how it failed if it did."""
        state = run_state(folder).description
        if state == FINISHED:
            return Ended(read_summary(folder, (self.plan.experiment.metric, "seconds", "peak_memory_gib")))
        kind = next((kind for kind in (DIVERGED, FAILED) if state.startswith(kind)), None)
        if kind is None:
            return None
        summary = read_summary(folder, ("seconds", "peak_memory_gib"))  # it took time, too
        return Ended(summary, f"{kind}: {read_json(folder / STATUS).get('reason', '')}")

    def in_order(self, needed: Sequence[RunKey]) -> Sequence[RunKey]:
        """Seed by seed, the variants in random order: a program with a budget of time depends on the load.

        With the first seed, the baseline comes first: it shows whether the command is right.
        """
        seeds = list(dict.fromkeys(run.seed for run in needed))
        first = self.plan.experiment.first_seed

        def place(run: RunKey) -> tuple[int, str]:
            return seeds.index(run.seed), "" if run.seed == first else digest([self.plan.hash, str(run)])

        return sorted(needed, key=place)

    def notes(self, results: Mapping[RunKey, Any]) -> list[str]:
        """Lines about what pairs share, what runs left in their folders, and whether the load changes losses."""
        summaries = [result.summary for _, result in sorted(results.items()) if result.summary]
        tells = [name for name in TOLD if summaries and all(name in summary for summary in summaries)]
        of_runs = dict.fromkeys(note for summary in summaries for note in summary.get("notes", ()))
        return [*self.command.notes(tells), *of_runs, *self._load_note(results)]

    def _load_note(self, results: Mapping[RunKey, Any]) -> Iterator[str]:
        """A line if the baseline's losses vary with the load of the machine, and not by chance alone.

        Where its first run was repeated with the same loss, under another load, they do not depend on that.
        """
        first, again = (results.get(RunKey(name, self.plan.experiment.first_seed)) for name in (BASELINE, AGAIN))
        if first is not None and again is not None and first.loss == again.loss:
            return
        ended = [result for run, result in results.items() if run.name == BASELINE and not result.has_failed]
        loads = [result.summary.get("load") for result in ended]
        losses = [result.loss for result in ended]
        if len(ended) < FEWEST_FOR_LOAD or None in loads or len({*loads}) == 1 or len({*losses}) == 1:
            return
        from scipy.stats import pearsonr  # takes 0.5 s

        found = pearsonr(loads, losses)
        if found.pvalue < LOAD_P:
            yield (
                f"The baseline's {self.plan.experiment.metric} varies with the load of the machine (correlation "
                f"{found.statistic:.2f}): if the program stops by the clock, let nothing else run."
            )

    def curves(self, folder: Path) -> dict[str, list[tuple[int, float]]]:
        """The values of the metric during the run, if the program prints their steps."""
        path = folder / CURVE
        values = read_json(path)["values"] if path.is_file() else []
        return {self.plan.experiment.metric: [(step, value) for step, value in values if step is not None]}

    def problem(self, results: Mapping[RunKey, Any]) -> str:
        """Find a baseline that always fails, a variant that ignores its seed, and one that may not run its revision."""
        return self._failed(results) or self._ignored_seed(results) or self._unused_revision(results)

    def _failed(self, results: Mapping[RunKey, Any]) -> str:
        """Whether the baseline fails with every seed: nothing can be compared with it."""
        ended = [result for run, result in sorted(results.items()) if run.name in (BASELINE, AGAIN)]
        if len(ended) < SEEDS_THAT_DIFFER or not all(result.has_failed for result in ended):
            return ""
        last = ended[-1]
        log = log_of(self.plan, last.run)
        return f"all {len(ended)} runs of the baseline failed, the last one so: {last.failure}; see {log}"

    def _unused_revision(self, results: Mapping[RunKey, Any]) -> str:
        """Whether the code of a revision may not be used at all: nothing is imported, and nothing differs."""
        seed = self.plan.experiment.first_seed
        base = results.get(RunKey(BASELINE, seed))
        trees = self.command.trees
        changed = [name for name, tree in trees.items() if tree.hash != trees[BASELINE].hash]
        for name in changed:
            other = results.get(RunKey(name, seed))
            if base is None or other is None or other.summary.get("imports_tree"):
                continue
            output = other.summary.get("output")  # of a resumed run none
            if output is not None and output == base.summary.get("output") and other.loss == base.loss:
                return f"{name}: the change has no effect on the output: does the command run the code of this folder?"
        return ""

    def _ignored_seed(self, results: Mapping[RunKey, Any]) -> str:
        """Whether a variant ignores its seed: its runs would be one run, repeated.

        The metric may be coarse, so two equal ones say that only if all of the output is equal; else it takes three. A
        program that writes its metric to a file may print the same in each run.
        """
        experiment = self.plan.experiment
        for name in (BASELINE, *experiment.variants):
            keys = [RunKey(name, seed) for seed in experiment.seeds(SEEDS_THAT_DIFFER)]
            ended = [results[key] for key in keys if key in results and not results[key].has_failed]
            losses = [result.loss for result in ended]
            outputs = [result.summary.get("output") for result in ended]
            is_one = len(outputs) > 1 and outputs[0] is not None and outputs[0] == outputs[1] and losses[0] == losses[1]
            if is_one or (len(losses) == SEEDS_THAT_DIFFER and len({*losses}) == 1):
                seeds = " and ".join(str(result.run.seed) for result in ended[: 2 if is_one else None])
                problem = f"{titled(name)} has the same {experiment.metric} {losses[0]:g} with seeds {seeds}"
                advice = "put {seed} where the command takes its seed, or give --reseed, under another --name"
                if self.command.reseed:
                    advice = "the program sets no seed that --reseed moves: give it an option, and put {seed} there"
                return f"{problem}: the seed does nothing, and such runs have no spread: {advice}"
        return ""


def environment_of(plan: Plan, slot: Slot) -> dict[str, str]:
    """The variables that a run finds: the user's, and those that are listed in the documentation."""
    threads = os.environ.get(THREADS)
    given = environment_of_run(plan.record.threads)
    own = {"PYTHONUNBUFFERED": "1", **({} if threads is None else {THREADS: threads})}
    return {**given, **own, **slot.environment}
