"""Each built-in part against its formula, written out in float64, and every mistake with a part in one line."""

import math
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lightning_llm import LanguageModel, ModelConfig, Transformer
from lightning_llm.measure import MemoryMeter
from lightning_llm.model.attention import CausalSelfAttention
from lightning_llm.model.block import Block
from lightning_llm.model.build import build
from lightning_llm.model.context import Context, Shared
from lightning_llm.model.experts import MixtureOfExperts
from lightning_llm.model.kv_cache import KVCache
from lightning_llm.model.mlp import MLP, GeGLU
from lightning_llm.model.position import Position, rotate, rotation
from lightning_llm.ops import sizes

SIZES = {"vocab_size": 61, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def config(**options):
    return ModelConfig(**{**SIZES, "num_hidden_layers": 2, "max_position_embeddings": 64, **options})


def with_arguments(path, **arguments):
    return {"class_path": path, "init_args": arguments}


def built(kind, **options):
    """A part with large weights, in float64."""
    torch.manual_seed(0)
    made = build(kind, config(**options), seed=0, path=kind).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def context_of(seq, **options):
    positions, position = torch.arange(seq), Position(config())
    return Context(positions, position, Shared(), **options)


@pytest.fixture(params=[128, 7], ids=["one block", "blocks of 7"])
def blocks(request, monkeypatch):
    monkeypatch.setattr(sizes, "ATTENTION_ROWS", request.param)


# ---- MLPs


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        (
            "geglu",
            lambda x, m: m.down_proj(0.5 * m.gate_proj(x) * (1 + torch.erf(m.gate_proj(x) / 2**0.5)) * m.up_proj(x)),
        ),
        ("relu2", lambda x, m: m.down_proj(m.up_proj(x).clamp(min=0) ** 2)),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_an_mlp_is_its_formula(name, formula, bias):
    mlp = built("mlp", mlp=name, mlp_bias=bias)
    assert type(mlp) is (GeGLU if name == "geglu" else MLP)
    x = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(mlp(x), formula(x, mlp))
    assert torch.autograd.gradcheck(mlp, x)


@pytest.mark.parametrize("top_k", [1, 3])
def test_experts_are_a_weighted_sum_of_the_chosen(top_k):
    experts = built("mlp", mlp=with_arguments("mixture_of_experts", num_experts=5, top_k=top_k, z_loss=0.1))
    assert isinstance(experts, MixtureOfExperts)
    x = torch.randn(3, 7, 24, dtype=torch.float64)
    expected, counts, z = torch.zeros_like(x), torch.zeros(5), experts.router(x)
    for row, place in torch.cartesian_prod(torch.arange(3), torch.arange(7)):
        weights, chosen = z[row, place].softmax(-1).topk(top_k)
        for weight, expert in zip(weights / weights.sum(), chosen, strict=True):
            expected[row, place] += weight * experts.experts[expert](x[row, place])
            counts[expert] += 1
    torch.testing.assert_close(experts(x), expected)
    balance = 5 * (counts / counts.sum() * z.softmax(-1).mean((0, 1))).sum()
    drift = z.exp().sum(-1).log().square().mean()
    torch.testing.assert_close(experts.auxiliary_loss, 0.01 * balance + 0.1 * drift)
    assert not experts(x[:, :0]).numel()


def test_balanced_experts_have_a_balance_of_one_and_unused_ones_get_gradients_of_zero():
    experts = built("mlp", mlp=with_arguments("mixture_of_experts", num_experts=4, top_k=1, load_balancing=1, z_loss=0))
    nn.init.zeros_(experts.router.weight)
    experts(torch.randn(3, 8, 24, dtype=torch.float64)).sum().backward()
    assert experts.auxiliary_loss.item() == pytest.approx(1)
    assert sum(bool(expert.up_proj.weight.grad.any()) for expert in experts.experts) == 1


def test_the_auxiliary_loss_is_added_in_training_only():
    model = LanguageModel(config(mlp=with_arguments("mixture_of_experts", num_experts=4, load_balancing=2.0)))
    model.seed = 0
    model.configure_model()
    ids = torch.randint(61, (2, 9))
    batch = {"input_ids": ids, "targets": ids}
    plain = model.cross_entropy(batch)
    with_added = model.loss(batch)
    left = [layer.mlp.auxiliary_loss for layer in model.transformer.layers]
    torch.testing.assert_close(with_added, plain + sum(left))
    torch.testing.assert_close(model.eval().loss(batch), plain)


# ---- attention


def written_out(attention, x, *, window=None, softcap=None, documents=None):
    query, key, value = (
        proj(x).unflatten(-1, (-1, 10)).transpose(1, 2)
        for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
    scores = query @ key.mT / math.sqrt(10)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(x.shape[1])
    seen = place[None] <= place[:, None]
    if window is not None:
        seen = seen & (place[:, None] - place[None] < window)
    if documents is not None:
        seen = seen & (documents[:, None, None] == documents[:, None, :, None])
    mixed = scores.masked_fill(~seen, -math.inf).softmax(-1) @ value
    return attention.o_proj(mixed.transpose(1, 2).flatten(2))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("options", [{"window": 5}, {"softcap": 0.7}, {"window": 5, "softcap": 0.7}, {"window": 99}])
@pytest.mark.parametrize("has_documents", [False, True])
def test_attention_is_its_formula(options, has_documents):
    name = "sliding_window" if "window" in options else "full"
    model = Transformer(config(attention=with_arguments(name, **options), position="none"), seed=0).double()
    attention = model.layers[0].self_attn
    seen = []
    attention.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    documents = torch.tensor([[0] * 9 + [1] * 11, [2] * 20]) if has_documents else None
    model(torch.randint(61, (2, 20)), documents=documents)
    ((x, got),) = seen
    expected = written_out(attention, x, documents=documents, **options)
    torch.testing.assert_close(got, expected)
    weight, inputs = torch.randn_like(got), list(attention.parameters())
    ours, theirs = (torch.autograd.grad((out * weight).sum(), inputs, retain_graph=True) for out in (got, expected))
    torch.testing.assert_close(ours, theirs)


def test_each_so_manieth_layer_is_full():
    made = Transformer(config(num_hidden_layers=6, attention=with_arguments("sliding_window", window=3, every=3)))
    assert (
        [layer.self_attn.window for layer in made.layers] == [3, 3, None, 3, 3, None] == made.config.attention_windows
    )


@pytest.mark.parametrize("name", ["sliding_window", "softcap", "bias"])
def test_decoding_with_a_cache_equals_the_full_forward_pass(name):
    """Several positions after old ones, and rows of unequal length."""
    options = {
        "sliding_window": {"attention": with_arguments("sliding_window", window=4)},
        "softcap": {"attention": with_arguments("full", softcap=1.0)},
        "bias": {"position": f"{__name__}.Distance"},
    }[name]
    model = Transformer(config(**options), seed=0).double()
    ids = torch.randint(61, (2, 15))
    whole = model(ids)
    cache = KVCache(model.config, 2, 15, torch.device("cpu"), torch.float64)
    pieces = [model(part, cache=cache) for part in (ids[:, :6], ids[:, 6:10], *ids[:, 10:].split(1, dim=1))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    cache.set_lengths([9, 12])
    new = torch.stack([ids[0, 9:10], ids[1, 12:13]])
    torch.testing.assert_close(model(new, cache=cache)[:, 0], torch.stack([whole[0, 9], whole[1, 12]]))


def peak_of(attention, seq):
    x = torch.randn(1, seq, 24, requires_grad=True)
    context = context_of(seq)
    with MemoryMeter(exclude=[attention, x]) as meter:
        attention(x, context).sum().backward()
    return meter.peak_bytes


@pytest.mark.parametrize("options", [{"window": 64}, {"window": 64, "softcap": 5.0}, {"softcap": 5.0}])
def test_memory_grows_with_the_context_and_not_with_its_square(options):
    attention = built(
        "attention", attention=with_arguments("sliding_window" if "window" in options else "full", **options)
    )
    peaks = [peak_of(attention.float(), seq) for seq in (2048, 4096)]
    assert peaks[1] <= 2.05 * peaks[0]


def test_a_window_with_dropout_drops_weights():
    options = {"attention": with_arguments("sliding_window", window=4), "dropout": 0.5, "position": "none"}
    attention, x = built("attention", **options), torch.randn(1, 30, 24, dtype=torch.float64)
    assert not torch.equal(attention(x, context_of(30)), attention(x, context_of(30)))
    torch.testing.assert_close(attention.eval()(x, context_of(30)), written_out(attention, x, window=4))


# ---- positions


class Distance(Position):
    """Scores fall with the distance, by head."""

    def score_bias(self, query_positions, key_positions):
        distance = (query_positions[..., :, None] - key_positions[..., None, :]).unsqueeze(-3)
        return -distance * torch.arange(1, 5)[:, None, None] / 7


def test_a_part_of_each_head_is_rotated():
    x = torch.randn(2, 4, 9, 10, dtype=torch.float64)
    cos_sin = rotation(torch.arange(9), 6, 100.0, torch.float64)
    got = rotate(x, cos_sin)
    torch.testing.assert_close(got[..., :6], rotate(x[..., :6], cos_sin))
    assert torch.equal(got[..., 6:], x[..., 6:])
    model = Transformer(config(partial_rotary_factor=0.6))
    assert model.embed_positions.prepare(torch.arange(9), torch.float32)[0].shape == (9, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"truncate": False},
        {"beta_fast": 8, "beta_slow": 2},
        {"attention_factor": 1.5},
        {"mscale": 0.7, "mscale_all_dim": 0.5},
    ],
    ids=lambda changes: next(iter(changes), "usual"),
)
def test_yarn_equals_hugging_face(changes):
    scaling = {**YARN, **changes}
    theirs = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters={**scaling, "rope_theta": 500.0},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    cos, sin = rotation(torch.arange(64), 32, 500.0, torch.float32, scaling)
    angles = torch.arange(64.0)[:, None] * frequencies
    torch.testing.assert_close((cos, sin), (angles.cos() * factor, angles.sin() * factor))


def test_a_llama_with_yarn_has_the_logits_of_hugging_face():
    shape = {
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    ours = Transformer(ModelConfig(**shape, mlp="swiglu", max_position_embeddings=64, rope_scaling=YARN), seed=0)
    rope = {**YARN, "rope_theta": 10000.0}
    theirs = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=64, rms_norm_eps=1e-5, rope_parameters=rope))
    names = {(name if name.startswith("lm_head") else f"model.{name}"): name for name in ours.state_dict()}
    theirs.load_state_dict({hf: ours.state_dict()[name] for hf, name in names.items()})
    ids = torch.randint(61, (2, 50))
    torch.testing.assert_close(ours.logits(ours(ids)), theirs(ids).logits)


