"""On a GPU the kernels of an engine are in the order of their memory, on whatever streams a model computes.

One process plays one of two ranks, whose collectives move nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.fake_group import init_fake_group
from tests.distributed.ranks import run_ranks
from tests.recorded_streams import Device, Stream, recorded_streams
from zeroengine import ops
from zeroengine.comm.transports import nccl
from zeroengine.engine.assembly import allocator_advice
from zeroengine.engine.engine import Engine
from zeroengine.engine.initialize import make_engine
from zeroengine.errors import ZeroEngineError


class Switch(torch.autograd.Function):
    """Let what follows compute on a stream, and in backward what came before on its own, as autograd does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: Device, stream: Stream) -> torch.Tensor:
        ctx.device, ctx.before = device, device.current
        stream.wait_stream(device.current)
        device.current = stream
        return device.record_stream(device.record_stream(x).clone())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.before.wait_stream(ctx.device.current)
        ctx.device.current = ctx.before
        return ctx.device.record_stream(ctx.device.record_stream(gradients[0]).clone()), None, None


class TwoStreams(nn.Module):
    """A sum of two branches, of which the second computes on a stream of its own."""

    def __init__(self, device: Device | None) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.device, self.side = device, Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.device is None:
            return self.head(self.first(x) + self.second(x)).square().mean()
        main = self.device.current
        first = self.first(x)
        apart = Switch.apply(x, self.device, self.side)
        second = Switch.apply(self.second(apart), self.device, main)
        return self.head(first + second).square().mean()


def collectives(device: Device, real: Callable[..., Any], whole: int) -> Callable[..., Any]:
    def run(output: torch.Tensor, given: torch.Tensor | None = None, **more: Any) -> Any:
        given = output if given is None else given
        return device.collective(real.__name__, output, given, lambda: output.zero_() if whole else None)

    return run


def cast_copy(sources: Any, targets: Any, *, accumulate: bool) -> None:
    """What the kernel of this name does, so that its reads and writes are recorded."""
    for source, target in zip(sources, targets, strict=True):
        (target.add_ if accumulate else target.copy_)(source)


@contextmanager
def engine_on(side: bool, stage: int, units: list[str], micro_steps: int) -> Iterator[tuple[Device, Engine]]:
    init_fake_group(2)
    patch = pytest.MonkeyPatch()
    patch.setattr(nccl.FakeTransport, "runs_on_streams", True)
    patch.setattr(ops, "cast_copy", cast_copy)
    with recorded_streams() as device:
        patch.setattr(nccl, "_all_gather", collectives(device, nccl._all_gather, 1))
        patch.setattr(nccl, "_reduce_scatter", collectives(device, nccl._reduce_scatter, 1))
        patch.setattr(dist, "all_reduce", collectives(device, dist.all_reduce, 0))
        settings = {
            "zero_optimization": {"stage": stage, "param_persistence_threshold": 0},
            "units": units,
            "gradient_accumulation_steps": micro_steps,
        }
        model = TwoStreams(device if side else None)
        yield device, make_engine(model, torch.optim.AdamW(model.parameters()), settings, async_step=True)
        gc.collect()
    patch.undo()


def trains(*setting: Any) -> list[str]:
    with engine_on(*setting) as (device, engine):
        for _ in range(2 * engine.config.gradient_accumulation_steps):
            engine.backward(engine(torch.ones(4, 6)))
            engine.step()
    return sorted(set(device.faults))


@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_on_two_streams_trains_in_the_order_of_its_memory(stage: int, side: bool) -> None:
    for units, micro_steps in (([], 1), ([], 3), (["first", "second", "head"], 3)):
        assert run_ranks(1, trains, side, stage, units, micro_steps) == [[]]


def accumulates(stage: int, device_is_ahead: bool) -> list[int]:
    """The bytes that are allocated after each micro-step."""
    with engine_on(False, stage, ["first", "second", "head"], 8) as (device, engine):
        device.is_ahead = device_is_ahead
        live = []
        for _ in range(16):
            engine.backward(engine(torch.ones(4, 6)))
            engine.step()
            gc.collect()
            live.append(device.live_bytes)
    return live


@pytest.mark.parametrize("device_is_ahead", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_memory_does_not_grow_with_the_micro_steps(stage: int, device_is_ahead: bool) -> None:
    live = run_ranks(1, accumulates, stage, device_is_ahead)[0]
    for start in (0, 8):
        assert len(set(live[start + 1 : start + 7])) == 1, live


def captures() -> str:
    """What is said where a graph is captured while ranks communicate."""
    with engine_on(False, 3, ["first", "second", "head"], 1) as (_, engine), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._parts.passes.forward, "_has_communicators", True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ZeroEngineError) as error:
            engine(torch.ones(4, 6))
        patch.undo()
        engine.backward(engine(torch.ones(4, 6)))
        engine.step()
    return str(error.value)


def test_a_forward_of_several_ranks_inside_a_graph_is_refused_and_can_be_taken_outside() -> None:
    assert run_ranks(1, captures)[0].startswith("a forward inside the capture of a CUDA graph, with several ranks: ")


def test_fragments_are_advised_against_where_large_buffers_of_several_sizes_come_and_go() -> None:
    large, small = 1 << 30, 1 << 20
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in str(allocator_advice({large, small}, {}))
    assert allocator_advice({large}, {}) is None and allocator_advice({small, small + 1}, {}) is None
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert allocator_advice({large, small}, {name: "expandable_segments:True"}) is None
