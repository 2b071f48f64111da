"""Every private name of torch and Lightning that the package uses, with what it relies on: read this after an upgrade.

``INTERFACES`` lists them by owner. One test finds the uses in the source (``ast``) and compares them with the list.
Each entry has a canary that fails with what changed, where it is used and what the code there expects. Lightning's
loops have undocumented attributes and checkpoint keys: only ``checkpoints/loop_state.py`` names them.
"""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import nn
from torch.nn.modules import module as nn_module

from lightning_llm.checkpoints import loop_state
from lightning_llm.training.checkpoint_io import HANDED_BACK

PACKAGE = Path(__file__).parents[1] / "lightning_llm"
ROOTS = ("torch", "lightning", "torchmetrics")
OF_TUPLES = {"_replace", "_asdict", "_fields"}  # documented, of NamedTuple


class Interface(NamedTuple):
    """A private name, what we rely on, and whether that still holds."""

    name: str
    owner: str
    relied_on: str
    holds: Callable[[], object]


def has(path: str, *names: str) -> Callable[[], object]:
    """Whether a module, or an attribute of one, has all these names."""

    def holds() -> bool:
        module, _, attribute = path.partition(":")
        owner: Any = importlib.import_module(module)
        for part in attribute.split(".") if attribute else ():
            owner = getattr(owner, part)
        return all(hasattr(owner, name) for name in names)

    return holds


def foreach(name: str, *lists: list[torch.Tensor], **options: Any) -> Callable[[], object]:
    return lambda: getattr(torch, name)(*lists, **options) or True


def ones() -> list[torch.Tensor]:
    return [torch.ones(2), torch.ones(3)]


def hook_dict(name: str, owner: Any = None) -> Callable[[], object]:
    return lambda: getattr(owner or nn.Linear(1, 1), name) == {}


