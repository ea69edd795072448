"""The oldest version of Lightning that the integration works with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from zeroengine.errors import ZeroEngineError

# Earlier releases have other arguments of strategies, and no WeightAveraging.
OLDEST = (2, 6)


def check_version() -> None:
    """Check that Lightning is installed, in a version that is new enough.

    Raises:
        ZeroEngineError: It is absent or too old. The message says what to install.
    """
    wanted = f"lightning>={'.'.join(map(str, OLDEST))}"
    try:
        installed = version("lightning")
    except PackageNotFoundError:
        raise ZeroEngineError(
            f"zeroengine.integrations.lightning needs {wanted}, and the package lightning is not installed (write "
            "lightning.pytorch for pytorch_lightning). Run pip install 'zeroengine[lightning]'."
        ) from None
    major, minor = installed.split(".")[:2]
    if (int(major), int("".join(filter(str.isdigit, minor)) or 0)) < OLDEST:
        raise ZeroEngineError(
            f"zeroengine.integrations.lightning needs {wanted}, found lightning {installed}. Run "
            f"pip install '{wanted}'."
        )
