"""Parameter groups: which parameters are in which, which options and saved states they accept, a step over all.

Every optimizer gets the same groups; the ``name`` of a group says what is in it:

    name              what is in it                                       decays          MuonAdamW uses
    hidden_matrices   two-dimensional weights inside the network          yes             Muon
    matrices          heads, and weights of three dimensions or more      yes             AdamW
    embeddings        weights of nn.Embedding; a head tied to one         by option       AdamW
    vectors           norms, biases: below two dimensions                 no              AdamW

``name`` is a key that ``torch.optim`` optimizers accept and ignore, and by which Lightning's ``LearningRateMonitor``
labels its curves. So a factory that knows no model, such as jsonargparse's ``OptimizerCallable``, makes any optimizer:
``factory(param_groups(model))``, be it ``torch.optim.SGD``, our ``AdamW`` or ``MuonAdamW``.

A :class:`GroupRule` divides these groups further: ``embeddings:embed_*`` are the embeddings that the pattern
``embed_*`` matches. Its factors multiply what the optimizer has filled in, so :func:`own_rates` follows the factory.
"""

import abc
import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_llm.io.untrusted import shown

HIDDEN_MATRICES, MATRICES, EMBEDDINGS, VECTORS = "hidden_matrices", "matrices", "embeddings", "vectors"
HEADS = ("lm_head",)
TRANSFORMER = "transformer."  # of a LanguageModel: patterns leave it out

AVERAGES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")  # of the shape of their parameter
ADAMW_STATE = ["exp_avg", "exp_avg_sq", "step"]
STATE_DTYPES = {None: None, "bfloat16": torch.bfloat16}
ROUNDINGS = ("nearest", "stochastic")

Group = dict[str, Any]
T = TypeVar("T")
Rule = tuple[Callable[[Any], bool], str]  # whether a value fits, and what is expected


