"""Run the ranks of all nodes, start them again after a failure where that is allowed, and return how the run ended.

[Note: Rounds]
The ranks of all nodes start together and end together; that is a round. A round ends when all ranks have succeeded,
when one has failed, when a node was lost, or when a lost node is back. Nodes stay connected between rounds, so that the
next round begins at once. The launcher alone decides which nodes take part, so the nodes need not agree on anything.

[Note: Rounds without a step]
A round continues from the newest checkpoint, so it is progress only if a step is taken in it. Losing nodes costs an
elastic run no restarts. So that it cannot lose nodes for ever, it ends after `--max-idle-rounds` rounds in a row in
which nodes were lost before a step, with longer and longer pauses between them. A script that takes its steps without
zeroengine never reports one; there, a round of STEADY_ROUND_S seconds counts as progress.
"""

from __future__ import annotations

import signal
import time
from collections import defaultdict, deque
from collections.abc import Sequence

from zeroengine.launch.cluster.node_connection import NodeConnection
from zeroengine.launch.cluster.nodes import LauncherInterrupted, Nodes
from zeroengine.launch.cluster.preflight import problem_table
from zeroengine.launch.cluster.protocol import Message
from zeroengine.launch.cluster.request import ClusterRequest
from zeroengine.launch.local.console import Console
from zeroengine.launch.local.failure_report import failure_report
from zeroengine.launch.local.rank import (
    PEER_FAILURE_TIMEOUT_S,
    SIGKILL_TIMEOUT_S,
    RankFailure,
    RunOutcome,
    peer_failure_timeout_s,
)
from zeroengine.launch.local.repeated_failures import count_equal_failures
from zeroengine.launch.local.run_events import LauncherEvents
from zeroengine.launch.local.worker import STEADY_ROUND_S

# The seconds that the ranks of all nodes have to end.
ROUND_END_TIMEOUT_S = 2 * SIGKILL_TIMEOUT_S + 4.0
# The seconds that a lost node has to come back, if the run needs it.
RETURN_TIMEOUT_S = 60.0
# The most nodes that a message names.
MAX_NAMED_NODES = 16
# These are the shortest and the longest pause before the next round, after a round without a step.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
# The losses within EXCLUSION_S after which a node is excluded.
LOSSES_TO_EXCLUSION = 2
EXCLUSION_S = 600.0


def run_cluster(request: ClusterRequest, nodes: Nodes, console: Console, events: LauncherEvents) -> RunOutcome:
    """Check the nodes, run the ranks, and start them again where that is allowed.

    Args:
        request: What to run.
        nodes: The connections to the nodes.
        console: Where the output of the ranks goes.
        events: Where restarts and lost nodes are noted.

    Raises:
        LaunchError: Nodes cannot take part, listed in one table, or the configuration is wrong.
    """
    try:
        nodes.check()
        return RestartLoop(request, nodes, console, events).run()
    except LauncherInterrupted as interruption:
        return RunOutcome(stop_signal=interruption.number)