HOOKS = "a dict of hooks; empty: the module's weight may be read without calling the module"
FOREACH = "the multi-tensor operation, one call for all parameters"
LAUNCHER = "lightning.pytorch.strategies.launchers:_MultiProcessingLauncher"
NAMED = "the name that torch writes into files of tensors"
INTERFACES = (
    Interface("_foreach_mul_", "torch", FOREACH, foreach("_foreach_mul_", ones(), 2.0)),
    Interface("_foreach_add_", "torch", FOREACH, foreach("_foreach_add_", ones(), ones(), alpha=2.0)),
    Interface("_foreach_lerp_", "torch", FOREACH, foreach("_foreach_lerp_", ones(), ones(), 0.5)),
    Interface("_foreach_lerp", "torch", FOREACH, foreach("_foreach_lerp", ones(), ones(), 0.5)),
    Interface("_foreach_addcmul_", "torch", FOREACH, foreach("_foreach_addcmul_", ones(), ones(), ones(), 0.5)),
    Interface("_foreach_addcdiv_", "torch", FOREACH, foreach("_foreach_addcdiv_", ones(), ones(), ones(), 0.5)),
    Interface("_foreach_sqrt", "torch", FOREACH, foreach("_foreach_sqrt", ones())),
    Interface("_foreach_copy_", "torch", FOREACH, foreach("_foreach_copy_", ones(), ones())),
    Interface("_foreach_norm", "torch", FOREACH, foreach("_foreach_norm", ones(), 2, dtype=torch.float64)),
    Interface(
        "_fused_sdp_choice",
        "torch",
        "the number of the kernel that scaled_dot_product_attention takes for these tensors",
        lambda: torch._fused_sdp_choice(*[torch.ones(1, 1, 4, 8)] * 3, None, 0.0, True, enable_gqa=False) == 1,
    ),
    Interface(
        "_dynamo",
        "torch",
        "config.recompile_limit: so many graphs of one code, then it runs uncompiled",
        has("torch._dynamo:config", "recompile_limit"),
    ),
    Interface(
        "_should_accumulate",
        "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop",
        "false after the last micro-batch of a step; a test below compares it with the steps taken",
        has("lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop", "_should_accumulate"),
    ),
    Interface(
        "_MultiProcessingLauncher",
        "lightning.pytorch.strategies.launchers",
        "sends results of forked and spawned processes back by these two methods, and weights by a file of this name",
        lambda: (
            has(LAUNCHER, "get_extra_results", "_recover_results_in_main_process")()
            and f'"{HANDED_BACK}"' in inspect.getsource(_MultiProcessingLauncher)
        ),
    ),
    Interface(
        "_start_method",
        "lightning.pytorch.strategies.launchers._MultiProcessingLauncher",
        "fork or spawn",
        lambda: _MultiProcessingLauncher(DDPStrategy(), "spawn")._start_method == "spawn",
    ),
    Interface("_fused_adamw_", "torch", "AdamW as one kernel on CPU and CUDA", has("torch", "_fused_adamw_")),
    Interface(
        "_softmax_backward_data",
        "torch.ops.aten",
        "the gradient of softmax, written in place",
        has("torch:ops.aten._softmax_backward_data", "out"),
    ),
    Interface("_C", "torch", "the module of the two functions below", has("torch", "_C")),
    Interface(
        "_are_functorch_transforms_active",
        "torch._C",
        "tells whether vmap or grad transforms run, which custom autograd functions do not support",
        lambda: torch._C._are_functorch_transforms_active() is False,
    ),
    Interface(
        "_current_autograd_node",
        "torch._C",
        "the node whose backward runs; None outside of backward",
        lambda: torch._C._current_autograd_node() is None,
    ),
    Interface(
        "_get_sequence_nr",
        "torch.autograd",
        "grows by one with each node of the graph: it tells which forward a backward belongs to",
        lambda: isinstance(torch.autograd._get_sequence_nr(), int),
    ),
    Interface(
        "_sequence_nr",
        "torch.autograd.graph.Node",
        "the number that the node's forward was given",
        lambda: isinstance(torch.ones(1, requires_grad=True).exp().grad_fn._sequence_nr(), int),
    ),
    *(
        Interface(name, "torch.nn.Module", HOOKS, hook_dict(name))
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    ),
    *(
        Interface(name, "torch.nn.modules.module", HOOKS, hook_dict(name, nn_module))
        for name in (
            *("_global_forward_hooks", "_global_forward_pre_hooks"),
            *("_global_backward_hooks", "_global_backward_pre_hooks"),
        )
    ),
    Interface(
        "_compiled_call_impl",
        "torch.nn.Module",
        "None until Module.compile",
        lambda: nn.Linear(1, 1)._compiled_call_impl is None,
    ),
    Interface(
        "_python_dispatch",
        "torch.utils",
        "sees every operator",
        has("torch.utils._python_dispatch", "TorchDispatchMode"),
    ),
    Interface("_pytree", "torch.utils", "tree_leaves of nested containers", has("torch.utils._pytree", "tree_leaves")),
    *(
        Interface(f"torch._utils {name}", "torch._utils", NAMED, has("torch._utils", name))
        for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
    ),
    *(
        Interface(name, "torch.cuda.memory", "the snapshot of the allocator", has("torch.cuda.memory", name))
        for name in ("_record_memory_history", "_dump_snapshot")
    ),
    Interface(
        "_get_file_writer",
        "torch.utils.tensorboard.SummaryWriter",
        "takes a summary protobuf: the layout of custom scalars",
        has("torch.utils.tensorboard:SummaryWriter", "_get_file_writer"),
    ),
    Interface(
        "_trainer",
        "lightning.pytorch.LightningModule",
        "the trainer or None, where the property `trainer` raises",
        lambda: pl.LightningModule()._trainer is None,
    ),
    Interface(
        "_compiler_ctx",
        "lightning.pytorch.LightningModule",
        "set by torch.compile of a LightningModule, else None",
        lambda: pl.LightningModule()._compiler_ctx is None,
    ),
    *(
        Interface(name, "lightning.pytorch.cli.LightningCLI", relied, has("lightning.pytorch.cli:LightningCLI", name))
        for name, relied in (
            ("_get", "an option of the current subcommand, by its key"),
            ("_parser", "the parser of a subcommand"),
        )
    ),
    Interface(
        "_accelerator_connector",
        "lightning.pytorch.Trainer",
        "its cluster_environment is the launcher's",
        lambda: pl.Trainer(accelerator="cpu", barebones=True)._accelerator_connector.cluster_environment,
    ),
    Interface(
        "_ddp_kwargs",
        "lightning.pytorch.strategies.DDPStrategy",
        "the options of DistributedDataParallel",
        lambda: DDPStrategy(gradient_as_bucket_view=True)._ddp_kwargs == {"gradient_as_bucket_view": True},
    ),
    *(
        Interface(name, "lightning.pytorch.strategies.ModelParallelStrategy", "the argument of this name", holds)
        for name, holds in (
            ("_data_parallel_size", lambda: ModelParallelStrategy(data_parallel_size=3)._data_parallel_size == 3),
            ("_tensor_parallel_size", lambda: ModelParallelStrategy(tensor_parallel_size=3)._tensor_parallel_size == 3),
            ("_save_distributed_checkpoint", lambda: ModelParallelStrategy()._save_distributed_checkpoint is True),
            (
                "_process_group_backend",
                lambda: ModelParallelStrategy(process_group_backend="gloo")._process_group_backend == "gloo",
            ),
            ("_timeout", lambda: ModelParallelStrategy(timeout=None)._timeout is None),
        )
    ),
    Interface(
        "_kwargs",
        "lightning.pytorch.loggers.TensorBoardLogger",
        "the options of the SummaryWriter that it makes: purge_step is added",
        lambda: TensorBoardLogger("unused", purge_step=3)._kwargs["purge_step"] == 3,
    ),
    Interface(
        "_experiment",
        "lightning.pytorch.loggers.TensorBoardLogger",
        "None until the SummaryWriter is made",
        lambda: TensorBoardLogger("unused")._experiment is None,
    ),
)


