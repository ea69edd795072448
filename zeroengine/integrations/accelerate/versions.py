"""The oldest version of accelerate that the integration works with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from zeroengine.errors import ZeroEngineError

# Earlier releases have other arguments and hooks.
OLDEST = (1, 15)


def check_version() -> None:
    """Check that accelerate is installed, in a version that is new enough.

    Raises:
        ZeroEngineError: It is absent or too old. The message says what to install.
    """
    wanted = f"accelerate>={'.'.join(map(str, OLDEST))}"
    try:
        installed = version("accelerate")
    except PackageNotFoundError:
        raise ZeroEngineError(
            f"zeroengine.integrations.accelerate needs {wanted}, and accelerate is not installed. Run "
            "pip install 'zeroengine[accelerate]'."
        ) from None
    numbers = tuple(int("".join(ch for ch in part if ch.isdigit()) or 0) for part in installed.split(".")[:2])
    if numbers < OLDEST:
        raise ZeroEngineError(
            f"zeroengine.integrations.accelerate needs {wanted}, found accelerate {installed}. Run "
            f"pip install '{wanted}'."
        )
