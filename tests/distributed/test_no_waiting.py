"""Nothing in forward, backward or step looks at a value on the device, and everything is issued in order.

torch's ``fake`` process group stands in for NCCL, and the CUDA kernels, compiled for the CPU, take CPU tensors.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import zeroengine
from tests.distributed.fake_group import init_fake_group
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import STAGES, take_steps
from tests.emulated import build_kernels
from tests.ops import cuda
from zeroengine import ops
from zeroengine.comm.transports import nccl
from zeroengine.engine.initialize import make_engine
from zeroengine.runtime.unit import Unit

UNITS = ["tok", "blocks.*", "norm", "head"]  # each used once in a forward
NAMES = ["tok", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]


class Looked(AssertionError):
    """Somebody looked at a value."""


READS_IN_PYTHON = {
    *(getattr(torch.Tensor, name) for name in "item tolist numpy cpu __bool__ __int__ __float__ __index__".split()),
    *(torch.equal, torch.allclose),
}
READS_IN_TORCH = ("_local_scalar_dense", "equal", "nonzero", "_unique2", "masked_select")


class BlindPython(TorchFunctionMode):
    """Reading a tensor's values from Python is an error."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS_IN_PYTHON:
            raise Looked(f"{func} in Python")
        return func(*args, **(kwargs or {}))


