"""Every private name of torch and Lightning that the package uses, with what it relies on: read this after an upgrade.

``INTERFACES`` lists them by owner. One test finds the uses in the source (``ast``) and compares them with the list; a
name that is gone fails the tests of what uses it. Lightning's loops have undocumented attributes and checkpoint keys:
only ``checkpoints/loop_state.py`` names them.
"""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_llm.checkpoints import loop_state

PACKAGE = Path(__file__).parents[1] / "lightning_llm"
ROOTS = ("torch", "lightning", "torchmetrics")
OF_TUPLES = {"_replace", "_asdict", "_fields"}  # documented, of NamedTuple


HOOKS = "a dict of hooks; empty: the module's weight may be read without calling the module"
FOREACH = "the multi-tensor operation, one call for all parameters"
STRATEGY = "the constructor's argument of this name"
INTERFACES = {  # by owner: names, and what the code relies on
    "torch": {
        **dict.fromkeys(("_foreach_mul_", "_foreach_add_", "_foreach_lerp_", "_foreach_lerp"), FOREACH),
        **dict.fromkeys(("_foreach_addcmul_", "_foreach_addcdiv_", "_foreach_sqrt"), FOREACH),
        **dict.fromkeys(("_foreach_copy_", "_foreach_norm"), FOREACH),
        "_fused_sdp_choice": "the number of the kernel that scaled_dot_product_attention takes for these tensors",
        "_dynamo": "config.recompile_limit: so many graphs of one code, then it runs uncompiled",
        "_fused_adamw_": "AdamW as one kernel on CPU and CUDA",
        "_C": "the module of the two functions below",
        "_subclasses": "fake_tensor: tensors without values, and the errors of what needs values",
    },
    "torch._C": {
        "_are_functorch_transforms_active": "vmap or grad transforms run: custom autograd functions support neither",
        "_current_autograd_node": "the node whose backward runs; None outside of backward",
    },
    "torch.ops.aten": {"_softmax_backward_data": "the gradient of softmax, written in place"},
    "torch.autograd": {"_get_sequence_nr": "grows by one with each node: it tells which forward a backward belongs to"},
    "torch.autograd.graph.Node": {"_sequence_nr": "the number that the node's forward was given"},
    "torch.nn.Module": {
        **dict.fromkeys(("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"), HOOKS),
        "_compiled_call_impl": "None until Module.compile",
    },
    "torch.nn.modules.module": {
        **dict.fromkeys(("_global_forward_hooks", "_global_forward_pre_hooks"), HOOKS),
        **dict.fromkeys(("_global_backward_hooks", "_global_backward_pre_hooks"), HOOKS),
    },
    "torch.ops.aten.add.Tensor": {"_schema": "which arguments an operator writes and returns"},
    "torch.utils": {"_python_dispatch": "sees every operator"},
    "torch.cuda.memory": dict.fromkeys(("_record_memory_history", "_dump_snapshot"), "the snapshot of the allocator"),
    "torch.utils._python_dispatch": {
        "_get_current_dispatch_mode": "an operator mode watches: nothing is replayed or tried"
    },
    "torch.utils.tensorboard.SummaryWriter": {"_get_file_writer": "takes a summary protobuf: the custom scalars"},
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop": {
        "_should_accumulate": "false after the last micro-batch of a step; a test below holds it"
    },
    "lightning.pytorch.LightningModule": {
        "_trainer": "the trainer or None, where the property `trainer` raises",
        "_compiler_ctx": "set by torch.compile of a LightningModule, else None",
    },
    "lightning.pytorch.cli.LightningCLI": {
        "_get": "an option of the current subcommand, by its key",
        "_parser": "the parser of a subcommand",
    },
    "lightning.pytorch.cli.LightningArgumentParser": {
        "_action_groups": "argparse's: the groups in the order of --help",
        "_actions": "argparse's: all options",
        "_group_actions": "argparse's: the options of a group",
    },
    "lightning.pytorch.Trainer": {"_accelerator_connector": "its cluster_environment is the launcher's"},
    "lightning.pytorch.strategies.launchers": {
        "_MultiProcessingLauncher": "its two methods that hand results back, and weights in .temp.ckpt"
    },
    "lightning.pytorch.strategies.launchers._MultiProcessingLauncher": {"_start_method": "fork or spawn"},
    "lightning.pytorch.strategies.DDPStrategy": {"_ddp_kwargs": "the options of DistributedDataParallel"},
    "lightning.pytorch.strategies.ModelParallelStrategy": dict.fromkeys(
        (
            *("_data_parallel_size", "_tensor_parallel_size", "_save_distributed_checkpoint"),
            *("_process_group_backend", "_timeout"),
        ),
        STRATEGY,
    ),
    "lightning.pytorch.loggers.TensorBoardLogger": {
        "_kwargs": "the options of the SummaryWriter that it makes: purge_step is added",
        "_experiment": "None until the SummaryWriter is made",
    },
}


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
    listed = {name for names in INTERFACES.values() for name in names}
    missing = {name: sorted(places) for name, places in USES.items() if name not in listed}
    assert not missing, f"private names of torch or Lightning without an entry in INTERFACES: {missing}"
    assert not listed - set(USES), "no longer used: remove the entry"


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
