"""Which device tests compute on: the CPU, also where there is a GPU, unless they are marked ``gpu``.

With ``ZEROENGINE_TEST_DEVICE`` set to ``cuda`` or ``emulated``, processes started by ``run_ranks`` compute on a GPU,
which they share over Gloo: one that there is, or one that the CPU plays (``tests/emulated``).
"""

from __future__ import annotations

import pytest

from tests.emulated import emulate_gpu, load, wanted

if wanted() == "emulated":
    load()  # before torch is imported

import torch

from tests.distributed import ranks

if wanted() == "emulated":
    emulate_gpu()


@pytest.fixture(autouse=True)
def device_of_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(ranks, "sharing_gpu", wanted() != "cpu")
