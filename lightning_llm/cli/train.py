"""The commands that train and evaluate (``fit``, ``check``, ``validate``, ``test``, ``predict``), by LightningCLI.

Differences from a plain LightningCLI: a user's mistake is one line; ``--ckpt_path`` never overrides the command line
and the configs (Lightning's would silently build the model from the checkpoint); ``last`` without a checkpoint is an
error; a resumed run stays in its own run directory.

``cli_main`` runs a command and turns every error into one line and an exit status. It makes a ``TrainingCLI``, whose
methods run in this order: parse_arguments, before_instantiate_classes, instantiate_classes, instantiate_trainer,
before_fit, (the Trainer's ``fit``), after_fit.
"""

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from jsonargparse import set_parsing_settings
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from lightning_llm.accounting.plan_report import chosen_options, described
from lightning_llm.accounting.sizing import SIZE_OPTIONS
from lightning_llm.checkpoints.reading import read_outline
from lightning_llm.checkpoints.schema import EXECUTION, LIGHTNING
from lightning_llm.cli import (
    command_line,
    custom_classes,
    early_checks,
    exit_status,
    help_text,
    jobs,
    parsing,
    part_options,
    size,
)
from lightning_llm.cli.commands import help_of
from lightning_llm.cli.errors import USER_ERROR
from lightning_llm.cli.exit_status import rank_zero_print
from lightning_llm.cli.interrupts import interrupts
from lightning_llm.cli.training_output import TrainingSummary, print_checks
from lightning_llm.data.datamodule import TokenDataModule, tokenizer_of
from lightning_llm.io.atomic import write_json, write_text
from lightning_llm.io.options import raise_all
from lightning_llm.io.trust import CLASS_PATH, TRUST_CODE, path_of
from lightning_llm.io.untrusted import prefixed
from lightning_llm.runs.directory import CONFIG, JOB, MEMORY_PLAN
from lightning_llm.runs.find import check_resumable, find_checkpoint, run_of, step_in
from lightning_llm.training.callbacks.dashboard import RunLogger
from lightning_llm.training.callbacks.progress import StatusFile
from lightning_llm.training.callbacks.rank_consistency import RankConsistencyCheck
from lightning_llm.training.callbacks.resume_diff import ResumeDiff
from lightning_llm.training.callbacks.summary_file import callback_of
from lightning_llm.training.checkpoint_io import refuse_code
from lightning_llm.training.distributed import leave_groups
from lightning_llm.training.environment import choose_precision, keep_freed_memory
from lightning_llm.training.initial_weights import check_trust
from lightning_llm.training.launcher import starts_inside
from lightning_llm.training.module import LanguageModel
from lightning_llm.training.preflight import PLAIN_MODULE, TOKEN_ORDER
from lightning_llm.training.quiet import quieten
from lightning_llm.training.trainer import Trainer

_PARSERS: dict[tuple[str, ...], dict[str, Any]] = {}  # by commands: making one takes a third of a ``check``
ENDED_TOGETHER = (0, 129, 130, 143)  # all processes at the same step: none waits for another any more


# Lightning turns it on: a config at an address would be fetched from the network
set_parsing_settings(config_read_mode_fsspec_enabled=False)


class SaveConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run directory: a config that starts a new run of the same kind."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """For ``fit`` only: an evaluation changes no record. Lightning would write to the logger's folder."""
        if stage != "fit":
            return
        self.config["ckpt_path"] = self.config["trainer.run_dir"] = None
        run = trainer.run_dir  # a broadcast: every process must ask
        plan = getattr(pl_module, "plan", None)
        if plan is not None:  # the memory budget stays in the config: a resumed run plans again, to the same result
            chosen = chosen_options(plan)
            for name, value in chosen.items():
                self.config[name] = value
            if resume_diff := callback_of(trainer, ResumeDiff):
                resume_diff.options.update(chosen)
        if not trainer.is_global_zero or run is None:
            return
        if plan is not None:
            write_json(run / MEMORY_PLAN, {"memory_budget": pl_module.budget.size, **described(plan)})
        write_text(run / CONFIG, self.parser.dump(self.config, skip_none=False))
        if (job := jobs.this_job()) is not None:
            write_text(run / JOB, f"{job}\n")


