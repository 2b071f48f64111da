"""Runs a step of a tiny model in one setting and records what each module computes, for ``lightning-llm same``.

reference    the plain form of the base in float64: what the others are compared with
noise        the plain form in the setting's precision; the reference with weights moved as far as rounding moves them
a setting    once in its own precision and once in float64, where rounding hides nothing
"""

import dataclasses
import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lightning_llm.data.batches import IGNORED, Batch
from lightning_llm.interop.hf_mapping import mapping_for
from lightning_llm.interop.writer import export_model
from lightning_llm.io.untrusted import shown
from lightning_llm.measure.agreement import Finding, Rounding, findings
from lightning_llm.measure.attribution import module_label
from lightning_llm.measure.recorder import Arrays, RecordedStep, Recorder, joined_arrays
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.kv_cache import KVCache
from lightning_llm.model.transformer import Transformer
from lightning_llm.model.unmodified import PASSIVE_HOOK_OWNERS
from lightning_llm.same.processes import in_fresh_processes
from lightning_llm.same.tiny_model import CONTEXT, ROWS, Weights, make_batch, moved, plain_config, random_weights
from lightning_llm.training.distributed import build_sharded
from lightning_llm.training.module import LanguageModel

PASSIVE_HOOK_OWNERS.add(Recorder)
EXACT, FLOAT = "64-true", "32-true"
# The dtypes of weights and of autocast
SAME_PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    EXACT: (torch.float64, None),
    FLOAT: (torch.float32, None),
    "bf16-true": (torch.bfloat16, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
}
SAMPLES = 3  # of the reference with moved weights
PATIENCE = timedelta(minutes=2)  # with a process that has failed
GPT2_MODULES = {
    **{"h": "layers", "wte": "embed_tokens", "ln_f": "norm"},
    **{"ln_1": "input_layernorm", "attn": "self_attn", "ln_2": "post_attention_layernorm"},
}
Form = Literal["training", "cached", "transformers"]
PartFunction = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """How a step runs.

    Attributes:
        config: The model.
        precision: One of ``SAME_PRECISIONS``.
        loss_chunks: As of ``LanguageModel``.
        micro_batch: Rows of a forward pass.
        compile_mode: As of ``LanguageModel``.
        compile_scope: Likewise. Of a model that is compiled as one, only the gradients of parameters are recorded.
        form: A training step; decoding with a cache; the exported model in transformers.
        processes: How many share the rows.
        strategy: ``ddp`` or ``fsdp2``.
        interpreted: Triton's kernels run in its interpreter.
        documents: Attention stays inside documents.
        device: ``cpu`` or ``cuda``.
    """

    config: ModelConfig
    precision: str = FLOAT
    loss_chunks: int | None = None
    micro_batch: int = ROWS
    compile_mode: Any = None
    compile_scope: Literal["blocks", "model"] = "blocks"
    form: Form = "training"
    processes: int = 1
    strategy: str = "ddp"
    interpreted: bool = False
    documents: bool = False
    device: str = "cpu"

    @property
    def precisions(self) -> list[str]:
        """Its own, and float64 where that runs the same code: kernels and transformers have none for it."""
        is_exact = self.interpreted or self.form == "transformers" or self.precision == EXACT
        return [self.precision, *([] if is_exact else [EXACT])]


class Float64Reference:
    """The plain form of a base in float64.

    Args:
        base: The setting that others are varied from.
        part: The module that ``function`` replaces, by name; ``mlp`` is that of every layer.
        function: Of the user's own: called with the part, and what the part is called with.

    Attributes:
        digests: Hashes of all that the setting compared last has computed, by precision: equal ones have the same bits.

    Raises:
        ValueError: There is no such part.
    """

    def __init__(self, base: Setting, part: str = "", function: PartFunction | None = None) -> None:
        self._plain = Setting(
            config=plain_config(base.config), loss_chunks=0, documents=base.documents, device=base.device
        )
        self.weights = random_weights(self._plain.config)
        self._steps: dict[Any, RecordedStep] = {}
        self.digests: dict[str, str] = {}
        with torch.device("meta"):
            names = [name for name, _ in Transformer(self._plain.config, seed=0).named_modules()]
        parts = [name for name in names if f".{name}".endswith(f".{part}")] if function else []
        if function and not parts:
            kinds = dict.fromkeys(name.rpartition(".")[2] for name in names if module_label(name) == name)
            known = ", ".join(filter(None, kinds))
            raise ValueError(f"--part {shown(part)} is no part of the model: choose among {known}")
        self._replaced = dict.fromkeys(parts, function)

    @property
    def in_words(self) -> str:
        """The sizes of what it runs, as one line."""
        config = self._plain.config
        sizes = f"{config.num_hidden_layers} layers of width {config.hidden_size}"
        return f"A model of {sizes}, with a batch of {ROWS} x {CONTEXT} tokens, on {self._plain.device}."

    def findings(self, setting: Setting) -> dict[str, list[Finding]]:
        """Compare what a setting computes with float64, by the precision that it ran in.

        Raises:
            ValueError: The setting has other parameters than the base, or cannot run here.
        """
        steps = recorded_steps(setting, self.weights)
        self.digests = {precision: _digest(run) for precision, run in steps.items()}
        return {
            precision: findings(run, self._recorded(EXACT), self._noises(precision), unit_of(precision))
            for precision, run in steps.items()
        }

    def _noises(self, precision: str) -> list[Rounding]:
        unit = unit_of(precision)
        others = [(self._recorded(EXACT, (sample, unit / 2)), 1.0) for sample in range(SAMPLES)]
        if precision == EXACT:  # it rounds as often as float32 does
            return [(self._recorded(FLOAT), unit / unit_of(FLOAT)), *others]
        return [(self._recorded(precision), 1.0), *others]

    def _recorded(self, precision: str, move: tuple[int, float] | None = None) -> RecordedStep:
        if (precision, move) not in self._steps:
            weights = self.weights if move is None else moved(self.weights, *move)
            plain = dataclasses.replace(self._plain, precision=precision)
            self._steps[precision, move] = _step(plain, weights, self._replaced)
        return self._steps[precision, move]


