"""LanguageModel, the LightningModule: how a model is built and evaluated, its optimizer; ``step_loss`` has its loss."""

import dataclasses
from typing import Any, Literal

from lightning.pytorch import Callback
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from lightning_llm.checkpoints.recipes import restored_optimizer, restored_schedule
from lightning_llm.generation import generate
from lightning_llm.model.config import ModelConfig
from lightning_llm.optim.adamw import AdamW
from lightning_llm.optim.groups import GroupRule
from lightning_llm.optim.schedules import Schedule
from lightning_llm.training.budget import MemoryBudget, PlannedModule
from lightning_llm.training.callbacks.inputs import InputHashes
from lightning_llm.training.callbacks.progress import StatusFile
from lightning_llm.training.callbacks.record import RunRecord
from lightning_llm.training.callbacks.throughput import TrainingLog
from lightning_llm.training.checkpoint_io import CheckpointedModule
from lightning_llm.training.distributed import build_for, share_work
from lightning_llm.training.environment import switch_tf32
from lightning_llm.training.evaluation import Evaluation
from lightning_llm.training.initial_weights import start_from
from lightning_llm.training.optimization import OptimizedModule, check_validated, follow_metrics
from lightning_llm.training.preflight import check_setup
from lightning_llm.training.run_length import lambda_scheduler, start_waiting
from lightning_llm.training.step_loss import Batch, SummedLoss

CompileMode = Literal["default", "max-autotune-no-cudagraphs"]  # torch's modes without CUDA graphs
PREDICTED_TOKENS = 100


