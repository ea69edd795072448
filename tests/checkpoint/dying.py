"""A writer that dies between any two operations on a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Died(BaseException):
    pass


@contextmanager
def dying_after(count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, the rename, fsync or rmtree after so many of them raises ``Died``, and each one after that."""
    left = count

    def dying(real: Any) -> Any:
        def operation(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Died
            return real(*args, **kwargs)

        return operation

    with monkeypatch.context() as patch:
        for owner, name in ((Path, "rename"), (os, "fsync"), (shutil, "rmtree")):
            patch.setattr(owner, name, dying(getattr(owner, name)))
        yield
