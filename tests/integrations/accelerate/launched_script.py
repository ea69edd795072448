"""Trains on the ranks that a launcher started, with the configuration of the first argument. Run by the tests."""

from __future__ import annotations

import sys

from tests.integrations.accelerate.loops import STEPS, prepared, train
from tests.integrations.environments import report
from zeroengine import engine_of
from zeroengine.integrations.accelerate import ZeroAccelerator

accelerator = ZeroAccelerator(zero_config=sys.argv[1] if len(sys.argv) > 1 else None, gradient_accumulation_steps=STEPS)
objects = model, *_ = prepared(accelerator)
engine = engine_of(model)
assert engine is not None
stage = engine.config.zero_optimization.stage
losses = train(accelerator, objects, range(1))
accelerator.end_training()
report({"ranks": accelerator.num_processes, "stage": stage, "losses": losses})
