"""Initial values of custom parts: torch's defaults follow the table, everything else is the constructor's."""

import copy
import random
import time
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from lightning_llm import ModelConfig, Transformer
from lightning_llm.model.attention import CausalSelfAttention
from lightning_llm.model.block import Block
from lightning_llm.model.build import build
from lightning_llm.model.experts import MixtureOfExperts
from lightning_llm.model.mlp import SwiGLU
from lightning_llm.model.norm import RMSNorm
from lightning_llm.model.weights import assigned_stds, kept_names, residual_paths
from lightning_llm.training.distributed import build_sharded

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
STD = 0.02
RESIDUAL_STD = STD / 2  # divided by the root of 2 * num_hidden_layers
MLP = "layers.1.mlp"


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Mapped(nn.Module):
    """An MLP that is one layer, so that each class below need only say what it sets."""

    def __init__(self, config):
        super().__init__()
        self.config, self.size = config, config.hidden_size
        self.make()

    def forward(self, x):
        return x


class OtherNames(nn.Module):
    """SwiGLU with the layers called gate, up and down."""

    def __init__(self, config):
        super().__init__()
        self.gate, self.up = (linear(config.hidden_size, config.intermediate_size) for _ in range(2))
        self.down = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ThenDropout(OtherNames):
    def __init__(self, config):
        super().__init__(config)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(super().forward(x.flatten(0, 1)).view(x.shape))


class ThenScaled(OtherNames):
    """No layer's output is what it returns, and no layer has a name that is known."""

    def forward(self, x):
        return 2 * super().forward(x)


