"""Decide what an elastic run does about nodes that are lost repeatedly: it pauses, excludes nodes, and at last ends."""

from __future__ import annotations

from dataclasses import dataclass, field

# These are the shortest and the longest pause before the next round, after a round without a step.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
# A node is excluded after so many losses within EXCLUSION_S.
LOSSES_TO_EXCLUSION = 2
EXCLUSION_S = 600.0


@dataclass
class IdleRoundCounter:
    """Count the rounds in a row in which nodes were lost before a step was taken."""

    limit: int
    count: int = 0

    def record_round(self, stepped: bool) -> None:
        """Count a round that has ended; a round with a step is progress and sets the count to zero."""
        self.count = 0 if stepped else self.count + 1

    @property
    def limit_reached(self) -> bool:
        """Whether the run should end."""
        return self.count >= self.limit

    @property
    def pause_s(self) -> float:
        """The seconds to wait before the next round."""
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self.count - 1)) if self.count else 0.0


@dataclass
class NodeLossHistory:
    """Remember when each node was lost, as `time.monotonic` by the node's label."""

    times: dict[str, list[float]] = field(default_factory=dict)

    def record_loss(self, label: str, now: float) -> bool:
        """Record that the node was lost, and return whether it should be excluded for a while."""
        recent = [time for time in self.times.get(label, []) if time > now - EXCLUSION_S]
        self.times[label] = [*recent, now]
        return len(self.times[label]) >= LOSSES_TO_EXCLUSION
