"""Runs a job under a torch elastic agent and finds out which rank failed first.

The agent does the rendezvous, starts the workers and watches them. Added here: output through the console, the order
in which ranks end, a short and complete death, and silence (the agent's own log says nothing that the report does not).
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from zeroengine.errors import LaunchError
from zeroengine.launch.console import STDERR, STDOUT, Console
from zeroengine.launch.guard import Guard
from zeroengine.launch.job import HOST, Job
from zeroengine.launch.rank import Failure, RankProcess, stop_all
from zeroengine.launch.worker import FAILURE_FILE

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
POLL = 0.05  # seconds between two looks at the workers
HEARING = 5.0  # seconds that the other ranks may run on after one has died without a word


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    failures: tuple[Failure, ...] = ()  # the first to fail first, without the ranks that were stopped for it
    interrupted: signal.Signals | None = None  # the signal that ended the launcher

    @property
    def code(self) -> int:
        """The launcher's exit code."""
        if self.interrupted is not None:
            return 128 + self.interrupted
        return self.failures[0].code if self.failures else 0


def run(job: Job, console: Console) -> Outcome:
    """Run the job to its end, leaving no process behind.

    Raises:
        LaunchError: torch elastic could not start the workers.
    """
    quiet = logging.getLogger("torch.distributed.elastic")
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False

    run_id = uuid.uuid4().hex
    folder = tempfile.mkdtemp(prefix="zero-launch-")
    with handlers_kept(), Guard(run_id, folder):
        try:
            agent = Agent(job, Streams(job, console, Path(folder)), run_id)
            agent.run()
            return Outcome(agent.failures())
        except SignalException as stop:
            return Outcome(interrupted=stop.sigval)
        except KeyboardInterrupt:
            return Outcome(interrupted=signal.SIGINT)
        except RendezvousError as error:
            raise LaunchError(f"torch elastic cannot bring the ranks together on {HOST}: {error}") from error
        finally:
            ignore_signals()


class Streams(LogsSpecs):
    """Tells torch elastic where the workers' output goes, and completes their environment."""

    def __init__(self, job: Job, console: Console, folder: Path) -> None:
        super().__init__()
        self._job, self._console, self._folder = job, console, folder

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def failure_file(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.json"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for rank, environment in envs.items():
            environment.update(self._job.environment | self._console.environment(rank))
            environment[FAILURE_FILE] = str(self.failure_file(rank))
        return LogsDest(
            stdouts={rank: self._console.path(rank, STDOUT) for rank in envs},
            stderrs={rank: self._console.path(rank, STDERR) for rank in envs},
            error_files={rank: os.devnull for rank in envs},
        )


class Agent(LocalElasticAgent):
    """torch elastic's agent for one node, with a record of how each rank ended."""

    def __init__(self, job: Job, streams: Streams, run_id: str) -> None:
        parameters = RendezvousParameters("c10d", f"{HOST}:0", run_id, min_nodes=1, max_nodes=1, local_addr=HOST)
        spec = WorkerSpec(
            role="zeroengine",
            local_world_size=job.nproc,
            entrypoint=job.command[0],
            args=tuple(argument.replace("$", "$$") for argument in job.command[1:]),  # the agent expands ${local_rank}
            rdzv_handler=get_rendezvous_handler(parameters),
            max_restarts=0,
            monitor_interval=POLL,
            local_addr=HOST,
        )
        super().__init__(spec, streams)
        self._streams = streams
        self._processes: list[RankProcess] = []

    def failures(self) -> tuple[Failure, ...]:
        """The ranks that failed by themselves, the first to fail first."""
        found = filter(None, (process.failure() for process in self._processes))
        return tuple(sorted(found, key=lambda failure: failure.time))

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        pids: dict[int, int] = super()._start_workers(worker_group)
        self._processes = [RankProcess(rank, pid, self._streams.failure_file(rank)) for rank, pid in pids.items()]
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the workers; when one has failed, end the others before the agent does, which is slow about it.

        After a death without a word the others are heard first: in a collective with the dead they fail as well, and
        know where that was.
        """
        running = [process for process in self._processes if process.poll() is None]
        failed = [process for process in self._processes if process.failed]
        explained = any(process.explained for process in failed)
        heard = any(time.monotonic() > process.seen + HEARING for process in failed)
        if running and not explained and not heard:
            return RunResult(WorkerState.HEALTHY)
        stop_all(running)
        return super()._monitor_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        stop_all(self._processes, death_sig)
        super()._shutdown(death_sig, *args, **kwargs)  # newer torch passes a timeout


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Undo what the agent and `ignore_signals` set."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """While what is left of the run is being ended, there is nothing to interrupt."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
