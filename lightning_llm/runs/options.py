"""The options of a run under short names: hyperparameters in TensorBoard, names of runs, columns of a comparison."""

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from lightning_llm.io.trust import CLASS_PATH, INIT_ARGS, is_custom

WRAPPERS = ("model", "architecture", INIT_ARGS, CLASS_PATH)  # add nothing to the rest of a name

# Where a run writes and what it shows. Whatever may affect loss, time or memory is not here.
UNCOMPARED = (
    *("config", "ckpt_path", "weights_only", "verbose", "return_predictions", "data.predict_prompts"),
    *("trainer.default_root_dir", "trainer.run_dir", "trainer.enable_autolog_hparams", "trainer.enable_checkpointing"),
    *("trainer.enable_model_summary", "trainer.enable_progress_bar", "trainer.log_every_n_steps"),
    *("trainer.logger", "trainer.profiler"),
)
MOST_WORDS = 64  # of a path or class path, that a label has
CALLBACKS = "trainer.callbacks"
# Callbacks change training or evaluation unless they are known only to show, log or save, as all of this project's do.
LIGHTNINGS_CALLBACKS = ("lightning.pytorch.callbacks.", "pytorch_lightning.callbacks.")
SHOWING = (
    *("ProgressBar", "RichProgressBar", "TQDMProgressBar", "ModelSummary", "RichModelSummary", "BasePredictionWriter"),
    *("DeviceStatsMonitor", "LearningRateMonitor", "ThroughputMonitor", "ModelCheckpoint", "OnExceptionCheckpoint"),
)
SEEDS = ("seed_everything", "data.seed")


class ClassPath(str):
    """The last word of the import path of a class.

    Attributes:
        path: The complete path, which tells classes of one name apart.
    """

    path: str

    def __new__(cls, path: str) -> "ClassPath":
        """Make it from the complete path."""
        class_path = super().__new__(cls, path.rpartition(".")[2])
        class_path.path = path
        return class_path


class _Absent:
    def __str__(self) -> str:
        return "–"


ABSENT = _Absent()  # the value of an option that a run does not have


def short_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by short names, without those that cannot change a result.

    Args:
        options: As in a config: nested, or flat with dotted names.

    Returns:
        Flat; ``model.optimizer.init_args.lr`` is ``optimizer.lr``, ``model.architecture.mlp`` is ``mlp``. A class path
        is a ``ClassPath``. Callbacks that may change a result are a list of these, each with its options.
    """
    shortened: dict[str, Any] = {}
    for full_name, value in flat(options).items():
        names = full_name.split(".")
        short_name = ".".join(name for name in names if name not in WRAPPERS) or names[0]
        if full_name == CALLBACKS:
            shortened |= _callbacks(value)
        elif not is_among(full_name, UNCOMPARED):
            is_class = names[-1] == CLASS_PATH and isinstance(value, str)
            shortened[full_name if short_name in shortened else short_name] = ClassPath(value) if is_class else value
    return shortened


def flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their dotted names."""
    flattened: dict[str, Any] = {}
    for name, value in options.items():
        flattened |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flattened


def is_among(name: str, options: Sequence[str]) -> bool:
    """Whether an option is one of these, or a part of one."""
    return any(name == option or name.startswith(f"{option}.") for option in options)


def shown_option(value: Any, detail: int = 0) -> str:
    """A value as text.

    Args:
        value: Of an option.
        detail: How many words of a path, and how many names of a class path, to show before the last one. From 1 on,
            numbers are not rounded.
    """
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, float):
        return repr(value) if detail else f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{' '.join(shown_option(item, detail) for item in value)}]"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={shown_option(item, detail)}" for name, item in value.items())
    text, separator = (value.path, ".") if isinstance(value, ClassPath) else (str(value).rstrip("/"), "/")
    return separator.join(text.rsplit(separator, detail + 1)[-1 - detail :])


def labels(values: Sequence[Any]) -> list[str]:
    """Values of one option as texts: the shortest that differ for different values."""
    texts = _distinct_texts({identity(value): value for value in values})
    return [texts[identity(value)] for value in values]


def _distinct_texts(values: Mapping[Hashable, Any]) -> dict[Hashable, str]:
    texts: dict[Hashable, str] = {}
    for detail in range(MOST_WORDS):
        shorter_texts, texts = texts, {key: shown_option(value, detail) for key, value in values.items()}
        if len(set(texts.values())) == len(texts):
            return texts
        if texts == shorter_texts:  # more words say nothing new
            break
    return {key: str(value) if value is ABSENT else json.dumps(value, default=str) for key, value in values.items()}


def identity(value: Any) -> Hashable:
    """Equal for equal values: 1 and 1.0 are, 1 and "1" and true are not."""
    if isinstance(value, bool) or value is None or value is ABSENT:
        return (type(value).__name__, value)
    if isinstance(value, int | float):
        return ("number", value if value == value else "NaN")
    if isinstance(value, list | tuple):
        return ("list", tuple(identity(item) for item in value))
    if isinstance(value, Mapping):
        return ("options", frozenset((str(name), identity(item)) for name, item in value.items()))
    return ("text", value.path if isinstance(value, ClassPath) else str(value))


def _callbacks(callbacks: Any) -> dict[str, Any]:
    """Callbacks that may change a result: their classes in order, and the options of each."""
    entries = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    specs = [spec if isinstance(spec, Mapping) else {CLASS_PATH: spec} for spec in entries if spec is not None]
    paths = [ClassPath(str(spec.get(CLASS_PATH))) for spec in specs]
    changing = [(path, spec) for path, spec in zip(paths, specs, strict=True) if not _only_shows(path)]
    options: dict[str, Any] = {CALLBACKS: [path for path, _ in changing]} if changing else {}
    for number, (path, spec) in enumerate(changing):
        repeats = options[CALLBACKS][:number].count(path)
        name = f"{CALLBACKS}.{path}" + (f"#{repeats + 1}" if repeats else "")
        arguments = spec.get("init_args")
        options |= flat(arguments if isinstance(arguments, Mapping) else {}, f"{name}.")
    return options


def _only_shows(callback: ClassPath) -> bool:
    return not is_custom(callback.path) or (callback.path.startswith(LIGHTNINGS_CALLBACKS) and callback in SHOWING)
