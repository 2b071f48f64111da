"""When the operators read a weight, and when they call the module: adapters, hooks, replaced and quantized layers."""

import copy
from functools import partial

import pytest
import torch
from lightning.pytorch.profilers.pytorch import RegisterRecordFunction
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_llm import LanguageModel, MemoryOptimizedSwiGLU, ModelConfig, SwiGLU, Transformer
from lightning_llm.generation import generate
from lightning_llm.generation.packed_step import can_pack
from lightning_llm.measure import MemoryMeter
from lightning_llm.measure.attribution import AttributedMeter
from lightning_llm.model.norm import RMSNorm
from lightning_llm.model.unmodified import is_unmodified

HIDDEN, WIDTH, VOCAB = 12, 20, 31
LEVELS = [0, 1, 2]
PROJECTIONS = ["gate_proj", "up_proj", "down_proj"]


class Doubled(nn.Linear):
    """A class of the user's own, as quantized layers are."""

    def forward(self, x):
        return 2 * super().forward(x)


class Wrapped(torch.Tensor):
    """A tensor with another inside, as torchao's quantized weights are."""

    def __tensor_flatten__(self):
        return [], None


def replaced(parent, name):
    linear = getattr(parent, name)
    other = Doubled(linear.in_features, linear.out_features, bias=False)
    other.load_state_dict(linear.state_dict())
    setattr(parent, name, other)


def with_a_bias(parent, name):
    linear = getattr(parent, name)
    linear.bias = nn.Parameter(torch.linspace(-1, 1, linear.out_features))


def with_its_own_forward(parent, name):
    """As accelerate does it."""
    linear = getattr(parent, name)
    linear.forward = lambda x: 3 * type(linear).forward(linear, x)


def scaled_gradient(module, grad_input, grad_output):
    return tuple(None if grad is None else 5 * grad for grad in grad_input)


CHANGES = {
    "forward hook": lambda parent, name: getattr(parent, name).register_forward_hook(lambda m, args, out: 2 * out),
    "forward pre-hook": lambda parent, name: getattr(parent, name).register_forward_pre_hook(
        lambda m, args: (2 * args[0],)
    ),
    "backward hook": lambda parent, name: getattr(parent, name).register_full_backward_hook(scaled_gradient),
    "backward pre-hook": lambda parent, name: getattr(parent, name).register_full_backward_pre_hook(
        lambda m, grads: tuple(2 * grad for grad in grads)
    ),
    "pruning": lambda parent, name: prune.l1_unstructured(getattr(parent, name), "weight", 0.5),
    "class": replaced,
    "bias": with_a_bias,
    "forward of its own": with_its_own_forward,
}


def inputs_and(changed, name, level):
    """Both MLPs with the same weights and the same change."""
    torch.manual_seed(0)
    mlps = [SwiGLU(HIDDEN, WIDTH), MemoryOptimizedSwiGLU(HIDDEN, WIDTH, level)]
    mlps[1].load_state_dict(mlps[0].state_dict())
    for mlp in mlps:
        changed(mlp, name)
    norm = nn.RMSNorm(HIDDEN, eps=0.1)
    nn.init.uniform_(norm.weight)
    return mlps, norm


