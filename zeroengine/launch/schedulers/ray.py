"""Run the ranks as actors of a Ray cluster. Ray Train starts them and creates their process group."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zeroengine.errors import LaunchError
from zeroengine.launch.local import worker
from zeroengine.launch.local.console import Console
from zeroengine.launch.local.failure_report import failure_report
from zeroengine.launch.local.rank import RankFailure, RunOutcome


class ScriptError(Exception):
    """Describe how the script failed in a worker. Ray carries this to the launcher, which may lack its classes.

    Attributes:
        failure: The failure as zero-launch reports it, with the time by the worker's clock.
    """

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.text or self.failure.summary


def run_on_ray(
    words: Sequence[str], workers: int, use_gpu: bool, environment: Mapping[str, str], restarts: int = 0
) -> int:
    """Run a script in every worker of a Ray Train run, and return an exit code.

    Args:
        words: The script, or `-m` and the module, and its arguments.
        workers: The number of workers in the whole cluster.
        use_gpu: Whether each worker has a GPU.
        environment: The workers' variables in addition to their own.
        restarts: How often Ray may start the workers again.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"words": list(words), "environment": dict(environment), "folder": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=restarts)),
    )
    try:
        error = trainer.fit().error
    except Exception as caught:
        # The class depends on Ray's version.
        error = caught
    if error is None:
        return 0
    console = Console()
    console.assign([f"rank {rank}" for rank in range(workers)])
    failures = tuple(sorted(worker_failures(error), key=lambda failure: failure.time))
    if not failures:
        # The workers have not failed, but Ray has failed around them.
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        print("zero-launch: Ray could not run the workers: " + "\n  ".join(lines), file=sys.stderr)
        return 1
    outcome = RunOutcome(failures)
    sys.stderr.write(failure_report(outcome, console))
    return outcome.code


def worker_failures(error: Exception) -> Iterator[RankFailure]:
    """Yield the failures of the workers that Ray's error contains."""
    # Version 2 of Ray Train has one error per rank.
    by_rank: Mapping[int, Exception] | None = getattr(error, "worker_failures", None)
    for rank, caught in (by_rank or {0: error}).items():
        cause: Any = caught
        while cause is not None and not isinstance(cause, ScriptError):
            # Ray Train 2 and Ray's core both wrap what a worker raised, and Ray Train 1 raises its error from that.
            cause = getattr(cause, "_base_exc", None) or getattr(cause, "cause", None) or cause.__cause__
        if cause is not None:
            yield cause.failure
        elif by_rank:
            # The worker did not raise anything: its actor died, for instance.
            yield RankFailure(rank, time.time(), 1, str(caught).partition("\n")[0], str(caught))


def check_installed() -> None:
    """Check that Ray is installed.

    Raises:
        LaunchError: It is not.
    """
    if importlib.util.find_spec("ray") is None:
        raise LaunchError("--launcher ray: Ray is not installed. Write pip install 'ray[train]'")


def train_worker(config: dict[str, Any]) -> None:
    """Run the script in one worker. Ray has set RANK, WORLD_SIZE and the like, and started torch.distributed.

    Raises:
        ScriptError: The script failed.
    """
    # Ray starts its workers in a folder of its own, and scripts use relative paths.
    os.chdir(config["folder"])
    os.environ.update(config["environment"])
    sys.argv = ["worker.py", *config["words"]]
    try:
        worker.run_target(config["words"])
        return
    # A script may end by sys.exit. Ray would take any SystemExit for a dead worker.
    except (SystemExit, Exception) as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        worker.drop_own_frames(error, __file__, worker.__file__)
        failure = RankFailure(int(os.environ["RANK"]), time.time(), *worker.describe_failure(error))
    # The error is raised outside of the handler, so that it does not carry the script's own exception along.
    raise ScriptError(failure)
