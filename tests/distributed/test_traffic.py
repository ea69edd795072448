"""What travels in a step, counted with torch's `fake` process group: ZeRO, section 7 (arXiv 1910.02054)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroengine
from tests.distributed.fake_group import init_fake_group
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from zeroengine.comm.transports import nccl

UNITS = ["tok", "blocks.*", "norm", "head"]  # each used once in a forward


@dataclass(frozen=True)
class Sent:
    """One collective."""

    kind: str
    numel: int  # of the whole buffer
    dtype: torch.dtype
    num_ranks: int = 0


@contextmanager
def spying() -> Iterator[list[Sent]]:
    seen: list[Sent] = []

    def spy(kind: str, real: Callable[..., Any], whole: int) -> Callable[..., Any]:
        def collective(*tensors: torch.Tensor, **more: Any) -> Any:
            num_ranks = more["group"].size()
            seen.append(Sent(kind, tensors[whole].numel(), tensors[whole].dtype, num_ranks))
            return real(*tensors, **more)

        return collective

    with (
        mock.patch.object(nccl, "_all_gather", spy("gather", nccl._all_gather, 0)),
        mock.patch.object(nccl, "_reduce_scatter", spy("reduce-scatter", nccl._reduce_scatter, 1)),
        mock.patch.object(dist, "all_reduce", spy("all-reduce", dist.all_reduce, 0)),
    ):
        yield seen


def steps(
    world_size: int, stage: int, micro_steps: int, more: dict[str, Any], no_sync: bool = False
) -> tuple[list[int], list[list[Sent]]]:
    """The sizes of the units' buffers, and what each of three steps sends."""
    init_fake_group(world_size)
    settings = config(stage, gradient_accumulation_steps=micro_steps, units=UNITS, **more)
    engine = zeroengine.initialize(build(lambda: TinyLM(tied=False)), config=settings)
    found = []
    for step in range(3):
        with spying() as seen:
            for micro_step in range(micro_steps):
                if no_sync and not engine.is_gradient_accumulation_boundary():
                    with engine.no_sync():
                        engine.backward(engine(*batch(step + micro_step, 0)))
                else:
                    engine.backward(engine(*batch(step + micro_step, 0)))
                engine.step()
        found.append(seen)
    return [unit.layout.numel for unit in engine.units], found


def volume(seen: list[Sent]) -> Counter[str]:
    """Elements by kind, without the norm's float64 vector."""
    total: Counter[str] = Counter()
    for sent in seen:
        if sent.dtype is not torch.float64:
            total[sent.kind] += sent.numel
    return total


@pytest.mark.parametrize("world_size", [pytest.param(64, marks=pytest.mark.slow), 1024])
def test_the_volume_of_a_step_is_the_papers(world_size: int) -> None:
    """2 P elements a step at stages 0 to 2 (an all-reduce is a reduce-scatter and a gather), 3 P at stage 3."""
    for stage in range(4):
        units, found = run_ranks(1, steps, world_size, stage, 1, {})[0]
        whole, last = sum(units), units[-1]  # P; the last unit stays gathered from forward to backward
        expected = {
            0: {"all-reduce": whole},
            1: {"reduce-scatter": whole, "gather": whole},
            2: {"reduce-scatter": whole, "gather": whole},
            3: {"reduce-scatter": whole, "gather": 2 * whole - last},
        }[stage]
        for seen in found[1:]:
            assert volume(seen) == expected, stage
            numbers = Counter(sent.kind for sent in seen)
            assert numbers.pop("all-reduce") == (1 + len(units) if stage == 0 else 1), "the norm travels once"
            wanted = {kind: len(units) for kind in expected if kind != "all-reduce"}
            assert numbers == wanted | ({"gather": 2 * len(units) - 1} if stage == 3 else {})


def test_bf16_sends_half_the_bytes() -> None:
    for stage in (0, 3):
        (_, full), (_, half) = (
            run_ranks(1, steps, 64, stage, 1, {"bf16": {"enabled": enabled}})[0] for enabled in (False, True)
        )
        assert volume(half[1]) == volume(full[1])
        assert {s.dtype for s in half[1]} == {torch.bfloat16, torch.float64}
        assert {s.dtype for s in full[1]} == {torch.float32, torch.float64}


