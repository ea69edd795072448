"""Ray: Ray Train starts the ranks as actors of a Ray cluster and makes their process group."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zeroengine.errors import LaunchError
from zeroengine.launch.local.console import Console
from zeroengine.launch.local.failure_report import report
from zeroengine.launch.local.rank import Failure, Outcome


class ScriptError(Exception):
    """How the script ended in a worker. Ray carries it to the launcher, which need not know the script's own classes.

    Attributes:
        failure: as zero-launch reports it; its time is that of the worker's clock.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.text or self.failure.summary


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
    try:
        error = trainer.fit().error
    except Exception as caught:  # of several classes, by Ray's version
        error = caught
    if error is None:
        return 0
    console = Console(None)
    console.assign([f"rank {rank}" for rank in range(workers)])
    found = sorted(failures(error), key=lambda failure: failure.time)
    if not found:  # the workers have not failed, but what Ray does around them
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        print("zero-launch: Ray could not run the workers: " + "\n  ".join(lines), file=sys.stderr)
        return 1
    outcome = Outcome(tuple(found))
    sys.stderr.write(report(outcome, console))
    return outcome.code


def failures(error: Exception) -> Iterator[Failure]:
    """How the workers failed, as Ray's error says it."""
    of_ranks: Mapping[int, Exception] | None = getattr(error, "worker_failures", None)  # of Ray Train's version 2
    for rank, caught in (of_ranks or {0: error}).items():
        cause: Any = caught
        while cause is not None and not isinstance(cause, ScriptError):
            # Ray Train 2 wraps what a worker raised, Ray's core as well, and Ray Train 1 is raised from that.
            cause = getattr(cause, "_base_exc", None) or getattr(cause, "cause", None) or cause.__cause__
        if cause is not None:
            yield cause.failure
        elif of_ranks:  # such as an actor that died
            yield Failure(rank, time.time(), 1, str(caught).partition("\n")[0], str(caught))


def check() -> None:
    if importlib.util.find_spec("ray") is None:
        raise LaunchError("--launcher ray: Ray is not installed. Write pip install 'ray[train]'")


def train(config: dict[str, Any]) -> None:
    """What each worker does; Ray has set RANK, WORLD_SIZE and the like, and started torch.distributed."""
    from zeroengine.launch.local import worker

    os.chdir(config["folder"])
    os.environ.update(config["environment"])
    sys.argv = ["worker.py", *config["words"]]
    try:
        worker.run(list(config["words"]))
    except SystemExit as end:
        if end.code in (None, 0):
            return
        code, text = (end.code & 0xFF, "") if isinstance(end.code, int) else (1, str(end.code))
        failure = Failure(int(os.environ["RANK"]), time.time(), code, f"SystemExit: {end.code}", text)
    except Exception as error:
        frames = error.__traceback__  # those of the script, after this function's and the worker's
        while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, worker.__file__):
            frames = frames.tb_next
        text = "".join(traceback.format_exception(error.with_traceback(frames)))
        summary = "".join(traceback.format_exception_only(error)).strip()
        failure = Failure(int(os.environ["RANK"]), time.time(), 1, summary, text)
    else:
        return
    raise ScriptError(failure)
