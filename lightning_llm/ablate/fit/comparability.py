"""Checks that variants can be compared: rejects what makes losses incomparable, or leaves a run without one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_llm.ablate.fit.variant import Variant
from lightning_llm.ablate.matching import ARCHITECTURE_PREFIX
from lightning_llm.ablate.names import BASELINE
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.data.validated import LIMIT, is_whole
from lightning_llm.io.trust import CLASS_PATH, INIT_ARGS
from lightning_llm.runs.options import ClassPath, shown_option
from lightning_llm.statistics import pairing
from lightning_llm.training.metrics import BITS

# Of the data: may change, since all are validated on the same windows, and ``match`` makes the tokens equal
MIXTURE, CONTEXT, BATCH = "mixture", "context_length", "global_batch_size"  # of a mixture, the weights
EVAL_CONTEXT = "data.eval_context_length"
FREE_DATA = ("num_workers", "micro_batch_size", "eval_batch_size", "predict_prompts")  # change no batch
TEXT_DATA = ("tokenizer", "vocab_size", "store")  # may change if losses are per byte of the same text
# Of the trainer: what a pair trains and validates on
PAIRED = ("max_epochs", "max_time", "limit_train_batches", "limit_val_batches", "overfit_batches")
OTHER_VALUES = "a pair starts from the same values: give it to the baseline, or leave it out"
OTHER_CAPTURE = "times of a captured and of another step are not compared: give it to the baseline, or leave it out"
OTHER_BATCHES = "a pair needs the same batches and validation text: leave it out"
SETTINGS = {"trainer.precision": "precision", "trainer.tf32": "tf32"}  # may change, with its field of a summary
KEEPING = ("optimizer", "schedule")  # of the model: another class keeps the arguments that it also has
OF_INITIAL_VALUES = ("initializer_range", "mup")  # of the architecture


def refuse_unsuitable(base: Variant, metrics: Sequence[str]) -> None:
    """Refuse a baseline whose runs have no result to compare.

    Raises:
        ValueError: It does not validate, writes no run, or has no known length.
    """
    trainer = base.options["trainer"]
    if not isinstance(base.data, TokenDataModule):
        class_path = f"{type(base.data).__module__}.{type(base.data).__qualname__}"
        raise ValueError(f"the baseline has data.class_path {class_path}: pairs need the data.seed of TokenDataModule")
    if trainer.get("limit_val_batches") == 0:
        raise ValueError("the baseline has trainer.limit_val_batches 0: there is no loss to compare")
    if switch := next((name for name in ("fast_dev_run", "barebones") if trainer.get(name)), None):
        raise ValueError(f"the baseline has trainer.{switch}, which writes no run: leave it out")
    if BITS in metrics and base.data.bytes_per_token is None:
        raise ValueError(f"metric {BITS}: the token files are raw, so their bytes are not known: use val_loss")
    _ = base.steps  # it is known


def refuse_incomparable(base: Variant, variant: Variant, metrics: Sequence[str]) -> None:
    """Refuse a variant whose runs would be no pairs with those of the baseline.

    Raises:
        ValueError: It changes the text, its validation, or the scale of the initial values.
    """
    if first := next(_changes(base, variant, metrics), None):
        raise ValueError(f"{variant.name} changes {': '.join(first)}")


def _changes(base: Variant, variant: Variant, metrics: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each option that makes the losses incomparable, and what to do about it."""
    for name in OF_INITIAL_VALUES:
        if getattr(base.architecture, name) != getattr(variant.architecture, name):
            yield f"{ARCHITECTURE_PREFIX}{name}", OTHER_VALUES
    base_data, data = base.options["data"], variant.options["data"]
    names = sorted((base_data.keys() | data.keys()) - set(FREE_DATA))  # either may leave one out
    changed = [name for name in names if base_data.get(name) != data.get(name)]
    changed = [name for name in changed if name not in (CONTEXT, BATCH)]
    if _has_other_shares(base, variant):
        changed.remove(MIXTURE)
    lengths = sorted((base.data.context_length, variant.data.context_length))
    if lengths[1] % lengths[0]:
        given = f"{variant.data.context_length}, and the baseline has {base.data.context_length}"
        yield f"data.{CONTEXT} to {given}", "one must be a multiple of the other, so that windows are aligned"
    has_bytes = None not in (base.data.bytes_per_token, variant.data.bytes_per_token)
    advice = OTHER_BATCHES
    if set(changed) <= set(TEXT_DATA) and has_bytes and _text_of(base) == _text_of(variant):
        is_part = bool(changed) and not is_whole(base.options["trainer"].get("limit_val_batches"))
        changed = [] if {*metrics} == {BITS} and not is_part else changed
        advice = f"losses per token cannot be compared: set metric: {BITS}, which the same text allows"
        if is_part:
            advice = f"another tokenizer has other windows: set {LIMIT} to 1.0, and metric: {BITS}"
    yield from ((f"data.{name}", advice) for name in changed)
    for name in PAIRED:
        if base.options["trainer"].get(name) != variant.options["trainer"].get(name):
            yield f"trainer.{name}", OTHER_BATCHES
    if bool(base.options["trainer"].get("capture")) != bool(variant.options["trainer"].get("capture")):
        yield "trainer.capture", OTHER_CAPTURE


