"""How many runs an hour takes: the part ``throughput`` of ``python -m benchmarks ablate``.

For each size an experiment of 13 runs of 100 steps, with one worker and with two, and the same ``fit`` in a loop of the
shell, one run after another, as a user starts it. ``share`` is the part of a run's CPU time between the first step and
the last, with the validations; ``matmuls_s`` is what the matmuls of its steps take alone, on one thread.
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.ablate_experiments import Experiment, workplace
from benchmarks.commands import finish
from benchmarks.cpu_clock import CPU
from benchmarks.harness import Request
from benchmarks.matmuls import matmuls_alone
from benchmarks.rows import Row
from benchmarks.workloads import model_config
from lightning_llm.ablate.plan import RUNS
from lightning_llm.measure.timer import interleave
from lightning_llm.model.transformer import Transformer
from lightning_llm.training.environment import choose_precision

SHAPES = {"25k": (32, 2), "50k": (32, 4), "100k": (64, 2), "200k": (64, 4)}  # width and layers
WORKERS, LOOP = {"one worker": "1", "two workers": "2"}, "loop of fit"
STEPS, ROWS, CONTEXT, HEADS, PAIRS = 100, 8, 64, 2, 4
LEAST_SPEEDUP, MOST_RATIO = 4.0, 0.8  # two workers against the loop, at the smallest size; and against one worker
CLOCK = {"trainer.callbacks": ["benchmarks.cpu_clock.CpuClock"]}


def throughput(request: Request) -> Iterator[Row]:
    """The rows of all sizes."""
    for name, (width, layers) in SHAPES.items():
        architecture = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": HEADS}
        steps = {"trainer.max_steps": STEPS, "trainer.val_check_interval": STEPS, "data.context_length": CONTEXT}
        options = {**{f"model.architecture.{key}": value for key, value in architecture.items()}, **steps}
        content = {"options": {**options, **CLOCK}, "variants": {"ln": {"model.architecture.norm": "layernorm"}}}
        with workplace() as folder:
            Experiment(folder, name, {**content, "looks": [PAIRS]})
            ways = {way: partial(_experiment, folder, name, workers) for way, workers in WORKERS.items()}
            timings = request.interleaved({**ways, LOOP: partial(_loop, folder, options)})
        matmuls_s = STEPS * _matmuls(width, layers)
        middle = {way: statistics.median(each["run_s"] for each in rounds) for way, rounds in timings.items()}
        for way, rounds in timings.items():
            facts = {field: statistics.median(each[field] for each in rounds) for field in rounds[0]}
            facts |= {"runs_per_hour": 3600 / middle[way], "speedup": middle[LOOP] / middle[way]}
            problems = []
            if way == "two workers" and name == "25k" and facts["speedup"] < LEAST_SPEEDUP:
                problems.append(f"{name}: {way} do {facts['speedup']:.1f} times the runs of a loop")
            if way == "two workers" and middle[way] > MOST_RATIO * middle["one worker"]:
                problems.append(f"{name}: {way} take {middle[way] / middle['one worker']:.2f} of the time of one")
            seconds = [each["run_s"] for each in rounds]
            yield request.row(f"{name}, {way}", seconds, **facts, matmuls_s=matmuls_s, problems=problems)


def _experiment(folder: Path, name: str, workers: str) -> dict[str, float]:
    """Seconds of a run, from the frozen plan to the end of the last run, and of the whole command."""
    one = Experiment(folder, name, out=f"{name}-{len(list(folder.glob('runs/*')))}")
    times, clocks = one.seconds("--workers", workers), sorted((one.out / RUNS).glob(f"*/{CPU}"))
    spent = [json.loads(path.read_text(encoding="utf-8")) for path in clocks]
    times["run_s"] = times.pop("runs_s") / len(spent)
    times["share"] = sum(each["training"] for each in spent) / sum(each["total"] for each in spent)
    return {**times, "first_step_s": statistics.median(each["first_step"] for each in spent)}


def _loop(folder: Path, options: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a run that is started by itself."""
    out = folder / f"loop-{len(list(folder.glob('loop-*')))}"
    words = [f"--{option}={value}" for option, value in options.items()]
    command = ["lightning_llm", "fit", "--config=base.yaml", *words, f"--trainer.run_dir={out}"]
    return {"run_s": finish(*command, folder=folder)[1]}


def _matmuls(width: int, layers: int) -> float:
    """Seconds of the matmuls of a step."""
    sizes = {"rows": ROWS, "context": CONTEXT, "vocab": 64, "hidden": width, "heads": HEADS, "layers": layers}
    dtype = torch.bfloat16 if choose_precision("cpu")[0] == "bf16-mixed" else torch.float32
    model, before = Transformer(model_config(sizes)), torch.get_num_threads()
    torch.set_num_threads(1)
    timing = interleave({"": matmuls_alone(model, sizes, dtype, cuts_head=False)}, rounds=200, warmup=20)
    torch.set_num_threads(before)
    return timing[""].median
