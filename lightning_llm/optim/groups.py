"""Parameter groups: which parameters are in which, and what multiplies their learning rate and weight decay.

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
``embed_*`` matches. Its factors multiply what the optimizer has filled in, so
:func:`apply_group_factors` follows the factory.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.optim import Optimizer

from lightning_llm.io.options import check_options, option, raise_all
from lightning_llm.optim.base import ParamGroup as ParamGroup
from lightning_llm.optim.base import group_by, is_not_negative

HIDDEN_MATRICES = "hidden_matrices"
MATRICES = "matrices"
EMBEDDINGS = "embeddings"
VECTORS = "vectors"
HEADS = ("lm_head",)
TRANSFORMER = "transformer."  # of a LanguageModel: patterns leave it out


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

    pattern: str = option(
        dataclasses.MISSING, "a name, with * for any characters", lambda value: isinstance(value, str) and value != ""
    )
    lr_factor: float = option(1.0, "a number of at least 0", is_not_negative)
    weight_decay_factor: float | None = option(
        None, "a number of at least 0", lambda value: value is None or is_not_negative(value)
    )

    def __post_init__(self) -> None:
        check_options(self)


def param_groups(
    module: nn.Module,
    *,
    weight_decay: float | None = None,
    decay_embeddings: bool = False,
    heads: Collection[str] = HEADS,
    rules: Sequence[GroupRule] = (),
    lr_factors: Mapping[str, float] | None = None,
) -> list[ParamGroup]:
    """Sorts the trainable parameters into groups for an optimizer; empty groups are left out.

    Args:
        module: The model. Frozen parameters are left out, shared ones are counted once.
        weight_decay: Decay of the groups that decay. ``None``: these groups leave it out, so that the optimizer's own
            setting applies. The others have 0 in either case.
        decay_embeddings: Whether embeddings decay.
        heads: Names of the modules that turn hidden states into logits. They decay but are not hidden matrices.
        rules: For some parameters; the first that matches applies. Call :func:`apply_group_factors` with the optimizer.
        lr_factors: By pattern, further factors of the learning rate, in addition to those of the rules; the first
            pattern that matches applies. The weight decay is divided by it: what a step takes off stays the same.

    Raises:
        ValueError: If no parameter is trainable, or a rule decides nothing.
    """
    decays = {HIDDEN_MATRICES: True, MATRICES: True, EMBEDDINGS: decay_embeddings, VECTORS: False}
    labels = _labels(module, heads)
    factors = lr_factors or {}
    if not labels:
        raise ValueError(f"{type(module).__name__} has no trainable parameters: nothing to optimize")
    _check_rules(rules, list(labels.values()))
    by_pattern = {rule.pattern: rule for rule in rules}

    def division(param: nn.Parameter) -> tuple[str, str | None, str | None]:
        names = labels[param]
        return names[0], _first(by_pattern, names), _first(factors, names)

    groups: list[ParamGroup] = []
    divided = group_by(labels, division).items()
    for (name, pattern, lr_pattern), params in sorted(divided, key=lambda item: list(decays).index(item[0][0])):
        patterns = [used for used in (pattern, lr_pattern) if used]
        group: ParamGroup = {"params": params, "name": ":".join([name, *patterns])}
        rule = by_pattern[pattern] if pattern else GroupRule(pattern="*")
        factor = factors[lr_pattern] if lr_pattern else 1.0
        decay = float(decays[name]) if rule.weight_decay_factor is None else rule.weight_decay_factor
        if patterns:
            group["lr_factor"] = rule.lr_factor * factor
            group |= {"weight_decay_factor": decay / factor} if decay else {}
        if not decay or weight_decay is not None:
            group["weight_decay"] = weight_decay if decay else 0.0
        groups.append(group)
    check_coverage(module, groups)
    return groups


def apply_group_factors(optimizer: Optimizer) -> Optimizer:
    """Multiply each group's learning rate and weight decay by its factors; returns the optimizer.

    Raises:
        ValueError: The optimizer has no such option.
    """
    for group in optimizer.param_groups:
        for name in ("lr", "weight_decay"):
            if (factor := group.get(f"{name}_factor", 1.0)) != 1.0:
                if name not in optimizer.defaults:
                    raise ValueError(f"{type(optimizer).__name__} has no {name} that a group could multiply")
                group[name] = group[name] * factor
    return optimizer


def check_coverage(module: nn.Module, groups: Iterable[ParamGroup]) -> None:
    """Checks that groups, ours or the user's own, hold every trainable parameter exactly once.

    Raises:
        ValueError: Naming the parameters that are in no group or in several.
    """
    counts = Counter(param for group in groups for param in group["params"])
    names = {param: name for name, param in module.named_parameters() if param.requires_grad}
    missing = [name for param, name in names.items() if not counts[param]]
    repeated = [names.get(param, "a parameter from elsewhere") for param, count in counts.items() if count > 1]
    problems = [f"in no parameter group: {', '.join(missing)}"] if missing else []
    problems += [f"in more than one parameter group: {', '.join(repeated)}"] if repeated else []
    raise_all(problems)


def _labels(module: nn.Module, heads: Collection[str]) -> dict[nn.Parameter, list[str]]:
    """Labels of each trainable parameter for patterns: its group, its names, and those of modules that hold it."""
    modules = list(module.named_modules(remove_duplicate=False))
    tables = [inner for _, inner in modules if isinstance(inner, nn.Embedding | nn.EmbeddingBag)]
    embedded = {param for table in tables for param in table.parameters(recurse=False)}
    in_heads = {param for name, inner in modules if name.rpartition(".")[2] in heads for param in inner.parameters()}

    def name_of(param: nn.Parameter) -> str:
        if param.ndim < 2:
            return VECTORS
        if param in embedded:
            return EMBEDDINGS
        return MATRICES if param.ndim > 2 or param in in_heads else HIDDEN_MATRICES

    labels = {param: [name_of(param)] for param in module.parameters() if param.requires_grad}
    for name, param in module.named_parameters(remove_duplicate=False):  # a shared one has several names
        path = name.removeprefix(TRANSFORMER).split(".")
        if param in labels:
            labels[param] += [".".join(path[:depth]) for depth in range(len(path), 0, -1)]
    return labels


def _first(patterns: Iterable[str], labels: Sequence[str]) -> str | None:
    """The first pattern that matches one of the labels."""
    return next((pattern for pattern in patterns if any(fnmatchcase(label, pattern) for label in labels)), None)


def _check_rules(rules: Sequence[GroupRule], labels: Sequence[Sequence[str]]) -> None:
    """Raises ValueError for a rule that decides nothing."""
    left = labels
    for pattern in (rule.pattern for rule in rules):
        rest = [names for names in left if _first([pattern], names) is None]
        if len(rest) == len(left):
            if any(_first([pattern], names) for names in labels):
                raise ValueError(f"pattern {pattern!r} decides nothing: patterns before it match all that it matches")
            group, name, *_ = labels[0]
            raise ValueError(f"pattern {pattern!r} matches no trainable parameter, such as {name} in group {group}")
        left = rest
