"""On a GPU the operations of NCCL's transport are in the order of their memory, on whatever stream they are awaited."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.recorded_streams import Device, Stream, recorded_streams
from zeroengine.comm.transports import nccl
from zeroengine.comm.transports.nccl import NCCLChannel

GPU = torch.device("cuda", 0)


class Ranks:
    """Some ranks, of which this process plays the first."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def channel_of(device: Device, patch: pytest.MonkeyPatch, world_size: int, *parts: tuple[int, ...]) -> NCCLChannel:
    """A channel whose peers send what this rank sends."""

    def reduce_scatter(output: torch.Tensor, full: torch.Tensor, group: Any) -> Any:
        run = lambda: output.copy_(full[: output.numel()] * group.size())  # noqa: E731
        return device.collective("reduce-scatter", output, full, run, group)

    def all_gather(full: torch.Tensor, shard: torch.Tensor, group: Any) -> Any:
        return device.collective("all-gather", full, shard, lambda: full.copy_(shard.repeat(group.size())), group)

    def all_reduce(full: torch.Tensor, group: Any, async_op: bool) -> Any:
        return device.collective("all-reduce", full, full, lambda: full.mul_(group.size()), group)

    patch.setattr(nccl, "_reduce_scatter", reduce_scatter)
    patch.setattr(nccl, "_all_gather", all_gather)
    patch.setattr(dist, "all_reduce", all_reduce)
    channel = NCCLChannel(Ranks(world_size), GPU, None)  # type: ignore[arg-type]
    channel._device = torch.device("cpu")  # where the tensors are
    for part in parts:
        channel.add_group(part, Ranks(len(part)))  # type: ignore[arg-type]
    return channel


@pytest.mark.parametrize("awaited_on", ["main", "side"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_sum_of_three_collectives_keeps_its_memory_until_the_last_is_awaited(
    awaited_on: str, accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded_streams() as device:
        # As with parameters 8, gradients and optimizer 16, on 32 ranks.
        channel = channel_of(device, monkeypatch, 32, tuple(range(8)), (0, 8), (0, 16))
        full, shard = torch.ones(64), torch.ones(4)
        work = channel.reduce_scatter(shard, full, "unit", accumulate, levels=(8, 16))
        gc.collect()
        stream = device.main if awaited_on == "main" else Stream()
        with torch.cuda.stream(stream):
            work.wait_stream()
        device.main.wait_stream(stream)
        before = device.live_bytes
        del work
        gc.collect()
        assert shard.tolist() == [33.0 if accumulate else 32.0] * 4
    assert device.faults == []
    assert device.live_bytes == before == full.nbytes + shard.nbytes, "temporary memory is freed by the wait"


def test_a_gather_that_puts_shards_in_order_frees_its_memory_behind_what_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with recorded_streams() as device:
        channel = channel_of(device, monkeypatch, 2)
        full, shard, stream = torch.zeros(6), torch.ones(3), Stream()
        work = channel.all_gather(full, shard, "unit", ranks=(1, 0))
        with torch.cuda.stream(stream):
            work.wait_stream()
        device.main.wait_stream(stream)
        assert full.tolist() == [1.0] * 6
    assert device.faults == []