def _has_other_shares(base: Variant, variant: Variant) -> bool:
    """Whether both mix the same stores, in the same order, with other weights."""
    mixture, other = (each.options["data"].get(MIXTURE) or {} for each in (base, variant))
    return list(mixture) == list(other) and mixture != other


def excused_fields(base: Variant, variant: Variant, options: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of summaries in which a variant's runs may differ from the baseline's.

    Args:
        base: The baseline.
        variant: The variant.
        options: Those that it changes.
    """
    excused = [field for option, field in SETTINGS.items() if option in options]
    if base.data.store.tokenizer_sha256 != variant.data.store.tokenizer_sha256:
        excused += [pairing.BATCHES, pairing.VALIDATION_BATCHES]
    elif not has_same_batches(base, variant):
        excused.append(pairing.BATCHES)
    return tuple(excused)


def has_same_batches(base: Variant, variant: Variant) -> bool:
    """Whether a pair trains on the same batches, as far as the options say."""
    sizes = [(each.data.context_length, each.data.global_batch_size) for each in (base, variant)]
    return sizes[0] == sizes[1] and not _has_other_shares(base, variant) and not _has_other_tokens(base, variant)


def _has_other_tokens(base: Variant, variant: Variant) -> bool:
    return bool(base.data.store.tokenizer_sha256 != variant.data.store.tokenizer_sha256)


def aligned_options(variants: Mapping[str, Variant]) -> dict[str, dict[str, Any]]:
    """Options that let all variants validate the same windows: as long as the shortest context, and as many.

    Args:
        variants: As they were read, with the baseline; one of them may be given its options again.

    Returns:
        Those of each variant that needs some.
    """
    base = variants[BASELINE]
    found: dict[str, dict[str, Any]] = {}
    if len({variant.data.context_length for variant in variants.values()}) > 1:
        shortest = min(variant.data.eval_length for variant in variants.values())
        found = {name: {EVAL_CONTEXT: shortest} for name, each in variants.items() if each.data.eval_length != shortest}
    limit = base.options["trainer"].get(LIMIT.rpartition(".")[2])
    if isinstance(limit, int):  # it counts windows by the batch
        for name, variant in variants.items():
            if variant.data.global_batch_size != base.data.global_batch_size:
                found.setdefault(name, {})[LIMIT] = _as_many(limit * base.data.global_batch_size, variant, variants)
    return found


def _as_many(count: int, variant: Variant, variants: Mapping[str, Variant]) -> int | float:
    """The limit under which a variant validates so many windows, once these have the length of the shortest."""
    rows: int = variant.data.global_batch_size
    batches, rest = divmod(count, rows)
    if not rest:
        return batches
    shortest = min(variants.values(), key=lambda each: each.data.eval_length)
    windows: int = shortest.data.validated(shortest.trainer).windows
    return min(1.0, count / windows)


def unshared(base: Variant, variant: Variant) -> str:
    """What the pairs of a variant do not share, because of what it changes; empty: all that pairs share.

    Whoever trains with batches of another size may need another learning rate, which nothing here chooses.
    """
    if _has_other_tokens(base, variant):
        return "its pairs share the validation text, and neither its tokens nor training batches"
    if variant.data.context_length != base.data.context_length:
        windows = f"the validation windows, of {variant.data.eval_length} tokens"
        contexts = f"contexts of {variant.data.context_length} tokens in place of {base.data.context_length}"
        return f"its pairs share {windows}, and no training batches: {contexts}"
    batch = ""
    if variant.data.global_batch_size != base.data.global_batch_size:
        batch = f"batches of {variant.data.global_batch_size} windows in place of {base.data.global_batch_size}"
    if _has_other_shares(base, variant):
        return f"its pairs share the validation windows, and no training batches{f': {batch}' if batch else ''}"
    return f"its pairs share the validation windows and the order of the training windows, in {batch}" if batch else ""


def kept_lines(base: Variant, variant: Variant) -> list[str]:
    """Lines about what a variant with other data, another optimizer or schedule shares with the baseline.

    The parser keeps every argument that both classes have, such as the learning rate, unless the variant sets it.
    """
    lines = []
    if line := unshared(base, variant):
        lines.append(f"{variant.name}: {line}")
    for option in KEEPING:
        (old_class, old), (new_class, new) = (_class_of(each.options["model"].get(option)) for each in (base, variant))
        if not old_class or not new_class or old_class.path == new_class.path:
            continue
        kept = [f"{name} {shown_option(value)}" for name, value in new.items() if value and old.get(name) == value]
        what = f"{', '.join(kept) or 'no argument'} of the baseline's {old_class}"
        others = f"its other arguments are what the variant sets, or {new_class}'s defaults"
        lines.append(f"{variant.name}: model.{option} {new_class} keeps {what}; {others}")
    return lines


def _class_of(value: Any) -> tuple[ClassPath | None, Mapping[str, Any]]:
    """The class of an option, and its arguments."""
    if not isinstance(value, dict) or not isinstance(value.get(CLASS_PATH), str):
        return None, {}
    return ClassPath(value[CLASS_PATH]), value.get(INIT_ARGS) or {}


def _text_of(variant: Variant) -> list[tuple[int, int]]:
    """Bytes and documents of the validation text."""
    return [(source.store.splits["val"].bytes, source.store.splits["val"].documents) for source in variant.data.sources]
