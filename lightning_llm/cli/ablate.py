"""``lightning-llm ablate``: does a change help? Runs of a baseline and its variants in pairs, until a verdict.

``power`` shows what an experiment would find; ``run`` plans it, freezes the plan, and starts workers on this machine;
``try`` does that for one idea after another; ``verdict`` reads losses that other programs have written, and ``audit``
the log of a keep-if-better loop;
``work`` is one worker; ``status`` shows an experiment's progress; ``report`` writes its results; ``extend`` adds
pairs, or a size to a ladder; ``measure`` measures time and memory of each variant.
"""

import argparse
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_llm.ablate import claims
from lightning_llm.ablate.command.spec import COMMAND_LINE, KEYS, option_named
from lightning_llm.ablate.command.template import PLACEHOLDERS
from lightning_llm.ablate.experiment import METRICS, Experiment, experiment_of
from lightning_llm.ablate.extension import extension_of
from lightning_llm.ablate.factors import factors_in
from lightning_llm.ablate.history import Spread, spread_in
from lightning_llm.ablate.ladder import LADDER, SIZES, read_ladder
from lightning_llm.ablate.matching import matches_in_words
from lightning_llm.ablate.names import PLAN, STREAM
from lightning_llm.ablate.options import SET_BY_EXPERIMENT, varied
from lightning_llm.ablate.plan import Plan
from lightning_llm.ablate.plan_tables import show_cost_estimates, show_plan, show_power_analysis
from lightning_llm.ablate.programs import program_of
from lightning_llm.ablate.progress import progress_in_words
from lightning_llm.ablate.report.from_experiment import report_of
from lightning_llm.ablate.report.from_folder import report_in
from lightning_llm.ablate.report.from_stream import stream_report
from lightning_llm.ablate.report.report import add_format, show_written
from lightning_llm.ablate.results import load_experiment
from lightning_llm.ablate.reuse import REUSES
from lightning_llm.ablate.runner import Runner
from lightning_llm.ablate.slots import Slot
from lightning_llm.ablate.stream import Stream, finish, write_current
from lightning_llm.accounting.sizing import SIZE_OPTIONS
from lightning_llm.cli import ablate_run
from lightning_llm.cli.ablate_audit import add_options as add_audit
from lightning_llm.cli.ablate_audit import audit_log
from lightning_llm.cli.ablate_ideas import patch_lines, patch_of
from lightning_llm.cli.ablate_ladder import extend_ladder, run_ladder
from lightning_llm.cli.ablate_try import add_options, run_idea
from lightning_llm.cli.ablate_variants import add_command, add_variants, command_in, fit_as_command
from lightning_llm.cli.ablate_verdict import add_options as add_table
from lightning_llm.cli.ablate_verdict import reach_verdict
from lightning_llm.cli.errors import reports
from lightning_llm.cli.interrupts import interrupts
from lightning_llm.cli.subcommand import OneLineParser, Subcommand
from lightning_llm.io.config_file import read_config
from lightning_llm.io.console import Console
from lightning_llm.io.trust import add_trust_option
from lightning_llm.io.untrusted import printable, shown
from lightning_llm.statistics.power import SPREADS

if TYPE_CHECKING:
    from lightning_llm.ablate.planning import Draft

OF_PROGRAMS = "docs/any-program.md"  # explains errors about a command in place of fit
AGAIN = "; the same command again continues"
MAY_BEGIN_WITH_MINUS = {"--metric": "-[^-]", "--resume": "-"}  # how a value begins, by option
# Their options follow those of run
OF_FIT = ("model", "data", "trainer", "seed_everything", "keep_freed_memory", *SIZE_OPTIONS)


