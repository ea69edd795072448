"""Streams of weights have split parameters whole, with the bits of the whole model, on all ranks or on one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroengine
from tests.distributed.models import batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import adamw, start
from tests.emulated import cpu_alone
from tests.slices import test_experts as experts
from tests.slices.split_models import make_split_engine, untied_lm
from tests.slices.test_refusals import blocks_over
from tests.weights.test_stream import same, taken
from zeroengine.weights import tensor_reads

pytestmark = cpu_alone("the ranks of a model group talk over Gloo")

State = dict[str, torch.Tensor]
SMALL = 1 << 12  # bytes of a bucket, less than the larger parameters
SPLIT, WHOLE = "blocks.0.up.weight", "blocks.0.norm.bias"


def take_a_step(engine: zeroengine.Engine, data: Iterable[Any]) -> None:
    engine.backward(engine(*data))
    engine.step()


def check_streams(engine: zeroengine.Engine, state: State) -> None:
    """Compare streams of all tensors, and of some in another dtype, with a state dict."""
    for ranks in ("all", 0, 3):
        stream = engine.stream_weights(ranks=ranks, bucket_bytes=SMALL)
        assert {n: spec.shape for n, spec in stream.tensors.items()} == {n: v.shape for n, v in state.items()}
        assert same(taken(stream), state if ranks in ("all", engine.rank) else {}), ranks
    half = taken(engine.stream_weights("fp16", names="blocks.0.*", ranks=3))
    expected = {name: value.half() for name, value in state.items() if name.startswith("blocks.0.")}
    assert same(half, expected if engine.rank == 3 else {})


def check_changes(engine: zeroengine.Engine) -> None:
    """What a sampler takes that has all but what has changed, among it slices that have changed places."""
    stream = engine.stream_weights(since=zeroengine.WeightsToken(), bucket_bytes=SMALL)
    sampler, token = taken(stream), stream.token
    params = dict(engine.module.named_parameters())
    with zeroengine.gathered(engine.module), torch.no_grad():
        slices: Any = params[SPLIT]
        halves = slices.full_tensor().chunk(2)
        slices.to_local().copy_(halves[slices.device_mesh.get_local_rank() - 1])
        params[WHOLE].add_(1)
    stream = engine.stream_weights(since=token, bucket_bytes=SMALL)
    changed = taken(stream)
    assert changed.keys() == {SPLIT, WHOLE} and torch.equal(changed[SPLIT], torch.cat(halves[::-1]))
    assert same(sampler | changed, engine.full_state_dict())
    assert not taken(engine.stream_weights(since=stream.token))


def streams_of_layers(stages: tuple[int, ...]) -> None:
    # Parameters are put together from several parts, which begin and end within a row.
    tensor_reads.CHUNK = 500
    for stage in stages:
        engine = make_split_engine(2, stage, untied_lm)
        # At first the values are those of a model that is not split.
        check_streams(engine, build(untied_lm).state_dict())
        take_a_step(engine, batch(0, engine.sample_group))
        check_changes(engine)
        # Sources of vLLM yield whole tensors on every rank.
        source, state = engine.weight_source(layout="model"), engine.full_state_dict()
        assert all(meta.owners is None and meta.shape == state[meta.name].shape for meta in source.metadata)
        for pairs in (source.iter_full(), source.iter_local()):
            assert same({name: value.clone() for name, value in pairs}, state)
        take_a_step(engine, batch(1, engine.sample_group))
        assert engine.memory().gathered == 0
        engine.close()


@pytest.mark.parametrize("stages", [(0, 3), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
def test_streams_of_split_layers_have_whole_tensors_on_any_rank(stages: tuple[int, ...]) -> None:
    run_ranks(4, streams_of_layers, stages)


def streams_of_experts() -> None:
    for size, stage in ((2, 3), (4, 0)):
        engine = experts.make_engine(size, stage)
        check_streams(engine, experts.build().state_dict())
        engine.close()


def test_streams_of_split_experts_have_whole_tensors_on_any_rank() -> None:
    run_ranks(4, streams_of_experts)


def receive_from_a_split_model(stage: int) -> State:
    """Four ranks send the weights of a model whose groups are not in the order of ranks, and the fifth receives."""
    start()
    mesh = dist.DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("data", "model"))
    training, transfer = dist.new_group(range(4)), dist.new_group([0, 4])
    if dist.get_rank() == 4:
        return taken(zeroengine.receive_weights(transfer))
    model = build(lambda: blocks_over(mesh["model"], mesh["model"]))
    engine = zeroengine.initialize(model, adamw(model), config(stage, optimizer=None), process_group=training)
    for ranks in range(4):
        state = taken(engine.stream_weights(ranks=ranks, bucket_bytes=SMALL))
        assert len(state) == (len(list(model.parameters())) if engine.rank == ranks else 0)
    engine.send_weights(transfer if engine.rank == 0 else None, bucket_bytes="64KiB")
    state = engine.full_state_dict()
    engine.close()
    return {name: state[name] for name, _ in model.named_parameters()}


def test_another_process_receives_whole_tensors_of_model_groups_in_any_order() -> None:
    *senders, received = run_ranks(5, receive_from_a_split_model, 3)
    assert all(same(state, received) for state in senders)
