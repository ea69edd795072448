"""The parameters of a unit as they were before ``initialize``, and as they are again when the engine ends."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import nn

from zeroengine.comm.group import Group
from zeroengine.deferred_init.parameter import take_trace, trace_of
from zeroengine.deferred_init.trace import Trace
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.layout import FlatLayout
from zeroengine.partition.slices import slice_of
from zeroengine.runtime.dtensors import is_dtensor, local_tensor, set_local_tensor
from zeroengine.runtime.full_buffer import FullBuffer, param_views
from zeroengine.runtime.released_parameter import mark_gathered

# Counted in elements: the part of a parameter that is compared at a time.
CHUNK = 1 << 20


class OriginalParameters:
    """Remembers what the parameters of one unit were before ``initialize``, and makes them so again.

    Args:
        params: The parameters, with the model's own values.
        layout: Where each of them is in the flat buffer.

    Attributes:
        dtypes: Their dtypes before ``initialize``.
        unset: Names of parameters that are zeros until weights are loaded.
        changed: Names of frozen parameters whose values on this rank are others since they were cast.
    """

    def __init__(self, params: Sequence[nn.Parameter], layout: FlatLayout) -> None:
        self._params, self._layout = params, layout
        self.dtypes = [param.dtype for param in params]
        self._templates = [_without_values(local_tensor(param)) for param in params]
        self.unset: set[str] = set()
        self.changed: list[str] = []

    def move_to(
        self, full_buffer: FullBuffer, values: torch.Tensor, unit_name: str, holders: Group | None, all_ranks: Group
    ) -> None:
        """Move the model's values into a unit's memory, and free the model's own memory on the way.

        Args:
            full_buffer: What the parameters become views of.
            values: Takes the values of rank 0, in the flat layout: the full buffer, or a wider one.
            unit_name: The name of the unit.
            holders: The ranks that have the same values of it. Those of the first one count. None: all values are
                there, and the ranks agree on them.
            all_ranks: The ranks of the engine, of which the first one computes values that are not there yet.
        """
        with torch.no_grad(), contextlib.ExitStack() as original_data:
            targets = param_views(self._layout, values)
            for index, (param, target) in enumerate(zip(self._params, targets, strict=True)):
                source = target
                if not param.is_meta:
                    source = local_tensor(param).detach()
                    target.copy_(source)
                    # If an error ends this, the parameter has its own dtype and values again.
                    original_data.callback(_set_data, param, target, self._templates[index])
                else:
                    trace = take_trace(param)
                    assert trace is not None and holders is not None
                    if trace.is_unset:
                        self.unset.add(self._layout.slots[index].name)
                    source = _compute(trace, param, target, holders, all_ranks)
                if not param.requires_grad and _is_changed(source, target):
                    self.changed.append(self._layout.slots[index].name)
                full_buffer.adopt(index)
            if holders is not None:
                holders.broadcast(values, f"of unit {unit_name}")
            original_data.pop_all()

    def continue_from(self, index: int, earlier: OriginalParameters, earlier_index: int) -> None:
        """Remember of a parameter what it was before ``initialize``, which ``earlier`` knows by another index."""
        self.dtypes[index] = earlier.dtypes[earlier_index]
        self._templates[index] = earlier._templates[earlier_index]
        name = self._layout.slots[index].name
        self.unset |= {name} & earlier.unset

    @property
    def strided(self) -> list[str]:
        """The names of those whose dimensions had another order in memory, which are contiguous in the full buffer."""
        slots = zip(self._layout.slots, self._templates, strict=True)
        return [slot.name for slot, template in slots if not template.is_contiguous()]

    def restore(self, values: Sequence[torch.Tensor]) -> None:
        """Make the parameters ordinary ones, with their own memory, and their original dtypes and strides.

        Those that were built without values, and have none yet, become NaN.

        Args:
            values: The value of each parameter.
        """
        originals = zip(self._layout.slots, self._templates, strict=True)
        for param, value, (slot, template) in zip(self._params, values, originals, strict=True):
            mark_gathered(param)
            param.grad = None
            _set_data(param, value, template)
            if slot.name in self.unset and template.is_floating_point():
                # Zeros would be taken for values.
                local_tensor(param).data.fill_(float("nan"))


def is_frozen_and_unset(plan: UnitPlan) -> bool:
    """Return whether a unit's parameters are frozen and were built without values, which will be loaded."""
    traces = [trace_of(param) for _, param in plan.params]
    return not plan.trainable and all(trace is not None and trace.is_unset for trace in traces)


def _compute(trace: Trace, param: nn.Parameter, target: torch.Tensor, holders: Group, all_ranks: Group) -> torch.Tensor:
    """Compute what ``target`` takes of a parameter, and return it as it was before a cast. A collective if it is split.

    The ranks that hold a parameter that is not split receive its values with those of the unit.
    """
    part = slice_of(param)
    # A slice that is a plain tensor was built as a slice.
    if part is None or part.is_whole or trace.is_unset or not is_dtensor(param):
        return trace.write(target) if holders.rank == 0 else target
    # One parameter at a time is whole, so that its values are those of the model that is not split.
    values = torch.empty(part.shape, dtype=target.dtype, device=target.device)
    source = trace.write(values) if all_ranks.rank == 0 else values
    all_ranks.broadcast(values, "of a parameter to split")
    target.copy_(part.cut(values))
    return part.cut(source)


def _is_changed(source: torch.Tensor, cast: torch.Tensor) -> bool:
    """Return whether a cast has changed values, so that a cast back does not give the same bits."""
    if cast.dtype is source.dtype:
        return False
    # Bits are compared, since packed bytes may be a NaN. A part at a time needs little memory.
    parts = zip(source.reshape(-1).split(CHUNK), cast.reshape(-1).split(CHUNK), strict=True)
    return any(not torch.equal(a.view(torch.uint8), b.to(a.dtype).view(torch.uint8)) for a, b in parts)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without values, of the same dtype and, where these leave no gaps, strides."""
    template = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    # ``empty_like`` would give the same strides, but on the meta device it imports sympy: half a second and 30 MiB.
    return template if template.is_contiguous() else torch.empty_like(template)


def _set_data(param: nn.Parameter, values: torch.Tensor, template: torch.Tensor) -> None:
    copy = torch.empty_strided(template.shape, template.stride(), dtype=template.dtype, device=values.device)
    copy.copy_(values)
    if is_dtensor(param):
        set_local_tensor(param, copy)
    else:
        param.data = copy
