"""Processes that differ are refused before the first step, with a line that says which one and in what.

A host with yesterday's checkout, another config or another text would train: gradients of the same shapes are summed
whatever they mean. So all processes show each other what they run.
"""

import hashlib
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_llm.training.groups import host_group
from lightning_llm.training.run_options import flat

PACKAGE = Path(__file__).resolve().parents[2]
SHOWN = 3  # differences of a process; one wrong config file makes dozens
Facts = dict[str, Any]


class RankConsistencyCheck(Callback):
    """Compares options, data, code and versions of all processes with those of the first.

    Args:
        options: Of this run, nested, plain values only.
        checkpoint: The file that the run goes on from.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, checkpoint: Path | None = None) -> None:
        self.options, self.checkpoint = flat(options or {}), checkpoint

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Compare, in every process at once.

        Raises:
            ValueError: In all processes, naming those that differ from the first and in what.
        """
        group = host_group(trainer)
        if group is not None:
            differences = differences_of(gather(self.facts(getattr(trainer, "datamodule", None)), group))
            dist.destroy_process_group(group)
            if differences:
                raise ValueError(f"the processes do not run the same: {'; '.join(differences)}")

    def facts(self, data: Any) -> Facts:
        """What this process runs, by name."""
        facts: Facts = {f"option {name}": value for name, value in self.options.items()}
        facts["data"] = data.state_dict()["store"] if hasattr(data, "state_dict") else None
        facts["checkpoint"] = None if self.checkpoint is None else self.checkpoint.name
        facts["code of lightning_llm"] = code_digest()
        facts["version of torch"] = torch.__version__
        facts["version of lightning"] = lightning.__version__
        facts["host"] = socket.gethostname()
        return facts


def differences_of(all_facts: list[Facts]) -> list[str]:
    """A line for each process that differs from the first, with at most three differences and how many more."""
    first, *others = all_facts
    lines = []
    for rank, facts in enumerate(others, start=1):
        names = [name for name in sorted(first.keys() | facts.keys()) if first.get(name) != facts.get(name)]
        names = [name for name in names if name != "host"]
        if names:
            shown = [f"{name} is {facts.get(name)} there and {first.get(name)} in process 0" for name in names[:SHOWN]]
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"process {rank} on {facts.get('host')}: {', '.join(shown)}{more}")
    return lines


def gather(facts: Facts, group: Any) -> list[Facts]:
    """The facts of all processes, in their order. As JSON: torch's own way to gather objects unpickles them."""
    own = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
    padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=group)
    return [json.loads(bytes(one[: int(size)].tolist())) for one, size in zip(found, sizes, strict=True)]


def code_digest() -> str:
    """12 hex digits of the package's source."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
