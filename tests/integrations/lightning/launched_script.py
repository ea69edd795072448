"""Fit under the launcher that started this, or under Lightning's own; rank 0 prints what it found."""

from __future__ import annotations

import json
import sys

from tests.integrations.lightning.lightning_models import Regression, loader, trainer
from zeroengine.integrations import lightning as _registered  # noqa: F401

module = Regression()
run = trainer(sys.argv[1], max_epochs=1)
run.fit(module, loader())
if run.is_global_zero:
    print("FOUND", json.dumps({"world size": run.world_size, "losses": module.losses}))
