"""What ranks exchange objects for. It travels with every exchange, so that different exchanges are an error by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zeroengine.comm.alarm_board import ranks_by_value
from zeroengine.errors import DivergenceError
from zeroengine.utils.formats import listed

# Every exchange begins with as many bytes from each rank, whatever it is for, so that any two exchanges can meet: a
# label, and the beginning of the object. Most objects are no longer, and need no second collective.
LABEL_BYTES = 1024
ATTACHED_BYTES = 512
# A longer purpose is cut, so that there is room for an error.
PURPOSE_LENGTH = 200
# A message about ranks that differ shows at most this many values, and this many ranks of each.
MAX_SHOWN = 3


class ExchangeLabel(NamedTuple):
    """Says what one rank exchanges.

    Attributes:
        engine: See ``Divergence``.
        call: The public call that the rank is in, such as "save_checkpoint()".
        purpose: The purpose of the exchange, such as "to save a checkpoint".
        numel: The bytes of the object.
        failure: The message of the divergence that keeps the rank from taking part.
    """

    engine: str
    call: str
    purpose: str
    numel: int
    failure: str = ""

    def encoded(self) -> bytes:
        """Return ``LABEL_BYTES`` bytes."""
        texts = (self.engine, self.call, self.purpose[:PURPOSE_LENGTH], str(self.numel), self.failure)
        return "\0".join(texts).encode()[:LABEL_BYTES].ljust(LABEL_BYTES)

    @staticmethod
    def decoded(content: bytes) -> ExchangeLabel:
        """Return the label of what ``encoded`` has returned."""
        engine, call, purpose, numel, failure = content.decode(errors="replace").split("\0", 4)
        return ExchangeLabel(engine, call, purpose, int(numel), failure.rstrip())

    def __str__(self) -> str:
        """Return the call and the purpose, for people."""
        return f"{self.call} (exchange {self.purpose})"


def check_labels(labels: Sequence[ExchangeLabel], numbers: Sequence[int]) -> None:
    """Compare what the ranks exchange.

    Args:
        labels: The labels, in rank order.
        numbers: The engine's number of each rank.

    Raises:
        DivergenceError: They exchange different things, in different calls, or of different engines. Raised on every
            rank.
    """
    ranks_with = ranks_by_value({rank: label[:3] for rank, label in zip(numbers, labels, strict=True)})
    if len(ranks_with) > 1:
        names = dict(zip(numbers, map(str, labels), strict=True))
        if len(set(names.values())) == 1:
            names = {rank: f"{names[rank]} of engine {engine:.6}" for (engine, *_), (rank, *_) in ranks_with.items()}
        places = (f"{described(ranks)} in {names[ranks[0]]}" for ranks in list(ranks_with.values())[:MAX_SHOWN])
        calls = list(dict.fromkeys(label.call for label in labels))
        raise DivergenceError(
            f"the ranks make different calls: {', '.join(places)}. Every rank must make the same calls of the same "
            f"engines in the same order: call {' and '.join(calls[:MAX_SHOWN])} on every rank, rather than under "
            "`if rank == 0:`."
        )


def described(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, or ``ranks 0, 1, 2 and 5 more``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, MAX_SHOWN)}"
