"""Run a model's own ``load_state_dict()``, with its hooks and overrides, while parameters stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zeroengine.errors import CheckpointError
from zeroengine.runtime.dtensors import cut_whole_tensors
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.released_parameter import mark_gathered, mark_released
from zeroengine.runtime.state_dict_reads import StandIns
from zeroengine.runtime.unit import Unit
from zeroengine.utils.torch_internals import (
    LOAD_FROM_STATE_DICT,
    LOAD_POST_HOOKS,
    LOAD_PRE_HOOKS,
    DisableTorchFunction,
    version_of,
)

# The attribute of a stand-in for a stored tensor that holds the tensor's name.
_STORED = "_zeroengine_stored"


def changes_loads(model: nn.Module) -> bool:
    """Return whether code of the model, such as a hook, takes part in ``load_state_dict()``."""
    return any(
        any(hook.hook is not cut_whole_tensors for hook in module.__dict__.get(LOAD_PRE_HOOKS, {}).values())
        or module.__dict__.get(LOAD_POST_HOOKS)
        # Modules of torch, such as BatchNorm, only fill in what older versions did not save.
        or not all(
            getattr(getattr(type(module), name), "__module__", "torch.nn").startswith("torch.nn.")
            for name in ("load_state_dict", LOAD_FROM_STATE_DICT)
        )
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    )


class StateDictLoad(StandIns):
    """Runs ``load_state_dict()`` and records what it copies into parameters and buffers, instead of copying it.

    Args:
        model: The model.
        units: Its units.
        gatherer: Gathers them where the model's code reads parameters.
        targets: The parameters and buffers that are not written.

    Attributes:
        assigned: What was copied into each of them.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], gatherer: Gatherer, targets: Collection[torch.Tensor]
    ) -> None:
        super().__init__(model, units, gatherer)
        self._model, self._targets = model, set(targets)
        self.assigned: dict[torch.Tensor, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function, unless it copies values into a target."""
        if func is torch.Tensor.copy_ and (target := self.original_of(args[0])) in self._targets:
            self.assigned[target] = args[1]
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    def run(self, state: Mapping[str, Any], where: str) -> tuple[list[str], list[str]]:
        """Call ``load_state_dict()``, and return the missing and the unexpected keys.

        Args:
            state: The values by key.
            where: Where they come from, for the message.

        Raises:
            CheckpointError: The model's code refuses them.
        """
        try:
            with self:
                missing, unexpected = self._model.load_state_dict(state, strict=False)
        except RuntimeError as error:
            raise CheckpointError(f"{where} does not load into the model: {error}") from error
        return missing, unexpected


def stored_stand_in(name: str, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> Any:
    """Return a tensor for a stored one, which is read when its values are used.

    Args:
        name: The name that it is stored under.
        shape: Its shape.
        dtype: Its dtype.
        read: Returns its values.
    """
    stand_in: Any = torch.empty((), dtype=dtype, device="cpu").expand(tuple(shape))

    def resolve(tensor: Any, operation: str) -> None:
        with DisableTorchFunction():
            mark_gathered(tensor)
            tensor.data = read()

    stand_in.__dict__[_STORED] = name, version_of(stand_in)
    mark_released(stand_in, resolver=resolve)
    return stand_in


def stored_name(tensor: torch.Tensor) -> str | None:
    """Return the name of the stored tensor that ``tensor`` stands for; None where its values are others."""
    name, version = tensor.__dict__.get(_STORED, (None, 0))
    return name if version_of(tensor) == version else None
