"""Parameters that were built under ``meta_init(values=False)`` and wait for weights to be loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.runtime.unit import Unit
from zeroengine.utils.compiler_disable import disable_compile

# One message shows at most so many names.
NUM_SHOWN = 5


def forbid_forward_while_unset(model: nn.Module, units: Sequence[Unit]) -> None:
    """Make a forward of ``model`` raise ``ZeroEngineError`` for as long as some of its parameters have no values.

    The hook that checks this removes itself when all parameters are set.
    """
    # Almost every model has all its values, and then no hook costs time at every forward.
    if not any(unit.unset_params for unit in units):
        return

    @disable_compile
    def check_all_set(module: nn.Module, args: Any) -> None:
        names = [slot.name for unit in units for slot in unit.layout.slots if slot.name in unit.unset_params]
        if not names:
            handle.remove()
        # A deep copy of the model takes this hook along. The copy has parameters of its own, which may have values.
        elif module is model:
            more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
            raise ZeroEngineError(
                f"these parameters were built under meta_init(values=False) and have no values yet: "
                f"{', '.join(names[:NUM_SHOWN])}{more}. Load them with engine.load_weights(path) or "
                "engine.load_checkpoint(directory)."
            )

    handle = model.register_forward_pre_hook(check_all_set, prepend=True)


def mark_loaded(units: Sequence[Unit], missing: Sequence[str]) -> None:
    """Record that weights were loaded into every parameter except those named in ``missing``."""
    for unit in units:
        # A partial load sets some parameters only. The others keep the forward forbidden.
        unit.unset_params &= set(missing)
