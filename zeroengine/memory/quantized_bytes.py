"""Bytes that quantized communication takes: what stays, and the packets, which are transient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroengine import ops
from zeroengine.comm.packing import is_quantizable
from zeroengine.comm.quantized_transport import GATHER_BITS
from zeroengine.config import Config
from zeroengine.memory.gradient_buffer_bytes import MAX_IN_FLIGHT
from zeroengine.memory.unit_bytes import UnitBytes


def kept_bytes(
    units: Sequence[UnitBytes], config: Config, world_size: int, *, keeps_packets: bool, sums_by_host: bool
) -> int:
    """Return the most bytes that stay: errors of gradients, and the packets to send.

    Args:
        units: The units.
        config: The resolved configuration.
        world_size: The number of ranks.
        keeps_packets: Whether the transport keeps the memory that it sends from, as shared memory does.
        sums_by_host: Whether sums are packed for other hosts alone, in the memory between hosts. Otherwise each rank
            packs its own.
    """
    if world_size == 1:
        return 0
    sending = [unit for unit in units if _sends_packets(unit, config)]
    has_errors = config.zero_optimization.zeropp_loco_param is not None
    nbytes = has_errors * sum(unit.layout.numel for unit in sending) * torch.bfloat16.itemsize
    if keeps_packets:
        # Each size has buffers of its own, and so have gathers and sums.
        gathered = {_shard_packet_bytes(unit) for unit in units if _gathers_packets(unit, config)}
        # An all-reduce exchanges slices, and then gathers their sums.
        summed = {
            _sum_packet_bytes(unit, config, world_size) * (unit.num_sum_slices(world_size) + (unit.sum_degree == 1))
            for unit in sending
            if not sums_by_host
        }
        nbytes += MAX_IN_FLIGHT * (sum(gathered) + sum(summed))
    return nbytes


def transient_bytes(units: Sequence[UnitBytes], config: Config, world_size: int, *, sums_by_host: bool) -> int:
    """Return the most bytes of packets of sums and gathers that are under way at once, as far as they do not stay.

    See ``kept_bytes`` for the arguments.
    """
    if world_size == 1:
        return 0
    # A rank sends and receives as many packets as ranks take part.
    gathers = [
        2 * _shard_packet_bytes(unit) * unit.degrees.parameters for unit in units if _gathers_packets(unit, config)
    ]
    sums = [
        2 * world_size * _sum_packet_bytes(unit, config, world_size)
        for unit in units
        if _sends_packets(unit, config) and not sums_by_host
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


def _sum_packet_bytes(unit: UnitBytes, config: Config, world_size: int) -> int:
    """Return the bytes of a packet of one slice of a unit's gradients."""
    bits = config.zero_optimization.gradient_bits
    assert bits is not None
    return ops.packet_bytes(unit.layout.numel // unit.num_sum_slices(world_size), bits)
