"""A comparison of all ranks before the first step: a run stops if they do not run the same.

A host with yesterday's checkout, another config or another text would train: gradients of the same shapes are summed
whatever they mean. So all ranks exchange what they run.
"""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_llm.runs.code import package_digest
from lightning_llm.runs.options import flat
from lightning_llm.training.distributed import host_group

SHOWN = 3  # differences of a rank; one wrong config file makes dozens
Facts = dict[str, Any]


class RankConsistencyCheck(Callback):
    """Compares options, data, code and versions of all ranks with those of rank 0.

    Args:
        options: Of this run, nested, plain values only.
        checkpoint: The file that the run resumes from.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, checkpoint: Path | None = None) -> None:
        self.options = flat(options or {})
        self.checkpoint = checkpoint

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Compare, on every rank at once.

        Raises:
            ValueError: On all ranks, with the ranks that differ from rank 0 and their differences.
        """
        if (group := host_group(trainer.strategy)) is not None:
            differences = differences_of(gather(self.facts(getattr(trainer, "datamodule", None)), group))
            if differences:
                raise ValueError(f"the processes differ: {'; '.join(differences)}")

    def facts(self, data: Any) -> Facts:
        """Facts about what this rank runs, by name."""
        return {
            **{f"option {name}": value for name, value in self.options.items()},
            "data": data.state_dict().get("store") if hasattr(data, "state_dict") else None,
            "checkpoint": None if self.checkpoint is None else self.checkpoint.name,
            "code of lightning_llm": package_digest(),
            "version of torch": torch.__version__,
            "version of lightning": lightning.__version__,
            "host": socket.gethostname(),
        }


def differences_of(all_facts: list[Facts]) -> list[str]:
    """One line per rank that differs from rank 0, with at most three differences and the number of others."""
    first, *others = all_facts
    lines = []
    for rank, facts in enumerate(others, start=1):
        pairs = [(name, facts.get(name), first.get(name)) for name in sorted((first.keys() | facts.keys()) - {"host"})]
        found = [f"{name} is {there} there and {zero} in process 0" for name, there, zero in pairs if there != zero]
        if found:
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            lines.append(f"process {rank} on {facts.get('host')}: {', '.join(found[:SHOWN])}{more}")
    return lines


def gather(facts: Facts, group: Any) -> list[Facts]:
    """The facts of all ranks, in order. As JSON, since torch's own way to gather objects unpickles them."""
    content = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(content)]), group=group)
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
    padded[: len(content)] = content
    contents = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(contents, padded, group=group)
    return [json.loads(bytes(padded[: int(size)].tolist())) for padded, size in zip(contents, sizes, strict=True)]
