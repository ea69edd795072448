"""The oldest versions of other packages that the integrations work with."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from zeroengine.errors import ZeroEngineError

# Earlier releases lack methods and arguments that the integrations override.
OLDEST = {"accelerate": (1, 15), "lightning": (2, 6), "transformers": (5, 23)}


def require_versions(integration: str, *packages: str) -> None:
    """Check that packages are installed, in versions that are new enough.

    Args:
        integration: The integration, which is also the name of the extra that installs the packages.
        packages: The packages.

    Raises:
        ZeroEngineError: One is absent or too old. The message says what to install.
    """
    for package in packages:
        wanted = f"{package}>={'.'.join(map(str, OLDEST[package]))}"
        try:
            installed = version(package)
        except PackageNotFoundError:
            raise ZeroEngineError(
                f"zeroengine.integrations.{integration} needs {wanted}, and the package {package} is not installed. "
                f"Run pip install 'zeroengine[{integration}]'."
            ) from None
        if tuple(map(int, re.findall(r"\d+", installed)[:2])) < OLDEST[package]:
            raise ZeroEngineError(
                f"zeroengine.integrations.{integration} needs {wanted}, found {package} {installed}. Run "
                f"pip install '{wanted}'."
            )
