"""Finished runs of earlier experiments that a new one uses, in place of training the same again. No torch.

What decides a run's bits has a hash, its *identity*: its options, the code, text and weights that they use, and what it
runs on. A plan holds that of each variant. A new plan lists the finished runs of experiments in the same folder whose
identity is that of its baseline or of its null variant; whoever needs one of them links its files. Runs of variants are
listed only on request: a variant that is compared because of them has no fresh evidence.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lightning_llm.ablate import claims
from lightning_llm.ablate.history import siblings
from lightning_llm.ablate.names import BASELINE, NULL
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import REUSED_FROM, RUNS, Plan, Replay, Reused, digest
from lightning_llm.ablate.program import Program
from lightning_llm.ablate.programs import program_of
from lightning_llm.ablate.results import load_experiment, losses_of, results_of
from lightning_llm.io.atomic import atomic_path, link_path, write_text
from lightning_llm.runs.lock import LOCK
from lightning_llm.statistics.pairing import executed_otherwise

REUSES = ("baseline", "variants", "none")


class Identity(NamedTuple):
    """The facts that decide the bits of a variant's runs, besides their seed.

    Attributes:
        options: Of its program, resolved.
        code: The hash of the code that they use.
        data: The fingerprint of the token stores.
        weights: That of ``model.init_from``; empty: there are none.
        environment: Precision, threads, device and versions, as ``summary.json`` records them.
    """

    options: Mapping[str, Any]
    code: str
    data: str
    weights: str
    environment: Mapping[str, Any]

    @property
    def hash(self) -> str:
        """The SHA-256 of all of it."""
        return digest(self._asdict())


def reusable(
    out: Path, identities: Mapping[str, Identity], reuse: str, *, first_seed: int, tuned: str | None = None
) -> Reused:
    """The finished runs that a new plan may use.

    Args:
        out: The folder of the new experiment.
        identities: Of its variants; none for those whose runs are never reused.
        reuse: One of ``REUSES``.
        first_seed: That of the new experiment: where it is reused, what the same again has shown is known too.
        tuned: The option that is tuned, if one is.
    """
    runs: dict[str, str] = {}
    replays: dict[str, Replay] = {}
    first = RunKey(BASELINE, first_seed)
    wanted = [name for name in identities if reuse != "baseline" or name in (BASELINE, NULL)]
    folders = [] if reuse == "none" else siblings(out)
    for folder in folders:
        with suppress(OSError, ValueError):  # an experiment that is damaged, or of an earlier version
            names = dict.fromkeys(_finished(Plan.read(folder), identities, wanted, tuned), folder.name)
            runs = {**names, **runs}
            if str(first) in names and (replay := load_experiment(folder).replay):
                replays[folder.name] = Replay(replay.difference, replay.source or folder.name)
    has_variants = any(run.rpartition(",seed=")[0].partition(",")[0] not in (BASELINE, NULL) for run in runs)
    return Reused(runs=runs, replay=replays.get(runs.get(str(first), "")), variants=has_variants)


def _finished(plan: Plan, identities: Mapping[str, Identity], wanted: list[str], tuned: str | None) -> Iterator[str]:
    """The finished runs of an experiment that are runs of these variants."""
    program = program_of(plan)
    is_tuned_alike = plan.tune is not None and plan.tune.option == tuned
    for run, folder in plan.run_folders():
        name = plan.variant_of(run.name)
        if name is None or name not in wanted or (run.name != name and not is_tuned_alike):
            continue
        if plan.variants[name].identity != identities[name].hash:
            continue
        with suppress(OSError, ValueError):
            if _is_reusable(program, folder, identities[name].environment, plan.experiment.metric):
                yield folder.name


def _is_reusable(program: Program, folder: Path, environment: Mapping[str, Any], metric: str) -> bool:
    """Whether a run has finished, and was in this environment from its first step to its last."""
    ended = None if folder.is_symlink() else program.result(folder)
    if ended is None or ended.failure:
        return False
    return not executed_otherwise(ended.summary, environment) and ended.summary.get(metric) is not None


def link_needed(plan: Plan) -> None:
    """Link every run that the experiment needs and another one has."""
    has_linked = True
    while has_linked:  # with these, the next look may be reached
        needed = plan.state(losses_of(results_of(plan))).needed
        has_linked = sum(link_unclaimed(plan, run) for run in needed) > 0


def link_unclaimed(plan: Plan, run: RunKey) -> bool:
    """Link the files of a run that another experiment has and nobody has begun here. Whether that was done."""
    claim = claims.take(plan.out, str(run)) if str(run) in plan.record.reused.runs else None
    if claim is None:
        return False
    try:
        return link(plan, run)
    finally:
        claim.give_up()


def link(plan: Plan, run: RunKey) -> bool:
    """Link the files of a run, for who has the claim on it. Whether that was done: another experiment has it."""
    source = plan.record.reused.runs.get(str(run))
    folder = plan.run_dir(run)
    if source is None or folder.exists():
        return False
    path = plan.out.parent / source / RUNS / str(run)
    ended = None if path.is_symlink() else program_of(plan).result(path)
    if ended is None or ended.failure:
        return False  # removed since the plan was frozen: it is trained again
    with atomic_path(folder) as temporary:
        link_path(path, temporary)
        (temporary / LOCK).unlink(missing_ok=True)  # a lock on one name of a file would hold for the other
        write_text(temporary / REUSED_FROM, f"{source}\n")
    return True
