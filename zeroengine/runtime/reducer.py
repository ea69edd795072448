"""Collects gradients into buckets as autograd makes them, and reduces the buckets while it goes on.

Where the gradient degree is 1 a unit's gradients stay whole in a kept buffer, accumulate there over the
micro-steps, and are reduced once. Otherwise each micro-step's gradients pass through a bucket, and only
this rank's shard of their sum is kept.

[Note: Order]
Units are reduced in one fixed order, the reverse of registration, on every rank. A unit that is complete
early waits for those before it; one that never completes (unused parameters) is reduced with zeros in
their place when the backward ends. So ranks that use different parameters still agree on every collective.

[Note: Several gradients of one parameter]
In one backward autograd adds up all that a parameter gets before it hands over one gradient. But a backward may hold
others: each reentrant checkpoint runs one of its own, and so does a Function whose backward calls ``torch.autograd``.
A parameter that several of them use gets a gradient from each. So a unit is complete when as many gradients of each
parameter have arrived as in the backward before. Those that come after it was sent all the same, as they do the first
time, wait on this rank and are reduced with the next micro-step's, or before the update (``reduce_late_gradients``). No
other rank knows of them (``has_late_gradients``), so whoever takes the step asks all ranks first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest

import torch
from torch import nn

from zeroengine.comm.interfaces import Transport
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.disk_store import OffloadStore
from zeroengine.runtime.backward_tracker import BackwardListener, BackwardTracker
from zeroengine.runtime.buckets import Slot, Slots
from zeroengine.runtime.casting import CastCopies
from zeroengine.runtime.offloaded_gradients import Landings
from zeroengine.runtime.released_parameter import gradient_of
from zeroengine.runtime.unit import Unit
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.utils.compiler_disable import eager
from zeroengine.utils.profiling import profile_range
from zeroengine.utils.work import Then, Work


class Reducer(BackwardListener):
    """Owns the gradients of the trainable units. Knows gradients only.

    Args:
        bucket_numel: elements that one bucket may hold; a larger unit is a bucket alone. None: one unit each.
        accumulation_dtype, reduce_dtype: from a unit's dtype to that of what is kept, and of what is sent (None: free).
        predivide: what gradients are divided by on their way; the update makes up for it.
        backward: Tells when a backward begins and ends; learns of each gradient and each complete unit from here.
        stores: where each trainable unit's summed gradients live, if not on the device.
        together: whether gradients are copied into buckets some at a time, as a GPU likes it.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        transport: Transport,
        *,
        bucket_numel: int | None,
        accumulation_dtype: Callable[[torch.dtype], torch.dtype],
        reduce_dtype: Callable[[torch.dtype], torch.dtype | None],
        predivide: float,
        backward: BackwardTracker,
        stores: Sequence[OffloadStore | None] = (),
        together: bool = False,
    ) -> None:
        self._transport, self._channel = transport, transport.reduce
        self._bucket_numel = bucket_numel or 0
        self._backward = backward
        self.predivide = predivide
        self.gradients = [
            UnitGradients(unit, transport, accumulation_dtype(unit.dtype), reduce_dtype(unit.dtype), store)
            for unit, store in zip_longest((unit for unit in units if unit.trainable), stores)
        ]
        self._landings = Landings()
        self._copies = CastCopies() if together else None
        self._order = self.gradients[::-1]
        self._launched = 0  # of _order, in this backward
        self._bucket: list[UnitGradients] = []  # complete, waiting for the bucket to fill
        self._works: list[Work] = []
        self._slots = Slots(transport, self.gradients)
        self._slot_of: dict[UnitGradients, Slot] = {}  # being filled
        # Whether a gradient came after its unit was reduced in this step. It waits on this rank.
        self.has_late_gradients = False
        self._handles = [self._hook(grads, i, p) for grads in self.gradients for i, p in enumerate(grads.unit.params)]
        backward.subscribe(self)

    def _hook(self, grads: UnitGradients, index: int, param: nn.Parameter) -> object:
        # The hook lives in the parameter, where the garbage collector sees no cycles.
        me, its = weakref.ref(self), weakref.ref(grads)

        @eager
        def ready(param: nn.Parameter) -> None:
            reducer, grads = me(), its()
            if reducer is not None and grads is not None:
                reducer._post_accumulate_grad(grads, index, param)

        return param.register_post_accumulate_grad_hook(ready)

    # -- backward ---------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Expect the gradients of every unit."""
        self._launched = 0
        for grads in self.gradients:
            grads.begin_backward()

    def _defer_reduce(self, grads: UnitGradients) -> bool:
        """Return whether a gradient waits in ``param.grad``: inside no_sync, or because its unit was sent already."""
        return grads.is_reduced if grads.unsharded else grads.reduce_launched or not self._backward.sync_enabled

    def _post_accumulate_grad(self, grads: UnitGradients, index: int, param: nn.Parameter) -> None:
        self._backward.note_gradient()
        grads.count_arrival(index)
        if param.grad is None:
            pass  # a Function gave None: torch calls its hooks all the same
        elif self._defer_reduce(grads):
            self.has_late_gradients = self.has_late_gradients or grads.is_reduced
            if grads.dtype is not param.dtype:
                self._accumulate_local(grads, index, param)
        else:
            self._copy_to_bucket(grads, index, param)
        if not grads.num_pending:
            self._backward.note_unit_complete(grads.unit)
            self._launch_in_order()

    def _copy_to_bucket(self, grads: UnitGradients, index: int, param: nn.Parameter) -> None:
        """The one copy of a gradient, cast on the way."""
        if not grads.unsharded and grads not in self._slot_of:
            self._slot_of[grads] = self._slots.take(grads)
        target = (grads.param_views if grads.unsharded else self._slot_of[grads].views)[index]
        self._copy_to(grads, index, param, target, add=grads.bucket_filled[index])
        grads.bucket_filled[index] = True

    def _copy_to(
        self, grads: UnitGradients, index: int, param: nn.Parameter, target: torch.Tensor, *, add: bool = False
    ) -> None:
        """Moves a gradient, and what was set aside of earlier ones, into ``target``."""
        gradient = grads.no_sync_grads.pop(index, None)
        last = gradient_of(param)
        if last is not None:
            last = last.detach()  # a backward with create_graph gives it a history
            last = last.to_dense() if last.is_sparse else last
            if last.shape != target.shape:
                name = grads.unit.layout.slots[index].name
                raise ZeroEngineError(
                    f"parameter {name} was given another shape after initialize(), {tuple(last.shape)} where it had "
                    f"{tuple(target.shape)}, as by resize_token_embeddings(). Change the model before initialize()."
                )
            gradient = last if gradient is None else gradient.add_(last)
        assert gradient is not None
        if self.predivide != 1:
            gradient = gradient / self.predivide
        if self._copies is not None and self._copies.takes(gradient, target):
            self._copies.add(gradient, target, accumulate=add)
        elif add:
            target.add_(gradient)
        else:
            target.copy_(gradient)
        grads.has_grad[index] = True
        param.grad = None

    def _flush_copies(self) -> None:
        """Gradients that were taken are where they belong."""
        if self._copies is not None:
            self._copies.flush()

    def _accumulate_local(self, grads: UnitGradients, index: int, param: nn.Parameter) -> None:
        """Sums over micro-steps in the accumulation dtype, where ``param.grad`` would sum in a lower one."""
        assert param.grad is not None
        gradient = param.grad.detach()
        if index in grads.no_sync_grads:
            grads.no_sync_grads[index].add_(gradient)
        else:
            grads.no_sync_grads[index] = (
                gradient.to_dense().to(grads.dtype) if gradient.is_sparse else gradient.to(grads.dtype)
            )
        param.grad = None

    @staticmethod
    def _has_gradient(grads: UnitGradients, index: int) -> bool:
        """Whether one waits outside of the buckets."""
        return index in grads.no_sync_grads or gradient_of(grads.unit.params[index]) is not None

    def end_backward(self, num_calls: int) -> None:
        """Complete the units that the backward left incomplete, in order, and launch the last reductions."""
        for grads in self._order:
            if not self._defer_reduce(grads):
                for index, count in enumerate(grads.arrived):
                    if not count and self._has_gradient(grads, index):  # from an earlier micro-step inside no_sync
                        self._copy_to_bucket(grads, index, grads.unit.params[index])
            grads.end_backward()
        self._launch_in_order()
        self._flush()
        self._flush_copies()

    def _launch_in_order(self) -> None:
        while self._launched < len(self._order) and not self._order[self._launched].num_pending:
            grads = self._order[self._launched]
            self._launched += 1
            due = (
                self._backward.is_last_microbatch and self._backward.sync_enabled and not grads.is_reduced
                if grads.unsharded
                else self._backward.sync_enabled
            )
            if due:
                numel = sum(g.unit.layout.numel for g in self._bucket) + grads.unit.layout.numel
                if self._bucket and numel > self._bucket_numel:
                    self._flush()
                self._bucket.append(grads)
        if self._bucket and sum(g.unit.layout.numel for g in self._bucket) >= self._bucket_numel:
            self._flush()

    def _flush(self) -> None:
        bucket, self._bucket = self._bucket, []
        for grads in bucket:
            with profile_range("reduce", grads.unit.name):
                self._launch_reduce(grads)

    def _launch_reduce(self, grads: UnitGradients) -> None:
        unit = grads.unit
        grads.reduce_launched = True
        self._flush_copies()
        if grads.unsharded:
            self._zero_unfilled(grads, grads.param_views)
            mine = grads.shard_of_degree(unit.degrees.optimizer)
            if not grads.reduced_in_place:
                slot = self._slots.take(grads)
                slot.memory[: unit.layout.numel].copy_(grads.grad_shard)
                self._launch_from_buffer(slot, grads, mine, accumulate=False)
            elif unit.degrees.optimizer == 1:
                self._works.append(self._channel.all_reduce(grads.grad_shard, unit.name))
            else:
                self._works.append(self._channel.reduce_scatter(mine, grads.grad_shard, unit.name))
        else:
            slot = self._slot_of.pop(grads) if grads in self._slot_of else self._slots.take(grads)
            self._zero_unfilled(grads, slot.views)
            self._launch_from_buffer(slot, grads, grads.grad_shard, accumulate=grads.is_reduced)
            grads.bucket_filled = [False] * len(unit.params)
        grads.is_reduced = True

    def _launch_from_buffer(self, slot: Slot, grads: UnitGradients, target: torch.Tensor, accumulate: bool) -> None:
        """Reduces what is in ``slot`` into ``target``, all of the gradient or this rank's shard."""
        flat = slot.memory[: grads.unit.layout.numel]  # a bucket for the largest unit may serve a smaller one
        if grads.store is not None:
            reduce = partial(self._launch_collective, slot, flat=flat, label=grads.unit.name, accumulate=False)
            slot.work = self._landings.send(grads, reduce, accumulate)
        else:
            slot.work = self._launch_collective(slot, target, flat, grads.unit.name, accumulate)
            self._works.append(slot.work)
        self._slots.sent(slot)

    def _launch_collective(
        self, slot: Slot, target: torch.Tensor, flat: torch.Tensor, label: str, accumulate: bool
    ) -> Work:
        if target.numel() < flat.numel():
            slot.sent = self._channel.reduce_scatter(target, flat, label, accumulate)
            return slot.sent
        slot.sent = self._channel.all_reduce(flat, label)
        return Then(slot.sent, partial(torch.Tensor.add_ if accumulate else torch.Tensor.copy_, target, flat))

    def _zero_unfilled(self, grads: UnitGradients, views: list[torch.Tensor]) -> None:
        for written, view in zip(grads.bucket_filled, views, strict=True):
            if not written:
                view.zero_()

    # -- step -------------------------------------------------------------------------------------

    def reduce_remaining(self) -> None:
        """Return with every gradient reduced into what this rank keeps, except those that are ``late``."""
        for grads in self._order:
            if not grads.is_reduced:  # all its micro-steps were inside no_sync
                for index, param in enumerate(grads.unit.params):
                    if self._has_gradient(grads, index):
                        self._copy_to_bucket(grads, index, param)
                self._launch_reduce(grads)
        self.wait_reduces()

    def reduce_late_gradients(self) -> None:
        """Reduce the gradients that came after their unit was reduced. Call it on every rank if any rank has some."""
        self.wait_reduces()
        for grads in self._order:
            slot = self._slots.take(grads)
            for index, param in enumerate(grads.unit.params):
                if self._has_gradient(grads, index):
                    self._copy_to(grads, index, param, slot.views[index])
                else:
                    slot.views[index].zero_()
            self._flush_copies()
            self._launch_from_buffer(slot, grads, grads.shard_of_degree(grads.unit.degrees.optimizer), accumulate=True)
        self.wait_reduces()
        self.has_late_gradients = False

    # -- looking and surgery ----------------------------------------------------------------------

    def wait_reduces(self) -> None:
        """Returns with no reduce under way. Call it on every rank: a reduce may need a hand from each."""
        for work in self._works:
            work.wait_stream()
        self._works.clear()
        self._landings.settle()

    def check_backward_ended(self) -> None:
        """
        Raises:
            ZeroEngineError: a backward is under way, or the last one raised.
        """
        if self._backward.in_progress:
            raise ZeroEngineError(
                "a gradient can be read and replaced after a backward, not during one, nor after one that raised"
            )

    def unreduced_gradient(self, grads: UnitGradients, index: int) -> torch.Tensor | None:
        """This rank's own gradient of a parameter, as far as it is not reduced yet; at least fp32."""
        outside = (grads.no_sync_grads.get(index), gradient_of(grads.unit.params[index]))
        parts = [part.detach().to_dense() / self.predivide for part in outside if part is not None]
        if grads.unsharded and grads.bucket_filled[index] and not grads.is_reduced:
            parts.append(grads.param_views[index])
        wide = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
        return torch.stack(wide).sum(0) if wide else None

    def replace_gradient(self, grads: UnitGradients, index: int, value: torch.Tensor) -> None:
        """The sum over ranks of a parameter's gradient is ``value``, whatever it was. Call it on every rank."""
        unit = grads.unit
        grads.no_sync_grads.pop(index, None)
        unit.params[index].grad = None
        grads.has_grad[index] = True
        if grads.is_reduced:
            mine, flat = grads.shard_of_degree(unit.degrees.optimizer), value.flatten()
            grads.squared_norm = None
            for span in unit.layout.spans(unit.rank, unit.degrees.optimizer):
                if span.param_index == index:
                    part = flat[span.param_offset : span.param_offset + span.numel]
                    populate(mine[span.shard_offset : span.shard_offset + span.numel], write=True)
                    mine[span.shard_offset : span.shard_offset + span.numel].copy_(part)
            return
        grads.bucket_filled[index] = False
        if unit.rank == 0:  # as if it alone had computed one
            grads.no_sync_grads[index] = (value * self.predivide).to(grads.dtype)

    def fail_backward(self, after_others: bool) -> None:
        """Drop every gradient since the last step: some of the backward that raised are missing."""
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop every gradient since the last step. A reduction under way ends first, and is overwritten then."""
        self.wait_reduces()
        if self._copies is not None:
            self._copies.forget()
        for slot in self._slot_of.values():
            slot.busy = False
        self._slot_of.clear()
        self._bucket.clear()
        self.has_late_gradients = False
        for grads in self.gradients:
            grads.num_pending = 0
            grads.no_sync_grads.clear()
            for param in grads.unit.params:
                param.grad = None
        self.end_step()

    def end_step(self) -> None:
        """After a step: the next gradients overwrite."""
        for grads in self.gradients:
            grads.bucket_filled = [False] * len(grads.unit.params)
            grads.has_grad = [False] * len(grads.unit.params)
            grads.is_reduced = False

    def bucket_bytes(self) -> int:
        return self._slots.nbytes + self._landings.nbytes
