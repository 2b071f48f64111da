"""A program of one's own: what starts a run and says how it ended is all that an experiment needs of it."""

import ast
import json
from pathlib import Path

import pytest
import yaml

from lightning_llm.ablate import program, programs, runner
from lightning_llm.ablate.experiment import Experiment, Looks
from lightning_llm.ablate.fit.program import Fit
from lightning_llm.ablate.plan import Plan, PlannedVariant, PlanRecord, code_hash, freeze
from lightning_llm.ablate.program import Ended, Program, Promises
from lightning_llm.ablate.report.from_experiment import report_of
from lightning_llm.ablate.results import load_experiment
from lightning_llm.ablate.runner import Runner
from lightning_llm.ablate.slots import Slot


def noisy_parabola(seed, x):
    return (x - 3) ** 2 + 0.01 * ((7 * seed) % 5)


class Done:
    """In place of a process: it has ended."""

    sentinel = None

    def status(self, wait_s=0.0):
        return 0


class Parabola(Program):
    """A function that returns numbers."""

    def start(self, run, slot):
        x = yaml.safe_load(run.config.read_text())["x"]
        run.folder.mkdir(parents=True)
        (run.folder / "loss.json").write_text(json.dumps({"val_loss": noisy_parabola(run.key.seed, x)}))
        return Done()

    def result(self, folder):
        path = folder / "loss.json"
        return Ended(json.loads(path.read_text())) if path.exists() else None


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Two variants of a parabola: one is better by 1, the other the same but for a little."""
    monkeypatch.setitem(programs.PROGRAMS, "parabola", Parabola)
    monkeypatch.setattr(runner, "wait_for_one", lambda processes, wait_s: None)
    configs = {"baseline": {"x": 2.0}, "better": {"x": 3.0}, "same": {"x": 2.0001}}
    variants = {name: config for name, config in configs.items() if name != "baseline"}
    asked = Experiment(name="parabola", variants=variants, stop=Looks(pairs=(4, 8)), delta=0.01)
    planned = dict.fromkeys(configs, PlannedVariant())
    record = PlanRecord(experiment=asked, variants=planned, program="parabola", code=code_hash({}))
    return freeze(tmp_path / "out", record, configs, {})


def test_a_function_that_returns_numbers_gets_a_report(plan):
    Runner(plan, [Slot()]).run()
    report = report_of(load_experiment(plan.out))
    page = report.write(plan.out)
    verdicts = {row.variant: (row.verdict, row.against_delta) for row in report.rows}
    assert verdicts == {"better": ("better", "larger"), "same": ("equivalent", "smaller")}
    assert (report.design.program, report.has_ended, list(report.of_kind("null"))) == ("parabola", True, [])
    assert report.checks.replay_difference == 0.0
    assert "better, by more than 0.01" in page.read_text()


def test_what_a_program_does_not_promise_is_not_asked_of_it(plan):
    assert Parabola.promises == Promises(False, False, False, False)
    assert Fit.promises == Promises(True, True, True, True)
    assert programs.program_of(plan).start_measuring(plan.out / "log.txt") is None
    assert not any(run.name == "null" for run in plan.state({}).needed)


def test_an_interrupted_run_of_a_program_that_cannot_continue_begins_again(plan):
    (plan.out / "runs" / "baseline,seed=0").mkdir(parents=True)
    said = []
    Runner(plan, [Slot()], said.append).run()  # its folder was removed, or `start` could not make it
    assert said[0] == "baseline,seed=0: starting"


def test_the_program_of_a_plan_must_be_there(plan, monkeypatch):
    monkeypatch.delitem(programs.PROGRAMS, "parabola")
    with pytest.raises(ValueError, match=r"out was planned for the program 'parabola'; this version has fit, command$"):
        load_experiment(Plan.read(plan.out).out)


def imports_fit(path):
    """Whether a file imports anything of ``ablate.fit``."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return any(name.startswith("lightning_llm.ablate.fit") for name in names)


def test_only_the_table_of_programs_knows_fit():
    folder = Path(program.__file__).parent
    files = [path for path in sorted(folder.rglob("*.py")) if folder / "fit" not in path.parents]
    assert folder / "report" / "words.py" in files
    assert [path.name for path in files if imports_fit(path)] == ["programs.py"]