class ScaledByName(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return 2 * self.down_proj(F.relu(self.up_proj(x)))


class Declares(OtherNames):
    residual_outputs = ("down", "up")


class DeclaresNone(OtherNames):
    residual_outputs = ()


class Adapter(nn.Module):
    """``down_proj`` narrows; what widens again is returned."""

    def __init__(self, config):
        super().__init__()
        self.down_proj = linear(config.hidden_size, 4)
        self.wide = linear(4, config.hidden_size)

    def forward(self, x):
        return self.wide(F.relu(self.down_proj(x)))


class Experts(nn.Module):
    """Two experts whose outputs are added: names decide."""

    def __init__(self, config):
        super().__init__()
        self.experts = nn.ModuleList(SwiGLU(config.hidden_size, config.intermediate_size) for _ in range(2))

    def forward(self, x):
        return self.experts[0](x) + self.experts[1](x)


class NeedsFourTokens(OtherNames):
    def forward(self, x):
        if x.shape[1] < 4:
            raise RuntimeError("too short")
        return super().forward(x)


class Attention(nn.Module):
    """Attention with four layers of one shape: only the forward pass says which one writes."""

    def __init__(self, config, layer):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (linear(config.hidden_size, config.hidden_size) for _ in range(4))

    def forward(self, x, context):
        return self.wo(F.scaled_dot_product_attention(self.wq(x), self.wk(x), self.wv(x), is_causal=True))


class LatentValues(nn.Module):
    """``r`` -> hidden inside, and hidden -> hidden as the output."""

    def __init__(self, config, layer):
        super().__init__()
        self.narrow, self.wide = linear(config.hidden_size, 4), linear(4, config.hidden_size)
        self.out = linear(config.hidden_size, config.hidden_size)

    def forward(self, x, context):
        return self.out(self.wide(self.narrow(x)))


class WithoutProjection(CausalSelfAttention):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.wo, self.o_proj = self.o_proj, None


RESIDUAL = [
    ("mlp", OtherNames, {"down"}, "output"),
    ("mlp", ThenDropout, {"down"}, "output"),
    ("mlp", ThenScaled, set(), "none"),
    ("mlp", ScaledByName, {"down_proj"}, "name"),
    ("mlp", Declares, {"down", "up"}, "declared"),
    ("mlp", DeclaresNone, set(), "declared"),
    ("mlp", Adapter, {"wide"}, "output"),
    ("mlp", Experts, {"experts.0.down_proj", "experts.1.down_proj"}, "name"),
    ("mlp", NeedsFourTokens, set(), "none"),
    ("attention", Attention, {"wo"}, "output"),
    ("attention", LatentValues, {"out"}, "output"),
]


def path_of(part):
    return f"tests.model.test_initial_values.{part.__name__}"


def made(seed=3, **changes):
    return Transformer(ModelConfig(**{**SIZES, **changes}), seed=seed)


def with_mlp(part, **options):
    return made(mlp=path_of(part), **options)


@pytest.mark.parametrize(
    ("kind", "part", "expected", "source"), RESIDUAL, ids=lambda each: getattr(each, "__name__", "")
)
def test_who_writes_to_the_residual_stream(kind, part, expected, source):
    model = made(**{kind: path_of(part)})
    place = {"mlp": MLP, "attention": "layers.1.self_attn"}[kind]
    own = model.get_submodule(place)
    assert (own.initial_rule.residual, own.initial_rule.source) == (expected, source)
    stds = assigned_stds(model, model.config)
    for path, module in own.named_modules():
        if isinstance(module, nn.Linear):
            assert stds[f"{place}.{path}.weight"] == (RESIDUAL_STD if path in expected else STD)
            drawn = module.weight.std().item() / (RESIDUAL_STD if path in expected else STD)
            assert drawn == pytest.approx(1, abs=4 / (2 * module.weight.numel()) ** 0.5)


def test_names_of_layers_do_not_change_the_scales():
    theirs, ours = (assigned_stds(model, model.config) for model in (with_mlp(OtherNames), made(mlp="swiglu")))
    assert sorted(theirs.values()) == sorted(ours.values())
    assert theirs[f"{MLP}.down.weight"] == ours[f"{MLP}.down_proj.weight"] == RESIDUAL_STD


def test_an_inherited_declaration_of_a_layer_that_is_gone_is_one_line():
    with pytest.raises(ValueError, match=r"residual_outputs names 'o_proj', which is no submodule: set it to .* wo; "):
        made(attention=path_of(WithoutProjection))


class DeclaresText(OtherNames):
    residual_outputs = "down"


def test_a_declaration_that_is_no_tuple_is_one_line():
    with pytest.raises(ValueError, match="residual_outputs must be a tuple of paths of submodules, got 'down'"):
        with_mlp(DeclaresText)


# ---- what a constructor sets is kept


class Zeros(OtherNames):
    def __init__(self, config):
        super().__init__(config)
        nn.init.zeros_(self.down.weight)


class Orthogonal(Mapped):
    def make(self):
        self.map = linear(self.size, self.size)
        nn.init.orthogonal_(self.map.weight)


class ScaledCopy(Mapped):
    def make(self):
        self.first = linear(self.size, self.size)
        self.map = linear(self.size, self.size)
        with torch.no_grad():
            self.map.weight.copy_(self.first.weight / 2)


class ThroughData(Mapped):
    def make(self):
        self.map = linear(self.size, self.size)
        self.map.weight.data.mul_(0.1)


class TwoThroughData(Mapped):
    def make(self):
        self.maps = nn.ModuleList(linear(self.size, self.size) for _ in range(2))
        for layer in self.maps:
            layer.weight.data.mul_(0.1)


class Raw(Mapped):
    def make(self):
        self.map = nn.Parameter(torch.randn(self.size))
        self.ones = nn.Parameter(torch.ones(self.size))  # has the bytes of a norm's default
        self.norm = nn.LayerNorm(self.size)


class Convolution(Mapped):
    def make(self):
        self.map = nn.Conv1d(1, 1, 3)


class Recurrent(Mapped):
    def make(self):
        self.map = nn.GRU(self.size, self.size)


class MultiHead(Mapped):
    def make(self):
        self.map = nn.MultiheadAttention(self.size, 2)


class Normed(Mapped):
    def make(self):
        self.map = RMSNorm(self.size, eps=1e-6)
        nn.init.constant_(self.map.weight, 0.5)


class CastedLinear(nn.Linear):
    def reset_parameters(self):
        nn.init.uniform_(self.weight, -1, 1)


class OwnReset(Mapped):
    def make(self):
        self.map = CastedLinear(self.size, self.size, bias=False)


class LaterScaled(nn.Linear):
    def reset_parameters(self):
        super().reset_parameters()
        self.weight.data.mul_(3)


class ResetAndMore(Mapped):
    def make(self):
        self.map = LaterScaled(self.size, self.size, bias=False)


class Parametrized(Mapped):
    def make(self):
        self.map = parametrizations.weight_norm(linear(self.size, self.size))


class ParametrizedOrthogonal(Mapped):
    def make(self):
        self.map = parametrizations.orthogonal(linear(self.size, self.size))


class Tied(Mapped):
    """A table of the constructor, which a layer uses under a later name."""

    def make(self):
        self.table = nn.Parameter(torch.randn(self.size, self.size))
        self.map = linear(self.size, self.size)
        self.map.weight = self.table


KEPT = [
    (Zeros, {"down.weight"}),
    (Orthogonal, {"map.weight"}),
    (ScaledCopy, {"map.weight"}),
    (ThroughData, {"map.weight"}),
    (TwoThroughData, {"maps.0.weight", "maps.1.weight"}),
    (Raw, {"map", "ones"}),
    (Convolution, {"map.weight", "map.bias"}),
    (Recurrent, {"map.weight_ih_l0", "map.weight_hh_l0", "map.bias_ih_l0", "map.bias_hh_l0"}),
    (MultiHead, {"map.in_proj_weight", "map.in_proj_bias", "map.out_proj.bias"}),
    (Normed, {"map.weight"}),
    (OwnReset, {"map.weight"}),
    (ResetAndMore, {"map.weight"}),
    (Parametrized, {"map.parametrizations.weight.original0", "map.parametrizations.weight.original1"}),
    (ParametrizedOrthogonal, {"map.parametrizations.weight.original"}),
    (Tied, {"table"}),
]


@pytest.mark.parametrize(("part", "names"), KEPT, ids=lambda each: getattr(each, "__name__", ""))
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_what_a_constructor_sets_is_kept(part, names):
    model = with_mlp(part)
    assert {name for name in kept_names(model) if name.startswith(MLP)} == {f"{MLP}.{name}" for name in names}
    as_made = build("mlp", model.config, seed=3, path=MLP, layer=1)
    values = dict(as_made.named_parameters())
    for name, value in model.get_submodule(MLP).named_parameters():
        if name in names:
            assert torch.equal(value, values[name]), name
        elif name.endswith(".weight") and value.dim() == 2:
            assert not torch.equal(value, values[name])
            assert f"{MLP}.{name}" in assigned_stds(model, model.config)


def test_the_values_that_were_asked_for_are_there():
    assert not with_mlp(Zeros).get_submodule(f"{MLP}.down").weight.any()
    rotation = with_mlp(Orthogonal).get_submodule(f"{MLP}.map").weight
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(16))
    one, other = with_mlp(TwoThroughData).get_submodule(f"{MLP}.maps")
    assert not torch.equal(one.weight, other.weight)
    copied = with_mlp(ScaledCopy)
    assert copied.get_submodule(f"{MLP}.first").weight.std() < 0.5 * copied.get_submodule(f"{MLP}.map").weight.std()


