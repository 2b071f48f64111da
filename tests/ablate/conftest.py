"""An experiment whose runs are done in no time by a stand-in for ``fit``."""

import runpy
import sys
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path

import msgspec
import pytest
from torch.utils.tensorboard import SummaryWriter

from lightning_llm.ablate import runner
from lightning_llm.ablate.experiment import Experiment, Looks, experiment_of
from lightning_llm.ablate.fit import program
from lightning_llm.ablate.ladder import SIZES, freeze_ladder
from lightning_llm.ablate.names import BASELINE, NULL
from lightning_llm.ablate.options import command_line_of
from lightning_llm.ablate.plan import Plan, PlannedVariant, PlanRecord, code_hash, freeze
from lightning_llm.ablate.ratios import Cost, StepCost
from lightning_llm.ablate.results import COST, load_experiment
from lightning_llm.ablate.slots import Slot
from lightning_llm.cli.ablate_fit import read_variant
from lightning_llm.io.records import write_record
from lightning_llm.statistics import pairing

OPTIONS = {
    "model.architecture.hidden_size": 32,
    "model.architecture.num_hidden_layers": 2,
    "model.architecture.num_attention_heads": 2,
    "data.tokenizer": "char",
    "data.context_length": 16,
    "data.global_batch_size": 8,
    "data.micro_batch_size": 4,
    "trainer.max_steps": 6,
    "trainer.accelerator": "cpu",
    "trainer.gradient_clip_val": 1.0,
    "keep_freed_memory": False,
}


@pytest.fixture
def make_variant(text_file, tmp_path, monkeypatch):
    """``make_variant(name)``: a variant as ``fit`` reads it; ``wide`` has a wider MLP."""
    monkeypatch.chdir(tmp_path)

    def variant(name):
        width = {"model.architecture.intermediate_size": 1024} if name == "wide" else {}
        return read_variant(name, [], command_line_of({**OPTIONS, "data.path": str(text_file), **width}))

    return variant


# Instead of the package, in the snapshot: writes what a run writes, with a loss that its config and its seed decide
STAND_IN = """
import json, math, os, sys
from pathlib import Path

import yaml

def main():
    words = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[2:])
    run, seed = Path(words["trainer.run_dir"]), int(words["seed_everything"])
    asked = yaml.safe_load(Path(words["config"]).read_text())
    run.mkdir(parents=True)
    (run / "started").write_text(str(os.getpid()))
    with open(run.parent.parent / "started.txt", "a") as file:
        file.write(f"{run.name}\\n")
    assert words["data.seed"] == str(seed)
    if asked.get("fails"):
        print("lightning-llm fit: error: No space left on device", file=sys.stderr)
        return 2
    if seed in asked.get("diverges", ()):
        (run / "status.json").write_text(json.dumps({"status": "diverged", "step": 3, "reason": "loss is nan"}))
        return 1
    drawn = asked.get("drawn", "00")
    values = {"embed": asked.get("embed", "00"), "layers.0.mlp.up": drawn}
    layers, residual = range(asked.get("layers", 1)), asked.get("residual", "00")
    values |= {f"layers.{layer}.self_attn.o_proj.weight": residual for layer in layers}
    hashes = {"initial_values": {name: f"2x2 float32 {value}" for name, value in values.items()}}
    hashes |= {"validation_batches": "1", "batches": asked.get("batches", "2"), "steps": asked.get("steps", 6)}
    hashes |= {"batches_at": {"4": asked.get("prefix", "3")}, "precision": asked.get("precision", "32-true")}
    loss = 3.0 + 0.01 * seed + asked["effect"] * (1 + 0.001 * (seed % 3))
    loss += asked.get("noise", 0.0) * (-1) ** seed  # without it, a variant with no effect has no spread either
    if "best" in asked:  # a parabola over the logarithm of the rate
        rate = float(words.get("model.optimizer.init_args.lr", asked["lr"]))
        loss += math.log2(rate / asked["best"]) ** 2
    recall = loss - 1 + asked.get("recall", 0.0) * (1 + 0.002 * (seed % 4))
    (run / "config.yaml").write_text("{}")
    (run / "summary.json").write_text(json.dumps({"val_loss": loss, "recall_loss": recall, "seconds": 1.0, **hashes}))
    (run / "status.json").write_text(json.dumps({"status": "finished", "step": 6}))
    return 0
"""


MAIN = "import sys\n\nfrom lightning_llm.__main__ import main\n\nsys.exit(main())\n"


class InThisProcess:
    """In place of ``RunProcess``, of which each one takes a tenth of a second: the stand-in, called."""

    def __init__(self, main, arguments, *, log, **options):
        self.main, self.arguments, self.log = main.parent / "lightning_llm" / "__main__.py", arguments, log
        log.parent.mkdir(exist_ok=True)

    def ask_to_end(self):
        pass

    def await_end(self):
        pass

    def status(self, wait_s=0.0):
        with pytest.MonkeyPatch.context() as patch, self.log.open("a") as log, redirect_stderr(log):
            patch.setattr(sys, "argv", ["main.py", *self.arguments])
            return runpy.run_path(str(self.main))["main"]()


