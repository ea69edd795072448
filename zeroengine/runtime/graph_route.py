"""The route from the outputs of a module to the nodes of its graph that have saved views of parameters.

The graph of a module is mostly that of its last forward. So a walk (``saved_views.py``) records the route to the nodes
that had saved views. The next forward goes this route alone, as long as it has made as many nodes, and those on the
route have the same classes and have saved the same views. A view that is elsewhere even so shares the memory of the
full buffer, like what no walk reaches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.runtime.dtensors import local_tensor, wrap
from zeroengine.runtime.unit import Unit
from zeroengine.utils.compiler_disable import outside_torch_func
from zeroengine.utils.torch_internals import UNPACKS_SINGLE_ONES, node_number, version_of

# After n changes of a module's graph in a row no route is recorded in 2**n forwards. n counts up to this.
MAX_CHANGES = 10


class SavedView:
    """A description of a tensor in a unit's full buffer that autograd has saved.

    Args:
        unit: The unit.
        param_index: The index in the unit of the parameter that it is a view of.
        strides: Its size, its strides and its offset in the full buffer, in elements.
        like: Has the shape and the placements of a saved ``DTensor``, without values. None: a plain tensor was saved.
    """

    __slots__ = ("_like", "_param_index", "_strides", "unit")

    def __init__(
        self,
        unit: Unit,
        param_index: int,
        strides: tuple[torch.Size, tuple[int, ...], int],
        like: torch.Tensor | None = None,
    ) -> None:
        self.unit, self._param_index, self._strides, self._like = unit, param_index, strides, like

    def replace(self, saved: Any, read: Callable[[Packed], torch.Tensor]) -> None:
        """Let the graph keep this and the version of the parameter, rather than the tensor that it has saved."""
        # The tensor's own version would not do, because a ``.data`` has a separate counter.
        packed = (self, version_of(self.unit.params[self._param_index]))
        saved.register_hooks(lambda _: packed, read)

    def describes(self, tensor: torch.Tensor | None, address: int) -> bool:
        """Return whether this describes ``tensor`` as well. ``address``: that of the full buffer."""
        size, stride, offset = self._strides
        try:
            return (
                self._like is None
                and tensor is not None
                and tensor.dtype is self.unit.dtype
                and tensor.data_ptr() == address + offset * tensor.dtype.itemsize
                and tensor.shape == size
                and tensor.stride() == stride
                # A strided view has neither bit.
                and not tensor.is_neg()
                and not (tensor.dtype.is_complex and tensor.is_conj())
            )
        except RuntimeError:
            # Sparse tensors and those of torch.func have no address.
            return False

    def restore(self, version: int) -> torch.Tensor:
        """Return the tensor. The unit must have been gathered.

        Args:
            version: Autograd's count of in-place changes of the parameter, when the tensor was saved.

        Raises:
            ZeroEngineError: The parameter has changed since the forward.
        """
        unit, index = self.unit, self._param_index
        param = unit.params[index]
        if version_of(param) != version:
            raise ZeroEngineError(
                f"this backward needs parameter {unit.layout.slots[index].name} as it was in the forward, and it has "
                "been changed since: by engine.step(), by loading, or in place. Run backward before step(), and the "
                "forward again after it."
            )
        if self._like is None and not torch.is_grad_enabled():
            return unit.full_buffer.strided_view(self._strides)
        # The graph of this backward saves what it reads. A detached parameter shares the parameter's version counter,
        # so autograd's own check also applies to it.
        with outside_torch_func():
            view = local_tensor(param).detach().as_strided(*self._strides)
            return view if self._like is None else wrap(view, self._like)


# What a graph keeps: the view, and autograd's count of in-place changes of the parameter.
Packed = tuple[SavedView, int]
# By the name of a node's attribute: the positions of saved tensors, and what they were.
Places = dict[str, list[tuple[int, SavedView]]]
# By node that a walk has come to: the node that it came from, and by which of its edges. None: by which output.
CameFrom = dict[Any, tuple[Any, int]]


class _Another(Exception):
    """The graph is another one than that of the last forward."""


class _RouteNode(NamedTuple):
    """A node on a route.

    Attributes:
        node_class: Its class.
        edge: The edge to the next node. None: this branch ends, and the route goes on with the last branch to come.
        branches: The edges to branches that come later.
        places: The saved views that the node has.
    """

    node_class: Any
    edge: int | None
    branches: tuple[int, ...]
    places: Places


class GraphRoute:
    """The route from the outputs of a module to the nodes of its graph that had saved views in its last forward."""

    def __init__(self) -> None:
        # Empty: no route is known.
        self._steps: list[_RouteNode] = []
        # Those of the outputs that it begins with, and the number of all nodes of the graph.
        self._roots: list[int] = []
        self._num_nodes = 0
        # The changes in a row, and the forwards until a route is recorded again.
        self._num_changes = self._num_unrecorded = 0

    def record(self, roots: Sequence[Any], num_nodes: int, came_from: CameFrom, places: Mapping[Any, Places]) -> None:
        """Record the route to the nodes of ``places``.

        Args:
            roots: The nodes of the outputs.
            num_nodes: The number of nodes that the forward has made.
            came_from: What a walk has noted.
            places: By node, the saved views that it had.
        """
        if not UNPACKS_SINGLE_ONES:
            return
        if self._num_unrecorded:
            self._num_unrecorded -= 1
            return
        # The key None stands for the outputs.
        edges: dict[Any, set[int]] = defaultdict(set)
        for node in places:
            while node is not None:
                node, index = came_from[node]
                edges[node].add(index)
        self._steps, self._roots, self._num_nodes = [], sorted(edges[None]), num_nodes
        pending = [roots[index] for index in self._roots]
        while pending:
            node = pending.pop()
            followed = sorted(edges[node]) if node in edges else []
            edge, branches = followed[-1] if followed else None, tuple(followed[:-1])
            self._steps.append(_RouteNode(node.__class__, edge, branches, places.get(node, {})))
            pending += [node.next_functions[index][0] for index in followed]

    def replace(
        self,
        roots: Sequence[Any],
        num_nodes: int,
        first_node: int,
        ranges: Sequence[tuple[int, int, Unit]],
        read: Callable[[Packed], torch.Tensor],
    ) -> bool:
        """Replace the views where the last forward had some. See ``replace_saved_views`` for the other arguments.

        Args:
            roots: The nodes of the outputs.
            num_nodes: The number of nodes that the forward has made.
            ranges: The first and the last address of each unit's full buffer.

        Returns:
            False if no route is known, or the graph is another one; then some views remain.
        """
        if not self._steps:
            return False
        addresses = {unit: start for start, _, unit in ranges}
        try:
            # A branch that is new may have saved parameters through hooks of the user.
            if num_nodes != self._num_nodes:
                raise _Another
            for node, places in self._nodes(roots):
                if node_number(node) < first_node:
                    raise _Another
                for name, views in places.items():
                    saved_tensors = saved_under(node, name)
                    if saved_tensors is None:
                        raise _Another
                    for position, view in views:
                        saved, address = saved_tensors[position], addresses.get(view.unit)
                        if saved is None or saved.unpack_hook is not None or address is None:
                            raise _Another
                        if not view.describes(saved.data, address):
                            raise _Another
                        try:
                            saved.unpack()
                        except RuntimeError:
                            # It was changed in place since it was saved, for which the backward will raise.
                            continue
                        view.replace(saved, read)
        except (_Another, IndexError):
            self.note_change()
            return False
        self._num_changes = 0
        return True

    def _nodes(self, roots: Sequence[Any]) -> list[tuple[Any, Places]]:
        """Return the nodes that have saved views, and which."""
        nodes, pending = [], [roots[index] for index in self._roots]
        node = pending.pop()
        for node_class, edge, branches, places in self._steps:
            if node.__class__ is not node_class:
                raise _Another
            if places:
                nodes.append((node, places))
            if edge is not None:
                next_functions = node.next_functions
                for index in branches:
                    pending.append(next_functions[index][0])
                node = next_functions[edge][0]
            elif pending:
                node = pending.pop()
        return nodes

    def note_change(self) -> None:
        """Note that the graph is another one than that of the last forward."""
        # A model whose graph keeps changing would record in vain.
        self._num_changes = min(self._num_changes + 1, MAX_CHANGES)
        self._num_unrecorded = 2**self._num_changes
        self._steps = []


def saved_under(node: Any, name: str) -> Sequence[Any] | None:
    """Return what a node has saved under the name of an attribute; None: it is freed."""
    try:
        value = getattr(node, name)
    except RuntimeError:
        # A backward inside this forward, such as torch.autograd.grad, has freed it.
        return None
    return value if type(value) in (tuple, list) else (value,)
