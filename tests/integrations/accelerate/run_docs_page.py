"""Runs the snippets of docs/integrations/accelerate.md, in the folder that the argument names."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.integrations.accelerate.loops import Small, data
from tests.integrations.environments import report
from tests.integrations.page_snippets import run_page


class Model(nn.Module):
    """What the page calls `Model`: its forward takes a batch, and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Small()

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.inner(ids).flatten(0, 1), targets.flatten())


os.chdir(sys.argv[1])
dataset: TensorDataset = data()
report(run_page("docs/integrations/accelerate.md", {"Model": Model, "model": Model(), "dataset": dataset}))
