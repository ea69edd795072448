"""The device specification of transformers' tests (TRANSFORMERS_TEST_DEVICE_SPEC) that lets them run on two CPU ranks.

Their decorators ask for a device with another name than "cpu", and for two of it. "cpu:0" is torch's name of a device.
"""

from __future__ import annotations

import torch

DEVICE_NAME = "cpu:0"
MANUAL_SEED_FN = torch.manual_seed


def EMPTY_CACHE_FN() -> None:
    """Do nothing: the CPU has no cache of memory."""


def DEVICE_COUNT_FN() -> int:
    """Return the number of ranks that the machine is asked to run."""
    return 2
