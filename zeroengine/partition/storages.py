"""The tensors that hold a parameter's values.

An ordinary parameter is its own storage. A quantized one has several: packed values, scales and tables. Each of them is
an ``nn.Parameter`` with a name and a slot of its own, so that units, checkpoints and plans need no rule for quantized
parameters. ``runtime/quantized_parameters.py`` makes them.
"""

from __future__ import annotations

from torch import nn

# The attribute of a quantized parameter that holds its storages, and what to add to its name for each.
STORAGES_ATTRIBUTE = "_zeroengine_storages"
# The attribute of a storage that holds the parameter, where the parameter has no values besides its storages.
WRAPPER_ATTRIBUTE = "_zeroengine_wrapper"


def is_quantized(param: nn.Parameter) -> bool:
    """Return whether ``param`` is quantized, so that its storages keep their bytes in any precision."""
    return STORAGES_ATTRIBUTE in param.__dict__


def exact_storages(model: nn.Module) -> set[nn.Parameter]:
    """Return the storages of all quantized parameters of a model, whose values mean nothing in another dtype."""
    return {storage for param in model.parameters() if is_quantized(param) for _, storage in storages_of(param)}


def storages_of(param: nn.Parameter) -> tuple[tuple[str, nn.Parameter], ...]:
    """Return the storages of ``param``, each with what follows the name of ``param`` in the name of the storage."""
    storages: tuple[tuple[str, nn.Parameter], ...] = param.__dict__.get(STORAGES_ATTRIBUTE, (("", param),))
    return storages
