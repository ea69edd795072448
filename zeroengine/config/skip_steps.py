"""The section of steps that are skipped because their loss or norm is far from the usual."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, MinLen
from pydantic import Strict

from zeroengine.config.fields import AboveZero, Positive, Section


class SkipSteps(Section):
    """Steps that change nothing, because their loss or gradient norm lies far from those of the steps before."""

    sigma: AboveZero = 6.0
    """A step is skipped whose loss or norm lies further than this many standard deviations from the mean of the
    window."""
    window: Annotated[int, Ge(4)] = 128
    """The number of the latest steps that mean and standard deviation are taken over; skipped ones do not count. No
    step is judged before half of it is there."""
    of: Annotated[tuple[Literal["loss", "norm"], ...], MinLen(1), Strict(False)] = ("loss", "norm")
    """What is judged: the loss that `engine.backward` was given, over all ranks and micro-steps, and the norm of the
    gradient before clipping."""
    at_most: Positive = 10
    """After this many skipped steps in a row the run ends with an error, and with a checkpoint of the last good step
    where `checkpoint.directory` is given. Steps whose gradient is not finite count, too, except in fp16."""
