"""Goes on, on another number of ranks, from what features_script.py saved last. Run by the tests."""

from __future__ import annotations

import sys
from pathlib import Path

from accelerate.utils import ProjectConfiguration

from tests.integrations.accelerate.features_script import Counter, on_engine
from tests.integrations.accelerate.loops import data, loss_of, prepared, train
from tests.integrations.environments import report

project = ProjectConfiguration(project_dir=str(Path(sys.argv[1], "project")), automatic_checkpoint_naming=True)
accelerator = on_engine(2, project_config=project)
objects = model, *_ = prepared(accelerator)
counter = Counter()
accelerator.register_for_checkpointing(counter)
accelerator.load_state()
loss = loss_of(model, data()[:4]).item()
losses = train(accelerator, objects, range(1))
accelerator.end_training()
report({"loss": loss, "count": counter.count, "step": accelerator.step, "last": losses[-2]})
