"""Parameters of awkward sizes, and a state that has been through a file."""

import io

import torch
from torch import nn

SHAPES = [(5,), (123, 77), (5, 123, 7), (), (1, 1), (64, 64)]


def start(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def reload(state_dict):
    """Through a file, as a checkpoint goes."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
