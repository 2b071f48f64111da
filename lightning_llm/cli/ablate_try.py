"""``lightning-llm ablate try``: one idea of a stream, from its options to its verdict.

Exit status: 0 adopted, 3 not adopted, 1 a run failed (the idea has no verdict), 2 a mistake in the command.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_llm.ablate import local
from lightning_llm.ablate.arm import BASELINE, Arm
from lightning_llm.ablate.idea import IDEA, MOST_PAIRS
from lightning_llm.ablate.matching import Flops, matches_in_words
from lightning_llm.ablate.options import flat_options, varied
from lightning_llm.ablate.plan import Plan, file_hash
from lightning_llm.ablate.results import Result, results_of
from lightning_llm.ablate.reuse import take_needed
from lightning_llm.ablate.stream import (
    ADOPTED,
    IDEAS,
    LONGEST_NAME,
    STREAM,
    Stream,
    asked_of,
    begin,
    experiment_of_idea,
    first_seed,
    idea_at,
    run_seconds,
    settings,
    store_verdict,
    verdict_of,
)
from lightning_llm.ablate.stream_report import lines_of, write_stream_report
from lightning_llm.cli import ablate_run
from lightning_llm.cli.errors import FAILED, reports
from lightning_llm.io.atomic import remove_path
from lightning_llm.io.config_file import config_path
from lightning_llm.io.console import Console
from lightning_llm.io.schema import validate
from lightning_llm.io.units import duration, shown_duration
from lightning_llm.runs.lock import RunLock, is_locked
from lightning_llm.statistics.stream import LEAST, StreamRule

if TYPE_CHECKING:
    from lightning_llm.ablate.setup import Setup

NOT_ADOPTED = 3
PROG = "lightning-llm ablate try"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``try``."""
    add, default = parser.add_argument, StreamRule()
    add("stream", type=Path, metavar="STREAM", help="folder of the stream; the first idea makes it")
    add("--baseline", nargs="+", metavar="CONFIG", help="configs of the first baseline; options of fit may follow")
    about = "what the idea changes; repeatable. Without it, an idea that was interrupted is continued"
    add("--vary", action="append", default=[], metavar="OPTION=VALUE", help=about)
    add("--because", default="", metavar="TEXT", help="why you believe in the idea, for the report")
    about = f"what is the same on both sides: {matches_in_words()} (default: {Flops.name})"
    add("--match", default=Flops.name, metavar="RULE", help=about)
    add("--again", action="store_true", help="try an idea again that has a verdict, on fresh seeds")
    add("--give-up", action="store_true", help="end an idea that was interrupted, without adopting it")
    about = "expected share of useless ideas among the adopted ones, for a new stream"
    add("--alpha", type=float, metavar="SHARE", help=f"{about} (default: {default.alpha:g})")
    about = f"maximum number of pairs of an idea, {LEAST} to {MOST_PAIRS}, for a new stream"
    add("--most", type=int, metavar="N", help=f"{about} (default: {default.most})")
    add("--budget", metavar="TIME", help="time that all runs of the stream may take together, such as 30m or 8h")
    add("--json", action="store_true", help="print the verdict as one JSON object")


def attempt(options: argparse.Namespace) -> int:
    """Carry out the idea that the options describe; the exit status.

    Raises:
        ValueError: They describe none, or the stream is not what they say.
        OSError: A config cannot be read.
    """
    budget_s = math.inf if options.budget is None else duration(options.budget, "--budget")
    out: Path = options.stream
    first = None if (out / STREAM).exists() else _first(options)
    out.mkdir(parents=True, exist_ok=True)
    if is_locked(out):
        ablate_run.say([f"waiting for another call on {out}"])
    lock = RunLock(out, wait_s=math.inf).acquire()
    try:
        if first is not None and not (out / STREAM).exists():
            begin(out, *first)
        stream = Stream.read(out)
        if stream.run_seconds >= budget_s and not options.give_up:
            used = shown_duration(stream.run_seconds)
            raise ValueError(f"--budget {options.budget} is used up: the runs of {out} took {used}; give more")
        try:
            plan = _plan(stream, options)
        except BaseException:
            if first is not None and not (out / IDEAS).exists():  # a mistake leaves no folder behind
                remove_path(out)
            raise
        return _carry_out(stream, plan, options, budget_s)
    finally:
        lock.release()


def _plan(stream: Stream, options: argparse.Namespace) -> Plan:
    """The plan of the idea: that of one without a verdict, or a new one."""
    unfinished = stream.unfinished
    if options.give_up or not options.vary:
        if unfinished is None:
            problem = "no idea of it was interrupted" if options.give_up or stream.verdicts else "it has no idea"
            raise ValueError(f"{stream.out}: {problem}: give one with --vary OPTION=VALUE")
        return Plan.read(unfinished)
    _refuse_other_stream(stream, options)
    setup = _setup(stream, options)
    asked = asked_of(setup.asked)
    if unfinished is not None:
        plan = Plan.read(unfinished)
        if asked_of(plan.content) != asked:
            advice = f"{PROG} {stream.out} continues it, and with --give-up ends it"
            raise ValueError(f"{unfinished} is another idea, and has no verdict yet: {advice}")
        return plan
    if (before := stream.same_as(asked)) is not None and not options.again:
        where = f"place {before['place']}, {before['verdict']}"
        raise ValueError(f"this idea was tried before ({where}): --again tries it on fresh seeds, at a new place")
    return setup.plan(stream.content["workers"])


