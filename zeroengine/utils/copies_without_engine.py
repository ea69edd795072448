"""What copies and pickles of a model take along of the engine: nothing that needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeroengine.utils.compiler_disable import disable_compile


class UncopiedHook:
    """A hook of the engine on a module. A copy or a pickle of the module has one in its place that does nothing.

    torch.compile breaks its graph at the hook.

    Args:
        function: What the hook calls.
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
    """Return None, which leaves the inputs and outputs of a module as they are."""
