"""A mixture of experts whose ranks use different experts: no stall, and the losses of stage 0."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.experts import LAYERS, NON_REENTRANT, REENTRANT, SINGLE, Style, compare, draw, plainly, start
from tests.distributed.models import batch, config
from tests.distributed.ranks import run_ranks
from tests.parametrization import in_turn

UNITS = [pytest.param(LAYERS, id="layers"), pytest.param(SINGLE, id="experts")]
TRANSPORTS = ("shm", "gloo", "nccl")


def assert_same(
    transport: str,
    units: list[str],
    steps: int,
    more: dict[str, Any],
    style: Style,
    world_size: int = 2,
    timeout: float = 90.0,
) -> None:
    arguments = (transport, units, steps, more, style)
    assert run_ranks(world_size, compare, *arguments, timeout=timeout) == [[]] * world_size


@in_turn(("transport", "units"), TRANSPORTS, UNITS)
def test_ranks_that_use_different_experts_have_the_losses_of_stage_0(transport: str, units: list[str]) -> None:
    assert_same(transport, units, 8, {}, Style())


@pytest.mark.slow
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_experts_differ_for_500_steps_without_a_stall(transport: str, units: list[str]) -> None:
    assert_same(transport, units, 500, {}, Style(layers=4), world_size=3, timeout=600)


OFFLOAD: dict[str, Any] = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "prefetch": ("nccl", {"zero_optimization": {"prefetch_bucket_size": 10**6}}),
    "accumulation": ("gloo", {"gradient_accumulation_steps": 2}),
    "offload": ("nccl", {"zero_optimization": OFFLOAD}),
}


@in_turn(("variant", "units"), list(VARIANTS), UNITS[::-1])
def test_ranks_that_use_different_experts_may_train_in_other_ways(variant: str, units: list[str]) -> None:
    transport, more = VARIANTS[variant]
    assert_same(transport, units, 6, more, Style())


BOTH = ["layers.*", "layers.*.mixture.experts.*"]
STYLES: dict[str, tuple[list[str], Style]] = {
    "checkpointed layers": (SINGLE, Style(of_layer=NON_REENTRANT)),
    "checkpointed layers that end with the experts": (SINGLE, Style(of_layer=NON_REENTRANT, shared_first=True)),
    "checkpointed experts": (SINGLE, Style(of_expert=NON_REENTRANT)),
    "reentrant layers as units": (LAYERS, Style(of_layer=REENTRANT)),
    "reentrant layers": (SINGLE, Style(of_layer=REENTRANT, shared_first=True)),
    "reentrant mixtures": (SINGLE, Style(of_mixture=REENTRANT)),
    "reentrant experts": (SINGLE, Style(of_expert=REENTRANT)),
    "mixtures that are called twice": (SINGLE, Style(calls=2)),
    "one expert for all samples": (SINGLE, Style(direct=True)),
    "experts of all layers": (SINGLE, Style(shared_list=True)),
    "dropped layers and experts": (BOTH, Style(drops=True)),
    "two losses, the last one first": (SINGLE, Style(losses=(1, 0))),
    "two losses, the first one first": (SINGLE, Style(losses=(0, 1))),
    "two losses and plain backwards": (SINGLE, Style(losses=(0, 1), plain=True)),
    "two losses and plain backwards, the last one first": (SINGLE, Style(layers=6, losses=(1, 0), plain=True)),
    "a loss that is kept": (SINGLE, Style(keeps=True)),
}


def compare_styles(transport: str, steps: int) -> dict[str, list[tuple[float, float]]]:
    """``compare`` of each style."""
    return {name: compare(transport, units, steps, {}, style) for name, (units, style) in STYLES.items()}


def test_models_may_call_experts_in_many_ways() -> None:
    # The shared memory compares what the ranks gather, so it shows every difference at once.
    answers = run_ranks(2, compare_styles, "shm", 4, timeout=120.0)
    assert answers == [{name: [] for name in STYLES}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_models_may_call_experts_in_many_ways_for_50_steps(transport: str) -> None:
    answers = run_ranks(3, compare_styles, transport, 50, timeout=1200.0)
    assert answers == [{name: [] for name in STYLES}] * 3


def bytes_of_gradient_buffers(style: Style) -> int:
    """``Memory.buckets`` after a few steps with ``style``."""
    engine = start("shm", config(3, units=LAYERS), style)
    for step in range(3):
        engine.backward(engine(*batch(step, engine.rank, 1), draw(step, engine.rank, 1, style.layers)))
        engine.step()
    buckets = engine.memory().buckets
    engine.close()
    return buckets


def test_reentrant_checkpoints_need_no_more_gradient_buffers() -> None:
    plain, reentrant = (
        run_ranks(2, bytes_of_gradient_buffers, Style(layers=8, of_layer=how)) for how in (plainly, REENTRANT)
    )
    # How many buffers are in use at once depends on the time that each rank takes. Eight would be one for each layer.
    assert max(reentrant) <= 2 * max(plain)
