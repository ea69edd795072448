"""Runs the ranks of one node under a torch elastic agent and finds out which of them failed first.

The agent starts the workers and watches them. Added here: output through pipes of our own, the order in which ranks
end, a short and complete death, orders from a launcher elsewhere, and silence (the agent's own log says nothing that
the report does not).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from zeroengine.errors import LaunchError
from zeroengine.launch.local import signals
from zeroengine.launch.local.console import STDERR, STDOUT
from zeroengine.launch.local.guard import MARK, Guard
from zeroengine.launch.local.job import Job
from zeroengine.launch.local.pipes import Pipes
from zeroengine.launch.local.rank import HEARING, Failure, Outcome, RankProcess, stop_all
from zeroengine.launch.local.rendezvous import Rendezvous
from zeroengine.launch.local.worker import FAILURE_FILE
from zeroengine.utils.launcher_environment import STEP_FILE

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
REAP = 10.0  # seconds between two looks at processes that the ranks have left behind and that have ended
POLL = 0.05  # seconds between two looks at the workers


class Orders(Protocol):
    """What a launcher elsewhere has to say."""

    def check(self) -> None:
        """Raises SignalException where the ranks are to be ended."""

    def stepped(self) -> None:
        """Tell the launcher that a rank here has taken a step in this round."""

    def finished(self) -> None:
        """All ranks here have succeeded: returns when those of all other nodes have."""


class Alone:
    """There is no launcher elsewhere."""

    def check(self) -> None: ...

    def stepped(self) -> None: ...

    def finished(self) -> None: ...


def run(job: Job, pipes: Pipes, rendezvous: Rendezvous, orders: Orders | None = None) -> Outcome:
    """Run this node's part of the job to its end, leaving no process behind.

    Raises:
        LaunchError: torch elastic could not start the workers.
    """
    quiet = logging.getLogger("torch.distributed.elastic")
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False

    launch_id = uuid.uuid4().hex
    folder = tempfile.mkdtemp(prefix="zero-launch-")
    with handlers_kept(), reported(Guard(launch_id, folder)) as guard:
        streams = Streams(job, pipes, Path(folder), {MARK: launch_id})
        agent = Agent(job, streams, rendezvous, orders or Alone(), guard)
        try:
            with signals.passed_on(agent.pass_on):
                agent.run()
            return Outcome(agent.failures())
        except SignalException as stop:
            return Outcome(agent.failures(), interrupted=stop.sigval)
        except KeyboardInterrupt:
            return Outcome(agent.failures(), interrupted=signal.SIGINT)
        except (RendezvousError, dist.DistError) as error:
            address = rendezvous.place.address
            raise LaunchError(f"torch elastic cannot bring the ranks together on {address}: {error}") from error
        finally:
            ignore_signals()
            rendezvous.close()


class Streams(LogsSpecs):
    """Tells torch elastic where the workers' output goes, and completes their environment."""

    def __init__(self, job: Job, pipes: Pipes, folder: Path, environment: dict[str, str]) -> None:
        super().__init__()
        self._pipes, self._folder = pipes, folder
        self._environment = job.environment | environment
        self.step_file = folder / "step"  # there once any rank has taken a step

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def failure_file(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.json"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """By local rank."""
        for rank, environment in envs.items():
            environment.update(self._environment | self._pipes.environment(rank))
            environment[FAILURE_FILE] = str(self.failure_file(rank))
            environment[STEP_FILE] = str(self.step_file)
        return LogsDest(
            stdouts={rank: self._pipes.path(rank, STDOUT) for rank in envs},
            stderrs={rank: self._pipes.path(rank, STDERR) for rank in envs},
            error_files={rank: os.devnull for rank in envs},
        )


class Agent(LocalElasticAgent):
    """torch elastic's agent for one node, with a record of how each rank ended."""

    def __init__(self, job: Job, streams: Streams, rendezvous: Rendezvous, orders: Orders, guard: Guard) -> None:
        spec = WorkerSpec(
            role="zeroengine",
            local_world_size=job.nproc,
            entrypoint=job.command[0],
            args=tuple(argument.replace("$", "$$") for argument in job.command[1:]),  # the agent expands ${local_rank}
            rdzv_handler=rendezvous,
            max_restarts=rendezvous.place.restart,  # with none left; the workers are told the difference
            monitor_interval=POLL,
            local_addr=rendezvous.place.address,
        )
        super().__init__(spec, streams)
        self._remaining_restarts = 0
        self._streams, self._orders, self._place = streams, orders, rendezvous.place
        self._processes: list[RankProcess] = []
        self._stepped = False
        self._guard, self._reaped_at = guard, time.monotonic()

    def failures(self) -> tuple[Failure, ...]:
        """The ranks that failed by themselves, the first to fail first."""
        found = filter(None, (process.failure() for process in self._processes))
        return tuple(sorted(found, key=lambda failure: failure.time))

    def pass_on(self, number: signal.Signals) -> None:
        """Send a signal to the ranks that still run. See `signals.py`."""
        signals.send((process.pid for process in self._processes if process.poll() is None), number)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        pids: dict[int, int] = super()._start_workers(worker_group)
        first = self._place.first_rank
        self._processes = [
            RankProcess(first + rank, pid, self._streams.failure_file(rank)) for rank, pid in pids.items()
        ]
        return pids

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """In the launcher's order, without a word between the agents."""
        place = self._place
        ranks = [(local, place.first_rank + local) for local in range(spec.local_world_size)]
        return [Worker(local, rank, rank, place.world_size, place.world_size) for local, rank in ranks]

    def _exit_barrier(self) -> None:
        self._orders.finished()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the workers; when one has failed, end the others before the agent does, which is slow about it.

        After a death without a word the others are heard first: in a collective with the dead they fail as well, and
        know where that was.
        """
        self._orders.check()
        if time.monotonic() > self._reaped_at + REAP:
            self._guard.reap([process.pid for process in self._processes])
            self._reaped_at = time.monotonic()
        if not self._stepped and self._streams.step_file.exists():
            self._stepped = True
            self._orders.stepped()
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
def reported(guard: Guard) -> Iterator[Guard]:
    """The guard for a `with` block, and at its end a line about processes that it could not end."""
    with guard:
        yield guard
    if guard.left:
        sys.stderr.write(f"zero-launch: processes of the run that cannot be ended: {guard.left}\n")


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
