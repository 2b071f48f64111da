"""Compiled: the whole model and its loss in one graph, as a user would do it; the blocks in place, as `fit` does."""

import copy
import re

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.nn.parallel import DistributedDataParallel

from lightning_llm import LanguageModel, ModelConfig, Transformer
from lightning_llm.generation import generate
from lightning_llm.model import transformer
from lightning_llm.model.block import Block
from lightning_llm.model.kv_cache import KVCache
from lightning_llm.ops import span_attention
from lightning_llm.ops.span_attention import with_flex_blocks
from lightning_llm.training.callbacks.memory_profiler import is_compiled
from tests.model.made import context_of

pytestmark = [  # what torch.compile of torch 2.13 says of itself
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Function.. should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),  # where a test asks for it
]

SIZES = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}


@pytest.fixture(autouse=True)
def _compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def a_batch():
    ids = torch.randint(0, 101, (4, 33))
    return {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}


def step(model, loss_of, batch):
    model.zero_grad()
    loss = loss_of(batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_one_compiled_graph_gives_the_same_loss_and_gradients(autocast):
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(**SIZES, checkpoint_level=[0, 1, 2]))
    model.configure_model()
    batch = a_batch()
    compiled = torch.compile(model.loss, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        results = [step(model, loss_of, batch) for loss_of in (model.loss, compiled)]
    tolerance = {"rtol": 0.05, "atol": 0.002} if autocast else {}  # bf16 sums in another order
    torch.testing.assert_close(*results, **tolerance)


def with_compiled_blocks(config, **options):
    """A model, and one of the same weights with compiled blocks."""
    torch.manual_seed(0)
    models = [LanguageModel(config) for _ in range(2)]
    for model in models:
        model.configure_model()
    models[1].load_state_dict(models[0].state_dict())
    for layer in models[1].transformer.layers:
        layer.compile(**options)
    return models


@pytest.mark.parametrize(("kind", "recompute"), [("optimised", "attention"), ("optimised", "block"), ("gpt", "mlp")])
def test_compiled_blocks_give_the_same_loss_and_gradients(kind, recompute):
    changes = {
        "optimised": {"mlp": "memory_optimized_swiglu", "checkpoint_level": [0, 1, 2]},
        "gpt": {"norm": "layernorm", "position": "learned", "mlp": "gelu", "attention_bias": True},
    }[kind]
    config = ModelConfig(**{**SIZES, "num_attention_heads": 4, **changes}, recompute=recompute)
    eager, compiled = with_compiled_blocks(config, backend="aot_eager")
    batch = a_batch()
    torch.testing.assert_close(step(compiled, compiled.loss, batch), step(eager, eager.loss, batch))
    assert compiled.state_dict().keys() == eager.state_dict().keys()


@pytest.mark.parametrize("flex", [False, True])
def test_compiled_blocks_keep_to_documents_without_compiling_again(monkeypatch, flex):
    """FlexAttention as on CUDA, but forward only, on a CPU."""
    if flex:
        monkeypatch.setattr(transformer, "with_blocks", lambda spans, *args: with_flex_blocks(spans))
        monkeypatch.setattr(span_attention, "_compiled", lambda function: function)
    counter = CompileCounterWithBackend("aot_eager")
    config = ModelConfig(**{**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2})
    eager, compiled = with_compiled_blocks(config, backend=counter, fullgraph=True)
    for length in (3, 5):
        batch = a_batch()
        batch["documents"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]) // length
        if flex:
            with torch.no_grad():
                torch.testing.assert_close(compiled.loss(batch), eager.loss(batch))
        else:
            torch.testing.assert_close(step(compiled, compiled.loss, batch), step(eager, eager.loss, batch))
    assert counter.frame_count == 1


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint_level": [0, 1, 2]},
        {"block": "sandwich", "recompute": "block", "dropout": 0.1},
        {"block": "post"},
        {"block": "tests.model.made.FeedsFirst"},
    ],
    ids=str,
)
def test_sums_left_to_the_next_block_change_no_bits(monkeypatch, changes, autocast):
    config, found, batch = ModelConfig(**{**SIZES, "num_attention_heads": 4, **changes}), [], a_batch()
    _, model = with_compiled_blocks(config, backend="aot_eager")
    leaves_sum = Block.leaves_sum
    for is_left in (True, False):
        monkeypatch.setattr(Block, "leaves_sum", lambda *args, is_left=is_left: is_left and leaves_sum(*args))
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(step(model, model.loss, batch))
    assert all(map(torch.equal, *found))


