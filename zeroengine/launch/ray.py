"""Ray: Ray Train starts the ranks as actors of a Ray cluster and makes their process group."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from zeroengine.errors import LaunchError


def run(words: Sequence[str], workers: int, use_gpu: bool, environment: Mapping[str, str], restarts: int = 0) -> int:
    """Run `worker.py` with these words in every worker of a Ray Train run; returns an exit code.

    Raises:
        LaunchError: Ray is not installed.
    """
    check()
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        train,
        train_loop_config={"words": list(words), "environment": dict(environment), "folder": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=restarts)),
    )
    result = trainer.fit()
    return 0 if result.error is None else 1


def check() -> None:
    if importlib.util.find_spec("ray") is None:
        raise LaunchError("--launcher ray: Ray is not installed. Write pip install 'ray[train]'")


def train(config: dict[str, Any]) -> None:
    """What each worker does; Ray has set RANK, WORLD_SIZE and the like, and started torch.distributed."""
    import sys

    from zeroengine.launch import worker

    os.chdir(config["folder"])
    os.environ.update(config["environment"])
    sys.argv = ["worker.py", *config["words"]]
    worker.run(list(config["words"]))
