"""From what a user asks for to a frozen plan: ``fit``'s own parser and checks read every side before anything runs.

1. Baseline and variants are read, and compared: what makes their losses incomparable is refused.
2. Costs are matched (``ablate.matching``).
3. The plan is frozen with a snapshot of code and configs, or compared with the one that the folder has.
"""

import contextlib
import io
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_llm.ablate import matching
from lightning_llm.ablate.cost import Side, TrainingSteps
from lightning_llm.ablate.experiment import BASELINE, NULL, TIME, Experiment, flat_options
from lightning_llm.ablate.history import earlier
from lightning_llm.ablate.local import threads_for
from lightning_llm.ablate.plan import PACKAGE, PLAN, RUNS, Plan, code_hash, code_of, digest, freeze
from lightning_llm.ablate.results import COST
from lightning_llm.cli.errors import one_line
from lightning_llm.cli.parsing import check_configs
from lightning_llm.cli.train import cli_main
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.io.config_file import read_config
from lightning_llm.io.untrusted import shown
from lightning_llm.measure.gauges import resident_bytes
from lightning_llm.runs.lock import RunLock

BITS_PER_BYTE = "bits_per_byte"
FREE_DATA = ("num_workers", "micro_batch_size", "eval_batch_size", "predict_prompts")  # change no batch
TEXT_DATA = ("tokenizer", "vocab_size", "store")  # may change if losses are per byte of the same text
# Of the trainer: what a pair trains and validates on
PAIRED = ("max_steps", "max_epochs", "max_time", "limit_train_batches", "limit_val_batches", "overfit_batches")
REDRAW = "lightning_llm.ablate.null_variant.RedrawMLP"


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line.

    Raises:
        ValueError: A value is none of JSON, such as a date.
    """
    words = []
    for name, value in options.items():
        try:
            text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(
                f"{name} is {shown(value)}, expected a finite number, a text, a list or a mapping"
            ) from None
        words.append(f"--{name}={text}")
    return words


def read_side(name: str, files: Sequence[str | Path], words: Sequence[str]) -> Side:
    """A side of a comparison, as ``fit`` reads it.

    Raises:
        ValueError: What ``lightning-llm check`` finds wrong with it.
    """
    said, printed = io.StringIO(), io.StringIO()
    configs = [f"--config={file}" for file in files]
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
            cli = cli_main(["check", *configs, *words])
    except SystemExit as leaving:
        lines = said.getvalue().strip().splitlines() or [one_line(leaving)]
        raise ValueError(f"{name}: {lines[-1].partition('error: ')[2] or lines[-1]}") from None
    options = cli.resolved
    if options.get("ckpt_path") is not None:
        raise ValueError(f"{name}: ckpt_path is set by the experiment: leave it out, or use model.init_from")
    for option in ("ckpt_path", "weights_only", "verbose"):
        options.pop(option, None)
    trainer = options["trainer"]
    trainer |= {"run_dir": None, "enable_progress_bar": False, "accelerator": cli.trainer.strategy.root_device.type}
    trainer["devices"] = 1 if trainer.get("devices") in (None, "auto", -1) else trainer["devices"]
    return Side(name, options, cli.model, cli.datamodule, cli.trainer)


class Setup:
    """An experiment whose sides have been read and compared.

    Args:
        experiment: What the user asks for.
        words: Further options of ``fit``, for all runs.

    Raises:
        ValueError: A side cannot run, equals another, or cannot be compared with the baseline.
    """

    def __init__(self, experiment: Experiment, words: Sequence[str]) -> None:
        self.experiment, self._words = experiment, [*words_of(experiment.options), *words]
        for line in check_configs(["check", *(f"--config={file}" for file in experiment.baseline)]):
            print(f"lightning-llm ablate: {line}", file=sys.stderr)
        self._tunable = set[float]()  # values whose grid was checked
        self.sides = {BASELINE: self._side(BASELINE, {})}
        base = self.sides[BASELINE]
        refuse_unsuitable(base, experiment.metric)
        self._check_grid(base)
        for name, options in experiment.variants.items():
            side = self._side(name, options)
            for other in self.sides.values():
                if side.options == other.options:
                    same = ", ".join(options) or "nothing"
                    raise ValueError(f"{name} equals {_the(other.name)}, which has the same {same}: leave it out")
            refuse_incomparable(base, side, experiment.metric)
            self._check_grid(side)
            self.sides[name] = side
        self._matched: dict[str, matching.Matched] = {}  # what matches a variant with the baseline
        self._code = code_of({name: side.options for name, side in self.sides.items()})
        self.asked = self._asked()
        self.earlier = earlier(Path(experiment.folder), self.asked)

    def _side(self, name: str, options: Mapping[str, Any]) -> Side:
        return read_side(name, self.experiment.baseline, [*self._words, *words_of(options)])

    def _check_grid(self, side: Side) -> None:
        """Let ``fit`` read a side with the lowest and the highest value of the option that is tuned."""
        value, tune = tuned_value(side, self.experiment), self.experiment.tune
        if value is None or tune is None or value in self._tunable:
            return
        self._tunable.add(value)
        for factor in (tune["factors"][0], tune["factors"][-1]):
            words = words_of({**self.experiment.variants.get(side.name, {}), tune["option"]: value * factor})
            try:
                read_side(side.name, self.experiment.baseline, [*self._words, *words])
            except ValueError as error:
                raise ValueError(f"tune.factors: {factor:g} times {value:g} is no value: {error}") from None

    def _asked(self) -> dict[str, Any]:
        """What decides whether a plan is of this experiment; the configs are those before anything is matched."""
        asked = self.experiment
        configs = {name: digest(side.options) for name, side in self.sides.items()}
        known: dict[str, Any] = {
            "name": asked.name,
            "variants": dict(asked.variants),
            "metric": asked.metric,
            "delta": asked.delta,
        }
        known |= {"alpha": asked.alpha, "looks": list(asked.looks), "match": asked.match, "solved": asked.solved}
        known |= {"precision": asked.precision, "first_seed": asked.first_seed}
        known["tune"] = asked.tune
        return {**known, "asked_configs": configs, "code": code_hash(self._code)}

    def plan(self, workers: int | None) -> Plan:
        """The frozen plan: that of the folder, or a new one.

        Args:
            workers: The most runs at a time that the user wants.

        Raises:
            ValueError: The folder has another plan, or a variant cannot be matched.
        """
        out = Path(self.experiment.folder)
        if (out / PLAN).exists():
            plan = Plan.read(out)
            if difference := plan.differs(self.asked):
                command = f"lightning-llm ablate run {shlex.quote(str(out))}"
                advice = f"give another --out, or finish this one as it is: {command}"
                difference = self._changed(plan) if difference == "configs" else f"another {difference}"
                raise ValueError(f"{out} has a plan with {difference}, which makes a new experiment: {advice}")
            return plan
        if left := [name for name in (RUNS, COST) if (out / name).exists()]:
            raise ValueError(f"{out} has {left[0]} of an experiment without {PLAN}: give another --out")
        base = self.sides[BASELINE]
        accelerator = base.trainer.strategy.root_device.type
        need = resident_bytes() + 2 * (TrainingSteps(self._side(BASELINE, {})).peak_bytes() or 0)
        threads = threads_for(accelerator, torch.cuda.device_count(), need, workers)
        self._match(threads)
        known = {name: {**matching.facts(side), "tokenizer": _tokenizer(side)} for name, side in self.sides.items()}
        for name, side in known.items():
            side["tuned"] = tuned_value(self.sides[name], self.experiment)
            side["chance"] = chance_of(self.sides[name], self.experiment.metric)
            side |= self._matched.get(name, matching.Matched()).facts
            side["solved"] = side["matched"].get(self.experiment.solved or "")
            side["ratio"] = matching.closeness(self.experiment.match, known[BASELINE], side)
        known[NULL] = dict(known[BASELINE])
        configs = {name: side.options for name, side in self.sides.items()}
        callbacks = base.options["trainer"].get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        redrawing = {**base.options["trainer"], "callbacks": [*callbacks, {"class_path": REDRAW}]}
        configs[NULL] = {**base.options, "trainer": redrawing}
        content = {**self.asked, "threads": threads, "accelerator": accelerator}
        content |= {"folder": str(Path.cwd()), "sides": known, "commit": commit_of(PACKAGE)}
        planned = range(self.experiment.first_seed, self.experiment.first_seed + self.experiment.looks[-1])
        seen = {each.name: sorted({*each.seeds} & {*planned}) for each in self.earlier}
        content["seen"] = {name: seeds for name, seeds in seen.items() if seeds}
        out.mkdir(parents=True, exist_ok=True)
        lock = RunLock(out).acquire()  # of two that begin here at the same time, one finds the plan of the other
        try:
            return self.plan(workers) if (out / PLAN).exists() else freeze(out, content, configs, self._code)
        finally:
            lock.release()

    def _changed(self, plan: Plan) -> str:
        """The first option of a side that differs from the plan's, in words."""
        for name, side in self.sides.items():
            before = flat_options(read_config(plan.config(name)))
            now = flat_options(side.options)
            matched = [f"{option}." for option in plan.content["sides"][name].get("matched", {})]
            for option in sorted(before.keys() | now.keys()):
                old, new = (shown(each.get(option)) for each in (before, now))
                is_matched = option in (matching.STEPS, plan.content["solved"]) and name != BASELINE
                is_matched |= any(each.startswith(f"{option}.") for each in matched)  # options of a class are one
                if old != new and not is_matched:
                    return f"another {option} of {_the(name)} ({old}, now {new})"
        return "other options"

    def _match(self, threads: int) -> None:
        """Give each variant the options that match it with the baseline."""
        experiment, before = self.experiment, torch.get_num_threads()

        def make(name: str) -> Side:
            return self._side(name, experiment.variants.get(name, {}))

        torch.set_num_threads(threads if experiment.match == TIME else before)
        try:
            for name, options in experiment.variants.items():
                base, side = self.sides[BASELINE], self.sides[name]
                found = matching.matched(experiment.match, experiment.solved, base, side, make)
                self._matched[name] = found
                if found.options:  # they come last, since later words override
                    own = {option: value for option, value in options.items() if option not in found.options}
                    self.sides[name] = self._side(name, {**own, **found.options})
        finally:
            torch.set_num_threads(before)


