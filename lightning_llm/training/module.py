"""The LightningModule: steps, optimiser, schedule, clipping. What is logged and saved is the callbacks' business."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_llm.accounting.hardware import byte_size
from lightning_llm.accounting.plan_report import summary
from lightning_llm.accounting.planner import Plan, Task, configured
from lightning_llm.data.datamodule import TokenDataModule, rescale_batch_progress
from lightning_llm.data.sources import Source
from lightning_llm.generation import generate
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.ops.losses import linear_cross_entropy
from lightning_llm.optim.adamw import AdamW
from lightning_llm.optim.clipping import clip_grad_norm_
from lightning_llm.optim.grouping import param_groups
from lightning_llm.optim.schedules import Schedule, WarmupCosine
from lightning_llm.training.budget import plan_for, task_of
from lightning_llm.training.checkpointing import EXECUTION, FORMAT, FORMAT_VERSION
from lightning_llm.training.evaluation import Evaluation
from lightning_llm.training.execution import changes, record
from lightning_llm.training.initial_weights import InitialWeights, read_initial_weights
from lightning_llm.training.preflight import data_faults, refuse
from lightning_llm.training.sharding import build_for

Batch = dict[str, Tensor]

PREDICTED_TOKENS = 100
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]  # torch's, but for those with CUDA graphs
IGNORED = -100  # a target that does not count: padding of the last batches with several processes

# What may differ between a checkpoint and the model that loads it: the parameters and their meaning stay the same.
EXECUTION_FIELDS = frozenset({"checkpoint_level", "recompute", "dropout"})
SAME_PARAMETERS = ({"swiglu", "memory_optimized_swiglu"},)


class LanguageModel(LightningModule):
    """A transformer and how it is trained.

    Args:
        architecture: The shape of the model. A ``vocab_size`` of null is taken from the data.
        optimizer: Makes the optimiser from parameter groups: norms, biases and embeddings come without weight decay,
            matrices with the optimiser's own. Any class by its path, for example ``lightning_llm.optim.AdamW``,
            ``lightning_llm.optim.MuonAdamW``, ``torch.optim.SGD``.
        schedule: The learning rate over the run, as a factor of the optimiser's own, one of
            ``lightning_llm.optim.WarmupCosine``, ``WarmupStableDecay``, ``WarmupLinear``, ``Constant``; or a
            scheduler of torch by its class path, stepped once per optimiser step. Null: ``WarmupCosine`` over the run,
            with a warm-up of 100 steps or a tenth of the run, whichever is shorter.
        loss_chunks: Into how many parts the tokens of a micro-batch are cut to compute logits and loss, so that the
            logits of all tokens never exist at once. Null chooses; 0 computes them all at once.
        memory_budget: Such as ``80GiB``: choose micro-batch, ``checkpoint_level``, ``recompute`` and ``loss_chunks``
            before the model is built, for the fastest step whose predicted peak on a device fits. They replace what
            the config says of them.
        init_from: Begin with these weights instead of random ones: a folder that ``lightning-llm export`` or
            transformers has written, a checkpoint, or a run directory. Step, optimiser and schedule begin anew; a run
            that goes on from a checkpoint does not read it.
        compile_mode: Let ``torch.compile`` make code for the blocks of the transformer, with this mode of its:
            ``default``, or ``max-autotune-no-cudagraphs``, which tries more kernels. The first step then takes longer,
            by tens of seconds. Null: none. The modes that record CUDA graphs are not offered: a graph for each block
            gives its memory to the next one.

    Attributes:
        transformer: The model; made in ``configure_model``, when the vocabulary is known.
        plan: What was chosen for ``memory_budget``.
        grad_norm: Norm of the last step's gradients before clipping, scalar, on the device.
    """

    def __init__(
        self,
        architecture: ModelConfig,
        optimizer: OptimizerCallable = AdamW,
        schedule: Schedule | LRSchedulerCallable | None = None,
        loss_chunks: int | None = None,
        memory_budget: str | None = None,
        init_from: str | None = None,
        compile_mode: CompileMode | None = None,
    ) -> None:
        super().__init__()
        if isinstance(architecture, dict):  # read back from a checkpoint
            architecture = ModelConfig(**architecture)
        if loss_chunks is not None and loss_chunks < 0:
            raise ValueError(f"loss_chunks must be at least 0 or null, got {loss_chunks}")
        if memory_budget is not None:
            _check_budget(memory_budget)
        self.memory_budget = memory_budget
        self.plan: Plan | None = None
        self._planned: Task | None = None
        self.init_from = init_from
        self._has_weights = init_from is None
        self.architecture = architecture
        self.make_optimizer = optimizer
        self.schedule = schedule
        self.loss_chunks = loss_chunks
        self.compile_mode = compile_mode
        self.transformer: Transformer
        self.grad_norm: Tensor | None = None
        self.evaluation: Evaluation | None = None
        self._save_plain_hyperparameters()

    # -- the model ----------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Check model and data against each other, once the data are there.

        Raises:
            ValueError: With every fault that is known before the first step.
        """
        data = getattr(self._trainer, "datamodule", None)
        if isinstance(data, TokenDataModule):
            refuse(data_faults(self.architecture, data))

    def keep_to_budget(self, data: TokenDataModule, trainer: Any) -> None:
        """Plan for ``memory_budget``, and set model and data accordingly. Data ask for it in their own ``setup``.

        Raises:
            ValueError: Nothing fits the budget, or the accounting does not cover the run.
        """
        if self.memory_budget is None:
            return
        task = task_of(self, data, trainer)
        if task != self._planned and not hasattr(self, "transformer"):  # a built model keeps its plan
            self.plan, self._planned = plan_for(task, self.memory_budget), task
            setting = self.plan.setting
            self.architecture, self.loss_chunks = configured(self.architecture, setting), setting.loss_chunks
            self._save_plain_hyperparameters()
        if self.plan is not None:
            data.micro_batch_size = self.plan.setting.rows

    @property
    def plan_summary(self) -> str:
        """The plan in one line; empty without one."""
        return "" if self.plan is None else summary(self.plan, str(self.memory_budget))

    def configure_model(self) -> None:
        """Make the transformer, once; the data have been set up by now, so the vocabulary is known."""
        if hasattr(self, "transformer"):
            return
        if self.architecture.vocab_size is None:
            vocab_size = getattr(getattr(self._trainer, "datamodule", None), "vocab_size", None)
            if vocab_size is None:
                raise ValueError("architecture.vocab_size is null and there is no data to take it from: give a number")
            self.architecture = ModelConfig(**{**self.architecture.to_dict(), "vocab_size": vocab_size})
            self._save_plain_hyperparameters()
        self.transformer = Transformer(self.architecture) if self.device_mesh is None else self._sharded_transformer()
        if self.compile_mode is not None:
            self.transformer.compile_blocks(self.compile_mode)

    def on_fit_start(self) -> None:
        """Take the weights of ``init_from``, unless a checkpoint has brought others.

        Raises:
            ValueError: They are of another architecture (naming each field) or tokenizer, or cannot be read.
        """
        if not self._has_weights:
            initial = read_initial_weights(str(self.init_from))
            refuse(self._initial_faults(initial, getattr(self._trainer, "datamodule", None)))
            initial.fill(self.transformer)
            self._has_weights = True

    def initial_faults(self, data: TokenDataModule) -> list[str]:
        """What is wrong with ``init_from``, for this model and these data; read without its tensors."""
        try:
            return [] if self.init_from is None else self._initial_faults(read_initial_weights(self.init_from), data)
        except ValueError as error:
            return [str(error)]

    def _initial_faults(self, initial: InitialWeights, data: Any) -> list[str]:
        wanted, tokenizer = self.architecture, getattr(data, "tokenizer", None)
        if wanted.vocab_size is None:
            wanted = ModelConfig(**{**wanted.to_dict(), "vocab_size": data.vocab_size})
        differences = architecture_differences(initial.config, wanted, ignored=free_fields(wanted))
        another = f"init_from {self.init_from} is of another architecture: {'; '.join(differences)}"
        other_ids = initial.tokenizer_fault(None if tokenizer is None else tokenizer.to_str())
        return [fault for fault in (another if differences else "", other_ids) if fault]

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits, (batch, seq) -> (batch, seq, vocab)."""
        return self.transformer.logits(self.transformer(input_ids))

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of a batch in nats per token, float32.

        Args:
            batch: ``input_ids`` and ``targets``, both (batch, seq); ``documents``, likewise, keeps attention inside.
        """
        hidden = self.transformer(batch["input_ids"], documents=batch.get("documents"))
        head, targets = self.transformer.lm_head, batch["targets"]
        if self.loss_chunks == 0:
            return F.cross_entropy(head(hidden).flatten(0, -2).float(), targets.flatten())
        return linear_cross_entropy(hidden, head.weight, targets, bias=head.bias, num_chunks=self.loss_chunks)

    def _sharded_transformer(self) -> Transformer:
        assert self.device_mesh is not None
        strategy = cast(ModelParallelStrategy, self.trainer.strategy)
        return build_for(strategy, self.architecture, self.device_mesh["data_parallel"], str(self.trainer.precision))

    # -- steps --------------------------------------------------------------------------------------------------------

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of one micro-batch."""
        if self.architecture.dropout:
            self._seed_dropout()
        return self.loss(batch)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to the sums of its data set."""
        assert self.evaluation is not None
        self.evaluation.add(self.loss(batch), (batch["targets"] != IGNORED).sum(), dataloader_idx)

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Each prompt with its likeliest continuation, (batch, seq + PREDICTED_TOKENS)."""
        return generate(self.transformer, batch["input_ids"], max_new_tokens=PREDICTED_TOKENS, temperature=0)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Begin new sums: validation first, then the training text read the same way."""
        self.evaluation = Evaluation(("val", "train"), self._sources(), self.device)

    def on_validation_epoch_end(self) -> None:
        """Log ``val_loss`` (also of each source), ``val_perplexity``, ``val_bits_per_byte`` and ``train_loss_eval``."""
        self._log_evaluation()

    def on_test_epoch_start(self) -> None:
        """Begin new sums."""
        self.evaluation = Evaluation(("test",), self._sources(), self.device)

    def on_test_epoch_end(self) -> None:
        """Log ``test_loss`` (in all and of each source), ``test_perplexity`` and ``test_bits_per_byte``."""
        self._log_evaluation()

    def _sources(self) -> list[Source]:
        data = getattr(self._trainer, "datamodule", None)
        return data.sources if isinstance(data, TokenDataModule) else []

    def _log_evaluation(self) -> None:
        assert self.evaluation is not None
        metrics = self.evaluation.results()
        self.log_dict(metrics, logger=False)
        self._write(metrics)

    def _write(self, metrics: dict[str, float]) -> None:
        """To the loggers, at the number of optimiser steps: Lightning's own counter is one behind."""
        if not self.trainer.sanity_checking:
            for logger in self.loggers:
                logger.log_metrics(metrics, step=self.global_step)

    # -- optimisation -------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One optimiser over the parameter groups, and the schedule, stepped once per optimiser step."""
        optimizer = self.make_optimizer(cast(Iterable[torch.nn.Parameter], param_groups(self)))
        total_steps, schedule = self._total_steps(), self.schedule
        if schedule is None:
            schedule = WarmupCosine(warmup_steps=min(100, (total_steps or 1000) // 10))
        if isinstance(schedule, Schedule):
            # factor(0) is 0 where there is a warm-up: counting from 1, every update moves something
            scheduler: Any = LambdaLR(optimizer, partial(_factor, schedule, total_steps))
        else:
            scheduler = schedule(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip, and keep the norm from before for the log. Works with fused optimisers under autocast too."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if gradient_clip_algorithm == "value" and gradient_clip_val is not None:
            self.grad_norm = clip_grad_norm_(parameters, float("inf"))
            torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        else:
            self.grad_norm = clip_grad_norm_(parameters, gradient_clip_val or float("inf"))

    def _total_steps(self) -> int | None:
        """From the trainer's limits, never from ``estimated_stepping_batches``, which disturbs a resumed loader."""
        if self.trainer.max_steps > 0:
            return self.trainer.max_steps
        per_epoch = getattr(getattr(self.trainer, "datamodule", None), "steps_per_epoch", None)
        if per_epoch is None or self.trainer.max_epochs is None or self.trainer.max_epochs < 1:
            return None
        return int(per_epoch) * self.trainer.max_epochs

    def _seed_dropout(self) -> None:
        """Dropout as a function of the seed, the position and the process: a resumed run drops what it would have."""
        position = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        seed = int(getattr(getattr(self.trainer, "datamodule", None), "seed", 0))
        torch.manual_seed(hash((seed, position, self.global_rank)) % 2**63)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the tokenizer: a checkpoint alone is enough to generate text."""
        tokenizer = getattr(getattr(self._trainer, "datamodule", None), "tokenizer", None)
        content = None if tokenizer is None else tokenizer.to_str()
        own = {"format_version": FORMAT_VERSION, "tokenizer": content, EXECUTION: record(self.trainer)}
        checkpoint[FORMAT] = own

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another architecture.

        Raises:
            ValueError: Naming every field that differs, with both values.
        """
        saved = checkpoint.get("hyper_parameters", {}).get("architecture")
        if saved is None:
            raise ValueError("the checkpoint holds no architecture: it was not written by lightning-llm")
        differences = architecture_differences(ModelConfig(**saved), self.architecture)
        if differences:
            raise ValueError(f"the checkpoint is of another architecture: {'; '.join(differences)}")
        self._has_weights = True
        if self._trainer is not None and self.trainer.state.fn == "fit":
            self._say_changes(checkpoint.get(FORMAT, {}).get(EXECUTION, {}))
            rescale_batch_progress(checkpoint, self.trainer.accumulate_grad_batches)

    def _say_changes(self, saved: dict[str, Any]) -> None:
        if (lines := changes(saved, self.trainer)) and self.trainer.is_global_zero:
            print("Changed since the checkpoint, so that other bits follow:")
            print("\n".join(f"  {line}" for line in lines))

    def _save_plain_hyperparameters(self) -> None:
        # plain values only: a dataclass in a checkpoint could not be read back without running code
        self.save_hyperparameters(
            {"architecture": self.architecture.to_dict(), "loss_chunks": self.loss_chunks}, logger=False
        )


def _check_budget(words: str) -> None:
    """A word that is no size is said at once."""
    try:
        byte_size(words)
    except ValueError as error:
        raise ValueError(f"model.memory_budget {error}") from error


def free_fields(architecture: ModelConfig) -> frozenset[str]:
    """What may differ between a model and the one whose weights it begins with."""
    # a rotation has no parameters: it goes on as far as it is asked to
    length = {"max_position_embeddings"} if architecture.position == "rope" else set()
    return EXECUTION_FIELDS | {"initializer_range"} | length


def architecture_differences(
    saved: ModelConfig, wanted: ModelConfig, *, ignored: frozenset[str] = EXECUTION_FIELDS
) -> list[str]:
    """The fields that make two models' parameters differ in number, shape or meaning, as ``name saved -> wanted``."""
    differences = []
    for name, ours in wanted.to_dict().items():
        theirs = getattr(saved, name)
        if name in ignored or ours == theirs or (name == "vocab_size" and ours is None):
            continue
        if name == "mlp" and any({ours, theirs} <= same for same in SAME_PARAMETERS):
            continue
        differences.append(f"{name} is {theirs} there and {ours} here")
    return differences


def _factor(schedule: Schedule, total_steps: int | None, step: int) -> float:
    return schedule.factor(step + 1, total_steps)
