"""States of a device in CPU memory, or on a disk behind it, give the bits of states on the device.

The device is pretended, see ``pretended``.
"""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.pretended import Apart, ApartMode, Late, LateCopies
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.training import start, take_steps
from tests.nccl_over_gloo import use_nccl_transport
from tests.parametrization import in_turn
from zeroengine import ops
from zeroengine.disk.queue import DiskQueue
from zeroengine.disk.swap_files import SwapFolder
from zeroengine.engine.initialize import make_engine
from zeroengine.offload import host_memory
from zeroengine.offload.disk_store import DiskStore
from zeroengine.offload.host_store import StagedDiskStore
from zeroengine.ops import _aio_library

CPU, NVME = {"device": "cpu"}, {"device": "nvme"}
OPTIMIZER = {"offload_optimizer": CPU}
PARAM = {"offload_param": CPU}
OPTIMIZER_AND_PARAM = OPTIMIZER | PARAM
DISK = {"offload_optimizer": NVME, "offload_param": NVME}
MIXED = {"offload_optimizer": CPU, "offload_param": NVME}
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


def away(stage: int, which: dict[str, Any], path: Path | str, **more: Any) -> dict[str, Any]:
    settings = config(stage, **copy.deepcopy(more))
    zero = settings["zero_optimization"]
    for section, its in which.items():
        small = {"buffer_size": 4096, "buffer_count": 3} if section == "offload_optimizer" else {"buffer_count": 2}
        zero[section] = its | small | ({"nvme_path": str(path)} if its["device"] == "nvme" else {})
    return settings | {"zero_optimization": zero, "aio": {"block_size": 4096}}


def engine_of(settings: dict[str, Any], copies: LateCopies | None, seed: int = 0) -> zeroengine.Engine:
    start()
    return make_engine(build(TinyLM, seed), None, copy.deepcopy(settings), copies=copies)


@contextmanager
def apart(copies: LateCopies) -> Iterator[None]:
    """``ApartMode``, and an update takes memory of one side alone."""
    real_step, real_preparation = ops.update_step, ops.prepare_arrays

    def check(arrays: ops.UpdateArrays) -> None:
        if len({copies.is_host(tensor) for tensor in arrays.tensors() if tensor.numel()}) > 1:
            raise Apart("an update takes memory of the host and of the device")

    def update_step(rule: str, arrays: ops.UpdateArrays | ops.PreparedArrays, **options: Any) -> None:
        if isinstance(arrays, ops.UpdateArrays):
            check(arrays)
        real_step(rule, arrays, **options)

    def prepare_arrays(rule: str, arrays: ops.UpdateArrays, reload_written: bool) -> ops.PreparedArrays:
        check(arrays)
        return real_preparation(rule, arrays, reload_written)

    with pytest.MonkeyPatch.context() as patch, ApartMode(copies):
        patch.setattr(ops, "update_step", update_step)
        patch.setattr(ops, "prepare_arrays", prepare_arrays)
        yield


def train(settings: dict[str, Any], copies: LateCopies | None, steps: int) -> Any:
    engine = engine_of(settings, copies)
    losses, norms = [], []
    with nullcontext() if copies is None else apart(copies):
        for step in range(steps * engine.config.gradient_accumulation_steps):
            loss = engine(*batch(step, engine.rank))
            engine.backward(loss)
            if engine.step():
                norms.append(engine.grad_norm)
            losses.append(loss.item())
    memory = engine.memory()
    state = engine.full_state_dict()
    engine.close()
    return losses, norms, state, memory


def compared(cases: list[tuple[int, dict[str, Any]]], path: Path, more: dict[str, Any], late: bool) -> list[Any]:
    """Of each case: what is different, and the memory before and after."""
    found = []
    for stage, which in cases:
        one = train(config(stage, **copy.deepcopy(more)), None, 3)
        other = train(away(stage, which, path, **more), LateCopies(late), 3)
        differs = [name for name in one[2] if not torch.equal(one[2][name], other[2][name])]
        differs += ["losses"] * (one[0] != other[0]) + ["norms"] * (one[1] != other[1])
        found.append((differs, one[3], other[3]))
    return found


