"""A pytest plugin that adds ``use_cpu=True`` to the arguments with which transformers' DeepSpeed tests train.

transformers refuses bf16 on a machine without a GPU unless this argument is given. The names are those of the test's
own module, and transformers stays as it is.
"""

from __future__ import annotations

import functools

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    for module in {item.module for item in session.items if isinstance(item, pytest.Function)}:
        for name in ("TrainingArguments", "get_regression_trainer"):
            if hasattr(module, name):
                setattr(module, name, functools.partial(getattr(module, name), use_cpu=True))
