"""The digest of a checkpoint sees every bit of weights and optimizer state."""

from pathlib import Path

import torch

from benchmarks.digest import digest
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.runs.directory import step_files

RUN = Path("runs/run/version_0")


def test_the_digest_sees_every_bit(finished):
    path = step_files(RUN / "checkpoints")[-1]
    content, whole = read_checkpoint(path), digest(path)
    weight, state = content["state_dict"]["transformer.norm.weight"], content["optimizer_states"][0]["state"]
    for tensor in (weight, state[0]["exp_avg"]):
        flat = tensor.view(-1)
        flat[-1] = torch.nextafter(flat[-1], torch.tensor(torch.inf))
        torch.save(content, "changed.ckpt")
        assert digest("changed.ckpt") != whole
        flat[-1] = torch.nextafter(flat[-1], torch.tensor(-torch.inf))
    torch.save(content, "changed.ckpt")
    assert digest("changed.ckpt") == whole