class Copies(Mapped):
    """Copies of one layer, which still have torch's default."""

    def make(self):
        layer = nn.Linear(self.size, self.size)
        self.maps = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))


class TiedLayers(Mapped):
    def make(self):
        self.first, self.second = linear(self.size, self.size), linear(self.size, self.size)
        self.second.weight = self.first.weight


class Padded(Mapped):
    def make(self):
        self.table = nn.Embedding(5, self.size, padding_idx=2)


def test_copies_of_a_layer_get_values_of_their_own():
    model = with_mlp(Copies)
    weights = [layer.weight for layer in model.get_submodule(f"{MLP}.maps")]
    assert not kept_names(model)
    assert len({tuple(weight.flatten().tolist()) for weight in weights}) == 3
    assert not any(layer.bias.any() for layer in model.get_submodule(f"{MLP}.maps"))


def test_a_tied_weight_is_drawn_once_by_its_first_name():
    tied, plain = with_mlp(TiedLayers), assigned_stds(with_mlp(TiedLayers), ModelConfig(**SIZES))
    assert f"{MLP}.first.weight" in plain
    assert f"{MLP}.second.weight" not in plain
    alone = with_mlp(Alone).get_submodule(f"{MLP}.first").weight
    assert torch.equal(tied.get_submodule(f"{MLP}.second").weight, alone)


class Alone(Mapped):
    def make(self):
        self.first = linear(self.size, self.size)


def test_the_row_of_padding_is_zero():
    table = with_mlp(Padded).get_submodule(f"{MLP}.table").weight
    assert not table[2].any()
    assert table[1].any()


# ---- what a constructor draws


class Draws(Mapped):
    def make(self):
        self.torchs = nn.Parameter(torch.randn(self.size))
        self.pythons = nn.Parameter(torch.tensor([random.random() for _ in range(self.size)]))
        self.numpys = nn.Parameter(torch.from_numpy(np.random.rand(self.size)).float())  # noqa: NPY002