def is_number(value: Any) -> bool:
    """Whether it is an integer or a float, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_decay_rate(value: Any) -> bool:
    """Whether it is a number of at least 0 and below 1."""
    return is_number(value) and 0 <= value < 1


def _is_not_negative(value: Any) -> bool:
    return is_number(value) and 0 <= value < math.inf


def _are_betas(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(is_decay_rate, value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRule:
    """A learning rate and a weight decay of their own for some parameters.

    Attributes:
        pattern: With ``*``, ``?`` and ``[…]``. It is compared with the name of a parameter inside ``Transformer``
            (``layers.0.mlp.up_proj.weight``), of each module that holds it (``layers.0.mlp``), and of its group
            (``embeddings``).
        lr_factor: Multiplies the learning rate.
        weight_decay_factor: Multiplies the optimizer's weight decay, also for groups that do not decay by default.
            ``None``: as without the rule.
    """

    pattern: str
    lr_factor: float = 1.0
    weight_decay_factor: float | None = None

    def __post_init__(self) -> None:
        named = isinstance(self.pattern, str) and self.pattern
        faults = [] if named else [f"pattern must be a name, with * for any characters, got {self.pattern!r}"]
        for name in ("lr_factor", "weight_decay_factor"):
            if not _is_not_negative(value := getattr(self, name)) and (value is not None or name == "lr_factor"):
                faults.append(f"{name} must be a number of at least 0, got {value!r}")
        if faults:
            raise ValueError("; ".join(faults))


def param_groups(
    module: nn.Module,
    *,
    weight_decay: float | None = None,
    decay_embeddings: bool = False,
    heads: Collection[str] = HEADS,
    rules: Sequence[GroupRule] = (),
    lr_factors: Mapping[str, float] | None = None,
) -> list[Group]:
    """Sorts the trainable parameters into groups for an optimizer; empty groups are left out.

    Args:
        module: The model. Frozen parameters are left out, shared ones are counted once.
        weight_decay: Decay of the groups that decay. ``None``: these groups leave it out, so that the optimizer's own
            setting applies. The others have 0 in either case.
        decay_embeddings: Whether embeddings decay.
        heads: Names of the modules that turn hidden states into logits. They decay but are not hidden matrices.
        rules: For some parameters; the first that matches applies. Call :func:`own_rates` with the optimizer.
        lr_factors: By pattern, further factors of the learning rate, in addition to those of the rules; the first
            pattern that matches applies. The weight decay is divided by it: what a step takes off stays the same.

    Raises:
        ValueError: If no parameter is trainable, or a rule decides nothing.
    """
    decays = {HIDDEN_MATRICES: True, MATRICES: True, EMBEDDINGS: decay_embeddings, VECTORS: False}
    labels, factors = _labels(module, heads), lr_factors or {}
    if not labels:
        raise ValueError(f"{type(module).__name__} has no trainable parameters: nothing to optimize")
    _check_rules(rules, list(labels.values()))
    by_pattern = {rule.pattern: rule for rule in rules}

    def division(param: nn.Parameter) -> tuple[str, str | None, str | None]:
        own = labels[param]
        return own[0], _first(by_pattern, own), _first(factors, own)

    groups: list[Group] = []
    divided = group_by(labels, division).items()
    for (kind, pattern, further), params in sorted(divided, key=lambda item: list(decays).index(item[0][0])):
        patterns = [each for each in (pattern, further) if each]
        group: Group = {"params": params, "name": ":".join([kind, *patterns])}
        rule = by_pattern[pattern] if pattern else GroupRule(pattern="*")
        factor = factors[further] if further else 1.0
        decay = float(decays[kind]) if rule.weight_decay_factor is None else rule.weight_decay_factor
        if patterns:
            group["lr_factor"] = rule.lr_factor * factor
            group |= {"weight_decay_factor": decay / factor} if decay else {}
        if not decay or weight_decay is not None:
            group["weight_decay"] = weight_decay if decay else 0.0
        groups.append(group)
    check_coverage(module, groups)
    return groups


def own_rates(optimizer: Optimizer) -> Optimizer:
    """Multiply each group's learning rate and weight decay by its factors; returns the optimizer.

    Raises:
        ValueError: The optimizer has no such option.
    """
    for group in optimizer.param_groups:
        for option in ("lr", "weight_decay"):
            if (factor := group.get(f"{option}_factor", 1.0)) != 1.0:
                if option not in optimizer.defaults:
                    raise ValueError(f"{type(optimizer).__name__} has no {option} that a group could multiply")
                group[option] = group[option] * factor
    return optimizer


def check_coverage(module: nn.Module, groups: Iterable[Group]) -> None:
    """Checks that groups, ours or the user's own, hold every trainable parameter exactly once.

    Raises:
        ValueError: Naming the parameters that are in no group or in several.
    """
    counts = Counter(param for group in groups for param in group["params"])
    names = {param: name for name, param in module.named_parameters() if param.requires_grad}
    missing = [name for param, name in names.items() if not counts[param]]
    repeated = [names.get(param, "a parameter from elsewhere") for param, count in counts.items() if count > 1]
    faults = [f"in no parameter group: {', '.join(missing)}"] if missing else []
    faults += [f"in more than one parameter group: {', '.join(repeated)}"] if repeated else []
    if faults:
        raise ValueError("; ".join(faults))


def _labels(module: nn.Module, heads: Collection[str]) -> dict[nn.Parameter, list[str]]:
    """What a pattern may match: of each trainable parameter its group, its names, and those of modules that hold it."""
    parts = list(module.named_modules(remove_duplicate=False))
    embeddings = [part for _, part in parts if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    embedded = {param for part in embeddings for param in part.parameters(recurse=False)}
    in_heads = {param for name, part in parts if name.rpartition(".")[2] in heads for param in part.parameters()}

    def name_of(param: nn.Parameter) -> str:
        if param.ndim < 2:
            return VECTORS
        if param in embedded:
            return EMBEDDINGS
        return MATRICES if param.ndim > 2 or param in in_heads else HIDDEN_MATRICES

    labels = {param: [name_of(param)] for param in module.parameters() if param.requires_grad}
    for name, param in module.named_parameters(remove_duplicate=False):  # a shared one has several names
        words = name.removeprefix(TRANSFORMER).split(".")
        if param in labels:
            labels[param] += [".".join(words[:depth]) for depth in range(len(words), 0, -1)]
    return labels


def _first(patterns: Iterable[str], labels: Sequence[str]) -> str | None:
    """The first pattern that matches one of the labels."""
    return next((pattern for pattern in patterns if any(fnmatchcase(label, pattern) for label in labels)), None)


def _check_rules(rules: Sequence[GroupRule], labels: Sequence[Sequence[str]]) -> None:
    """Raises ValueError for a rule that decides nothing."""
    left = labels
    for pattern in (rule.pattern for rule in rules):
        rest = [own for own in left if _first([pattern], own) is None]
        if len(rest) == len(left):
            if any(_first([pattern], own) for own in labels):
                raise ValueError(f"pattern {pattern!r} decides nothing: patterns before it match all that it matches")
            group, name, *_ = labels[0]
            raise ValueError(f"pattern {pattern!r} matches no trainable parameter, such as {name} in group {group}")
        left = rest


class GroupOptimizer(Optimizer, abc.ABC):
    """What AdamW and MuonAdamW share: checks of groups and saved states, a step over all groups."""

    rules: ClassVar[dict[str, Rule]] = {
        **dict.fromkeys(("lr", "eps", "weight_decay"), (_is_not_negative, "a number of at least 0")),
        "betas": (_are_betas, "two numbers of at least 0 and below 1"),
        "state_dtype": (lambda value: value in STATE_DTYPES, "None (the parameter's) or 'bfloat16'"),
        "param_rounding": (lambda value: value in ROUNDINGS, " or ".join(ROUNDINGS)),
    }

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group, after checking its options."""
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.is_complex():
                raise ValueError(f"params must be real, got a tensor of {param.dtype}: pass torch.view_as_real of it")

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates every parameter that has a gradient; returns what the closure returned."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.grad is not None and param.grad.layout != torch.strided:  # before any parameter is changed
                raise ValueError(
                    f"gradients must be dense, got {param.grad.layout} of shape {tuple(param.grad.shape)}: "
                    "make the embedding with sparse=False"
                )
        first = 0
        with torch.no_grad():
            for group in self.param_groups:
                self.step_group(group, first)
                first += sum(param.numel() for param in group["params"])
        return loss

    @abc.abstractmethod
    def step_group(self, group: Group, first: int) -> None:
        """Updates the parameters of one group.

        Args:
            group: Its parameters and options.
            first: How many numbers the parameters of the groups before it hold.
        """

    def check_saved(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError if another optimizer saved this state, or one with options that change the result."""
        for group in state_dict["param_groups"]:
            missing = [name for name in ("lr", "betas", "eps", "weight_decay") if name not in group]
            if missing:
                raise ValueError(f"the optimizer state has no {', '.join(missing)}: it was not saved by AdamW")
            changed = [f"{name}=True" for name in ("amsgrad", "maximize") if group.get(name)]
            if group["weight_decay"] and not group.get("decoupled_weight_decay", True):
                changed.append("decoupled_weight_decay=False")
            if changed:
                raise ValueError(
                    f"the optimizer state was saved with {', '.join(changed)}: load it into the class that saved it"
                )
            self._check_options(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a saved state in the ``state_dtype`` of this optimizer, which keeps its ``param_rounding`` too.

        torch takes all options from what was saved, loads averages in the dtype of their parameter, and saves the step
        as a tensor. An average that was saved in bfloat16 gets the same bits; one in float32 is rounded to the nearest.

        Raises:
            ValueError: If another optimizer saved it, or one with an option that this class lacks.
        """
        self.check_saved(state_dict)
        own = [{name: group[name] for name in ("state_dtype", "param_rounding")} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, options in zip(self.param_groups, own, strict=True):
            group |= options
            group.setdefault("fused", None)
            for param in group["params"]:
                state = self.state.get(param, {})
                if "step" in state:
                    state["step"] = int(state["step"])
                for average in {"exp_avg", "exp_avg_sq"} & state.keys():
                    state[average] = state[average].to(STATE_DTYPES[options["state_dtype"]] or param.dtype)

    def _check_options(self, group: Group) -> None:
        faults = [
            f"{name} must be {expected}, got {group[name]!r}"
            for name, (fits, expected) in self.rules.items()
            if name in group and not fits(group[name])
        ]
        if faults:
            raise ValueError("; ".join(faults))


def saved_state_faults(groups: Iterable[dict[str, Any]], saved: dict[str, Any]) -> list[str]:
    """Where a saved state does not fit the parameters, which torch would not notice, or not before the next step.

    Args:
        groups: Of the optimizer that is going to load it, or of one with the same parameters.
        saved: As of ``Optimizer.state_dict``. torch itself reports another number of parameters.
    """
    groups = list(groups)
    params = [param for group in groups for param in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    faults = []
    ours, theirs = ([group.get("name") for group in each] for each in (groups, saved["param_groups"]))
    if groups and None not in (*ours, *theirs) and ours != theirs:  # the state is by number, which depends on them
        there, here = ([name for name in each if name not in other] for each, other in ((theirs, ours), (ours, theirs)))
        faults.append(f"its parameter groups have {shown(there)}, here {shown(here)}: give the patterns of its run")
    for number, param in zip(numbers, params, strict=False) if len(numbers) == len(params) else ():
        for name, value in saved["state"].get(number, {}).items():
            found = tuple(getattr(value, "shape", ())), getattr(value, "dtype", torch.int64).is_floating_point
            is_none = value is None and name == "momentum_buffer"  # torch's SGD without momentum
            if name in AVERAGES and not is_none and found != (tuple(param.shape), True):
                faults.append(f"{name} of parameter {number} has shape {found[0]}, expected {tuple(param.shape)}")
            elif name == "step" and not _is_step(value):
                faults.append(f"step of parameter {number} is {value!r:.60}, not a number of steps")
    return faults


def _is_step(value: Any) -> bool:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return is_number(number) and 0 <= number < 2**53 and number == int(number)


def group_by(items: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    """The items by their keys, both in the order in which they first come."""
    groups: dict[Any, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def local(tensor: Any) -> Tensor:
    """This rank's shard of a ``DTensor`` (whose import costs half a second), or the tensor itself."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard
