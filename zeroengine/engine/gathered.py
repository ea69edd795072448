"""Gather whole parameters, and keep what is written to them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroengine.deferred_init.temporary_values import temporary_values
from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.average_weights import average_weights
from zeroengine.errors import ZeroEngineError
from zeroengine.migration.messages import explains_arguments
from zeroengine.ops import digests
from zeroengine.partition.storages import storages_of
from zeroengine.runtime.released_parameter import OWNER_ATTRIBUTE, is_released_parameter, stop_observing_data
from zeroengine.runtime.unit import Unit
from zeroengine.utils.torch_internals import current_graph_task_id, version_of


class ParameterOwner:
    """Serves the functions that take parameters alone, for the parameters of one engine.

    Each parameter refers to its owner weakly, so a model that outlives its engine does not keep the engine's buffers in
    memory.

    Args:
        parts: The parts of the engine.
        engine: Returns what ``engine_of`` returns for the model.
    """

    def __init__(self, parts: EngineParts, engine: Callable[[], Any]) -> None:
        self.parts, self.engine = parts, engine
        for unit in parts.partition.units:
            for param in unit.params:
                param.__dict__[OWNER_ATTRIBUTE] = weakref.ref(self)
                # Pickle asks the instance for this, and gets a parameter that knows nothing of an engine. Copies have
                # neither.
                param.__dict__["__getstate__"] = partial(_state_without_engine, weakref.ref(param))
                for attribute in (OWNER_ATTRIBUTE, "__getstate__"):
                    parts.setup.partition_undo.hooks.callback(param.__dict__.pop, attribute, None)

    def units_of(self, params: Iterable[nn.Parameter]) -> list[Unit]:
        """Return the units that hold any of ``params``, in the order of registration."""
        # Reductions that are left of the last backward are launched first. A rank that launched them after the caller's
        # exchange would meet another collective of its peers.
        self.parts.passes.backward.end_if_over()
        param_ids = {id(param) for param in params}
        return [unit for unit in self.parts.partition.units if any(id(param) in param_ids for param in unit.params)]

    def first_writers(self, changed: Sequence[bool], units: Sequence[Unit]) -> list[int]:
        """Return for each flag the lowest rank that raised it, or -1. A collective.

        Args:
            changed: The flags.
            units: For each flag the unit that it is about. Of ranks that have other slices of it none is returned,
                unless no rank of this one's slice has raised the flag.
        """
        group = self.parts.ranks.group
        # Each rank raises its flags in its own column, so one sum shows every rank's flags to all.
        flags = torch.zeros(len(changed), group.world_size, dtype=torch.float64, device="cpu")
        flags[:, group.rank] = torch.tensor(changed, dtype=torch.float64, device="cpu")
        flat = self.parts.ranks.sums.all_reduce_scalars(flags.flatten().to(group.device), "gathered")
        raised = ([rank for rank, flag in enumerate(row) if flag] for row in flat.view_as(flags).tolist())
        preferred = (
            sorted(ranks, key=lambda rank: rank not in self.parts.ranks.holders(unit).numbers)
            for ranks, unit in zip(raised, units, strict=True)
        )
        return [next(iter(ranks), -1) for ranks in preferred]

    def apply_writes(self, unit: Unit, writers: Sequence[int]) -> None:
        """Give all ranks the values that were written to ``unit``, masters included. A collective.

        Args:
            unit: The unit.
            writers: For each parameter the rank that wrote it, or -1.
        """
        written = [index for index, writer in enumerate(writers) if writer >= 0]
        names = [unit.layout.slots[index].name for index in written]
        views = unit.full_buffer.views
        for index in written:
            # Whole values travel, since the writer is the only rank that holds them all.
            holders = self.parts.ranks.holders(unit)
            # Where another slice was written alone, this one keeps its values.
            source = holders.numbers.index(writers[index]) if writers[index] in holders.numbers else 0
            holders.broadcast(views[index], f"of {unit.layout.slots[index].name}", source)
            # Autograd then refuses a backward through a graph that saved the old values.
            torch.autograd.graph.increment_version(unit.params[index])
        unit.originals.unset.difference_update(names)
        unit.copy_full_to_shard()
        # These values are the same on every rank now, so the next comparison must not take them for a divergence.
        unit.forget_writes(written)
        self.parts.passes.outside_writes.reset_baseline(unit)

        def update_masters() -> None:
            """Let the masters take the values."""
            for shard in self.parts.states.optimizer.shards:
                if shard.unit is unit:
                    shard.reload_master()
            self.parts.states.note_new_masters(unit, names)

        # Sampling may gather parameters, and merge adapters into them, while the masters are away.
        self.parts.loop.state_offloader.when_resident(update_masters, ("masters", "averages"))

    def note_gradient_assigned(self, param: nn.Parameter) -> None:
        """Note that user code has assigned to ``grad`` of ``param``, perhaps None, outside of a backward."""
        if current_graph_task_id() < 0:
            self.parts.passes.reducer.note_assigned(param)

    def engine_gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return what a read of ``grad`` of a parameter finds where no tensor is in it."""
        # Within a backward torch itself reads `grad`, and finds this rank's gradient.
        if not self._has_gradients or current_graph_task_id() >= 0:
            return None
        set_to_zero = partial(_set_gradient_to_zero, weakref.ref(self), weakref.ref(param))
        return self.parts.passes.reducer.user_gradients.engine_gradient(param, set_to_zero)

    @property
    def _has_gradients(self) -> bool:
        return self.parts.loop.accumulation.has_gradients or self.parts.passes.backward.in_progress

    def set_gradient_to_zero(self, param: nn.Parameter) -> None:
        """Set the gradient of a parameter in the step so far to zero, if there is one."""
        user_gradients = self.parts.passes.reducer.user_gradients
        if self._has_gradients and not user_gradients.is_dropped(param):
            self.parts.passes.reducer.note_assigned(param, is_zero=True)


