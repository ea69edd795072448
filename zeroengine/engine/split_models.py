"""What a model whose parameters are split over ranks can do, and what is refused by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroengine.checkpoint.entries import StateEntry
from zeroengine.config import Config
from zeroengine.config.tensor_parallel import PartitionConfig
from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.parallelize import NUM_SHOWN, parallelize
from zeroengine.engine.ranks import Ranks
from zeroengine.errors import DivergenceError, ZeroEngineError
from zeroengine.optim.backends.torch_update import WholeUpdate
from zeroengine.optim.choice import rules_of
from zeroengine.optim.mixed_optimizer import members_of
from zeroengine.optim.state_digests import check_words
from zeroengine.partition.cut import UnitPlan, plain_name
from zeroengine.partition.slices import pieces_of_slice, whole_shape
from zeroengine.runtime.dtensors import dtensors_in, of_experts
from zeroengine.runtime.unit import Unit
from zeroengine.utils.formats import listed
from zeroengine.weights.tensor_reads import gather_run

# Over how many ranks layers and experts of a model are still to be split, and the layers with their styles; of none the
# model's own plan counts.
Split = tuple[int, int, tuple[tuple[str, str], ...]]


def split_of_config(model: nn.Module, config: Config, process_group: dist.ProcessGroup | None, mpu: object) -> Split:
    """Return how a configuration says that a model is still to be split; sizes of 1: it stays as it is.

    Raises:
        ZeroEngineError: The model is split otherwise, or the engine is to train on some of the ranks.
    """
    size, expert_size = max(config.tensor_parallel.autotp_size, 1), config.expert_parallel.size
    sizes = {of_experts(param.device_mesh): param.device_mesh.size() for _, param in dtensors_in(model)}
    if mpu is not None and (sizes or max(size, expert_size) > 1):
        raise ZeroEngineError(
            "initialize(mpu=...) is for plain parameters, and the model has DTensors, or the keys autotp_size and "
            "autoep_size split it: leave one of them out"
        )
    if mpu is None and config.tensor_parallel.slices:
        raise ZeroEngineError("tensor_parallel.slices are those of an mpu: pass initialize(mpu=...), or leave it out")
    partition = config.tensor_parallel.partition_config
    if partition.layer_specs and size == 1 and not sizes:
        raise ZeroEngineError(
            "tensor_parallel.partition_config says how layers are split, and nothing over how many ranks: write "
            '"autotp_size": 2 beside it'
        )
    if size == expert_size == 1:
        return 1, 1, ()
    if sizes:
        # An earlier engine may have split it.
        if (sizes.get(False, 1), sizes.get(True, 1)) == (size, expert_size):
            return 1, 1, ()
        raise ZeroEngineError(
            f"this model is split already, over {sizes.get(False, 1)} ranks and its experts over {sizes.get(True, 1)}, "
            f"and tensor_parallel and expert_parallel ask for {size} and {expert_size}: leave the keys out, or pass "
            "the model as it was before it was split"
        )
    if process_group is not None:
        raise ZeroEngineError(
            "tensor_parallel and expert_parallel split over groups of all ranks, and initialize() was passed "
            "process_group: split the model before, by torch's parallelize_module, or leave process_group out"
        )
    return size, expert_size, plan_of_specs(model, partition)


def plan_of_specs(model: Any, partition: PartitionConfig) -> tuple[tuple[str, str], ...]:
    """Return the styles of the layers that DeepSpeed's specs split, as ``parallelize`` takes them; without specs, none.

    Raises:
        ZeroEngineError: They split none.
    """
    if not partition.layer_specs:
        return ()
    model_type = str(getattr(getattr(model, "config", None), "model_type", None)).lower()
    specs = [s for s in partition.layer_specs if not s.model_types or model_type in map(str.lower, s.model_types)]
    plan = {}
    for name, module in model.named_modules():
        spec = next((s for s in specs if any(p.match(f"{plain_name(name)}.weight") for p in s.patterns)), None)
        if spec is None or spec.partition_type == "skip" or not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        # What embeddings and heads take and return is whole.
        is_outer = isinstance(module, nn.Embedding) or name.rpartition(".")[2] in partition.lm_head_patterns
        if spec.partition_type == "row" or isinstance(module, nn.Embedding):
            plan[plain_name(name)] = "rowwise_whole_input" if is_outer else "rowwise"
        else:
            plan[plain_name(name)] = "colwise_gathered" if is_outer or spec.gather_output else "colwise"
    if not plan:
        raise ZeroEngineError(
            "tensor_parallel.partition_config: the layer_specs split no layer. Patterns are regular expressions of "
            f"names from their beginning, such as: {listed([n for n, _ in model.named_parameters()], NUM_SHOWN)}"
        )
    return tuple(plan.items())


def split_model(model: nn.Module, optimizer: object, splits: Sequence[Split]) -> None:
    """Split the layers and experts of a model by its own plan. A collective, unless no rank is to split it.

    Args:
        model: The model.
        optimizer: What the user passed. An optimizer gets the slices.
        splits: What ``split_of_config`` returns on each rank.

    Raises:
        ZeroEngineError: The ranks have different ones, or there is no plan.
    """
    if len(set(splits)) > 1:
        shown = ", ".join(f"{size} and {expert_size}" for size, expert_size in dict.fromkeys(s[:2] for s in splits))
        raise ZeroEngineError(
            f"the ranks are to split layers and experts over different numbers of ranks, or other layers: {shown}. "
            "Give each rank the same tensor_parallel and expert_parallel, and the same model."
        )
    size, expert_size, plan = splits[0]
    if size > 1 or expert_size > 1:
        own = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        parallelize(model, dict(plan) or None, size=size, expert_size=expert_size, optimizer=own)


def check_split_model(config: Config, plans: Sequence[UnitPlan], optimizer: torch.optim.Optimizer) -> None:
    """Check that a configuration asks for nothing that split parameters do not support.

    Args:
        config: The resolved configuration.
        plans: The units of the model.
        optimizer: What updates them.

    Raises:
        ZeroEngineError: It does, or the optimizer needs whole parameters. The message names the key, or the parameter.
    """
    if not any(plan.is_split for plan in plans):
        return
    if config.digests.every is not None:
        check_words(plans, config)
    zero = config.zero_optimization
    refused = {
        'optimizer_state_dtype "int8"': config.optimizer_state_dtype == "int8",
        "local_steps": config.local_steps is not None,
        "sequence_parallel_size": config.sequence_parallel_size > 1,
    }
    for key, is_set in refused.items():
        if is_set:
            raise ZeroEngineError(
                f"{key} does not work with parameters that are split over ranks: leave it out, or pass the "
                "model as it was before it was split"
            )
    with_experts = {
        "zero_optimization.degrees": zero.degrees is not None,
        "zero_optimization.offload_optimizer": zero.offload_optimizer.device != "none",
        "zero_optimization.offload_param": zero.offload_param.device != "none",
        "zero_optimization.zero_quantized_weights": zero.zero_quantized_weights,
        "zero_optimization.zero_quantized_gradients": zero.zero_quantized_gradients,
    }
    for key, is_set in with_experts.items():
        if is_set and any(plan.expert_ranks for plan in plans):
            raise ZeroEngineError(
                f"{key} does not work with experts that are split over ranks: leave it out, or pass the model as it "
                "was before they were split"
            )
    # Which rule updates slices is asked as of shards, which are parts of parameters too.
    rules = zip(members_of(optimizer), rules_of(optimizer, plans, degree=2), strict=True)
    need_whole = {type(member).__name__ for member, rule in rules if rule is WholeUpdate}
    for plan in plans:
        if plan.is_split and plan.trainable and plan.algorithm.name in need_whole:
            raise ZeroEngineError(
                f"parameter {plan.params[0][0]} is split over ranks, and {plan.algorithm.name} needs whole parameters: "
                "let AdamW or zeroengine.Muon update it, or pass the model as it was before it was split"
            )


def assemble(ranks: Ranks, unit: Unit, index: int, values: torch.Tensor) -> torch.Tensor:
    """Return the values of a whole parameter, from those of its slices. A collective of the model group.

    Args:
        ranks: The ranks.
        unit: The unit of the parameter.
        index: The index of the parameter in it.
        values: Those of this rank's slice, or of the parameter if it is not split, which are returned then.
    """
    if not unit.is_split:
        return values
    param = unit.params[index]
    entry = StateEntry(whole_shape(param), values.dtype, pieces_of_slice(param, 0, values.reshape(-1)))
    return gather_run(entry, 0, math.prod(entry.shape), ranks.model_group(unit), values.device).view(entry.shape)


def explain_layer_error(error: BaseException, parts: EngineParts) -> None:
    """Raise an error that names ranks, if ``error`` is that of a collective of a split layer, which torch issues.

    Raises:
        DivergenceError: Another rank of the layer did not come to it.
    """
    if parts.setup.is_split and "gloo/transport" in str(error) and not isinstance(error, DivergenceError):
        group = parts.ranks.group
        raise group.divergence.error(
            f"rank {group.rank} could not finish a collective of a layer that is split over ranks ({error}): "
            "another rank of the layer has ended, does not answer, or has made other calls, or the ranks have "
            "inputs of different shapes. Give the ranks of a model group the same batches, as "
            "engine.dataloader(dataset) does."
        ) from error