def test_gradients_travel_once_a_step_where_they_are_whole_and_once_a_micro_step_where_they_are_not() -> None:
    for stage, no_sync in [(0, False), (1, False), (2, False), (3, False), (2, True), (3, True)]:
        units, found = run_ranks(1, steps, 64, stage, 8, {}, no_sync)[0]
        whole, last = sum(units), units[-1]
        sent = volume(found[1])
        assert sent["all-reduce" if stage == 0 else "reduce-scatter"] == whole * (
            8 if stage >= 2 and not no_sync else 1
        )
        gathered = {0: 0, 1: whole, 2: whole, 3: 8 * (2 * whole - last)}[stage]
        assert sent["gather"] == gathered, "published parameters travel once a step, released ones for each use"


FP32, LOW = torch.float32, torch.bfloat16
BF16 = {"bf16": {"enabled": True}}
IN_BF16 = {"communication_data_type": "bf16"}


@pytest.mark.parametrize(
    ("more", "whole", "sharded", "gathered"),
    [  # what gradients travel in where they are whole and where they are sharded; and parameters
        ({}, FP32, FP32, FP32),
        (BF16, FP32, LOW, LOW),  # whole ones accumulate in fp32, and are sent as they are
        pytest.param(BF16 | {"data_types": {"grad_accum_dtype": "bf16"}}, LOW, LOW, LOW, marks=pytest.mark.slow),
        pytest.param(BF16 | IN_BF16, LOW, LOW, LOW, marks=pytest.mark.slow),
        (BF16 | {"communication_data_type": "fp32"}, FP32, FP32, LOW),
        pytest.param(IN_BF16, LOW, LOW, FP32, marks=pytest.mark.slow),
    ],
    ids=["fp32", "bf16", "accumulated in bf16", "sent in bf16", "sent in fp32", "fp32 sent in bf16"],
)
def test_eight_micro_steps_send_as_many_gradients_and_bytes_as_the_formula_says(
    more: dict[str, Any], whole: torch.dtype, sharded: torch.dtype, gathered: torch.dtype
) -> None:
    """P elements once a step at stages 0 and 1, once a micro-step at 2 and 3, one collective for each unit."""
    for stage in range(4):
        units, found = run_ranks(1, steps, 64, stage, 8, more)[0]
        dtype, times = (sharded, 8) if stage >= 2 else (whole, 1)
        for seen in found[1:]:
            kind = "all-reduce" if stage == 0 else "reduce-scatter"
            sent = [s for s in seen if s.kind == kind and s.dtype is not torch.float64]
            assert [s.numel for s in sent] == units[::-1] * times, "backward's order"
            assert sum(s.numel * s.dtype.itemsize for s in sent) == times * sum(units) * dtype.itemsize
            assert {s.dtype for s in sent} == {dtype}
            assert {s.dtype for s in seen if s.kind == "gather"} == ({gathered} if stage else set())
            norms = [s for s in seen if s.dtype is torch.float64]
            assert len(norms) == 1, "one norm a step"
            assert len(seen) == len(sent) + 1 + {0: 0, 1: len(units), 2: len(units)}.get(
                stage, 8 * (2 * len(units) - 1)
            )


def test_frozen_parameters_and_those_below_the_threshold_do_not_travel_needlessly() -> None:
    def numbers(seen: list[Sent]) -> Counter[str]:
        return Counter(sent.kind for sent in seen if sent.dtype is not torch.float64)

    persistent = {"zero_optimization": {"stage3_param_persistence_threshold": 10**6}}
    units, found = run_ranks(1, steps, 64, 3, 1, persistent)[0]
    assert numbers(found[1]) == {"gather": len(units), "reduce-scatter": len(units)}, "gathered once, after the update"
    _, found = run_ranks(1, frozen_steps)[0]
    assert numbers(found[1]) == {"reduce-scatter": 1, "gather": 2 * 6 - 1}


def frozen_steps() -> tuple[list[int], list[list[Sent]]]:
    with mock.patch.object(zeroengine, "initialize", freezing(zeroengine.initialize)):
        return steps(64, 3, 1, {})