# ---- blocks


def test_blocks_join_their_branches_as_their_papers_say():
    x, context = torch.randn(2, 7, 24, dtype=torch.float64), context_of(7)

    def normed(weight, x):
        return F.rms_norm(x, (24,), weight, 1e-5)

    for name in ("pre", "post", "sandwich"):
        block = built("block", block=name)
        norms = {each: module.weight for each, module in block.named_children() if "norm" in each}
        if name == "post":
            first, second = norms.values()
            expected = normed(first, x + block.self_attn(x, context))
            expected = normed(second, expected + block.mlp(expected))
        elif name == "pre":
            first, second = norms.values()
            expected = x + block.self_attn(normed(first, x), context)
            expected = expected + block.mlp(normed(second, expected))
        else:
            first, second, third, fourth = norms.values()
            expected = x + normed(second, block.self_attn(normed(first, x), context))
            expected = expected + normed(fourth, block.mlp(normed(third, expected)))
        torch.testing.assert_close(block(x, context), expected)


@pytest.mark.parametrize("recompute", ["mlp", "attention", "block"])
@pytest.mark.parametrize("block", ["post", "sandwich"])
def test_blocks_recompute(block, recompute):
    found = []
    for part in ("none", recompute):
        model = Transformer(config(block=block, recompute=part), seed=0).double()
        ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
        with MemoryMeter(exclude=[model, ids]) as meter:
            hidden = model(ids)
            saved = meter.live_bytes
        found.append((saved, torch.autograd.grad(hidden.square().sum(), model.layers.parameters())))
    assert found[1][0] < found[0][0]
    torch.testing.assert_close(found[1][1], found[0][1])