OTHER = {"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "fp32"}
CASES = {
    1: [(0, OPTIMIZER), (2, OPTIMIZER), (3, PARAM), (3, OPTIMIZER_AND_PARAM), (3, DISK), (3, MIXED)],
    2: [
        (0, OPTIMIZER),
        (1, OPTIMIZER),
        (2, OPTIMIZER),
        (3, OPTIMIZER),
        (3, PARAM),
        (3, OPTIMIZER_AND_PARAM),
        (3, DISK),
        (3, MIXED),
    ],
}


def bits_cases() -> Iterator[Any]:
    """All combinations; and of some of them, which are not slow, every other case."""
    for case in itertools.product((1, 2), PRECISIONS, (1, 2), (True, False)):
        yield pytest.param(*case, CASES[case[0]], marks=pytest.mark.slow, id=bits_name(*case))
    for world_size, precision, micro_steps, late, first in (
        (1, "fp32", 2, True, 0),
        (1, "bf16", 1, False, 1),
        (2, "fp32", 1, True, 0),
        (2, "bf16", 2, True, 1),
    ):
        case = (world_size, precision, micro_steps, late)
        marks = (pytest.mark.slow,) if (world_size, precision) == (2, "fp32") else ()
        chosen = CASES[world_size][first::2]
        yield pytest.param(*case, chosen, marks=marks, id=f"{bits_name(*case)}, every other case")


def bits_name(world_size: int, precision: str, micro_steps: int, late: bool) -> str:
    return f"{world_size} ranks, {precision}, {micro_steps} micro-steps, {'late' if late else 'at once'}"


@pytest.mark.parametrize(("world_size", "precision", "micro_steps", "late", "cases"), bits_cases())
def test_bits_are_those_of_states_on_the_device(
    tmp_path: Path, world_size: int, precision: str, micro_steps: int, late: bool, cases: list[tuple[int, Any]]
) -> None:
    more = PRECISIONS[precision] | {"gradient_accumulation_steps": micro_steps}
    for found in run_ranks(world_size, compared, cases, tmp_path, more, late):
        for (stage, which), (differs, before, after) in zip(cases, found, strict=True):
            assert not differs, (stage, which)
            assert after.states == before.states, (stage, which)
            there = after.cpu if CPU in which.values() else after.nvme
            assert sum(there[name] for name in ("optimizer", "parameters")) > 0, (stage, which)
            assert after.optimizer == 0 or "offload_optimizer" not in which


MUON: dict[str, Any] = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}


def test_bits_of_muon_are_those_of_states_on_the_device(tmp_path: Path) -> None:
    more, cases = PRECISIONS["bf16"] | MUON, [(0, OPTIMIZER), (3, MIXED)]
    for found in run_ranks(2, compared, cases, tmp_path, more, True):
        for (stage, which), (differs, before, after) in zip(cases, found, strict=True):
            assert not differs, (stage, which)
            assert after.states == before.states, (stage, which)
    with pytest.raises(RankFailed, match='Muon with "offload_optimizer"'):
        run_ranks(1, compared, [(3, PARAM)], tmp_path, MUON, True)


LOW_AND_SLOW_FP32 = pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])


def looked_at_and_written(cases: list[tuple[int, dict[str, Any]]], path: Path, more: dict[str, Any]) -> list[Any]:
    """Values of every kind, read and replaced between steps, with states here and with states away."""
    found = []
    for stage, which in cases:
        seen: list[list[Any]] = []
        for settings, copies in ((config(stage, **more), None), (away(stage, which, path, **more), LateCopies())):
            engine, values = engine_of(settings, copies), []
            param = engine.module.blocks[1].up.weight
            for step in range(3):
                loss = engine(*batch(step, engine.rank)) * (float("inf") if step == 1 else 1)
                engine.backward(loss)
                values.append(zeroengine.full_gradient(param))
                zeroengine.set_full_gradient(param, values[-1] * 0.5)
                values.append(bool(engine.step()))
                values += [zeroengine.full_master(param), zeroengine.full_optimizer_state(param, "exp_avg_sq")]
                zeroengine.set_full_optimizer_state(param, "exp_avg", values[-1] * 0.1)
                zeroengine.set_full_master(param, values[-2] * 0.9)
                with zeroengine.gathered(engine.module.norm), torch.no_grad():
                    engine.module.norm.weight.mul_(1.25)
            seen.append([*values, *engine.full_state_dict().values()])
            engine.close()
        found.append([same(one, other) for one, other in zip(*seen, strict=True)])
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    return bool(one == other)