def kernels_of(code):
    return re.findall(r"^ +(cpp_fused\w*)\(", code, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("mlp", "most"), [("memory_optimized_swiglu", (6, 6)), ("swiglu", (8, 8))])
def test_the_fused_kernels_of_a_block(mlp, most):
    """Forward and backward: one more each where the last sum is not left to the norm of the next block."""
    _, model = with_compiled_blocks(ModelConfig(**SIZES, num_attention_heads=3, mlp=mlp))
    batch = a_batch()
    with torch.autocast("cpu", torch.bfloat16):
        _, codes = run_and_get_code(lambda: step(model, model.loss, batch))
    assert len(codes) == 2  # of all blocks
    assert all(0 < len(kernels_of(code)) <= limit for code, limit in zip(codes, most, strict=True))


def saved_bytes(layers, mlp):
    """What the forward pass of a model with compiled blocks saves for backward, without its parameters."""
    torch.compiler.reset()
    sizes = {**SIZES, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 3}
    model, found = Transformer(ModelConfig(**sizes, mlp=mlp), seed=0), {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for layer in model.layers:
        layer.compile(backend="aot_eager_decomp_partition")

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        out = model(a_batch()["input_ids"])
    assert out.requires_grad  # and what it saves is alive, each at its own address
    return sum(found.values())


@pytest.mark.parametrize(("mlp", "most"), [("memory_optimized_swiglu", 18), ("swiglu", 24)])
def test_a_compiled_block_saves_no_more_than_its_operators_ask_for(mlp, most):
    """In units of tokens × hidden in bfloat16, with the probabilities of short attention."""
    unit = 4 * 32 * SIZES["hidden_size"] * 2
    units = (saved_bytes(3, mlp) - saved_bytes(2, mlp)) / unit
    assert most - 1 < units <= most


def test_only_usual_blocks_that_are_compiled_and_not_hooked_leave_their_sum():
    context = context_of(3)

    def left(**changes):
        _, model = with_compiled_blocks(ModelConfig(**SIZES, **changes), backend="aot_eager")
        return [layer.leaves_sum(context) for layer in model.transformer.layers]

    assert left() == left(block="sandwich") == [True] * 3
    assert left(block="post") == left(block="tests.model.made.FeedsFirst") == [False] * 3
    eager, model = with_compiled_blocks(ModelConfig(**SIZES), backend="aot_eager")
    first, second = model.transformer.layers[:2]
    assert not eager.transformer.layers[0].leaves_sum(context)
    assert not first.leaves_sum(
        context._replace(cache=KVCache(model.architecture, 1, 9, torch.device("cpu"), torch.float32))
    )
    outputs = []
    hook = second.register_forward_hook(lambda _module, _args, out: outputs.append(out.shape))
    batch = a_batch()
    torch.testing.assert_close(step(model, model.loss, batch), step(eager, eager.loss, batch))
    assert outputs == [(4, 32, 48)]
    hook.remove()
    assert second.leaves_sum(context)


def test_blocks_of_one_kind_share_their_code_whatever_their_number():
    counter = CompileCounterWithBackend("aot_eager")
    _, model = with_compiled_blocks(ModelConfig(**{**SIZES, "num_hidden_layers": 12}), backend=counter)
    for _ in range(2):
        step(model, model.loss, a_batch())
    assert counter.frame_count == 1
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            model.loss(a_batch())
    assert counter.frame_count == 2


@pytest.mark.slow
def test_blocks_of_several_kinds_stay_compiled(monkeypatch):
    """Three kinds, each in training, evaluating a full batch, the last one, and a short rest."""
    counter = CompileCounterWithBackend("aot_eager")
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode: compile_(function, backend=counter, dynamic=False))
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        model = LanguageModel(ModelConfig(**SIZES, checkpoint_level=[0, 1, 2]), compile_mode="default")
        model.configure_model()
        step(model, model.loss, a_batch())
        model.eval()
        with torch.no_grad():
            for rows, length in ((4, 32), (3, 32), (1, 9)):
                model.loss({name: ids[:rows, :length] for name, ids in a_batch().items()})
    assert counter.frame_count > 8


