"""``lightning-llm ablate try``: one idea of a stream, from its options to its verdict.

Exit status: 0 adopted, 3 not adopted, 1 a run failed (the idea has no verdict), 2 a mistake in the command.
"""

import argparse
import itertools
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from lightning_llm.ablate.command.program import IGNORED
from lightning_llm.ablate.command.spec import STORE
from lightning_llm.ablate.matching import Flops, Tokens, matches_in_words
from lightning_llm.ablate.names import PLAN, STREAM
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import REPORT, Plan
from lightning_llm.ablate.planning import Draft
from lightning_llm.ablate.programs import program_of
from lightning_llm.ablate.report.from_stream import idea_lines, stream_report
from lightning_llm.ablate.report.words import power_of_stream
from lightning_llm.ablate.results import Result, losses_of, results_of, run_seconds, trained_here
from lightning_llm.ablate.reuse import link_needed
from lightning_llm.ablate.slots import slots_for
from lightning_llm.ablate.stream import (
    CURRENT,
    FIRST,
    IDEAS,
    MOST_IDEAS,
    Stream,
    Verdict,
    asked_of,
    begin,
    is_settled,
    refuse_final,
    set_aside,
    store_verdict,
    verdict_of,
    write_current,
)
from lightning_llm.cli import ablate_run
from lightning_llm.cli.ablate_ideas import First, Ideas, ideas_of, patch_lines, patch_of
from lightning_llm.cli.ablate_variants import add_command, add_variants
from lightning_llm.cli.errors import FAILED, reason_of, reports
from lightning_llm.io.atomic import json_text, remove_path
from lightning_llm.io.console import Console
from lightning_llm.io.shell import shell_path
from lightning_llm.io.units import duration, shown_duration
from lightning_llm.io.untrusted import shown
from lightning_llm.runs.lock import LOCK, RunLock, is_locked
from lightning_llm.statistics.design import FAILED_TO_TRAIN
from lightning_llm.statistics.stream import CONFIRMED_AFTER, THOROUGH, StreamRule