# ---- the uses in the source


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


class Source:
    """One module: its imports, and the classes that derive from torch's or Lightning's."""

    def __init__(self, path: Path) -> None:
        self.place = str(path.relative_to(PACKAGE))
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.imported: dict[str, str] = {}  # local name -> where it is from
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.imported[alias.asname or alias.name.split(".")[0]] = alias.name
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def is_stdlib(self, node: ast.expr) -> bool:
        """Whether an expression is a module that is neither ours nor torch's nor Lightning's."""
        root = self.imported.get(node.id, "") if isinstance(node, ast.Name) else ""
        return bool(root) and root.split(".")[0] not in (*ROOTS, PACKAGE.name)


SOURCES = [Source(path) for path in sorted(PACKAGE.rglob("*.py"))]
BASES = {
    node.name: [source.imported.get(base.id, base.id) for base in node.bases if isinstance(base, ast.Name)]
    for source in SOURCES
    for node in ast.walk(source.tree)
    if isinstance(node, ast.ClassDef)
}


def foreign_source(name: str) -> str:
    """The source of torch's and Lightning's classes that a class of ours derives from."""
    text = ""
    for base in BASES.get(name, ()):
        module, _, kind = base.rpartition(".")
        if base.split(".")[0] in ROOTS:
            made = getattr(importlib.import_module(module), kind)
            text += "".join(inspect.getsource(c) for c in inspect.getmro(made) if c.__module__.split(".")[0] in ROOTS)
        elif kind in BASES or base in BASES:
            text += foreign_source(kind or base)
    return text


def own_names() -> set[str]:
    """Private names that our own classes and modules define."""
    found = set(OF_TUPLES)
    for source in SOURCES:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return {name for name in found if is_private(name)}


def uses() -> dict[str, set[str]]:
    """Private names of torch and Lightning, and the files that use them."""
    found: dict[str, set[str]] = defaultdict(set)
    own = own_names()
    for source in SOURCES:
        for node in ast.walk(source.tree):
            for name in _of_import(node) if isinstance(node, ast.Import | ast.ImportFrom) else _of_string(node):
                found[name].add(source.place)
            if isinstance(node, ast.ClassDef):
                inherited = foreign_source(node.name)
                for each in ast.walk(node):
                    is_self = isinstance(each, ast.Attribute) and getattr(each.value, "id", "") in ("self", "cls")
                    if is_self and is_private(each.attr) and re.search(rf"self\.{each.attr}\b", inherited):
                        found[each.attr].add(source.place)
    for source in SOURCES:  # once it is known which names of ours are really inherited
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and not source.is_stdlib(node.value):
                is_self = getattr(node.value, "id", "") in ("self", "cls")
                if not is_self and (node.attr not in own or node.attr in found):
                    found[node.attr].add(source.place)
    return found


def _of_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    paths = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        paths = [f"{node.module}.{path}" for path in paths]
    for path in paths:
        if path.split(".")[0] in ROOTS:
            yield from filter(is_private, path.split("."))


