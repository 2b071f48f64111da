"""What a run chose for its ``memory_budget``, where the run's record is: ``plan.json`` and ``config.yaml``."""

from typing import Any

from lightning_llm.accounting.plan_report import chosen_options, described
from lightning_llm.io.atomic import write_json
from lightning_llm.training.callbacks.consistency import ResumeDiff

PLAN = "plan.json"


def record_plan(config: Any, trainer: Any, model: Any) -> None:
    """Write the plan into the run directory, and into the options that are saved and compared.

    Args:
        config: The options that become ``config.yaml``; changed in place. The budget stays among them: a run that goes
            on plans again, to the same result.
        trainer: Lightning's, whose ``ResumeDiff`` compares options with a checkpoint's.
        model: The LanguageModel with its plan.
    """
    chosen = chosen_options(model.plan)
    for name, value in chosen.items():
        config[name] = value
    for callback in trainer.callbacks:
        if isinstance(callback, ResumeDiff):
            callback.options.update(chosen)
    run = trainer.run_dir  # a broadcast: every process must ask
    if trainer.is_global_zero and run is not None:
        write_json(run / PLAN, {"memory_budget": model.memory_budget, **described(model.plan)})
