"""The parts of an engine: records by lifetime, each complete when the function that builds it returns."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from zeroengine.checkpoint.newest import SnapshotStore
from zeroengine.checkpoint.on_signal import SaveOnSignal
from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Transport
from zeroengine.comm.replicas import Replicas
from zeroengine.comm.transports.choose import unused_keys
from zeroengine.config import Config
from zeroengine.engine.accumulation import Accumulation
from zeroengine.engine.call_checks import NUM_SHOWN
from zeroengine.engine.clipping import GradientClipping
from zeroengine.engine.earlier_partition import EarlierPartition
from zeroengine.engine.foreign_parameters import ForeignParameters
from zeroengine.engine.optional_packages import open_snapshots
from zeroengine.engine.parts import (
    EngineCalls,
    PartitionedModel,
    Passes,
    States,
    build_states,
    connect_passes,
    partition_model,
    place_model,
)
from zeroengine.engine.ranks import Ranks, connect_ranks
from zeroengine.engine.reports import Reports, start_reports
from zeroengine.engine.setup import EngineSetup
from zeroengine.engine.step import StepRunner
from zeroengine.offload.placement import Placement
from zeroengine.offload.state_offloader import StateOffloader
from zeroengine.optim.backends.interface import BackendParts, UpdateBackend
from zeroengine.sequence import model_check, transformers_models
from zeroengine.sequence.agreement import RankComparison
from zeroengine.sequence.group import SequenceGroup
from zeroengine.utils.formats import format_byte_size, listed
from zeroengine.utils.host_memory import trim_heap

log = logging.getLogger("zeroengine")
# From here on the fragments that full buffers of different sizes leave count.
_LARGE_BUFFER_BYTES = 1 << 26


@dataclass(frozen=True)
class LoopParts:
    """What a training loop goes through at each step, and what it may do between steps.

    Attributes:
        accumulation: Counts micro-steps, and decides which call may end a step.
        clipping: The largest norm of the gradient.
        step_runner: Clips, updates, steps the LR schedule, and counts.
        foreign_parameters: Finds parameters that ``initialize`` was not given.
        state_offloader: Moves states away from the device on request.
        save_on_signal: Saves a checkpoint when a signal arrives; None if that is not configured.
        snapshots: Keeps snapshots in the memory of hosts; None likewise.
        sequences: The ranks that share each sample.
    """

    accumulation: Accumulation
    clipping: GradientClipping
    step_runner: StepRunner
    foreign_parameters: ForeignParameters
    state_offloader: StateOffloader
    save_on_signal: SaveOnSignal | None
    snapshots: SnapshotStore | None
    sequences: SequenceGroup


@dataclass(frozen=True)
class EngineParts:
    """The parts of one engine.

    Attributes:
        setup: What the engine is made from.
        ranks: The ranks, and what moves bytes between them.
        reports: What reports on the run.
        partition: The model's parameters in units, and where the states of each unit live.
        passes: What forwards and backwards run through.
        states: What a step updates.
        loop: What a training loop goes through at each step.
        error_at_start: An error that was being handled when the engine began. See ``Engine.close``.
    """

    has_ended: ClassVar[bool] = False

    setup: EngineSetup
    ranks: Ranks
    reports: Reports
    partition: PartitionedModel
    passes: Passes
    states: States
    loop: LoopParts
    error_at_start: BaseException | None


class LastingParts(NamedTuple):
    """The parts that a change of the partitioning leaves as they are.

    Attributes:
        reports: What reports on the run.
        save_on_signal: Saves a checkpoint when a signal arrives; None if that is not configured.
        snapshots: Keeps snapshots in the memory of hosts; None likewise.
    """

    reports: Reports
    save_on_signal: SaveOnSignal | None
    snapshots: SnapshotStore | None


def build_parts(
    setup: EngineSetup, group: Group, replicas: Replicas | None, transport: Transport, calls: EngineCalls
) -> EngineParts:
    """Build the parts of one engine, which partitions the model. A collective.

    Args:
        setup: What the engine is made from.
        group: All ranks.
        replicas: The replicas of ``local_steps``, if there are several.
        transport: Moves bytes between the ranks of the replica.
        calls: What the parts call of the engine.
    """
    ranks = connect_ranks(setup, group, replicas, transport)
    reports = start_reports(setup, group)
    # The signal may be refused, so this comes while the model is still as it was.
    save_on_signal = SaveOnSignal(setup.config, group) if setup.config.checkpoint.on_signal else None
    if save_on_signal is not None:
        setup.undo.callback(save_on_signal.close)
    lasting = LastingParts(reports, save_on_signal, open_snapshots(setup, group))
    placement, backend = place_model(setup, ranks, reports.timer, "to initialize")
    return assemble(setup, ranks, lasting, placement, backend, calls, None)


def assemble(
    setup: EngineSetup,
    ranks: Ranks,
    lasting: LastingParts,
    placement: Placement,
    backend: Callable[[BackendParts], UpdateBackend],
    calls: EngineCalls,
    earlier: EarlierPartition | None,
) -> EngineParts:
    """Build the parts that depend on how the model is partitioned. A collective.

    Args:
        setup: What the engine is made from.
        ranks: The ranks.
        lasting: The parts that do not depend on it.
        placement: Where the states of each unit are to live.
        backend: Makes what updates them.
        calls: What the parts call of the engine.
        earlier: The partitioning before a change, whose states these parts take over; None: the model is ordinary.
    """
    group, reports, undo = ranks.group, lasting.reports, setup.partition_undo.hooks
    partition = partition_model(setup, ranks, placement, backend, earlier)
    comparison = RankComparison(ranks.sums, group.device, setup.config.sequence_parallel_size, setup.model_groups)
    # Replicas of ``local_steps`` have samples of their own.
    readers = ranks.replica_group if setup.model_groups else group
    reader = readers.rank, readers.world_size
    sequences = SequenceGroup(setup.model, ranks.transport, reader, comparison, reports.timer, undo)
    if sequences.size > 1:
        transformers_models.connect(setup.model, sequences, undo)
    passes = connect_passes(setup, ranks, partition, reports.timer, calls.listener)
    if sequences.size > 1:
        # The check comes before the engine's own hooks, which then see ordinary forwards.
        model_check.install(setup.model, sequences, undo)
    states = build_states(setup, ranks, partition, passes, reports.timer, calls, earlier)
    config, clipping = setup.config, GradientClipping(setup.config.gradient_clipping)
    micro_steps_per_step = None if config.manual_accumulation else int(config.gradient_accumulation_steps)
    loop = LoopParts(
        Accumulation(micro_steps_per_step, group.rank, passes.reducer),
        clipping,
        StepRunner(config, ranks, passes, states, clipping, reports),
        ForeignParameters(setup.model, partition.units, setup.base_optimizer),
        StateOffloader(config, group.rank, group.device),
        lasting.save_on_signal,
        lasting.snapshots,
        sequences,
    )
    # Whole parameters were freed in small pieces, which the C allocator would not return to the system.
    trim_heap()
    # Nothing above has failed, so gradients from before are dropped now.
    dropped = passes.reducer.user_gradients.drop()
    if group.rank == 0:
        _log_notices(config, ranks, partition, passes, None if earlier is None else earlier.notices)
        if dropped:
            log.warning(
                "%d parameters had a .grad from before initialize(), such as that of a test backward. It is dropped: "
                "no step uses it. (%s)",
                len(dropped),
                listed(dropped, NUM_SHOWN),
            )
    return EngineParts(setup, ranks, reports, partition, passes, states, loop, sys.exc_info()[1])


def _log_notices(
    config: Config, ranks: Ranks, partition: PartitionedModel, passes: Passes, known: Collection[str] | None
) -> None:
    """Log what the user should read. ``known``: what was logged before a change; None: there was none."""
    notices = [
        *(text for text in config.notices if text not in (known or ())),
        *unused_keys(config.comm, ranks.transport, ranks.group.device),
    ]
    zero = config.zero_optimization
    gathers = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
    if gathers and not any(unit.is_releasable for unit in partition.units):
        name = "zero_quantized_weights" if zero.zero_quantized_weights else "zero_quantized_nontrainable_weights"
        notices.insert(0, f"{name} has no effect: every rank holds the parameters whole, as at stages 0 to 2")
    if config.activation_checkpointing.cpu_checkpointing and passes.host_activations is None:
        notices.append("activation_checkpointing.cpu_checkpointing has no effect: activations are in CPU memory")
    sizes = {unit.numel * unit.dtype.itemsize for unit in partition.units if unit.is_releasable}
    if ranks.group.device.type == "cuda" and (advice := allocator_advice(sizes, os.environ)):
        notices.append(advice)
    if known is None:
        notices += _notices_of_changes(partition)
    for notice in notices:
        log.warning(notice)
    if config.dump_state:
        print(config.describe(), flush=True)


def allocator_advice(sizes: Collection[int], environment: Mapping[str, str]) -> str | None:
    """Return how to avoid fragments of GPU memory, which buffers of different sizes that come and go leave; or None.

    Args:
        sizes: The full buffers of units that are released between uses, in bytes.
        environment: The process's variables.
    """
    settings = environment.get("PYTORCH_ALLOC_CONF", "") + environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments" in settings or len(sizes) < 2 or max(sizes) < _LARGE_BUFFER_BYTES:
        return None
    return (
        f"{len(sizes)} sizes of gathered units, up to {format_byte_size(max(sizes))}, come and go in GPU memory, which "
        "leaves fragments: start with PYTORCH_ALLOC_CONF=expandable_segments:True"
    )


def _notices_of_changes(partition: PartitionedModel) -> Iterator[str]:
    """Yield notices of what ``initialize`` has changed in the parameters themselves."""
    if changed := [name for unit in partition.units for name in unit.originals.changed]:
        yield (
            f"frozen parameters were rounded by the cast to a lower precision: {listed(changed, NUM_SHOWN)}. Weights "
            "have lost precision; bytes that are packed in floats, as of 4-bit weights, have lost their meaning. Write "
            f'"keep_dtype": ["{changed[0]}"], or patterns of names, to keep them as they are. To round weights without '
            "this warning, cast them before initialize()."
        )
    if strided := [name for unit in partition.units for name in unit.originals.strided]:
        yield (
            f"parameters in channels_last, or with transposed strides, are contiguous until the engine ends, as shards "
            f"are: {listed(strided, NUM_SHOWN)}. Convolutions compute in channels_last where their inputs are: "
            "`x.to(memory_format=torch.channels_last)`."
        )