def chance_of(side: Side, metric: str) -> float | None:
    """The metric of a model that gives every token the same probability; ``None`` if it is not known."""
    nats = math.log(side.architecture.vocab_size)
    if metric != BITS_PER_BYTE:
        return nats
    return None if side.data.bytes_per_token is None else nats / math.log(2) / side.data.bytes_per_token


def commit_of(package: Path) -> str | None:
    """The git commit of the package, with a mark if files were changed since; ``None`` if it is not in a clone."""
    if not (package.parent / ".git").exists():
        return None
    words = ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def tuned_value(side: Side, experiment: Experiment) -> float | None:
    """The value that a side has of the option that is tuned; ``None``: none is.

    Raises:
        ValueError: It is no number above 0.
    """
    if experiment.tune is None:
        return None
    option = experiment.tune["option"]
    found: Any = side.options
    for word in option.split("."):
        inner = found if isinstance(found, dict) else {}
        found = inner.get(word, (inner.get("init_args") or {}).get(word))
    if type(found) not in (int, float) or not found > 0:
        raise ValueError(f"tune.option {option} of {_the(side.name)} is {found!r}, expected a number above 0")
    return float(found)


def refuse_unsuitable(base: Side, metric: str) -> None:
    """Refuse a baseline whose runs have no result to compare.

    Raises:
        ValueError: It does not validate, writes no run, or has no known length.
    """
    trainer = base.options["trainer"]
    if not isinstance(base.data, TokenDataModule):
        kind = f"{type(base.data).__module__}.{type(base.data).__qualname__}"
        raise ValueError(f"the baseline has data.class_path {kind}: pairs need the data.seed of TokenDataModule")
    if trainer.get("limit_val_batches") == 0:
        raise ValueError("the baseline has trainer.limit_val_batches 0: there is no loss to compare")
    if switch := next((name for name in ("fast_dev_run", "barebones") if trainer.get(name)), None):
        raise ValueError(f"the baseline has trainer.{switch}, which writes no run: leave it out")
    if metric == BITS_PER_BYTE and base.data.bytes_per_token is None:
        raise ValueError(f"metric {BITS_PER_BYTE}: the token files are raw, so their bytes are not known: use val_loss")
    matching.steps_of(base)


