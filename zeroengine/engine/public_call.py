"""What a public call requires of the moment at which it is made."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from zeroengine.engine.assembly import EngineParts
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.state_offloader import OFFLOADABLE_STATES
from zeroengine.utils.torch_internals import current_graph_task_id

T = TypeVar("T")


class Inside(enum.Flag):
    """What a call may come inside of."""

    STREAM = enum.auto()  # of the weights, which is open
    AVERAGES = enum.auto()  # parameters have the averages of the weights
    GATHERED = enum.auto()  # zeroengine.gathered, whose end writes values back
    CAPTURE = enum.auto()  # of a CUDA graph
    BACKWARD = enum.auto()  # of this thread
    FORWARD = enum.auto()  # of the whole model


WEIGHTS = Inside.STREAM | Inside.AVERAGES
ALL_BUT_FORWARD = WEIGHTS | Inside.GATHERED | Inside.BACKWARD
ALL = ALL_BUT_FORWARD | Inside.FORWARD


@dataclass(frozen=True)
class PublicCall:
    """A public call, and what it requires.

    Attributes:
        name: The call in messages, such as "stream_weights()".
        purpose: What it is made for, in the message of the other ranks, such as "to stream weights".
        not_inside: What it may not be made inside of.
        states: The states that must be on the device.
        needs_store: Whether the states on a disk or in CPU memory must be whole: no update has failed half way.
        needs_own_parameters: Whether no parameter may have been added to the model, which the call would miss.
        ends_backward: Whether a plain ``loss.backward()`` that is over counts as ended, with its gradients.
    """

    name: str
    purpose: str
    not_inside: Inside
    states: Sequence[str] = OFFLOADABLE_STATES
    needs_store: bool = False
    needs_own_parameters: bool = False
    ends_backward: bool = False

    def check(self, parts: EngineParts) -> None:
        """Check on this rank.

        Raises:
            ZeroEngineError: The call cannot be made now.
        """
        name, where, passes = self.name, self.not_inside, parts.passes
        if Inside.STREAM in where:
            passes.gatherer.check_no_stream(name)
        parts.loop.state_offloader.check_resident(name, self.states)
        if self.needs_store:
            parts.partition.placement.check_intact()
        if self.needs_own_parameters:
            parts.loop.foreign_parameters.check()
        if Inside.AVERAGES in where:
            passes.gatherer.check_has_weights(name)
        if Inside.GATHERED in where and passes.gatherer.num_pins:
            raise ZeroEngineError(
                f"{name} inside `with zeroengine.gathered(...)`, whose end writes the gathered values back: leave the "
                "`with` first"
            )
        if Inside.CAPTURE in where and parts.ranks.group.device.type == "cuda":
            _check_outside_of_capture(name)
        if Inside.BACKWARD in where and current_graph_task_id() >= 0:
            raise ZeroEngineError(f"{name} inside of a backward, such as in a hook: call it after the backward")
        if Inside.FORWARD in where and passes.forward.num_model_forwards:
            raise ZeroEngineError(f"{name} inside of a forward: call it before")

    @contextmanager
    def on_all_ranks(self, parts: EngineParts, fact: T | None = None) -> Iterator[list[T]]:
        """Check on all ranks, and then what the block checks. If one rank refuses, all raise and nothing has changed.

        Args:
            parts: The parts of the engine.
            fact: See ``Group.collective_errors``.
        """
        if self.ends_backward:
            parts.passes.backward.end_if_over()
        with parts.ranks.group.collective_errors(self.purpose, fact) as facts:
            self.check(parts)
            yield facts


def _check_outside_of_capture(name: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise ZeroEngineError(
            f"{name} inside the capture of a CUDA graph: what it does on the host (counters, schedule, which "
            "gradients are overwritten) would not be done again at a replay. Leave it outside of the graph; what "
            "can be captured is the update itself, zeroengine.ops.UpdateTable."
        )