class RestartLoop:
    """The rounds of a run. See "Rounds" above."""

    def __init__(self, request: ClusterRequest, nodes: Nodes, console: Console, events: LauncherEvents) -> None:
        self._request, self._nodes, self._console, self._events = request, nodes, console, events
        # Idle rounds are those in a row that have lost nodes before a step was taken.
        self._round_index = self._idle_rounds = 0
        # This becomes True when any round has reported a step.
        self._reports_steps = False
        # When each node was lost the last times, as `time.monotonic` by the node's label.
        self._loss_times: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LOSSES_TO_EXCLUSION))

    def run(self) -> RunOutcome:
        """Run rounds until one succeeds or no further one is allowed, and return the outcome of the last one."""
        request, restarts, outcome = self._request, 0, RunOutcome()
        while True:
            members, start = self._nodes.present(), time.monotonic()
            if self._run_round(members):
                return RunOutcome()
            self._round_index += 1
            lost = [node for node in members if node.loss]
            ended = RunOutcome(_failures(members), node_losses=tuple(map(_describe_loss, lost)))
            outcome = count_equal_failures(outcome, ended)
            # Ranks that fail when a node is lost fail because of that, and an elastic run forgives lost nodes.
            for loss in outcome.node_losses:
                self._events.append("eviction", loss)
            is_restart = bool(outcome.failures) if not lost else not request.elastic
            if is_restart and (outcome.is_final or restarts == request.max_restarts):
                return outcome
            restarts += is_restart
            # The caller notes how the last round ended.
            self._events.append_outcome(outcome)
            # The report is printed at once, because the output of the next round would push the cause out of sight.
            if outcome.code:
                self._console.print_own(failure_report(outcome, self._console))
            if lost and request.elastic:
                self._idle_rounds = 0 if self._made_progress(members, start) else self._idle_rounds + 1
                if self._idle_rounds == request.max_idle_rounds:
                    self._nodes.print_notice(
                        f"nodes were lost in {self._idle_rounds} rounds in a row before a step was taken: "
                        "the run ends (--max-idle-rounds)"
                    )
                    return outcome
                self._exclude_unsteady(lost)
                if self._idle_rounds:
                    pause_s = pause_after(self._idle_rounds)
                    self._nodes.print_notice(f"no step was taken in that round; the next one begins in {pause_s:.0f} s")
                    # The condition never holds, so this handles messages and signals for the whole pause.
                    self._nodes.wait(lambda: False, pause_s)
            if not self._wait_for_nodes():
                return outcome
            present = [node.host.label for node in self._nodes.present()]
            names = ", ".join(present) if len(present) <= MAX_NAMED_NODES else f"{len(present)} nodes"
            action = f"restart {restarts} of {request.max_restarts}" if is_restart else "going on"
            self._events.append("restart", f"{action} with {names}")
            self._nodes.print_notice(f"{action} with {names}")

    def _made_progress(self, members: Sequence[NodeConnection], start: float) -> bool:
        """Return whether the round was progress. See "Rounds without a step" above."""
        stepped = any(node.has_stepped for node in members)
        self._reports_steps = self._reports_steps or stepped
        return stepped or (not self._reports_steps and time.monotonic() > start + STEADY_ROUND_S)

    def _exclude_unsteady(self, lost: Sequence[NodeConnection]) -> None:
        """Exclude nodes for a while that were lost repeatedly."""
        for node in lost:
            times = self._loss_times[node.host.label]
            times.append(time.monotonic())
            if len(times) == LOSSES_TO_EXCLUSION and times[0] > times[-1] - EXCLUSION_S:
                node.retry_after(EXCLUSION_S)
                self._nodes.print_notice(
                    f"{node.host.label} was lost again: it is put aside for {EXCLUSION_S / 60:.0f} minutes, if the "
                    "others are enough"
                )

    def _wait_for_nodes(self) -> bool:
        """Wait until there are enough nodes for a round, and return whether there are.

        Excluded nodes may come back if the others are too few.
        """

        def enough() -> bool:
            self._nodes.reconnect_lost()
            self._nodes.take_back()
            return len(self._nodes.present()) >= self._request.min_nodes

        if not enough():
            self._nodes.end_exclusions()
            self._nodes.print_notice(f"waiting for the nodes that were lost, {RETURN_TIMEOUT_S:.0f} s at most")
        return self._nodes.wait(enough, RETURN_TIMEOUT_S)

    def _run_round(self, members: list[NodeConnection]) -> bool:
        """Run the ranks once on these nodes, and return whether they succeeded.

        If they did not and no node was lost nor a rank failed, a lost node is back.
        """
        request, world_size = self._request, 0
        # Ranks are numbered in the order of the hosts, without gaps where nodes are missing.
        for node in members:
            node.assign_ranks(world_size, request.num_ranks_on(node))
            world_size = node.ranks.stop
        store = self._open_store(members)
        if store is None:
            return False
        self._console.assign([f"{node.host.label}:{rank}" for node in members for rank in node.ranks])
        full_world_size = sum(map(request.num_ranks_on, self._nodes.connections))
        for index, node in enumerate(members):
            assignment = {**store, "node": index, "nodes": len(members), "world_size": world_size}
            assignment |= {"first_rank": node.first_rank, "restart": self._round_index, "run_id": request.run_id}
            # The node counts as running before the message is sent, so that its first output is not dropped.
            node.is_running = True
            node.send(request.run_message(node, assignment, full_world_size))
        try:
            return self._watch_round(members)
        except LauncherInterrupted as interruption:
            self._stop_ranks(members, interruption.number)
            raise
        finally:
            # Unfinished lines belong to this round and its names.
            self._console.flush(everything=True)
            for node in members:
                node.is_running = False

    def _open_store(self, members: Sequence[NodeConnection]) -> dict[str, object] | None:
        """Let the first node open the store's port, and all others reach it.

        Returns:
            The store's address and port; None if a node was lost.
        """
        first, *rest = members
        assert first.hello is not None
        listen: Message = {
            "do": "listen",
            "port": self._request.port,
            "address": self._request.address,
            "reached_at": first.hello["address"],
            "others": [str(node.hello["address"] or node.host.label) for node in rest if node.hello],
        }
        self._lose_unable(first, [], self._nodes.ask([first], listen))
        if first.loss is not None:
            return None
        assert first.answer is not None
        store = {key: first.answer[key] for key in ("address", "port")}
        # The other nodes must reach the store, and any of them may be behind a firewall or another network.
        self._lose_unable(first, rest, self._nodes.ask(rest, {"do": "reach", **store}))
        return None if any(node.loss for node in members) else store

    def _lose_unable(
        self, first: NodeConnection, rest: Sequence[NodeConnection], unable: dict[NodeConnection, str]
    ) -> None:
        """Give up nodes that cannot reach the first one, or the first one if most others cannot reach it.

        Raises:
            LaunchError: The run is at its start and needs all nodes.
        """
        if unable and not self._request.elastic and self._round_index == 0:
            problems = {node.host.label: [text] for node, text in unable.items()}
            raise problem_table(problems, len(self._nodes.connections))
        # Where most nodes cannot reach the first one, the fault is more likely on its side than on theirs.
        if len(rest) > 1 and 2 * len(unable) > len(rest):
            text = next(iter(unable.values()))
            first.lose(f"{len(unable)} of {len(rest)} nodes cannot reach it: {text}")
        else:
            for node, text in unable.items():
                node.lose(text)

    def _watch_round(self, members: Sequence[NodeConnection]) -> bool:
        """Wait until the round is over, end the ranks that are left on any node, and return whether all succeeded."""
        wait, start = self._nodes.wait, time.monotonic()

        def any_ended() -> bool:
            return any(node.loss or node.end_report for node in members)

        def all_finished() -> bool:
            return all(node.has_finished for node in members)

        def lost_node_is_back() -> bool:
            return self._nodes.reconnect_lost() and time.monotonic() > start + STEADY_ROUND_S

        wait(lambda: any_ended() or all_finished() or lost_node_is_back())
        if all_finished() and not any_ended():
            # A rank may still use the first node's store, so no node ends its agent before all ranks have finished.
            for node in members:
                node.send({"do": "release"})
            wait(lambda: all(node.end_report or node.loss for node in members), ROUND_END_TIMEOUT_S)
            return True
        if any_ended() and not any(node.loss for node in members):
            # A rank may have died without a reason. Ranks of other nodes then fail as well, and may know it.
            wait(
                lambda: (
                    any(failure.summary for failure in _failures(members))
                    or all(node.end_report or node.loss or node.has_finished for node in members)
                ),
                min((peer_failure_timeout_s(f.code) for f in _failures(members)), default=PEER_FAILURE_TIMEOUT_S),
            )
        self._stop_ranks(members, signal.SIGTERM)
        # A node that ends without being told to, and without a failure, was stopped by a signal on its own machine.
        for node in members:
            report = node.end_report
            if report and report["interrupted"] and not report["failures"] and not node.was_stopped:
                node.lose("its zero-launch process was stopped from there")
        return False

    def _stop_ranks(self, members: Sequence[NodeConnection], number: signal.Signals) -> None:
        """End the ranks that still run; a node whose ranks do not end is lost."""
        running = [node for node in members if not node.end_report and not node.loss]
        for node in running:
            node.was_stopped = True
            node.send({"do": "stop", "signal": int(number)})
        # A second signal must not leave ranks behind, so this wait cannot be interrupted.
        all_ended = self._nodes.wait(
            lambda: all(node.end_report or node.loss for node in running), ROUND_END_TIMEOUT_S, interruptible=False
        )
        if not all_ended:
            for node in running:
                if not node.end_report:
                    node.lose("its ranks do not end")


def pause_after(idle_rounds: int) -> float:
    """Return the seconds to pause after so many rounds in a row without a step; at least one."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (idle_rounds - 1))


def _failures(members: Sequence[NodeConnection]) -> tuple[RankFailure, ...]:
    """Return the failures of all nodes in order of time, with their times by this machine's clock."""
    failures = [
        RankFailure(**failure | {"time": failure["time"] + node.clock_offset_s, "host": node.host.label})
        for node in members
        if node.end_report
        for failure in node.end_report["failures"]
    ]
    return tuple(sorted(failures, key=lambda failure: failure.time))


def _describe_loss(node: NodeConnection) -> str:
    ranks = ", ".join(map(str, node.ranks))
    return f"{node.host.label} was lost: {node.loss} (rank{'s' * (len(node.ranks) > 1)} {ranks})"