def refuse_incomparable(base: Side, side: Side, metric: str) -> None:
    """Refuse a variant whose runs would be no pairs with those of the baseline.

    Raises:
        ValueError: It changes data, validation or the number of steps.
    """
    ours, theirs = base.options, side.options
    data = [name for name in ours["data"] if ours["data"][name] != theirs["data"].get(name) and name not in FREE_DATA]
    trainer = [name for name in PAIRED if ours["trainer"].get(name) != theirs["trainer"].get(name)]
    has_bytes = None not in (base.data.bytes_per_token, side.data.bytes_per_token)
    if data and set(data) <= set(TEXT_DATA) and has_bytes and _text_of(base) == _text_of(side):
        data = [] if metric == BITS_PER_BYTE else data
        advice = f"losses per token cannot be compared: set metric: {BITS_PER_BYTE}, which the same text allows"
    else:
        advice = "a pair needs the same batches and validation text: leave it out"
    if "max_steps" in trainer:
        advice = "match says how many steps a variant has: leave it out"
    for option in (*(f"data.{name}" for name in data), *(f"trainer.{name}" for name in trainer)):
        raise ValueError(f"{side.name} changes {option}: {advice}")


def _text_of(side: Side) -> list[tuple[int, int]]:
    """Bytes and documents of the validation text."""
    return [(s.store.splits["val"].bytes, s.store.splits["val"].documents) for s in side.data.sources]


def _tokenizer(side: Side) -> str:
    return str(side.data.store.tokenizer_sha256)


def _the(name: str) -> str:
    return f"the {name}" if name == BASELINE else name
