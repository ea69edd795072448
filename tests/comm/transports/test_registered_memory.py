"""comm.register_buffers: buffers of collectives lie in memory that NCCL has registered, however often it is freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroengine
from tests.distributed.models import batch, build, config
from tests.distributed.ranks import run_ranks
from tests.nccl_over_gloo import use_nccl_transport
from zeroengine.comm.transports import nccl, registered_memory
from zeroengine.comm.transports.choose import unused_keys
from zeroengine.comm.transports.single_process import SingleProcessTransport
from zeroengine.config.model import Comm

CPU = torch.device("cpu")


class Backend:
    """What NCCL has of a communicator: the pools that are registered with it."""

    mem_allocator = "NCCL's"

    def __init__(self) -> None:
        self.pools: list[Any] = []

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return dist.get_rank() != unsupported

    def register_mem_pool(self, pool: Any) -> None:
        self.pools.append(pool)

    def deregister_mem_pool(self, pool: Any) -> None:
        self.pools.remove(pool)


backends: dict[dist.ProcessGroup, Backend] = {}
unsupported = -1
# The addresses of storages whose memory came from the pool, and of those whose memory is torch's own.
from_pool: set[int] = set()


def stand_in(patch: pytest.MonkeyPatch) -> list[str]:
    """Let CPU memory that is allocated in the pool's context be known, and return what collectives use besides it."""
    inside, others = [0], list[str]()

    @contextmanager
    def use_mem_pool(pool: Any, device: torch.device) -> Iterator[None]:
        assert pool == ("pool of", "NCCL's")
        inside[0] += 1
        yield
        inside[0] -= 1

    def noted(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            result = allocate(*arguments, **options)
            storage = result if isinstance(result, torch.UntypedStorage) else result.untyped_storage()
            (from_pool.add if inside[0] else from_pool.discard)(storage.data_ptr())
            return result

        return run

    def checked(name: str) -> None:
        run = getattr(nccl, name)

        def check(target: torch.Tensor, source: torch.Tensor, **options: Any) -> Any:
            tensors = {"receives": target, "sends": source}
            others.extend(
                f"{name} {role}"
                for role, tensor in tensors.items()
                if tensor.untyped_storage().data_ptr() not in from_pool
            )
            return run(target, source, **options)

        patch.setattr(nccl, name, check)

    patch.setattr(torch.cuda, "MemPool", lambda allocator: ("pool of", allocator))
    patch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    patch.setattr(registered_memory, "backend_of", lambda group, _: backends.setdefault(group, Backend()))
    patch.setattr(torch, "empty", noted(torch.empty))
    patch.setattr(torch.UntypedStorage, "resize_", noted(torch.UntypedStorage.resize_))
    use_nccl_transport(patch)
    checked("_all_gather")
    checked("_reduce_scatter")
    return others


def train(stage: int, supported: bool) -> tuple[list[str], list[int], list[int], list[str]]:
    """What collectives used besides the pool, the pools of communicators before and after close(), and the notices."""
    global unsupported
    unsupported = -1 if supported else 1
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        others, notices = stand_in(patch), list[str]()

        def note(*arguments: Any) -> list[str]:
            notices.extend(unused_keys(*arguments))
            return notices

        patch.setattr("zeroengine.engine.assembly.unused_keys", note)
        settings = config(stage, comm={"register_buffers": True})
        engine = zeroengine.initialize(build(), None, settings)
        others.clear()  # the first values of parameters come as they may
        for step in range(3):
            engine.backward(engine(*batch(step, engine.rank)))
            engine.step()
        pools = [len(backend.pools) for backend in backends.values()]
        engine.close()
        after = [len(backend.pools) for backend in backends.values()]
    return others, pools, after, notices


@pytest.mark.parametrize("stage", [2, 3])
def test_collectives_use_registered_memory(stage: int) -> None:
    for others, pools, after, notices in run_ranks(2, train, stage, True):
        assert others == [] and pools == [1, 1] and after == [0, 0] and notices == []


def test_where_a_rank_has_no_such_memory_no_rank_uses_it_and_a_notice_says_so() -> None:
    answers = run_ranks(2, train, 3, False)
    assert all(others and not sum(pools) for others, pools, _, _ in answers)
    # Rank 0 speaks for all.
    assert answers[0][-1] == ["comm.register_buffers has no effect: this NCCL or GPU has no such memory"]


def test_elsewhere_the_key_has_no_effect_and_a_notice_says_so() -> None:
    transport = SingleProcessTransport(CPU)
    assert list(unused_keys(Comm(register_buffers=True), transport, CPU)) == [
        "comm.register_buffers has no effect: it is for ranks over NCCL"
    ]
