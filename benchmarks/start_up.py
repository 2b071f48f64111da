"""How long ``fit`` takes from the command to the end of its first step, and what the time goes to.

    python -m benchmarks.start_up SECONDS WORD …

runs `lightning-llm WORD …` as begun at SECONDS (of ``time.time()``), notes when its parts begin and end, prints the
parts as JSON after the first step and leaves at once. ``imports`` is the time until model and data module are loaded,
the start of Python included; ``data`` that of preparing and opening the token store; ``model`` that of building the
transformer; ``rest`` is the parser's own imports, the parsing of the config, the Trainer, and the step itself, the
compiling of its blocks included where that is asked for.
"""

import functools
import json
import os
import random
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

COMMAND = "lightning_llm"
CONFIG = Path("configs/shakespeare-char.yaml")
BAR_S = 4.0
PARTS = ("imports", "data", "model", "rest")
TEXT_BYTES = 1_115_394  # as many as Tiny Shakespeare has
LETTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # its 65 characters


def measure(device: str, rounds: int, *, compiled: bool = False) -> Iterator[tuple[str, dict[str, float]]]:
    """Seconds of each part, the median over rounds: with the token store still to be made, and with it there.

    Args:
        device: Where it trains.
        rounds: How many starts of each kind.
        compiled: With compiled blocks. The first start then finds nothing in the compiler's cache, the second all.

    Raises:
        ValueError: The config is not below the current folder.
    """
    if not CONFIG.is_file():
        raise ValueError(f"shapes startup: {CONFIG} is not here; run it in the root of the repository")
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as folder:
        text = Path(folder, "text.txt")
        text.write_text("".join(random.Random(0).choices(LETTERS, k=TEXT_BYTES)), encoding="utf-8")
        first, again = [], []
        for turn in range(rounds):
            words = _words(text, Path(folder, f"store-{turn}"), folder, device)
            cache = {}
            if compiled:
                words.append("--model.compile_mode=default")
                cache["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, f"cache-{turn}"))
            first.append(_start(words, cache))
            again.append(_start(words, cache))
        names = ("compiled for the first time", "compiled before") if compiled else ("store to be made", "store there")
        for name, found in zip(names, (first, again), strict=True):
            yield name, {part: statistics.median(one[part] for one in found) for part in PARTS}


def _words(text: Path, store: Path, folder: str, device: str) -> list[str]:
    options = {"data.path": text, "data.store": store, "trainer.default_root_dir": folder}
    options |= {"trainer.accelerator": device}
    return ["fit", "--config", str(CONFIG), *(f"--{name}={value}" for name, value in options.items())]


def _start(words: list[str], environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-m", __name__, repr(time.time()), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        raise RuntimeError(f"fit did not start: {(done.stderr.strip().splitlines() or [last or 'no word'])[-1]}")
    found: dict[str, float] = json.loads(last)
    return found


def main(begun: float, words: list[str]) -> None:
    """Run the command until its first step is done."""
    # only now: loading them is what is timed
    import torch

    from lightning_llm.data import datamodule
    from lightning_llm.training.module import LanguageModel

    spent = {"imports": time.time() - begun, "data": 0.0, "model": 0.0}

    inside: list[str] = []  # the parts that are running: one within another counts once

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run_timed(*args: Any, **kwargs: Any) -> Any:
            start = time.time()
            inside.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                inside.pop()
                if not inside:
                    spent[part] += time.time() - start

        return run_timed

    def first_step_done(self: LanguageModel, *args: Any, **kwargs: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        print(
            "\n" + json.dumps({**spent, "rest": time.time() - begun - sum(spent.values())}, allow_nan=False), flush=True
        )
        os._exit(0)  # the other steps are not asked for

    for owner, name, part in (
        (datamodule, "find_or_prepare", "data"),  # the first who asks for the vocabulary may cause it
        (datamodule.TokenDataModule, "prepare_data", "data"),
        (datamodule.TokenDataModule, "setup", "data"),
        (datamodule.TokenDataModule, "train_dataloader", "data"),
        (LanguageModel, "configure_model", "model"),
    ):
        setattr(owner, name, timed(part, getattr(owner, name)))
    LanguageModel.on_train_batch_end = first_step_done  # type: ignore[assignment]
    sys.argv = [COMMAND, *words]
    runpy.run_module(COMMAND, run_name="__main__")  # as the shell starts it; leaves by itself


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
