"""What an elastic run does about nodes that are lost again and again: pauses, puts nodes aside, and at last ends."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before the next round after one without a step
SPOILT_ROUNDS = 2  # that a node may spoil within ASIDE seconds before it is put aside
ASIDE = 600.0  # seconds for which it is


@dataclass
class IdleRounds:
    """The rounds in a row in which nodes were lost before a step was taken."""

    most: int
    count: int = 0

    def add(self, stepped: bool) -> None:
        """Take in how a round ended; one with a step is progress, and the count begins again."""
        self.count = 0 if stepped else self.count + 1

    @property
    def are_too_many(self) -> bool:
        return self.count >= self.most

    @property
    def pause(self) -> float:
        """Seconds to wait before the next round."""
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self.count - 1)) if self.count else 0.0


@dataclass
class SpoiltRounds:
    """When each node, by its label, was lost in a round (`time.monotonic`)."""

    times: dict[str, list[float]] = field(default_factory=dict)

    def add(self, label: str, now: float) -> bool:
        """Take in that the node was lost; whether it is to be put aside for that."""
        recent = [time for time in self.times.get(label, []) if time > now - ASIDE]
        self.times[label] = [*recent, now]
        return len(self.times[label]) >= SPOILT_ROUNDS
