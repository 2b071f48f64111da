"""Checks that variants can be compared: rejects what makes losses incomparable, or leaves a run without one."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_llm.ablate.fit.variant import Variant
from lightning_llm.ablate.matching import ARCHITECTURE_PREFIX
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.options import SEED_OPTION
from lightning_llm.data.validated import LIMIT, is_whole
from lightning_llm.io.trust import CLASS_PATH, INIT_ARGS, path_of
from lightning_llm.runs.options import ClassPath, shown_option
from lightning_llm.statistics import pairing
from lightning_llm.training.metrics import BITS, VAL_LOSS

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
OTHER_TEXT = (
    "a pair validates the same text: prepare both texts, and let data.mixture weigh their stores, such as {A: 1, B: 0} "
    "in the baseline and {A: 0, B: 1} here"
)
SETTINGS = {"trainer.precision": "precision", "trainer.tf32": "tf32"}  # may change, with its field of a summary
KEEPING = ("optimizer", "schedule")  # of the model: another class keeps the arguments that it also has
OF_INITIAL_VALUES = ("initializer_range", "mup")  # of the architecture


def refuse_unsuitable(base: Variant, metrics: Sequence[str], seed_option: str = SEED_OPTION) -> None:
    """Refuse a baseline whose runs have no result to compare.

    Args:
        base: The baseline.
        metrics: That are compared.
        seed_option: The option that seeds its data.

    Raises:
        ValueError: It does not validate, writes no run, or has no known length.
    """
    trainer = base.options["trainer"]
    refuse_unseeded(base, seed_option)
    if base.architecture is None and not is_overridden("validation_step", base.model):
        raise ValueError(
            f"model.class_path {path_of(type(base.model))} has no validation_step, which logs {metrics[0]}: add it"
        )
    if base.architecture is None and (other := next((name for name in metrics if name != VAL_LOSS), None)):
        raise ValueError(f"metric {other} is one of LanguageModel: a plain LightningModule is compared by {VAL_LOSS}")
    if trainer.get("limit_val_batches") == 0:
        raise ValueError("the baseline has trainer.limit_val_batches 0: there is no loss to compare")
    if switch := next((name for name in ("fast_dev_run", "barebones") if trainer.get(name)), None):
        raise ValueError(f"the baseline has trainer.{switch}, which writes no run: leave it out")
    if BITS in metrics and base.of_data("bytes_per_token") is None:
        raise ValueError(f"metric {BITS}: the token files are raw, so their bytes are not known: use val_loss")
    _ = base.steps  # it is known


def refuse_unseeded(variant: Variant, seed_option: str) -> None:
    """Refuse data of another class whose order no option seeds.

    Raises:
        ValueError: The class has no argument of this name.
    """
    section, _, name = seed_option.partition(".")
    owner = variant.data if section == "data" else variant.model
    arguments = inspect.signature(type(owner)).parameters
    takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
    if not (variant.has_token_data and seed_option == SEED_OPTION) and name not in arguments and not takes_any:
        advice = "add it, or name the argument that seeds it, with seeds: {option: data.NAME} or --seed-option"
        raise ValueError(
            f"{section}.class_path {path_of(type(owner))} has no argument {name}, which makes pairs: {advice}"
        )


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
        if getattr(base.architecture, name, None) != getattr(variant.architecture, name, None):
            yield f"{ARCHITECTURE_PREFIX}{name}", OTHER_VALUES
    if base.has_token_data and variant.has_token_data:
        yield from _changes_of_data(base, variant, metrics)
    for name in PAIRED:
        if base.options["trainer"].get(name) != variant.options["trainer"].get(name):
            yield f"trainer.{name}", OTHER_BATCHES
    if bool(base.options["trainer"].get("capture")) != bool(variant.options["trainer"].get("capture")):
        yield "trainer.capture", OTHER_CAPTURE


def _changes_of_data(base: Variant, variant: Variant, metrics: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each option of token data; of another class, hashes of the validation batches say what can be compared."""
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
    if "path" in changed or "corpus" in changed or "store" in changed:
        advice = OTHER_TEXT
    if set(changed) <= set(TEXT_DATA) and has_bytes and _text_of(base) == _text_of(variant):
        is_part = bool(changed) and not is_whole(base.options["trainer"].get("limit_val_batches"))
        changed = [] if {*metrics} == {BITS} and not is_part else changed
        advice = f"losses per token cannot be compared: set metric: {BITS}, which the same text allows"
        if is_part:
            advice = f"another tokenizer has other windows: set {LIMIT} to 1.0, and metric: {BITS}"
    yield from ((f"data.{name}", advice) for name in changed)


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
    is_plain = base.architecture is None or variant.architecture is None
    if is_plain and base.options["model"] != variant.options["model"]:  # drawn one after another, not by name
        excused.append(pairing.INITIAL_VALUES)
    if not (base.has_token_data and variant.has_token_data):
        return (*excused, *([pairing.BATCHES] if base.options["data"] != variant.options["data"] else []))
    if base.data.store.tokenizer_sha256 != variant.data.store.tokenizer_sha256:
        excused += [pairing.BATCHES, pairing.VALIDATION_BATCHES]
    elif not _has_same_batches(base, variant):
        excused.append(pairing.BATCHES)
    return tuple(excused)


def _has_same_batches(base: Variant, variant: Variant) -> bool:
    """Whether a pair trains on the same batches, as far as the options say."""
    sizes = [(each.data.context_length, each.data.global_batch_size) for each in (base, variant)]
    return sizes[0] == sizes[1] and not _has_other_shares(base, variant) and not _has_other_tokens(base, variant)


def shape_from_size(base: Variant, variant: Variant) -> str:
    """A clause about a variant that ``size`` gave another shape than the baseline; empty: it did not.

    It chooses the shape whose parameters come closest, and makes a part smaller by ``intermediate_size`` where it can.
    """
    if variant.trainer.sizing is None or base.architecture is None or variant.architecture is None:
        return ""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    shapes = [[f"{name} {getattr(each.architecture, name)}" for name in names] for each in (base, variant)]
    if shapes[0] == shapes[1]:
        return ""
    of_base, own = (", ".join(shape) for shape in shapes)
    return f"size chose {own} for it, and {of_base} for the baseline, so they differ in more than the change"


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
    variants = {name: variant for name, variant in variants.items() if variant.has_token_data}
    if BASELINE not in variants:
        return found
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
    """Clause about parts of the data that the pairs of a variant do not share; empty: they share all of it.

    Whoever trains with batches of another size may need another learning rate, which nothing here chooses.
    """
    if not (base.has_token_data and variant.has_token_data):
        return ""  # the hashes of batches say it
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
    tokens = [each.of_data("tokens_per_step") for each in (base, variant)]
    if None in tokens and base.options["data"] != variant.options["data"]:
        lines.append(f"{variant.name}: its data do not say tokens_per_step, so it gets as many steps, of any size")
    lines += [f"{variant.name}: {line}" for line in (unshared(base, variant), shape_from_size(base, variant)) if line]
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
