"""A hook that copies and pickles of a model leave behind, because they have no engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeroengine.utils.compiler_disable import disable_compile


class UncopiedHook:
    """A hook of the engine on a module. In a copy or pickle of the module it becomes a hook that does nothing.

    torch.compile breaks its graph at the hook.

    Args:
        function: Called by the hook with its own arguments.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @disable_compile
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return UncopiedHook, (do_nothing,)


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Return None, which leaves the inputs and outputs of a module unchanged."""
