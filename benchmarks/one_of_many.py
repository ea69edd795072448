"""Rank 0 of many ranks, alone on its device, with the values that it would have among them.

What the other ranks would send is known as long as nothing changes it: the parameters that the model began with, and no
gradients. A communicator of one rank brings them from memory, over NCCL on a GPU and Gloo on a CPU. So collectives,
streams, works and the watchdog are real, the values are right, and what is left out is the wire.

With a learning rate of 0 every step has the loss of the first one. With another rate the shard of this rank changes and
what is gathered does not, so that only times mean something.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup  # noqa: F401  (registers the backend)

from zeroengine.comm.transports import nccl
from zeroengine.comm.watchdog import Watchdog
from zeroengine.engine import initialize as initialize_module
from zeroengine.runtime.full_buffer import param_views


class Communicator:
    """A communicator of one rank that answers for a group of many."""

    def __init__(self, device: torch.device, world_size: int) -> None:
        store = dist.HashStore()
        if device.type == "cuda":
            self._backend: Any = dist.ProcessGroupNCCL(store, 0, 1)
        else:
            self._backend = dist.ProcessGroupGloo(store, 0, 1)
        self._world_size = world_size
        # The values of all ranks, by the address of this rank's shard of them.
        self.sources: dict[int, torch.Tensor] = {}

    def rank(self) -> int:
        """Return this rank's number."""
        return 0

    def size(self) -> int:
        """Return the number of ranks that there seem to be."""
        return self._world_size

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Any:
        """Start to copy to `full` the values of all ranks, and return torch's work."""
        source = self.sources[shard.data_ptr()]
        assert source.dtype is full.dtype and source.shape == full.shape
        return self._backend._allgather_base(full, source)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Any:
        """Start to copy to `shard` the slice of rank 0, to which the others add nothing."""
        own = full[: shard.numel()]
        # Gloo's works of a reduce-scatter never say that they are completed. Of one rank, an all-gather is the same.
        is_gloo = isinstance(self._backend, dist.ProcessGroupGloo)
        return (self._backend._allgather_base if is_gloo else self._backend._reduce_scatter_base)(shard, own)

    def all_reduce(self, full: torch.Tensor) -> Any:
        """Start a sum to which the others add nothing."""
        return self._backend.allreduce([full])


class OneOfManyTransport(nccl.NCCLTransport):
    """NCCL's transport, whose orders are not compared with those of ranks that are not there."""

    has_peers = False

    def close(self) -> None:
        """End the watchdog."""
        assert self._watchdog is not None
        self._watchdog.close()


def join(device: torch.device, world_size: int) -> None:
    """Make this process rank 0 of ``world_size``."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
    real = dist.all_reduce
    nccl._all_gather = lambda full, shard, group, async_op: group.all_gather(full, shard)
    nccl._reduce_scatter = lambda shard, full, group, async_op: group.reduce_scatter(shard, full)

    def all_reduce(full: torch.Tensor, *arguments: Any, group: Any = None, **more: Any) -> Any:
        is_alone = isinstance(group, Communicator)
        return group.all_reduce(full) if is_alone else real(full, *arguments, group=group, **more)

    def open_transport(*_: Any) -> nccl.NCCLTransport:
        watchdog = Watchdog(dist.HashStore(), 0, [""] * world_size, 600.0)
        communicators = (Communicator(device, world_size) for _ in range(2))
        return OneOfManyTransport(*communicators, device, watchdog)  # type: ignore[arg-type]

    dist.all_reduce = all_reduce
    initialize_module.open_transport = open_transport  # type: ignore[assignment]


def initialize(model: nn.Module, config: dict[str, Any]) -> Any:
    """Return the engine of rank 0, whose gathers bring the values that ``model`` has now."""
    import zeroengine

    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine = zeroengine.initialize(model, config=config)
    gather: Any = engine._parts.ranks.transport.gather
    communicator = getattr(gather, "_inner", gather).group
    for unit in engine.units:
        if not unit.is_releasable:
            continue
        source = torch.zeros(unit.numel, dtype=unit.dtype, device=unit.shard.device)
        for slot, view in zip(unit.layout.slots, param_views(unit.layout, source), strict=True):
            view.copy_(values[slot.name])
        assert torch.equal(source[: unit.shard.numel()], unit.shard)
        communicator.sources[unit.shard.data_ptr()] = source
    return engine


# By parameter: which of its elements, flattened, and the sum of their gradients.
Gradients = dict[str, tuple[slice, torch.Tensor]]


def gradients_here(engine: Any) -> Gradients:
    """Return what this rank has of the gradients after a backward."""
    reducer, found = engine._parts.passes.reducer, {}
    reducer.launcher.wait()
    for unit_grads in reducer.gradients:
        unit, flat = unit_grads.unit, unit_grads.flat_grads
        for span in unit.layout.spans(unit.rank, unit.degrees.gradients):
            name = unit.layout.slots[span.param_index].name
            found[name] = span.param_slice, flat[span.shard_slice].detach().cpu().clone()
    return found


def losses_and_gradients(
    model: nn.Module, config: dict[str, Any], batches: list[tuple[torch.Tensor, ...]]
) -> tuple[list[float], list[Gradients]]:
    """Return the losses and the gradients of steps. Give them a learning rate of 0."""
    engine, losses, gradients = initialize(model, config), [], []
    for batch in batches:
        loss = engine(*batch)
        engine.backward(loss)
        gradients.append(gradients_here(engine))
        engine.step()
        losses.append(loss.item())
    engine.close()
    return losses, gradients


def is_part(part: Gradients, whole: Gradients) -> bool:
    """Return whether the gradients of a rank are a part, bit for bit, of those that another rank has whole."""
    return all(torch.equal(values, whole[name][1][where]) for name, (where, values) in part.items())
