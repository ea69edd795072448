"""A mixture of experts whose ranks use different experts: no stall, and the losses of stage 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.distributed.experts import (
    LAYERS,
    NESTED,
    NON_REENTRANT,
    REENTRANT,
    SINGLE,
    WHOLE,
    Expert,
    Style,
    compare,
    draw,
    on_transport,
    plainly,
    start,
)
from tests.distributed.models import WIDTH, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.parametrization import in_turn

UNITS = [pytest.param(LAYERS, id="layers"), pytest.param(SINGLE, id="experts")]
TRANSPORTS = ("shm", "gloo", "nccl")
# `test_models_may_call_experts_in_many_ways` has the shared memory.
SLOW_SHM = [pytest.param("shm", marks=pytest.mark.slow, id="shm"), *TRANSPORTS[1:]]


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


@in_turn(("transport", "units"), SLOW_SHM, UNITS)
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


# Losses of ranks that depend on different modules, and random models, have the prefetch.
SLOW_PREFETCH = [pytest.param("prefetch", marks=pytest.mark.slow, id="prefetch"), *list(VARIANTS)[1:]]


@in_turn(("variant", "units"), SLOW_PREFETCH, UNITS[::-1])
def test_ranks_that_use_different_experts_may_train_in_other_ways(variant: str, units: list[str]) -> None:
    transport, more = VARIANTS[variant]
    assert_same(transport, units, 6, more, Style())


STYLES: dict[str, tuple[list[str], Style]] = {
    "checkpointed layers": (SINGLE, Style(of_layer=NON_REENTRANT)),
    "checkpointed layers that end with the experts": (SINGLE, Style(of_layer=NON_REENTRANT, shared_first=True)),
    "one expert in checkpointed layers": (SINGLE, Style(direct=True, of_layer=NON_REENTRANT)),
    "no experts at the end of checkpointed layers": (
        SINGLE,
        Style(rare=True, of_layer=NON_REENTRANT, shared_first=True),
    ),
    "checkpointed experts": (SINGLE, Style(of_expert=NON_REENTRANT)),
    "reentrant layers as units": (LAYERS, Style(of_layer=REENTRANT)),
    "reentrant layers": (SINGLE, Style(of_layer=REENTRANT, shared_first=True)),
    "reentrant mixtures": (SINGLE, Style(of_mixture=REENTRANT)),
    "reentrant experts": (SINGLE, Style(of_expert=REENTRANT)),
    "mixtures that are called twice": (SINGLE, Style(calls=2)),
    "one expert for all samples": (SINGLE, Style(direct=True)),
    "experts of all layers": (SINGLE, Style(shared_list=True)),
    "no experts on some ranks": (SINGLE, Style(rare=True)),
    "no experts at the end of a mixture": (SINGLE, Style(rare=True, shared_first=True)),
    "no experts in an unusual order": (SINGLE, Style(rare=True, shared_first=True, experts_first=True)),
    "experts that are first called late": (SINGLE, Style(rare=True, late=True)),
    "frozen layers around the experts": (SINGLE, Style(rare=True, frozen=True)),
    "frozen layers that end with the experts": (SINGLE, Style(rare=True, frozen=True, shared_first=True)),
    "no experts in reentrant layers": (SINGLE, Style(rare=True, of_layer=REENTRANT)),
    "no experts in checkpointed frozen layers": (SINGLE, Style(rare=True, frozen=True, of_layer=WHOLE)),
    "layers that are frozen after initialize": (SINGLE, Style(rare=True, freezes=True)),
    "no experts before another list": ([*SINGLE, "branches.*"], Style(rare=True, branches=True)),
    "no experts in two losses": (SINGLE, Style(rare=True, losses=(0, 1))),
    "dropped layers and experts": (LAYERS, Style(drops=True)),
    "layers without their experts": (NESTED, Style(rare=True)),
    "reentrant layers without their experts": (NESTED, Style(of_layer=REENTRANT)),
    "two losses, the last one first": (SINGLE, Style(losses=(1, 0))),
    "two losses, the first one first": (SINGLE, Style(losses=(0, 1))),
    "two losses and plain backwards": (SINGLE, Style(losses=(0, 1), plain=True)),
    "two losses and plain backwards, the last one first": (SINGLE, Style(layers=6, losses=(1, 0), plain=True)),
    "a loss that is kept": (SINGLE, Style(keeps=True)),
}
# Together these have each thing in which styles differ, but for what differs little from another.
SHORT = (
    "no experts at the end of checkpointed layers",
    "reentrant experts",
    "mixtures that are called twice",
    "experts of all layers",
    "frozen layers around the experts",
    "no experts in reentrant layers",
    "no experts before another list",
    "dropped layers and experts",
    "reentrant layers without their experts",
    "two losses and plain backwards",
)


def compare_styles(names: list[str], transport: str, steps: int) -> dict[str, list[tuple[float, float]]]:
    """``compare`` of each style."""
    return {name: compare(transport, STYLES[name][0], steps, {}, STYLES[name][1]) for name in names}


# ``tests/schedule/test_histories.py`` shows the order; these show that hooks and autograd say what it is told there.
@pytest.mark.parametrize("names", [SHORT[::3], pytest.param(SHORT, marks=pytest.mark.slow)], ids=["some", "more"])
def test_models_may_call_experts_in_many_ways(names: tuple[str, ...]) -> None:
    # The shared memory compares what the ranks gather, so it shows every difference at once.
    answers = run_ranks(2, compare_styles, list(names), "shm", 4, timeout=120.0)
    assert answers == [{name: [] for name in names}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_models_may_call_experts_in_many_ways_for_50_steps(transport: str) -> None:
    answers = run_ranks(3, compare_styles, list(STYLES), transport, 50, timeout=1200.0)
    assert answers == [{name: [] for name in STYLES}] * 3


class SkippedMixture(nn.Module):
    """Experts in a module that rank 1 does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.head, self.mixture = 0, nn.Linear(WIDTH, 1), nn.Module()
        self.mixture.experts = nn.ModuleList(Expert() for _ in range(3))
        self.mixture.forward = lambda x: self.mixture.experts[1](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x if self.rank else self.mixture(x)).sum()  # type: ignore[no-any-return]


def error_of_skipped_mixture(transport: str) -> str:
    """The message of the first forward."""
    dist.init_process_group("gloo")
    with on_transport(transport) as comm:
        engine = zeroengine.initialize(
            build(SkippedMixture), config=config(3, units=["head", "mixture.experts.*"], comm=comm)
        )
        engine.module.rank = engine.rank
        with pytest.raises(zeroengine.DivergenceError) as error:
            engine(torch.ones(2, WIDTH))
    return str(error.value)


def test_a_rank_that_does_not_call_the_module_of_a_list_learns_it_at_once() -> None:
    for message in run_ranks(2, error_of_skipped_mixture, "shm", timeout=10.0):
        assert "at gather mixture.experts.0" in message
        assert "if it calls the module that holds them" in message


def bytes_of_gradient_buffers(style: Style) -> int:
    """``Memory.buckets`` after a few steps with ``style``."""
    engine = start(config(3, units=LAYERS), style)
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
