"""States on disk give the losses of states in memory, bit for bit."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.training import take_steps
from tests.emulated import wanted
from tests.parametrization import in_turn
from zeroengine.comm.transports.single_process import SingleProcessTransport
from zeroengine.config import load
from zeroengine.monitor.timer import Timer
from zeroengine.offload.placement import place_states
from zeroengine.ops import _aio_library
from zeroengine.partition.cut import cut_units
from zeroengine.partition.degrees import degrees_of_stage
from zeroengine.partition.unit_layout import DegreeRules

OPTIMIZER, OPTIMIZER_AND_PARAM = ("offload_optimizer",), ("offload_optimizer", "offload_param")
PARAM = ("offload_param",)
PRECISIONS = [pytest.param({}, id="fp32"), pytest.param({"bf16": {"enabled": True}}, id="bf16")]


def offloaded(stage: int, path: Path | str, which: tuple[str, ...], **more: Any) -> dict[str, Any]:
    """Small buffers, so that every shard takes several pieces; every unit goes to disk."""
    settings = config(stage, **more)
    zero = settings["zero_optimization"] | {"param_persistence_threshold": 0}
    for key in which:
        zero[key] = {"device": "nvme", "nvme_path": str(path)}
    if "offload_optimizer" in which:
        zero["offload_optimizer"] |= {"buffer_size": 4096, "buffer_count": 3}
    return settings | {"zero_optimization": zero, "aio": {"block_size": 4096}}


def train(settings: dict[str, Any], steps: int) -> tuple[list[float], list[float], dict[str, torch.Tensor], Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    engine = zeroengine.initialize(build(TinyLM), config=settings)
    losses, norms = [], []
    for step in range(steps * engine.config.gradient_accumulation_steps):
        loss = engine(*batch(step, rank))
        engine.backward(loss)
        if engine.step():
            assert engine.grad_norm is not None
            norms.append(engine.grad_norm)
        losses.append(loss.item())
    return losses, norms, engine.full_state_dict(), engine.memory()


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert one[1] == other[1]
    assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])


CASES = [
    (1, 3, OPTIMIZER_AND_PARAM),
    (2, 3, OPTIMIZER_AND_PARAM),
    (2, 1, OPTIMIZER),
    (1, 2, OPTIMIZER),
    (2, 3, PARAM),
    (1, 3, PARAM),
    (3, 3, OPTIMIZER_AND_PARAM),
    (2, 2, OPTIMIZER),
    (2, 3, OPTIMIZER),
]
NAMES = {OPTIMIZER: "optimizer", PARAM: "parameters", OPTIMIZER_AND_PARAM: "both"}
WHICH = [pytest.param(which, id=NAMES[which]) for which in (OPTIMIZER, OPTIMIZER_AND_PARAM)]


# Of the others, offloading over devices and muon have their stages.
FAST_CASES = [CASES[1], CASES[6]]


@in_turn(
    ("case", "precision"),
    [
        pytest.param(
            case,
            id=f"{case[0]} ranks, stage {case[1]}, {NAMES[case[2]]}",
            marks=() if case in FAST_CASES else pytest.mark.slow,
        )
        for case in CASES
    ],
    PRECISIONS,
)
def test_nvme_gives_the_bits_of_memory(
    tmp_path: Path, case: tuple[int, int, tuple[str, ...]], precision: dict[str, Any]
) -> None:
    world_size, stage, which = case
    zero = {"param_persistence_threshold": 0}
    here = config(stage, **precision)
    here["zero_optimization"] |= zero
    expected = run_ranks(world_size, train, here, 4)
    found = run_ranks(world_size, train, offloaded(stage, tmp_path, which, **precision), 4)
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)
        assert other[3].states == one[3].states
    memory = found[0][3]
    assert memory.nvme["optimizer"] > 0 if "offload_optimizer" in which else memory.nvme["optimizer"] == 0
    assert memory.nvme["parameters"] > 0 if "offload_param" in which else memory.nvme["parameters"] == 0


def train_in_turn(every: list[dict[str, Any]]) -> list[Any]:
    return [train(settings, 3) for settings in every]


@pytest.mark.parametrize(
    ("precision", "cases"),
    [
        # A GPU updates no parameters that are away alone.
        pytest.param(
            {},
            [(2, OPTIMIZER), (3, OPTIMIZER_AND_PARAM), *[(3, PARAM)] * (wanted() == "cpu")],
            id="fp32",
            marks=pytest.mark.slow,
        ),
        pytest.param({"bf16": {"enabled": True}}, [(1, OPTIMIZER), (3, OPTIMIZER_AND_PARAM)], id="bf16"),
    ],
)
def test_muon_on_nvme_gives_the_bits_of_memory(tmp_path: Path, precision: dict[str, Any], cases: list[Any]) -> None:
    """Its momentum is the only state of its units; gradients, masters and parameters are where Adam's are."""
    more = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}, **precision}
    away = [offloaded(stage, tmp_path, which, **more) for stage, which in cases]
    for here, *others in run_ranks(2, train_in_turn, [config(2, **more), *away]):
        for (_, which), other in zip(cases, others, strict=True):
            assert_same(here, other)
            assert (other[3].nvme["optimizer"] > 0) == ("offload_optimizer" in which)
            assert (other[3].nvme["parameters"] > 0) == ("offload_param" in which)