def freezing(initialize: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(model: TinyLM, **more: Any) -> Any:
        model.requires_grad_(False)
        model.tok.requires_grad_(True)
        return initialize(model, **more)

    return wrapped


def test_large_buckets_and_prefetching_change_no_volume() -> None:
    plain = run_ranks(1, steps, 64, 3, 1, {})[0]
    for zero in ({"overlap_comm": False}, {"reduce_bucket_size": 10**9}, {"prefetch_bucket_size": 1}):
        units, found = run_ranks(1, steps, 64, 3, 1, {"zero_optimization": zero})[0]
        assert units == plain[0] and volume(found[1]) == volume(plain[1][1]), zero


# -- degrees ----------------------------------------------------------------------------------------


def traffic_at(world_size: int, degrees: dict[str, Any], micro_steps: int) -> tuple[int, int, list[Sent]]:
    """The elements of all units, those of the unit that a forward uses last, and what the third step sends."""
    init_fake_group(world_size)
    settings = config(0, gradient_accumulation_steps=micro_steps, units=UNITS)
    settings["zero_optimization"] = {"degrees": degrees, "stage3_param_persistence_threshold": 0}
    engine = zeroengine.initialize(build(lambda: TinyLM(tied=False)), config=settings)
    found = []
    for step in range(3):
        with spying() as seen:
            for micro_step in range(micro_steps):
                engine.backward(engine(*batch(step + micro_step, 0)))
                engine.step()
        found.append(seen)
    sizes = {unit.name: unit.layout.numel for unit in engine.units}
    return sum(sizes.values()), sizes["head"], found[-1]


def received(seen: list[Sent]) -> Counter[tuple[str, int]]:
    """The elements that rank 0 receives by kind and number of ranks, of the collectives' arguments."""
    total: Counter[tuple[str, int]] = Counter()
    for sent in seen:
        if sent.dtype is not torch.float64:
            passes = 2 if sent.kind == "all-reduce" else 1
            total[sent.kind, sent.num_ranks] += passes * sent.numel * (sent.num_ranks - 1) // sent.num_ranks
    return total


@pytest.mark.parametrize("world_size", [pytest.param(64, marks=pytest.mark.slow), 1024])
def test_mics_gathers_within_its_ranks_and_sums_shards_over_the_others(world_size: int) -> None:
    """MiCS (arXiv 2205.00119), section 3.4: gradients are summed in two hops."""
    whole, last, seen = run_ranks(1, traffic_at, world_size, {"parameters": 8}, 1)[0]
    assert received(seen) == {
        # The last unit of the forward stays for the backward.
        ("gather", 8): (2 * whole - last) * 7 // 8,
        ("reduce-scatter", 8): whole * 7 // 8,
        ("all-reduce", world_size // 8): 2 * whole // 8 * (world_size // 8 - 1) // (world_size // 8),
    }


@pytest.mark.parametrize("world_size", [64, 1024])
def test_updated_shards_of_all_ranks_reach_those_with_a_copy(world_size: int) -> None:
    whole, last, seen = run_ranks(1, traffic_at, world_size, {"parameters": 8, "optimizer": "all"}, 1)[0]
    nodes = world_size // 8
    found = received(seen)
    # The rank's eighth of the updated parameters comes from the ranks that hold the same eighth.
    updated = whole // 8 * (nodes - 1) // nodes
    within_node = (2 * whole - last) * 7 // 8
    if nodes == 8:
        assert found["gather", 8] == within_node + updated
    else:
        assert (found["gather", 8], found["gather", nodes]) == (within_node, updated)


@pytest.mark.parametrize("world_size", [64, 1024])
def test_hpz_gathers_once_from_all_ranks_and_then_within_its_ranks(world_size: int) -> None:
    """ZeRO++ (arXiv 2306.10209), section 4.2."""
    degrees = {"parameters": "all", "secondary_parameters": 8}
    whole, last, seen = run_ranks(1, traffic_at, world_size, degrees, 2)[0]
    assert received(seen) == {
        ("gather", world_size): whole * (world_size - 1) // world_size,
        ("gather", 8): (3 * whole - 2 * last) * 7 // 8,
        ("reduce-scatter", world_size): 2 * whole * (world_size - 1) // world_size,
    }
