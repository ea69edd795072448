"""The versions that are installed here, for comparing nodes. Imports neither torch nor anything else that is slow."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import sys
from pathlib import Path

import zeroengine

PACKAGE = Path(zeroengine.__file__).parent


@functools.cache
def installed_versions() -> dict[str, str]:
    """Return the versions of Python, torch and zeroengine by name."""
    # Two nodes have the same checksum if zeroengine's sources are equal there.
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return {
        "Python": ".".join(map(str, sys.version_info[:3])),
        "torch": version_of("torch"),
        "zeroengine": f"{zeroengine.__version__} (sources {digest.hexdigest()[:8]})",
    }


def version_of(package: str) -> str:
    """Return a distribution's version from its metadata, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
