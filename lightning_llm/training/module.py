"""The LightningModule: steps, optimiser, schedule, clipping. What is logged and saved is the callbacks' business."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_llm.accounting.plan_report import summary
from lightning_llm.accounting.planner import Plan, Task, configured
from lightning_llm.checkpoints.compatibility import architecture_differences, check_loaded, free_fields
from lightning_llm.checkpoints.reading import EXECUTION, only_checkpoints
from lightning_llm.checkpoints.recipes import (
    optimizer_recipe,
    restored_optimizer,
    restored_schedule,
    schedule_recipe,
    warn_without_recipe,
)
from lightning_llm.checkpoints.schema import FORMAT, FORMAT_VERSION
from lightning_llm.data.datamodule import TokenDataModule, rescale_batch_progress
from lightning_llm.data.sources import Source
from lightning_llm.generation import generate
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.plain import is_plain
from lightning_llm.model.transformer import Transformer
from lightning_llm.ops.losses import linear_cross_entropy
from lightning_llm.optim.adamw import AdamW
from lightning_llm.optim.clipping import clip_grad_norm_
from lightning_llm.optim.grouping import param_groups
from lightning_llm.optim.schedules import Constant, Schedule, WarmupCosine
from lightning_llm.training.budget import check_budget, overridden, plan_for, task_of
from lightning_llm.training.callbacks.throughput import TrainingLog
from lightning_llm.training.evaluation import Evaluation
from lightning_llm.training.execution import changes, record
from lightning_llm.training.initial_weights import InitialWeights, read_initial_weights
from lightning_llm.training.length import is_waiting_for_data, total_steps
from lightning_llm.training.preflight import data_faults, refuse
from lightning_llm.training.sharding import build_for
from lightning_llm.training.trainer_options import accumulation_faults

Batch = dict[str, Tensor]

PREDICTED_TOKENS = 100
DEFAULT_WARMUP = 100  # steps
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]  # torch's, but for those with CUDA graphs
IGNORED = -100  # a target that does not count: padding of the last batches with several processes


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
            with a warm-up of 100 steps or a tenth of the run, whichever is shorter. The run ends where the first of
            ``trainer.max_steps`` and ``max_epochs`` ends it. If neither does (``max_time`` alone), null is
            ``Constant`` after a warm-up of 100 steps, and a schedule that decays needs its own ``decay_steps``.
        loss_chunks: Into how many parts the tokens of a micro-batch are cut to compute logits and loss, so that the
            logits of all tokens never exist at once; at most one per token. Null chooses; 0 computes them all at once.
        memory_budget: Such as ``80GiB``: choose micro-batch, ``checkpoint_level``, ``recompute`` and ``loss_chunks``
            before the model is built, for the fastest step whose predicted peak on a device fits. They override what
            the config says of them; the line ``plan`` of the summary and of ``check`` names each option.
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
            check_budget(memory_budget)
        self.memory_budget = memory_budget
        self.plan: Plan | None = None
        self._planned: Task | None = None
        self._overridden: list[str] = []
        self.init_from = init_from
        self._has_weights = init_from is None
        self.architecture = architecture
        given: dict[str, Any] = {"optimizer": optimizer, "schedule": schedule}
        # of a checkpoint
        self._recipes: dict[str, Any] = {name: part for name, part in given.items() if isinstance(part, dict)}
        self.make_optimizer = restored_optimizer(optimizer, AdamW)
        self.schedule = restored_schedule(schedule)
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
        trainer: Any = self._trainer
        data = getattr(trainer, "datamodule", None)
        if isinstance(data, TokenDataModule):
            refuse([*data_faults(self.architecture, data), *accumulation_faults(trainer.callbacks)])

    def keep_to_budget(self, data: TokenDataModule, trainer: Any) -> None:
        """Plan for ``memory_budget``, and set model and data accordingly. Data ask for it in their own ``setup``.

        Raises:
            ValueError: Nothing fits the budget, or the accounting does not cover the run.
        """
        if self.memory_budget is None:
            return
        task = task_of(self, data, trainer)
        if task != self._planned and not hasattr(self, "transformer"):  # a built model keeps its plan
            first = self.plan is None  # later, what is there is an earlier plan's
            self.plan, self._planned = plan_for(task, self.memory_budget), task
            self._overridden = overridden(self, data, self.plan) if first else self._overridden
            setting = self.plan.setting
            self.architecture, self.loss_chunks = configured(self.architecture, setting), setting.loss_chunks
            self._save_plain_hyperparameters()
        if self.plan is not None:
            data.micro_batch_size = self.plan.setting.rows

    @property
    def plan_summary(self) -> str:
        """The plan in one line, with the options that it overrides; empty without one."""
        overrides = f"; memory_budget overrides {', '.join(self._overridden)}" if self._overridden else ""
        return "" if self.plan is None else summary(self.plan, str(self.memory_budget)) + overrides

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
        if self.loss_chunks == 0 or not is_plain(head, torch.nn.Linear):  # an adapter on the head has to be called
            return F.cross_entropy(head(hidden).flatten(0, -2).float(), targets.flatten())
        chunks = self.loss_chunks and min(self.loss_chunks, targets.numel())  # the last batch of a text has fewer
        return linear_cross_entropy(hidden, head.weight, targets, bias=head.bias, num_chunks=chunks)

    def _sharded_transformer(self) -> Transformer:
        assert self.device_mesh is not None
        strategy = cast(ModelParallelStrategy, self.trainer.strategy)
        return build_for(strategy, self.architecture, self.device_mesh["data_parallel"], str(self.trainer.precision))

    def configure_callbacks(self) -> list[Callback]:
        """The training log, where the trainer has none: any trainer logs ``train_loss``, and each logs it once."""
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        is_logged = self.trainer.barebones or any(isinstance(callback, TrainingLog) for callback in callbacks)
        return [] if is_logged else [TrainingLog()]

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
        if self.trainer.barebones:  # logs nothing
            return
        # what Lightning logs is what validate() and test() return; within fit its count of steps is one behind
        is_fitting = self.trainer.state.fn == "fit"
        self.log_dict(metrics, logger=False if is_fitting else None)  # True would warn where there is no logger
        if is_fitting and not self.trainer.sanity_checking:
            for logger in self.loggers:
                logger.log_metrics(metrics, step=self.global_step)

    # -- optimisation -------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One optimiser over the parameter groups, and the schedule, stepped once per optimiser step."""
        optimizer = self.make_optimizer(cast(Iterable[torch.nn.Parameter], param_groups(self)))
        told: object = self.schedule
        if told is None or isinstance(told, Schedule):
            waits = is_waiting_for_data(self.trainer)
            scheduler: Any = LambdaLR(optimizer, _not_yet if waits else self._factor_of_step())
        else:
            told = scheduler = self.schedule(optimizer)
        self._recipes = {"optimizer": optimizer_recipe(optimizer), "schedule": schedule_recipe(told)}
        self._save_plain_hyperparameters()
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

    def on_train_start(self) -> None:
        """A schedule that had to wait for the user's own data loader: the length of the run is known now."""
        for config in self.trainer.lr_scheduler_configs:
            waiting = config.scheduler
            if isinstance(waiting, LambdaLR) and waiting.lr_lambdas[0] is _not_yet:
                position = waiting.last_epoch - 1  # making a scheduler takes its first step
                config.scheduler = LambdaLR(waiting.optimizer, self._factor_of_step(), position)

    def _factor_of_step(self) -> Callable[[int], float]:
        """The factor of the optimizer's learning rate at the step after a number of steps."""
        total, schedule = total_steps(self.trainer), self.schedule
        if schedule is None:
            warmup = DEFAULT_WARMUP if total is None else min(DEFAULT_WARMUP, total // 10)
            schedule = Constant(warmup_steps=warmup) if total is None else WarmupCosine(warmup_steps=warmup)
        # factor(0) is 0 where there is a warm-up: counting from 1, every update moves something
        return partial(_factor, cast(Schedule, schedule), None if total is None else max(1, total))

    def _seed_dropout(self) -> None:
        """Dropout as a function of the seed, the position and the process: a resumed run drops what it would have."""
        position = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        seed = int(getattr(getattr(self.trainer, "datamodule", None), "seed", 0))
        torch.manual_seed(hash((seed, position, self.global_rank)) % 2**63)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, trust_code: bool = False, **options: Any) -> Any:
        """The model of a checkpoint; no code of the file runs. Arguments are those of Lightning's, and of this class.

        Restored are the architecture, ``loss_chunks``, an optimizer of ``lightning_llm.optim`` or ``torch.optim`` and
        a schedule of the former with their settings, unless given. Others are not, with a warning.

        Raises:
            ValueError: The file is damaged, no checkpoint, or names code that is not ours without ``trust_code``.
        """
        with only_checkpoints(checkpoint_path, trust_code=trust_code):
            return super().load_from_checkpoint(checkpoint_path, *args, **{**options, "weights_only": True})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the tokenizer: a checkpoint alone is enough to generate text."""
        tokenizer = getattr(getattr(self._trainer, "datamodule", None), "tokenizer", None)
        content = None if tokenizer is None else tokenizer.to_str()
        own = {"format_version": FORMAT_VERSION, "tokenizer": content, EXECUTION: record(self.trainer)}
        checkpoint[FORMAT] = own

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another architecture, naming every field that differs, or of other weights."""
        is_fitting = self._trainer is not None and self.trainer.state.fn == "fit"
        is_own = is_fitting and type(self).configure_optimizers is LanguageModel.configure_optimizers
        check_loaded(checkpoint, self, param_groups(self) if is_own else ())
        self._has_weights = True
        if self._trainer is None:
            warn_without_recipe(checkpoint)
        if is_fitting:
            self._say_changes(checkpoint[FORMAT].get(EXECUTION, {}))
            rescale_batch_progress(checkpoint, self.trainer.accumulate_grad_batches)

    def _say_changes(self, saved: dict[str, Any]) -> None:
        if (lines := changes(saved, self.trainer)) and self.trainer.is_global_zero:
            print("Changed since the checkpoint, so that other bits follow:")
            print("\n".join(f"  {line}" for line in lines))

    def _save_plain_hyperparameters(self) -> None:
        # plain values only: a dataclass in a checkpoint could not be read back without running code
        self.save_hyperparameters(
            {"architecture": self.architecture.to_dict(), "loss_chunks": self.loss_chunks, **self._recipes},
            logger=False,
        )


def _not_yet(step: int) -> float:
    """Until the length of the run is known; no step is taken with it."""
    return 0.0


def _factor(schedule: Schedule, total_steps: int | None, step: int) -> float:
    return schedule.factor(step + 1, total_steps)
