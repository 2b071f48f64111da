"""Processes that Lightning forks or spawns from this one, as in notebooks: what they have trained comes back.

The model is made in the processes. Lightning sends its weights back to the first, whose model has no transformer yet.
"""

from typing import Any

from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from lightning_llm.training.module import LanguageModel

ARCHITECTURE, LOOPS = "architecture", "loops"


class ReturningLauncher(_MultiProcessingLauncher):
    """Launcher like Lightning's; model and trainer in the first process are as after a run in this process alone."""

    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        """Results for the first process besides weights: the architecture, and how far the run got."""
        extra: dict[str, Any] = {**super().get_extra_results(trainer), LOOPS: trainer.fit_loop.state_dict()}
        if isinstance(trainer.lightning_module, LanguageModel):
            extra[ARCHITECTURE] = trainer.lightning_module.architecture.to_dict()
        return extra

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        architecture = worker_output.extra.get(ARCHITECTURE)
        if architecture is not None:
            trainer.lightning_module.configure_as(architecture)
        super()._recover_results_in_main_process(worker_output, trainer)
        trainer.fit_loop.load_state_dict(worker_output.extra[LOOPS])


def bring_results_back(strategy: Any) -> None:
    """Let the processes of a strategy send back what they have trained, if this process forks or spawns them."""
    if starts_inside(strategy):
        strategy._launcher = ReturningLauncher(strategy, strategy.launcher._start_method)


def starts_inside(strategy: Any) -> bool:
    """Whether a strategy forks or spawns its processes from this one, instead of starting the command again."""
    return isinstance(strategy.launcher, _MultiProcessingLauncher)
