"""The oldest versions that the integration of transformers works with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from zeroengine.errors import ZeroEngineError

# Earlier releases lack methods of Trainer that the integration overrides.
OLDEST = {"transformers": (5, 23), "accelerate": (1, 15)}


def check_versions() -> None:
    """Check that transformers and accelerate are installed, in versions that are new enough.

    Raises:
        ZeroEngineError: One is absent or too old. The message says what to install.
    """
    for package, oldest in OLDEST.items():
        wanted = f"{package}>={'.'.join(map(str, oldest))}"
        try:
            found = version(package)
        except PackageNotFoundError:
            raise ZeroEngineError(
                f"zeroengine.integrations.transformers needs {wanted}, and {package} is not installed. Run "
                "pip install 'zeroengine[transformers]'."
            ) from None
        if _release(found) < oldest:
            raise ZeroEngineError(
                f"zeroengine.integrations.transformers needs {wanted}, found {package} {found}. Run "
                f"pip install '{wanted}'."
            )


def _release(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    digits = ("".join(ch for ch in part if ch.isdigit()) for part in text.split(".")[:2])
    return tuple(int(part or 0) for part in digits)