def outcome(function, modules, x):
    x = x.clone().requires_grad_()
    y = function(x)
    parameters = [p for module in modules for p in module.parameters()]
    return [y, *torch.autograd.grad(y.square().sum(), [x, *parameters])]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_call_of_a_projection_does_is_done(change, name, level):
    (plain, ours), norm = inputs_and(CHANGES[change], name, level)
    x = torch.randn(7, HIDDEN)
    expected = outcome(lambda x: plain(norm(x)), [plain, norm], x)
    torch.testing.assert_close(outcome(lambda x: ours(x, norm), [ours, norm], x), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(HIDDEN),
        nn.RMSNorm(HIDDEN),  # an epsilon that depends on the dtype
        nn.RMSNorm(HIDDEN, eps=0.1, elementwise_affine=False),
        nn.Sequential(nn.RMSNorm(HIDDEN, eps=0.1)),
    ],
    ids=["layer", "eps", "weight", "class"],
)
def test_a_norm_that_is_not_the_usual_one_is_called(norm, level):
    (plain, ours), _ = inputs_and(lambda parent, name: None, "", level)
    x = torch.randn(7, HIDDEN)
    expected = outcome(lambda x: plain(norm(x)), [plain, norm], x)
    torch.testing.assert_close(outcome(lambda x: ours(x, norm), [ours, norm], x), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_a_hook_on_the_norm_is_called(level):
    (plain, ours), norm = inputs_and(lambda parent, name: None, "", level)
    norm.register_forward_hook(lambda module, args, out: out + 1)
    x = torch.randn(7, HIDDEN)
    expected = outcome(lambda x: plain(norm(x)), [plain, norm], x)
    torch.testing.assert_close(outcome(lambda x: ours(x, norm), [ours, norm], x), expected)


def test_a_parametrized_projection_is_read(monkeypatch):
    (plain, ours), norm = inputs_and(
        lambda parent, name: parametrizations.weight_norm(getattr(parent, name)), "up_proj", 2
    )
    x = torch.randn(7, HIDDEN)
    expected = outcome(lambda x: plain(norm(x)), [plain, norm], x)
    monkeypatch.setattr(SwiGLU, "forward", _refuse)
    torch.testing.assert_close(outcome(lambda x: ours(x, norm), [ours, norm], x), expected)


def test_a_weight_with_tensors_inside_is_not_plain():
    linear = nn.Linear(3, 4)
    assert is_unmodified(linear, nn.Linear)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Wrapped))
    assert not is_unmodified(linear, nn.Linear)
    assert not is_unmodified(nn.Embedding(3, 4), nn.Linear)


@pytest.mark.parametrize("mlp", [SwiGLU, MemoryOptimizedSwiGLU])
def test_bias_device_and_dtype_are_those_of_linear(mlp):
    made = mlp(HIDDEN, WIDTH, bias=True, device="meta", dtype=torch.bfloat16)
    kinds = {(p.device.type, p.dtype) for p in made.parameters()}
    assert kinds == {("meta", torch.bfloat16)}
    assert dict(made.named_parameters()).keys() == {f"{p}.{n}" for p in PROJECTIONS for n in ("weight", "bias")}
    assert all(p.bias is None for p in mlp(HIDDEN, WIDTH).children())


# Who only watches -----------------------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """The names of what runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _refuse(*_):
    raise AssertionError("the standard path")


def a_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": 3}
    model = LanguageModel(ModelConfig(**sizes, num_attention_heads=2, checkpoint_level=LEVELS))
    model.configure_model()
    return model


def a_batch():
    ids = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}


def test_a_profiled_step_has_the_operators_and_the_peak_of_any_other(monkeypatch):
    monkeypatch.setattr(SwiGLU, "forward", _refuse)
    model, batch = a_model(), a_batch()

    def step():
        with MemoryMeter([model, *batch.values()]) as meter, Operators() as operators:
            loss = model.loss(batch)
            loss.backward()
        model.zero_grad()
        return meter.peak_bytes, operators.names

    step()  # the first fills what is held from then on
    alone = step()
    profiler = AttributedMeter(model, inputs=batch)
    profiler.begin("forward")
    with profiler:
        profiled = step()
    profiler.close()
    assert profiled == alone


def test_a_profile_of_lightnings_and_a_count_of_flops_take_the_usual_path(monkeypatch):
    monkeypatch.setattr(SwiGLU, "forward", _refuse)
    model, batch = a_model(), a_batch()
    with RegisterRecordFunction(model):
        model.loss(batch).backward()
    with FlopCounterMode(display=False):
        model.loss(batch).backward()


def test_a_hook_for_all_modules_is_foreign():
    mlp, seen = MemoryOptimizedSwiGLU(HIDDEN, WIDTH), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        mlp(torch.randn(3, HIDDEN))
    finally:
        handle.remove()
    assert seen == [*mlp.children(), mlp]


@pytest.mark.parametrize("recompute", ["mlp", "block"])
def test_recomputed_parts_take_the_usual_path(recompute, monkeypatch):
    monkeypatch.setattr(SwiGLU, "forward", _refuse)
    config = ModelConfig(vocab_size=VOCAB, hidden_size=HIDDEN, num_attention_heads=2, recompute=recompute)
    Transformer(config)(a_batch()["input_ids"]).sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore:.*Function.. should not be instantiated")
