"""Runs the snippets of docs/integrations/lightning.md, in the folder that the argument names."""

from __future__ import annotations

import os
import sys

import torch

import zeroengine
from tests.integrations.environments import report
from tests.integrations.lightning.lightning_models import Net, Regression, loader
from tests.integrations.page_snippets import run_page

os.chdir(sys.argv[1])
names = {"module": Regression(), "Model": Net, "train_loader": loader(), "val_loader": loader(4)}
report(run_page("docs/integrations/lightning.md", {**names, "torch": torch, "zeroengine": zeroengine}))
