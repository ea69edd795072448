"""Digests of states, and what repeats a step."""

from __future__ import annotations

from typing import Annotated, Literal

from zeroengine.config.fields import AUTO, Positive, Section


class Digests(Section):
    """Digests of parameters, gradients and moments, by unit: two runs with equal digests have equal bits."""

    every: Annotated[Positive | None, AUTO] = None
    """Number of steps between two digests, which go into the run folder. Checkpoints get those of their step.
    null: none are computed."""
    on_difference: Literal["stop", "warn"] = "stop"
    """What a difference between ranks that hold copies of one state does: end the run with an error on all ranks, or
    warn."""


class Replay(Section):
    """What zero-replay needs to take a step again and compare its digests."""

    keep: Annotated[Positive | None, AUTO] = None
    """Number of the latest steps of which the run folder keeps the inputs of the model and the states of the random
    generators. null: none, and the script gives them again."""