class TrainingCLI(LightningCLI):
    """The commands that the Trainer runs."""

    checkpoint: Path | None = None

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, and ``check``; with the arguments of each that are not options."""
        return {**LightningCLI.subcommands(), "check": {"model", "datamodule"}}

    def setup_parser(self, *args: Any) -> None:
        """Make the parser of the default classes once in a process: an experiment reads all of its arms with it."""
        parts = ("parser", "_subcommand_parsers", "_subcommand_method_arguments")
        if any(map(custom_classes.is_custom_class, self.classes.values())):
            super().setup_parser(*args)
            return
        commands = tuple(self.subcommands())
        if commands not in _PARSERS:
            super().setup_parser(*args)
            _PARSERS[commands] = {part: getattr(self, part) for part in parts}
        vars(self).update(_PARSERS[commands])

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Options that belong to neither model nor data nor trainer."""
        text = "On Linux with glibc: keep freed memory in the process instead of returning it to the system. "
        text += "The process stays at its largest size. On two CPU cores, this changed the speed of a training step by "
        text += "+1.5 percent in bf16 and by -6 percent in float32 (November 2026)."
        parser.add_argument("--keep_freed_memory", type=bool, default=True, help=text)
        size.add_options(parser)
        for section, cls in self.classes.items():
            custom_classes.add_option(parser, section, cls)

    @property
    def classes(self) -> dict[str, Any]:
        """The classes of model and data, by section."""
        return {"model": self.model_class, "data": self.datamodule_class}

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, and take ``ckpt_path`` aside: with it Lightning would let the checkpoint override the options."""
        self._trusts_code = TRUST_CODE in args  # on the command line only: a config could grant it to itself
        words = [word for word in args if word != TRUST_CODE]
        for word in {"validate", "test"} & self.subcommands().keys():  # our report prints the metrics
            self._parser(word).set_defaults(verbose=False)
        command = words[0] if words and words[0] in self.subcommands() else "fit"
        hidden = custom_classes.hide_options_of_ours(self._parser(command), words, self.classes["data"])
        self.experiment = command_line.experiment_name(words)
        self._words = words
        if {"-h", "--help"} & set(words):
            help_text.improve(self._parser(command))
        try:
            words, self.sizing = size.with_sizing(words, parser, self._parser(command), rank_zero_print)
            self.config = parsing.parse(parser, words)
        except argparse.ArgumentError as error:
            options = self._parser(command).get_defaults().keys()
            raise argparse.ArgumentError(None, command_line.with_nearest(str(error), options)) from error
        self._options = self.config[self.config.subcommand]
        for name in SIZE_OPTIONS:
            self._options.pop(name, None)
        custom_classes.check_parsed(self._options, words, self.classes)
        self._ckpt_path = self._options.pop("ckpt_path", None)
        if left_out := [name for name in hidden if self._options.pop(name, self) is not self]:
            name = path_of(self.classes["data"])
            rank_zero_print(f"lightning-llm {command}: {name} lacks {', '.join(left_out)}: left out")

    def before_instantiate_classes(self) -> None:
        """Check the job and the options, find the checkpoint, and choose what they leave open."""
        jobs.check_restarts()
        jobs.check_address()
        options = self._options.trainer
        if line := command_line.set_length(options, self._words):
            rank_zero_print(f"lightning-llm {self.subcommand}: {line}")
        refuse_code(self._options.get("weights_only"))
        if issubclass(self.classes["data"], TokenDataModule):
            command_line.check_store(self._options.data, self._words)
        elif self.subcommand == "predict":
            raise ValueError("predict continues the predict_prompts of TokenDataModule: use lightning-llm generate")
        self._find_checkpoint(command_line.folder_of_runs(options, self.experiment))
        self._check_init_from()
        saved = self._checked_execution()
        # what `auto` means goes into the config, so that its record, the checkpoints and all ranks have the same
        self.precision_reason = "as asked for"
        if options.precision in ("auto", None):
            of_checkpoint = (saved["precision"], "as in the checkpoint") if "precision" in saved else None
            options.precision, self.precision_reason = of_checkpoint or choose_precision(options.accelerator)
        if self._options.keep_freed_memory:
            keep_freed_memory()

    def _find_checkpoint(self, folder: Path) -> None:
        """The one that was asked for, or that of an earlier attempt of the job; Lightning gets its path."""
        if self._ckpt_path is not None:
            self.checkpoint = find_checkpoint(self._ckpt_path, folder, rank_zero_print)
        elif self.subcommand == "fit":
            self.checkpoint = jobs.checkpoint_of_earlier_attempt(folder, rank_zero_print)
        else:
            early_checks.check_trained(str(self.subcommand))
        self._options["ckpt_path"] = None if self.checkpoint is None else str(self.checkpoint)

    def _checked_execution(self) -> dict[str, Any]:
        """Device and precision in the checkpoint that ``fit`` resumes, before data are prepared."""
        if self.checkpoint is None:
            return {}
        if self.subcommand not in ("fit", "check"):
            read_outline(self.checkpoint, LIGHTNING)
            return {}
        is_described = not any(map(custom_classes.is_custom_class, self.classes.values()))
        is_plain = not issubclass(self.classes["model"], LanguageModel)
        of_model = {"is_described": is_described, "is_plain": is_plain}
        return dict(check_resumable(self.checkpoint, **of_model).get(EXECUTION, {}))

    def _check_init_from(self) -> None:
        """Refuse code in the source of the initial weights, which a resumed run does not read."""
        is_read = self.subcommand in ("fit", "check") and self.checkpoint is None
        if is_read and self._options.model.get("init_from") is not None and not self._trusts_code:
            check_trust(self._options.model.init_from)

    def instantiate_classes(self) -> None:
        """Model, data and trainer; the seed of ``seed_everything`` is that of the initial weights too."""
        config = self.config.clone()
        for section in self.classes:  # it has chosen the class, whose constructor does not take it
            config.pop(f"{self.subcommand}.{section}.{CLASS_PATH}")
        custom_classes.check_architecture(config.get(f"{self.subcommand}.model.architecture", {}))
        with custom_classes.constructor_error_context(*self.classes.values()), custom_classes.option_error_context():
            self.config_init = self.parser.instantiate_classes(config)
        self.datamodule, self.model = (self._get(self.config_init, name) for name in ("data", "model"))
        self.trainer = self.instantiate_trainer()
        seed = self._get(self.config, "seed_everything")
        self.model.seed = None if seed is False else seed

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer, with its run directory: a new one, or that of the run to resume."""
        options = self._get(self.config_init, "trainer")
        if options.get("logger") in (None, True) and self.subcommand != "fit":
            kwargs["logger"] = False
        # a TypeError is Lightning's answer to devices "many"
        with prefixed(f"trainer.devices {options.get('devices')!r} or another trainer option", TypeError):
            trainer: Trainer = super().instantiate_trainer(**kwargs)  # type: ignore[assignment]
        if starts_inside(trainer.strategy):
            raise ValueError(
                f"trainer.strategy {options.get('strategy')} forks or spawns processes, which no command does: "
                "use ddp; in a notebook, start the command with !, or call Trainer.fit"
            )
        trainer.precision_reason = self.precision_reason
        trainer.sizing = self.sizing
        own = [RankConsistencyCheck(self.resolved, self.checkpoint), ResumeDiff(self.resolved), StatusFile()]
        trainer.callbacks[:0] = own  # type: ignore[attr-defined]
        if trainer.run_directory.experiment is None:
            trainer.run_directory.experiment = self.experiment
        if self.checkpoint and self.subcommand == "fit" and (run := run_of(self.checkpoint)):
            trainer.run_directory.take(run)
            for logger in trainer.loggers:
                if isinstance(logger, RunLogger):
                    logger.resume_after(step_in(self.checkpoint))
        return trainer

    def before_fit(self) -> None:
        """Run the pre-flight checks in one process, as preparing the data does; lock the run until the report."""
        trainer: Any = self.trainer
        if trainer.is_global_zero:
            checks = trainer.preflight(self.model, self.datamodule)
            raise_all(check.problem for check in checks if check.problem)
            for line in (check.finding for check in checks if check.name in (TOKEN_ORDER, PLAIN_MODULE)):
                rank_zero_print(f"lightning-llm fit: {line}")
        if trainer.num_nodes > 1 and trainer.local_rank == 0:
            print(jobs.waiting_line(trainer), file=sys.stderr)
        trainer.open_run()

    def after_fit(self) -> None:
        """Make sure that the last step was validated, then report."""
        try:
            callback_of(self.trainer, TrainingSummary).finish(self.trainer, self.model, self.datamodule)
        finally:
            self.trainer.run_directory.close()  # type: ignore[attr-defined]

    def after_check(self) -> None:
        print_checks(self.trainer.checks)  # type: ignore[attr-defined]

    def after_validate(self) -> None:
        callback_of(self.trainer, TrainingSummary).print_metrics(self.trainer)

    after_test = after_validate

    def after_predict(self) -> None:
        """Print a JSON line for each prompt."""
        decode = self.datamodule.tokenizer.decode
        own = tokenizer_of(self.datamodule)
        for prompt, ids in zip(self.datamodule.predict_prompts, self.trainer.predict_loop.predictions, strict=True):
            numbers = ids[0].tolist()
            text = decode(numbers if own is None else own.without_begin_of(numbers))
            print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False, allow_nan=False))

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """All options, as plain values; asked for when they are complete."""
        return dict(json.loads(self._parser(self.subcommand).dump(self._options, format="json")))


