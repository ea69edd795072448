"""Splits the layers of a model over ranks, by torch's parallel styles or by the plan of the model's library."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroengine.comm.group import Group, device_of_model, start_torch_distributed
from zeroengine.comm.launched_ranks import join_launched_ranks
from zeroengine.deferred_init import meta_init
from zeroengine.deferred_init.parameter import attach_trace, trace_of
from zeroengine.engine.optional_packages import split_by_own_plan
from zeroengine.errors import ZeroEngineError
from zeroengine.partition.cut import plain_name
from zeroengine.runtime.dtensors import dtensors_in
from zeroengine.utils.formats import listed
from zeroengine.utils.torch_internals import mesh_without_processes

# The names of the styles that a plan may have, besides styles of ``torch.distributed.tensor.parallel``.
STYLES = ("colwise", "colwise_gathered", "rowwise", "rowwise_whole_input")
NUM_SHOWN = 8


def parallelize(
    model: nn.Module,
    plan: Mapping[str, Any] | None = None,
    *,
    size: int | None = None,
    expert_size: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
) -> nn.Module:
    """Split layers of ``model`` over groups of ``size`` consecutive ranks, in place (tensor parallelism).

    The experts of a model of transformers can be split as well, over groups of ``expert_size`` (expert parallelism).

    The ranks of a group compute each sample together, so give them the same batches: ``engine.dataloader`` does. Call
    it on every rank, with the same model, before ``initialize``, which partitions what each rank then has over the
    ranks with the same slices.

    Args:
        model: A module whose parameters all ranks have whole, or have no values yet (``meta_init``); then no rank ever
            has all of them. Those of the first rank of each group count.
        plan: By pattern of module names (``fnmatch``, such as ``"blocks.*.up"``) how to split a ``Linear`` or
            ``Embedding``: ``"colwise"`` splits what it returns, which the next layer takes as ``"rowwise"``;
            ``"colwise_gathered"`` returns the whole; ``"rowwise_whole_input"`` takes the whole, as an embedding does;
            or a style of ``torch.distributed.tensor.parallel``. None: the plan of a model of transformers.
        size: The ranks of a group. It divides their number. 1: layers are not split. A plan needs it.
        expert_size: The ranks that hold all experts together, and send tokens to one another. It divides the number of
            ranks, and is a multiple of ``size``. 1: every rank has all experts.
        optimizer: One over the model's parameters, whose places the slices take.

    Returns:
        ``model``.

    Raises:
        ZeroEngineError: A size does not divide the ranks, a pattern matches no module, a style is not known, there is
            no plan, or only some ranks have values.
    """
    if plan is not None and size is None:
        raise ZeroEngineError("parallelize(model, plan) needs the number of ranks of a group: write size=2")
    size = 1 if size is None else size
    join_launched_ranks()
    device = device_of_model(model, None)
    start_torch_distributed(device)
    num_ranks = dist.get_world_size()
    _check_sizes(plan, size, expert_size, num_ranks)
    for name, param in dtensors_in(model):
        raise ZeroEngineError(
            f"parallelize(): parameter {name} is split already, over {param.device_mesh}: split it once"
        )
    if size == expert_size == 1:
        return model
    meshes = [
        dist.device_mesh.init_device_mesh(device.type, (num_ranks // number, number), mesh_dim_names=names)[names[1]]
        for number, names in ((size, ("data", "model")), (expert_size, ("expert_data", "experts")))
    ]
    _defer(model, Group(None, device))
    before = {id(param): name for name, param in model.named_parameters()}
    traces = [(name, trace) for name, param in model.named_parameters() if (trace := trace_of(param)) is not None]
    if plan is None:
        split_by_own_plan(model, meshes[0], meshes[1], num_ranks)
    else:
        _split(model, plan, meshes[0])
    after = dict(model.named_parameters(remove_duplicate=False))
    for name, trace in traces:
        # Of a slice that has no memory either. ``initialize`` computes the whole parameter and cuts it.
        attach_trace(after[name], trace)
    for group in optimizer.param_groups if optimizer is not None else ():
        group["params"] = [after[before[id(p)]] if id(p) in before else p for p in group["params"]]
    return model


def _defer(model: nn.Module, group: Group) -> None:
    """Let parameters that have no values get them in ``initialize``. A collective.

    Raises:
        ZeroEngineError: Some ranks have the values and others do not.
    """
    without = [name for name, param in model.named_parameters() if param.is_meta]
    # Torch sends slices of values, and of no others.
    if any(other != without for other in group.all_gather_object(without, "of parameters without values")):
        raise ZeroEngineError(
            "parallelize(): the model has no values yet (meta_init) on some ranks, and has some on others: build it in "
            "the same way on every rank"
        )
    meta_init.initialize_meta_parameters(model)


def split_on_meta(
    model: nn.Module, plan: Mapping[str, Any] | None, size: int, expert_size: int, num_ranks: int
) -> Mapping[str, Any]:
    """Split a model on the meta device as ``parallelize`` does, in the view of rank 0, without any other rank.

    Args:
        model: The model. Its parameters become ``DTensor``s, and it cannot compute.
        plan: See ``parallelize``.
        size: See ``parallelize``.
        expert_size: See ``parallelize``.
        num_ranks: The ranks of the job.

    Returns:
        The style of each layer by its name, and those of a plan of transformers also of parameters.

    Raises:
        ZeroEngineError: See ``parallelize``.
    """
    _check_sizes(plan, size, expert_size, num_ranks)
    meshes = mesh_without_processes(size, "model"), mesh_without_processes(expert_size, "experts")
    if plan is None:
        return split_by_own_plan(model, *meshes, num_ranks, parameters_alone=True)
    return _split(model, plan, meshes[0])


def _check_sizes(plan: Mapping[str, Any] | None, size: int, expert_size: int, num_ranks: int) -> None:
    for name, number in (("size", size), ("expert_size", expert_size)):
        if number < 1 or num_ranks % number:
            raise ZeroEngineError(
                f"parallelize({name}={number}): the number of ranks of this job, {num_ranks}, is no multiple of it. "
                "Start as many with zero-launch --nproc, or give another size (the keys autotp_size and autoep_size)."
            )
    if plan is not None and expert_size > 1:
        raise ZeroEngineError(
            "parallelize(expert_size=...) splits experts by the plan of a model of transformers: leave plan out, and "
            "the key tensor_parallel.partition_config. "
            'Experts of your own may be DTensors over a mesh whose dimension is named "experts".'
        )


def _split(model: nn.Module, plan: Mapping[str, Any], mesh: Any) -> Mapping[str, Any]:
    """Split what a plan names. Return the style of each layer as the plan has it, by the layer's name."""
    from torch.distributed.tensor import parallel
    from torch.distributed.tensor.placement_types import Replicate

    styles: dict[str, Callable[[], Any]] = {
        "colwise": parallel.ColwiseParallel,
        "colwise_gathered": lambda: parallel.ColwiseParallel(output_layouts=Replicate()),
        "rowwise": parallel.RowwiseParallel,
        "rowwise_whole_input": lambda: parallel.RowwiseParallel(input_layouts=Replicate()),
    }
    modules = {plain_name(name): module for name, module in model.named_modules() if name}
    tied = _tied(model)
    chosen: dict[str, Any] = {}
    for pattern, style in plan.items():
        if not isinstance(style, parallel.ParallelStyle) and style not in styles:
            raise ZeroEngineError(
                f"parallelize(): the style of {pattern!r} is {style!r}; write one of {', '.join(map(repr, STYLES))}, "
                "or a style of torch.distributed.tensor.parallel"
            )
        matches = fnmatch.filter(modules, pattern)
        if not matches:
            raise ZeroEngineError(
                f"parallelize(): the pattern {pattern!r} matches no module. Modules are named like: "
                f"{listed(list(modules), NUM_SHOWN)}"
            )
        for name in matches:
            if style in styles and not isinstance(modules[name], (nn.Linear, nn.Embedding)):
                raise ZeroEngineError(
                    f"parallelize(): {pattern!r} matches {name}, a {type(modules[name]).__name__}, and {style!r} "
                    "splits a Linear or an Embedding: write a pattern that matches those alone"
                )
            width = getattr(modules[name], "out_features", None) or getattr(modules[name], "embedding_dim", 0)
            if style == "colwise" and width % mesh.size():
                raise ZeroEngineError(
                    f"parallelize(): {name} returns {width} values, which {mesh.size()} ranks do not divide: in place "
                    'of "colwise" write torch\'s ColwiseParallel(use_local_output=False), before a "rowwise" layer'
                )
            chosen[name] = style
    # Nothing is split before all of the plan is known to be right.
    for name, style in chosen.items():
        way = style if isinstance(style, parallel.ParallelStyle) else styles[style]()
        parallel.parallelize_module(modules[name], mesh, way)
    _tie_again(tied)
    return chosen