NOT_ADOPTED = 3
BASELINE_FAILED = f"too many runs of the baseline {FAILED_TO_TRAIN}"
PROG = "lightning-llm ablate try"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what describes an idea and its stream."""
    add = parser.add_argument
    default = StreamRule()
    add("stream", type=Path, metavar="STREAM", help="folder of the stream; the first idea makes it")
    add("--baseline", nargs="+", metavar="CONFIG", help="configs of the first baseline; options of fit may follow")
    about = "of a command, for a new stream: the name of what is compared; --metric -NAME: higher is better"
    add("--metric", metavar="NAME", help=about)
    add_command(parser)
    add_variants(parser, "what the idea changes. Without it, an idea that was interrupted is continued")
    add("--because", default="", metavar="TEXT", help="why you believe in the idea, for the report")
    about = f"what is equal in a pair: {matches_in_words()} (default: {Flops.name}; of a command {Tokens.name})"
    add("--match", metavar="RULE", help=about)
    add("--again", action="store_true", help="try an idea again that has a verdict, on fresh seeds")
    add("--give-up", action="store_true", help="end an idea that was interrupted, without a decision")
    about = "expected share of useless ideas among the adopted ones, for a new stream"
    add("--alpha", type=float, metavar="SHARE", help=f"{about} (default: {default.alpha:g})")
    usual, thorough = (" or ".join(map(str, looks)) for looks in (CONFIRMED_AFTER, THOROUGH))
    about = f"confirm ideas with {thorough} fresh pairs in place of {usual}, for a new stream"
    add("--thorough", action="store_true", help=about)
    about = "adopt only what improves the metric by more than this, in its unit, for a new stream"
    add("--minimal-gain", type=float, metavar="NUMBER", help=f"{about} (default: 0)")
    add("--budget", metavar="TIME", help="time that all runs of the stream may take together, such as 30m or 8h")
    add("--json", action="store_true", help="print the verdict as one JSON object")


def run_idea(options: argparse.Namespace) -> int:
    """Carry out the idea that the options describe; the exit status.

    Raises:
        ValueError: They describe none, or the stream is not what they say.
        OSError: A config cannot be read.
    """
    if len(options.vary) > 1:
        raise ValueError("--vary is given twice: try takes one idea, and --with OPTION=VALUE adds an option to it")
    budget_s = math.inf if options.budget is None else duration(options.budget, "--budget")
    _refuse_unreadable(options)
    out: Path = options.stream
    was_there = out.exists()
    try:
        first = ideas_of(options, None).first() if _is_new(out) else None
        out.mkdir(parents=True, exist_ok=True)
        return _try(options, first, budget_s)
    except ValueError:
        if not was_there and not any((out / IDEAS).glob("*")):
            remove_path(out)
        raise


def _try(options: argparse.Namespace, first: First | None, budget_s: float) -> int:
    """Carry out the idea of the options in a stream that is there, or begins with it; the exit status."""
    out: Path = options.stream
    if has_waited := bool(is_locked(out)):
        ablate_run.print_notes([f"waiting for another call on {out}"])
    lock = RunLock(out, wait_s=math.inf).acquire()
    try:
        if first is not None and not _is_new(out):  # another call has begun it meanwhile
            first = None
        if first is not None:
            begin(out, first.record, first.base)
        stream = Stream.read(out)
        ideas = ideas_of(options, stream)
        refuse_final(stream)
        if options.give_up:
            return _give_up(stream, options)
        if has_waited and ideas.is_given and stream.unfinished is not None:
            _finish_orphan(stream, ideas, options, budget_s - stream.run_seconds)
            stream = Stream.read(out)
        if (
            stream.verdicts
            and stream.unfinished is None
            and options.vary
            and not options.again
            and ideas.is_last(stream)
        ):
            return _print_verdict(stream, stream.verdicts[-1], options)
        if stream.run_seconds >= budget_s:
            used = shown_duration(stream.run_seconds)
            raise ValueError(f"--budget {options.budget} is used up: the runs of {out} took {used}; give more")
        plan = _plan(stream, ideas, options, None if first is None else first.draft)
        if isinstance(plan, Verdict):
            return _print_verdict(stream, plan, options)
        record = stream.record
        unit = plan.unit
        ablate_run.print_notes([power_of_stream(record.looks, stream.pair_sd, record.minimal_gain, unit)])
        return _run(stream, plan, options, budget_s - stream.run_seconds)
    finally:
        lock.release()


def _plan(stream: Stream, ideas: Ideas, options: argparse.Namespace, draft: Draft | None) -> Plan | Verdict:
    """The plan of the idea: that of one without a verdict, or a new one. Or the verdict, if it has one.

    Args:
        stream: As it is now.
        ideas: Read the idea.
        options: Of the command.
        draft: The idea on this baseline, if it was read before.
    """
    unfinished = stream.unfinished
    if not ideas.is_given:
        if unfinished is None:
            raise ValueError(f"{stream.out}: no idea of it was interrupted: give one with --vary OPTION=VALUE")
        ideas.refuse_changed(stream)
        return Plan.read(unfinished)
    _refuse_other_stream(stream, ideas, options)
    if stream.place > MOST_IDEAS:
        raise ValueError(f"{stream.out} has {MOST_IDEAS} ideas: begin another stream")
    experiment = ideas.experiment(stream)
    if (known := ideas.known(stream, experiment)) is not None and not options.again:
        return known
    draft = ideas.draft(stream, experiment) if draft is None else draft.moved(experiment)
    asked = asked_of(draft)
    if unfinished is not None:
        plan = Plan.read(unfinished)
        if asked_of(plan) != asked:
            advice = f"{PROG} {shell_path(stream.out)} continues it, and with --give-up ends it"
            raise ValueError(f"{unfinished} is another idea, and has no verdict yet: {advice}")
        return plan
    if (earlier := stream.same_as(asked)) is not None and not options.again:
        where = f"place {earlier.place}, {earlier.verdict}"
        raise ValueError(f"this idea was tried before ({where}): --again tries it on fresh seeds, at a new place")
    from lightning_llm.ablate.planning import plan_of

    plan = plan_of(draft, stream.record.workers)
    program_of(plan).keep_record()
    return plan


def _give_up(stream: Stream, options: argparse.Namespace) -> int:
    """End the idea that was interrupted, whatever is wrong with it."""
    if (unfinished := stream.unfinished) is None:
        raise ValueError(f"{stream.out}: no idea of it was interrupted: give one with --vary OPTION=VALUE")
    try:
        plan = Plan.read(unfinished)
    except ValueError as error:
        folder = set_aside(stream.out, unfinished)
        raise ValueError(f"{error}; the idea was taken out of the stream, to {folder}") from None
    results: Mapping[RunKey, Result] = {}
    with suppress(ValueError):  # runs that are no pairs
        results = results_of(plan)
    if is_settled(plan, results):
        raise ValueError(f"the runs of {unfinished.name} have ended: {PROG} {shell_path(stream.out)} says its verdict")
    return _end(stream, plan, verdict_of(plan, results, stopped="given up"), options)


def _run(stream: Stream, plan: Plan, options: argparse.Namespace, left_s: float) -> int:
    """Train pairs until the idea has a verdict, and print it."""
    try:
        _train(plan, options.workers, left_s)
        results = results_of(plan)
    except ValueError as error:
        advice = f"{PROG} {shell_path(stream.out)} tries again, and with --give-up ends the idea"
        reports.mistake("ablate try", f"{PROG}: error: {error}; {advice}")
        return FAILED
    is_out_of_runs = not plan.state(losses_of(results)).needed
    stopped = BASELINE_FAILED if is_out_of_runs else f"the budget of {options.budget} is used up"
    return _end(stream, plan, verdict_of(plan, results, stopped=stopped), options)


def _finish_orphan(stream: Stream, ideas: Ideas, options: argparse.Namespace, left_s: float) -> None:
    """Finish the idea of a call that was killed while this one waited for it: else this one could not begin its own.

    Raises:
        ValueError: It cannot be finished, or a run of it failed.
    """
    plan = Plan.read(stream.unfinished or stream.out)
    command = f"{PROG} {shell_path(stream.out)}"
    ablate_run.print_notes(
        [f"the call that tried {plan.out.name} has ended without a verdict: finishing that idea first"]
    )
    ideas.refuse_changed(stream)
    try:
        _train(plan, options.workers, left_s)
        results = results_of(plan)
    except ValueError as error:
        raise ValueError(f"{error}; {command} tries again, and with --give-up ends {plan.out.name}") from error
    is_out_of_runs = not plan.state(losses_of(results)).needed
    if not is_out_of_runs and not is_settled(plan, results):
        raise ValueError(f"--budget {options.budget} is used up: {command} continues {plan.out.name} with more")
    store_verdict(plan, verdict_of(plan, results, stopped=BASELINE_FAILED))
    ablate_run.print_notes(idea_lines(Stream.read(stream.out).verdicts[-1]))


def _end(stream: Stream, plan: Plan, verdict: Verdict, options: argparse.Namespace) -> int:
    store_verdict(plan, verdict)
    program_of(plan).tidy()
    return _print_verdict(Stream.read(stream.out), verdict, options)


def _print_verdict(stream: Stream, verdict: Verdict, options: argparse.Namespace) -> int:
    """Print a verdict, and write the report; the exit status."""
    patch = patch_of(stream, verdict)
    if options.json:
        print(json_text({**msgspec.to_builtins(verdict), "patch": None if patch is None else str(patch)}), flush=True)
    else:
        Console().print_lines(*idea_lines(verdict), *patch_lines(stream, patch, verdict))
    try:
        write_current(stream)
        stream_report(stream).write(stream.out)
    except OSError as error:  # the verdict is stored
        ablate_run.print_notes([f"{stream.out / REPORT} was not written: {reason_of(error)}"])
    return 0 if verdict.is_adopted else NOT_ADOPTED


def _train(plan: Plan, workers: int | None, left_s: float) -> None:
    link_needed(plan)
    if not plan.state(losses_of(results_of(plan))).needed:
        return

    def is_over(results: Mapping[RunKey, Result]) -> bool:
        return run_seconds(trained_here(plan, results)) >= left_s

    ablate_run.train(plan, slots_for(plan, workers), until=is_over)


# ---- what is compared


def _is_new(out: Path) -> bool:
    """Whether a folder is to become a stream: it has no idea yet.

    Raises:
        ValueError: It holds something else.
    """
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if other := names - {STREAM, FIRST, CURRENT, LOCK, IDEAS, STORE, IGNORED} if STREAM not in names else set():
        what = f"{sorted(other)[0]} and no {STREAM}" if PLAN not in names else "an experiment, and no stream"
        raise ValueError(f"{out} holds {what}: give a new folder, or that of a stream")
    return not any((out / IDEAS).glob(f"*/{PLAN}"))


def _refuse_unreadable(options: argparse.Namespace) -> None:
    """Refuse arguments that no JSON file can hold."""
    vary = itertools.chain.from_iterable(options.vary)
    for argument in [*vary, *options.of_fit, *(options.baseline or ()), options.because, str(options.stream)]:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise ValueError(f"{shown(argument)} is no UTF-8")


def _refuse_other_stream(stream: Stream, ideas: Ideas, options: argparse.Namespace) -> None:
    """Refuse options that are not those that the stream began with; left out, they are."""
    asked = ideas.asked()
    begun_with = stream.record.asked
    checks: list[tuple[str, Any, Any]] = [
        ("--baseline", [*asked.baseline.values()], [*begun_with.baseline.values()]),
        (next(iter(asked.options), "").partition("=")[0], asked.options, begun_with.options),
        ("--command", asked.command and asked.command.text, begun_with.command and begun_with.command.text),
        ("--alpha", options.alpha, stream.record.alpha),
        ("--minimal-gain", options.minimal_gain, stream.record.minimal_gain),
        ("--thorough", options.thorough or None, stream.record.looks == THOROUGH),
    ]
    for option, value, first_value in checks:
        if value not in (None, []) and value != first_value:
            raise ValueError(f"{option} is not what {stream.out} began with: leave it out, or begin another stream")
