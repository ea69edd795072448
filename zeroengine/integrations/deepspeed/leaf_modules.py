"""DeepSpeed's leaf modules: marks on modules, which change nothing here.

DeepSpeed gathers a leaf module as a whole. Here each unit is gathered as a whole, and "units" in the configuration
names the modules that are units.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from zeroengine.errors import ConfigError, ZeroEngineError
from zeroengine.integrations.deepspeed.script_utils import logger

_LEAF = "_z3_leaf"
# Upstream lists mixture-of-experts blocks of transformers here. No module needs to be a leaf in zeroengine.
DEFAULT_LEAF_MODULE_CLASSES: list[str] = []
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class DeepSpeedZeroLeafModuleConfig:
    """The section "leaf_module" of "zero_optimization".

    Args:
        classes: Names of classes, or one name.
        names: Names of modules, or one name.
        name_suffixes: Ends of names of modules, or one end.
    """

    def __init__(
        self, classes: Iterable[str] = (), names: Iterable[str] = (), name_suffixes: Iterable[str] = ()
    ) -> None:
        self.classes = _as_list(classes)
        self.names = _as_list(names)
        self.name_suffixes = _as_list(name_suffixes)


def _as_list(names: Iterable[str]) -> list[str]:
    """Return names without repetition."""
    return list(dict.fromkeys([names] if isinstance(names, str) else map(str, names)))


def mark_leaf_modules(model: nn.Module, section: Any) -> None:
    """Mark the modules that the section "leaf_module" of a configuration names.

    Raises:
        ConfigError: The section is wrong.
    """
    if section is None:
        return
    known = {"classes", "names", "name_suffixes"}
    if not isinstance(section, Mapping) or set(section) - known:
        raise ConfigError(f"zero_optimization.leaf_module: write a section of {sorted(known)}, found {section!r:.100}")
    settings = DeepSpeedZeroLeafModuleConfig(**section)
    if settings.classes:
        set_z3_leaf_modules(model, settings.classes, raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, settings.names, raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, settings.name_suffixes, raise_if_not_found=False)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes and their subclasses as leaves, and return them.

    Args:
        model: The model.
        leaf_module_classes: Classes, or names of classes with or without their module.
        raise_if_not_found: Whether it is an error that the model has no such module.

    Raises:
        ZeroEngineError: The model has no such module.
    """
    modules = _modules_of(model, leaf_module_classes, raise_if_not_found)
    _mark(modules)
    return modules


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names, and return them with the names that are not of the model."""
    return _mark_by_name(model, module_names, raise_if_not_found, lambda name, wanted: name == wanted)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end so, and return them with the ends that are not of the model."""
    return _mark_by_name(model, module_name_suffixes, raise_if_not_found, str.endswith)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or remove its mark."""
    setattr(model, _LEAF, flag)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of the modules of these classes, and return them."""
    modules = _modules_of(model, leaf_module_classes, raise_if_not_found)
    for module in modules:
        set_z3_leaf_module(module, False)
    return modules


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether a module is marked."""
    return bool(getattr(model, _LEAF, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Return whether a parameter is marked: none is."""
    return hasattr(model, "ds_z3_leaf_module")


def _modules_of(
    model: nn.Module, classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool
) -> list[nn.Module]:
    modules = [module for module in model.modules() if _names_of_class(type(module)).intersection(classes)]
    if not modules and raise_if_not_found:
        raise _not_found(classes)
    return modules


def _names_of_class(kind: type) -> set[type | str]:
    """Return a class and its bases, and all their names, with and without their modules."""
    names: set[type | str] = set()
    for base in kind.__mro__:
        names |= {base, base.__name__, base.__qualname__, f"{base.__module__}.{base.__qualname__}"}
    return names


def _mark_by_name(
    model: nn.Module, wanted_names: Sequence[str], raise_if_not_found: bool, matches: Any
) -> tuple[list[nn.Module], list[str]]:
    named = {name: module for name, module in model.named_modules() if name}
    missing = [wanted for wanted in wanted_names if not any(matches(name, wanted) for name in named)]
    if missing and raise_if_not_found:
        raise _not_found(missing)
    modules = [module for name, module in named.items() if any(matches(name, wanted) for wanted in wanted_names)]
    _mark(modules)
    return modules, missing


def _not_found(names: Iterable[Any]) -> ZeroEngineError:
    return ZeroEngineError(f"no module of the model is one of {', '.join(sorted(map(str, names)))}")


def _mark(modules: list[nn.Module]) -> None:
    for module in modules:
        set_z3_leaf_module(module, True)
    if modules and os.environ.get("RANK", "0") == "0":
        logger.info(
            '%d leaf modules are marked, which changes nothing: name modules in "units" of the configuration to '
            "gather them whole",
            len(modules),
        )
