"""A pytest plugin that runs the classes of accelerate's tests that skip themselves where there is no GPU.

accelerate has no setting for the device of its tests. Only this reason is lifted, and the files stay as they are.
"""

from __future__ import annotations

import unittest

REASON = "test requires a GPU"


def pytest_pycollect_makeitem(obj: object) -> None:
    if isinstance(obj, type) and issubclass(obj, unittest.TestCase):
        if getattr(obj, "__unittest_skip_why__", None) == REASON:
            obj.__unittest_skip__ = False  # type: ignore[attr-defined]
