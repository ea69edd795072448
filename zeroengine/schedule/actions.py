"""What the schedule tells a rank to do, in the order in which it must be done. Units are numbers."""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeAlias


class Gather(NamedTuple):
    """Have the parameters of a unit ready for use. Launch its all-gather first, unless a `Prefetch` has.

    Attributes:
        unit: The unit.
        exact: Whether it must have the values of the shards, which quantized gathers round.
    """

    unit: int
    exact: bool = False


class Prefetch(NamedTuple):
    """Launch the all-gather of a released unit, ahead of its use."""

    unit: int


class ReadAhead(NamedTuple):
    """Read this rank's offloaded shard of a released unit ahead of its use. It concerns no other rank."""

    unit: int


class Release(NamedTuple):
    """Free the parameters of a gathered unit. Its next use gathers it again."""

    unit: int


class Fate(enum.Enum):
    """What becomes of a gradient that this rank has computed."""

    TAKEN = "taken"  # it is part of the next reduce of its unit
    WAITING = "waiting"  # inside no_sync: it is part of the reduce of a later micro-step
    LATE = "late"  # its unit was reduced already, or is about to be: it is added before the update


class Complete(NamedTuple):
    """Take what this rank still has for the gradients of a unit, of which no more come. Missing ones count as zeros.

    Attributes:
        unit: The unit.
        fate: What becomes of them.
        takes_written: Whether to take what a Function or a hook of the user has left in ``param.grad``.
        takes_waiting: Whether to take the gradients that waited, of the parameters that have none in this backward.
    """

    unit: int
    fate: Fate
    takes_written: bool
    takes_waiting: bool


class TakeWaiting(NamedTuple):
    """Take all gradients of a unit that waited, because no backward of this step has reduced it."""

    unit: int


class Reduce(NamedTuple):
    """Launch the reduce of the gradients of a unit."""

    unit: int


Action: TypeAlias = Gather | Prefetch | ReadAhead | Release | Complete | TakeWaiting | Reduce