def _options(parser: OneLineParser) -> None:
    parser.description = "Compare a baseline with variants of it, in pairs of runs with the same seed, until a verdict."
    names = "run|try|verdict|audit|status|report|extend|power|measure|work"
    actions = parser.add_subparsers(dest="action", required=True, metavar=names)

    def action(name: str, act: Callable[[argparse.Namespace], object], about: str) -> argparse.ArgumentParser:
        parser = actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        parser.set_defaults(act=act)
        return parser

    run = action("run", _run, "plan an experiment, or continue one, and train its runs on this machine")
    about = "an experiment (YAML), or the folder of an experiment to continue; options of fit for all runs may follow"
    run.add_argument("experiment", nargs="?", metavar="FILE", help=about)
    power = action("power", _power, "show how likely each verdict is, and how many runs the experiment takes")
    power.add_argument("experiment", nargs="?", metavar="FILE", help="an experiment (YAML)")
    spread = power.add_mutually_exclusive_group(required=True)
    about = "standard deviation of the difference of one pair, in the metric's unit"
    spread.add_argument("--spread", type=float, metavar="NUMBER", help=about)
    about = "take the largest spread of the variants of this experiment; without FILE, also take its plan"
    spread.add_argument("--from", dest="earlier", type=Path, metavar="DIR", help=about)
    for parser_of_plan in (run, power):
        add = parser_of_plan.add_argument
        add("--baseline", nargs="+", metavar="CONFIG", help="without FILE: configs of the baseline")
        add_variants(parser_of_plan, "without FILE: a variant; repeatable")
        about = "without FILE: a change, OPTION=VALUE or @REV, that is combined with others; repeatable"
        add("--factor", action="append", default=[], metavar="NAME:CHANGE", help=about)
        add("--name", help="name of the experiment (default: that of FILE)")
        add("--out", metavar="DIR", help="folder of the experiment (default: runs/NAME)")
        add("--pairs", type=int, metavar="N", help="maximum number of pairs")
        about = f"what is compared: {', '.join(METRICS)} (default: {METRICS[0]}); of a command, any name for it"
        add("--metric", metavar="NAME", help=f"{about}; --metric -NAME: higher is better")
        add("--delta", type=float, metavar="NUMBER", help="smallest difference that matters, in the metric's unit")
        add("--tune", metavar="OPTION", help="tune this option for each variant first, such as the learning rate")
        add("--match", metavar="RULE", help=f"what is equal in a pair: {matches_in_words()} (default: tokens)")
        about = "argument that seeds your own data module (default: data.seed)"
        add("--seed-option", metavar="OPTION", help=about)
        add("--first-seed", type=int, metavar="N", help="seed of the first pair (default: 0); the others follow")
        add_command(parser_of_plan)
    about = "judge the variants as ideas that were written down together: adopt the useful ones, by e-BH"
    run.add_argument("--batch", action="store_true", default=None, help=about)
    about = "only print what the runs take: FLOPs, and time on this machine"
    run.add_argument("--dry-run", action="store_true", help=about)
    about = "reuse finished runs of earlier experiments in the same folder (default: baseline)"
    run.add_argument("--reuse", choices=REUSES, help=about)
    add_trust_option(run, "run the command that FILE names")
    idea = action("try", run_idea, "compare one idea of a stream with its baseline, and adopt it or not")
    add_options(idea)
    add_table(action("verdict", reach_verdict, "reach a verdict on losses in a file, from any program"))
    add_audit(action("audit", audit_log, "say what the log of a keep-if-better loop can show, and what it cannot"))
    extend = action("extend", _extend, "add pairs, or a size to a ladder, and train them")
    added = extend.add_mutually_exclusive_group(required=True)
    added.add_argument("--pairs", type=int, metavar="N", help="number of pairs to add")
    about = "size to add to a ladder, such as 200k; its prediction is stored before its first run"
    added.add_argument("--size", metavar="SIZE", help=about)
    about = "variants to add pairs to, even if they have a verdict (default: those without one)"
    extend.add_argument("--variants", nargs="+", metavar="NAME", help=about)
    status = action("status", _status, "show the progress of an experiment")
    about = "print the report, and write report.json, report.html and figures to its folder"
    report = action("report", _report, about)
    add_format(report)
    about = "end a stream of ideas: its report then has the losses of all pairs, and no further idea can be tried"
    report.add_argument("--final", action="store_true", help=about)
    measure = action("measure", _measure, "measure time and memory of each variant (run nothing else meanwhile)")
    worker = action("work", _work, "train runs that no other worker trains, until the experiment has ended")
    for parser_of_folder in (extend, status, report, measure, worker):
        parser_of_folder.add_argument("folder", type=Path, metavar="DIR", help="folder of an experiment")
    for training in (run, idea, extend):
        training.add_argument("--workers", type=int, metavar="N", help="parallel runs (default: one per GPU or core)")
    for starting in (run, extend):
        about = "submit the workers as an array of SLURM jobs, with these settings of submitit, such as partition=gpu"
        starting.add_argument("--slurm", nargs="*", metavar="KEY=VALUE", help=about)