def _carry_out(stream: Stream, plan: Plan, options: argparse.Namespace, budget_s: float) -> int:
    """Train pairs until the idea has a verdict, and print it."""
    stopped = "given up" if options.give_up else f"the budget of {options.budget} is used up"
    if not options.give_up:
        try:
            _train(plan, options.workers, budget_s - stream.run_seconds)
        except ValueError as error:
            advice = f"{PROG} {stream.out} tries again, and with --give-up ends the idea"
            reports.mistake("ablate", f"{PROG}: error: {error}; {advice}")
            return FAILED
    verdict = verdict_of(plan, results_of(plan), stopped=stopped)
    store_verdict(stream, plan, verdict)
    if options.json:
        print(json.dumps(verdict), flush=True)
    else:
        for line in lines_of(verdict):
            Console().print(line, soft_wrap=True, highlight=False)
    write_stream_report(Stream.read(stream.out))
    return 0 if verdict["verdict"] == ADOPTED else NOT_ADOPTED


def _train(plan: Plan, workers: int | None, left_s: float) -> None:
    take_needed(plan)
    if not plan.state({run: result.loss for run, result in results_of(plan).items()}).needed:
        return
    gpus = local.gpus() if plan.content["accelerator"] == "cuda" else []

    def is_over(results: Mapping[Any, Result]) -> bool:
        return run_seconds(plan, results) >= left_s

    local.run_workers(plan, local.slots(plan, gpus, workers), until=is_over)


# ---- what is compared


def _first(options: argparse.Namespace) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """What a new stream begins with: the content of ``stream.json``, and the options of the baseline."""
    if options.give_up or not options.vary or not options.baseline:
        known = "give --baseline CONFIG and --vary OPTION=VALUE to begin it"
        raise ValueError(f"{options.stream} holds no {STREAM}: {known}")
    chosen = settings(options.alpha, options.most, options.workers)
    content = {"asked": _asked(options), **chosen}
    from lightning_llm.cli.ablate_arm import read_arm
    from lightning_llm.cli.parsing import check_configs

    ablate_run.say(check_configs(["check", *(f"--config={file}" for file in options.baseline)]))
    base = read_arm(BASELINE, options.baseline, options.of_fit)
    return {**content, "environment": environment(base)}, base.options


def _setup(stream: Stream, options: argparse.Namespace) -> "Setup":
    """The next idea of a stream, read and compared with its baseline as it is now."""
    changes = flat_options({key: value for each in varied(options.vary).values() for key, value in each.items()})
    name = "+".join(varied(options.vary))[:LONGEST_NAME]
    place, adopted = stream.place, len(stream.adopted)
    idea = idea_at(stream.rule, place, adopted, options.because)
    validate(dataclasses.asdict(idea), IDEA, PROG)
    first, files = first_seed(place, adopted, again=options.again), [str(stream.baseline())]
    experiment = experiment_of_idea(
        stream.out, place, files, name, changes, options.match, first=first, most=stream.rule.most
    )
    setup = ablate_run.set_up(experiment, [], more={"idea": dataclasses.asdict(idea)})
    stream.refuse_changed(environment(setup.arms[BASELINE]))
    return setup


def environment(base: Arm) -> dict[str, str]:
    """What all runs of a stream have in common: precision, device, versions, this package, and the text."""
    from lightning_llm.data.mixture import fingerprint
    from lightning_llm.training.environment import environment_of

    common = {name: str(value) for name, value in environment_of(base.trainer).items() if name != "threads"}
    return {**common, "text": fingerprint(base.data.sources)}


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """What a stream begins with: the configs of the baseline with their hashes, and options of ``fit``."""
    files = {file: file_hash(Path(config_path(file))) for file in options.baseline or ()}
    return {"baseline": files, "options": list(options.of_fit)}


def _refuse_other_stream(stream: Stream, options: argparse.Namespace) -> None:
    """Refuse options that are not those that the stream began with; left out, they are."""
    now, before = _asked(options), stream.content["asked"]
    given = [
        ("--baseline", [*now["baseline"].values()], [*before["baseline"].values()]),
        (next(iter(now["options"]), ""), now["options"], before["options"]),
        ("--alpha", options.alpha, stream.content["alpha"]),
        ("--most", options.most, stream.content["most"]),
    ]
    for option, value, begun in given:
        if value not in (None, []) and value != begun:
            raise ValueError(f"{option} is not what {stream.out} began with: leave it out, or begin another stream")