def _of_string(node: ast.AST) -> Iterator[str]:
    """Of ``getattr(thing, "_name")``, and of names as torch writes them into its files."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
        yield from (a.value for a in node.args[1:2] if isinstance(a, ast.Constant) and is_private(str(a.value)))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"torch\._\w+ ", node.value):
        yield node.value


USES = uses()


def test_every_private_name_is_listed():
    listed = [interface.name for interface in INTERFACES]
    assert sorted(set(listed)) == sorted(listed)
    missing = {name: sorted(places) for name, places in USES.items() if name not in listed}
    assert not missing, f"private names of torch or Lightning without an entry in INTERFACES: {missing}"
    assert not set(listed) - set(USES), "no longer used: remove the entry"


@pytest.mark.parametrize("interface", INTERFACES, ids=lambda interface: interface.name)
def test_a_private_name_is_still_what_we_rely_on(interface):
    try:
        holds = bool(interface.holds())
    except Exception as error:  # a name that is gone, an argument that is no longer taken
        holds, reason = False, f" ({error})"
    else:
        reason = ""
    assert holds, (
        f"torch {torch.__version__} or lightning {pl.__version__} changed {interface.owner}.{interface.name}{reason}. "
        f"We rely on: {interface.relied_on}. Used in: {', '.join(sorted(USES[interface.name]))}"
    )


# ---- Lightning's loops

LOOP_NAMES = {"epoch_loop", "batch_progress", "optim_progress", "automatic_optimization", "manual_optimization"}


def test_only_one_file_names_the_insides_of_lightnings_loops():
    found = set()
    for source in SOURCES:
        for node in ast.walk(source.tree):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
            words = re.split(r"[.\s]", name) if isinstance(name, str) and len(name) < 80 else []
            if LOOP_NAMES & set(words):
                found.add(source.place)
    assert found == {"checkpoints/loop_state.py"}


class Counting(pl.LightningModule):
    """A model of one weight that notes what loop_state says, with what is true, after each micro-batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen = []

    def training_step(self, batch, batch_idx):
        return (self.weight * batch).sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        trainer = self.trainer
        self.seen.append(
            (
                loop_state.micro_batches_started(trainer),
                loop_state.micro_batch_of_step(trainer),
                loop_state.step_is_complete(trainer),
                loop_state.validation_follows(trainer),
            )
        )


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_lightnings_loops_count_as_we_read_them(tmp_path):
    model, batches = Counting(), torch.utils.data.DataLoader(torch.ones(8, 1))
    trainer = pl.Trainer(
        **{"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False},
        **{"max_steps": 3, "accumulate_grad_batches": 2, "val_check_interval": 4, "enable_checkpointing": False},
        num_sanity_val_steps=0,
    )
    trainer.fit(model, batches, batches)
    assert model.seen == [(n, (n - 1) % 2, n % 2 == 0, n == 4) for n in range(1, 7)], "lightning's counters changed"
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    loops = torch.load(tmp_path / "x.ckpt", weights_only=True)["loops"]
    assert list(loop_state.LOOPS(loops, "loops")) == []
    assert list(loop_state.loop_problems(loops, 3)) == []
    known = {key: {"state_dict", "batch_progress"} for key in ("validate_loop", "test_loop", "predict_loop")}
    known[loop_state.FIT_LOOP] = set(loop_state.FIT_LOOP_PARTS)
    assert {name: set(part) for name, part in loops.items()} == known, "lightning added or renamed a part of its loops"


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_last_micro_batches_of_an_epoch_are_a_step_however_few():
    model, steps = Counting(), []
    note = pl.callbacks.LambdaCallback(on_train_batch_end=lambda trainer, *args: steps.append(trainer.global_step))
    trainer = pl.Trainer(
        callbacks=[note],
        **{"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False},
        **{"max_epochs": 2, "accumulate_grad_batches": 2, "enable_checkpointing": False, "num_sanity_val_steps": 0},
    )
    batches = torch.utils.data.DataLoader(torch.ones(5, 1))
    trainer.fit(model, batches, batches)
    complete = [is_complete for _, _, is_complete, _ in model.seen]
    assert complete == [after > before for before, after in zip([0, *steps], steps, strict=False)]
    assert steps[-1] == sum(complete) == 6
