"""LanguageModel, the LightningModule, from top to bottom: building, loss, steps, optimizer, checkpoints."""

import dataclasses
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_llm.accounting.planner import StepPlan
from lightning_llm.checkpoints.compatibility import check_loading
from lightning_llm.checkpoints.loop_state import rescale_batch_progress
from lightning_llm.checkpoints.reading import only_checkpoints
from lightning_llm.checkpoints.recipes import optimizer_recipe, restored_optimizer, restored_schedule, schedule_recipe
from lightning_llm.checkpoints.schema import ACCUMULATION, EXECUTION, FORMAT, own_part
from lightning_llm.data.batches import Batch
from lightning_llm.data.datamodule import tokenizer_of
from lightning_llm.generation import generate
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.loss import CrossEntropy
from lightning_llm.model.weights import lr_factors
from lightning_llm.optim.adamw import AdamW
from lightning_llm.optim.groups import GroupRule, ParamGroup, apply_group_factors, param_groups
from lightning_llm.optim.schedules import Schedule
from lightning_llm.training.budget import MemoryBudget
from lightning_llm.training.callbacks.summary_file import missing_callbacks
from lightning_llm.training.capture import CapturedLoss
from lightning_llm.training.distributed import build_for, share_work
from lightning_llm.training.environment import environment_of, print_changes, seed_dropout, switch_tf32
from lightning_llm.training.evaluation import Evaluation
from lightning_llm.training.initial_weights import start_from
from lightning_llm.training.preflight import check_batch, check_setup
from lightning_llm.training.schedule_free import switch_weights
from lightning_llm.training.schedulers import follow_metrics, make_deferred_schedulers, scheduler_of
from lightning_llm.training.step_loss import StepLoss

CompileMode = Literal["default", "max-autotune-no-cudagraphs"]  # torch's modes without CUDA graphs
PREDICTED_TOKENS = 100


