"""The transformer against Hugging Face's Llama, against itself with a cache, and as every shape its config allows."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_llm import ModelConfig, Transformer
from lightning_llm.measure import MemoryMeter
from lightning_llm.model.kv_cache import KVCache
from lightning_llm.model.mlp import MLP
from tests.ops.judged import relative_error

SIZES = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 77,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


class DoubleMLP(torch.nn.Module):
    """A user's own MLP, for the import path."""

    def __init__(self, config):
        super().__init__()
        self.inner = MLP(config.hidden_size, config.intermediate_size, activation="relu")

    def forward(self, x):
        return 2 * self.inner(x)


def build(**options):
    torch.manual_seed(0)
    return Transformer(ModelConfig(**{**SIZES, **options}))


def randomized(model):
    """Large enough weights that a wrong detail shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 1.0))
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("mlp", ["swiglu", "memory_optimized_swiglu"])
def test_logits_and_gradients_equal_hugging_face_llama(tied, biases, mlp):
    if biases and mlp == "memory_optimized_swiglu":
        biases_here = {"attention_bias": True}
    else:
        biases_here = {"attention_bias": biases, "mlp_bias": biases}
    ours = randomized(build(tie_word_embeddings=tied, mlp=mlp, **biases_here))
    theirs = LlamaForCausalLM(
        LlamaConfig(**SIZES, tie_word_embeddings=tied, attn_implementation="eager", **biases_here)
    ).eval()
    rename = {(name if name.startswith("lm_head") else f"model.{name}"): name for name in ours.state_dict()}
    theirs.load_state_dict({hf: ours.state_dict()[name] for hf, name in rename.items()})
    truth = copy.deepcopy(theirs).double()
    input_ids, targets = torch.randint(0, 99, (2, 3, 33))

    def run(model, logits_of):
        logits = logits_of(model)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        return logits.detach(), {name: p.grad for name, p in model.named_parameters()}

    ours_logits, ours_grads = run(ours, lambda m: m.logits(m(input_ids)))
    their_logits, their_grads = run(theirs, lambda m: m(input_ids).logits)
    true_logits, true_grads = run(truth, lambda m: m(input_ids).logits)

    # the truth is Hugging Face's model in float64, the measure its own error in float32
    assert relative_error(ours_logits, true_logits) <= 2 * relative_error(their_logits, true_logits)
    # all gradients as one vector: of a bias with 16 entries alone, two sound computations differ by more than twice
    names = [hf for hf, name in rename.items() if name in ours_grads]
    ours_all, theirs_all, true_all = (
        torch.cat([grads[name].flatten() for name in each])
        for grads, each in ((ours_grads, [rename[hf] for hf in names]), (their_grads, names), (true_grads, names))
    )
    assert relative_error(ours_all, true_all) <= 2 * relative_error(theirs_all, true_all)


@pytest.mark.parametrize("position", ["rope", "learned", "none"])
def test_decoding_with_a_cache_equals_the_full_forward_pass(position):
    model = randomized(build(position=position)).double()
    input_ids = torch.randint(0, 99, (2, 31))
    cache = KVCache(model.config, 2, 31, torch.device("cpu"), torch.float64)
    parts = [input_ids[:, :9], input_ids[:, 9:20], *input_ids[:, 20:].split(1, dim=1)]
    pieces = torch.cat([model(part, cache=cache) for part in parts], dim=1)
    torch.testing.assert_close(pieces, model(input_ids))


@pytest.mark.parametrize("position", ["rope", "alibi"])
def test_a_layer_may_leave_the_positions_out(position):
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "num_hidden_layers": 2, "hidden_size": 32}
    ids = torch.randint(20, (2, 12))
    first, second = ({"layers": [own, {"position": "none"}]} for own in ({}, {"position": "none"}))
    cases = [{"position": position, **first}, {"position": position, **second}, {"position": "none"}]
    models = [Transformer(ModelConfig(**sizes, **case, initializer_range=0.3)).double() for case in cases]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    half, without, none = (model(ids) for model in models)
    assert torch.equal(without, none)
    assert (half - none).abs().max() > 0.01


def test_a_position_depends_on_no_later_token():
    model = randomized(build())
    first = torch.randint(0, 98, (1, 20))
    second = first.clone()
    second[0, 12:] += 1
    torch.testing.assert_close(model(first)[:, :12], model(second)[:, :12], rtol=0, atol=0)
    assert not torch.equal(model(first)[:, 12:], model(second)[:, 12:])


def test_the_first_character_model_of_the_course_is_a_config():
    model = build(
        vocab_size=65,
        hidden_size=32,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=10,
        intermediate_size=128,
        max_position_embeddings=16,
        norm="layernorm",
        position="learned",
        mlp="relu",
        dropout=0.1,
        attention_bias=True,
        mlp_bias=True,
        lm_head_bias=True,
    )
    assert model.layers[0].self_attn.q_proj.weight.shape == (30, 32)
    assert model.lm_head.bias.shape == (65,)
    assert model.logits(model(torch.randint(0, 65, (2, 16)))).shape == (2, 16, 65)


def test_dropout_acts_in_training_mode_only():
    model = randomized(build(dropout=0.5))
    input_ids = torch.randint(0, 99, (1, 8))
    assert not torch.equal(model(input_ids), model(input_ids))
    model.eval()
    torch.testing.assert_close(model(input_ids), model(input_ids), rtol=0, atol=0)


def test_a_users_own_mlp_by_import_path():
    model = build(mlp=f"{DoubleMLP.__module__}.DoubleMLP") if "." in DoubleMLP.__module__ else None
    if model is None:  # the test module's name has no dot: name the class through a package
        model = build(mlp="tests_own_mlp.DoubleMLP")
    assert isinstance(model.layers[0].mlp.inner, MLP)


@pytest.fixture(autouse=True)
def _own_mlp_module(monkeypatch):
    import sys
    import types

    module = types.ModuleType("tests_own_mlp")
    module.DoubleMLP = DoubleMLP
    module.not_a_class = 3
    monkeypatch.setitem(sys.modules, "tests_own_mlp", module)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_such_module.Thing", "cannot be imported"),
        ("tests_own_mlp.Missing", "cannot be imported"),
        ("tests_own_mlp.not_a_class", "derived from torch.nn.Module"),
    ],
)
def test_an_mlp_that_cannot_be_had_is_named(path, says):
    with pytest.raises(ValueError, match=says):
        build(mlp=path)


def test_residual_projections_start_smaller_by_the_depth():
    model = build(
        num_hidden_layers=8, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=4
    )
    block = model.layers[3]
    assert block.mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for residual in (block.mlp.down_proj, block.self_attn.o_proj):
        assert residual.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_standard_and_memory_optimised_share_one_state_dict():
    standard, optimised = build(mlp="swiglu"), build(mlp="memory_optimized_swiglu")
    assert list(standard.state_dict()) == list(optimised.state_dict())
    optimised.load_state_dict(randomized(standard).state_dict())
    input_ids = torch.randint(0, 99, (1, 9))
    torch.testing.assert_close(optimised(input_ids), standard(input_ids))


def test_more_positions_than_the_model_has_are_refused():
    with pytest.raises(ValueError, match="65 positions are more than max_position_embeddings 64"):
        build()(torch.zeros(1, 65, dtype=torch.long))


def test_a_vocabulary_must_be_known():
    with pytest.raises(ValueError, match="vocab_size is None"):
        Transformer(ModelConfig())


def bytes_kept(**options):
    from lightning_llm.measure import MemoryMeter

    model = build(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        **options,
    ).double()
    input_ids = torch.randint(0, 99, (4, 64))
    with MemoryMeter(exclude=[model, input_ids]) as meter:
        hidden = model(input_ids)
        kept = meter.live_bytes
        hidden.sum().backward()
    return kept, [p.grad for p in model.parameters() if p.grad is not None]


def assert_same_gradients(first, second):
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


def test_each_checkpoint_level_keeps_less_and_computes_the_same():
    found = [bytes_kept(mlp="swiglu")]
    found += [bytes_kept(mlp="memory_optimized_swiglu", checkpoint_level=level) for level in (0, 1, 2)]
    kept = [each[0] for each in found]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4
    for _, gradients in found[1:]:
        assert_same_gradients(gradients, found[0][1])


def test_levels_by_layer_lie_between():
    most, mixed, least = (
        bytes_kept(mlp="memory_optimized_swiglu", checkpoint_level=level)[0] for level in (0, [0, 0, 1, 1], 1)
    )
    assert most > mixed > least


@pytest.mark.parametrize("part", ["mlp", "attention", "block"])
def test_recomputing_keeps_less_and_computes_the_same(part):
    kept, gradients = bytes_kept(recompute="none")
    less, again = bytes_kept(recompute=part)
    assert less < kept
    assert_same_gradients(again, gradients)


def test_decoding_recomputes_nothing_and_fills_its_cache():
    model, plain = build(recompute="block").eval(), build().eval()
    model.load_state_dict(plain.state_dict())
    input_ids = torch.randint(0, 99, (2, 12))
    cache = KVCache(model.config, 2, 12, torch.device("cpu"), torch.float32)
    torch.testing.assert_close(model(input_ids, cache=cache), plain(input_ids))
    assert cache.length == 12


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("recompute", ["none", "attention", "block"])
def test_documents_in_one_row_are_as_if_each_were_run_alone(position, recompute):
    model = randomized(build(position=position, recompute=recompute)).double()
    lengths = ([5, 1, 9], [15])
    ids = torch.randint(0, 99, (2, 15))
    documents = torch.tensor([[7] * 5 + [3] + [8] * 9, [0] * 15])
    packed = model(ids, documents=documents)
    weight = torch.randn_like(packed)
    together = torch.autograd.grad((packed * weight).sum(), list(model.parameters()), allow_unused=True)
    model.zero_grad()
    for row, sizes in enumerate(lengths):
        alone = [model(part[None])[0] for part in ids[row].split(sizes)]
        torch.testing.assert_close(packed[row], torch.cat(alone))
        (torch.cat(alone) * weight[row]).sum().backward()
    for got, parameter in zip(together, model.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad)


def bytes_of_a_step(seq):
    """The peak of forward and backward of a row with three documents, by the meter."""
    model = build(num_hidden_layers=1, max_position_embeddings=seq)
    ids, documents = torch.zeros(1, seq, dtype=torch.long), torch.tensor([0, 0, 1, 2]).repeat_interleave(seq // 4)[None]
    with MemoryMeter(exclude=[model, ids, documents]) as meter:
        model(ids, documents=documents).sum().backward()
    return meter.peak_bytes


def test_memory_of_packed_documents_grows_with_the_context_and_not_with_its_square():
    peaks = [bytes_of_a_step(seq) for seq in (2048, 4096, 8192)]
    assert peaks[1] <= 2.01 * peaks[0]
    assert peaks[2] <= 2.01 * peaks[1]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_layers_share_what_says_which_documents_they_see(dropout):
    """A dense mask with dropout in training, and else none."""
    model, seen = build(num_hidden_layers=4, dropout=dropout), []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[1].mask))
    for mode in (True, False):
        model.train(mode)(torch.randint(0, 31, (2, 15)), documents=torch.zeros(2, 15, dtype=torch.long))
    for masks, is_dense in ((seen[:4], dropout > 0), (seen[4:], False)):
        assert all(mask is masks[0] for mask in masks)
        assert isinstance(masks[0], torch.Tensor) == is_dense


def test_documents_of_another_shape_or_with_a_cache_are_refused():
    model, ids = build(), torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"documents must have the shape \(2, 5\) .*got \(2, 4\)$"):
        model(ids, documents=torch.zeros(2, 4))
    cache = KVCache(model.config, 2, 8, torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="and no cache with them"):
        model(ids, documents=ids, cache=cache)