class TwoLayers(nn.Module):
    """In one unit; a step needs one of them or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))


def train_one_layer_at_a_time(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    dist.init_process_group("gloo")
    engine = zeroengine.initialize(build(TwoLayers), config=settings)
    for step in range(3):
        engine.backward(engine.module.layers[step % 2](torch.ones(2, 16, dtype=torch.bfloat16)).float().square().sum())
        engine.step()
    with zeroengine.gathered(engine.module):
        return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


def test_parameters_without_gradient_keep_their_values_on_disk(tmp_path: Path) -> None:
    """Also where they share a piece with others, which is written back as a whole."""
    precision = {"bf16": {"enabled": True}}
    (here,) = run_ranks(1, train_one_layer_at_a_time, config(3, **precision))
    (there,) = run_ranks(1, train_one_layer_at_a_time, offloaded(3, tmp_path, OPTIMIZER_AND_PARAM, **precision))
    assert all(torch.equal(here[name], there[name]) for name in here)


def save_and_go_on(settings: dict[str, Any], folder: str, steps: int) -> Any:
    """Some steps, a checkpoint, further steps."""
    dist.init_process_group("gloo")
    engine = zeroengine.initialize(build(TinyLM), config=settings)
    take_steps(engine, range(0 + steps))
    engine.save_checkpoint(folder)
    return take_steps(engine, range(steps, 2 * steps)), engine.full_state_dict()


def load_and_go_on(settings: dict[str, Any], folder: str, steps: int) -> Any:
    dist.init_process_group("gloo")
    engine = zeroengine.initialize(build(TinyLM, seed=1), config=settings)
    take_steps(engine, range(7, 8))  # states of its own, to be replaced
    engine.load_checkpoint(folder)
    return take_steps(engine, range(steps, 2 * steps)), engine.full_state_dict()


@in_turn(
    ("to_disk", "precision"),
    [pytest.param(True, id="to disk"), pytest.param(False, id="to memory", marks=pytest.mark.slow)],
    PRECISIONS,
)
def test_checkpoints_go_between_disk_and_memory(tmp_path: Path, to_disk: bool, precision: dict[str, Any]) -> None:
    (tmp_path / "nvme").mkdir()
    away = offloaded(3, tmp_path / "nvme", OPTIMIZER_AND_PARAM, checkpoint={"async_save": True}, **precision)
    here = config(2, **precision)
    first, second = (here, away) if to_disk else (away, here)
    saved = run_ranks(2, save_and_go_on, first, str(tmp_path / "saved"), 3)
    loaded = run_ranks(2, load_and_go_on, second, str(tmp_path / "saved"), 3)
    for (losses, state), (losses_after, state_after) in zip(saved, loaded, strict=True):
        assert losses == losses_after
        assert all(torch.equal(state[name], state_after[name]) for name in state)


def look_and_write(settings: dict[str, Any]) -> Any:
    """Reads and replaces values of every kind between the steps."""
    dist.init_process_group("gloo")
    engine = zeroengine.initialize(build(TinyLM), config=settings)
    param = engine.module.blocks[1].up.weight
    seen = []
    for step in range(3):
        loss = engine(*batch(step, engine.rank))
        engine.backward(loss)
        seen += [zeroengine.full_gradient(param), loss.item()]
        zeroengine.set_full_gradient(param, seen[-2] * 0.5)
        engine.step()
        seen += [zeroengine.full_master(param), zeroengine.full_optimizer_state(param, "exp_avg_sq")]
        zeroengine.set_full_optimizer_state(param, "exp_avg", seen[-1] * 0.1)
        zeroengine.set_full_master(param, seen[-2] * 0.9)
        with zeroengine.gathered(engine.module.norm), torch.no_grad():
            engine.module.norm.weight.mul_(1.25)
    return seen, engine.full_state_dict()


@in_turn(("world_size", "which"), [pytest.param(1, id="1", marks=pytest.mark.slow), 2], WHICH)
def test_inspection_and_surgery_reach_what_is_on_disk(tmp_path: Path, world_size: int, which: tuple[str, ...]) -> None:
    here = config(3, zero_optimization={"param_persistence_threshold": 0})
    expected = run_ranks(world_size, look_and_write, here)
    found = run_ranks(world_size, look_and_write, offloaded(3, tmp_path, which))
    for (seen, state), (seen_on_disk, state_on_disk) in zip(expected, found, strict=True):
        for one, other in zip(seen, seen_on_disk, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert all(torch.equal(state[name], state_on_disk[name]) for name in state)


def accumulate(settings: dict[str, Any]) -> Any:
    return train(settings, 3)[:3]


GRADIENT_CASES = [
    pytest.param((1, 3), id="1 ranks, stage 3", marks=pytest.mark.slow),
    pytest.param((2, 2), id="2 ranks, stage 2", marks=pytest.mark.slow),
    pytest.param((2, 3), id="2 ranks, stage 3"),
]


@in_turn(("case", "precision"), GRADIENT_CASES, PRECISIONS)
def test_gradients_add_up_on_disk(tmp_path: Path, case: tuple[int, int], precision: dict[str, Any]) -> None:
    world_size, stage = case
    more = {"gradient_accumulation_steps": 3, **precision}
    expected = run_ranks(world_size, accumulate, config(stage, **more))
    found = run_ranks(world_size, accumulate, offloaded(stage, tmp_path, OPTIMIZER, **more))
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)


def overflow(settings: dict[str, Any]) -> Any:
    """A step whose gradient is not finite, among others."""
    dist.init_process_group("gloo")
    engine = zeroengine.initialize(build(TinyLM), config=settings)
    losses = []
    for step in range(4):
        loss = engine(*batch(step, engine.rank)) * (float("inf") if step == 1 else 1)
        engine.backward(loss)
        assert engine.step() == (step != 1)
        losses.append(loss.item())
    return losses, engine.full_state_dict()


def test_a_skipped_step_changes_nothing_on_disk(tmp_path: Path) -> None:
    expected = run_ranks(2, overflow, config(3))
    found = run_ranks(2, overflow, offloaded(3, tmp_path, OPTIMIZER_AND_PARAM))
    for (losses, state), (losses_on_disk, state_on_disk) in zip(expected, found, strict=True):
        assert losses == losses_on_disk
        assert all(torch.equal(state[name], state_on_disk[name]) for name in state)


def test_ratio_keeps_part_in_memory(tmp_path: Path) -> None:
    settings = offloaded(2, tmp_path, OPTIMIZER)
    settings["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
    expected, found = run_ranks(2, train, config(2), 3), run_ranks(2, train, settings, 3)
    assert_same(expected[0], found[0])
    memory = found[0][3]
    assert 0 < memory.nvme["optimizer"] <= memory.states * 0.3
    assert memory.optimizer > 0


def fail_on_rank_0(settings: dict[str, Any], folder: str, kind: int, when: str) -> str:
    """A checkpoint, then a disk that fails on one rank: what each rank is told, and by whom it is told again."""
    dist.init_process_group("gloo")
    engine = zeroengine.initialize(build(TinyLM), config=settings)
    take_steps(engine, range(2))
    engine.save_checkpoint(folder)
    told = []
    library = _aio_library.library()
    for attempt in range(2):
        try:
            if engine.rank == 0 and when == "forward" and not attempt:
                library.ze_aio_set_fault(kind, 1, 10_000)
            if attempt and when == "gradients":
                engine.step()  # with what is left of them
            loss = engine(*batch(2, engine.rank))
            if engine.rank == 0 and when == "gradients" and not attempt:
                library.ze_aio_set_fault(kind, 1, 10_000)
            engine.backward(loss)
            if engine.rank == 0 and when == "update" and not attempt:
                library.ze_aio_set_fault(kind, 8, 10_000)
            engine.step()
        except zeroengine.ZeroEngineError as error:
            told.append(f"{type(error).__name__}: {error}")
            if engine.rank != 0:
                break
        finally:
            library.ze_aio_set_fault(0, 1, 1)
        if engine.rank == 0 and when == "forward":
            break
    return " | ".join(told)


# An update reads as well as a forward.
MOMENTS = [pytest.param("forward", id="forward", marks=pytest.mark.slow), "gradients", "update"]


@in_turn(("when", "kind"), MOMENTS, [errno.EIO, errno.ENOSPC])
def test_a_failing_disk_ends_every_rank_with_an_error_and_the_checkpoint_still_loads(
    tmp_path: Path, kind: int, when: str
) -> None:
    (tmp_path / "nvme").mkdir()
    which = OPTIMIZER if when == "gradients" else OPTIMIZER_AND_PARAM
    settings = offloaded(3, tmp_path / "nvme", which, comm={"timeout_seconds": 10})
    saved = str(tmp_path / "saved")
    told = run_ranks(2, fail_on_rank_0, settings, saved, kind, when)
    assert told[0].startswith("OffloadError: ") and os.strerror(kind) in told[0] and "at offset" in told[0]
    if when != "forward":
        assert "half updated" in told[0].split(" | ")[1]
    assert told[1]  # ended by an error of its own, for its peer is gone
    run_ranks(2, load_and_go_on, config(1), saved, 2)


def start_on(settings: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    zeroengine.initialize(build(TinyLM), config=settings)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "does not exist"),
        ("file", "is a file"),
        ("/dev/shm", "which is memory"),
        ("/proc", "memory|cannot"),
    ],
)
def test_a_path_that_cannot_be_used_is_an_error_on_every_rank(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    settings = offloaded(2, tmp_path / path, OPTIMIZER)
    with pytest.raises(RankFailed, match=message) as caught:
        run_ranks(2, start_on, settings)
    assert len(caught.value.failures) == 2


def start_too_large(settings: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    with torch.device("meta"):
        free = os.statvfs(settings["zero_optimization"]["offload_optimizer"]["nvme_path"])
        width = int((free.f_bavail * free.f_frsize / 4) ** 0.5) + 4096
        model = torch.nn.Linear(width, width, bias=False)
    cpu, config = torch.device("cpu"), load(settings).resolve(world_size=1)
    place_states(
        cut_units(model), DegreeRules(degrees_of_stage(2, 1)), config, SingleProcessTransport(cpu), cpu, Timer()
    )


def test_too_little_room_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="are needed: make room"):
        run_ranks(1, start_too_large, offloaded(2, tmp_path, OPTIMIZER))


ROOM_PRECISIONS = ({"bf16": {"enabled": True}, "optimizer_state_dtype": "bf16"}, {}, {"bf16": {"enabled": True}})


def room_and_use(path: Path, precisions: Sequence[dict[str, Any]]) -> list[tuple[str, int, int, int]]:
    """Of several shapes: how many files a rank's states take, the bytes that were asked for, and those in use."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    found = []
    for number, (stage, which) in enumerate(
        [(1, OPTIMIZER), (2, OPTIMIZER), (3, OPTIMIZER), (3, PARAM), (3, OPTIMIZER_AND_PARAM)]
    ):
        for more in precisions:
            model = torch.nn.Sequential(*(torch.nn.Linear(5 + number, 5 + number) for _ in range(3 + number)))
            settings = offloaded(stage, path, which, **more)
            settings["zero_optimization"] |= {"reduce_bucket_size": 100}
            engine = zeroengine.initialize(model, config=settings)
            for _ in range(2):
                engine.backward(engine(torch.randn(2, 5 + number)).float().square().mean())
                engine.step()
            (disk,) = engine._parts.partition.placement.disks
            found.append((f"{stage} {which} {more}", len(disk._folder._files), disk._file.nbytes, disk._end))
            engine.close()
    return found