def test_ddp_does_not_cut_compiled_blocks(monkeypatch, tmp_path):
    """The gradients of a block fill more than a bucket of DDP, where the compiler would cut a whole model."""
    counter, compile_ = CompileCounterWithBackend("aot_eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode: compile_(function, backend=counter, dynamic=False))
    model = LanguageModel(
        ModelConfig(**{**SIZES, "hidden_size": 192, "intermediate_size": 1024}), compile_mode="default"
    )
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with torch._dynamo.config.patch(optimize_ddp=True):  # its default, which is there again afterwards
            model.configure_model()
            DistributedDataParallel(model.transformer)(a_batch()["input_ids"]).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert counter.frame_count == 1


def trained(model, device, dtype=torch.bfloat16):
    """Loss and gradients of the first of three steps, and the loss of all."""
    optimizer, losses, batch = torch.optim.AdamW(model.parameters(), lr=1e-2), [], a_batch()
    batch = {name: ids.to(device) for name, ids in batch.items()}

    def loss_of(batch):
        with torch.autocast(device, dtype):
            return model.loss(batch)

    first = step(model, loss_of, batch)
    for _ in range(3):
        losses.append(step(model, loss_of, batch)[0].item())
        optimizer.step()
    return first, losses


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
DEVICES = [pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA]), pytest.param("cpu", marks=pytest.mark.slow)]


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_blocks_train(device):
    """In bf16-mixed, of an odd vocabulary; a block of each level."""
    config, results = ModelConfig(**SIZES, num_attention_heads=3, checkpoint_level=[0, 1, 2]), []
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for model in with_compiled_blocks(config):
            torch.manual_seed(1)
            first, losses = trained(model.to(device), device)
            results.append(first)
            assert losses[2] < losses[1] < losses[0]
    torch.testing.assert_close(*results, rtol=0.05, atol=0.002)  # bf16 sums in another order


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_in_compiled_blocks(device):
    config = ModelConfig(**SIZES, num_attention_heads=3, dropout=0.2)
    eager, compiled = (model.to(device) for model in with_compiled_blocks(config))
    batch = {name: ids.to(device) for name, ids in a_batch().items()}
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with torch.autocast(device, torch.bfloat16):
            found.append(step(compiled, compiled.loss, batch))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert found[0][0] != found[2][0]
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        losses = [model.eval().loss(batch) for model in (compiled, eager)]
    torch.testing.assert_close(*losses, rtol=0.05, atol=0.002)
    assert (found[0][0] - losses[0]).abs() < 1  # no wrong scale


def test_generation_goes_without_the_compiler():
    counter = CompileCounterWithBackend("aot_eager")
    eager, compiled = with_compiled_blocks(ModelConfig(**SIZES), backend=counter)
    prompt = torch.tensor([[1, 2, 3]])
    texts = [generate(one.transformer.eval(), prompt, max_new_tokens=9, temperature=0) for one in (eager, compiled)]
    assert torch.equal(*texts)
    assert counter.frame_count == 0


