"""A script that moved from FSDP2 to the engine has FSDP2's losses."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.emulated import cpu_alone
from tests.integrations.fsdp.scripts import BF16, Script, train_by_engine, train_by_fsdp2
from zeroengine.integrations.fsdp import config_of_policies

FP32 = [
    Script("default"),
    Script("kept gathered", {"reshard_after_forward": False}),
    Script("offloaded", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    # The last window is shorter, as at the end of an epoch.
    Script("accumulation", {"reshard_after_forward": True}, (2, 2, 1)),
]
LOW = Script("bf16", {"mp_policy": BF16})


def compare(scripts: list[Script]) -> list[tuple[str, list[float], list[float]]]:
    """Return the values of FSDP2 and of the engine for each script."""
    rank = start()
    results = []
    for script in scripts:
        expected = train_by_fsdp2(script, rank)
        config = config_of_policies(**script.arguments, gradient_accumulation_steps=script.accumulation)
        results.append((script.name, expected, train_by_engine(config, script, rank)))
    return results


@cpu_alone("FSDP2 over Gloo")
def test_losses_and_norms_are_those_of_fsdp2_in_fp32() -> None:
    for results in run_ranks(2, compare, FP32):
        assert [result[0] for result in results] == [script.name for script in FP32]
        for name, expected, values in results:
            assert values == pytest.approx(expected, abs=1e-6, rel=1e-6), name


@pytest.mark.slow  # the test above has fp32
@cpu_alone("FSDP2 over Gloo")
def test_losses_and_norms_are_those_of_fsdp2_in_bf16() -> None:
    for results in run_ranks(2, compare, [LOW]):
        for name, expected, values in results:
            # A value of bf16 has eight bits, and the two add in different orders.
            assert values == pytest.approx(expected, rel=5e-3), name
