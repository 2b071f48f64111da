"""From what a user asks of ``fit`` to what a plan holds: variants are read, compared, matched and costed.

1. :func:`read_variants` reads baseline and variants as ``fit`` does (by ``cli.ablate_fit.read_variant``), compares
   them (``fit.comparability``), and makes a :class:`FitDraft`.
2. ``ablate.planning.plan_of`` calls :meth:`FitDraft.resolve` if the folder has no plan. A step of the baseline is
   trained here, for the memory that a run takes and so for its threads; :func:`match_variants` makes costs equal
   (``fit.matching``); :func:`planned_variants` and :func:`identities` are what the plan records.
3. :func:`cost_estimate_of` is what the runs would take, by a few timed steps, if only that is asked.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch

from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.fit.comparability import (
    aligned_options,
    excused_fields,
    kept_lines,
    refuse_incomparable,
    refuse_unseeded,
    refuse_unsuitable,
    shape_from_size,
    unshared,
)
from lightning_llm.ablate.fit.cost import TrainingSteps, flops_of, parameters_of
from lightning_llm.ablate.fit.matching import MATCHING, MAX_STEPS, Matched, facts_of
from lightning_llm.ablate.fit.program import MAIN, Fit
from lightning_llm.ablate.fit.variant import ReadVariant, Variant
from lightning_llm.ablate.matching import MATCHES
from lightning_llm.ablate.names import BASELINE, NULL, titled
from lightning_llm.ablate.options import command_line_of
from lightning_llm.ablate.plan import PlannedVariant, code_hash
from lightning_llm.ablate.planning import Draft, ResolvedDraft
from lightning_llm.ablate.reuse import Identity
from lightning_llm.ablate.slots import runs_at_a_time, threads_for
from lightning_llm.accounting.sizing import SIZE_OPTIONS
from lightning_llm.data.mixture import fingerprint
from lightning_llm.data.validated import LIMIT, is_whole
from lightning_llm.measure.gauges import resident_bytes
from lightning_llm.measure.timer import interleave, num_threads
from lightning_llm.model.initial_scales import one_of_each_kind, scales_of_blocks
from lightning_llm.model.token_order import token_order_lines
from lightning_llm.runs.code import PACKAGE, code_of
from lightning_llm.statistics import pairing
from lightning_llm.training.environment import environment_of
from lightning_llm.training.initial_weights import read_initial_weights
from lightning_llm.training.metrics import BITS, RECALL

TIMED = 10  # steps of the baseline, for the time of its runs
REDRAW = "lightning_llm.ablate.fit.null_variant.RedrawMLP"
TEXTS = ("store", "path", "corpus")  # options of the data that say what it is read from


class CostEstimate(NamedTuple):
    """Time and FLOPs that the runs of an experiment take.

    Attributes:
        parameters: Of the baseline.
        steps: Of a run of the baseline.
        flops: Counted, of such a run; ``None``: it has parts that cannot be counted.
        runs: At most; with tuning more where its grid grows.
        seconds: Of all training steps, without validation.
        is_tuned: Whether some of the runs tune.
    """

    parameters: int
    steps: int
    flops: int | None
    runs: int
    seconds: float
    is_tuned: bool = False


class Reader:
    """Reads the variants of an experiment as ``fit`` does.

    Args:
        experiment: What a user asks for.
        arguments: Further options of ``fit``, for all runs.
        read: Reads a variant; a ValueError says what is wrong with it.
    """

    def __init__(self, experiment: Experiment, arguments: Sequence[str], read: ReadVariant) -> None:
        self._baseline = experiment.baseline
        self._options = command_line_of(experiment.options)
        self._arguments = arguments
        self._read = read

    def __call__(self, name: str, options: Mapping[str, Any]) -> Variant:
        """A variant with these options of its own."""
        return self._read(name, self._baseline, [*self._options, *self._arguments, *command_line_of(options)])

    def of(self, experiment: Experiment) -> "Reader":
        """A reader of another experiment, with the same arguments."""
        return Reader(experiment, self._arguments, self._read)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitDraft(Draft):
    """An experiment with ``fit``, whose variants were read and compared.

    Attributes:
        variants: The baseline and the variants, by name.
        aligned: Options that let some of them validate the same windows as the others.
        reader: What has read them.
        code_of_baseline: The hash of the code of the baseline alone.
    """

    variants: dict[str, Variant]
    aligned: dict[str, dict[str, Any]]
    reader: Reader
    code_of_baseline: str

    @property
    def baseline(self) -> Variant:
        """The baseline."""
        return self.variants[BASELINE]

    def moved(self, experiment: Experiment) -> "FitDraft":
        """The draft of the same experiment in another folder, with the same configs at other paths."""
        return dataclasses.replace(self, experiment=experiment, reader=self.reader.of(experiment))

    @property
    def notes(self) -> list[str]:
        """Lines about what variants have kept of the baseline's, and about custom parts and the order of tokens."""
        lines = [line for variant in self.variants.values() for line in kept_lines(self.baseline, variant)]
        for name, variant in self.variants.items():
            config = variant.architecture
            if config is not None and config.custom_parts:
                blocks = one_of_each_kind(config, self.experiment.first_seed)
                lines += [f"{titled(name)}: {line}" for line in token_order_lines(blocks, config)]
        return lines

    def resolve(self, workers: int | None) -> ResolvedDraft:
        """Match the variants, and say what the plan holds of each."""
        base = self.baseline
        accelerator = base.trainer.strategy.root_device.type
        run_bytes = TrainingSteps(base).run_bytes() if base.is_known else 2 * resident_bytes()
        threads = threads_for(accelerator, torch.cuda.device_count(), run_bytes, workers)
        variants, matched = match_variants(self.experiment, self.variants, self.reader, threads, self.aligned)
        configs = configs_of(variants)
        return ResolvedDraft(
            threads=threads,
            accelerator=accelerator,
            text=_text(base.options["data"]),
            validation=_validation(base),
            variants=planned_variants(self.experiment, variants, matched),
            identities=identities(variants, configs, threads, self.code_of_baseline),
            configs=configs,
        )

    @property
    def compute(self) -> float:
        """Counted FLOPs of a run of the baseline, for a ladder.

        Raises:
            ValueError: They cannot be counted, or a variant changes what ``size`` sets.
        """
        base = self.baseline
        if (flops := flops_of(base)) is None:
            raise ValueError("the baseline has parts whose FLOPs cannot be counted: a ladder needs the FLOPs of a run")
        size_options = base.trainer.sizing.options
        for name, options in self.experiment.variants.items():
            if changed := [option for option in options if option in size_options]:
                raise ValueError(f"{name} changes {changed[0]}, which size sets at each size: leave it out")
        return float(flops * base.steps)

    def cost_estimate(self, workers: int | None) -> CostEstimate:
        """Time and FLOPs of the runs: counted, and from a few timed steps of the baseline.

        Raises:
            ValueError: Model or data are of a class whose steps are not timed.
        """
        if not self.baseline.is_known:
            raise ValueError("--dry-run times steps of a LanguageModel on token data: the baseline is another class")
        runs = self.experiment.most_runs()
        return cost_estimate_of(self.baseline, runs, workers, is_tuned=self.experiment.tune is not None)

    def tuned_values(self, option: str) -> dict[str, float]:
        """The value that each variant has of an option."""
        return {name: tuned_value(variant, option) for name, variant in self.variants.items()}