def unit_of(precision: str) -> float:
    """Half the distance from 1 to the next number, in the dtype of most of the work."""
    weights, autocast = SAME_PRECISIONS[precision]
    return torch.finfo(autocast or weights).eps / 2


def _digest(step: RecordedStep) -> str:
    """The SHA-256 of the outputs of all modules, the gradients of their inputs, and those of the parameters."""
    found = hashlib.sha256()
    for kind in (step.outputs, step.input_gradients, step.gradients):
        for name in sorted(kind):
            found.update(f"{name} {kind[name].dtype} {kind[name].shape}".encode())
            found.update(np.ascontiguousarray(kind[name]).tobytes())
    return found.hexdigest()


# ---- a step


def recorded_steps(setting: Setting, weights: Weights) -> dict[str, RecordedStep]:
    """Run a step of a setting, by precision, in other processes where it needs them.

    Raises:
        ValueError: The setting has other parameters, or cannot run here.
    """
    _check(setting, weights)
    if setting.processes == 1 and not setting.interpreted:
        return _in_precisions(setting, weights)
    arrays = {name: value.numpy() for name, value in weights.items()}
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(setting, arrays, rank, folder) for rank in range(setting.processes)]
        environment = {"OMP_NUM_THREADS": "1", **({"TRITON_INTERPRET": "1"} if setting.interpreted else {})}
        of_all = in_fresh_processes(_in_process, jobs, name="the step", environment=environment)
    if len(of_all) == 1:
        return of_all[0]
    return {name: _of_all_rows([steps[name] for steps in of_all]) for name in of_all[0]}


def _in_precisions(setting: Setting, weights: Weights) -> dict[str, RecordedStep]:
    return {name: _step(dataclasses.replace(setting, precision=name), weights) for name in setting.precisions}


def _check(setting: Setting, weights: Weights) -> None:
    with torch.device("meta"):
        own = {name: value.shape for name, value in Transformer(setting.config, seed=0).state_dict().items()}
    given = {name: value.shape for name, value in weights.items()}
    if different := sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name)):
        few = ", ".join(different[:3])
        raise ValueError(f"it has other parameters than the base ({few}): they cannot be the same function")
    if setting.interpreted and setting.device != "cpu":
        raise ValueError(f"kernels=triton is for the CPU: on {setting.device}, every setting runs them")
    if setting.interpreted and find_spec("triton") is None:
        raise ValueError("kernels=triton needs Triton: pip install triton")
    if setting.form == "transformers":
        mapping_for(setting.config)
        if find_spec("transformers") is None:
            raise ValueError("export=transformers needs transformers: pip install transformers")


def _in_process(job: tuple[Setting, dict[str, Any], int, str]) -> dict[str, RecordedStep]:
    setting, arrays, rank, folder = job
    torch.set_num_threads(1)
    if setting.processes > 1:
        place = f"file://{folder}/store"
        dist.init_process_group("gloo", place, PATIENCE, world_size=setting.processes, rank=rank)
    steps = _in_precisions(setting, {name: torch.from_numpy(value) for name, value in arrays.items()})
    if dist.is_initialized():
        dist.barrier()  # a process that leaves early takes the connection from the other
    return steps


def _of_all_rows(steps: Sequence[RecordedStep]) -> RecordedStep:
    """The rows of all processes, one after the other. Each has the gradient of the mean over processes."""
    first = steps[0]

    def joined(kind: str, factor: float = 1.0) -> Arrays:
        of_all = [getattr(step, kind) for step in steps]
        return {key: factor * joined_arrays([arrays[key] for arrays in of_all]) for key in of_all[0]}

    gradients = joined("input_gradients", 1 / len(steps))
    return RecordedStep(first.order, joined("inputs"), joined("outputs"), gradients, first.gradients)