def test_the_model_is_compiled_as_one():
    counter = CompileCounterWithBackend("aot_eager")
    torch.manual_seed(0)
    eager, compiled = (LanguageModel(ModelConfig(**SIZES, mlp="memory_optimized_swiglu")) for _ in range(2))
    for model in (eager, compiled):
        model.configure_model()
    compiled.load_state_dict(eager.state_dict())
    compiled.transformer.compile(backend=counter)
    assert is_compiled(compiled)
    batch = a_batch()
    torch.testing.assert_close(step(compiled, compiled.loss, batch), step(eager, eager.loss, batch))
    assert (counter.frame_count, counter.op_count > 3 * 10) == (1, True)  # one graph with the work of all blocks
    assert compiled.state_dict().keys() == eager.state_dict().keys()
    texts = [
        generate(one.transformer.eval(), batch["input_ids"], max_new_tokens=9, temperature=0)
        for one in (eager, compiled)
    ]
    assert torch.equal(*texts)
    assert counter.frame_count == 1


class Graphs:
    """A backend that keeps the graphs that it compiles."""

    def __init__(self):
        self.found = []

    def __call__(self, graph, inputs):
        self.found.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 2.0}], ids=["plain", "scaled"])
def test_a_model_compiled_as_one_gets_its_rotation_from_outside(documents, scaling):
    """With the bits of compiled blocks, but for the last norm, which another code computes outside of them."""
    config, backend = ModelConfig(**SIZES, num_attention_heads=4, rope_scaling=scaling), Graphs()
    _, blocks = with_compiled_blocks(config, backend="aot_eager")
    whole = LanguageModel(config)
    whole.configure_model()
    whole.load_state_dict(blocks.state_dict())
    for model in (whole, blocks):
        model.transformer.norm = torch.nn.Identity()
    whole.transformer.compile(backend=backend, fullgraph=True)
    batch = a_batch()
    if documents:
        batch["documents"] = torch.arange(32).expand(4, 32) // 5
    with torch.autocast("cpu", torch.bfloat16):
        results = [step(model, model.loss, batch) for model in (whole, blocks)]
    assert all(map(torch.equal, *results))
    (graph,) = backend.found
    names = {getattr(node.target, "__name__", node.target) for node in graph.graph.nodes}
    assert not names & {"cos", "sin", "pow", "rpow", "arange"} - ({"arange"} if documents else set())
    assert {"cat", "mul"} <= names


@pytest.mark.slow
def test_the_compiled_model_computes_no_angles():
    model = LanguageModel(ModelConfig(**SIZES, num_attention_heads=3), compile_mode="default", compile_scope="model")
    model.configure_model()
    with torch.autocast("cpu", torch.bfloat16):
        _, codes = run_and_get_code(lambda: step(model, model.loss, a_batch()))
    assert len(codes) == 2
    assert all(kernels_of(code) and not re.search(r"cos\(|sin\(|pow\(", code) for code in codes)


def test_a_copy_computes_with_its_own_weights():
    _, model = with_compiled_blocks(ModelConfig(**SIZES), backend="aot_eager")
    ids = a_batch()["input_ids"]
    before = model(ids)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.transformer.layers.parameters():
            parameter.mul_(1.5)
    assert torch.equal(model(ids), before)
    assert not torch.allclose(other(ids), before)


def test_the_option_compiles_every_block():
    model = LanguageModel(ModelConfig(**SIZES), compile_mode="default")
    model.configure_model()
    assert all(layer.is_compiled for layer in model.transformer.layers)
    assert not model.transformer.is_compiled
    plain = Transformer(ModelConfig(**SIZES))
    assert not any(layer.is_compiled for layer in plain.layers)
    whole = LanguageModel(ModelConfig(**SIZES), compile_mode="default", compile_scope="model")
    whole.configure_model()
    assert whole.transformer.is_compiled
    assert not any(layer.is_compiled for layer in whole.transformer.layers)
