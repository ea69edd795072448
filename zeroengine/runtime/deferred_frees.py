"""Frees full buffers as soon as no other tensor aliases them.

[Note: Aliased full buffers]
A view of a parameter, its ``.detach()`` or a graph that saved it alias the full buffer. Freeing the memory would
invalidate them (``FullBuffer.is_aliased``), so the free is deferred: it is tried again whenever a module or a pass
ends. If the buffer is still aliased at the next step, the unit gets a new one, and the aliases keep the old memory with
its values.

Whether a buffer is aliased concerns this rank alone. The unit counts as released in any case, and its next use gathers
it again, so that all ranks launch the same collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from zeroengine.runtime.unit import Unit
from zeroengine.utils.formats import format_byte_size, listed
from zeroengine.utils.torch_internals import current_graph_task_id, functorch_active

log = logging.getLogger("zeroengine")

# The units that the warning names.
NUM_SHOWN = 3
# Between steps, fewer bytes are not worth a warning: they cost nothing but memory.
WARNED_BYTES = 64 << 20


class DeferredFrees:
    """The released units whose full buffers are not freed yet.

    Attributes:
        waiting: The units, in the order of their releases.
    """

    def __init__(self) -> None:
        self.waiting: dict[Unit, None] = {}
        # A graph saved parameters of these units through the user's hooks, so a read in the backward goes unnoticed.
        self._saved_by_user_hooks: set[Unit] = set()
        self._warnings: set[str] = set()
        # Whether torch.func has run where a unit was released. What it saved may outlive its transform.
        self._has_seen_torch_func = False

    def units(self) -> list[Unit]:
        """Return the units whose full buffers cannot be freed now."""
        self.retry()
        return list(self.waiting)

    def free(self, unit: Unit) -> None:
        """Free the full buffer of a released unit, now or as soon as possible."""
        self._has_seen_torch_func = self._has_seen_torch_func or functorch_active()
        # Autograd runs hooks without gradients. The graph of a backward is one of a forward with autograd.
        exactly = self._has_seen_torch_func or not (torch.is_grad_enabled() or current_graph_task_id() >= 0)
        if unit in self._saved_by_user_hooks or unit.full_buffer.is_aliased(exactly=exactly):
            self.waiting[unit] = None
        else:
            if unit in self.waiting:
                # It was waiting since an earlier release.
                del self.waiting[unit]
            unit.full_buffer.free()

    def retry(self) -> None:
        """Free the buffers that are no longer aliased, unless their unit was gathered again."""
        for unit in list(self.waiting) if self.waiting else ():
            # A unit that was gathered again is in use, and its next release calls ``free`` again.
            if unit.is_released and unit not in self._saved_by_user_hooks:
                if not unit.full_buffer.is_aliased(exactly=True):
                    del self.waiting[unit]
                    unit.collect_writes()
                    unit.full_buffer.free()

    def keep_until_update(self, units: Iterable[Unit]) -> None:
        """Keep the buffers of ``units``, which a graph saved through the user's hooks, until the next update."""
        self._saved_by_user_hooks.update(units)

    def begin_update(self) -> None:
        """Stop keeping buffers for the user's hooks: after the update no backward may use the old values."""
        self._saved_by_user_hooks.clear()

    def replace_buffers(self) -> None:
        """Give released units new full buffers where their old ones are still aliased."""
        for unit in list(self.waiting):
            if unit.is_released and unit not in self._saved_by_user_hooks:
                # The next gather would write new values into memory that other tensors still read. They keep the old
                # memory instead. That costs a buffer, and a view no longer follows its parameter, so the user gets a
                # warning.
                self._warn("are held at a step")
                unit.replace_full_buffer()
                del self.waiting[unit]

    def warn_of_memory(self) -> None:
        """Warn, once, if buffers that cannot be freed hold much memory."""
        if self._nbytes() >= WARNED_BYTES:
            self._warn("stay gathered for now")

    def _nbytes(self) -> int:
        return sum(unit.gathered_bytes() for unit in self.waiting)

    def _warn(self, what: str) -> None:
        if what in self._warnings:
            return
        self._warnings.add(what)
        log.warning(
            "%s of parameters %s (%s): a tensor shares their memory, such as a view or .detach() that is kept, or a "
            "graph. engine.memory() counts them. Keep a copy, such as weight.detach().clone(); a tensor that shares "
            "their memory at the next step keeps the old values.",
            format_byte_size(self._nbytes()),
            what,
            listed([unit.name for unit in self.waiting], NUM_SHOWN),
        )
