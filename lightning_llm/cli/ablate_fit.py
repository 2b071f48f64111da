"""``fit`` as the program of an experiment, on the command line: its variants are read by ``fit``'s own parser."""

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.fit import cost
from lightning_llm.ablate.fit.planning import FitDraft, read_variants
from lightning_llm.ablate.fit.variant import Variant
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.plan import Plan
from lightning_llm.ablate.results import COST
from lightning_llm.cli.errors import one_line
from lightning_llm.cli.parsing import check_configs
from lightning_llm.cli.train import cli_main
from lightning_llm.data.mixture import fingerprint
from lightning_llm.io.records import write_record
from lightning_llm.io.trust import trust_printed
from lightning_llm.runs.code import PACKAGE, code_of
from lightning_llm.training.environment import environment_of


def draft_of(
    experiment: Experiment, arguments: Sequence[str], source: Path | None, log: Callable[[Iterable[str]], object]
) -> FitDraft:
    """An experiment whose variants were read and compared.

    Args:
        experiment: What the user asks for.
        arguments: Further options of ``fit``.
        source: The file that names its options; ``None``: the command line does.
        log: Called with lines about what is imported, before it is, and about what variants keep of the baseline.

    Raises:
        ValueError: As ``read_variants``.
        OSError: A config cannot be read.
    """
    lines = [] if source is None else trust_printed(source, [experiment.options, experiment.variants])
    lines.append(f"checking the baseline and {', '.join(experiment.variants)}")
    lines += trust_baseline(experiment.baseline)
    log(lines)
    draft = read_variants(experiment, arguments, read_variant)
    log(draft.notes)
    return draft


def trust_baseline(files: Sequence[str]) -> list[str]:
    """Look at the configs of a baseline before they import anything; lines about what they do."""
    return check_configs(["check", *(f"--config={file}" for file in files)])


def environment(base: Variant) -> dict[str, str]:
    """The environment that all runs of a stream share: precision, device, versions, this package, and the text."""
    common = {name: str(value) for name, value in environment_of(base.trainer).items() if name != "threads"}
    return {**common, "text": fingerprint(base.data.sources)}


def own_code(base: Variant) -> dict[str, Path]:
    """The files of the user's own classes that a baseline has, by name."""
    files = code_of({BASELINE: base.options})
    return {name: path for name, path in files.items() if not name.startswith(f"{PACKAGE.name}/")}


def measure(folder: Path) -> None:
    """Measure time and memory of each variant's step, into ``cost.json``."""
    plan = Plan.read(folder.resolve())
    os.chdir(plan.record.start_folder)  # the paths of the text are relative to it
    names = [BASELINE, *plan.experiment.variants]
    log = partial(print, flush=True)
    write_record(plan.out / COST, cost.measure(plan.hash, names, lambda name: _planned(plan, name), log))


def _planned(plan: Plan, name: str) -> Variant:
    return read_variant(name, [plan.config(name)], [])


def read_variant(name: str, files: Sequence[str | Path], arguments: Sequence[str]) -> Variant:
    """A variant of an experiment, as ``fit`` reads it.

    Raises:
        ValueError: What ``lightning-llm check`` finds wrong with it.
    """
    errors, printed = io.StringIO(), io.StringIO()
    configs = [f"--config={file}" for file in files]
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(printed):
            cli = cli_main(["check", *configs, *arguments])
    except SystemExit as leaving:
        lines = errors.getvalue().strip().splitlines() or [one_line(leaving)]
        raise ValueError(f"{name}: {lines[-1].partition('error: ')[2] or lines[-1]}") from None
    options = cli.resolved
    if options.get("ckpt_path") is not None:
        raise ValueError(f"{name}: ckpt_path is set by the experiment: leave it out, or use model.init_from")
    for option in ("ckpt_path", "weights_only", "verbose"):
        options.pop(option, None)
    trainer = options["trainer"]
    trainer |= {"run_dir": None, "enable_progress_bar": False, "accelerator": cli.trainer.strategy.root_device.type}
    trainer["devices"] = 1 if trainer.get("devices") in (None, "auto", -1) else trainer["devices"]
    return Variant(name, options, cli.model, cli.datamodule, cli.trainer)
