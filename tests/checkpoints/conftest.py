"""A model that has taken some steps, and an object that runs code where it is unpickled."""

import os

import torch

from lightning_llm.optim import AdamW


def trained():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()


class Code:
    """Makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))