class LanguageModel(LightningModule):
    """A transformer and how it is trained.

    Args:
        architecture: The shape of the model. A ``vocab_size`` of null is taken from the data.
        optimizer: The optimizer's class, whose weight decay applies to the matrices; norms, biases, and embeddings
            have none. Any class by its path, such as ``lightning_llm.optim.MuonAdamW``.
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
        compile_scope: What is compiled as one unit: each block (``blocks``), or the whole transformer (``model``),
            which takes longer to compile with every layer and does not work with FSDP2.
        memory_reserve: Part of ``memory_budget`` that the plan leaves free, such as ``2GiB``. Null: on a GPU about 0.7
            GiB for context and libraries, 1 GiB for NCCL with several processes, and 5% of the predicted peak.
        groups: Learning rate and weight decay of some parameters, as factors of the optimizer's: a list of
            ``{pattern: …, lr_factor: …, weight_decay_factor: …}``. The first pattern that matches applies; one that
            decides nothing is an error.

    Attributes:
        transformer: The model; made in ``configure_model``, when the vocabulary is known.
        seed: Of the initial values; ``fit`` sets that of ``seed_everything``. ``None``: drawn.
        plan: What was chosen for ``memory_budget``.
        grad_norm: Norm of the last step's gradients before clipping, scalar, on the device.
        auxiliary_loss: What MLPs added to the loss of the last micro-batch, scalar, on the device.
        loss_count: What the loss of the last micro-batch is the mean over: the number of its targets, or the sum of
            their weights, on the device; ``None`` for a loss of the user's own.
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
        self.make_optimizer = restored_optimizer(optimizer)
        self.schedule = restored_schedule(schedule)
        self.groups = [rule if isinstance(rule, GroupRule) else GroupRule(**rule) for rule in groups or ()]
        self.loss_chunks = loss_chunks
        self.compile_mode = compile_mode
        self.compile_scope = compile_scope
        self.init_from = init_from
        self._has_loaded = False  # weights of a file
        parts: dict[str, Any] = {"optimizer": optimizer, "schedule": schedule}
        # of optimizer and schedule: those of a checkpoint until `configure_optimizers` has made both
        self._recipes: dict[str, Any] = {name: part for name, part in parts.items() if isinstance(part, dict)}
        self.budget = MemoryBudget.of(memory_budget, memory_reserve)
        self.plan: StepPlan | None = None
        self.seed: int | None = None
        self.step_loss = StepLoss()
        self.grad_norm: Tensor | None = None
        self.auxiliary_loss: Tensor | None = None
        self.loss_count: Tensor | None = None
        self._captured: CapturedLoss | None = None  # while training
        self._save_plain_hyperparameters()

    # ---- building

    def setup(self, stage: str) -> None:
        """Check model and data against each other: a ``ValueError`` lists all errors. Plan for the memory budget."""
        check_setup(self, self._trainer)
        switch_tf32(self._trainer)
        if stage == "fit" and self.plan is None:  # else the data's setup has asked for it
            self.keep_to_budget(getattr(self._trainer, "datamodule", None), self._trainer)

    def keep_to_budget(self, data: Any, trainer: Any) -> None:
        """Plan for ``memory_budget``; the data call this in their ``setup``. See :meth:`MemoryBudget.apply`."""
        if self.budget is not None:
            self.plan = self.budget.apply(self, data, trainer)
            self._save_plain_hyperparameters()

    def configure_model(self) -> None:
        """Make the transformer, once the data know the vocabulary."""
        if hasattr(self, "transformer"):
            return
        if self.architecture.vocab_size is None:
            vocab_size = getattr(getattr(self._trainer, "datamodule", None), "vocab_size", None)
            if vocab_size is None:
                raise ValueError("architecture.vocab_size is null and there is no data to take it from: give a number")
            self.architecture = dataclasses.replace(self.architecture, vocab_size=vocab_size)
            self._save_plain_hyperparameters()
        self.transformer = build_for(self)
        if self.compile_mode is not None:
            compile_ = self.transformer.compile if self.compile_scope == "model" else self.transformer.compile_blocks
            compile_(mode=self.compile_mode)

    def configure_as(self, architecture: dict[str, Any]) -> None:
        """Make the transformer for weights that another process has trained.

        Args:
            architecture: Of the model there, with its vocabulary.
        """
        self.architecture = ModelConfig(**architecture)
        self._save_plain_hyperparameters()
        self.configure_model()

    def configure_callbacks(self) -> list[Callback]:
        """The training log and what ``compare`` reads, once, with any trainer."""
        return missing_callbacks(self.trainer)

    def on_fit_start(self) -> None:
        """Copy the weights of ``init_from``, unless a checkpoint has been loaded."""
        if self.init_from is not None and not self._has_loaded:
            start_from(self.init_from, self)
            self._has_loaded = True

    # ---- loss

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits, (batch, seq) -> (batch, seq, vocab)."""
        return self.transformer.logits(self.transformer(input_ids))

    def loss(self, batch: Batch) -> Tensor:
        """Loss that training minimizes, of one batch: the mean of ``architecture.loss`` and what MLPs add, in float32.

        Args:
            batch: ``input_ids`` and ``targets``, both (batch, seq); ``documents``, likewise, keeps attention inside;
                ``weights``, likewise, of the targets.
        """
        loss, self.loss_count = self._mean(self.transformer.objective, batch, weighted=True)
        added = self.transformer.auxiliary_loss() if self.training else None
        if added is None:
            return loss
        self.auxiliary_loss = added.detach()
        return loss + added

    def cross_entropy(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of a batch in nats per token, float32, whatever the model was trained for."""
        return self._mean(CrossEntropy(self.architecture), batch)[0]

    def token_losses(self, batch: Batch) -> Tensor:
        """Cross-entropy of each target in nats, (batch, seq), float32; 0 where it does not count. For evaluation."""
        hidden = self._hidden(batch)
        head = self.transformer.lm_head
        return CrossEntropy(self.architecture).token_losses(hidden, head, batch["targets"], self.loss_chunks)

    def _mean(self, objective: nn.Module, batch: Batch, weighted: bool = False) -> tuple[Tensor, Tensor]:
        hidden = self._hidden(batch)
        head = self.transformer.lm_head
        weights = batch.get("weights") if weighted else None
        total, count = objective(hidden, head, batch["targets"], weights=weights, num_chunks=self.loss_chunks)
        return total / count.where(count > 0, 1), count

    def _hidden(self, batch: Batch) -> Tensor:
        check_batch(batch)
        return self.transformer(batch["input_ids"], documents=batch.get("documents"))  # type: ignore[no-any-return]

    # ---- steps

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of one micro-batch, multiplied by its share of the step: see :class:`StepLoss`."""
        seed_dropout(self.trainer, self.seed)
        self.loss_count = None
        loss = self.loss(batch) if self._captured is None else self._captured(batch)
        return self.step_loss.weighted(loss, batch, self.loss_count, self.trainer)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Divide the gradients by the count of the step, and clip; fused optimizers under autocast too."""
        self.grad_norm = self.step_loss.finish(optimizer, gradient_clip_val, gradient_clip_algorithm, self._trainer)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Step, then free the gradients: Lightning would hold them until the next forward pass is over."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.optimizer_zero_grad(epoch, batch_idx, optimizer)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to the sums of its data set."""
        self.evaluation.add(self.token_losses(batch), batch, dataloader_idx)

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

    # ---- optimizer and schedule

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One optimizer over the parameter groups, and the schedule, stepped once per optimizer step."""
        optimizer = share_work(self.optimizer_over(self.groups_of(self)), self.trainer)
        schedule: Any = self.schedule if isinstance(self.schedule, Schedule | None) else self.schedule(optimizer)
        self._recipes = {"optimizer": optimizer_recipe(optimizer), "schedule": schedule_recipe(schedule)}
        self._save_plain_hyperparameters()
        scheduler: Any = scheduler_of(schedule, optimizer, self.trainer)
        config: Any = {"scheduler": scheduler, "interval": "step", "frequency": 1, "reduce_on_plateau": False}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def groups_of(self, module: nn.Module) -> list[ParamGroup]:
        """The parameter groups of this module or of its transformer; a ``ValueError`` if a rule decides nothing."""
        return param_groups(module, rules=self.groups, lr_factors=lr_factors(self.architecture))

    def optimizer_over(self, groups: list[ParamGroup]) -> Optimizer:
        """The optimizer, with a learning rate for each group.

        Raises:
            ValueError: An option is out of range; or there is ``architecture.mup``, and it is no kind of Adam.
        """
        optimizer = apply_group_factors(self.make_optimizer(groups))
        name = type(optimizer).__name__
        if self.architecture.mup is not None and not name.startswith("Adam"):
            raise ValueError(f"architecture.mup sets the learning rates of Adam, got {name}: use AdamW, or no mup")
        return optimizer

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """After each optimizer step, unless the schedule follows a metric: see :func:`follow_metrics`."""
        if not isinstance(scheduler, ReduceLROnPlateau):
            super().lr_scheduler_step(scheduler, metric)

    def on_train_start(self) -> None:
        """Put the weights to train into the parameters; start a schedule that waited for the user's own loader."""
        switch_weights(self.trainer.optimizers, "train")
        make_deferred_schedulers(self.schedule, self.trainer)
        self._captured = CapturedLoss(self) if getattr(self.trainer, "capture", False) else None

    def on_validation_start(self) -> None:
        """Put the weights to evaluate into the parameters."""
        switch_weights(self.trainer.optimizers, "eval")

    def on_validation_end(self) -> None:
        """After callbacks have saved them, continue with the weights to train."""
        if self.trainer.state.fn == "fit":
            switch_weights(self.trainer.optimizers, "train")

    def on_train_end(self) -> None:
        """Put the weights to evaluate into the parameters; free what was captured."""
        self.on_validation_start()
        self._captured = None

    # ---- checkpoints

    def _save_plain_hyperparameters(self) -> None:
        """Note what a checkpoint says of the model: a dataclass in it could not be read without running code."""
        plain = {"architecture": self.architecture.to_dict(), "loss_chunks": self.loss_chunks, **self._recipes}
        if groups := [dataclasses.asdict(rule) for rule in self.groups]:
            plain["groups"] = groups
        self.save_hyperparameters(plain, logger=False)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, trust_code: bool = False, **options: Any) -> Any:
        """The model of a checkpoint; no code of the file runs. Arguments are those of Lightning's, and of this class.

        Restored, unless given: architecture, ``loss_chunks``, ``groups``, a schedule of ``lightning_llm.optim``, an
        optimizer of it or of ``torch.optim``. A warning names any other one: the model can be used, but not trained.

        Raises:
            ValueError: The file is damaged, is not a checkpoint, or names code that is not ours without ``trust_code``.
        """
        with only_checkpoints(checkpoint_path, trust_code=trust_code):
            return super().load_from_checkpoint(checkpoint_path, *args, **{**options, "weights_only": True})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the tokenizer: a checkpoint alone is enough to generate text."""
        tokenizer = tokenizer_of(getattr(self._trainer, "datamodule", None))
        content = own_part(None if tokenizer is None else tokenizer.to_str())
        of_run = {EXECUTION: environment_of(self.trainer), ACCUMULATION: self.trainer.accumulate_grad_batches}
        checkpoint[FORMAT] = {**content, **of_run}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the checkpoint fits, and convert Lightning's counts of micro-batches to this run's size."""
        check_loading(checkpoint, self)
        self._has_loaded = True
        if self._trainer is not None and self.trainer.state.fn == "fit":
            ours = checkpoint[FORMAT]
            rescale_batch_progress(checkpoint, self.trainer.accumulate_grad_batches, ours.get(ACCUMULATION))
            print_changes(ours.get(EXECUTION, {}), self.trainer)
