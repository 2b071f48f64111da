"""A mixture of experts in place of one MLP: a router sends each token to a few of many SwiGLUs.

With router logits z (tokens, experts) and probabilities p = softmax(z), a token's output is the sum over its ``top_k``
experts of their outputs times p, divided by the sum of these p (Shazeer et al. 2017, "Outrageously Large Neural
Networks", section 2.1; the normalization as in Mixtral, Jiang et al. 2024). No token is dropped, whatever the balance.
Two terms are added to the training loss:

    load balancing    experts · Σ_e f_e P_e    f: share of the choices, P: mean probability (Fedus et al. 2021, "Switch
                                               Transformers", equation 4); 1 where both are uniform
    z-loss            mean(log² Σ_e exp(z_e))  (Zoph et al. 2022, "ST-MoE", equation 5)
"""

import torch
from torch import Tensor, nn

from lightning_llm.model.config import ModelConfig
from lightning_llm.model.mlp import SwiGLU
from lightning_llm.ops import traced


class MixtureOfExperts(nn.Module):
    """Tokens are sorted by expert, and each expert computes its slice.

    Args:
        config: ``intermediate_size`` is that of each expert.
        num_experts: How many there are.
        top_k: How many a token goes to.
        load_balancing: Weight of the load-balancing term.
        z_loss: Weight of the z-loss of the router.

    Attributes:
        auxiliary_loss: Both terms with their weights, of the last forward pass in training; ``Transformer`` sets it to
            ``None`` before each, so that a part that is computed again in backward does not leave another one.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_experts: int = 8,
        top_k: int = 2,
        load_balancing: float = 0.01,
        z_loss: float = 0.001,
    ) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        self.top_k = top_k
        self.load_balancing = load_balancing
        self.z_loss = z_loss
        self.router = nn.Linear(config.hidden_size, num_experts, bias=False)
        sizes = config.hidden_size, config.intermediate_size
        self.experts = nn.ModuleList(SwiGLU(*sizes, bias=config.mlp_bias) for _ in range(num_experts))
        self.residual_outputs = tuple(f"experts.{expert}.down_proj" for expert in range(num_experts))
        self.auxiliary_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(…, hidden) -> (…, hidden)."""
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.router(tokens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        probabilities = logits.softmax(dim=-1)  # (tokens, experts)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        counts = self._counts(chosen)
        if self.training and torch.is_grad_enabled():
            left = self._auxiliary(logits, probabilities, counts)
            self.auxiliary_loss = left if self.auxiliary_loss is None else self.auxiliary_loss
        order = chosen.flatten().argsort(stable=True)  # places in (tokens × top_k), by expert
        rows = order // self.top_k
        slices = torch.split(tokens[rows], self._lengths(counts, rows.numel()))
        # an expert without tokens runs too: its parameters get gradients of zero
        outputs = torch.cat([expert(part) for expert, part in zip(self.experts, slices, strict=True)])
        weighted = outputs * weights.flatten()[order].to(outputs.dtype).unsqueeze(-1)
        out = outputs.new_zeros(len(tokens), outputs.shape[-1]).index_add(0, rows, weighted)
        return out.view(x.shape)

    def _counts(self, chosen: Tensor) -> Tensor:
        """How many tokens each expert gets: (experts,)."""
        if traced.current() is not None:
            return chosen.new_empty(len(self.experts))
        return torch.bincount(chosen.flatten(), minlength=len(self.experts))

    def _lengths(self, counts: Tensor, total: int) -> list[int]:
        """The same as numbers; in a trace, which has no values, as even as possible."""
        if traced.current() is None:
            lengths: list[int] = counts.tolist()
            return lengths
        least, rest = divmod(total, len(self.experts))
        return [least + (expert < rest) for expert in range(len(self.experts))]

    def _auxiliary(self, logits: Tensor, probabilities: Tensor, counts: Tensor) -> Tensor:
        shares = counts / counts.sum().clamp(min=1)
        balance = len(self.experts) * (shares * probabilities.mean(dim=0)).sum()
        return self.load_balancing * balance + self.z_loss * logits.logsumexp(dim=-1).square().mean()