def work(out, log=print, slots=1):
    """Train all runs as ``ablate work`` does, without processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "RunProcess", InThisProcess)
        patch.setattr(runner, "wait_for_one", lambda processes, wait_s: None)
        runner.Runner(Plan.read(out), [Slot()] * slots, log).run()


@pytest.fixture
def experiment(tmp_path):
    """``experiment(variants={name: config}, looks=…)``: a frozen plan."""
    return partial(frozen, tmp_path)


def frozen(
    folder, variants, looks=(4, 5), delta=None, out="out", base=None, null=None, planned=None, record=None, **asked
):
    """The plan of an experiment in a folder.

    Args:
        folder: Where it is, with the stand-in's code.
        variants: What the stand-in does for each; ``options`` are what the experiment says of it.
        looks: Of the experiment.
        delta: Of the experiment.
        out: The name of its folder.
        base: What the stand-in does for the baseline.
        null: What it does for the null variant.
        planned: Fields of the planned variants, by name.
        record: Further fields of the plan.
        asked: Further fields of the experiment.
    """
    files = {"lightning_llm/__init__.py": "", "lightning_llm/__main__.py": STAND_IN, "fit.py": MAIN}
    code = {name: folder / f"code-{number}" for number, name in enumerate(files)}
    for name, path in code.items():
        path.write_text(files[name])
    configs = {BASELINE: {"effect": 0.0, **(base or {})}, NULL: {"effect": 0.003, "drawn": "01"}, **variants}
    configs[NULL] |= null or {}
    stop = asked.pop("stop", None) or Looks(pairs=tuple(looks), half_width=asked.pop("half_width", None))
    experiment = Experiment(
        name=asked.pop("name", "test"),
        variants={name: config.get("options", {}) for name, config in variants.items()},
        delta=delta,
        stop=stop,
        out=out,
        **asked,
    )
    more = {} if planned is None else planned
    fields = {"program": "fit", "start_folder": str(folder), "code": code_hash(code), **(record or {})}
    plan = PlanRecord(
        experiment=experiment,
        variants={name: PlannedVariant(**{"steps": 6, "tokenizer": "t", **more.get(name, {})}) for name in configs},
        **fields,
    )
    plan.variants[NULL] = msgspec.structs.replace(plan.variants[NULL], excused=(pairing.NULL_VALUES,))
    (folder / out).mkdir(parents=True, exist_ok=True)
    return freeze(folder / out, plan, configs, code)


def with_cost(plan, names):
    """As ``ablate measure`` writes it: steps of 1 s, and of half of it for the variants."""
    spread = {"ratio_p20": 1.0, "ratio_p80": 1.0, "ratio_interval": None, "peak_bytes": 2**20}
    step = StepCost(step_s=0.5, step_p20_s=0.4, step_p80_s=0.7, ratio=0.5, **{**spread, "ratio_interval": (0.4, 0.6)})
    base = StepCost(step_s=1.0, step_p20_s=0.4, step_p80_s=1.1, ratio=1.0, **{**spread, "ratio_interval": (1.0, 1.0)})
    facts = {"machine": "a test", "threads": 1, "date": "2026-01-01", "torch": "2", "rounds": 20, "other_cores": 0.0}
    costs = {**dict.fromkeys(names, step), BASELINE: base}
    write_record(plan.out / COST, Cost(plan=plan.hash, variants=costs, **facts))


def with_curves(plan):
    """Validation losses at steps 3 and 6: falling by 1 to what the summary says."""
    for run, result in load_experiment(plan.out).results.items():
        if not result.has_failed:
            with SummaryWriter(str(plan.run_dir(run))) as writer:
                for step in (3, 6):
                    writer.add_scalar("val_loss", result.loss + (6 - step) / 3, step)


@pytest.fixture
def done(experiment):
    """An experiment that has ended: one variant better, one diverged, one with a name that HTML would read."""
    variants = {"a": {"effect": -0.5}, "lost": {"effect": 0.0, "diverges": [1]}, "<b>$x$&": {"effect": 0.001}}
    plan = experiment(variants, delta=0.01)
    work(plan.out)
    with_cost(plan, variants)
    with_curves(plan)
    return plan


LADDER_FILE = {
    "baseline": "base.yaml",
    "variants": {"a": {"model.architecture.mlp": "relu"}},
    "sizes": ["25k", "50k", "100k"],
}
COMPUTES = {"25k": 4.0**10, "50k": 4.0**11, "100k": 4.0**12, "200k": 4.0**13}


@pytest.fixture
def ladder(tmp_path):
    """``ladder(effects={name: one per size})``: a ladder whose three sizes have ended."""

    def of(effects, base=(3.0, 2.5, 2.25), pairs=4, **more):
        out = tmp_path / "ladder"
        asked = {
            **LADDER_FILE,
            "name": "test",
            "out": str(out),
            "pairs": pairs,
            "predict": "200k",
            "delta": 0.01,
            **more,
        }
        asked["variants"] = {name: {} for name in effects}
        made = experiment_of(asked, "the file", "test")
        freeze_ladder(made, COMPUTES)
        for place, size in enumerate(made.sizes):
            train_size(made, size, {name: values[place] for name, values in effects.items()}, base[place] - 3.0)
        return made

    return of


def train_size(ladder, size, effects, level):
    """The experiment of a size, done by the stand-in; a text instead of an effect: its seeds that diverge."""
    variants = {
        name: {"effect": level, "diverges": effect} if isinstance(effect, list) else {"effect": level + effect}
        for name, effect in effects.items()
    }
    base, null = {"effect": level}, {"effect": level + 0.002}
    work(
        frozen(
            Path(ladder.folder),
            variants,
            looks=ladder.looks,
            out=f"{SIZES}/{size}",
            base=base,
            null=null,
            delta=ladder.delta,
        ).out
    )