def read_variants(experiment: Experiment, arguments: Sequence[str], read: ReadVariant) -> FitDraft:
    """Read the baseline and all variants, and compare them.

    Args:
        experiment: What a user asks for.
        arguments: Further options of ``fit``, for all runs.
        read: Reads a variant; a ValueError says what is wrong with it.

    Raises:
        ValueError: A variant cannot run, equals another, or cannot be compared with the baseline.
    """
    reader = Reader(experiment, arguments, read)
    metrics = (experiment.metric, *experiment.secondary)
    base = reader(BASELINE, {})
    refuse_unsuitable(base, metrics, experiment.seed_option)
    checked_values: set[float] = set()
    _check_grid(experiment, base, reader, checked_values)
    # before the modules of a variant are imported: a change of these does not change the baseline
    code_of_baseline = code_hash(_code_of({BASELINE: base}))
    variants = {BASELINE: base}
    for name, options in experiment.variants.items():
        variant = reader(name, options)
        for other in variants.values():
            if variant.options == other.options:
                same = ", ".join(options) or "nothing"
                advice = "give other factors" if experiment.factors else "leave it out"
                raise ValueError(f"{name} equals {titled(other.name)}, which has the same {same}: {advice}")
        refuse_unseeded(variant, experiment.seed_option)
        refuse_incomparable(base, variant, metrics)
        _check_grid(experiment, variant, reader, checked_values)
        variants[name] = variant
    aligned = aligned_options(variants)
    for name, own in aligned.items():
        variants[name] = reader(name, {**experiment.variants.get(name, {}), **own})
    return FitDraft(
        program=Fit.name,
        experiment=experiment,
        options={name: variant.options for name, variant in variants.items()},
        code=_code_of(variants),
        variants=variants,
        aligned=aligned,
        reader=reader,
        code_of_baseline=code_of_baseline,
    )


def _code_of(variants: Mapping[str, Variant]) -> dict[str, Path]:
    """The files that runs of these variants execute."""
    return {MAIN: PACKAGE / "__main__.py", **code_of({name: each.options for name, each in variants.items()})}