# ---- parts from elsewhere


class TwoWords(nn.Module):
    def __init__(self, config, *, width, layer=None):
        super().__init__()
        self.width, self.layer = width, layer

    def forward(self, x):
        return x[..., : self.width]


class NoContext(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, x):
        return x


class LosesItsShape(Block):
    def join(self, x, context):
        return x[:, :1]


class BadRotation(Position):
    def rotate(self, query, key, state):
        return query[..., :2], key


class BadBias(Position):
    def score_bias(self, query_positions, key_positions):
        return torch.zeros(len(query_positions), len(key_positions))


@pytest.fixture(autouse=True)
def _foreign(monkeypatch):
    module = types.ModuleType("elsewhere")
    for kind in (TwoWords, NoContext, LosesItsShape, BadRotation, BadBias, Distance, CausalSelfAttention):
        setattr(module, kind.__name__, kind)
    module.number = 3
    monkeypatch.setitem(sys.modules, "elsewhere", module)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mlp": "elsewhere.Missing"}, "mlp 'elsewhere.Missing' cannot be imported: .*; give package.module.Class"),
        ({"norm": "elsewhere.number"}, "norm 'elsewhere.number' is 3: it must be a class derived from torch.nn.Module"),
        ({"block": "elsewhere.NoContext"}, r"block .* derived from lightning_llm.model.block.Block"),
        ({"position": "elsewhere.NoContext"}, r"position .* derived from lightning_llm.model.position.Position"),
        (
            {"mlp": "elsewhere.TwoWords"},
            r"mlp 'elsewhere.TwoWords' is called as TwoWords\(config, \*\*arguments\): missing a required .*'width'; "
            r"it takes \(config, \*, width, layer=None\)",
        ),
        (
            {"mlp": with_arguments("elsewhere.TwoWords", width=3, height=4)},
            r"mlp 'elsewhere.TwoWords' .*: got an unexpected keyword argument 'height'",
        ),
        (
            {"attention": "elsewhere.NoContext"},
            r"attention 'elsewhere.NoContext' is called as NoContext.forward\(x, context\): too many positional",
        ),
        (
            {"loss": "elsewhere.NoContext"},
            r"loss 'elsewhere.NoContext' is called as NoContext.forward\(hidden, head, targets, weights, num_chunks\)",
        ),
    ],
)
def test_a_part_that_cannot_be_made_is_named(options, says):
    with pytest.raises(ValueError, match=says) as error:
        Transformer(config(**options))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"mlp": with_arguments("elsewhere.TwoWords", width=3)},
            r"mlp TwoWords must return the shape \(2, 5, 24\) of its input, got \(2, 5, 3\)",
        ),
        (
            {"position": "elsewhere.BadRotation"},
            r"position BadRotation must return the shape \(2, 4, 5, 10\) of its input",
        ),
        (
            {"position": "elsewhere.BadBias"},
            r"position BadBias: score_bias must return .*, here \(4, 5, 5\), got \(5, 5\)",
        ),
        ({"block": "elsewhere.LosesItsShape"}, r"block LosesItsShape must return the shape \(2, 5, 24\) of its input"),
    ],
)
def test_a_part_that_returns_another_shape_is_named(options, says):
    with pytest.raises(ValueError, match=says):
        Transformer(config(**options))(torch.zeros(2, 5, dtype=torch.long))


def test_a_part_gets_its_layer_and_its_arguments():
    model = Transformer(config(mlp=with_arguments("elsewhere.TwoWords", width=24)))
    assert [(layer.mlp.layer, layer.mlp.width) for layer in model.layers] == [(0, 24), (1, 24)]
