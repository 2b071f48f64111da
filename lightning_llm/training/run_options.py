"""The options of a run under short names: hyperparameters in TensorBoard, names of runs, columns of a comparison."""

from collections.abc import Mapping
from typing import Any

WRAPPERS = ("model", "architecture", "init_args", "class_path")  # say nothing that the rest of a name does not
CLASS_PATH = "class_path"

# Where a run is done and what is shown of it. What may bear on loss, time or memory is not here.
UNCOMPARED = (
    "config",
    "ckpt_path",
    "weights_only",
    "verbose",
    "return_predictions",
    "data.predict_prompts",
    "trainer.callbacks",
    "trainer.default_root_dir",
    "trainer.enable_",
    "trainer.log_every_n_steps",
    "trainer.logger",
    "trainer.profiler",
)
SEEDS = ("seed_everything", "data.seed")


def short_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by short names, without those that no result depends on.

    Args:
        options: As in a config: nested, or flat with dotted names.

    Returns:
        Flat; ``model.optimizer.init_args.lr`` is ``optimizer.lr``, ``model.architecture.mlp`` is ``mlp``. A class path
        is its last word.
    """
    return {name: value for name, value in _walk(options, ()) if not name.startswith(UNCOMPARED)}


def flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def shown(value: Any) -> str:
    """A value as text without slashes: a file or folder is its last word."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{' '.join(shown(each) for each in value)}]"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={shown(each)}" for name, each in value.items())
    return str(value).rstrip("/").rpartition("/")[2]


def _walk(options: Mapping[str, Any], outer: tuple[str, ...]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in options.items():
        names = (*outer, *key.split("."))
        if isinstance(value, Mapping):
            found += _walk(value, names)
        else:
            is_class = names[-1] == CLASS_PATH and isinstance(value, str)
            short = ".".join(name for name in names if name not in WRAPPERS)
            found.append((short, value.rpartition(".")[2] if is_class else value))
    return found