def _step(setting: Setting, weights: Weights, replaced: Mapping[str, Any] = MappingProxyType({})) -> RecordedStep:
    autocast = SAME_PRECISIONS[setting.precision][1]
    with torch.autocast(setting.device, autocast, enabled=autocast is not None):
        if setting.form == "transformers":
            return _transformers_step(setting, weights)
        model = _model(setting, weights)
        for name, function in replaced.items():
            part: Any = model.transformer.get_submodule(name)
            part.forward = partial(function, part)
        return _decoding(setting, model) if setting.form == "cached" else _training_step(setting, model)


def _model(setting: Setting, weights: Weights) -> LanguageModel:
    dtype, autocast = SAME_PRECISIONS[setting.precision]
    options = {name: getattr(setting, name) for name in ("loss_chunks", "compile_mode", "compile_scope")}
    model = LanguageModel(setting.config, **options)
    model.seed = 0
    if setting.strategy != "fsdp2":
        model.configure_model()
        model.to(setting.device, dtype).transformer.load_state_dict(weights)
        return model
    mesh = init_device_mesh(setting.device, (setting.processes,))
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        sharded = build_sharded(setting.config, mesh, torch.device(setting.device), seed=0, param_dtype=autocast)
    finally:
        torch.set_default_dtype(default)
    state: dict[str, Any] = {name: value.to(dtype) for name, value in weights.items()}
    set_model_state_dict(sharded, state, options=StateDictOptions(full_state_dict=True))
    model.transformer = sharded
    return model


class _Loss(nn.Module):
    """Called as DDP calls a module."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        return self.model.loss(batch)


def _training_step(setting: Setting, model: LanguageModel) -> RecordedStep:
    """Each micro-batch has the weight that ``StepLoss`` gives it: its share of the targets that count."""
    loss_of: nn.Module = _Loss(model.train())
    is_shared = setting.processes > 1
    if is_shared and setting.strategy == "ddp":
        loss_of = DistributedDataParallel(loss_of)
    batch = make_batch(documents=setting.documents)
    total = (batch["targets"] != IGNORED).sum().double() / setting.processes
    each = ROWS // setting.processes
    first = each * dist.get_rank() if is_shared else 0
    with Recorder(model.transformer, is_opaque=lambda module: getattr(module, "is_compiled", False)) as recorder:
        for start in range(first, first + each, setting.micro_batch):
            stop = min(start + setting.micro_batch, first + each)
            piece = {name: value[start:stop].to(setting.device) for name, value in batch.items()}
            with recorder.forward():
                loss = loss_of(piece)
            (loss * ((piece["targets"] != IGNORED).sum() / total).to(loss.dtype)).backward()
        return recorder.step({name: param.grad for name, param in model.transformer.named_parameters()})


def _decoding(setting: Setting, model: LanguageModel) -> RecordedStep:
    """Half of the context at once, then one position after the other. There is no backward."""
    transformer = model.transformer.eval()
    ids = make_batch(documents=setting.documents)["input_ids"].to(setting.device)
    if not transformer.uses_cache:
        raise ValueError("decoding=cached needs an attention that adds its keys and values to a cache")
    dtype, autocast = SAME_PRECISIONS[setting.precision]
    cache = KVCache(setting.config, ROWS, CONTEXT, ids.device, autocast or dtype)
    with torch.no_grad(), Recorder(transformer) as recorder:
        for piece in torch.split(ids, [CONTEXT // 2] + [1] * (CONTEXT // 2), dim=1):
            with recorder.forward():
                transformer.logits(transformer(piece, cache=cache))
        return recorder.step({}, dim=1)


def _transformers_step(setting: Setting, weights: Weights) -> RecordedStep:
    from transformers import AutoModelForCausalLM

    ours = Transformer(setting.config, seed=0)
    ours.load_state_dict(weights)
    dtype = SAME_PRECISIONS[setting.precision][0]
    with tempfile.TemporaryDirectory() as folder:
        export_model(ours, None, folder)
        loader: Any = AutoModelForCausalLM
        theirs = loader.from_pretrained(folder, local_files_only=True, attn_implementation="eager")
    theirs = theirs.to(setting.device, dtype).train()
    batch = make_batch(documents=setting.documents)
    mapping = mapping_for(setting.config)
    with Recorder(theirs, partial(_our_name, prefix=mapping.prefix)) as recorder:
        with recorder.forward():
            logits = theirs(batch["input_ids"].to(setting.device), use_cache=False).logits
        targets = batch["targets"].to(setting.device)
        loss: Any = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        found = {name: parameter.grad for name, parameter in theirs.named_parameters()}
        gradients: dict[str, Tensor | None] = {}
        for tensor in mapping.tensor_maps(name for name, _ in ours.named_parameters()):
            whole = found[tensor.name]
            whole = whole.t() if tensor.transposed else whole
            rows = [ours.get_parameter(name).shape[0] for name in tensor.ours]
            gradients |= dict(zip(tensor.ours, whole.split(rows), strict=True))
        return recorder.step(gradients)


def _our_name(name: str, prefix: str) -> str:
    """``transformer.h.0.attn`` -> ``layers.0.self_attn``."""
    inner = name.removeprefix(prefix)
    return ".".join(GPT2_MODULES.get(part, part) for part in inner.split("."))
