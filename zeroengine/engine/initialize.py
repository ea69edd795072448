"""Makes an engine from a model and a configuration, after checks on every rank that change nothing."""

from __future__ import annotations

import contextlib
import logging
import socket
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroengine.comm.group import Group, device_of_model
from zeroengine.comm.launched_ranks import join_launched_ranks
from zeroengine.comm.model_group import check_model_groups, open_expert_group, open_model_groups
from zeroengine.comm.process_group_argument import as_process_group, shard_ranks_of
from zeroengine.comm.replicas import open_replicas
from zeroengine.comm.transports.choose import open_transport
from zeroengine.comm.watchdog import host_name
from zeroengine.config import Config, ConfigLike, load
from zeroengine.deferred_init import meta_init
from zeroengine.engine import model_checks
from zeroengine.engine.agreement import check_agreement
from zeroengine.engine.assembly import build_parts
from zeroengine.engine.engine import Engine
from zeroengine.engine.gathered import owner_of
from zeroengine.engine.memory import add_advice, is_out_of_memory
from zeroengine.engine.mpu_slices import note_slices_of_mpu
from zeroengine.engine.optional_packages import choose_states
from zeroengine.engine.overlapping_tensors import check_overlaps
from zeroengine.engine.progress import announce, describe_start
from zeroengine.engine.setup import EngineSetup, PartitionUndo
from zeroengine.engine.split_models import Split, split_model, split_of_config
from zeroengine.engine.unit_plans import plan_units
from zeroengine.errors import ZeroEngineError
from zeroengine.memory.free_memory import measure_free_memory
from zeroengine.memory.state_bytes import RankTopology
from zeroengine.memory.state_memory import StateMemory, fit_configuration
from zeroengine.migration.messages import explains_arguments
from zeroengine.offload.device_copies import GPUCopies
from zeroengine.optim.factory import OptimizerLike, make_optimizer
from zeroengine.optim.lr_schedules import LRSchedulerLike
from zeroengine.partition.cut import check_has_parameters
from zeroengine.partition.replicas import ReplicaLayout
from zeroengine.partition.slices import ModelLayout
from zeroengine.runtime import mixed_precision
from zeroengine.runtime.dtensors import SplitOver, limit_waits, note_slices
from zeroengine.runtime.quantized_parameters import split_quantized_parameters
from zeroengine.sequence.tiled_models import tile_model
from zeroengine.utils.formats import counted
from zeroengine.utils.torch_internals import check_torch

log = logging.getLogger("zeroengine")


@explains_arguments
def initialize(
    model: nn.Module,
    optimizer: OptimizerLike | ConfigLike = None,
    config: ConfigLike | None = None,
    *,
    lr_scheduler: LRSchedulerLike = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    mpu: Any = None,
) -> Engine:
    """Partition ``model`` and its optimizer over the data-parallel ranks, and return the engine that trains it.

    Call it on every rank, with the same arguments. If torch.distributed is not initialized, this initializes it (NCCL
    on CUDA, Gloo on CPU) over the ranks that zero-launch, torchrun, mpirun or srun started, or for this process alone.
    All ranks get rank 0's parameters and buffers, and the model keeps its ``nn.Parameter`` objects with their shapes
    and names. What cannot fit into free memory is refused before anything is allocated (``memory_check``).

    Args:
        model: Any module with parameters, ordinary or built under ``meta_init``. In bf16 or fp16 mixed precision its
            floating-point parameters are converted to that dtype, and the fp32 master weights keep their exact values.
        optimizer: A ``torch.optim`` optimizer over the model's parameters, a list of several, a callable that takes
            parameters, or None to build it from the configuration. Adam and AdamW run on the fused kernel; any
            optimizer works that looks at one parameter at a time. Parameters that it leaves out count as frozen, with
            one notice: no gradients are computed for them, and the norm is without them. A model without trainable
            parameters, which only runs forwards, needs none: ``initialize(model, config)``. See ``docs/inference.md``.
        config: A JSON, YAML or HJSON file, a dict, or None for the file that zero-launch names.
        lr_scheduler: A torch scheduler over the optimizer, or a callable that makes one; ``Engine.step`` steps it after
            each update, and its own ``step`` raises until ``Engine.close``.
        process_group: The ranks to partition over, as a process group or a ``DeviceMesh`` of one dimension, such as
            ``mesh["dp"]``. A mesh of two, whose names end in "replicate" and "shard", is hybrid sharding (HSDP): the
            stage partitions over the ranks of the second. None: all ranks.
        mpu: For models whose plain parameters are slices, as Megatron's: an object with the methods
            ``get_model_parallel_{group,world_size,rank}`` and ``get_data_parallel_group``. See
            ``docs/tensor-parallelism.md``.

    Raises:
        ZeroEngineError: The input is wrong. Raised on every rank; the message says what to write instead.
    """
    if config is None and isinstance(optimizer, str | Path | Mapping | Config):
        # No optimizer is any of these.
        optimizer, config = None, optimizer
    # Anything else is refused where the optimizer is made.
    return make_engine(model, cast("OptimizerLike", optimizer), config, lr_scheduler, process_group, mpu=mpu)


