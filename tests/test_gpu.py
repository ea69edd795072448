"""On a GPU: the whole engine trains without waiting for it, to the numbers of plain PyTorch."""

from __future__ import annotations

import functools
import logging
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pack_sequence

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.emulated import wanted
from tests.ops.cuda import need_library, no_waiting
from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import ResizableBuffer
from zeroengine.comm.transports.choose import open_nccl
from zeroengine.engine.initialize import make_engine
from zeroengine.errors import DivergenceError
from zeroengine.memory.state_bytes import STATES
from zeroengine.runtime.input_digest import digest_inputs
from zeroengine.sequence.agreement import RankComparison
from zeroengine.sequence.mean_loss import mean_of_group

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

a_real_one = pytest.mark.skipif(wanted() == "emulated", reason="needs a GPU that computes beside the host, or NCCL")
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}, "optimizer_state_dtype": "bf16"},
}
untied = functools.partial(TinyLM, tied=False)


@pytest.fixture(autouse=True)
def library() -> None:
    need_library()


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def engine_at(stage: int, **more: Any) -> zeroengine.Engine:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return make_engine(build(untied), None, config(stage, **more), decaying)


def on_gpu(number: int, rank: int) -> tuple[torch.Tensor, ...]:
    return tuple(x.pin_memory().cuda(non_blocking=True) for x in batch(number, rank))


def steps_without_waiting(stage: int, more: dict[str, Any]) -> tuple[int, int, bool]:
    engine = engine_at(stage, **more)
    assert engine.optimizer.backend.is_async
    data = [on_gpu(number, engine.rank) for number in range(6)]
    for number in range(6):
        loss = engine(*data[number])
        with no_waiting() if number > 1 else nullcontext():
            engine.backward(loss)
            result = engine.step()
    return engine.global_steps, engine.skipped_steps, bool(result)


@pytest.mark.parametrize("name", PRECISIONS)
def test_forward_backward_and_step_wait_for_nothing(name: str) -> None:
    assert run_ranks(1, steps_without_waiting, 2, PRECISIONS[name])[0] == (6, 0, True)


# -- inputs -------------------------------------------------------------------------------------------


