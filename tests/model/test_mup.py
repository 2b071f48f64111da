"""μP as initial values and learning rates: what they are, and that they are those of table 8 with its multipliers."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from lightning_llm import LanguageModel, ModelConfig, Transformer
from lightning_llm.accounting import step_memory
from lightning_llm.interop import export_model
from lightning_llm.interop.reader import load_model
from lightning_llm.model.weights import lr_factors
from lightning_llm.optim import AdamW, apply_group_factors, param_groups

BASE = {"vocab_size": 29, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
MUP = {"base_width": 16, "base_head_dim": 8}  # m = 4, and heads of 32 are 4 times as wide: q = 1/2
LR, DECAY = 0.01, 0.2


def model(**changes):
    return Transformer(ModelConfig(**{**BASE, **changes}), seed=3)


def rates(made):
    """Learning rate and weight decay of each parameter."""
    factors = lr_factors(made.config)
    optimizer = apply_group_factors(AdamW(param_groups(made, lr_factors=factors), lr=LR, weight_decay=DECAY))
    names = {param: name for name, param in made.named_parameters()}
    return {
        names[param]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for param in group["params"]
    }


@pytest.mark.parametrize("qk_norm", [False, True])
def test_at_the_base_width_nothing_changes(qk_norm):
    plain = model(qk_norm=qk_norm, attention_bias=True)
    base = model(qk_norm=qk_norm, attention_bias=True, mup={"base_width": 64, "base_head_dim": 32})
    assert all(torch.equal(value, base.state_dict()[name]) for name, value in plain.state_dict().items())
    assert rates(plain) == rates(base)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_factors_are_those_of_the_table(qk_norm):
    plain, wide = (model(qk_norm=qk_norm, attention_bias=True, mlp="relu", mup=mup) for mup in (None, MUP))
    m, q = 4, 0.5
    table = {"lm_head.weight": (1 / m, 1 / m), "_proj.weight": (m**-0.5, 1 / m)}
    query = {"q_norm.weight": (q, q)} if qk_norm else {"q_proj.weight": (q * m**-0.5, q / m), "q_proj.bias": (q, q)}
    ours, usual = rates(wide), rates(plain)
    for name, value in plain.state_dict().items():
        scale, rate = next((own for end, own in {**query, **table}.items() if name.endswith(end)), (1, 1))
        torch.testing.assert_close(wide.state_dict()[name], scale * value, msg=name)
        assert ours[name][0] == pytest.approx(rate * LR), name
        assert ours[name][0] * ours[name][1] == pytest.approx(usual[name][0] * usual[name][1]), name  # of decay


@pytest.mark.parametrize("qk_norm", [False, True])
def test_it_is_table_8_with_its_multipliers(qk_norm):
    """Float64, three steps: attention over head_dim, logits over m, their weights without factors of these."""
    ours = model(qk_norm=qk_norm, attention_bias=True, mup=MUP).double()
    theirs = model(qk_norm=qk_norm, attention_bias=True).double()
    m, q, ends = 4, 0.5, ("q_norm.weight",) if qk_norm else ("q_proj.weight", "q_proj.bias")
    multipliers = {name: q if name.endswith(ends) else 1 for name, _ in ours.named_parameters()}
    multipliers["lm_head.weight"] = 1 / m
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            param.copy_(ours.get_parameter(name) / multipliers[name])
    for name, part in theirs.named_modules():
        if name == "lm_head":
            part.register_forward_hook(lambda part, args, out: out / m)
        elif name.endswith(ends[0].rpartition(".")[0]):
            part.register_forward_hook(lambda part, args, out: q * out)
    hidden = {
        name for name, param in theirs.named_parameters() if name.endswith("_proj.weight")
    }  # fan_in grows: lr / m
    optimizers = [
        torch.optim.AdamW(
            [{"params": [p], "lr": lr(n), "weight_decay": decay(n)} for n, p in made.named_parameters()], eps=1e-60
        )
        for made, lr, decay in (
            (ours, lambda name: rates(ours)[name][0], lambda name: rates(ours)[name][1]),
            (
                theirs,
                lambda name: LR / m if name in hidden else LR,
                lambda name: DECAY * m if name in hidden else DECAY if name == "lm_head.weight" else 0.0,
            ),
        )
    ]
    ids = torch.randint(29, (3, 2, 9), generator=torch.Generator().manual_seed(0))
    first = None
    for batch in ids:
        losses = []
        for made, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(made.logits(made(batch[:, :-1])).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        first = losses[0] if first is None else first
        torch.testing.assert_close(*losses, rtol=1e-9, atol=0)
    logits = [made.logits(made(ids[0])) for made in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=1e-6, atol=1e-9)
    after = F.cross_entropy(logits[0][:, :-1].flatten(0, 1), ids[0][:, 1:].flatten())
    assert after < first - 0.01  # they have moved


def test_exports_and_estimates_know_nothing_of_it(tmp_path):
    made = model(mup=MUP)
    export_model(made, None, tmp_path / "out")
    read, _ = load_model(tmp_path / "out")
    ids = torch.arange(9)[None]
    assert torch.equal(made.logits(made(ids)), read.logits(read(ids)))
    plain = dataclasses.replace(made.config, mup=None)
    asked = {"rows": 2, "context_length": 16}
    assert step_memory(made.config, **asked) == step_memory(plain, **asked)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mup": {"base_width": 16}}, "mup must have base_width and base_head_dim, whole numbers from 1 to 65536, got"),
        ({"mup": {**MUP, "base_width": 0}}, "mup must have base_width and base_head_dim"),
        ({"mup": MUP, "tie_word_embeddings": True}, "mup needs tie_word_embeddings false"),
        ({"mup": MUP, "mlp": "mine.MLP"}, "mup does not know the scales of mlp 'mine.MLP'"),
        ({"mup": MUP, "layers": [{"qk_norm": True}, {}]}, "mup needs the same qk_norm in all layers"),
    ],
)
def test_what_it_does_not_cover_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**BASE, **changes})


def test_layers_may_repeat_the_models_qk_norm():
    qk_norm = ModelConfig(**BASE).qk_norm
    assert ModelConfig(**BASE, mup=MUP, layers=[{"qk_norm": qk_norm}, {}]).layer_configs[0].qk_norm == qk_norm


@pytest.mark.parametrize("name", ["lightning_llm.optim.MuonAdamW", "torch.optim.SGD"])
def test_it_is_for_adam(name):
    module, _, kind = name.rpartition(".")
    make = getattr(__import__(module, fromlist=[kind]), kind)
    made = LanguageModel(ModelConfig(**BASE, mup=MUP), make)
    made.configure_model()
    with pytest.raises(ValueError, match=f"architecture.mup sets the learning rates of Adam, got {kind}: use AdamW"):
        made.optimizer_over(made.groups_of(made))
