"""Finds parameters that were added to the model or to the optimizer, or unfrozen, after ``initialize``.

The engine trains and saves the parameters that it was given. A parameter that is registered later belongs to no unit:
its gradient would not be reduced, it would not be updated, and no checkpoint would contain it. One that was frozen has
no master and no moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.partition.cut import plain_name
from zeroengine.partition.storages import storages_of
from zeroengine.runtime.unit import Unit
from zeroengine.utils.formats import listed
from zeroengine.utils.torch_internals import DisableTorchFunctionSubclass, children_of, parameters_of

# The number of names that a message shows.
MAX_NAMES_SHOWN = 5

_values_of: Any = dict.values


class ForeignParameters:
    """Compares the model and the optimizer with what ``initialize`` was given.

    The comparison runs at every step, so it is one pass over references in C: about 0.1 us for each module and
    parameter. Names are looked up only if something differs.

    Args:
        model: The module that was passed to ``initialize``.
        units: All units of the engine.
        optimizer: The optimizer that was passed to ``initialize``, or built from the configuration.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._names: dict[nn.Parameter, str] = {
            param: slot.name for unit in units for param, slot in zip(unit.params, unit.layout.slots, strict=True)
        }
        # An engine that trains nothing runs forwards alone, whichever parameters require a gradient.
        trains = any(unit.trainable for unit in units)
        self._frozen = [param for unit in units if trains and not unit.trainable for param in unit.params]
        self._original_names = {name for name, _ in _named_parameters(model)}
        self._groups = optimizer.param_groups
        # ``_group_of`` keeps the parameters alive, so no other object gets one of these ids.
        self._group_ids, self._group_of = _ids(self._groups), _group_of(self._groups)
        self._remember()

    def check(self) -> None:
        """Compare model and optimizer with what ``initialize`` was given. This is not a collective.

        Parameters may be removed, tied to one another, or registered under other names.

        Raises:
            ZeroEngineError: The model has a parameter that is not the engine's, the optimizer has other groups, or a
                parameter is no longer frozen.
        """
        self._check_model()
        self._check_frozen()
        self._check_groups()

    def check_trained(self) -> None:
        """Compare the model alone, before a backward in which all parameters of the engine are frozen.

        As ``check`` runs at every step, this one is for backwards after which no step can follow.

        Raises:
            ZeroEngineError: The model has a trainable parameter that is not the engine's.
        """
        self._check_model(trained_only=True)

    def _check_model(self, *, trained_only: bool = False) -> None:
        present = self._structure()
        # Identity is compared, because equality would compare the elements of tensors.
        if len(present) == len(self._known_structure) and all(map(is_, present, self._known_structure)):
            return
        foreign = [
            f"{name} ({'replaced' if name in self._original_names else 'added'})"
            for name, param in _named_parameters(self._model)
            if (param.requires_grad or not trained_only)
            and not any(storage in self._names for _, storage in storages_of(param))
        ]
        if foreign:
            raise ZeroEngineError(
                f"parameters of the model that are not those of initialize(): {listed(foreign, MAX_NAMES_SHOWN)}. The "
                "engine neither trains nor saves them. Change the model before initialize(): add heads and adapters "
                "there, and load with assign=True there; or call engine.close(), and initialize() again. To write "
                "values into a model that has an engine, use engine.load_weights(), or write in place inside `with "
                "zeroengine.gathered(module):`. A module that is not to be trained with this model can be kept out of "
                "it, in a plain list."
            )
        # The new structure is remembered, so that the next check is fast again.
        if not trained_only:
            self._remember()

    def _check_frozen(self) -> None:
        # Reading the flag reads no value, so it must not gather a released parameter.
        with DisableTorchFunctionSubclass():
            unfrozen = next((param for param in self._frozen if param.requires_grad), None)
        if unfrozen is not None:
            raise ZeroEngineError(
                f"parameter {self._names[unfrozen]} was frozen at initialize() and requires a gradient now: it would "
                "not be trained, because it has no master and no moments. Make it trainable before initialize(); after "
                "that requires_grad may be switched off and on between steps."
            )

    def _check_groups(self) -> None:
        groups = self._optimizer.param_groups
        kind = type(self._optimizer).__name__
        # Unpickling and torch's load_state_dict assign a new list. The engine still reads hyperparameters from the old
        # list.
        if groups is not self._groups:
            raise ZeroEngineError(
                f"the {kind} that was passed to initialize() has another list of param_groups now, while the engine "
                "goes on with the first one. Change hyperparameters in engine.optimizer.param_groups, and load the "
                "optimizer's state with engine.load_checkpoint()."
            )
        present = _ids(groups)
        if present == self._group_ids:
            return
        before, after = self._group_of, _group_of(groups)
        moved = [param for param in after | before if after.get(param) != before.get(param)]
        # Another order within a group changes nothing: masters and moments are found by parameter.
        if not moved and len(present) == len(self._group_ids):
            self._group_ids = present
            return
        # A parameter from outside the model has no name, so its shape helps the user to find it.
        names = [self._names.get(p, f"a parameter of shape {tuple(p.shape)}") for p in moved]
        raise ZeroEngineError(
            f"the param_groups of the {kind} changed after initialize(): they hold other parameters "
            f"({listed(names, MAX_NAMES_SHOWN) or 'an empty group'}). The engine cannot follow: masters and moments "
            "belong to the groups of that time. Put every parameter into its group before initialize(); the "
            "hyperparameters of a group may change at any time."
        )

    def _remember(self) -> None:
        # A ScriptModule keeps its parameters in C++ and lacks these attributes, but its structure is fixed.
        self._known_modules = [m for m in self._model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._known_structure = self._structure()

    def _structure(self) -> list[object]:
        """Return the parameters and the children of the known modules."""
        parameters, children = map(parameters_of, self._known_modules), map(children_of, self._known_modules)
        return list(chain.from_iterable(map(_values_of, chain(parameters, children))))


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter under all of its names, without the parts that torch.compile adds."""
    for name, param in model.named_parameters(remove_duplicate=False):
        yield plain_name(name), param


def _ids(groups: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in groups]


def _group_of(groups: Sequence[dict[str, Any]]) -> dict[nn.Parameter, int]:
    return {param: index for index, group in enumerate(groups) for param in group["params"]}