def make_engine(
    model: nn.Module,
    optimizer: OptimizerLike,
    config: ConfigLike | None,
    lr_scheduler: LRSchedulerLike = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    mpu: Any = None,
    async_step: bool | None = None,
    copies: GPUCopies | None = None,
) -> Engine:
    """Make the engine of ``initialize``. Tests choose ``async_step`` and ``copies``; see ``EngineSetup``."""
    check_torch()
    with contextlib.ExitStack() as on_error:
        # It makes the model ordinary again, here after an error and later when the engine ends.
        undo = on_error.enter_context(contextlib.ExitStack())
        # The process group comes first, because errors of the checks below are exchanged over it.
        join_launched_ranks()
        ranks = as_process_group(process_group)
        group = Group(ranks, device_of_model(model, ranks))
        shard_ranks = shard_ranks_of(process_group)
        own = _OwnFacts(uuid.uuid4().hex, host_name() or socket.gethostname())
        # A mistake may be visible on one rank only, such as a missing file. Every rank raises, so that none waits: here
        # before the ranks split a model together, and below.
        with group.collective_errors("to initialize", own) as asked:
            _check_model(model, optimizer)
            settings = config if isinstance(config, Config) else load(config)
            own.split = split_of_config(model, settings, ranks, mpu)
        ranks_per_node = group.ranks_per_node([fact.machine for fact in asked])
        with group.collective_errors("to initialize", own) as facts:
            split_quantized_parameters(model, undo)
            split_model(model, optimizer, [fact.split for fact in asked])
            own.split_over = note_slices(model, ranks, undo)
            if mpu is not None:
                own.split_over = note_slices_of_mpu(model, mpu, settings.tensor_parallel.slices, ranks, undo)
            tile_model(model, settings.tiling, undo)
            # The optimizer is built over the model's own parameters, which are not partitioned yet. Parameters that it
            # leaves out count as frozen, which affects the model's dtype and how it is cut.
            base_optimizer, notice = make_optimizer(optimizer, model, settings, undo)
            undo.push(partial(_restore_hyperparameters, base_optimizer, [dict(g) for g in base_optimizer.param_groups]))
            # Some settings depend on the model's dtype or the number of ranks.
            dtype = mixed_precision.dtype_of_model(model, settings)
            # Each model group counts as one rank: it computes its samples together.
            own_group = own.split_over.model or (group.rank,)
            num_data_ranks = group.world_size // len(own_group)
            resolve = partial(
                Config.resolve,
                world_size=group.world_size,
                model_dtype=dtype,
                ranks_per_node=_data_ranks_per_node(own_group, ranks_per_node),
                shard_ranks=shard_ranks,
                ranks_per_model=len(own_group),
            )
            requested, settings = settings, resolve(settings)
            for low in (settings.low_precision, settings.autocast_dtype):
                if low is not None:
                    mixed_precision.check_supported(low, group.device)
            meta_init.check_optimizer_state(base_optimizer)
            replica_ranks = settings.replica_ranks(num_data_ranks)
            plans = plan_units(model, base_optimizer, settings, replica_ranks)
            # Deferred parameters get their values last, because this takes memory and time.
            meta_init.initialize_meta_parameters(model)
        # Ranks that call methods of different engines then find out.
        group.divergence.name_engine(facts[0].engine_name)
        # Nothing is partitioned yet. Ranks that differ would partition differently and exchange wrong values.
        check_agreement(group, settings, model, plans, base_optimizer)
        if notice is not None and group.rank == 0:
            log.warning("%s", notice)
        comm = settings.comm
        limit_waits(model, comm.timeout_seconds)
        replicas, model_groups = None, []
        if any(other.split_over.model is not None for other in facts):
            # Every rank has the same groups, and raises if they are wrong.
            model_groups = check_model_groups([other.split_over.model for other in facts])
            layout = ModelLayout.of_groups(model_groups, group.rank)
            replicas = open_model_groups(group, layout, comm.transport, comm.timeout_seconds)
        elif settings.local_steps is not None:
            replica_layout = ReplicaLayout(group.rank, group.world_size // replica_ranks, replica_ranks)
            replicas = open_replicas(group, replica_layout, comm.transport, comm.timeout_seconds)
        if replicas is not None:
            undo.callback(replicas.close)
        experts = None
        if any(other.split_over.experts is not None for other in facts):
            expert_layout = ModelLayout.of_groups(
                check_model_groups([other.split_over.experts for other in facts]), group.rank
            )
            watchdog = None if replicas is None else replicas.watchdog
            experts = open_expert_group(group, watchdog, expert_layout, comm.transport, comm.timeout_seconds)
            undo.callback(experts.close)
        sharing = group if replicas is None else replicas.group
        transport = open_transport(sharing, comm.transport, comm.timeout_seconds, comm.register_buffers)
        undo.callback(transport.close)
        # What cannot fit is refused before anything is allocated.
        device: Literal["cpu", "cuda"] = "cuda" if group.device.type == "cuda" else "cpu"
        num_replicas = group.world_size // replica_ranks
        between = () if replicas is None else (replicas.between.name,)
        topology = RankTopology(replica_ranks, device, transport.name, transport.ranks_per_host, num_replicas, *between)
        state_memory, notice = fit_configuration(
            StateMemory(plans, settings, topology, base_optimizer), partial(measure_free_memory, group), choose_states
        )
        if notice is not None and group.rank == 0:
            log.warning("%s", notice)
        # The prediction looks at the caller's optimizer, which the engine empties.
        start = describe_start(model, state_memory, replica_ranks, num_replicas, group.device)
        partition_undo = PartitionUndo()
        undo.push(partition_undo.end)
        setup = EngineSetup(
            model,
            base_optimizer,
            lr_scheduler,
            state_memory,
            async_step,
            copies,
            undo,
            partition_undo,
            requested,
            resolve,
            model_groups,
            experts,
        )
        try:
            engine = Engine(partial(build_parts, setup, group, replicas, transport))
        except RuntimeError as error:
            if is_out_of_memory(error):
                count = sum(plan.numel for plan in plans)
                holds = f"initialize() was partitioning {count:,} parameters over {counted(group.world_size, 'rank')}."
                add_advice(error, state_memory, group.device, holds)
            raise
        if group.rank == 0:
            announce(start)
        # The backend has copied the state that some optimizers have from the start. Unsharded it would only take
        # memory, and could be mistaken for the current state. Until here a failure leaves the optimizer as it was.
        base_optimizer.state.clear()
        engine.begin_replay()
        on_error.pop_all()
        return engine


@dataclass
class _OwnFacts:
    """What each rank tells the others.

    Attributes:
        engine_name: A random name, of which that of rank 0 counts.
        machine: The name of the rank's machine.
        split: How the model is to be split.
        split_over: The ranks that the model is split over.
    """

    engine_name: str
    machine: str
    split: Split = (1, 1, ())
    split_over: SplitOver = field(default_factory=SplitOver)


def _data_ranks_per_node(model_group: Sequence[int], ranks_per_node: int) -> int:
    """Return how many ranks of a machine have the same slices; 0 if this differs between machines."""
    if not ranks_per_node:
        return 0
    # The ranks of the group that each of its machines has.
    counts = set(Counter(rank // ranks_per_node for rank in model_group).values())
    count = counts.pop()
    return 0 if counts or ranks_per_node % count else ranks_per_node // count


def _check_model(model: nn.Module, optimizer: OptimizerLike) -> None:
    """Check that ``model`` is one that can be partitioned. Each check assumes that the previous ones passed."""
    if isinstance(model, Engine):
        raise ZeroEngineError("initialize() takes a torch.nn.Module, found an Engine, which initialize() returned")
    if not isinstance(model, nn.Module) and isinstance(optimizer, nn.Module):
        raise ZeroEngineError(
            f"initialize(model, optimizer, config) takes the model first; found {type(model).__name__}, and the "
            "model second, as DeepSpeed has it after args"
        )
    if not isinstance(model, nn.Module):
        raise ZeroEngineError(f"initialize() takes a torch.nn.Module, found {type(model).__name__}")
    if torch.is_inference_mode_enabled():
        raise ZeroEngineError(
            "initialize() inside torch.inference_mode(): parameters that are made there can never be trained. Call "
            "it outside; forwards of the engine may run inside."
        )
    model_checks.check_undistributed(model)
    check_has_parameters(model)
    model_checks.check_tensor_kinds(model)
    model_checks.check_unowned(model)
    model_checks.check_one_device(model)
    meta_init.check_not_recording()
    check_overlaps(model)


def _restore_hyperparameters(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], kind: object, error: object, trace: object
) -> None:
    """Undo what a schedule did to the groups, such as a learning rate of 0, where ``initialize`` failed after it."""
    if error is not None:
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(values)


def engine_of(model: nn.Module) -> Engine | None:
    """Return the engine that ``model`` was passed to.

    Args:
        model: The model, a part of it, or a module that contains it, such as a wrapper.

    Returns:
        None if there is no engine, or it was closed, released or deleted.

    Raises:
        ZeroEngineError: The parameters of ``model`` belong to several engines.
    """
    if not isinstance(model, nn.Module):
        raise ZeroEngineError(f"engine_of() takes a torch.nn.Module, found {type(model).__name__}")
    owners = {owner for param in model.parameters() if (owner := owner_of(param)) is not None}
    if len(owners) > 1:
        raise ZeroEngineError(
            "engine_of(): parts of this module belong to different engines. Pass one of the models that were passed to "
            "initialize()."
        )
    return owners.pop().engine() if owners else None
