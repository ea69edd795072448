"""Replaces views of parameters that autograd saved by descriptions, whose unit can be gathered again.

[Note: Saved views]
Between forward and backward the graph holds tensors that its operations saved. Among these are weights, and views of
them such as the transpose that a matrix product saves. While they share the memory of a full buffer, it cannot be
freed. So when the forward of a module has ended, the part of the graph that it built is walked from its outputs. Each
saved tensor in a full buffer gets hooks (``SavedTensor.register_hooks``): the graph keeps a ``SavedView``, which takes
no memory, and reading it gathers the unit.

The usual way, ``torch.autograd.graph.saved_tensors_hooks`` around the forward, costs the host less (docs/benchmarks.md)
and sees every saved tensor. But torch.func refuses to run inside it, and it disables autograd's check for in-place
changes of all activations.

A custom Function may use a weight that it saved as more than values: ``weight.grad = ...`` in its backward, as fused
weight gradients do, or an attribute of the parameter. Autograd makes a new tensor of what a hook returns, so the
``saved_tensors`` of such a node return the parameter itself (``_return_parameters``).

The graph of a module is mostly that of its last forward, so a walk records the route to the nodes that had saved views:
see ``graph_route.py``.

Graphs that the walk does not reach (behind attributes, in objects of unknown classes, of torch.func) keep their saved
tensors. These share the memory of the full buffer, which is therefore not freed: see ``FullBuffer.is_aliased``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from zeroengine.runtime.dtensors import inside, without_values
from zeroengine.runtime.graph_route import CameFrom, GraphRoute, Packed, Places, SavedView, saved_under
from zeroengine.runtime.unit import Unit
from zeroengine.utils.tensors import leaves_in
from zeroengine.utils.torch_internals import (
    RAW_SAVED_PREFIX,
    RAW_SAVED_TENSORS,
    DisableTorchFunctionSubclass,
    next_node_number,
    node_number,
    unpack_saved,
)

# The attribute of a custom Function's node that shows what it has saved, and those that are set on such nodes and on
# their classes.
_PARAMS_ATTRIBUTE, _SUBCLASS_ATTRIBUTE = "_zeroengine_saved_params", "_zeroengine_returning_params"
# The most nodes of one graph that are visited. Other nodes keep their tensors, which is correct but takes memory.
MAX_NODES = 20_000


def replace_saved_views(
    outputs: Iterable[torch.Tensor],
    first_node: int,
    units: Sequence[Unit],
    read: Callable[[Packed], torch.Tensor],
    route: GraphRoute | None = None,
) -> set[Unit]:
    """Replace each tensor of ``units`` that the graph behind ``outputs`` has saved by a ``SavedView``.

    Tensors that were saved through hooks, of an activation checkpoint or of the user, are left alone.

    Args:
        first_node: The number of the first node that the forward may have made. Older nodes are left alone.
        units: Units whose full buffers hold values.
        read: Returns the tensor that the graph keeps this of, when backward needs it.
        route: The route to the views of the last forward, which is tried first.

    Returns:
        The units that have a parameter which was saved through hooks, so that a read in the backward goes unnoticed.
    """
    ranges = [
        (full.data_ptr(), full.data_ptr() + full.nbytes, unit) for unit in units for full in [unit.full_buffer.tensor]
    ]
    if not ranges:
        return set()
    roots, num_nodes = _nodes_of(outputs), next_node_number() - first_node
    # A saved parameter may be released by now. Inspecting it must not gather its unit.
    with DisableTorchFunctionSubclass():
        if route is not None and route.replace(roots, num_nodes, first_node, ranges, read):
            return set()
        came_from: CameFrom = {}
        saved_by_user_hooks, places = _replace_in_graph(roots, first_node, units, ranges, read, came_from)
        if route is not None and places and not saved_by_user_hooks:
            route.record(roots, num_nodes, came_from, places)
    return saved_by_user_hooks


def _replace_in_graph(
    roots: Sequence[Any],
    first_node: int,
    units: Sequence[Unit],
    ranges: Sequence[tuple[int, int, Unit]],
    read: Callable[[Packed], torch.Tensor],
    came_from: CameFrom,
) -> tuple[set[Unit], dict[Any, Places]]:
    """Replace the views in the whole graph.

    Returns:
        What ``replace_saved_views`` does, and by node the views that were replaced; empty if custom Functions have
        saved some, or tensors in attributes.
    """
    unit_of = {id(param): unit for unit in units for param in unit.params}
    saved_by_user_hooks: set[Unit] = set()
    places: dict[Any, Places] = defaultdict(dict)
    # Whether custom Functions have saved some, or tensors in attributes.
    in_functions = False
    for node, name, saved_tensors in _saved_behind_nodes(roots, first_node, came_from):
        is_function = name == RAW_SAVED_TENSORS
        if is_function:
            _return_parameters(node, saved_tensors, unit_of)
            in_functions |= _replace_attributes(node, ranges)
        views: dict[int, Unit] = {}
        for position, saved in enumerate(saved_tensors):
            if saved is None:
                continue
            # A saved tensor can have only one pair of hooks, which may be an activation checkpoint's or the user's.
            if saved.unpack_hook is None:
                unit = _unit_of_memory(saved.data, ranges)
                if unit is not None:
                    views[position] = unit
            else:
                leaves = (unit_of.get(id(leaf)) for leaf in leaves_in(saved.data))
                saved_by_user_hooks.update(unit for unit in leaves if unit is not None)
        # The backward will raise for a tensor that was changed in place since it was saved.
        for position, _ in unpack_saved(node, name, saved_tensors, tuple(views)) if views else ():
            view = _replace(saved_tensors[position], views[position], read)
            places[node].setdefault(name, []).append((position, view))
        in_functions |= bool(views) and is_function
    return saved_by_user_hooks, {} if in_functions else places


def saved_behind(tensors: Iterable[torch.Tensor], first_node: int) -> Iterator[tuple[Any, str, Sequence[Any]]]:
    """Yield what the graph behind ``tensors`` has saved: node, name of the attribute, and saved tensors.

    Args:
        tensors: Tensors of the graph.
        first_node: The number of the first node that is looked at. Older nodes are left alone.
    """
    return _saved_behind_nodes(_nodes_of(tensors), first_node, {})


def _nodes_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    return list(dict.fromkeys(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None))


def _saved_behind_nodes(
    roots: Sequence[Any], first_node: int, came_from: CameFrom
) -> Iterator[tuple[Any, str, Sequence[Any]]]:
    came_from.update((root, (None, index)) for index, root in enumerate(roots))
    pending = list(roots)
    while pending and len(came_from) < MAX_NODES:
        node = pending.pop()
        # Autograd numbers nodes as it creates them, and all nodes behind an older node are older still.
        if node_number(node) < first_node:
            continue
        for name in _names_of_saved(node.__class__):
            saved_tensors = saved_under(node, name)
            if saved_tensors is not None:
                yield node, name, saved_tensors
        for index, (next_node, _) in enumerate(node.next_functions):
            if next_node is not None and next_node not in came_from:
                came_from[next_node] = (node, index)
                pending.append(next_node)


def _return_parameters(node: Any, saved_tensors: Sequence[Any], unit_of: Mapping[int, Unit]) -> None:
    """Let the node of a custom Function return the parameters that it saved, gathered, rather than copies of views."""
    params = {
        position: saved.data
        for position, saved in enumerate(saved_tensors)
        if saved.unpack_hook is None and id(saved.data) in unit_of
    }
    if params:
        node.__dict__[_PARAMS_ATTRIBUTE] = params
        node.__class__ = _class_returning_parameters(type(node))


def _replace_attributes(node: Any, ranges: Sequence[tuple[int, int, Unit]]) -> bool:
    """Let the node of a custom Function keep parameters rather than views of their shape, which hold their memory.

    Some Functions keep tensors in attributes of ``ctx``, such as that of a ``Linear4bit`` of bitsandbytes, and not by
    ``save_for_backward``. A use of a released parameter gathers it.

    Returns:
        Whether attributes have tensors.
    """
    has_tensors = False
    for key, value in list(vars(node).items()):
        if isinstance(value, torch.Tensor):
            has_tensors, vars(node)[key] = True, _parameter_for(value, ranges)
        elif type(value) in (tuple, list) and any(isinstance(item, torch.Tensor) for item in value):
            has_tensors, vars(node)[key] = True, type(value)(_parameter_for(item, ranges) for item in value)
    return has_tensors


def _parameter_for(value: Any, ranges: Sequence[tuple[int, int, Unit]]) -> Any:
    """Return the parameter that ``value`` has the shape and the memory of, or else ``value``."""
    unit = _unit_of_memory(value, ranges) if isinstance(value, torch.Tensor) else None
    if unit is None:
        return value
    param = unit.params[unit.layout.param_index_at(value.storage_offset())]
    is_same = value.data_ptr() == param.data_ptr() and value.shape == param.shape and value.is_contiguous()
    return param if is_same else value


def _class_returning_parameters(node_class: Any) -> Any:
    """Return a subclass of the nodes of a Function whose ``saved_tensors`` are the parameters that were saved."""
    # A module may define its Function in each forward. So its class keeps the subclass, and no cache keeps the class.
    if _SUBCLASS_ATTRIBUTE not in vars(node_class):

        def saved_tensors(node: Any) -> tuple[Any, ...]:
            # This gathers the units, and checks that the parameters have not changed.
            tensors = node_class.saved_tensors.__get__(node)
            params = node.__dict__[_PARAMS_ATTRIBUTE]
            return tuple(params.get(position, tensor) for position, tensor in enumerate(tensors))

        subclass = type(node_class.__name__, (node_class,), {"saved_tensors": property(saved_tensors)})
        setattr(subclass, _SUBCLASS_ATTRIBUTE, subclass)
        setattr(node_class, _SUBCLASS_ATTRIBUTE, subclass)
    return vars(node_class)[_SUBCLASS_ATTRIBUTE]


# ``dir`` is slow, so the names are cached.
@cache
def _names_of_saved(node_class: type) -> tuple[str, ...]:
    """Return the names of the attributes of a class of graph nodes that are saved tensors."""
    return tuple(name for name in dir(node_class) if name.startswith(RAW_SAVED_PREFIX))


def _unit_of_memory(tensor: torch.Tensor | None, ranges: Sequence[tuple[int, int, Unit]]) -> Unit | None:
    """Return the unit in whose full buffer ``tensor`` lies, if it is a strided view of it."""
    tensor = tensor if tensor is None or type(tensor) is torch.Tensor else inside(tensor)
    try:
        address = 0 if tensor is None else tensor.data_ptr()
    except RuntimeError:
        # Sparse tensors and those of torch.func have no address.
        return None
    for start, stop, unit in ranges:
        if tensor is not None and start <= address < stop:
            # ``SavedView.restore`` makes a strided view of the parameter, which has neither another dtype nor a
            # conjugate bit.
            is_plain = tensor.dtype is unit.dtype and not (tensor.is_conj() or tensor.is_neg())
            return unit if is_plain else None
    return None


def _replace(saved: Any, unit: Unit, read: Callable[[Packed], torch.Tensor]) -> SavedView:
    tensor: Any = inside(saved.data)
    like = None if tensor is saved.data else without_values(saved.data)
    offset = tensor.storage_offset()
    index = unit.layout.param_index_at(offset)
    view = SavedView(unit, index, (tensor.size(), tensor.stride(), offset), like)
    view.replace(saved, read)
    return view