def run_ablate(arguments: Sequence[str]) -> int:
    """Compare a baseline with variants of it."""
    if problem := _unquoted(arguments):
        return reports.mistake("ablate run", f"{ablate_run.PROG}: error: {problem}")
    own_arguments, of_fit = _split(arguments)
    return Subcommand(partial(_act, of_fit=of_fit), ablate_run.PROG, _options, when_interrupted=AGAIN)(own_arguments)


def _unquoted(arguments: Sequence[str]) -> str:
    """Problem of a command that a shell has split, because it is not in quotes; empty: none."""
    words = itertools.pairwise(["", *arguments])
    own = {name: word for name, word in words if name == "--command" and " " not in word}
    others = [argument for argument in arguments if argument not in own.values()]
    if own and any(f"{{{name}}}" in argument for argument in others for name in PLACEHOLDERS):
        return f"--command {own['--command']}: put the whole command in quotes, such as 'python train.py {{seed}}'"
    return ""


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of ``ablate``, and options of ``fit``: those with a dot, and the single ones."""
    own, of_fit = list[str](), list[str]()
    rest = iter(_joined(arguments))
    for argument in rest:
        name, equals, _ = argument.removeprefix("--").partition("=")
        is_own = name == "size" and own[:1] == ["extend"]
        if argument.startswith("--") and not is_own and name.partition(".")[0].removesuffix("+") in OF_FIT:
            of_fit += [argument, *(() if equals or name == "repeat" else itertools.islice(rest, 1))]
        else:
            own.append(argument)
    return own, of_fit


def _joined(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments, with ``=`` before a value that begins with a minus: argparse would take it for an option."""
    rest = iter(arguments)
    for argument in rest:
        value = next(rest, None) if argument in MAY_BEGIN_WITH_MINUS else None
        if value is None or not re.match(MAY_BEGIN_WITH_MINUS[argument], value):
            yield from (argument, value) if value is not None else (argument,)
        else:
            yield f"{argument}={value}"


def _act(options: argparse.Namespace, of_fit: Sequence[str]) -> object:
    if of_fit and options.action not in ("run", "try"):
        raise ValueError(f"{of_fit[0]} is an option of fit: only ablate run and ablate try take it")
    for name in (argument.removeprefix("--").partition("=")[0] for argument in of_fit):
        if name in SET_BY_EXPERIMENT:
            raise ValueError(f"--{name} is set by the experiment: leave it out")
    if getattr(options, "workers", None) is not None and options.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {options.workers}")
    options.of_fit = of_fit
    with interrupts.handling("ablate"):
        try:
            return options.act(options)
        except ValueError as error:
            if _has_command(options):
                raise ValueError(f"{error} ({OF_PROGRAMS})") from error
            raise


def _has_command(options: argparse.Namespace) -> bool:
    """Whether a command in place of ``fit`` is compared, as far as can be read."""
    if options.action == "try":  # whose page explains both
        return False
    path = getattr(options, "experiment", None) or getattr(options, "folder", None)
    with suppress(ValueError, OSError):
        if path is None:
            return any(getattr(options, key, None) is not None for key in (*KEYS, "unchanged", "read_file", "key"))
        if Path(path).is_dir():
            return Plan.read(Path(path)).experiment.command is not None
        return "command" in read_config(Path(path))
    return False