class LanguageModel(PlannedModule, OptimizedModule, CheckpointedModule, SummedLoss):
    """A transformer and how it is trained.

    Args:
        architecture: The shape of the model. A ``vocab_size`` of null is taken from the data.
        optimizer: Makes the optimizer from parameter groups: norms, biases and embeddings without weight decay,
            matrices with the optimizer's own. Any class by its path, such as ``lightning_llm.optim.MuonAdamW``.
        schedule: The learning rate over the run, as a factor of the optimizer's own: ``WarmupCosine``,
            ``WarmupStableDecay``, ``WarmupLinear`` or ``Constant`` of ``lightning_llm.optim``, or a scheduler of torch,
            stepped once per optimizer step (``ReduceLROnPlateau``: once per validation). Null: ``WarmupCosine`` over
            the run, with a warmup of 100 steps or a tenth of the run, whichever is shorter. The run ends at the first
            of ``trainer.max_steps`` and ``max_epochs``; with ``max_time`` alone, null is ``Constant`` after a warmup of
            100 steps, and others need ``decay_steps``.
        loss_chunks: Number of chunks of tokens for which logits and loss are computed one after the other, so that the
            logits of all tokens never exist at once; at most one per token. Null: chosen by size; 0: all at once.
        memory_budget: Such as ``80GiB``: choose micro-batch, ``checkpoint_level``, ``recompute`` and ``loss_chunks``
            before the model is built, for the fastest step whose predicted peak on a device fits. They override the
            config; the line ``plan`` of the summary and of ``check`` names each option.
        init_from: Start from these weights instead of random ones: a folder that ``lightning-llm export`` or
            transformers has written, a checkpoint, or a run directory. Step, optimizer and schedule start fresh; a
            resumed run does not read it.
        compile_mode: Compile with ``torch.compile`` in this mode: ``default``, or ``max-autotune-no-cudagraphs``, which
            tries more kernels. Null: do not compile. The first step takes tens of seconds longer.
        compile_scope: What is compiled as one: ``blocks``, each block of the transformer, or ``model``, the whole
            transformer, which takes longer with every layer and is not for FSDP2.
        memory_reserve: Part of ``memory_budget`` that the plan leaves free, such as ``2GiB``. Null: on a GPU about 0.7
            GiB for context and libraries, 1 GiB for NCCL with several processes, and 5 % of the predicted peak.
        groups: Learning rate and weight decay of some parameters, as factors of the optimizer's: a list of
            ``{pattern: …, lr_factor: …, weight_decay_factor: …}``. The first pattern that matches applies; one that
            decides nothing is an error.

    Attributes:
        transformer: The model; made in ``configure_model``, when the vocabulary is known.
        seed: Of the initial values; ``fit`` sets that of ``seed_everything``. ``None``: drawn.
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
        compile_scope: Literal["blocks", "model"] = "blocks",
        memory_reserve: str | None = None,
        groups: list[GroupRule] | None = None,
    ) -> None:
        super().__init__()
        if loss_chunks is not None and loss_chunks < 0:
            raise ValueError(f"loss_chunks must be at least 0 or null, got {loss_chunks}")
        # a checkpoint has plain values for architecture, optimizer and schedule
        self.architecture = ModelConfig(**architecture) if isinstance(architecture, dict) else architecture
        self.make_optimizer, self.schedule = restored_optimizer(optimizer), restored_schedule(schedule)
        self.groups = [rule if isinstance(rule, GroupRule) else GroupRule(**rule) for rule in groups or ()]
        self.loss_chunks, self.compile_mode, self.compile_scope = loss_chunks, compile_mode, compile_scope
        self.init_from, self.budget = init_from, MemoryBudget.of(memory_budget, memory_reserve)
        self.seed: int | None = None
        given = {"optimizer": optimizer, "schedule": schedule}
        self.save_plain_hyperparameters(**{name: part for name, part in given.items() if isinstance(part, dict)})

    def setup(self, stage: str) -> None:
        """Check model and data against each other: a ``ValueError`` lists all errors."""
        check_setup(self, self._trainer)
        switch_tf32(self._trainer)
        super().setup(stage)

    def configure_model(self) -> None:
        """Make the transformer, once the data know the vocabulary."""
        if hasattr(self, "transformer"):
            return
        if self.architecture.vocab_size is None:
            vocab_size = getattr(getattr(self._trainer, "datamodule", None), "vocab_size", None)
            if vocab_size is None:
                raise ValueError("architecture.vocab_size is null and there is no data to take it from: give a number")
            self.architecture = dataclasses.replace(self.architecture, vocab_size=vocab_size)
            self.save_plain_hyperparameters()
        self.transformer = build_for(self)
        if self.compile_mode is not None:
            compile_ = self.transformer.compile if self.compile_scope == "model" else self.transformer.compile_blocks
            compile_(mode=self.compile_mode)

    def on_fit_start(self) -> None:
        """Copy the weights of ``init_from``, unless a checkpoint has been loaded."""
        if self.init_from is not None and not self.has_loaded:
            start_from(self.init_from, self)
            self.has_loaded = True

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits, (batch, seq) -> (batch, seq, vocab)."""
        return self.transformer.logits(self.transformer(input_ids))

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to the sums of its data set."""
        self.evaluation.add(self.token_losses(batch), batch["targets"], dataloader_idx)

    def on_validation_epoch_start(self) -> None:
        """Start new sums: of the validation and the training text, or of the test text."""
        self.evaluation = Evaluation(self)

    def on_validation_epoch_end(self) -> None:
        """Log ``val_loss`` or ``test_loss`` and the other metrics, see :meth:`Evaluation.results`."""
        self.evaluation.log(self)
        follow_metrics(self.trainer, self.evaluation.results())

    test_step = validation_step
    on_test_epoch_start, on_test_epoch_end = on_validation_epoch_start, on_validation_epoch_end

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Continue each prompt greedily, (batch, seq + PREDICTED_TOKENS)."""
        return generate(self.transformer, batch["input_ids"], max_new_tokens=PREDICTED_TOKENS, temperature=0)

    def configure_callbacks(self) -> list[Callback]:
        """The training log and what ``compare`` reads, once, with any trainer."""
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        wanted = {InputHashes: InputHashes, TrainingLog: TrainingLog, StatusFile: RunRecord}
        missing = [make() for kind, make in wanted.items() if not any(isinstance(each, kind) for each in callbacks)]
        return [] if self.trainer.barebones else missing

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One optimizer over the parameter groups, and the schedule, stepped once per optimizer step."""
        optimizer = share_work(self.optimizer_over(self.groups_of(self)), self.trainer)
        schedule: Any = self.schedule
        if schedule is None or isinstance(schedule, Schedule):
            scheduler: Any = lambda_scheduler(schedule, optimizer, self.trainer)
        else:
            schedule = scheduler = schedule(optimizer)
            check_validated(scheduler, self.trainer)
        self.save_recipes(optimizer, schedule)
        config: Any = {"scheduler": scheduler, "interval": "step", "frequency": 1, "reduce_on_plateau": False}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def on_train_start(self) -> None:
        """Start a schedule that had to wait for the user's own data loader."""
        super().on_train_start()
        start_waiting(self.schedule, self.trainer)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Step, then free the gradients: Lightning would hold them until the next forward pass is over."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.optimizer_zero_grad(epoch, batch_idx, optimizer)
