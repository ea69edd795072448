"""Runs the ranks of all nodes, again where a failure allows it, and says how that ended.

[Note: Rounds]
The ranks of all nodes start together and end together; that is a round. A round ends when all ranks have succeeded,
one has failed, a node was lost, or one that was lost is back. Nodes stay connected between rounds, so the next begins
at once. Only the launcher knows who takes part, so there is nothing for the nodes to agree on.

[Note: Rounds without a step]
A round goes on from the newest checkpoint, so it is progress only if a step is taken in it. Losing nodes costs an
elastic run no restarts; so that it cannot go on losing them for ever, it ends after `--max-idle-rounds` rounds in a
row in which nodes were lost before a step, with longer and longer pauses between them. A script whose steps
zeroengine does not take never reports one: there, a round of STEADY seconds counts as progress.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from zeroengine.launch.cluster import preflight
from zeroengine.launch.cluster.lost_nodes import ASIDE, IdleRounds, SpoiltRounds
from zeroengine.launch.cluster.node_connection import Link
from zeroengine.launch.cluster.nodes import Fleet, Stopped
from zeroengine.launch.cluster.request import Request
from zeroengine.launch.local.console import Console
from zeroengine.launch.local.failure_report import report
from zeroengine.launch.local.rank import GRACE, HEARING, Failure, Outcome

END = 2 * GRACE + 4.0  # seconds for a node's ranks to end
STEADY = 60.0  # seconds that a round is left alone before a node that is back interrupts it
NAMED = 16  # nodes that are named one by one
RETURN = 60.0  # seconds that a run which needs a lost node waits for it


@dataclass(frozen=True)
class Round:
    """How a round ended; where nothing is set, a node is back."""

    succeeded: bool = False
    failures: tuple[Failure, ...] = ()
    lost: tuple[Link, ...] = ()


def run(request: Request, fleet: Fleet, console: Console) -> Outcome:
    """Check the nodes, run the ranks, and start them again where that is allowed.

    Raises:
        LaunchError: nodes that cannot take part, all of them in one table; or a wrong configuration.
    """
    try:
        fleet.check()
        return Rounds(request, fleet, console).run()
    except Stopped as stop:
        return Outcome(interrupted=stop.number)


class Rounds:
    """The rounds of a run on the nodes of a fleet."""

    def __init__(self, request: Request, fleet: Fleet, console: Console) -> None:
        self._request, self._fleet, self._console = request, fleet, console
        self._number = 0  # of the round
        self._reports_steps = False  # whether any round has told of a step
        self._idle, self._spoilt = IdleRounds(request.idle_rounds), SpoiltRounds()

    def run(self) -> Outcome:
        request, restarts = self._request, 0
        while True:
            members, began = self._fleet.present(), time.monotonic()
            end = self._round(members)
            self._number += 1
            if end.succeeded:
                return Outcome()
            outcome = Outcome(end.failures, lost=tuple(map(_loss, end.lost)))
            # What fails when a node is lost fails for that reason, and in an elastic run that is nobody's fault.
            counts = (bool(end.lost) and not request.elastic) or (bool(end.failures) and not end.lost)
            if counts and (outcome.is_final or restarts == request.restarts):
                return outcome
            restarts += counts
            if outcome.code:
                self._console.say(report(outcome, self._console))
            if end.lost and request.elastic:
                self._idle.add(self._made_progress(members, began))
                if self._idle.are_too_many:
                    self._fleet.say(
                        f"nodes were lost in {self._idle.count} rounds in a row before a step was taken: "
                        "the run ends (--max-idle-rounds)"
                    )
                    return outcome
                self._put_aside(end.lost)
                self._pause()
            if not self._assemble():
                return outcome
            present = [link.host.label for link in self._fleet.present()]
            names = ", ".join(present) if len(present) <= NAMED else f"{len(present)} nodes"
            self._fleet.say(f"{f'restart {restarts} of {request.restarts}' if counts else 'going on'} with {names}")

    def _made_progress(self, members: Sequence[Link], began: float) -> bool:
        """See "Rounds without a step"."""
        stepped = any(link.stepped for link in members)
        self._reports_steps = self._reports_steps or stepped
        return stepped or (not self._reports_steps and time.monotonic() > began + STEADY)

    def _put_aside(self, lost: Sequence[Link]) -> None:
        """Leave nodes alone for a while that were lost twice within that while."""
        for link in lost:
            if self._spoilt.add(link.host.label, time.monotonic()):
                link.retry_after(ASIDE)
                aside = f"it is put aside for {ASIDE / 60:.0f} minutes, if the others are enough"
                self._fleet.say(f"{link.host.label} was lost again: {aside}")

    def _pause(self) -> None:
        """Before the next round, after one without a step."""
        if pause := self._idle.pause:
            self._fleet.say(f"no step was taken in that round; the next one begins in {pause:.0f} s")
            self._fleet.wait(lambda: False, pause)

    def _assemble(self) -> bool:
        """Wait until there are nodes enough for a round, with those that were put aside where others are too few."""

        def enough() -> bool:
            self._fleet.look_for_lost()
            self._fleet.take_back()
            return len(self._fleet.present()) >= self._request.least

        if not enough():
            self._fleet.retry_now()
            self._fleet.say(f"waiting for the nodes that were lost, {RETURN:.0f} s at most")
        return self._fleet.wait(enough, RETURN)

    def _round(self, members: list[Link]) -> Round:
        """Run the ranks once on these nodes."""
        request, rank = self._request, 0
        for link in members:
            link.begin(rank, request.count(link))
            rank = link.ranks.stop
        place = self._meet(members)
        if place is None:
            return Round(lost=tuple(link for link in members if link.lost))
        self._console.assign([f"{link.host.label}:{rank}" for link in members for rank in link.ranks])
        full = sum(map(request.count, self._fleet.links))
        for node, link in enumerate(members):
            own = {"node": node, "first_rank": link.first_rank, "restart": self._number, "run_id": request.run_id}
            link.running = True
            link.send(request.order(link, {**place, **own, "world_size": rank, "nodes": len(members)}, full))
        try:
            return self._watch(members)
        except Stopped as stop:
            self._wind_down(members, stop.number)
            raise
        finally:
            self._console.flush(everything=True)
            for link in members:
                link.running = False

    def _meet(self, members: Sequence[Link]) -> dict[str, object] | None:
        """Where the first node serves the store, once all others have reached it; None where a node was lost."""
        first, *rest = members
        others = [str(link.hello["address"] or link.host.label) for link in rest if link.hello]
        where = {"port": self._request.port, "address": self._request.address}
        self._leave_out(first, [], self._fleet.ask([first], {"do": "listen", "others": others, **where}))
        if first.lost is not None:
            return None
        assert first.answer is not None
        place = {key: first.answer[key] for key in ("address", "port")}
        self._leave_out(first, rest, self._fleet.ask(rest, {"do": "reach", **place}))
        return None if any(link.lost for link in members) else place

    def _leave_out(self, first: Link, rest: Sequence[Link], unable: dict[Link, str]) -> None:
        """Give up nodes that cannot meet the others; the first one instead of the others if most cannot reach it.

        Raises:
            LaunchError: at the start of a run that needs all of them.
        """
        if unable and not self._request.elastic and self._number == 0:
            problems = [(link.host.label, text) for link, text in unable.items()]
            raise preflight.table(problems, len(self._fleet.links))
        if len(rest) > 1 and 2 * len(unable) > len(rest):
            text = next(iter(unable.values()))
            first.lose(f"{len(unable)} of {len(rest)} nodes cannot reach it: {text}")
        else:
            for link, text in unable.items():
                link.lose(text)

    def _watch(self, members: Sequence[Link]) -> Round:
        """Until the round is over, on all nodes."""
        wait, began = self._fleet.wait, time.monotonic()

        def fell() -> bool:
            return any(link.lost or link.ended for link in members)

        def finished() -> bool:
            return all(link.finished for link in members)

        def joined() -> bool:
            return self._fleet.look_for_lost() and time.monotonic() > began + STEADY

        wait(lambda: fell() or finished() or joined())
        if finished() and not fell():
            for link in members:
                link.send({"do": "release"})
            wait(lambda: all(link.ended or link.lost for link in members), END)
            return Round(succeeded=True)
        if fell() and not any(link.lost for link in members):  # the others may know more
            wait(lambda: any(f.explained for f in _failures(members)) or all(map(_settled, members)), HEARING)
        self._wind_down(members, signal.SIGTERM)
        for link in members:
            if link.ended and link.ended["interrupted"] and not link.stopped and not link.ended["failures"]:
                link.lose("its zero-launch process was stopped from there")
        return Round(failures=_failures(members), lost=tuple(link for link in members if link.lost))

    def _wind_down(self, members: Sequence[Link], number: signal.Signals) -> None:
        """End the ranks that still run."""
        running = [link for link in members if not link.ended and not link.lost]
        for link in running:
            link.stopped = True
            link.send({"do": "stop", "signal": int(number)})
        if not self._fleet.wait(lambda: all(link.ended or link.lost for link in running), END, stoppable=False):
            for link in running:
                if not link.ended:
                    link.lose("its ranks do not end")


def _settled(link: Link) -> bool:
    return bool(link.ended or link.lost or link.finished)


def _failures(members: Sequence[Link]) -> tuple[Failure, ...]:
    """Those of all nodes by this machine's clock, the first to fail first."""
    found = [
        Failure(f["rank"], f["time"] + link.clock, f["code"], f["summary"], f["text"], link.host.label)
        for link in members
        if link.ended
        for f in link.ended["failures"]
    ]
    return tuple(sorted(found, key=lambda failure: failure.time))


def _loss(link: Link) -> str:
    ranks = ", ".join(map(str, link.ranks))
    return f"{link.host.label} was lost: {link.lost} (rank{'s' * (len(link.ranks) > 1)} {ranks})"