def cli_main(
    args: Sequence[str] | None = None,
    *,
    model_class: type[LightningModule] | None = None,
    data_class: type[LightningDataModule] | None = None,
) -> TrainingCLI:
    """Run ``fit``, ``check``, ``validate``, ``test`` or ``predict``: the same entry for shell, tests and notebooks.

    Args:
        args: The command and its options, such as ``["fit", "--config", "configs/quickstart.yaml"]``; ``None`` takes
            them from the shell.
        model_class: Any LightningModule, as by ``--model.class_path``, which overrides it.
        data_class: Any LightningDataModule, as by ``--data.class_path``.

    Returns:
        The command line object, with ``trainer``, ``model`` and ``datamodule`` as they are after the run.

    Raises:
        SystemExit: With status 2 after one line on stderr for a user's mistake or a failure of the system, 1 if the
            loss is NaN or infinite, memory has run out or another process is lost, 129, 130 or 143 after SIGHUP, Ctrl-C
            or SIGTERM.
    """
    quieten()
    threading.excepthook = exit_status.report_thread_error
    words = list(sys.argv[1:] if args is None else args)
    command = words[0] if words else "fit"
    with interrupts.handling(command):
        try:
            return _run_command(command, words, {"model": model_class, "data": data_class})
        except (KeyboardInterrupt, SystemExit) as leaving:  # Lightning makes the one the other, of status 1
            if not isinstance(leaving, KeyboardInterrupt) and not interrupts.number:
                raise
            interrupts.ignore_signals()
            raise _LeftTheOthers(interrupts.print_interruption(interrupts.number or signal.SIGINT)) from None


