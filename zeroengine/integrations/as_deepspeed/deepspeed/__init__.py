"""DeepSpeed's names, served by zeroengine: ``zero-launch --as-deepspeed`` puts this package on the path of its ranks.

It has no code of its own. Every name and submodule is the object of ``zeroengine.integrations.deepspeed``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from zeroengine.integrations import deepspeed as _served
from zeroengine.integrations.deepspeed import module_paths

__version__ = _served.__version__


class _AbsentModules(MetaPathFinder):
    """Say of a submodule that zeroengine does not serve what it is, instead of "No module named"."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise for submodules of deepspeed; Python asks this finder after all others."""
        if fullname.startswith(f"{__name__}."):
            raise ModuleNotFoundError(
                f"{fullname} is part of DeepSpeed, and zeroengine, which runs here in its place (zero-launch "
                "--as-deepspeed), does not have it. docs/integrations/deepspeed.md lists what is served",
                name=fullname,
            )
        return None


def __getattr__(name: str) -> Any:
    return getattr(_served, name)


def _add_submodules() -> None:
    for path in (*module_paths.ALIASES, *module_paths.MODULES):
        sys.modules[f"{__name__}.{path}"] = sys.modules[f"{_served.__name__}.{path}"]


_add_submodules()
sys.meta_path.append(_AbsentModules())