def _tied(model: nn.Module) -> list[list[tuple[str, nn.Module, str]]]:
    """Return the places of each parameter that has several: their names, modules and attributes."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for key, param in module.named_parameters(recurse=False):
            places.setdefault(id(param), []).append((plain_name(f"{prefix}.{key}"), module, key))
    return [of_param for of_param in places.values() if len(of_param) > 1]


def _tie_again(tied: Sequence[Sequence[tuple[str, nn.Module, str]]]) -> None:
    """Let layers that were tied have one parameter again, which torch has split for each of them.

    Raises:
        ZeroEngineError: They are split in different ways.
    """
    for (first, module, key), *others in tied:
        param: Any = getattr(module, key)
        for name, other, attribute in others:
            twin: Any = getattr(other, attribute)
            if getattr(twin, "placements", None) != getattr(param, "placements", None):
                raise ZeroEngineError(
                    f"parallelize(): {first} and {name} are one parameter, and the plan splits it as "
                    f"{_way(param)} and as {_way(twin)}: name both layers, so that both split rows (an embedding "
                    '"rowwise_whole_input" and a head "colwise_gathered"), or neither'
                )
            setattr(other, attribute, param)


def _way(param: Any) -> str:
    return "/".join(map(str, getattr(param, "placements", ("a whole",))))
