"""What packages import when it is first used: every public name is listed and there, and torch is not before."""

from __future__ import annotations

import subprocess
import sys

import pytest

import zeroengine
import zeroengine.checkpoint
import zeroengine.offload

PACKAGES = [zeroengine, zeroengine.checkpoint, zeroengine.offload]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_listed_and_there(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert set(names) <= set(dir(package))
    assert all(getattr(package, name) is not None for name in names)


@pytest.mark.parametrize("package", PACKAGES)
def test_another_name_is_refused(package: object) -> None:
    with pytest.raises(AttributeError, match=r"module 'zeroengine.*' has no attribute 'nothing'"):
        package.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_names_alone_need_no_torch() -> None:
    names = ", ".join(package.__name__ for package in PACKAGES)
    code = f"import sys, {names}; print(*({names}), zeroengine.ConfigError); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
