"""Bytes that quantized communication takes: what stays, and the packets, which are transient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroengine import ops
from zeroengine.comm.packing import is_quantizable
from zeroengine.comm.quantized_transport import GATHER_BITS
from zeroengine.config import Config
from zeroengine.plan.bytes.gradient_buffer_bytes import MAX_IN_FLIGHT
from zeroengine.plan.bytes.two_level_bytes import packed_numel
from zeroengine.plan.bytes.unit_bytes import UnitBytes


def kept_bytes(
    units: Sequence[UnitBytes], config: Config, world_size: int, *, keeps_packets: bool, ranks_per_host: int = 0
) -> int:
    """Return the most bytes that stay: errors of gradients, and the packets to send.

    Args:
        units: The units.
        config: The resolved configuration.
        world_size: The number of ranks.
        keeps_packets: Whether the transport keeps the memory that it sends from, as shared memory does.
        ranks_per_host: The ranks of each host, where sums are packed for other hosts alone. 0: each rank packs its own.
    """
    if world_size == 1:
        return 0
    nbytes = 0
    if config.zero_optimization.zeropp_loco_param is not None:
        for unit in units:
            if _sends_packets(unit, config):
                numel = packed_numel(unit, world_size, ranks_per_host) if ranks_per_host else unit.layout.numel
                nbytes += numel * torch.bfloat16.itemsize
    if keeps_packets:
        # Each size has buffers of its own, and so have gathers and sums.
        gathered = {_shard_packet_bytes(unit) for unit in units if _gathers_packets(unit, config)}
        nbytes += MAX_IN_FLIGHT * sum(gathered)
        summed: set[int] = set()
        for unit in units:
            # The memory between hosts holds the packets of their sums.
            if _sends_packets(unit, config) and not ranks_per_host:
                summed |= _sent_bytes(unit, config, world_size)
        nbytes += MAX_IN_FLIGHT * sum(summed)
    return nbytes


def transient_bytes(units: Sequence[UnitBytes], config: Config, world_size: int, ranks_per_host: int = 0) -> int:
    """Return the most bytes of packets of sums and gathers that are under way at once, as far as they do not stay.

    See ``kept_bytes`` for the arguments.
    """
    if world_size == 1:
        return 0
    bits = config.zero_optimization.gradient_bits or GATHER_BITS
    # A rank sends and receives as many packets as ranks take part.
    gathers = [
        2 * _shard_packet_bytes(unit) * unit.degrees.parameters for unit in units if _gathers_packets(unit, config)
    ]
    sums = [
        2 * world_size * ops.packet_bytes(unit.layout.shard_numel(unit.num_sum_slices(world_size)), bits)
        for unit in units
        if _sends_packets(unit, config) and not ranks_per_host
    ]
    return sum(sum(sorted(sizes)[-MAX_IN_FLIGHT:]) for sizes in (gathers, sums))


def _sends_packets(unit: UnitBytes, config: Config) -> bool:
    bits = config.zero_optimization.gradient_bits
    return bits is not None and unit.gradients is not None and is_quantizable(unit.gradients.reduce_dtype)


def _gathers_packets(unit: UnitBytes, config: Config) -> bool:
    wanted = config.zero_optimization.quantizes_gathers(unit.plan.trainable)
    return wanted and unit.is_releasable and is_quantizable(unit.plan.dtype)


def _shard_packet_bytes(unit: UnitBytes) -> int:
    return ops.packet_bytes(unit.layout.shard_numel(unit.degrees.parameters), GATHER_BITS)


def _sent_bytes(unit: UnitBytes, config: Config, world_size: int) -> set[int]:
    """Return the sizes of the memory that a sum of this unit sends from."""
    bits = config.zero_optimization.gradient_bits
    assert bits is not None and unit.gradients is not None
    degree = unit.num_sum_slices(world_size)
    packet = ops.packet_bytes(unit.layout.numel // degree, bits)
    # An all-reduce exchanges slices, and then gathers their sums.
    is_all_reduce = unit.degrees.optimizer == 1
    return {degree * packet, packet} if is_all_reduce else {degree * packet}
