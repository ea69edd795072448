"""Weights from a training run to other processes: by process groups, in shared memory, and through vLLM's interface."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import queue
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroengine
from tests.checkpoint.models import Model, adamw
from tests.distributed.models import batch, build, config
from tests.distributed.ranks import run_ranks
from zeroengine.errors import ZeroEngineError
from zeroengine.weights.transfer import Sender, start_broadcast

BUCKET_BYTES = 7000
State = dict[str, torch.Tensor]
Metadata = tuple[str, torch.dtype, tuple[int, ...]]


def start() -> dist.TCPStore:
    """A store that all ranks have. Rank 0 has its server."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ports: list[int] = [0] * dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    dist.all_gather_object(ports, store.port if store else 0)
    return store or dist.TCPStore("127.0.0.1", ports[0], is_master=False)


def engine_of(group: dist.ProcessGroup, stage: int = 3) -> zeroengine.Engine:
    model = build(Model)
    return zeroengine.initialize(model, adamw(model), config(stage, optimizer=None), process_group=group)


def step(engine: zeroengine.Engine) -> None:
    engine.backward(engine(*batch(engine.global_steps, engine.rank)))
    engine.step()


def collected(pieces: Any) -> State:
    state: State = {}
    for piece in pieces:
        values = state.setdefault(piece.name, torch.full(piece.shape, math.nan, dtype=piece.values.dtype))
        (values[piece.row : piece.row + len(piece.values)] if piece.shape else values).copy_(piece.values)
    return state


def shared_memory() -> list[str]:
    """The shared memory of transfers that this process has open or mapped."""
    gc.collect()
    fds = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in fds + maps if "memfd:zeroengine weights" in line]


# -- values ---------------------------------------------------------------------------------------


class Worker:
    """vLLM's side, written from its interface: it takes buffers by the rule of its consumer."""

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at = fails_at
        self.broadcasts: queue.Queue[torch.Tensor] = queue.Queue(1)
        self.state: State = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        keys = ("names", "dtype_names", "shapes")
        metadata = [(n, getattr(torch, d), s) for n, d, s in zip(*(update_info[k] for k in keys), strict=True)]
        for packed in packed_buffers(iter(metadata), lambda tensor: math.prod(tensor[2]) * tensor[1].itemsize):
            if self.fails_at in [name for name, _, _ in packed]:
                raise KeyError("no such weight")
            sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in packed]
            buffer = self.broadcasts.get(timeout=20)
            for (name, dtype, shape), part in zip(packed, buffer.split(sizes), strict=True):
                self.state[name] = part.clone().view(dtype).view(shape)


def packed_buffers(tensors: Iterator[Any], size_of: Any) -> Iterator[list[Any]]:
    """The rule of both sides of vLLM: a packed buffer ends with the tensor with which it exceeds the size."""
    while True:
        packed, size = [], 0
        for tensor in tensors:
            packed.append(tensor)
            if (size := size + size_of(tensor)) > BUCKET_BYTES:
                break
        if not packed:
            return
        yield packed
        del packed


class Trainer:
    """A trainer engine of vLLM 0.28 to 0.32: rank 0 announces the update and sends packed buffers; the others read."""

    def send(self, source: Any, worker: Worker, rank: int) -> tuple[list[Metadata], set[int]]:
        metadata = [(tensor.name, tensor.dtype, tensor.shape) for tensor in source.metadata()]
        if rank:
            assert not list(source)
            return metadata, set()
        names, dtypes, shapes = zip(*metadata, strict=True)
        dtype_names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        addresses = set()
        with ThreadPoolExecutor(1) as executor:
            update = executor.submit(
                worker.update_weights, {"names": names, "dtype_names": dtype_names, "shapes": shapes}
            )
            for packed in packed_buffers(iter(source), lambda tensor: tensor[1].nbytes):
                self.broadcast(worker, torch.cat([value.view(torch.uint8).view(-1) for _, value in packed]), update)
                addresses |= {value.untyped_storage().data_ptr() for _, value in packed}
            update.result()
        return metadata, addresses

    def broadcast(self, worker: Worker, buffer: torch.Tensor, update: Future[None]) -> None:
        while True:
            with contextlib.suppress(queue.Full):
                return worker.broadcasts.put(buffer, timeout=0.05)
            if update.done():
                update.result()


