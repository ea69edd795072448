"""Let a traced model compute with one rank's parts of sequences, without other ranks.

[Note: What is traced]
The replica is connected as ``initialize`` connects the model, to a transport that moves nothing. So the trace sees what
a rank computes and holds: its own tokens, except in attention, which goes over the whole sequence with a part of the
heads. What tiles save (``tiling``) and hidden states that leave the device (``cpu_checkpointing``) are counted as if
they stayed: a loss in tiles depends on the values of labels, and a trace of a thousand tiles takes a minute. The bytes
of one tile, and of what is fetched ahead, would take their places in ``connect_parts``.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from zeroengine.comm.interfaces import ResizableBuffer
from zeroengine.monitor.timer import Timer
from zeroengine.plan.bytes.operation_trace import OperationTrace
from zeroengine.sequence import transformers_models
from zeroengine.sequence.agreement import RankComparison
from zeroengine.sequence.group import SequenceGroup, hide_groups
from zeroengine.utils.work import Completed


class TracedTransport:
    """The transport of one rank, and its channel ``exchange``, as far as a ``SequenceGroup`` uses them.

    Attributes:
        sent_bytes: The bytes that all-to-alls took from the rank to others so far.
    """

    def __init__(self, trace: OperationTrace, size: int, device: str) -> None:
        # Where ranks share memory, as on CPUs, what they send from stays.
        self._trace, self.world_size, self.keeps_memory = trace, size, device == "cpu"
        self.rank, self.sent_bytes, self.exchange, self.has_peers = 0, 0, self, False

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See ``Transport``."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    def buffer(self, numel: int, dtype: torch.dtype, *, copied: bool) -> ResizableBuffer:
        """See ``Transport``."""
        return ResizableBuffer(self.empty(numel, dtype))

    def all_to_all(self, received: torch.Tensor, *_: Any) -> Completed:
        """Count the bytes, but not those that ``SequenceGroup.all_gather`` exchanges: a few numbers."""
        if received.is_floating_point():
            self.sent_bytes += self._trace.weight * received.nbytes * (self.world_size - 1) // self.world_size
        return Completed()

    def reusable(self, work: object, timeout_s: float) -> bool:
        """Say that peers have read what was sent, as an exchange in shared memory ends when they have."""
        return True


def connect_parts(model: nn.Module, transport: Any, undo: ExitStack) -> None:
    """Let ``model`` compute with the parts of sequences of one rank.

    Args:
        model: The replica that is traced.
        transport: The ``TracedTransport`` of that rank.
        undo: Ends it.
    """
    hide_groups(undo)
    if transport.world_size > 1:
        # Functions without an engine hold no reference to a group that they find.
        comparison = RankComparison(transport, torch.device("cpu"), transport.world_size)
        transport.group = SequenceGroup(transport, comparison, Timer(), undo)
        transformers_models.connect(model, transport.group, undo)
