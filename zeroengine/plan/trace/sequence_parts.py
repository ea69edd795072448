"""Let a traced model compute with one rank's parts of sequences, without other ranks.

[Note: What is traced]
The replica is connected as ``initialize`` connects the model, to a transport that moves nothing. So the trace sees what
a rank computes and holds: its own tokens, except in attention, which goes over the whole sequence with a part of the
heads.

[Note: Tiles that are traced]
A trace of a thousand tiles takes a minute. Of a loss one tile and one block of it are traced, which count as all: they
leave nothing behind. Of an MLP the first tile, which counts as all but one, and the last: their gradients of the
weights are added. The others copy their tokens, so outputs and gradients of all tokens exist, and count no operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroengine.comm.interfaces import ResizableBuffer
from zeroengine.config.tiling import Tiling
from zeroengine.monitor.timer import Timer
from zeroengine.plan.trace.operation_trace import OperationTrace
from zeroengine.plan.trace.standard_decoder import StandardDecoder
from zeroengine.sequence import tiled_loss, tiled_mlp, tiled_models, transformers_models
from zeroengine.sequence.agreement import RankComparison
from zeroengine.sequence.group import SequenceGroup
from zeroengine.utils.torch_internals import unset_fake_temporarily
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
    comparison = RankComparison(transport, torch.device("cpu"), transport.world_size)
    # The replica has a group of its own at a size of 1, too. So it never takes that of an engine of this process.
    group = SequenceGroup(model, transport, (transport.rank, transport.world_size), comparison, Timer(), undo)
    # The group lasts as long as the stack, and nothing else refers to it where it has one rank.
    undo.callback(lambda: group)
    if group.size > 1:
        transformers_models.connect(model, group, undo)


def connect_tiles(model: nn.Module, tiling: Tiling, trace: OperationTrace, device: str, undo: ExitStack) -> None:
    """Let ``model`` compute in tiles, as ``initialize`` does, and trace few of them. See "Tiles that are traced".

    Args:
        model: The replica that is traced.
        tiling: What to tile. Tiles that a model makes itself are traced in the same way.
        trace: The trace.
        device: ``cpu`` or ``cuda``, which has larger tiles.
        undo: Ends it.
    """
    replace = partial(transformers_models.replace_attribute, undo=undo)
    replace(tiled_loss, "slices", partial(_first_slice, trace))
    replace(tiled_mlp, "run_tiles", partial(_run_tiles, trace))
    # A fake tensor has a class already.
    replace(tiled_models, "_lazy", unset_fake_temporarily()(tiled_models._lazy))
    replace(tiled_loss, "CPU_BYTES", tiled_loss.CPU_BYTES if device == "cpu" else tiled_loss.GPU_BYTES)
    # The model of plain numbers stands for any, and has no tiles.
    if not isinstance(model, StandardDecoder):
        tiled_models.tile_model(model, tiling, undo)


def _first_slice(trace: OperationTrace, length: int, size: int) -> Iterator[slice]:
    with trace.counted(-(-length // size)):
        yield slice(0, size)


def _run_tiles(trace: OperationTrace, run: Callable[..., Any], tiles: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if len(tiles) < 3:
        return list(map(run, tiles))
    first, *others, last = tiles
    count, stack = len(tiles) - 1, ExitStack()
    with trace.counted(count):
        outputs = [run(first)]
    if first.requires_grad:
        # Backward comes to the first tile when it is done with the others. Its hooks hold no tensor.
        outputs[0].register_hook(lambda _: stack.enter_context(trace.counted(count)))
        first.register_hook(lambda _: stack.close())
    end = run(last)
    with trace.counted(0):
        return [*outputs, *(tile * 1 for tile in others), end]
