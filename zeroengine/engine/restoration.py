"""Makes the model ordinary again when an engine ends, or when ``initialize`` fails halfway."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType

import torch
from torch import nn

from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Transport
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import DivergenceError, ReleasedParameterError, ZeroEngineError
from zeroengine.memory.free_memory import measure_free_memory
from zeroengine.offload.placement import Placement
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.runtime.released_parameter import stop_observing
from zeroengine.runtime.unit import Unit
from zeroengine.utils.formats import listed
from zeroengine.utils.host_memory import trim_heap

log = logging.getLogger("zeroengine")

# The number of parameters that a message names.
NUM_SHOWN = 5


class Restoration:
    """Makes all parameters whole and ordinary, with their current values.

    It is called as an exit callback of a ``contextlib.ExitStack``. Partitioned parameters take a collective, so after
    an error they are restored only if every rank has that error. Otherwise each use of such a parameter raises.

    Args:
        group: All ranks.
        data_group: Returns the ranks that a unit is partitioned over.
        transport: Moves bytes between these ranks.
        placement: Holds the stores of offloaded states.
        units: The units that have been made. The list may grow until the end.

    Attributes:
        shards: The shards of the optimizer that have been made, which hold the fp32 master weights of their units.
        reason_not_whole: Why nothing takes a collective any more; "" unless ``leave_partitioned`` was called.
    """

    def __init__(
        self,
        group: Group,
        data_group: Callable[[Unit], Group],
        transport: Transport,
        placement: Placement,
        units: Sequence[Unit],
    ) -> None:
        self._group, self._data_group, self._transport = group, data_group, transport
        self._placement, self._units = placement, units
        self.shards: list[OptimizerShard] = []
        self.reason_not_whole = ""

    def forget(self) -> None:
        """Restore nothing: another partitioning takes over what the units hold."""
        self._units = ()
        self.shards.clear()

    def check_room(self) -> None:
        """Check that whole parameters fit into the memory of every rank. A collective.

        Raises:
            ZeroEngineError: They do not fit on some rank. Raised on every rank.
        """
        nbytes = sum(
            slot.numel * dtype.itemsize
            for unit in self._units
            if unit.is_releasable
            for slot, dtype in zip(unit.layout.slots, unit.originals.dtypes, strict=True)
        )
        # Where all parameters are whole already, the ranks need not meet.
        if not nbytes:
            return
        free = measure_free_memory(self._group, ())
        if nbytes > free.device:
            raise ZeroEngineError(
                f"whole parameters take {nbytes / 2**30:,.1f} GiB on each rank, and {free.device / 2**30:,.1f} GiB are "
                f"left on rank {free.scarcest_rank}. Write them with engine.save_weights(directory), a part on each "
                "rank, and load them into a model elsewhere."
            )

    def leave_partitioned(self, reason: str) -> None:
        """Restore only parameters that take no collective. The error of each use of the others states ``reason``."""
        # A single process takes no collective.
        if self._group.world_size > 1:
            self.reason_not_whole = reason
            if any(unit.is_releasable for unit in self._units):
                log.warning("partitioned parameters no longer have values: %s", reason)

    def __call__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Restore the parameters. This is a collective, unless ``error`` was raised on this rank alone."""
        reason = self.reason_not_whole
        alone = self._group.world_size == 1
        if not (alone or error is None or self._group.is_error_of_all_ranks(error)):
            reason = f"initialize() failed on some rank ({type(error).__name__}: {error})"
        if error is not None and self._group.rank == 0:
            self._warn_of_rounded_parameters()
        # Copies between the device and the host may still be in progress.
        self._placement.finish_copies()
        shard_of = {shard.unit: shard for shard in self.shards}
        # Parameters that were made in inference mode could never be trained.
        with torch.inference_mode(False), torch.no_grad():
            for unit in self._units:
                for param in unit.params:
                    stop_observing(param)
                if not reason and unit.move_writes_to_shard() and unit in shard_of:
                    shard_of[unit].reload_master()
                if not reason and unit.restores_from_master:
                    unit.restore_parameters(list(self._master_values(unit, shard_of.get(unit))))
                elif not (reason and unit.is_releasable):
                    try:
                        unit.gather_whole()
                        unit.restore_parameters()
                    # After the last step, which another rank has not ended.
                    except DivergenceError as divergence:
                        unit.abandon_parameters(partial(raise_abandoned, f"the ranks have diverged: {divergence}"))
                else:
                    unit.abandon_parameters(partial(raise_abandoned, reason))
        if not reason:
            # A peer may still read the last parameters from this rank's memory, which is freed next.
            self._transport.fence()
        trim_heap()

    def _warn_of_rounded_parameters(self) -> None:
        """Warn of parameters whose original values a failed ``initialize`` has lost: no fp32 master has them."""
        rounded = [
            slot.name
            for unit in self._units
            for slot, dtype in zip(unit.layout.slots, unit.originals.dtypes, strict=True)
            if dtype.itemsize > (4 if unit.has_master else unit.dtype.itemsize)
        ]
        if rounded:
            log.warning(
                "initialize() failed after it had rounded parameters, frozen ones or in fp64, to lower precision: %s. "
                "Build the model anew to use it in another precision.",
                listed(rounded, NUM_SHOWN),
            )

    def _master_values(self, unit: Unit, shard: OptimizerShard | None) -> Iterator[torch.Tensor]:
        """Yield the whole fp32 values of each parameter of ``unit``."""
        if shard is not None and shard.may_be_written:
            shard.reload_master()
        master = unit.initial_master if shard is None else shard.master
        assert master is not None
        for index, slot in enumerate(unit.layout.slots):
            value = torch.zeros(slot.numel, dtype=torch.float32, device=self._group.device)
            # If the degree is below the number of ranks, several ranks hold each shard, and the first one sends it.
            if unit.rank < unit.degrees.optimizer:
                for span in unit.layout.spans(unit.rank, unit.degrees.optimizer):
                    if span.param_index == index:
                        values = master[span.shard_offset : span.shard_offset + span.numel]
                        # If a disk fails this raises, whereas a plain read would end the process.
                        populate(values)
                        value[span.param_offset : span.param_offset + span.numel] = values.to(value.device)
            self._data_group(unit).all_reduce(value, f"of the masters of {slot.name}")
            yield value.view(slot.shape)


def raise_abandoned(reason: str, param: nn.Parameter, operation: str) -> None:
    """Refuse a use of a parameter that lost its values because of ``reason``."""
    raise ReleasedParameterError(
        f"`{operation}` of a partitioned parameter of shape {tuple(param.shape)}: its values are not here, because "
        f"{reason}. Build the model anew, and load its weights."
    )