@LOW_AND_SLOW_FP32
def test_inspection_and_surgery_reach_offloaded_states(tmp_path: Path, precision: str) -> None:
    cases = [(1, OPTIMIZER), (3, OPTIMIZER_AND_PARAM), (3, DISK)]
    for found in run_ranks(2, looked_at_and_written, cases, tmp_path, PRECISIONS[precision]):
        assert all(len(equal) > 20 and all(equal) for equal in found)


def saved_and_loaded(stage: int, which: dict[str, Any], path: Path, more: dict[str, Any]) -> list[Any]:
    """Two steps, a checkpoint, two steps; and the latter again, from the checkpoint, with states on either side."""
    start()
    (path / "nvme").mkdir(exist_ok=True)
    found = []
    for number, is_away in enumerate((True, False, True)):
        settings = away(stage, which, path / "nvme", **more) if is_away else config(2, **more)
        copies = LateCopies() if is_away else None
        engine = engine_of(settings, copies, seed=number)
        with nullcontext() if copies is None else apart(copies):
            take_steps(engine, range(2))
            if number == 0:
                engine.save_checkpoint(path / "saved")
            else:
                engine.load_checkpoint(path / "saved")
            found.append(take_steps(engine, range(2, 4)))
        engine.close()
    return found


@in_turn(
    ("which", "precision"),
    [pytest.param(OPTIMIZER_AND_PARAM, id="cpu", marks=pytest.mark.slow), pytest.param(DISK, id="nvme")],
    list(PRECISIONS),
)
def test_checkpoints_load_with_states_on_the_device_or_offloaded(
    tmp_path: Path, which: dict[str, Any], precision: str
) -> None:
    more = PRECISIONS[precision] | {"checkpoint": {"async_save": True}}
    for losses in run_ranks(2, saved_and_loaded, 3, which, tmp_path, more):
        assert losses[0] == losses[1] == losses[2]


@contextmanager
def host_waits_later() -> Iterator[threading.Event]:
    """Let no thread see a late copy before the event is set."""
    may_read, wait = threading.Event(), Late.wait_host

    def wait_host(late: Late) -> None:
        may_read.wait()
        wait(late)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Late, "wait_host", wait_host)
        yield may_read


def saved_beside_training(stage: int, path: Path, more: dict[str, Any]) -> tuple[bool, bool]:
    """Save while the GPU copies the optimizer's states as late as it may, and the host waits for nothing of that."""
    start()
    settings = config(stage, **more, checkpoint={"async_save": True})
    copies = LateCopies()
    with host_waits_later() as may_read:
        engine = engine_of(settings, copies)
        take_steps(engine, range(2))
        engine.save_checkpoint(path / "saved")
        is_under_way = any(lane.waiting for lane in copies._lanes.values())
        time.sleep(0.5)  # in which a thread that does not wait would write what has not arrived
        losses = take_steps(engine, range(2, 4))
        may_read.set()
        engine.close()
    other = engine_of(config(stage, **more), None, seed=1)
    other.load_checkpoint(path / "saved")
    return is_under_way, losses == take_steps(other, range(2, 4))


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (3, "bf16")])
def test_a_checkpoint_is_copied_beside_the_next_forward_and_before_the_next_update(
    tmp_path: Path, stage: int, precision: str
) -> None:
    assert run_ranks(2, saved_beside_training, stage, tmp_path, PRECISIONS[precision]) == [(True, True)] * 2


def saved_and_replaced(path: Path) -> tuple[bool, bool]:
    start()
    copies = LateCopies()
    with host_waits_later() as may_read:
        engine = engine_of(config(3, checkpoint={"async_save": True}), copies)
        take_steps(engine, range(2))
        param = next(engine.module.parameters())
        before = zeroengine.full_optimizer_state(param, "exp_avg").clone()
        engine.save_checkpoint(path / "saved")
        is_under_way = any(lane.waiting for lane in copies._lanes.values())
        zeroengine.set_full_optimizer_state(param, "exp_avg", torch.full_like(before, 7.0))
        may_read.set()
        engine.close()
    other = engine_of(config(3), None, seed=1)
    other.load_checkpoint(path / "saved")
    found = zeroengine.full_optimizer_state(next(other.module.parameters()), "exp_avg")
    return is_under_way, torch.equal(found, before)


def test_a_checkpoint_has_the_states_of_its_moment_though_one_is_replaced_next(tmp_path: Path) -> None:
    assert run_ranks(2, saved_and_replaced, tmp_path) == [(True, True)] * 2