class DrawsAfterLayers(Draws):
    def make(self):
        self.layers = nn.ModuleList(nn.Linear(self.size, self.size) for _ in range(self.config.num_hidden_layers + 3))
        super().make()


DRAWN = ("torchs", "pythons", "numpys")


def draws(model, layer=1):
    part = model.layers[layer].mlp
    return [getattr(part, name).detach().float() for name in DRAWN]


def test_draws_do_not_depend_on_how_many_layers_of_torch_are_made_before():
    for one, other in zip(draws(with_mlp(Draws)), draws(with_mlp(DrawsAfterLayers)), strict=True):
        assert torch.equal(one, other)


def test_draws_depend_on_seed_and_path():
    usual, other_seed, other_layer = draws(with_mlp(Draws)), draws(with_mlp(Draws, seed=4)), draws(with_mlp(Draws), 0)
    for one, other, another in zip(usual, other_seed, other_layer, strict=True):
        assert not torch.equal(one, other)
        assert not torch.equal(one, another)


def test_the_global_generators_are_as_before():
    def state():
        return torch.rand(1).item(), random.random(), np.random.rand()  # noqa: NPY002

    for seed in (1, 2):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)  # noqa: NPY002
        expected = state()
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)  # noqa: NPY002
        with_mlp(Draws)
        assert state() == expected


@pytest.mark.parametrize("part", [Draws, Zeros, ThroughData, Orthogonal, Parametrized])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_model_of_another_dtype_has_the_same_values_rounded(part, dtype):
    usual = with_mlp(part).state_dict()
    torch.set_default_dtype(dtype)
    try:
        other = with_mlp(part).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    for name, value in usual.items():
        asks_for_float32 = name.endswith("numpys")
        assert other[name].dtype == (torch.float32 if asks_for_float32 else dtype), name
        assert torch.equal(other[name], value.to(other[name].dtype)), name


def test_a_built_in_part_that_draws_itself_is_rounded_too():
    options = {"attention": "gated_delta_net", "position": "none", "num_key_value_heads": 2}
    usual = made(**options).state_dict()
    torch.set_default_dtype(torch.bfloat16)
    try:
        other = made(**options).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(other[name], value.bfloat16()) for name, value in usual.items())


def test_another_default_device_changes_nothing():
    usual = with_mlp(Draws).state_dict()
    with torch.device("cpu:0"):
        other = with_mlp(Draws).state_dict()
    assert all(torch.equal(other[name], value) for name, value in usual.items())


class DoesNotLoadOnMeta(Mapped):
    made_on: ClassVar[list[str]] = []

    def make(self):
        self.map = nn.Parameter(torch.randn(self.size))
        self.made_on.append(self.map.device.type)


def test_on_meta_the_constructor_runs_and_nothing_else():
    DoesNotLoadOnMeta.made_on.clear()
    with torch.device("meta"):
        model = with_mlp(DoesNotLoadOnMeta)
    assert DoesNotLoadOnMeta.made_on == ["meta"] * 2
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not kept_names(model)


def in_two_processes(rank):
    mesh = init_device_mesh("cpu", (2,))
    for part in (Zeros, ThroughData, Draws, OtherNames):
        model = with_mlp(part)
        sharded = build_sharded(model.config, mesh, torch.device("cpu"), seed=3)
        values = model.state_dict()
        for name, value in sharded.state_dict().items():
            assert torch.equal(value.full_tensor(), values[name]), name


def test_a_model_sharded_over_two_processes_has_the_same_values(two_processes):
    two_processes(in_two_processes)


# ---- what is refused


class Lazy(Mapped):
    def make(self):
        self.map = nn.LazyLinear(self.size)


class NewMemory(Mapped):
    """So much that the system gives fresh pages, which are zero each time."""

    def make(self):
        self.map = nn.Parameter(torch.empty(1 << 24))


class Clock(Mapped):
    def make(self):
        self.map = nn.Parameter(torch.full((self.size,), time.perf_counter(), dtype=torch.float64))


class OwnGenerator(Mapped):
    generator = torch.Generator()

    def make(self):
        self.map = nn.Parameter(torch.rand(self.size, generator=self.generator))