@pytest.mark.parametrize("level", LEVELS)
def test_a_compiled_mlp_takes_the_usual_path_in_one_graph(level, monkeypatch):
    monkeypatch.setattr(SwiGLU, "forward", _refuse)
    torch.compiler.reset()
    (_, ours), _ = inputs_and(lambda parent, name: None, "", level)
    norm = RMSNorm(HIDDEN, eps=0.1)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = torch.randn(7, HIDDEN)
    expected = outcome(lambda x: ours(x, norm), [ours, norm], x)
    torch.testing.assert_close(outcome(lambda x: compiled(x, norm), [ours, norm], x), expected)
    torch.compiler.reset()


# Adapters -------------------------------------------------------------------------------------------------------------


def with_adapters(model, **options):
    """LoRA on all linear layers, with a B that is not zero: then an adapter changes the result."""
    from peft import LoraConfig, inject_adapter_in_model

    names = [*(f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")), "lm_head"]
    adapted = inject_adapter_in_model(LoraConfig(r=2, target_modules=names, **options), model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return adapted


def adapters_of(model):
    found = {name: p.grad for name, p in model.named_parameters() if "lora_" in name}
    assert len(found) > 2 * 8
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in found.values())
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_lora_on_every_linear_layer_trains(level):
    results = []
    for changes in ({"mlp": "swiglu"}, {"checkpoint_level": level}):
        config = {**a_model().architecture.to_dict(), "mlp": "memory_optimized_swiglu", "checkpoint_level": 0}
        torch.manual_seed(0)
        model = LanguageModel(ModelConfig(**{**config, **changes}))
        model.configure_model()
        before = model.loss(a_batch()).item()
        with_adapters(model)
        loss = model.loss(a_batch())
        loss.backward()
        assert abs(loss.item() - before) > 1e-3
        results.append((loss, adapters_of(model)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("level", [0, 1])
def test_lora_trains_in_a_llama_with_our_mlp(level):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=16)
    results = []
    for make in (SwiGLU, partial(MemoryOptimizedSwiGLU, checkpoint_level=level)):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for layer in model.model.layers:
            own = make(HIDDEN, WIDTH)
            own.load_state_dict(layer.mlp.state_dict())
            layer.mlp = own
        with_adapters(model)
        logits = model(a_batch()["input_ids"]).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), a_batch()["targets"].flatten()).backward()
        results.append((logits, adapters_of(model)))
    torch.testing.assert_close(*results)


def test_an_adapter_on_the_head_is_called_by_the_loss():
    model, batch = a_model(), a_batch()
    model.transformer.lm_head.register_forward_hook(lambda module, args, out: out * 2)
    logits = 2 * nn.functional.linear(model.transformer(batch["input_ids"]), model.transformer.lm_head.weight)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    torch.testing.assert_close(model.loss(batch), expected)


def test_adapters_are_in_what_is_generated():
    model = a_model().transformer
    adapted = with_adapters(copy.deepcopy(model))
    assert can_pack(model)
    assert not can_pack(adapted)
    prompt = torch.arange(4).unsqueeze(0)
    ids = generate(adapted, prompt, max_new_tokens=10, temperature=0)
    most_likely = adapted.logits(adapted(ids)).argmax(-1)
    assert torch.equal(ids[:, 4:], most_likely[:, 3:-1])


@pytest.mark.parametrize("part", ["", "layers.0", "layers.1.self_attn", "embed_tokens", "norm"])
def test_what_would_not_be_called_is_not_packed(part):
    for change in ("hook", "forward", "class"):
        model = a_model().transformer
        module = model.get_submodule(part)
        if change == "hook":
            module.register_forward_hook(lambda module, args, out: out)
        elif change == "forward":
            module.forward = module.forward
        else:
            module.__class__ = type("Own", (type(module),), {})
        is_called = part == "norm" and change == "class"
        assert can_pack(model) == is_called, change


def test_biases_that_only_some_projections_have_are_packed_too():
    model = a_model().transformer
    with_a_bias(model.layers[0].mlp, "up_proj")
    with_a_bias(model.layers[1].self_attn, "q_proj")
    assert can_pack(model)
    ids = generate(model, torch.arange(4).unsqueeze(0), max_new_tokens=10, temperature=0)
    assert torch.equal(ids[:, 4:], model.logits(model(ids)).argmax(-1)[:, 3:-1])