def test_ratio_keeps_part_on_the_device(tmp_path: Path) -> None:
    part = {"offload_optimizer": CPU | {"ratio": 0.5}}
    for which in (part, part | PARAM):
        (differs, _, memory) = run_ranks(2, compared, [(3, which)], tmp_path, PRECISIONS["bf16"], True)[0][0]
        assert not differs
        assert memory.cpu["master"] > 0 and memory.master > 0
        assert memory.cpu["optimizer"] <= memory.states * 0.3


def traffic(cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Bytes of each element that cross in a step, of three units that need no padding."""
    start()
    found = []
    for settings in cases:
        copies = LateCopies()
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        engine = make_engine(model, None, settings | {"units": ["0", "1", "2"]}, copies=copies)
        for _ in range(2):
            before = dict(copies.copied)
            engine.backward(engine(torch.ones(2, 64)).float().sum())
            engine.step()
        found.append({way: (copies.copied[way] - before[way]) * engine.world_size / (3 * 64 * 64) for way in before})
    return found


def test_bytes_that_cross_in_a_step(tmp_path: Path) -> None:
    """The gradient leaves, the updated parameter comes back, and one that is stored comes for each of its uses.

    A low-precision parameter that is never released leaves, too: it may have been written since the last step.
    """
    bf16 = PRECISIONS["bf16"]
    accumulating = bf16 | {"data_types": {"grad_accum_dtype": "fp32"}}
    cases = [
        away(2, OPTIMIZER, tmp_path, **bf16),
        away(2, OPTIMIZER, tmp_path, **accumulating),
        away(3, OPTIMIZER_AND_PARAM, tmp_path, **bf16),
        away(2, OPTIMIZER, tmp_path),
        away(1, OPTIMIZER, tmp_path, **bf16),
        away(3, PARAM, tmp_path, **bf16),
        away(3, PARAM, tmp_path),
    ]
    assert run_ranks(2, traffic, cases)[0] == [
        {"out": 2 + 2, "in": 2},
        {"out": 4 + 2, "in": 2},
        {"out": 2, "in": pytest.approx(2 * 5 / 3)},  # forward and backward, the last unit once
        {"out": 4 + 4, "in": 4},  # one master, on the device
        {"out": 2 + 2, "in": 2},
        {"out": 2, "in": pytest.approx(2 * 5 / 3)},  # updated on the device
        {"out": 4, "in": pytest.approx(4 * 5 / 3 + 4)},  # where it is the master, it comes for that as well
    ]


def large_unit(path: Path) -> list[list[str]]:
    """Of one unit with more pieces than there are buffers."""
    start()
    found = []
    for which in (OPTIMIZER, DISK):
        states = []
        for settings, copies in ((config(3), None), (away(3, which, path), LateCopies())):
            model = build(partial(TinyLM, blocks=12))
            engine = make_engine(model, None, settings | {"units": ["blocks"]}, copies=copies)
            take_steps(engine, range(3))
            states.append(engine.full_state_dict())
            engine.close()
        found.append([name for name in states[0] if not torch.equal(states[0][name], states[1][name])])
    return found


def test_buffers_are_used_again(tmp_path: Path) -> None:
    assert run_ranks(1, large_unit, tmp_path)[0] == [[], []]


@pytest.mark.parametrize(
    "case",
    [pytest.param((2, OPTIMIZER), id="2", marks=pytest.mark.slow), pytest.param((3, DISK), id="3")],
)
def test_a_sum_is_rounded_once_when_it_is_added(tmp_path: Path, case: tuple[int, dict[str, Any]]) -> None:
    more = PRECISIONS["bf16"] | OTHER | {"gradient_accumulation_steps": 2}
    for found in run_ranks(2, compared, [case], tmp_path, more, True):
        assert [differs for differs, _, _ in found] == [[]]


def over_native_collectives(cases: list[Any], path: Path, more: dict[str, Any]) -> list[Any]:
    """NCCL's transport, whose collectives Gloo stands in for."""
    start()
    with pytest.MonkeyPatch.context() as patch:
        use_nccl_transport(patch)
        return compared(cases, path, more, True)


@pytest.mark.parametrize(
    "cases",
    [[(3, OPTIMIZER_AND_PARAM)], pytest.param([(3, DISK), (2, OPTIMIZER)], marks=pytest.mark.slow)],
    ids=["some", "others"],
)
@LOW_AND_SLOW_FP32
def test_offloading_over_nccl_collectives_changes_no_bit(tmp_path: Path, precision: str, cases: list[Any]) -> None:
    more = PRECISIONS[precision] | {"gradient_accumulation_steps": 2}
    for found in run_ranks(2, over_native_collectives, cases, tmp_path, more):
        assert [differs for differs, _, _ in found] == [[]] * len(cases)


# -- what is pretended ----------------------------------------------------------------------------


def test_a_simulated_late_copy_exposes_a_missing_wait() -> None:
    copies = LateCopies()
    host, device = copies.host_memory(8, torch.float32), torch.arange(8.0)
    transfer = copies.copy(host, device)
    assert host.isnan().all() and not transfer.done()
    transfer.wait_host()
    assert torch.equal(host, torch.arange(8.0)) and transfer.done()
    transfer = copies.copy(host, device)
    device.zero_()
    transfer.wait_stream()
    assert not host.any(), "what was written to the source meanwhile spoiled it"


def test_host_and_device_memory_in_one_operation_is_an_error() -> None:
    copies = LateCopies()
    host, device = copies.host_memory(8, torch.float32), torch.ones(8)
    with ApartMode(copies):
        host.copy_(device)
        doubled = host * 2
        with pytest.raises(Apart, match="mul"):
            host * device
        with pytest.raises(Apart, match="add"):
            device.add_(doubled)


# -- failures -------------------------------------------------------------------------------------


def fail_to_take_back(settings: dict[str, Any], folder: str) -> list[str]:
    """A disk that fails while updated shards leave for it: what the step says, and a save after it."""
    engine, library, told = engine_of(settings, LateCopies()), _aio_library.library(), []
    take_steps(engine, range(2))
    engine.backward(engine(*batch(2, engine.rank)))
    for call in (engine.step, lambda: engine.save_checkpoint(folder)):
        library.ze_aio_set_fault(errno.EIO, 1, 10_000)
        with pytest.raises(zeroengine.ZeroEngineError) as error:
            call()
        library.ze_aio_set_fault(0, 1, 1)
        told.append(str(error.value))
    return told


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_shard_whose_writeback_failed_is_never_saved(tmp_path: Path, precision: str) -> None:
    settings = away(3, {"offload_param": NVME}, tmp_path, **PRECISIONS[precision])
    said, said_later = run_ranks(1, fail_to_take_back, settings, str(tmp_path / "saved"))[0]
    assert "EIO" in said and "half updated" in said_later


def test_device_memory_is_freed_once_its_values_are_on_disk(tmp_path: Path) -> None:
    copies, queue = LateCopies(late=False), DiskQueue()
    disk = DiskStore(SwapFolder(str(tmp_path)), queue, 1 << 20)
    behind, left = StagedDiskStore(disk, copies, 3), []
    for _ in range(6):
        state, staging = behind.empty(1024, torch.float32), copies.device_memory(4096).view(torch.float32).fill_(3)
        left.append(weakref.ref(staging))
        behind.write(staging, state).wait_host()
        del staging
        into = copies.device_memory(4096).view(torch.float32)
        behind.read(state, into).wait_host()
        assert into.sum() == 3 * 1024
        left.append(weakref.ref(into))
        del into
    gc.collect()
    assert sum(ref() is not None for ref in left) <= 1, "that of the last read"
    behind.close()


# -- bad input ------------------------------------------------------------------------------------


def radam(settings: dict[str, Any]) -> None:
    start()
    model = build(TinyLM)
    make_engine(model, torch.optim.RAdam(model.parameters()), settings, copies=LateCopies())


def test_an_optimizer_that_cannot_be_updated_in_pieces_is_refused(tmp_path: Path) -> None:
    settings = away(2, OPTIMIZER, tmp_path) | {"optimizer": None}
    with pytest.raises(RankFailed, match=r'Adam, AdamW, .* not RAdam; write "device": "none"'):
        run_ranks(1, radam, settings)


def start_where_memory_is_short(settings: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "available_memory", lambda: 10 << 10)
        engine_of(settings, LateCopies())


def test_too_little_memory_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r'GiB of CPU memory on this machine .* "nvme"') as caught:
        run_ranks(2, start_where_memory_is_short, away(2, OPTIMIZER, tmp_path))
    assert len(caught.value.failures) == 2
