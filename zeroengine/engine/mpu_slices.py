"""Models whose plain parameters are slices: an ``mpu`` says of which ranks, and marks or patterns of which dimension.

Megatron's models are such ones: each rank builds its slices, and the modules exchange activations themselves. What
their parameters are is noted as of ``DTensor``s, and all that follows asks these notes alone.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import nn

from zeroengine.engine.parallelize import NUM_SHOWN
from zeroengine.errors import ZeroEngineError
from zeroengine.partition.cut import plain_name
from zeroengine.partition.slices import SLICE_ATTRIBUTE, slice_of_plain_tensor
from zeroengine.runtime.dtensors import SplitOver, ranks_in_group
from zeroengine.utils.formats import listed

# What Megatron calls the ranks that split tensors today, and did before.
MODEL = ("tensor_model", "model")
PIPELINE = ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size")


def note_slices_of_mpu(
    model: nn.Module, mpu: Any, slices: Mapping[str, Any], process_group: dist.ProcessGroup | None, undo: ExitStack
) -> SplitOver:
    """Note for each parameter that is a slice which part it is of the parameter that the ranks have together.

    Args:
        model: The model, of plain parameters.
        mpu: Has the methods ``get_{kind}_parallel_{group,world_size,rank}`` of a kind of ``MODEL``, and
            ``get_data_parallel_group``.
        slices: The configuration's ``tensor_parallel.slices``.
        process_group: The ranks of the engine; None: all.
        undo: Forgets it again.

    Returns:
        The ranks that the parameters are split over.

    Raises:
        ZeroEngineError: The ``mpu`` lacks a method, its groups do not fit, a pattern matches nothing, or a parameter
            cannot be split as it is said.
    """
    group = dist.group.WORLD if process_group is None else process_group
    size, number = (ask_mpu(mpu, what, *MODEL) for what in ("world_size", "rank"))
    world_size = dist.get_world_size(group)
    if any(getattr(mpu, name, int)() > 1 for name in PIPELINE):
        raise ZeroEngineError("the mpu has pipeline parallelism, which is not supported: pass one of a single stage")
    parts = _parts(model, slices)
    if size == 1:
        # Plain data parallelism.
        return SplitOver()
    ranks = dist.get_process_group_ranks(ask_mpu(mpu, "group", *MODEL))
    # The ranks of the data groups follow from the model groups. Further kinds of parallelism make them fewer.
    num_copies = dist.get_world_size(ask_mpu(mpu, "group", "data"))
    if ranks[number : number + 1] != [dist.get_rank()] or len(ranks) != size or num_copies * size != world_size:
        raise ZeroEngineError(
            f"the mpu says that rank {dist.get_rank()} is number {number} of {size} in the model group {ranks}, and in "
            f"a data group of {num_copies}: let their product be the {world_size} ranks of initialize()"
        )
    if not parts:
        raise ZeroEngineError(
            'the mpu splits no parameter: write "tensor_parallel": {"slices": {"*.up.weight": 0}}, or mark them by '
            "param.tensor_model_parallel = True and param.partition_dim = 0, as Megatron does"
        )
    for name, param in model.named_parameters():
        if param in parts:
            part = slice_of_plain_tensor(name, tuple(param.shape), *parts[param], number, size)
            param.__dict__[SLICE_ATTRIBUTE] = part
            undo.callback(param.__dict__.pop, SLICE_ATTRIBUTE, None)
        elif getattr(param, "sequence_parallel", False):
            raise ZeroEngineError(
                f"parameter {name} is marked sequence_parallel: sum the parts of its gradient, by param.register_post_"
                "accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=group)), and set the mark to False"
            )
    return SplitOver(ranks_in_group(ranks, group))


def ask_mpu(mpu: Any, what: str, *kinds: str) -> Any:
    """Return what the first method that an ``mpu`` has of ``get_{kind}_parallel_{what}`` returns."""
    for name in (names := [f"get_{kind}_parallel_{what}" for kind in kinds]):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    raise ZeroEngineError(
        f"initialize(mpu=...) takes an object with the method {names[-1]}(), which {type(mpu).__name__} has not. Where "
        'ranks share samples alone, write "sequence_parallel_size", and no mpu.'
    )


def _parts(model: nn.Module, slices: Mapping[str, Any]) -> dict[nn.Parameter, tuple[int, int]]:
    """Return the dimension and the number of parts of each parameter that is a slice, by marks and by patterns."""
    named = {plain_name(name): param for name, param in model.named_parameters(remove_duplicate=False)}
    marked = [param for param in named.values() if getattr(param, "tensor_model_parallel", False)]
    # A mark without a dimension is an error: no parameter has this one.
    parts = {p: (getattr(p, "partition_dim", p.ndim), getattr(p, "partition_stride", 1)) for p in marked}
    for pattern, value in slices.items():
        matches = fnmatch.filter(named, pattern)
        if not matches:
            raise ZeroEngineError(
                f"tensor_parallel.slices: the pattern {pattern!r} matches no parameter. Parameters are named like: "
                f"{listed(list(named), NUM_SHOWN)}"
            )
        parts |= {named[name]: (value, 1) if isinstance(value, int) else tuple(value) for name in matches}
    return parts