def _set_gradient_to_zero(owner_ref: weakref.ref[ParameterOwner], param_ref: weakref.ref[nn.Parameter]) -> None:
    owner, param = owner_ref(), param_ref()
    if owner is not None and param is not None:
        owner.set_gradient_to_zero(param)


def _state_without_engine(param_ref: weakref.ref[nn.Parameter]) -> dict[str, Any]:
    param = param_ref()
    assert param is not None
    own = getattr(type(param), "__getstate__", None)
    # Classes such as those of quantized weights know how to copy themselves.
    state = vars(param) if own is getattr(torch.Tensor, "__getstate__", None) or own is None else own(param)
    return {k: value for k, value in state.items() if k != "__getstate__" and not k.startswith("_zeroengine_")}


def owner_of(param: nn.Parameter) -> ParameterOwner | None:
    """Return the owner of ``param``; None where there is none or its engine is gone."""
    reference = param.__dict__.get(OWNER_ATTRIBUTE)
    return reference() if reference is not None else None


@explains_arguments
@contextlib.contextmanager
def gathered(
    module_or_params: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, ema: bool = False
) -> Iterator[None]:
    """Gather whole parameters inside the ``with``, at every stage, and keep what is written to them.

    Enter and leave it on every rank, with the same parameters. Where ranks wrote different values, all ranks take
    those of the lowest rank that wrote a parameter. Inside, ranks may run different numbers of forwards. Parameters
    still require gradients there: to write in place enter ``torch.no_grad()`` as well, as for any parameter.

    Before ``initialize``, parameters from ``meta_init`` have their values inside, and what is written stays in memory.
    Ranks exchange nothing then: ``initialize`` takes the values of rank 0. Ordinary parameters are left as they are.

    Args:
        module_or_params: A module (all parameters below it), one parameter, or several.
        ema: Whether parameters have the moving averages of the weights inside, which cannot be written. See
            ``Engine.average_weights``.

    Raises:
        ZeroEngineError: The parameters belong to different engines, or some to one and others to none, or to an engine
            that is gone; or they were given another shape inside, or averages were written, or none are kept.
    """
    if isinstance(module_or_params, nn.Parameter):
        params = [module_or_params]
    else:
        params = list(module_or_params.parameters() if isinstance(module_or_params, nn.Module) else module_or_params)
    params = [storage for param in params for _, storage in storages_of(param)]
    # A module without parameters is common in a loop over submodules, and gathering nothing is no error.
    if not params:
        yield
        return
    if not any(OWNER_ATTRIBUTE in param.__dict__ or is_released_parameter(param) for param in params):
        if ema:
            raise ZeroEngineError("gathered(ema=True) before initialize(): an engine keeps the moving averages")
        with temporary_values(params):
            yield
        return
    # Several engines would gather over several groups of ranks, and no order of their collectives is agreed on.
    owner, *others = {owner_of(param) for param in params}
    if owner is None or others:
        raise ZeroEngineError(
            "gathered() takes a module or parameters of one model that was passed to zeroengine.initialize(); "
            "some of these belong to none, or to different engines, or their engine is gone"
        )
    owner.parts.loop.state_offloader.check_resident("gathered()", ("parameters",))
    units, gatherer = owner.units_of(params), owner.parts.passes.gatherer
    gatherer.check_no_stream("gathered()")
    if ema and not gatherer.has_averages:
        with average_weights(owner.parts, "gathered(ema=True)"), gathered(params):
            yield
        return
    # If gathering one unit raises, those that were pinned before it are released again.
    with contextlib.ExitStack() as undo:
        for unit in units:
            gatherer.pin(unit)
            undo.callback(gatherer.unpin, unit)
            # A forward in progress may have written before.
            unit.collect_writes()
            # Writes are found by their digests here.
            for param in unit.params:
                stop_observing_data(param)
        # Writes through `.data` change no version counter of torch, so the values themselves are compared.
        before = [_contents(unit) for unit in units]
        # From here on the `finally` below unpins the units, after it has taken over what was written.
        undo.pop_all()
    try:
        # After an error inside, the exchange below still runs, since the other ranks wait in it.
        yield
    finally:
        # A parameter whose `.data` was replaced no longer views the full buffer. Values of the same shape are copied
        # back.
        refusals = [name for unit in units for name in unit.full_buffer.readopt_data()]
        after = [_contents(unit) for unit in units]
        changed = [now != then for now, then in zip(after, before, strict=True)]
        writers = owner.first_writers(changed, units)
        pinned = list(units)
        try:
            for index, writer in enumerate(writers):
                if writer >= 0 and not gatherer.has_averages:
                    # Few units are written, so the ranks exchange flags of parameters for those alone.
                    flags = [now != then for now, then in zip(after[index], before[index], strict=True)]
                    owner.apply_writes(units[index], owner.first_writers(flags, [units[index]] * len(flags)))
                else:
                    # A rank may have written the values that were there, which is no difference to the others.
                    units[index].forget_writes(())
                gatherer.unpin(pinned.pop(0))
        finally:
            # A disk may have had no room for what was written, which then is dropped.
            for unit in pinned:
                unit.forget_writes(())
                gatherer.unpin(unit)
    if gatherer.has_averages and max(writers, default=-1) >= 0:
        raise ZeroEngineError(
            "gathered(): a moving average of the weights was written, which is dropped: averages follow the weights"
        )
    # This error comes last, after every rank has taken part in the collectives above.
    if refusals:
        raise ZeroEngineError(
            f"gathered(): the shape of a parameter cannot change, but .data was replaced: {', '.join(refusals)}. "
            "Change the model before initialize()."
        )


def _contents(unit: Unit) -> list[object]:
    """Return for each parameter of a gathered unit what shows whether it was written."""
    params, slots = unit.params, unit.layout.slots
    # Zeros may be the first values that a parameter gets, and a digest would not show them. Its version does.
    return [
        (digest, version_of(param) if slot.name in unit.originals.unset else 0)
        for digest, param, slot in zip(digests(unit.full_buffer.views), params, slots, strict=True)
    ]
