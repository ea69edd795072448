"""Parts of many buffers get the bits of `update_step`, in every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.test_update import HYPER, MOMENTS, State, assert_same_bits
from zeroengine import ops
from zeroengine.ops import UpdatePart, UpdateParts, update_parts

BF16 = torch.bfloat16
GROUPS: list[dict[str, Any]] = [
    {**{key: value for key, value in HYPER.items() if key != "step"}, "rule": rule, "lr": lr, "grad_scale": 0.37}
    for rule, lr in (("adamw", 1e-2), ("lion", 1e-3))
]
# Of each part: the state that it is in, its elements, its group, its first step, and its seed. Their states are of the
# rule of the group. Blocks of moments of 8 bits begin with parts.
PARTS = [(0, 0, 512, 0, 1, 0), (0, 768, 1001, 0, 4, 0), (1, 0, 70_000, 1, 2, 7 << 32), (2, 256, 300, 0, 2, 1 << 32)]


def states_of(moments: torch.dtype) -> list[State]:
    return [
        State(1001, BF16, BF16, moments, rule="adamw", average=BF16),
        State(70_000, torch.float32, None, moments, rule="lion"),
        State(300, torch.float32, torch.float16, moments, rule="adamw"),
    ]


@pytest.mark.parametrize("in_one_call", [True, False])
@pytest.mark.parametrize("moments", MOMENTS)
def test_parts_of_many_buffers_get_the_bits_of_single_updates_in_every_step(
    monkeypatch: pytest.MonkeyPatch, moments: torch.dtype, in_one_call: bool
) -> None:
    if not in_one_call:
        monkeypatch.setattr(update_parts, "library", lambda: None)
    together, alone = states_of(moments), states_of(moments)
    parts = []
    for state, begin, end, group, step, seed in PARTS:
        arrays = together[state].arrays().part(begin, end)
        prepared = ops.prepare_arrays(GROUPS[group]["rule"], arrays, reload_written=state == 0)
        parts.append(UpdatePart(prepared, group, step, seed, 1024 + begin))
    updates = UpdateParts(parts, [group["rule"] for group in GROUPS])
    for num_steps in range(3):
        # A schedule changes the rates.
        groups = [{**group, "lr": group["lr"] / (1 + num_steps)} for group in GROUPS]
        updates.set_groups(groups, num_steps)
        updates.update(0, 1)
        updates.update(1, len(parts))
        for state, begin, end, group, step, seed in PARTS:
            ops.update_step(
                arrays=alone[state].arrays().part(begin, end),
                **groups[group],
                step=step + num_steps,
                reload_written=state == 0,
                seed=seed + step + num_steps,
                offset=1024 + begin,
            )
        for got, want in zip(together, alone, strict=True):
            assert_same_bits(got, want)
    for state, fresh in zip(together, states_of(moments), strict=True):
        assert not torch.equal(state.param, fresh.param)


def test_wrong_parts_are_refused() -> None:
    state = State(300, moments=torch.uint8, rule="adamw")
    prepared = ops.prepare_arrays("adamw", state.arrays(), reload_written=False)
    for wrong in (dict(step=0), dict(seed=-1), dict(offset=8)):
        with pytest.raises(AssertionError):
            UpdateParts([UpdatePart(prepared, 0, **{"step": 1, "seed": 0, "offset": 0} | wrong)], ["adamw"])
    updates = UpdateParts([UpdatePart(prepared, 0, 1, 0, 0)], ["adamw"])
    with pytest.raises(AssertionError):
        updates.set_groups([{**GROUPS[0], "rule": "adam"}], 0)
