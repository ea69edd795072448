"""The memory of the whole parameters of a unit, and the parameters as views of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from zeroengine import ops
from zeroengine.comm.interfaces import Buffer, Transport
from zeroengine.deferred_init.parameter import swap_data
from zeroengine.partition.layout import FlatLayout
from zeroengine.runtime.dtensors import is_dtensor, local_tensor, set_local_tensor
from zeroengine.runtime.released_parameter import RELEASED_CLASSES, Resolver, mark_gathered, mark_released
from zeroengine.utils.compiler_disable import outside_torch_func
from zeroengine.utils.tensors import with_own_storage
from zeroengine.utils.torch_internals import (
    DisableTorchFunctionSubclass,
    storage_address,
    storage_use_count,
    tensor_use_count,
)

# The most views of a buffer that are kept besides those of the parameters, for each parameter.
MAX_STRIDED_VIEWS = 4
# The size, the strides and the offset of a view, in elements.
_Strides = tuple[torch.Size, tuple[int, ...], int]


class FullBuffer:
    """The full buffer of a unit. It has memory at first.

    Args:
        params: The parameters.
        layout: Where each of them is in the buffer.
        dtype: The dtype of the buffer.
        transport: Allocates it.
        is_releasable: Whether the memory comes and goes.
        copied: Whether gathers write all values into the buffer, which then cannot show the memory of other ranks.

    Attributes:
        tensor: 1-D, all elements of the layout, padding included. Its storage stays the same for the life of the unit,
            unless other tensors alias it at a step (``replace``).
        views: The parameters' views of ``tensor``.
        targets: What shows the views: the parameters, or the tensors inside of split ones.
        has_memory: Whether it has memory now. False where the memory stays, and is the unit's shard.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: FlatLayout,
        dtype: torch.dtype,
        transport: Transport,
        *,
        is_releasable: bool,
        copied: bool,
    ) -> None:
        self._params, self._layout, self._dtype = params, layout, dtype
        self.has_memory = is_releasable
        self._transport, self._copied = transport, copied
        # None: the memory stays.
        self._buffer: Buffer | None = None
        if is_releasable:
            self._allocate_buffer()
        else:
            self._set_tensor(transport.empty(layout.numel, dtype))
            ops.advise_huge_pages(self.tensor)
        self.tensor.zero_()
        self._placeholders = [placeholder_of(view) for view in self.views]
        self.targets = [local_tensor(param) for param in params]
        self._required_grad: list[bool] = []

    def _allocate_buffer(self) -> None:
        self._buffer = self._transport.buffer(self._layout.numel, self._dtype, copied=self._copied)
        self._set_tensor(self._buffer.tensor)

    def _set_tensor(self, tensor: torch.Tensor) -> None:
        self.tensor, self.views = tensor, param_views(self._layout, tensor)
        # It has a version counter of its own, so that a gather is no change in place of what a backward has read.
        self._unversioned = tensor.data
        self._strided_views: dict[_Strides, torch.Tensor] = {}
        # The storage's Python object, the full buffer and ``_unversioned``, its views, and the parameters, which are
        # views while ``is_aliased`` compares with this. Measuring would also count what a thread of Gloo holds of a
        # broadcast.
        self._num_own_tensors = 3 + len(self.views) + len(self._params)
        # The views of a buffer that is never freed need not share its storage object. torch.save and safetensors then
        # see parameters that share nothing, and write only the bytes of each.
        if self._buffer is None:
            self.views = [with_own_storage(view) for view in self.views]
        # The address of the C++ storage object, whose owners ``is_aliased`` counts.
        self._storage: int = storage_address(tensor.untyped_storage())

    @property
    def held_bytes(self) -> int:
        """The bytes that it has now; 0 if its memory stays."""
        return 0 if self._buffer is None else self._buffer.nbytes()

    def is_aliased(self, *, exactly: bool) -> bool:
        """Return whether something besides the unit may still read the buffer, which must have memory now.

        Aliases are tensors that share the memory, such as ``weight.detach()`` and tensors that a graph has saved, and
        graphs that have saved a parameter itself, which would be a placeholder when backward reads it. A parameter that
        Python code holds is no alias, because its class notices every use.

        Args:
            exactly: False where every graph that may have saved a parameter also accumulates its gradient, as those of
                forwards with autograd do. Those of torch.func do not. True costs some microseconds for each parameter.
        """
        if storage_use_count(self._storage) > self._num_own_tensors:
            return True
        # In C++ the owners of a parameter are its Python object, the graph's node that accumulates its gradient (if it
        # has required a gradient since it was gathered), and every graph that has saved it.
        with_second_owner: list[nn.Parameter] = []
        with DisableTorchFunctionSubclass():
            for param, required in zip(self._params, self._required_grad, strict=True):
                num_owners, may_accumulate = tensor_use_count(param), required and param.requires_grad
                if num_owners > (2 if may_accumulate else 1):
                    return True
                if exactly and num_owners == 2:
                    with_second_owner.append(param)
            return bool(with_second_owner) and not _all_accumulate(with_second_owner)

    def strided_view(self, key: _Strides) -> torch.Tensor:
        """Return a view of the buffer, and keep it, because most are asked for again.

        Autograd does not notice that its values change. ``key``: its size, strides and offset in elements.
        """
        try:
            return self._strided_views[key]
        except KeyError:
            pass
        if len(self._strided_views) >= MAX_STRIDED_VIEWS * len(self._params):
            self._num_own_tensors -= len(self._strided_views)
            self._strided_views.clear()
        with outside_torch_func(), torch.no_grad():
            view = self._strided_views[key] = self._unversioned.as_strided(*key)
        self._num_own_tensors += 1
        return view

    def adopt(self, index: int) -> None:
        """Make a parameter a view of the buffer for the first time."""
        param, view = self._params[index], self.views[index]
        if is_dtensor(param):
            set_local_tensor(param, view.detach())
            self.targets[index] = local_tensor(param)
        # A parameter on the meta device refuses ``data`` of another device.
        elif param.is_meta:
            swap_data(param, view)
        else:
            param.data = view

    def allocate(self) -> None:
        """Give the buffer memory."""
        assert self._buffer is not None
        self._buffer.allocate()
        self.has_memory = True

    def show(self) -> None:
        """Let the parameters that have no values show those of the buffer."""
        # The released class would treat an assignment to ``data`` as a use.
        with DisableTorchFunctionSubclass():
            hidden = [type(param) in RELEASED_CLASSES for param in self._params]
            for is_hidden, target, view in zip(hidden, self.targets, self.views, strict=True):
                if is_hidden:
                    target.data = view
            mark_gathered(*(self._params if all(hidden) else compress(self._params, hidden)))
        self.note_required_gradients()

    def note_required_gradients(self) -> None:
        """Note which parameters require gradients now that they show the buffer. ``is_aliased`` compares with this."""
        self._required_grad = [param.requires_grad for param in self._params]

    def hide(self, resolver: Resolver) -> None:
        """Take the values from the parameters: every use of one calls ``resolver`` first. The memory stays."""
        with DisableTorchFunctionSubclass():
            for target, placeholder in zip(self.targets, self._placeholders, strict=True):
                target.data = placeholder
            mark_released(*self._params, resolver=resolver)

    def free(self) -> None:
        """Free the memory. The parameters have been released."""
        assert self._buffer is not None
        # A view of the buffer would read freed memory, whereas a placeholder's NaN is noticed at once. The parameters
        # may have their released class now, which would treat the assignment as a use.
        with DisableTorchFunctionSubclass():
            for target, placeholder in zip(self.targets, self._placeholders, strict=True):
                target.data = placeholder
        self._buffer.free()
        self.has_memory = False

    def replace(self) -> None:
        """Leave the memory to the tensors that alias it, and take another buffer, which has no memory."""
        assert self._buffer is not None
        # The buffer may be a view of other ranks' memory, which the aliases must not read.
        self._buffer.detach()
        self._allocate_buffer()
        self.free()

    def reattach(self) -> None:
        """Take ``hide`` back, after the buffer was given memory again."""
        # The old views still show the memory that the buffer had before.
        self._set_tensor(self.tensor)
        self.show()

    def aliased_params(self) -> list[str]:
        """Return the names of parameters that ``hide`` took the values from, and whose memory other tensors still show.

        Such tensors would read freed memory. They are ``param.detach()``, or what the graph of a forward has saved.
        """
        # The owners are a view, the tensor that it is a view of, and the Python object of the storage. Views without
        # elements may share a storage.
        return [
            slot.name
            for view, slot in zip(self.views, self._layout.slots, strict=True)
            if view.numel() and storage_use_count(storage_address(view.untyped_storage())) > 3
        ]

    def readopt_data(self) -> list[str]:
        """Copy in the values of parameters whose ``data`` was replaced, and make them views of the buffer again.

        Returns:
            Descriptions of the parameters whose shape has changed. These lose what was assigned.
        """
        refusals = []
        for target, view, slot in zip(self.targets, self.views, self._layout.slots, strict=True):
            if target.data_ptr() == view.data_ptr() and target.shape == view.shape:
                continue
            if target.shape == view.shape:
                view.copy_(target.detach())
            else:
                refusals.append(f"{slot.name} (from {tuple(view.shape)} to {tuple(target.shape)})")
            target.data = view
        return refusals

    def drop(self) -> None:
        """Own no memory any more, because the engine ends."""
        self.tensor = torch.empty(0, dtype=self._dtype, device=self.tensor.device)
        self.views, self.targets, self._placeholders, self._buffer = [], [], [], None
        self._unversioned, self.has_memory = self.tensor, False
        self._strided_views.clear()


def param_views(layout: FlatLayout, flat: torch.Tensor) -> list[torch.Tensor]:
    """Return the parameters as views into ``flat`` (1-D, of ``layout``), each in its shape."""
    return [flat[slot.offset : slot.end].view(slot.shape) for slot in layout.slots]


def _all_accumulate(params: Sequence[nn.Parameter]) -> bool:
    """Return whether one of the two owners of each parameter is the graph's node that accumulates its gradient."""
    with torch.inference_mode(False), torch.enable_grad(), outside_torch_func():
        for param in params:
            # A node that there was not yet is another owner, as long as it is held.
            _edge = get_gradient_edge(param)
            if tensor_use_count(param) != 2:
                return False
    return True


def placeholder_of(view: torch.Tensor) -> torch.Tensor:
    """Return a NaN (0 in integer dtypes), expanded with stride 0 to the shape of ``view``."""
    value = float("nan") if view.is_floating_point() or view.is_complex() else 0
    return torch.full((), value, dtype=view.dtype, device=view.device).expand(view.shape)
