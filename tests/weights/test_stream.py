"""Streams of whole tensors: their values, their ends, what has changed, and what they refuse."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroengine
from tests.checkpoint.models import engine_at
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from zeroengine.errors import ZeroEngineError
from zeroengine.weights.huggingface_format import TensorSpec
from zeroengine.weights.selection import LocalValue, OutgoingTensor
from zeroengine.weights.stream import Bucket, BucketMemory, WeightStream, plan_buckets

State = dict[str, torch.Tensor]
SMALL = 1 << 10  # less than most tensors of the tiny models


def taken(stream: WeightStream) -> State:
    """Return copies of the tensors of a stream, put together from their pieces."""
    state: State = {}
    for piece in stream:
        target = state.setdefault(piece.name, torch.full(piece.shape, -7, dtype=piece.values.dtype, device="cpu"))
        (target[piece.row : piece.row + len(piece.values)] if piece.shape else target).copy_(piece.values)
    return state


def step(engine: zeroengine.Engine, number: int = 0) -> None:
    engine.backward(engine(*batch(number, engine.rank)))
    engine.step()


def same(first: State, second: State) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# -- values ---------------------------------------------------------------------------------------


def streams_of_stages(folder: str, more_places: bool) -> None:
    place = {"device": "nvme", "nvme_path": folder}
    bf16: dict[str, Any] = {"bf16": {"enabled": True}}
    cases: list[tuple[int, dict[str, Any]]] = [
        (2, bf16),
        (3, {"comm": {"transport": "gloo"}}),
        (3, bf16 | {"zero_optimization": {"offload_param": place, "offload_optimizer": place}}),
    ]
    if more_places:
        quantized = {"zero_quantized_weights": True}
        cases = [(0, {}), (1, {}), (3, bf16), (3, bf16 | {"zero_optimization": quantized})]
        cases.append((2, {"comm": {"transport": "gloo"}}))
    for stage, more in cases:
        engine = engine_at(stage, **more)
        step(engine)
        state = engine.full_state_dict()
        del state["head.weight"]  # tied
        engine.module.train()
        for ranks in ("all", 0, 1):
            for nbytes in (SMALL, "256MiB"):
                stream = engine.stream_weights(ranks=ranks, bucket_bytes=nbytes, buffers=True)
                got = taken(stream)
                assert same(got, state if ranks in ("all", engine.rank) else {}), (stage, more, ranks, nbytes)
                assert list(stream.tensors) == list(got) or not got
        cast = taken(engine.stream_weights("fp16", names="blocks.*", bucket_bytes=SMALL))
        assert same(cast, {name: v.half() for name, v in state.items() if name.startswith("blocks.")})
        if stage < 3:
            # Memory of the user is no reason to return other values.
            weight = engine.module.norm.weight
            memory, weight.data = weight.data, torch.full_like(weight, 3)
            assert bool((engine.full_state_dict(names="norm.weight")["norm.weight"] == 3).all()), stage
            weight.data = memory
        # What is written now is streamed, and training goes on.
        with zeroengine.gathered(engine.module.tok), torch.no_grad():
            engine.module.tok.weight.fill_(0.5)
        assert bool((taken(engine.stream_weights(names="tok.weight"))["tok.weight"] == 0.5).all())
        step(engine)
        engine.close()


def test_a_stream_has_the_values_of_the_state_dict_at_every_stage_and_place(tmp_path: Path) -> None:
    run_ranks(2, streams_of_stages, str(tmp_path), False)


@pytest.mark.slow
def test_a_stream_has_the_values_of_the_state_dict_at_further_places(tmp_path: Path) -> None:
    run_ranks(2, streams_of_stages, str(tmp_path), True)


def streams_of_groups(numbers: Sequence[int]) -> None:
    start()
    halves = {"parameters": 2, "gradients": 4, "optimizer": 4}
    # Shards are not in the order of ranks where other units have other degrees.
    mixed = {**halves, "parameters": 4, "per_unit": [{"units": "blocks.1", **halves}]}
    local: dict[str, Any] = {"local_steps": {"steps": 2, "replica_ranks": 2}}
    cases = [{"zero_optimization": {"degrees": own}, "comm": {"transport": "gloo"}} for own in (halves, mixed)]
    for number in numbers:
        more = (*cases, local)[number]
        engine = zeroengine.initialize(build(TinyLM), config=config(3, **more))
        step(engine)
        state = engine.full_state_dict()
        for ranks in ("all", 0, 3):
            got = taken(engine.stream_weights(ranks=ranks, bucket_bytes=SMALL))
            expected = {name: state[name] for name in state if name != "head.weight"}
            assert same(got, expected if ranks in ("all", engine.rank) else {}), (more, ranks)
        # All ranks go through the same buckets, also where the weights of one replica alone have changed.
        token = zeroengine.WeightsToken()
        sampler: State = {}
        for _ in range(2):
            stream = engine.stream_weights(since=token, ranks=0, bucket_bytes=SMALL)
            sampler |= taken(stream)
            token, state = stream.token, state_of(engine)
            assert engine.rank or same(sampler, state)
            engine.backward(engine(*batch(1, engine.rank)) * (engine.rank >= 2))
            engine.step()
        engine.close()


@pytest.mark.parametrize("numbers", [(1, 2), pytest.param((0,), marks=pytest.mark.slow)], ids=["some", "other"])
def test_hybrid_degrees_and_replicas_stream_to_any_rank(numbers: Sequence[int]) -> None:
    run_ranks(4, streams_of_groups, numbers)


def test_buckets_hold_each_element_once_in_order_and_stay_within_their_size() -> None:
    generator = torch.Generator().manual_seed(3)
    for nbytes in (64, 200, 4096):
        dtypes = (torch.bfloat16, torch.float32, torch.uint8)
        shapes = [tuple(torch.randint(0, 6, (n % 4,), generator=generator).tolist()) for n in range(40)]
        tensors = [
            OutgoingTensor(str(n), TensorSpec(shape, dtypes[n % 3]), LocalValue(str(n), None))
            for n, shape in enumerate(shapes)
        ]
        fitting = [t for t in tensors if t.spec.nbytes // (t.spec.shape[0] or 1 if t.spec.shape else 1) <= nbytes]
        covered: dict[str, int] = {}
        for runs in plan_buckets(fitting, nbytes):
            end = 0
            for run in runs:
                assert run.offset >= end and run.offset % run.tensor.spec.dtype.itemsize == 0
                assert run.start == covered.get(run.tensor.name, 0)
                covered[run.tensor.name] = run.start + run.numel
                end = run.end
            assert end <= nbytes
        assert covered == {tensor.name: tensor.spec.numel for tensor in fitting}
        whole = [run for runs in plan_buckets(fitting, nbytes) for run in runs if run.tensor.spec.nbytes <= nbytes]
        assert all(run.numel == run.tensor.spec.numel for run in whole), "what fits into a bucket is not cut"
        bucket = Bucket(torch.zeros(nbytes, dtype=torch.uint8), whole)
        assert all(bucket.piece(run).is_whole for run in whole), "also without elements"


def test_a_bucket_is_not_used_again_while_anything_refers_to_it(caplog: pytest.LogCaptureFixture) -> None:
    memory = BucketMemory(64, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    first = memory.take().data_ptr()
    assert memory.take().data_ptr() == first
    with caplog.at_level(logging.WARNING, "zeroengine"):
        array = memory.take()[8:16].view(torch.float32).numpy()
        second = memory.take()
        assert second.data_ptr() != first and not caplog.records
        view = second.view(torch.int16)[3:]
        del second
        third = memory.take()
        assert third.data_ptr() not in (first, view.storage_offset()) and len(caplog.records) == 1
        more = [memory.take().view(torch.int16) for _ in range(3)]
        assert len({tensor.data_ptr() for tensor in more}) == 3 and len(caplog.records) == 1, "reported once"
    for tensor in more:
        tensor.fill_(7)
    assert not array.any() and not view.any()
    del more, tensor, third
    reused = memory.take().data_ptr()
    assert memory.take().data_ptr() == reused


# -- ends -----------------------------------------------------------------------------------------


def raised(call: Any) -> str:
    with pytest.raises(ZeroEngineError) as error:
        call()
    return f"{type(error.value).__name__}: {error.value}"


def ends() -> None:
    start()
    engine = zeroengine.initialize(build(TinyLM), config=config(3))
    other = zeroengine.initialize(build(TinyLM), config=config(2))
    rank = engine.rank

    def open_one(**arguments: Any) -> WeightStream:
        return engine.stream_weights(bucket_bytes=SMALL, **arguments)

    def consumer_raises() -> None:
        with open_one() as stream:
            for number, _ in enumerate(stream):
                if number == 9 and rank == 1:
                    raise ZeroEngineError("no room in the sampler")

    assert "no room in the sampler" in (message := raised(consumer_raises))
    assert rank == 1 or ("rank 1" in message and "blocks." in message)

    def consumer_leaves(ranks: Any) -> None:
        for number, _ in enumerate(open_one(ranks=ranks)):
            if number == 9 and rank == 0:
                break
        else:
            raise AssertionError("the stream came to its end")

    for ranks in ("all", 0):
        if rank == 0:
            consumer_leaves(ranks)
        else:
            assert "rank 0" in raised(lambda ranks=ranks: consumer_leaves(ranks))

    def consumer_calls(call: Any, calls: bool) -> None:
        for number, _ in enumerate(open_one()):
            if number == 9 and calls:
                call()

    for name, call in {
        "step()": engine.step,
        "backward()": lambda: engine.backward(torch.ones((), requires_grad=True)),
        "a forward": lambda: engine(*batch(0, rank)),
        "save_weights()": lambda: engine.save_weights("/nowhere"),
        "full_state_dict()": engine.full_state_dict,
        "gathered()": lambda: zeroengine.gathered(engine.module).__enter__(),
        "stream_weights()": engine.stream_weights,
        "full_master": lambda: zeroengine.full_master(engine.module.tok.weight),
        "offload_states()": engine.offload_states,
    }.items():
        message = raised(lambda call=call: consumer_calls(call, rank == 1))
        assert name in message, (name, message)
    for everyone in (engine.step, lambda: step(engine)):
        assert "during a stream" in raised(lambda call=everyone: consumer_calls(call, True))

    # So does an error of a call for another reason, although a variable still refers to the stream.
    def consumer_fails() -> None:
        stream = open_one()
        next(stream)
        if rank == 1:
            with engine.average_weights():
                pass
        taken(stream)

    with pytest.raises(ZeroEngineError, match=r"different calls: .* in average_weights\(\)") as failure:
        consumer_fails()
    step(engine)
    del failure

    # A tensor that is larger than a bucket does not unpack as if it were whole.
    assert "bucket_bytes" in raised(lambda: dict(iter(open_one())))
    assert same(dict(engine.stream_weights()), taken(open_one()))

    token = zeroengine.WeightsToken()
    first = other.stream_weights(since=token)
    assert "come to its end" in raised(lambda: first.token)
    taken(first)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"names": "blocks.9.*"}, "matches no name"),
        ({"names": []}, "names is empty"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"bucket_bytes": 8}, "one row of"),
        ({"ranks": 2}, '"all"'),
        ({"dtype": "int4"}, "int4"),
        ({"merge": "peft"}, "without adapters"),
        ({"since": first.token}, "another engine"),
        ({"since": 3}, r"zeroengine.WeightsToken()"),
        ({"since": first}, "stream.token"),
        ({"names": 5}, "names are texts"),
        ({"device": "meta"}, "meta"),
        ({"device": 3.5}, '"cpu"'),
        ({"device": "gpu"}, '"cpu"'),
        ({"bucket_bytes": 1.5}, "one row of"),
        ({"layout": "x"}, "layout"),
        ({"dtype": "bf16" if rank else "fp16"}, "DivergenceError"),
    ]
    for arguments, text in wrong:
        assert text in raised(lambda arguments=arguments: engine.stream_weights(**arguments)), arguments
    with engine.stream_weights() as stream:
        assert "has no token" in raised(lambda: stream.token)
        taken(stream)
    with zeroengine.gathered(engine.module.tok):
        assert "inside `with zeroengine.gathered(...)`" in raised(engine.stream_weights)
    step(engine)
    engine.close()
    other.close()


def test_a_stream_ends_on_all_ranks_by_name_and_the_engine_trains_on() -> None:
    run_ranks(2, ends)


# -- what has changed -----------------------------------------------------------------------------


def updates(stage: int, more: dict[str, Any], number: int) -> float:
    start()
    engine = zeroengine.initialize(build(lambda: TinyLM(blocks=10)), config=config(stage, **more))
    sampler: State = {}
    token = zeroengine.WeightsToken()
    sent, total = [], 0
    for update in range(number):
        stream = engine.stream_weights(since=token, ranks=0, bucket_bytes="1MiB")
        sampler |= taken(stream)
        token = stream.token
        sent.append(sum(spec.nbytes for spec in stream.tensors.values()))
        state = state_of(engine)
        assert engine.rank or same(sampler, state)
        # A tenth of the blocks is trained.
        for number_of_block, block in enumerate(engine.module.blocks):
            block.requires_grad_(number_of_block == update % 10)
        for module in (engine.module.tok, engine.module.norm):
            module.requires_grad_(False)
        step(engine, update)
    total = sent[0]
    assert not taken(engine.stream_weights(since=token, names="tok.weight"))
    again = engine.stream_weights("fp16", since=token, names="tok.weight")
    assert len(taken(again)) == 1, "a consumer of another dtype has other values"
    engine.close()
    assert 0 < max(sent[1:]) <= total / 10
    return max(sent[1:]) / total


def state_of(engine: zeroengine.Engine) -> State:
    return {name: value for name, value in engine.full_state_dict().items() if name != "head.weight"}


def test_a_stream_since_an_earlier_one_has_what_changed_and_keeps_a_sampler_equal() -> None:
    run_ranks(2, updates, 3, {"bf16": {"enabled": True}}, 12)
