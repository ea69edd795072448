"""Run the ranks of one node under a torch elastic agent, and find out which of them failed first.

torch elastic's agent starts the workers and watches them. This file adds output through pipes of our own, the order in
which ranks fail, a short and complete end, and a launcher on another machine that can stop the ranks. It silences the
agent's own log, which repeats the failure report.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from zeroengine.errors import LaunchError
from zeroengine.launch.local import signals
from zeroengine.launch.local.console import STDERR, STDOUT
from zeroengine.launch.local.guard import LAUNCH_ID_VARIABLE, ProcessGuard
from zeroengine.launch.local.job import Job
from zeroengine.launch.local.pipes import Pipes
from zeroengine.launch.local.rank import RankFailure, RankProcess, RunOutcome, peer_failure_timeout_s, stop_ranks
from zeroengine.launch.local.rendezvous import Rendezvous
from zeroengine.launch.local.worker import FAILURE_FILE_VARIABLE
from zeroengine.utils.launcher import STEP_FILE

# So many seconds lie between two searches for processes that the ranks left behind and that have ended.
REAP_INTERVAL_S = 10.0
# So many seconds lie between two looks at the workers.
POLL_INTERVAL_S = 0.05


class Coordinator:
    """The connection of a node's agent to the rest of the run. This one serves a run on one node, which has no rest."""

    def check_stop(self) -> None:
        """Return if the ranks may go on.

        Raises:
            SignalException: The ranks must be ended.
        """

    def report_step(self) -> None:
        """Report that a rank of this node has taken a step in this round."""

    def wait_for_other_nodes(self) -> None:
        """Report that all ranks of this node have succeeded, and return when those of all other nodes have."""


def run_ranks(job: Job, pipes: Pipes, rendezvous: Rendezvous, coordinator: Coordinator | None = None) -> RunOutcome:
    """Run this node's part of the job to its end, and leave no process behind.

    Args:
        job: The command and environment of the ranks.
        pipes: Where their output goes.
        rendezvous: The node's assignment; it is closed at the end.
        coordinator: The rest of the run; None for a run on one node.

    Raises:
        LaunchError: torch elastic could not start the workers.
    """
    # The handler keeps Python from printing the agent's records by itself, and they must not reach the root logger.
    elastic_log = logging.getLogger("torch.distributed.elastic")
    elastic_log.addHandler(logging.NullHandler())
    elastic_log.propagate = False

    # The id is new for each round, so the guard of this round cannot end the processes of another one.
    launch_id = uuid.uuid4().hex
    folder = tempfile.mkdtemp(prefix="zero-launch-")
    # torch elastic sets handlers of its own and does not restore them.
    with signals.signal_handlers(signals.STOP_SIGNALS), ProcessGuard(launch_id, folder) as guard:
        log_specs = WorkerOutput(job, pipes, Path(folder), {LAUNCH_ID_VARIABLE: launch_id})
        agent = NodeAgent(job, log_specs, rendezvous, coordinator or Coordinator(), guard)
        try:
            # Signals for the ranks are forwarded only while an agent exists that knows their processes.
            with signals.signal_handlers(signals.FORWARDED_SIGNALS, agent.forward_signal):
                agent.run()
            # The failures are read after the agent has ended all ranks, so no rank can fail unseen.
            return RunOutcome(agent.failures())
        except SignalException as stop:
            return RunOutcome(agent.failures(), stop_signal=stop.sigval)
        except KeyboardInterrupt:
            return RunOutcome(agent.failures(), stop_signal=signal.SIGINT)
        except (RendezvousError, dist.DistError) as error:
            address = rendezvous.assignment.address
            raise LaunchError(f"torch elastic cannot bring the ranks together on {address}: {error}") from error
        finally:
            # Processes that remain of the run are ended now, and a second Ctrl-C must not interrupt that.
            signals.ignore_signals(signals.STOP_SIGNALS)
            # The store closes before the guard ends the last processes, and its port is free for the next round.
            rendezvous.close()


class WorkerOutput(LogsSpecs):
    """Tell torch elastic where the workers' output goes, and complete their environment."""

    def __init__(self, job: Job, pipes: Pipes, folder: Path, environment: dict[str, str]) -> None:
        super().__init__()
        self._pipes, self._folder = pipes, folder
        self._environment = job.environment | environment
        # This file exists once any rank has taken a step.
        self.step_file = folder / "step"

    @property
    def root_log_dir(self) -> str:
        """The run's temporary folder."""
        return str(self._folder)

    def failure_file(self, local_rank: int) -> Path:
        """Return the file in which a worker describes its failure."""
        return self._folder / f"rank{local_rank}.json"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Complete each local rank's environment in place, and return the files for its output."""
        for rank, environment in envs.items():
            # The job's variables win over those of torch elastic, and the launcher's own files below win over both.
            environment.update(self._environment | self._pipes.environment(rank))
            environment[FAILURE_FILE_VARIABLE] = str(self.failure_file(rank))
            environment[STEP_FILE] = str(self.step_file)
        return LogsDest(
            stdouts={rank: self._pipes.path(rank, STDOUT) for rank in envs},
            stderrs={rank: self._pipes.path(rank, STDERR) for rank in envs},
            # torch's own error files are not read: the worker writes a better account of its failure.
            error_files={rank: os.devnull for rank in envs},
        )


