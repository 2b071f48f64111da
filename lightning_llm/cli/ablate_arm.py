"""An arm of an experiment, as ``fit``'s own parser and checks read it."""

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

from lightning_llm.ablate.arm import Arm
from lightning_llm.cli.errors import one_line
from lightning_llm.cli.train import cli_main


def read_arm(name: str, files: Sequence[str | Path], arguments: Sequence[str]) -> Arm:
    """An arm of a comparison, as ``fit`` reads it.

    Raises:
        ValueError: What ``lightning-llm check`` finds wrong with it.
    """
    errors, printed = io.StringIO(), io.StringIO()
    configs = [f"--config={file}" for file in files]
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(printed):
            cli = cli_main(["check", *configs, *arguments])
    except SystemExit as leaving:
        lines = errors.getvalue().strip().splitlines() or [one_line(leaving)]
        raise ValueError(f"{name}: {lines[-1].partition('error: ')[2] or lines[-1]}") from None
    options = cli.resolved
    if options.get("ckpt_path") is not None:
        raise ValueError(f"{name}: ckpt_path is set by the experiment: leave it out, or use model.init_from")
    for option in ("ckpt_path", "weights_only", "verbose"):
        options.pop(option, None)
    trainer = options["trainer"]
    trainer |= {"run_dir": None, "enable_progress_bar": False, "accelerator": cli.trainer.strategy.root_device.type}
    trainer["devices"] = 1 if trainer.get("devices") in (None, "auto", -1) else trainer["devices"]
    return Arm(name, options, cli.model, cli.datamodule, cli.trainer)