def sends_and_receives() -> Any:
    store, rank = start(), dist.get_rank()
    training, group = dist.new_group([0, 1]), dist.new_group([0, 2, 3])
    if rank > 1:
        # A receiver that has given up is not sent to. No sender comes to the store before the transfer by the group.
        with pytest.raises(ZeroEngineError, match=r"the sender has not called send_weights.. within 0.1 s"):
            list(zeroengine.receive_weights(store, start_timeout=0.1))
        states = [collected(zeroengine.receive_weights(target)) for target in (group, store)]
        # What a consumer keeps is not overwritten, and what it writes is its own.
        kept = list(zeroengine.receive_weights(store))
        if rank == 2:
            for own in kept:
                own.values.zero_()
            del own
        else:
            states.append(collected(kept))
        for target in (group, store):
            model = build(Model, seed=5)
            zeroengine.receive_weights(target, into=model)
            states.append(dict(model.named_parameters(remove_duplicate=False)))
        assert not list(zeroengine.receive_weights(group))
        return shared_memory(), [{n: v.detach().clone() for n, v in state.items()} for state in states]
    engine = engine_of(training)
    step(engine)
    options = {"bucket_bytes": BUCKET_BYTES}
    shared = {"target": store, "receivers": 2, **options}
    engine.send_weights(group if rank == 0 else None, **options)
    engine.send_weights(**shared)
    engine.send_weights(**shared)
    token = engine.send_weights(group, since=zeroengine.WeightsToken(), **options)
    engine.send_weights(**shared)
    assert engine.send_weights(group, since=token, **options) is not None
    values = engine.full_state_dict()
    state = {name: values[name] for name, _ in engine.module.named_parameters(remove_duplicate=False)}
    for dtype in (torch.float32, torch.bfloat16):
        worker = Worker()
        metadata, addresses = Trainer().send(engine.weight_source(ranks=0, dtype=dtype, **options), worker, rank)
        expected = {n: value.to(dtype) for n, value in state.items() if n != "head.weight"}
        assert metadata == [(name, dtype, tuple(expected[name].shape)) for name, _, _ in metadata]
        assert {name for name, _, _ in metadata} == set(expected)
        if rank == 0:
            assert len(addresses) == 2
            assert all(torch.equal(worker.state[name], value) for name, value in expected.items())
    errors = []
    try:
        Trainer().send(engine.weight_source(ranks=0, **options), Worker(fails_at="blocks.1.down.weight"), rank)
    except (KeyError, ZeroEngineError) as error:
        errors.append(str(error))
    assert "no such weight" in errors[0] if rank == 0 else "rank 0 failed to stream weights" in errors[0], errors
    for target in (None, "/x"):
        with pytest.raises(ZeroEngineError, match=r"Write a torch process group .* or, .* a store"):
            engine.send_weights(target)
    for argument in ("ranks", "device", "fast"):
        with pytest.raises(ZeroEngineError, match=rf"argument {argument}; it takes bucket_bytes, buffers, dtype"):
            engine.send_weights(store, **{argument: 0})
    with pytest.raises(ZeroEngineError, match=r"receiver 0 of 1 has not called receive_weights.. within 0.1 s"):
        engine.send_weights(store, start_timeout=0.1)
    step(engine)
    return shared_memory(), state


def test_every_receiver_has_the_values_of_the_state_dict_and_no_memory_is_left() -> None:
    results = run_ranks(4, sends_and_receives)
    assert [names for names, _ in results] == [[]] * 4
    state = results[0][1]
    for _, states in results[2:]:
        for received in states:
            assert set(received) >= set(state) - {"head.weight"}
            assert all(torch.equal(received[name], value) for name, value in state.items() if name in received)


# -- failures -------------------------------------------------------------------------------------


class NoRoom(Exception):
    pass


def no_room() -> bool:
    raise NoRoom


def consume(target: Any, behaviour: str) -> None:
    """Receive, and fail in the middle."""
    if behaviour == "shape":
        model = build(Model)
        model.norm = torch.nn.LayerNorm(5)
        zeroengine.receive_weights(target, into=model)
    with contextlib.closing(zeroengine.receive_weights(target, timeout=8)) as weights:
        for number, _ in enumerate(weights):
            if number == 3 and behaviour == "raise":
                raise NoRoom("nowhere to put it")
            if number == 3 and behaviour in ("SIGKILL", "SIGSTOP"):
                os.kill(os.getpid(), getattr(signal, behaviour))