class NodeAgent(LocalElasticAgent):
    """torch elastic's agent for one node, with a record of how each rank ended."""

    def __init__(
        self, job: Job, output: WorkerOutput, rendezvous: Rendezvous, coordinator: Coordinator, guard: ProcessGuard
    ) -> None:
        spec = WorkerSpec(
            role="zeroengine",
            local_world_size=job.nproc,
            entrypoint=job.command[0],
            # The agent expands ${local_rank} in the arguments, with $$ for a plain $.
            args=tuple(argument.replace("$", "$$") for argument in job.command[1:]),
            rdzv_handler=rendezvous,
            # The workers read the restart count as the difference between this and the remaining restarts, below.
            max_restarts=rendezvous.assignment.restart,
            monitor_interval=POLL_INTERVAL_S,
            local_addr=rendezvous.assignment.address,
        )
        super().__init__(spec, output)
        # The agent must never restart the workers itself. The launcher starts a new round with a new store instead.
        self._remaining_restarts = 0
        self._output, self._coordinator, self._assignment = output, coordinator, rendezvous.assignment
        self._processes: list[RankProcess] = []
        self._step_reported = False
        self._guard, self._last_reap = guard, time.monotonic()

    def failures(self) -> tuple[RankFailure, ...]:
        """Return the ranks that failed by themselves, in order of time."""
        failures = filter(None, (process.failure() for process in self._processes))
        return tuple(sorted(failures, key=lambda failure: failure.time))

    def forward_signal(self, number: signal.Signals) -> None:
        """Send a signal to the ranks that still run. See "Forwarded signals" in signals.py."""
        for process in self._processes:
            # The children of a rank do not receive the signal, and the rank itself may have ended.
            if process.poll() is None:
                os.kill(process.pid, number)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        pids: dict[int, int] = super()._start_workers(worker_group)
        # Processes are recorded as soon as they exist, so that a signal or an error from here on finds them.
        first = self._assignment.first_rank
        self._processes = [
            RankProcess(first + rank, pid, self._output.failure_file(rank)) for rank, pid in pids.items()
        ]
        return pids

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the ranks as the launcher did, without communication between the agents."""
        assignment = self._assignment
        ranks = [(local, assignment.first_rank + local) for local in range(spec.local_world_size)]
        return [Worker(local, rank, rank, assignment.world_size, assignment.world_size) for local, rank in ranks]

    def _exit_barrier(self) -> None:
        # torch's barrier would run over the agent's store, which is local to this process and reaches no other node.
        self._coordinator.wait_for_other_nodes()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the workers, and end the others quickly when one has failed; torch elastic is slow at that.

        A rank that dies without a reason gives the others some time to fail by themselves: in a collective with the
        dead rank they do, and their error says where that was.
        """
        # The launcher on another machine may end the ranks at any moment, so it is asked at every look.
        self._coordinator.check_stop()
        # As a subreaper the launcher inherits orphans, which stay zombies until it reaps them.
        if time.monotonic() > self._last_reap + REAP_INTERVAL_S:
            self._guard.reap([process.pid for process in self._processes])
            self._last_reap = time.monotonic()
        # The step is reported once. It shows the launcher that this round got as far as training.
        if not self._step_reported and self._output.step_file.exists():
            self._step_reported = True
            self._coordinator.report_step()
        # `poll` leaves ended processes unreaped, because torch elastic builds its own result from their exit codes.
        running = [process for process in self._processes if process.poll() is None]
        failed = [process for process in self._processes if process.has_failed]
        # A rank that left a reason has written it to its file.
        has_reason = any(process.failure_file.exists() for process in failed)
        # The wait is counted from the moment when the rank was last seen alive, which is close to its end.
        now = time.monotonic()
        waited = any(now > process.last_seen_running + peer_failure_timeout_s(process.code) for process in failed)
        if running and not has_reason and not waited:
            return RunResult(WorkerState.HEALTHY)
        # The others hang in a collective or compute for nothing, so they end now. Failures that this causes are not
        # theirs.
        stop_ranks(running)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        # torch elastic is slow to end processes. After this it finds only processes that have ended.
        stop_ranks(self._processes, death_sig)
        # Newer versions of torch pass a timeout as well.
        super()._shutdown(death_sig, *args, **kwargs)