@pytest.mark.parametrize(
    ("world_size", "precisions"),
    [
        pytest.param(3, ROOM_PRECISIONS[:1], id="3-some"),
        *(pytest.param(n, ROOM_PRECISIONS, id=f"{n}-all", marks=pytest.mark.slow) for n in (1, 2, 3)),
    ],
)
def test_the_room_that_is_asked_for_is_what_the_states_take(
    world_size: int, precisions: Sequence[dict[str, Any]], tmp_path: Path
) -> None:
    for of_rank in run_ranks(world_size, room_and_use, tmp_path, precisions):
        for shape, num_files, asked, used in of_rank:
            assert (num_files, asked) == (1, used), shape


def test_memory_for_buffers_is_checked_at_the_start_on_a_cpu_too(tmp_path: Path) -> None:
    settings = offloaded(2, tmp_path, OPTIMIZER)
    settings["zero_optimization"]["offload_optimizer"] |= {"buffer_size": 1 << 30}
    run_ranks(1, train, settings, 1)  # no buffer is larger than a shard
    with pytest.raises(RankFailed, match=r"GiB of CPU memory on this machine .* a smaller \"buffer_size\""):
        run_ranks(1, start_with_many, settings)


def start_with_many(settings: dict[str, Any]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "100000000"
    train(settings, 1)


def train_radam(settings: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    model = build(TinyLM)
    zeroengine.initialize(model, torch.optim.RAdam(model.parameters(), lr=0.1), settings)


def test_an_optimizer_that_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    settings = offloaded(2, tmp_path, OPTIMIZER) | {"optimizer": None}
    with pytest.raises(RankFailed, match=r'Adam, AdamW, Lion, SGD and Adagrad .* not RAdam; write "device": "none"'):
        run_ranks(1, train_radam, settings)


def leave_files(settings: dict[str, Any], folder: str) -> tuple[int, int, int]:
    dist.init_process_group("gloo")
    engine = zeroengine.initialize(build(TinyLM), config=settings)
    take_steps(engine, range(1))
    open_files = len([fd for fd in os.listdir("/proc/self/fd") if _leads_to(fd, folder)])
    engine.close()
    del engine
    gc.collect()
    left = len([fd for fd in os.listdir("/proc/self/fd") if _leads_to(fd, folder)])
    return open_files, left, len(os.listdir(folder))


def _leads_to(fd: str, folder: str) -> bool:
    try:
        return folder in os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return False


def test_files_go_with_the_engine(tmp_path: Path) -> None:
    open_files, left, named = run_ranks(1, leave_files, offloaded(3, tmp_path, OPTIMIZER_AND_PARAM), str(tmp_path))[0]
    assert open_files > 0 and left == 0 and named == 0


def generate_between_steps(settings: dict[str, Any], nvme: str | None) -> Any:
    """Training, with the states away in the middle and, where ``nvme`` says so, an evaluation meanwhile."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    engine = zeroengine.initialize(build(TinyLM), config=settings)
    losses, seen = take_steps(engine, range(2)), []
    if nvme is not None:
        before = engine.memory()
        engine.offload_states(device="nvme", nvme_path=nvme)
        seen = [before.optimizer, engine.memory().optimizer, engine.memory().gradients]
        for call in (engine.step, lambda: engine.save_checkpoint(nvme), engine.offload_states):
            with pytest.raises(zeroengine.ZeroEngineError, match="reload_states"):
                call()
        with torch.no_grad():
            losses.append(engine(*batch(9, engine.rank)).item())
        loss = engine(*batch(9, engine.rank))
        with pytest.raises(zeroengine.ZeroEngineError, match="reload_states"):
            engine.backward(loss)
        del loss
        engine.reload_states()
        assert engine.memory().states == before.states
    else:
        losses.append(engine(*batch(9, engine.rank)).item())
    return losses + take_steps(engine, range(2, 4)), seen, engine.full_state_dict()


@in_turn(("stage", "precision"), [pytest.param(1, id="1", marks=pytest.mark.slow), 3], PRECISIONS)
def test_states_leave_for_a_while_and_come_back(tmp_path: Path, stage: int, precision: dict[str, Any]) -> None:
    settings = config(stage, **precision)
    expected = run_ranks(2, generate_between_steps, settings, None)
    found = run_ranks(2, generate_between_steps, settings, str(tmp_path))
    for (losses, _, state), (losses_after, seen, state_after) in zip(expected, found, strict=True):
        assert losses == losses_after
        assert all(torch.equal(state[name], state_after[name]) for name in state)
        assert seen[0] > 0 and seen[1] == 0
        assert stage == 1 or seen[2] == 0


def leave_wrongly(settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    zeroengine.initialize(build(TinyLM), config=settings).offload_states(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"include": ["moment"]},
            "include has 'moment'; write any of optimizer, all, parameters, masters, moments, averages",
        ),
        ({"device": "disk"}, "device is 'disk'"),
        ({"device": "nvme"}, "needs a folder on a disk"),
        ({"device": "nvme", "nvme_path": "/nowhere"}, "does not exist"),
    ],
)
def test_offload_states_says_what_to_write(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RankFailed, match=message) as caught:
        run_ranks(2, leave_wrongly, config(3), arguments)
    assert len(caught.value.failures) == 2


def fail_under(disk: Any) -> None:
    """A disk that cannot be read any more: what is beyond the end of a mapped file is SIGBUS, as an I/O error is."""
    for file in disk._folder._files:
        os.ftruncate(file.descriptors.buffered, 0)


def use_gradient(engine: zeroengine.Engine, param: torch.nn.Parameter) -> None:
    engine.backward(engine(*batch(1, 0)))
    zeroengine.set_full_gradient(param, torch.zeros(param.shape))


def use_in_place(settings: dict[str, Any], root: Path) -> list[str]:
    """What the ways to use states in place say, each of an engine of its own."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    plain = zeroengine.initialize(build(TinyLM), config=settings)
    take_steps(plain, range(1))
    plain.save_checkpoint(root / "runs")
    plain.save_weights(root / "out")
    plain.close()
    uses = {
        "save": lambda engine, param: engine.save_checkpoint(root / "more"),
        "load": lambda engine, param: engine.load_checkpoint(root / "runs"),
        "save weights": lambda engine, param: engine.save_weights(root / "others"),
        "load weights": lambda engine, param: engine.load_weights(root / "out"),
        "master": lambda engine, param: zeroengine.full_master(param),
        "set master": lambda engine, param: zeroengine.set_full_master(param, torch.zeros(param.shape)),
        "gradient": use_gradient,
        "moment": lambda engine, param: zeroengine.full_optimizer_state(param, "exp_avg"),
        "set moment": lambda engine, param: zeroengine.set_full_optimizer_state(
            param, "exp_avg", torch.zeros(param.shape)
        ),
    }
    said = []
    for use in uses.values():
        engine = zeroengine.initialize(build(TinyLM), config=settings)
        take_steps(engine, range(1))
        for disk in engine._parts.partition.placement.disks:
            fail_under(disk)
        try:
            use(engine, engine.module.blocks[0].up.weight)
        except zeroengine.ZeroEngineError as error:  # else it needed nothing of the disk
            said.append(str(error))
        with contextlib.suppress(zeroengine.ZeroEngineError):
            engine.close()
    return said


@in_turn(("which", "precision"), WHICH, PRECISIONS)
def test_a_disk_that_fails_under_mapped_states_is_an_error_and_no_signal(
    which: tuple[str, ...], precision: dict[str, Any], tmp_path: Path
) -> None:
    messages = run_ranks(1, use_in_place, offloaded(3, tmp_path, which, **precision), tmp_path)[0]
    assert len(messages) >= (4 if which == OPTIMIZER and not precision else 8)
    assert all("the disk fails" in message or "the file ends there" in message for message in messages), messages
