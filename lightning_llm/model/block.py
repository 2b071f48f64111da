"""A block: attention and MLP, each a branch beside the residual stream, and how the two are joined to it.

    pre (Xiong et al. 2020)         x + attention(norm(x)),          then x + mlp(norm(x))
    post (Vaswani et al. 2017)      norm(x + attention(x)),          then norm(x + mlp(x))
    sandwich (Ding et al. 2021,     x + norm(attention(norm(x))),    then x + norm(mlp(norm(x)))
    "CogView", section 2.4; Gemma 2)

A block of the user's own derives from :class:`Block` and overrides ``add_branches``, which calls ``attend`` and
``feed_forward``. These apply the norms, dropout, and recompute what ``ModelConfig.recompute`` says.

A compiled block with the ``add_branches`` of ``pre`` leaves its last sum to the next block, where the compiler merges
it with the norm.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_llm.model.build import build
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.context import Context, checked
from lightning_llm.model.kv_cache import KVCache
from lightning_llm.model.parts import BUILT_IN, Norms
from lightning_llm.model.unmodified import hooks_of
from lightning_llm.ops.dispatch import matmul_dtype

Out = TypeVar("Out", Tensor, tuple[Tensor, Tensor])

BRANCHES = {"attention": "self_attn", "mlp": "mlp"}  # a kind of part, and the name of its module


class Compilable(nn.Module):
    """A module whose forward pass, ``_run``, can be compiled in place."""

    _run: Callable[..., Tensor]

    def __init__(self) -> None:
        super().__init__()
        self._compiled: Callable[..., Tensor] | None = None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the forward pass without a cache, in place. Arguments as for ``torch.compile``.

        Unlike that of ``nn.Module`` it excludes hooks, by which FSDP2 gathers the weights, and takes the module as an
        argument: blocks of the same settings, and copies of one, share the code compiled for the first.
        """
        self._compiled = torch.compile(type(self)._run, *args, **kwargs)

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` was called."""
        return self._compiled is not None

    def _call(self, cache: KVCache | None, *args: Any) -> Tensor:
        # a cache grows with every call, and each length would be compiled again
        run = type(self)._run if self._compiled is None or cache is not None else self._compiled
        return run(self, *args)


class Block(Compilable):
    """The usual one, ``pre``, and the base class of all others.

    Args:
        config: Of the transformer.
        layer: Index of the block.
        seed: Of the initial values.
    """

    norms: ClassVar[Norms] = BUILT_IN["block"]["pre"].norms
    self_attn: Any
    mlp: Any
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def __init__(self, config: ModelConfig, layer: int, seed: int) -> None:
        super().__init__()
        self._made_from = config, layer, seed
        for kind, name in BRANCHES.items():
            before, after = self.norms[kind]
            self.add_norm(before)
            self.add_module(name, build(kind, config, seed=seed, path=f"layers.{layer}.{name}", layer=layer))
            self.add_norm(after)
        self.norm_in_mlp = config.checkpoint_levels[layer] == 2
        self.recompute = config.recompute
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self._compiled_terms: Callable[..., tuple[Tensor, Tensor]] | None = None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the forward pass and :meth:`terms`, each at its first call."""
        super().compile(*args, **kwargs)
        self._compiled_terms = torch.compile(type(self)._terms, *args, **kwargs)

    def add_norm(self, name: str | None) -> None:
        """Add a norm of the config's kind, over the residual stream."""
        if name is not None:
            config, layer, seed = self._made_from
            path = f"layers.{layer}.{name}"
            size = config.hidden_size
            self.add_module(name, build("norm", config, seed=seed, path=path, layer=layer, size=size))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(batch, seq, hidden) -> (batch, seq, hidden)."""
        return self._call(context.cache, x, context)

    def prepare(self, x: Tensor, context: Context) -> None:
        """Let the attention leave what layers share in the context; called before the first block."""
        prepare = getattr(self.self_attn, "prepare", None)
        if prepare is not None:
            prepare(x, context)

    def leaves_sum(self, context: Context) -> bool:
        """Whether :meth:`terms` may be called instead of the block: not where another class or a hook does more."""
        kind = type(self)
        is_usual = (
            kind.add_branches is Block.add_branches and kind.forward is Block.forward and "forward" not in self.__dict__
        )
        is_compiled = self._compiled_terms is not None
        return is_usual and is_compiled and context.cache is None and not hooks_of(self)

    def terms(self, x: Tensor, branch: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """The two terms of the block's result for ``x + branch``; compiled. Tensors are (batch, seq, hidden).

        Args:
            x: The first term of the result of the block before.
            branch: The second one; ``None`` for the first block.
            context: What all blocks share.
        """
        assert self._compiled_terms is not None
        if branch is None:  # as of another block, so that the first one needs no code of its own
            needs_grad = x.requires_grad and torch.is_grad_enabled()
            branch = torch.zeros_like(x, dtype=matmul_dtype(x), requires_grad=needs_grad)
        return self._compiled_terms(self, x, branch, context)

    # -- what another block may override ------------------------------------------------------------------------------

    def add_branches(self, x: Tensor, context: Context) -> Tensor:
        """The two branches and the residual stream: (batch, seq, hidden) -> (batch, seq, hidden)."""
        x = x + self.attend(x, context)
        return x + self.feed_forward(x)

    def attend(self, x: Tensor, context: Context) -> Tensor:
        """The branch of attention, with its norms and dropout: (batch, seq, hidden) -> (batch, seq, hidden)."""
        return self._recomputed_if_asked("attention", self._attention, x, context)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The branch of the MLP, with its norms and dropout: (batch, seq, hidden) -> (batch, seq, hidden)."""
        return self._recomputed_if_asked("mlp", self._mlp, x)

    # -- how it runs --------------------------------------------------------------------------------------------------

    def _run(self, x: Tensor, context: Context) -> Tensor:
        return checked("block", self, self._recomputed_if_asked("block", self.add_branches, x, context), x)

    def _terms(self, x: Tensor, branch: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        x = x + branch  # outside of what is recomputed, which would save both
        return self._recomputed_if_asked("block", self._add_branches_but_last, x, context)

    def _add_branches_but_last(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Add the branches but for the last sum: see :meth:`add_branches`."""
        x = x + self.attend(x, context)
        return x, self.feed_forward(x)

    def _attention(self, x: Tensor, context: Context) -> Tensor:
        before, after = self.norms["attention"]
        mixed = checked("attention", self.self_attn, self.self_attn(self._normed(before, x), context), x)
        out: Tensor = self.dropout(self._normed(after, mixed))
        return out

    def _mlp(self, x: Tensor) -> Tensor:
        before, after = self.norms["mlp"]
        if self.norm_in_mlp and before is not None:
            inner = self.mlp(x, getattr(self, before))
        else:
            inner = self.mlp(self._normed(before, x))
        out: Tensor = self.dropout(self._normed(after, checked("mlp", self.mlp, inner, x)))
        return out

    def _normed(self, name: str | None, x: Tensor) -> Tensor:
        if name is None:
            return x
        norm = getattr(self, name)
        return checked("norm", norm, norm(x), x)

    def _recomputed_if_asked(self, name: str, function: Callable[..., Out], *args: Any) -> Out:
        if self.recompute == name and self.training and torch.is_grad_enabled():
            out: Out = checkpoint(function, *args, use_reentrant=False)
            return out
        return function(*args)


class PostNormBlock(Block):
    """Norms after the sums. The last norm of the model stays, after that of the last block."""

    norms = BUILT_IN["block"]["post"].norms

    def __init__(self, config: ModelConfig, layer: int, seed: int) -> None:
        super().__init__(config, layer, seed)
        for name in self.norms["sums"]:
            self.add_norm(name)

    def add_branches(self, x: Tensor, context: Context) -> Tensor:
        after_attention, after_mlp = self.norms["sums"]
        x = self._normed(after_attention, x + self.attend(x, context))
        return self._normed(after_mlp, x + self.feed_forward(x))


class SandwichBlock(Block):
    """Norms before and after each branch."""

    norms = BUILT_IN["block"]["sandwich"].norms