class Inside(Mapped):
    """The value that changes is used to scale a layer."""

    def make(self):
        self.map = linear(self.size, self.size)
        self.map.weight.data.mul_(np.random.default_rng().random())


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (Lazy, "has a parameter without a shape, map.weight: give its layer the input size"),
        (NewMemory, "sets map to other values each time it is made with one seed"),
        (Clock, "sets map to other values each time it is made with one seed"),
        (OwnGenerator, "sets map to other values each time it is made with one seed"),
        (Inside, "sets map.weight to other values each time it is made with one seed"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_part_whose_values_are_not_known_is_refused(part, says):
    with pytest.raises(ValueError, match=f"^mlp '{path_of(part)}' {says}"):
        with_mlp(part)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_parameter_without_a_shape_is_refused_on_meta():
    with torch.device("meta"), pytest.raises(ValueError, match="without a shape"):
        with_mlp(Lazy)


def test_settings_of_torch_are_as_before():
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    resets = nn.Linear.reset_parameters, nn.RMSNorm.reset_parameters
    with pytest.raises(ValueError, match="each time"):
        with_mlp(NewMemory)
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    assert resets == (nn.Linear.reset_parameters, nn.RMSNorm.reset_parameters)
    assert torch.get_default_dtype() == torch.float32


# ---- parts inside parts


class ZeroBlock(Block):
    """A custom block of built-in parts, whose constructor changes one of them."""

    def __init__(self, config, layer, seed):
        super().__init__(config, layer, seed)
        nn.init.zeros_(self.mlp.down_proj.weight)
        self.mix = linear(config.hidden_size, config.hidden_size)


class PlainBlock(Block):
    pass


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention": "canon"},
        {"attention": "gated_delta_net", "position": "none", "num_key_value_heads": 2},
        {"mlp": "mixture_of_experts"},
        {"mlp": path_of(OtherNames), "attention": path_of(Attention)},
        {"mlp": path_of(Draws)},
    ],
)
def test_a_custom_block_gives_the_same_values_to_the_parts_inside(options):
    usual, custom = made(**options).state_dict(), made(block=path_of(PlainBlock), **options).state_dict()
    assert usual.keys() == custom.keys()
    for name, value in usual.items():
        assert torch.equal(custom[name], value), name


def test_a_custom_block_may_change_the_parts_inside():
    usual, custom = made().state_dict(), made(block=path_of(ZeroBlock)).state_dict()
    for name, value in usual.items():
        if name.endswith("down_proj.weight"):
            assert not custom[name].any()
        else:
            assert torch.equal(custom[name], value), name
    assert custom["layers.0.mix.weight"].std() == pytest.approx(STD, rel=0.2)


def test_built_in_parts_declare_what_writes_to_the_residual_stream():
    model = made(mlp={"class_path": "mixture_of_experts", "init_args": {"num_experts": 2, "top_k": 1}})
    written = {f"layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.o_proj",)}
    written |= {f"layers.{layer}.mlp.experts.{each}.down_proj" for layer in range(2) for each in range(2)}
    assert residual_paths(model) == written
    assert not kept_names(model)


class MyExperts(MixtureOfExperts):
    def __init__(self, config):
        super().__init__(config, num_experts=3, top_k=1)


def test_a_class_derived_from_a_built_in_part_inherits_its_declaration():
    usual = made(mlp={"class_path": "mixture_of_experts", "init_args": {"num_experts": 3, "top_k": 1}}).state_dict()
    derived = with_mlp(MyExperts).state_dict()
    assert all(torch.equal(derived[name], value) for name, value in usual.items())


# ---- a constructor that reads values


class DropPath(nn.Module):
    """An MLP whose constructor reads the value of a tensor, as those of stochastic depth do."""

    def __init__(self, config):
        super().__init__()
        self.share = torch.linspace(0, 0.5, 3)[1].item()
        self.into = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x):
        return self.into(x) * (1 - self.share)


class DropPathByNumpy(DropPath):
    def __init__(self, config):
        super().__init__(config)
        self.share = float(torch.linspace(0, 0.5, 3, dtype=torch.float32).numpy()[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["DropPath", "DropPathByNumpy"])
def test_a_constructor_may_read_values(name, dtype):
    config = ModelConfig(vocab_size=11, hidden_size=8, num_attention_heads=2, mlp=f"{__name__}.{name}")
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        made = Transformer(config, seed=0)
        with torch.device("meta"):
            empty = Transformer(config, seed=0)
    finally:
        torch.set_default_dtype(usual)
    assert made.layers[0].mlp.share == empty.layers[0].mlp.share == 0.25
    assert {name: (p.shape, p.dtype) for name, p in made.named_parameters()} == {
        name: (p.shape, p.dtype) for name, p in empty.named_parameters()
    }
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert made.layers[0].mlp.into.weight.dtype == dtype
