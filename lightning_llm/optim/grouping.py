"""Parameter groups: which parameters decay, and which are hidden matrices.

Every optimiser gets the same groups; what is in a group is told by its ``name``:

    name              what is in it                                       decays          MuonAdamW uses
    hidden_matrices   two-dimensional weights inside the network          yes             Muon
    matrices          heads, and whatever has three dimensions or more    yes             AdamW
    embeddings        weights of nn.Embedding; a head tied to one         by option       AdamW
    vectors           norms, biases: below two dimensions                 no              AdamW

``name`` is a key that ``torch.optim`` optimisers accept and ignore, and by which Lightning's ``LearningRateMonitor``
labels its curves. So a factory that knows no model, such as jsonargparse's ``OptimizerCallable``, makes any optimiser:
``factory(param_groups(model))``, be it ``torch.optim.SGD``, our ``AdamW`` or ``MuonAdamW``.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

HIDDEN_MATRICES, MATRICES, EMBEDDINGS, VECTORS = "hidden_matrices", "matrices", "embeddings", "vectors"
HEADS = ("lm_head",)

Group = dict[str, Any]


def param_groups(
    module: nn.Module,
    *,
    weight_decay: float | None = None,
    decay_embeddings: bool = False,
    heads: Collection[str] = HEADS,
) -> list[Group]:
    """Sorts the trainable parameters into groups for an optimiser; empty groups are left out.

    Args:
        module: The model. Frozen parameters are left out, shared ones are counted once.
        weight_decay: Decay of the groups that decay. ``None``: these groups do not say, so that the optimiser's own
            setting holds. The others say 0 in either case.
        decay_embeddings: Whether embeddings decay.
        heads: Names of the modules that turn hidden states into logits. They decay but are no hidden matrices.

    Raises:
        ValueError: If there is nothing to train.
    """
    kinds = _kinds(module, heads)
    decaying = {HIDDEN_MATRICES, MATRICES} | ({EMBEDDINGS} if decay_embeddings else set())
    groups: list[Group] = []
    for kind in (HIDDEN_MATRICES, MATRICES, EMBEDDINGS, VECTORS):
        params = [param for param, its_kind in kinds.items() if its_kind == kind]
        if params:
            group: Group = {"params": params, "name": kind}
            if kind not in decaying:
                group["weight_decay"] = 0.0
            elif weight_decay is not None:
                group["weight_decay"] = weight_decay
            groups.append(group)
    if not groups:
        raise ValueError(f"{type(module).__name__} has no trainable parameters: nothing to optimise")
    check_coverage(module, groups)
    return groups


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


def _kinds(module: nn.Module, heads: Collection[str]) -> dict[nn.Parameter, str]:
    embedded = {
        param
        for part in module.modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag))
        for param in part.parameters(recurse=False)
    }
    in_heads = {
        param
        for name, part in module.named_modules(remove_duplicate=False)
        if name.rpartition(".")[2] in heads
        for param in part.parameters()
    }

    def kind(param: nn.Parameter) -> str:
        if param.ndim < 2:
            return VECTORS
        if param in embedded:
            return EMBEDDINGS
        return MATRICES if param.ndim > 2 or param in in_heads else HIDDEN_MATRICES

    return {param: kind(param) for param in module.parameters() if param.requires_grad}
