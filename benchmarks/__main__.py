"""``python -m benchmarks NAME``: measure what the documentation claims, with the options of ``lightning-llm bench``."""

import sys
from collections.abc import Sequence

from lightning_llm import __main__ as command
from lightning_llm.cli import bench

PROGRAM = "python -m benchmarks"
BENCHES = {
    "runs": "the shipped configs, trained as their users train them (options of fit may follow behind --)",
    "baselines": "whole training steps, compared with transformers, litgpt and plain torch",
    "techniques": "the techniques of a fast training step, added one at a time",
    "overhead": "time of a training step outside forward, backward, clipping and optimizer",
    "cost": "how time and memory of a step grow with each size, and the time to the first step of fit",
    "memory-scaling": "peak memory of the MLP against the number of tokens",
    "process-scaling": "tokens per second on 1 to N processes, and a prediction for 8 and 64",
    "checkpoint": "how long saving holds up training: waiting for the disk, and in the background",
    "optimizer": "milliseconds per step of each optimizer, ours and torch's",
    "ablate": "whether verdicts, tuning and workers keep their promises (--shapes, --seed of the kills)",
    "stream": "which ideas of a stream the rule adopts: useless ones, and true ones (--shapes)",
    "mup": "whether a learning rate fits wider models, with mup and without (--shapes, --text FILE)",
    "ladder": "whether --size carries learning rates from one size to another (--shapes transfer)",
    "initial-values": "how far the losses of two models differ by chance, with initial values by name and without",
    "data": "speed and memory of prepare, for each tokenizer",
    "faults": "random kills, full disks, damaged files and so on, and their cost (--rounds: total, --seed)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit status, as ``lightning-llm`` does."""
    return command.main(argv, lambda words: bench.run_bench(words, PROGRAM, BENCHES, "benchmarks"), PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
