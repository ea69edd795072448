"""Gather whole parameters inside a ``with``, on every rank, and keep what is written to them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.migration.messages import explains_arguments
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.released_parameter import OWNER_ATTRIBUTE
from zeroengine.runtime.unit import Unit
from zeroengine.utils.checksum import checksum


class ParameterOwner(Protocol):
    """The part of an engine that ``gathered`` uses."""

    gatherer: Gatherer

    def first_writers(self, changed: Sequence[bool]) -> list[int]:
        """Return for each flag the lowest rank that raised it, or -1. A collective."""

    def apply_writes(self, unit: Unit, writer: int) -> None:
        """Give all ranks the values of ``unit`` that rank ``writer`` holds. A collective."""

    def units_of(self, params: Iterable[nn.Parameter]) -> list[Unit]:
        """Return the units that hold any of ``params``."""

    def note_gradient_read(self) -> None:
        """Note that ``grad`` of a released parameter was read and is None."""


def owner_of(param: nn.Parameter) -> ParameterOwner | None:
    """Return the owner that was attached to ``param``; None where there is none or it is gone."""
    # The reference is weak, so a model that outlives its engine does not keep the engine's buffers in memory.
    reference = param.__dict__.get(OWNER_ATTRIBUTE)
    return reference() if reference is not None else None


def attach_owner(params: Iterable[nn.Parameter], owner: ParameterOwner) -> None:
    """Let ``owner_of`` find ``owner`` from each of ``params``, for as long as it lives."""
    for param in params:
        param.__dict__[OWNER_ATTRIBUTE] = weakref.ref(owner)


@explains_arguments
@contextlib.contextmanager
def gathered(module_or_params: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> Iterator[None]:
    """Gather whole parameters inside the ``with``, at every stage, and keep what is written to them.

    Enter and leave it on every rank, with the same parameters. Where ranks wrote different values, all ranks take
    those of the lowest rank that wrote. Inside, ranks may run different numbers of forwards. Parameters still
    require gradients there: to write in place enter ``torch.no_grad()`` as well, as for any parameter.

    Args:
        module_or_params: A module (all parameters below it), one parameter, or several.

    Raises:
        ZeroEngineError: The parameters belong to no engine, or were given another shape inside.
    """
    if isinstance(module_or_params, nn.Module):
        params = list(module_or_params.parameters())
    elif isinstance(module_or_params, nn.Parameter):
        params = [module_or_params]
    else:
        params = list(module_or_params)
    # Several engines would gather over several groups of ranks, and no order of their collectives is agreed on.
    owners = {owner_of(param) for param in params}
    if len(owners) != 1 or None in owners:
        # A module without parameters is common in a loop over submodules, and gathering nothing is no error.
        if not params:
            yield
            return
        raise ZeroEngineError(
            "gathered() takes a module or parameters of one model that was passed to zeroengine.initialize(); "
            "some of these belong to none, or to different engines"
        )
    owner = owners.pop()
    assert owner is not None
    units = owner.units_of(params)
    # If gathering one unit raises, those that were pinned before it are released again.
    with contextlib.ExitStack() as undo:
        for unit in units:
            owner.gatherer.pin(unit)
            undo.callback(owner.gatherer.unpin, unit)
        # Writes through `.data` change no version counter of torch, so the values themselves are compared.
        before = [checksum(unit.full_buffer) for unit in units]
        # From here on the `finally` below unpins the units, after it has taken over what was written.
        undo.pop_all()
    try:
        # After an error inside, the exchange below still runs, since the other ranks wait in it.
        yield
    finally:
        # A parameter whose `.data` was replaced no longer views the full buffer. Values of the same shape are copied
        # back.
        refused = [name for unit in units for name in unit.readopt_data()]
        changed = [checksum(unit.full_buffer) != seen for unit, seen in zip(units, before, strict=True)]
        # The lowest rank that wrote wins, so that all ranks agree without a second exchange.
        for unit, writer in zip(units, owner.first_writers(changed), strict=True):
            if writer >= 0:
                owner.apply_writes(unit, writer)
            owner.gatherer.unpin(unit)
    # This error comes last, after every rank has taken part in the collectives above.
    if refused:
        raise ZeroEngineError(
            f"gathered(): the shape of a parameter cannot change, but .data was replaced: {', '.join(refused)}. Change "
            "the model before initialize()."
        )