class BlindTorch(TorchDispatchMode):
    """So is an operation of torch's whose result has a shape, or is a number, that depends on them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masked = any(index is not None and index.dtype is torch.bool for index in indices)
        if masked or name in READS_IN_TORCH:
            raise Looked(f"{func} in torch")
        return func(*args, **(kwargs or {}))


@contextmanager
def blind() -> Iterator[None]:
    with BlindPython(), BlindTorch():
        yield


@contextmanager
def emulated(path: Path) -> Iterator[None]:
    """CPU tensors go to the CUDA kernels."""
    with pytest.MonkeyPatch.context() as patch:
        cuda.emulate(patch, path)
        yield


@pytest.fixture(scope="session")
def kernels() -> Path:
    return build_kernels()


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def engine_at(stage: int, more: dict[str, Any], on_device: bool | None = True) -> zeroengine.Engine:
    if not dist.is_initialized():
        init_fake_group(2)
    model = build(functools.partial(TinyLM, tied=False))
    return make_engine(model, None, config(stage, units=UNITS, **more), decaying, async_step=on_device)


# -- nobody looks -------------------------------------------------------------------------------------


def steps_blindly(path: Path, more: dict[str, Any]) -> list[tuple[int, int, bool, list[float], list[float]]]:
    found = []
    for stage in STAGES:
        with emulated(path):
            engine, losses = engine_at(stage, copy.deepcopy(more)), []
            for number in range(4):
                with blind():
                    losses.append(engine(*batch(number, 0)))
                # The first act of a backward: it waits for the norm of the step before.
                engine._parts.loop.step_runner.await_and_report()
                with blind():
                    engine.backward(losses[-1])
                    verdict = engine.step()
        by_the_cpu = take_steps(engine_at(stage, copy.deepcopy(more), on_device=False), range(4))
        seen = [loss.item() for loss in losses]
        found.append((engine.global_steps, engine.micro_steps, bool(verdict), seen, by_the_cpu))
    return found


MORE: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}, "optimizer_state_dtype": "bf16"},
    "accumulation": {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2},
    "with the monitor": {"monitor": {"enabled": True}},
    "in buckets": {"zero_optimization": {"reduce_bucket_size": 10**6}, "prescale_gradients": True},
}


# The others differ from these in what is computed, not in what is read.
FAST = ("bf16", "with the monitor")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MORE])
def test_forward_backward_and_step_read_no_tensor_value(kernels: Path, name: str) -> None:
    updates = 2 if name == "accumulation" else 4
    for *counts, losses, by_the_cpu in run_ranks(1, steps_blindly, kernels, MORE[name])[0]:
        assert counts == [updates, 4, True]
        assert losses == pytest.approx(by_the_cpu, rel=1e-6), "the norm alone adds in another order"


def who_looks(path: Path) -> list[str]:
    with emulated(path):
        engine = engine_at(2, {}, on_device=False)
        engine.backward(engine(*batch(0, 0)))
        x = torch.ones(3)
        found = []
        for look in (engine.step, x[0].item, lambda: max(x), lambda: x[x > 0], lambda: F.one_hot(x.long())):
            with blind(), pytest.raises(Looked) as error:
                look()
            found.append(str(error.value))
        return found


def test_a_tensor_value_that_is_read_is_detected(kernels: Path) -> None:
    """A step that waits for its norm, first of all."""
    found = run_ranks(1, who_looks, kernels)[0]
    for what, message in zip(("tolist", "item", "__bool__", "index", "_local_scalar_dense"), found, strict=True):
        assert what in message


# -- in order -----------------------------------------------------------------------------------------


class Trace:
    """What is issued, awaited, computed and released, in order."""

    def __init__(self, model: nn.Module) -> None:
        self.events: list[str] = []
        self.patches = ExitStack()
        for name in NAMES:
            module = model.get_submodule(name)
            module.register_forward_hook(lambda *_, n=name: self.events.append(f"compute {n}"), prepend=True)
        self.spy(nccl.NCCLChannel, "all_gather", lambda channel, full, shard, label, *_: f"gather {label}")
        self.spy(nccl.NCCLChannel, "reduce_scatter", lambda channel, shard, full, label, *_: f"reduce {label}")
        self.spy(nccl.NCCLTransport, "all_reduce_scalars", lambda transport, values, label: f"sum {label}")
        self.spy(Unit, "finish_gather", lambda unit: f"ready {unit.name}")
        self.spy(Unit, "mark_released", lambda unit, resolver: f"release {unit.name}")
        self.spy(ops.UpdateTable, "prepare", lambda *_: "prepare")
        self.spy(ops.UpdateTable, "update", lambda table, *places: f"update {' '.join(NAMES[slice(*places)])}")

    def spy(self, owner: type, name: str, event: Callable[..., str]) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def spied(*args: Any, **kwargs: Any) -> Any:
            self.events.append(event(*args))
            return real(*args, **kwargs)

        self.patches.enter_context(mock.patch.object(owner, name, spied))

    def take(self) -> list[str]:
        taken, self.events[:] = list(self.events), []
        return taken


def traced(path: Path, stage: int, prefetch: int = 4000) -> list[list[str]]:
    found = []
    with emulated(path):
        engine = engine_at(stage, {"zero_optimization": {"reduce_bucket_size": 1, "prefetch_bucket_size": prefetch}})
        trace = Trace(engine.module)
        with trace.patches:
            for number in range(3):
                trace.take()
                loss = engine(*batch(number, 0))
                forward = trace.take()
                engine.backward(loss)
                backward = trace.take()
                engine.step()
                found = [forward, backward, trace.take()]
    return found


def at(events: list[str], event: str) -> int:
    assert event in events, (event, events)
    return events.index(event)


def test_stage_3_gathers_units_ahead_and_releases_them_in_order(kernels: Path) -> None:
    forward, backward, step = run_ranks(1, traced, kernels, 3)[0]
    for name, following in zip(NAMES, [*NAMES[1:], None], strict=True):
        assert at(forward, f"gather {name}") < at(forward, f"ready {name}") < at(forward, f"compute {name}")
        if following is not None:
            assert at(forward, f"compute {name}") < at(forward, f"release {name}") < at(forward, f"compute {following}")
    assert "release head" not in forward, "its backward comes next"
    assert at(forward, "gather blocks.1") < at(forward, "compute blocks.0"), "ahead of its use"
    reduces = [event for event in backward if event.startswith("reduce")]
    assert reduces == [f"reduce {name}" for name in NAMES[::-1]]
    for name in NAMES[:-1]:
        assert at(backward, f"gather {name}") < at(backward, f"ready {name}") < at(backward, f"reduce {name}")
    assert at(backward, "gather blocks.0") < at(backward, "reduce blocks.1"), "the next gather goes before the reduce"
    assert [event for event in step if not event.startswith("release")] == [
        "sum norm",
        "prepare",
        f"update {' '.join(NAMES)}",
    ], "one call of the library updates all units"


# A block has between 3600 and 4000 elements.
@pytest.mark.parametrize("prefetch, blocks", [(0, 0), (1, 1), pytest.param(4000, 1, marks=pytest.mark.slow), (8000, 2)])
def test_prefetch_is_bounded_by_its_settings_and_takes_at_least_one_unit(
    kernels: Path, prefetch: int, blocks: int
) -> None:
    for events in run_ranks(1, traced, kernels, 3, prefetch)[0][:2]:
        gathered, used, ahead = [], set(), []
        for event in events:
            what, name = event.split(" ", 1)
            if what == "gather":
                gathered.append(name)
            elif what == "ready":
                used.add(name)
            elif what in ("compute", "release"):
                ahead.append(sum(name.startswith("blocks") and name not in used for name in gathered))
        assert gathered and max(ahead) == blocks


def test_stage_2_gathers_each_unit_as_soon_as_it_is_updated(kernels: Path) -> None:
    forward, backward, step = run_ranks(1, traced, kernels, 2)[0]
    assert step == ["sum norm", "prepare", *(f"{what} {n}" for n in NAMES for what in ("update", "gather"))]
    assert forward == [f"{what} {name}" for name in NAMES for what in ("ready", "compute")], "awaited where it is used"
    assert backward == [f"reduce {name}" for name in NAMES[::-1]]


def launches(path: Path, stage: int) -> tuple[list[int], int]:
    """How many gradients each launch copies in a second backward, and how many parameters there are."""
    with emulated(path):
        engine, sizes = engine_at(stage, {"bf16": {"enabled": True}}), []
        real = ops.cast_copy
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "cast_copy", lambda s, *args, **more: (sizes.append(len(s)), real(s, *args, **more)))
            for number in range(2):
                sizes.clear()
                engine.backward(engine(*batch(number, 0)))
                engine.step()
    return sizes, len(list(engine.module.parameters()))


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_gradients_of_a_unit_are_copied_by_one_launch(kernels: Path, stage: int) -> None:
    sizes, params = run_ranks(1, launches, kernels, stage)[0]
    assert len(sizes) == len(NAMES) and sum(sizes) == params


# -- by name ------------------------------------------------------------------------------------------


def profiled(path: Path, on_device: bool) -> list[str]:
    with emulated(path):
        engine = engine_at(3, {}, on_device)
        for number in range(2):
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                engine.backward(engine(*batch(number, 0)))
                engine.step()
    return sorted({event.name for event in profiler.events() if event.name.startswith("zeroengine")})


@pytest.mark.parametrize("on_device", [True, False])
def test_a_profiler_shows_units_by_name(kernels: Path, on_device: bool) -> None:
    whats = ("await", "gather", "reduce", "update")
    found = run_ranks(1, profiled, kernels, on_device)[0]
    assert found == sorted([f"zeroengine: {w} {n}" for w in whats for n in NAMES] + ["zeroengine: norm"] * on_device)