def run(words: Sequence[str]) -> int:
    """Run :func:`cli_main` for the shell: returns the exit status."""
    status = 0
    try:
        cli_main(words)
    except _LeftTheOthers as leaving:
        status = int(leaving.code or 0)
        if interrupts.is_own_process and dist.is_initialized():  # to end the groups could wait for the others
            os._exit(status)
        return status
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else USER_ERROR
    if status in ENDED_TOGETHER:
        leave_groups()
    return status


class _LeftTheOthers(SystemExit):
    """This process ends wherever it was; others may be waiting for it."""


def _run_command(command: str, words: list[str], python_classes: dict[str, type | None]) -> TrainingCLI:
    try:
        complete = part_options.with_whole_parts(command_line.complete(words))
        for line in parsing.check_configs(complete):  # before anything imports what they name
            rank_zero_print(f"lightning-llm {command}: {line}")
        classes: dict[str, Any] = custom_classes.choose(complete, python_classes)
        cli_class = _of_one(command)
        with custom_classes.callback_error_context():
            return cli_class(
                classes["model"],
                classes["data"],
                save_config_callback=SaveConfig,
                save_config_kwargs={"overwrite": True},
                trainer_class=Trainer,
                trainer_defaults={"callbacks": [TrainingSummary()]},
                seed_everything_default=1337,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
                parser_kwargs={
                    "exit_on_error": False,
                    "parser_mode": parsing.STRICT_YAML,
                    **{word: help_of(word) for word in cli_class.subcommands()},
                },
                args=complete,
            )
    except Exception as error:
        status = exit_status.exit_status_of(error, command, words)
        if status is None:
            raise
        raise SystemExit(status) from None


def _of_one(command: str) -> type[TrainingCLI]:
    """The command line of one command: the options of all five take 0.25 s to define, those of one 0.06 s."""
    offered = TrainingCLI.subcommands()
    only = {command: offered[command]} if command in offered else offered
    return type("OfOneCommand", (TrainingCLI,), {"subcommands": staticmethod(lambda: only)})