def receivers_that_fail(behaviours: list[str]) -> Any:
    """Rank 2 receives by process groups, and rank 3 forks receivers by shared memory."""
    store, rank = start(), dist.get_rank()
    training, groups = dist.new_group([0, 1]), [dist.new_group([0, 2]) for _ in range(3)]
    # A broadcast that was cut off leaves its group useless.
    by_behaviour = {"SIGSTOP": groups[1], "SIGKILL": groups[2]}
    pids: list[int] = [0] * 4
    dist.all_gather_object(pids, os.getpid())
    errors = []
    if rank == 2:
        for behaviour in behaviours:
            try:
                consume(by_behaviour.get(behaviour, groups[0]), behaviour)
            except (ZeroEngineError, NoRoom) as error:
                errors.append(str(error))
        return errors
    if rank == 3:
        for behaviour in behaviours:
            if (child := os.fork()) == 0:
                try:
                    consume(store, behaviour)
                finally:
                    os._exit(0)
            _, status = os.waitpid(child, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                # The sender's error comes while the receiver is stopped.
                time.sleep(0.8)
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        return errors
    engine = engine_of(training)
    for behaviour in behaviours:
        for target in (by_behaviour.get(behaviour, groups[0]), store):
            began = time.monotonic()
            # A time-out is for those that are stopped. Whoever has ended is noticed at once.
            timeout = 0.6 if behaviour == "SIGSTOP" else 8
            try:
                engine.send_weights(target, bucket_bytes=BUCKET_BYTES, timeout=timeout)
                errors.append("")
            except ZeroEngineError as error:
                errors.append(str(error))
            assert time.monotonic() - began < 5
            step(engine)
            if behaviour == "SIGSTOP" and rank == 0 and target is not store:
                os.kill(pids[2], signal.SIGCONT)
    assert not shared_memory(), shared_memory()
    if rank == 0:
        # A broadcast to a process that has ended fails, and does not hide another error.
        for is_done, expected in ((lambda: True, None), (no_room, NoRoom)):
            wait = start_broadcast(groups[2], torch.zeros(16 << 20, dtype=torch.uint8), 0)
            time.sleep(0.1)
            with pytest.raises(expected) if expected else contextlib.nullcontext():
                assert "does not answer: " in wait(is_done, 5)
    return errors


def test_a_receiver_that_fails_is_named_on_all_training_ranks_and_the_engine_trains_on() -> None:
    behaviours = ["shape", "raise", "none", "SIGSTOP", "SIGKILL"]
    results = run_ranks(4, receivers_that_fail, behaviours, missing=(2,))
    for errors in results[:2]:
        assert all("receiver at rank 1 of the group (process " in error for error in errors[:4:2]), errors
        assert all("receiver 0 of 1 (process " in error for error in errors[1:4:2]), errors
        for error in errors[:2]:
            assert "norm.weight: [5] here, [24] sent" in error and "norm.bias: [5] here" in error
        assert all("NoRoom: nowhere to put it" in error for error in errors[2:4]), errors
        assert errors[4:6] == ["", ""]
        assert all("not answer" in error and "receiver" in error for error in errors[6:8]), errors
        assert all("receiver" in error and ") has ended" in error for error in errors[8:]), errors


def senders_that_die() -> str:
    store, rank = start(), dist.get_rank()
    alone, group = [dist.new_group([0]), dist.new_group([1])], dist.new_group([1, 2])
    target = group if rank in (1, 2) else store
    pids: list[int] = [0] * 4
    dist.all_gather_object(pids, os.getpid())
    if rank < 2:
        engine_of(alone[rank], stage=1).send_weights(target, bucket_bytes=BUCKET_BYTES)
        raise AssertionError("the receiver kills this process before")
    began = time.monotonic()
    try:
        for number, _ in enumerate(zeroengine.receive_weights(target, timeout=20)):
            if number == 3:
                # The rank that has the stores ends last.
                time.sleep(0.3 if rank == 3 else 0)
                os.kill(pids[3 - rank], signal.SIGKILL)
    except ZeroEngineError as error:
        assert time.monotonic() - began < 5
        return str(error)
    raise AssertionError("no error")


def test_receivers_name_a_sender_that_has_died() -> None:
    results = run_ranks(4, senders_that_die, missing=(0, 1))
    assert all("the sender" in error for error in results[2:]), results
    assert "has ended" in results[2]


class LockedPages:
    """CUDA's runtime, which notes what is page-locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_shared_buckets_are_page_locked_for_a_gpu_as_long_as_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = LockedPages()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    sender = object.__new__(Sender)
    sender._descriptors = {}
    bucket = sender._allocate(1 << 20)
    view, address = bucket[:100], bucket.data_ptr()
    assert cudart.locked == {address: 1 << 20}
    del bucket
    gc.collect()
    assert cudart.locked == {address: 1 << 20}, "a view still shows the memory"
    del view
    gc.collect()
    assert cudart.locked == {}
    os.close(sender._descriptors[address])