class Seeing(torch.nn.Module):
    """A model that keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        self.seen = [x, args, more]
        return self.linear(x).float().square().mean()


def inputs_on_the_gpu(more: dict[str, Any]) -> None:
    engine = zeroengine.initialize(build(Seeing), config=config(2, **more))
    x, ids = torch.randn(2, 4, device="cpu"), torch.arange(3, device="cpu")
    packed = pack_sequence([torch.ones(2, 4, device="cpu")])
    there, own, collected = torch.ones(2, device="cuda"), SimpleNamespace(x=x), []
    given = ({"ids": ids, "number": torch.tensor(3, device="cpu")}, packed, there.long(), own, collected, "text")
    for call in (engine, engine.module):  # as a wrapped trainer does
        loss = call(x, *given, labels=[(ids,), 2])
        engine.backward(loss)
        engine.step()
        (first, (batch, sequence, *kept), keywords) = engine.module.seen
        moved = [first, batch["ids"], batch["number"], sequence.data, keywords["labels"][0][0]]
        assert [t.device for t in moved] == [engine.device] * 5
        assert torch.equal(batch["ids"].cpu(), ids) and keywords["labels"][1] == 2
        assert sequence.batch_sizes.device.type == "cpu", "where torch wants them"
        assert all(a is b for a, b in zip(kept, given[2:], strict=True)) and own.x.device.type == "cpu"
        assert x.device.type == "cpu" and given[0]["ids"] is ids, "the caller's own stay where they are"
    assert engine.global_steps == 2


@pytest.mark.parametrize("name", PRECISIONS)
def test_tensors_in_cpu_memory_are_copied_to_the_gpu_that_computes(name: str) -> None:
    run_ranks(1, inputs_on_the_gpu, PRECISIONS[name])


def pinned_inputs() -> None:
    engine = zeroengine.initialize(build(Seeing), config=config(2))
    x = torch.randn(2, 4, device="cpu").pin_memory()
    engine(x)
    with no_waiting():
        engine(x)
    assert torch.equal(engine.module.seen[0].cpu(), x)


def test_a_forward_does_not_wait_for_inputs_in_pinned_memory() -> None:
    run_ranks(1, pinned_inputs)


class TwinTransport:
    """Two ranks, of which the other was given what this one was."""

    rank, world_size, has_peers = 0, 2, True

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        return values.view(2, -1)[0].repeat(2)


def compared() -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroengine").addHandler(handler)
    comparison = RankComparison(TwinTransport(), torch.device("cuda", 0))  # type: ignore[arg-type]
    inputs = [(*on_gpu(number, 0), torch.ones(3, device="cpu"), "text") for number in range(4)]
    torch.cuda.synchronize()
    for number in range(4):
        with no_waiting() if number < 3 else nullcontext():
            comparison.forward_began(inputs[number], {})
            comparison.micro_step_ended(True)
        assert bool(records) == (number == 3)
    return records


def test_inputs_are_compared_over_ranks_without_waiting() -> None:
    (warning,) = run_ranks(1, compared)[0]
    assert warning.startswith("the inputs are the same on all ranks")


def compared_facts() -> None:
    """Note and compare two steps of ranks that share samples."""
    ranks: Any = SimpleNamespace(rank=0, world_size=2, has_peers=False)
    # The other rank has the same.
    ranks.all_reduce_scalars = lambda values, label: values.view(2, -1)[:1].expand(2, -1).flatten()
    facts = RankComparison(ranks, torch.device("cuda", 0), 2)
    group: Any = SimpleNamespace(comparison=facts, size=1, all_gather=lambda values, label: values[None])
    losses = [torch.ones((), device="cuda") for _ in range(2)]
    ids = torch.arange(8, device="cuda").view(1, 8)
    torch.cuda.synchronize()
    for loss in losses:
        with no_waiting():
            facts.note("batches", digest_inputs({"input_ids": ids}, facts.device))
            facts.note("labels", (ids != 3).sum())
            facts.note("labels", torch.tensor(8, device="cpu"))
            loss = mean_of_group(group, loss.requires_grad_(), 3)
            facts.note("losses", loss)
            loss.backward()
            facts.micro_step_ended(True)


def test_ranks_that_share_samples_are_compared_without_waiting() -> None:
    run_ranks(1, compared_facts)


# -- the host runs ahead ------------------------------------------------------------------------------


def busy(more: dict[str, Any]) -> bool:
    """Whether ``step`` returns while the GPU still has all of the step before it."""
    engine = engine_at(2, **more)
    for number in range(2):
        engine.backward(engine(*on_gpu(number, 0)))
        engine.step()
    loss = engine(*on_gpu(2, 0))
    engine.backward(loss)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    before = torch.cuda.Event()
    before.record()
    engine.step()
    return before.query()


@a_real_one
def test_step_returns_while_the_gpu_is_busy() -> None:
    assert not run_ranks(1, busy, {})[0]


def overflowing() -> tuple[list[bool], int, int, float, bool]:
    engine = engine_at(1)
    param = engine.module.blocks[1].down.weight
    spoil = [1.0]
    param.register_hook(lambda grad: grad * spoil[0])
    results = []
    for number in range(4):
        spoil[0] = float("inf") if number == 2 else 1.0
        before = zeroengine.full_master(param)
        engine.backward(engine(*on_gpu(number, 0)))
        results.append(engine.step())
        if number == 2:
            same = torch.equal(zeroengine.full_master(param), before)
    count = zeroengine.full_optimizer_state(param, "step").item()
    return results, engine.global_steps, engine.skipped_steps, count, same


def test_an_overflow_changes_nothing() -> None:
    assert run_ranks(1, overflowing)[0] == ([True, True, False, True], 3, 1, 3.0, True)


def losses(device_path: bool) -> list[float]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    engine = make_engine(build(untied).cuda(), None, config(2), decaying, async_step=device_path)
    found = []
    for number in range(8):
        loss = engine(*on_gpu(number, 0))
        engine.backward(loss)
        engine.step()
        found.append(loss)
    return [loss.item() for loss in found]


def test_losses_are_those_of_a_step_that_waits() -> None:
    issued, waiting = (run_ranks(1, losses, path)[0] for path in (True, False))
    assert issued == pytest.approx(waiting, rel=1e-6), "the norm adds in another order"


def capturing() -> tuple[str, bool]:
    engine = engine_at(2)
    engine.backward(engine(*on_gpu(0, 0)))
    with pytest.raises(zeroengine.ZeroEngineError) as error, torch.cuda.graph(torch.cuda.CUDAGraph()):
        engine.step()
    return str(error.value), bool(engine.step())


def test_a_step_inside_a_graph_is_refused_and_can_be_taken_outside() -> None:
    message, updated = run_ranks(1, capturing)[0]
    assert message.startswith("engine.step() inside the capture of a CUDA graph") and updated


# -- states in CPU memory and on disk --------------------------------------------------------------------

CPU, NVME = {"device": "cpu"}, {"device": "nvme"}
AWAY: dict[str, dict[str, Any]] = {
    "optimizer": {"offload_optimizer": CPU},
    "half of the optimizer": {"offload_optimizer": CPU | {"ratio": 0.5}},
    "parameters": {"offload_param": CPU},
    "both": {"offload_optimizer": CPU, "offload_param": CPU},
    "both on disk": {"offload_optimizer": NVME, "offload_param": NVME},
}


def offloaded(which: dict[str, Any], folder: str, more: dict[str, Any]) -> tuple[list[float], bool, bool]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    zero = {key: of | ({"nvme_path": folder} if of["device"] == "nvme" else {}) for key, of in which.items()}
    settings = config(3, zero_optimization={"stage": 3, **zero}, **more)
    engine = make_engine(build(untied), None, settings, decaying, async_step=None if which else False)
    data, found = [on_gpu(number, engine.rank) for number in range(8)], []
    on_disk = any(of["device"] == "nvme" for of in which.values())
    for number in range(8):
        with no_waiting() if number > 1 and not on_disk else nullcontext():
            loss = engine(*data[number])
            engine.backward(loss)
        engine.step()
        found.append(loss)
    moments = [
        tensor for shard in engine.optimizer.shards for tensor in engine.optimizer.state_of(shard).tensors(shard)
    ]
    pinned = all(moment.is_cuda or on_disk or moment.is_pinned() for moment in moments)
    memory = engine.memory()
    there = sum(of.get(name, 0) for of in (memory.cpu, memory.nvme) for name in STATES)
    losses = [loss.item() for loss in found]
    engine.close()
    return losses, pinned, there > 0


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("which", AWAY)
def test_states_away_give_the_losses_of_states_on_the_gpu(which: str, name: str, tmp_path: Path) -> None:
    here = run_ranks(1, offloaded, {}, "", PRECISIONS[name])[0]
    there = run_ranks(1, offloaded, AWAY[which], str(tmp_path), PRECISIONS[name])[0]
    assert there == (pytest.approx(here[0], rel=1e-6), True, True)


# -- several GPUs -------------------------------------------------------------------------------------

several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")


def trained(stage: int, more: dict[str, Any]) -> tuple[list[float], float]:
    engine = engine_at(stage, **more)
    data = [on_gpu(number, engine.rank) for number in range(8)]
    found = []
    for number in range(8):
        loss = engine(*data[number])
        with no_waiting() if number > 1 else nullcontext():
            engine.backward(loss)
            engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        found.append(mean.item() / dist.get_world_size())
    # Nothing of NCCL's shares the memory of full buffers, or they would not be freed.
    assert engine.memory().gathered == 0 and not engine.memory().put_off
    return found, engine.grad_norm


@several
@pytest.mark.parametrize("name", PRECISIONS)
def test_every_stage_trains_alike_over_nccl_and_waits_for_nothing(name: str) -> None:
    found = {stage: run_ranks(2, trained, stage, PRECISIONS[name]) for stage in range(4)}
    for ranks in found.values():
        assert ranks[0] == ranks[1]
        assert ranks[0][0] == pytest.approx(found[0][0][0], rel=1e-5 if name == "fp32" else 2e-2)


def sharing() -> str:
    torch.cuda.set_device(0)
    with pytest.raises(zeroengine.ZeroEngineError) as error:
        zeroengine.initialize(build(untied).to("cuda:0"), config=config(2))
    return str(error.value)


@a_real_one
def test_two_ranks_on_one_gpu_are_refused() -> None:
    for message in run_ranks(2, sharing):
        assert message.startswith("ranks 0 and 1 have the same GPU (")


# -- memory that a kernel still reads ------------------------------------------------------------------


def slow_reader(side_by_side: bool) -> tuple[float, bool]:
    """A full buffer is released while a slow kernel reads it, and its memory is taken again at once."""
    torch.cuda.init()
    numel = 1 << 22
    first = torch.cuda.current_stream()
    second = torch.cuda.Stream() if side_by_side else first
    buffer = ResizableBuffer(torch.full((numel,), 3.0, device="cuda"))
    at = buffer.tensor.data_ptr()
    second.wait_stream(first)
    with torch.cuda.stream(second):
        torch.cuda._sleep(500_000_000)
        total = buffer.tensor.double().sum()
        buffer.free()
    other = torch.full((numel,), 5.0, device="cuda")
    torch.cuda.synchronize()
    return total.item() / numel, other.data_ptr() == at


@a_real_one
@pytest.mark.parametrize("side_by_side", [False, True])
def test_released_memory_is_taken_again_behind_those_who_read_it(side_by_side: bool) -> None:
    assert run_ranks(1, slow_reader, side_by_side)[0] == (3.0, True)


def stalling() -> str:
    """A gather behind a GPU that does not get on, over NCCL."""
    dist.init_process_group("nccl")
    transport = open_nccl(Group(None, torch.device("cuda", 0)), 1.0)
    full, shard = (transport.empty(2, torch.float32) for _ in range(2))
    for _ in range(3):
        transport.gather.all_gather(full, shard, "blocks.0").wait_stream()
        torch.cuda.synchronize()
        time.sleep(1.0)
    torch.cuda._sleep(10_000_000_000)  # about five seconds
    transport.gather.all_gather(full, shard, "blocks.4").wait_stream()
    time.sleep(2.5)
    with pytest.raises(DivergenceError) as error:
        transport.gather.all_gather(full, shard, "blocks.5")
    torch.cuda.synchronize()
    return str(error.value)


@a_real_one
def test_a_collective_that_does_not_end_is_noticed_though_nobody_waits_for_it() -> None:
    waited = "rank 0 has waited 1 s (comm.timeout_seconds) for gather blocks.4 (number 4)"
    assert run_ranks(1, stalling)[0] == f"{waited}: rank 0 waits at gather blocks.4 (number 4)."


def gathering_in_registered_memory() -> tuple[bool, list[float]]:
    dist.init_process_group("nccl")
    transport = open_nccl(Group(None, torch.device("cuda", 0)), 60.0, register_buffers=True)
    buffer, shard = transport.buffer(1 << 20, torch.float32), transport.empty(1 << 20, torch.float32)
    sums = []
    for step in range(3):
        shard.fill_(step)
        buffer.allocate()
        # The communicator's own collective: among one rank the channel only copies.
        dist.all_gather_into_tensor(buffer.tensor, shard, group=transport.gather.group)
        sums.append(buffer.tensor.sum().item())
        buffer.free()
    registered = transport.registers_memory
    transport.close()
    return registered, sums


@a_real_one
def test_buffers_come_and_go_in_memory_that_nccl_has_registered() -> None:
    registered, sums = run_ranks(1, gathering_in_registered_memory)[0]
    assert sums == [0.0, float(1 << 20), float(2 << 20)]
    if not registered:
        pytest.skip("this NCCL or GPU has no such memory")