def _check_grid(experiment: Experiment, variant: Variant, reader: Reader, checked_values: set[float]) -> None:
    """Let ``fit`` read a variant with the lowest and the highest value of the option that is tuned."""
    tune = experiment.tune
    if tune is None or (value := tuned_value(variant, tune.option)) in checked_values:
        return
    checked_values.add(value)
    options = experiment.variants.get(variant.name, {})
    for factor in (tune.factors[0], tune.factors[-1]):
        try:
            reader(variant.name, {**options, tune.option: value * factor})
        except ValueError as error:
            raise ValueError(f"tune.factors: {factor:g} times {value:g} is no value: {error}") from None


def match_variants(
    experiment: Experiment,
    variants: Mapping[str, Variant],
    reader: Reader,
    threads: int,
    aligned: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> tuple[dict[str, Variant], dict[str, Matched]]:
    """The variants with the options that match them with the baseline, and what matches each of them.

    Args:
        experiment: What a user asks for.
        variants: As they were read, with the baseline.
        reader: What has read them.
        threads: Of the runs.
        aligned: Further options of theirs, as of ``comparability.aligned_options``.

    Raises:
        ValueError: One of them cannot be matched.
    """
    rule = MATCHES[experiment.match]
    matched: dict[str, Matched] = {BASELINE: Matched()}
    found = dict(variants)
    with num_threads(threads if rule.is_timed else torch.get_num_threads()):
        for name, options in experiment.variants.items():
            matched[name] = MATCHING[rule.name](variants[BASELINE], variants[name], experiment.solved)
            if MAX_STEPS in options:  # its own steps of the schedule are in terms of these, and stay
                own = [_plain(option) for option in options]
                kept = {option: value for option, value in matched[name].options.items() if not _is_in(option, own)}
                matched[name] = dataclasses.replace(matched[name], options=kept)
            new_options = matched[name].options
            if not new_options:
                continue
            own_options = {option: value for option, value in options.items() if option not in new_options}
            own_options |= aligned.get(name, {})
            if rule.is_solved and (sizing := variants[name].trainer.sizing) is not None:
                # size would work around the solved option, with another shape: the options stay as it set them
                own_options |= {**sizing.options, **dict.fromkeys(SIZE_OPTIONS)}
            found[name] = reader(name, {**own_options, **new_options})  # they come last: later arguments override
    return found, matched


def _plain(option: str) -> str:
    """An option of a class, as it is written without ``init_args``."""
    return option.replace(".init_args.", ".")


def _is_in(option: str, own: Sequence[str]) -> bool:
    """Whether a variant gives an option, or the class that it belongs to."""
    plain = _plain(option)
    return any(plain == each or plain.startswith(f"{each}.") for each in own)


def planned_variants(
    experiment: Experiment, variants: Mapping[str, Variant], matched: Mapping[str, Matched]
) -> dict[str, PlannedVariant]:
    """The plan's record of each variant; the null variant is the baseline."""
    base = variants[BASELINE]
    base_facts = {"steps": base.steps, **facts_of(base, matched[BASELINE])}
    planned: dict[str, PlannedVariant] = {}
    for name, variant in variants.items():
        facts = facts_of(variant, matched[name])
        planned[name] = PlannedVariant(
            steps=variant.steps,
            tokenizer=str(variant.data.store.tokenizer_sha256) if variant.has_token_data else "",
            facts=facts,
            matched=matched[name].options,
            solved=matched[name].options.get(experiment.solved or ""),
            ratio=MATCHES[experiment.match].closeness(base_facts, {"steps": variant.steps, **facts}),
            tuned=tuned_value(variant, experiment.tune.option) if experiment.tune else None,
            chance=chance_of(variant, experiment.metric),
            scales=_scales(variant, experiment.first_seed),
            excused=excused_fields(base, variant, experiment.variants.get(name, {})),
            unshared="; ".join(
                filter(None, (unshared(base, variant), _other_steps(base, variant), shape_from_size(base, variant)))
            ),
            is_known=variant.is_known,
        )
    if base.architecture is None:  # nothing is known of its parts, to draw them again
        return planned
    return {**planned, NULL: msgspec.structs.replace(planned[BASELINE], excused=(pairing.NULL_VALUES,))}


def _other_steps(base: Variant, variant: Variant) -> str:
    """Clause about the steps of a variant that trains with other batches, for as many tokens or FLOPs."""
    if variant.steps == base.steps or not unshared(base, variant):
        return ""
    return f"it trains {variant.steps} steps in place of {base.steps}, at the learning rate that its options give"


def configs_of(variants: Mapping[str, Variant]) -> dict[str, dict[str, Any]]:
    """The options of each variant; the null variant's are the baseline's with a callback."""
    configs = {name: variant.options for name, variant in variants.items()}
    if variants[BASELINE].architecture is None:
        return configs
    trainer = configs[BASELINE]["trainer"]
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    redrawing = {**trainer, "callbacks": [*callbacks, {"class_path": REDRAW}]}
    return {**configs, NULL: {**configs[BASELINE], "trainer": redrawing}}


def identities(
    variants: Mapping[str, Variant], configs: Mapping[str, Any], threads: int, code_of_baseline: str
) -> dict[str, Identity]:
    """The identity of each variant's runs whose data are known; the null variant uses what the baseline uses.

    Args:
        variants: The baseline and the variants, matched.
        configs: As of :func:`configs_of`.
        threads: Of the runs.
        code_of_baseline: The hash of the code of the baseline alone.
    """
    weights = {source: read_initial_weights(source).fingerprint if source else "" for source in _sources(variants)}
    found: dict[str, Identity] = {}
    for name, options in configs.items():
        variant = variants.get(name, variants[BASELINE])
        if not variant.has_token_data:
            continue  # what its data read is not known, nor whether it has changed
        is_own = name in variants and name != BASELINE
        found[name] = Identity(
            options=options,
            code=code_hash(_code_of({name: variant})) if is_own else code_of_baseline,
            data=fingerprint(variant.data.sources),
            weights=weights[variant.initial_weights],
            environment={**environment_of(variant.trainer), "threads": threads},
        )
    return found


def _sources(variants: Mapping[str, Variant]) -> set[str]:
    return {variant.initial_weights for variant in variants.values()}


def _scales(variant: Variant, seed: int) -> dict[str, tuple[float, int]] | None:
    """The scales of the initial weights; ``None`` if these come from a file, which all variants share."""
    if variant.initial_weights or variant.architecture is None:
        return None
    scales = scales_of_blocks(one_of_each_kind(variant.architecture, seed), variant.architecture)
    return {role: (scale.rms, scale.elements) for role, scale in scales.items()}


def _text(data: Mapping[str, Any]) -> str:
    """The text that all variants train on; empty: not known."""
    return str(next((data[name] for name in TEXTS if data.get(name)), ", ".join(data.get("mixture") or ())))


def _validation(base: Variant) -> str:
    """How much of the validation text each run's metric is of."""
    limit = base.options["trainer"].get(LIMIT.rpartition(".")[2])
    if is_whole(limit):
        return "the whole validation text"
    rows = base.data.global_batch_size if base.has_token_data else None
    amount = f"{limit} batches" if rows is None else f"{limit} × {rows} windows"
    amount = amount if isinstance(limit, int) else f"{limit:.0%}"
    return f"{amount} of the validation text"


def chance_of(variant: Variant, metric: str) -> float | None:
    """The metric of a model that gives every token the same probability; ``None`` if it is not known or no bound."""
    if metric in RECALL:  # a model may be worse on one part of the tokens and train well
        return None
    vocab_size = getattr(variant.architecture, "vocab_size", None)
    if vocab_size is None:
        return None
    nats = math.log(vocab_size)
    if metric != BITS:
        return nats
    size = variant.of_data("bytes_per_token")
    return None if size is None else nats / math.log(2) / size


def tuned_value(variant: Variant, option: str) -> float:
    """The value that a variant has of the option that is tuned.

    Raises:
        ValueError: It is no number above 0.
    """
    value: Any = variant.options
    for word in option.split("."):
        section = value if isinstance(value, dict) else {}
        value = section.get(word, (section.get("init_args") or {}).get(word))
    if type(value) not in (int, float) or not value > 0:
        raise ValueError(f"tune.option {option} of {titled(variant.name)} is {value!r}, expected a number above 0")
    return float(value)


def cost_estimate_of(variant: Variant, runs: int, workers: int | None, *, is_tuned: bool = False) -> CostEstimate:
    """Time and FLOPs that the runs of an experiment take.

    Args:
        variant: The baseline.
        runs: How many.
        workers: The most runs at a time that the user wants.
        is_tuned: Whether some of them tune.
    """
    accelerator = variant.trainer.strategy.root_device.type
    steps = TrainingSteps(variant)
    gpus = torch.cuda.device_count()
    threads = threads_for(accelerator, gpus, steps.run_bytes(), workers)
    with num_threads(threads):
        timing = interleave({"baseline": steps.step}, rounds=TIMED, warmup=2, device=steps.device)["baseline"]
    flops = flops_of(variant)
    return CostEstimate(
        parameters=parameters_of(variant.architecture),
        steps=variant.steps,
        flops=None if flops is None else flops * variant.steps,
        runs=runs,
        seconds=timing.median * variant.steps * runs / runs_at_a_time(threads, accelerator, gpus, workers),
        is_tuned=is_tuned,
    )