def _run(options: argparse.Namespace) -> None:
    if options.experiment is not None and Path(options.experiment).is_dir():
        if not (Path(options.experiment) / LADDER).exists():
            Plan.read(Path(options.experiment))  # or it is no folder of an experiment
        if options.of_fit or options.reuse or _compared(options) or _overriding(options):
            raise ValueError(f"{options.experiment} has a frozen plan: only --workers can be given with it")
        if options.dry_run:
            raise ValueError(f"--dry-run is for what has no plan yet, and {options.experiment} has one")
        if (Path(options.experiment) / LADDER).exists():
            run_ladder(read_ladder(Path(options.experiment))[0], options)
            return
        plan = Plan.read(Path(options.experiment))
    else:
        experiment = experiment_of(*_content(options))
        if experiment.sizes:
            if options.of_fit:
                raise ValueError(f"{options.of_fit[0]}: a ladder takes options of fit in its file, under options")
            run_ladder(experiment, options)
            return
        draft = _draft(experiment, options)
        if options.dry_run:
            return
        from lightning_llm.ablate.planning import plan_of

        plan = plan_of(draft, options.workers, reuse=options.reuse or REUSES[0])
        program_of(plan).keep_record()
        show_plan(plan, draft.earlier, Console(stderr=True))
    ablate_run.run_experiment(plan, options.workers, options.slurm)


def _draft(experiment: Experiment, options: argparse.Namespace) -> "Draft":
    """The experiment as its program reads it. With ``--dry-run``, print what its runs take."""
    if experiment.command is None:
        source = options.experiment and Path(options.experiment)
        draft = ablate_run.draft_of(experiment, options.of_fit, source=source)
        if options.dry_run:
            show_cost_estimates({experiment.name: draft.cost_estimate(options.workers)}, Console())
        return draft
    from lightning_llm.ablate.command import planning

    if options.of_fit:
        raise ValueError(f"{options.of_fit[0]} is an option of fit, and --command is in place of fit: leave it out")
    if options.dry_run:
        print(f"At most {experiment.most_runs()} runs of {experiment.command.text}")
    found = planning.draft_of(experiment)
    ablate_run.print_notes(found.notes)
    return found


def _content(options: argparse.Namespace) -> tuple[dict[str, Any], str, str]:
    """The keys of an experiment, what they are from, and its name."""
    compared = _compared(options)
    if options.experiment is not None:
        if compared:
            option = option_named(next(iter(compared)), COMMAND_LINE)
            if "=" in options.experiment:
                change = options.experiment
                advice = f"--vary {change} is a second variant, and --with {change} a further change of the first"
                raise ValueError(f"{shown(change)} is no experiment file; give each change its own option: {advice}")
            raise ValueError(f"{option} is in place of a file: leave it out, or {options.experiment}")
        content = read_config(Path(options.experiment))
        source = options.experiment
        name = Path(options.experiment).stem
        _trust_command(content, options)
    elif not {"baseline", "command"} & {*compared}:
        ways = "--baseline CONFIG and at least one --vary OPTION=VALUE, or --command TEXT (any program that trains)"
        raise ValueError(f"give an experiment's FILE, or {ways}")
    else:
        content = compared
        source = COMMAND_LINE
        name = "ablate"
    return {**content, **_overriding(options)}, source, name


def _compared(options: argparse.Namespace) -> dict[str, Any]:
    """Baseline, variants and command of a comparison, by the keys that a file has for them."""
    given = {
        "baseline": options.baseline,
        "variants": varied(options.vary),
        "factors": factors_in(options.factor),
    }
    keys = {name: value for name, value in given.items() if value} | command_in(options)
    if {"against", "revisions"} & {*keys} and "baseline" in keys and "command" not in keys:
        keys |= fit_as_command(keys.pop("baseline"), options.of_fit, options.metric)
        options.of_fit = ()
    return keys


def _trust_command(content: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Print the command that a file names.

    Raises:
        ValueError: The user does not trust it.
    """
    for key in ("command", "setup"):
        if key in content:
            if not getattr(options, "trust_code", True):
                advice = "read it, and add --trust-code to run it"
                whole = printable(repr(content[key]))  # a shortened one could hide what it runs
                raise ValueError(f"{options.experiment} names a {key}, {whole}: {advice}")
            ablate_run.print_notes([f"{options.experiment}: {key}: {printable(str(content[key]))}"])


def _overriding(options: argparse.Namespace) -> dict[str, Any]:
    """The keys of an experiment that are given as options."""
    given = {"first": options.first_seed, "option": options.seed_option}
    seeds = {key: value for key, value in given.items() if value is not None}
    tune = None if options.tune is None else {"option": options.tune}
    same = {key: getattr(options, key) for key in ("name", "out", "pairs", "match", "metric", "delta")}
    keys = {**same, "seeds": seeds or None, "tune": tune, "batch": getattr(options, "batch", None)}
    return {key: value for key, value in keys.items() if value is not None}


def _extend(options: argparse.Namespace) -> None:
    if options.size is not None:
        extend_ladder(options)
        return
    loaded = load_experiment(options.folder)
    extension, look = extension_of(loaded, options.pairs, options.variants)
    ablate_run.print_notes([f"adding pairs up to the look at {look}"])
    loaded.plan.extend(extension)
    ablate_run.run_experiment(loaded.plan, options.workers, options.slurm)


def _power(options: argparse.Namespace) -> None:
    if options.spread is not None and not SPREADS[0] <= options.spread <= SPREADS[1]:
        raise ValueError(f"--spread must be from {SPREADS[0]:g} to {SPREADS[1]:g}, got {options.spread}")
    if options.earlier is None or options.experiment or options.baseline or options.vary:
        experiment = experiment_of(*_content(options))
    else:
        experiment = Plan.read(options.earlier).experiment
        experiment = experiment if options.pairs is None else experiment.cut(options.pairs)
    spread = Spread(options.spread) if options.earlier is None else spread_in(options.earlier, experiment.metric)
    show_power_analysis(experiment, spread, Console())


def _status(options: argparse.Namespace) -> None:
    if (options.folder / LADDER).exists():
        for folder in sorted(options.folder.glob(f"{SIZES}/*/{PLAN}")):
            _status(argparse.Namespace(folder=folder.parent))
        return
    if (options.folder / STREAM).exists():
        stream = Stream.read(options.folder)
        stream_report(stream).show()
        for verdict in stream.verdicts[-1:]:
            Console().print_lines(*patch_lines(stream, patch_of(stream, verdict), verdict))
        return
    loaded = load_experiment(options.folder)
    console = Console()
    needed = loaded.state.needed
    taken = len(claims.claimed(loaded.plan.out, map(str, needed)))
    runs = f"{len(loaded.results)} runs have ended, {taken} train, {len(needed) - taken} wait"
    progress = f"; {progress_in_words(loaded.plan, loaded.state, None)}" if needed else ""
    console.print_lines(f"{options.folder}: {runs}{progress}")
    report_of(loaded, with_curves=False).show(console)


def _report(options: argparse.Namespace) -> None:
    if (options.folder / STREAM).exists():
        stream = Stream.read(options.folder)
        if options.final:
            finish(stream)
        write_current(stream)
    elif options.final:
        raise ValueError(f"--final ends a stream of ideas, and {options.folder} is none: leave it out")
    show_written(report_in(options.folder), options.format)


def _work(options: argparse.Namespace) -> None:
    Runner(Plan.read(options.folder), [Slot()], partial(print, flush=True)).run()


def _measure(options: argparse.Namespace) -> None:
    plan = Plan.read(options.folder)
    if not program_of(plan).measures:
        raise ValueError(f"{plan.out}: time and memory of a step cannot be measured for {plan.record.program}")
    from lightning_llm.cli.ablate_fit import measure

    measure(options.folder)


run_ablate.parser = Subcommand(lambda options: None, ablate_run.PROG, _options).parser  # type: ignore[attr-defined]
