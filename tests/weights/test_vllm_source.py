"""The interface of vLLM's weight transfer, as vLLM 0.33 states it: what is read when, and what each rank must yield."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroengine
from tests.checkpoint.models import Model, adamw
from tests.distributed.models import VOCAB, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from zeroengine.errors import ZeroEngineError

BASE = "vllm.distributed.weight_transfer.base"
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Replicate:
    """All ranks along this dimension of the mesh have the same part of a tensor."""


@dataclass(frozen=True)
class Shard:
    """The ranks along this dimension of the mesh have the parts into which `torch.chunk` divides dimension `dim`."""

    dim: int


@dataclass(frozen=True)
class ParamMeta:
    """A tensor. `owners` are ranks in the order of the mesh; None: every rank. Only owners have a mesh."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] | None = None


def import_protocol() -> Any:
    """vLLM's module, or one with the classes above, which a trainer engine of vLLM has imported."""
    try:
        return importlib.import_module(BASE)
    except ImportError:
        module = ModuleType(BASE)
        module.__dict__.update(Replicate=Replicate, Shard=Shard, ParamMeta=ParamMeta)
        packages = [BASE.rsplit(".", number)[0] for number in (3, 2, 1)]
        sys.modules.update({BASE: module} | {name: ModuleType(name) for name in packages})
        return module


def piece_of(value: torch.Tensor, meta: Any, rank: int) -> torch.Tensor:
    """What `iter_local` yields of a tensor: each dimension of the mesh divides, the outer one first."""
    if not meta.placements:
        return value
    index = meta.owners.index(rank)
    coordinates = []
    for size in reversed(meta.mesh_shape):
        index, coordinate = divmod(index, size)
        coordinates.insert(0, (coordinate, size))
    for (coordinate, size), placement in zip(coordinates, meta.placements, strict=True):
        if hasattr(placement, "dim"):
            # The only backend that takes pieces wants even ones.
            assert value.shape[placement.dim] % size == 0
            value = value.chunk(size, placement.dim)[coordinate]
    return value


class CountedCollectives:
    """Counts what the channel of an engine's parameters moves, and the elements that come to this rank."""

    def __init__(self, engine: zeroengine.Engine) -> None:
        self.counts: Counter[str] = Counter()
        self.received = 0
        self.channel: Any = engine._parts.ranks.transport.gather
        self.rank = engine._parts.ranks.transport.rank

    def __enter__(self) -> CountedCollectives:
        all_gather, all_to_all = self.channel.all_gather, self.channel.all_to_all

        def counted_gather(full: torch.Tensor, *arguments: Any, **more: Any) -> Any:
            self.counts["all_gather"] += 1
            return all_gather(full, *arguments, **more)

        def counted_exchange(received: torch.Tensor, sent: torch.Tensor, label: str, slices: Any) -> Any:
            self.counts["all_to_all"] += 1
            self.received += sum(row[self.rank] for rank, row in enumerate(slices.sizes) if rank != self.rank)
            return all_to_all(received, sent, label, slices)

        self.channel.all_gather, self.channel.all_to_all = counted_gather, counted_exchange
        return self

    def __exit__(self, *_: object) -> None:
        del self.channel.all_gather, self.channel.all_to_all


def check_by_vllm(protocol: Any, metadata: list[Any], pieces: State, world_size: int) -> None:
    """Apply the checks of vLLM's own backends to what a rank yields in pieces."""
    assert [name for group in protocol.layerwise_groups([m.name for m in metadata]) for name in group] == [
        m.name for m in metadata
    ]
    m2n = importlib.import_module("vllm.distributed.weight_transfer.m2n_common")
    for meta in metadata:
        if meta.shape:
            m2n.check_transferable(meta.name, meta.dtype, meta.shape)
            shape = m2n.expected_local_shape(m2n.m2n_param_meta(meta, world_size))
            assert shape == tuple(pieces[meta.name].shape), meta


def follow_protocol(
    engine: zeroengine.Engine, protocol: Any, dtype: torch.dtype | None, rounds: int = 1, **options: Any
) -> None:
    """Call a source as trainer engines of vLLM do on each rank, and compare with the values of a state dict."""
    rank, world_size = engine.rank, engine.world_size
    source = engine.weight_source(dtype=dtype, **options)
    for _ in range(rounds):
        assert source.implements_iter_full() and source.implements_iter_local()
        # It is read whenever it is needed, on ranks that are not at one place.
        metadata = source.metadata
        with CountedCollectives(engine) as nothing:
            for _ in range(rank + 1):
                assert source.metadata is metadata and source.metadata() is metadata
        assert not nothing.counts and isinstance(metadata, list)
        assert all(type(meta) is protocol.ParamMeta for meta in metadata)
        described = [(m.name, str(m.dtype), m.shape, m.owners, m.mesh_shape, str(m.placements)) for m in metadata]
        all_described: list[Any] = [None] * world_size
        dist.all_gather_object(all_described, described)
        assert all(other == described for other in all_described)
        owned = source.owned_names(rank)
        assert owned == [m.name for m in metadata if m.owners is None or rank in m.owners]
        by_name = {m.name: m for m in metadata}
        # One backend sends layer by layer, so the names of a layer stand together.
        layers = [re.match(r"\D*\.\d+(?=\.)", name) for name in by_name]
        in_order = [layer for layer, _ in itertools.groupby(match and match.group() for match in layers) if layer]
        assert len(in_order) == len(set(in_order))
        whole: State = {}
        for name, value in source.iter_full():
            assert (value.dtype, tuple(value.shape)) == (by_name[name].dtype, by_name[name].shape)
            whole[name] = value.clone()
        assert list(whole) == owned
        if options.get("layout") == "model":
            state = engine.full_state_dict()
            assert set(by_name) == {n for n, _ in engine.module.named_parameters()}
            assert all(torch.equal(value, state[n].to(value.dtype)) for n, value in whole.items())
        pieces: State = {}
        with CountedCollectives(engine) as collectives:
            for name, value in source.iter_local():
                expected = piece_of(whole[name], by_name[name], rank)
                assert value.is_contiguous() and torch.equal(value, expected), name
                pieces[name] = value.clone()
        assert list(pieces) == owned
        if hasattr(protocol, "layerwise_groups"):
            check_by_vllm(protocol, metadata, pieces, world_size)
        divided = [m for m in metadata if m.placements]
        assert collectives.counts["all_to_all"] == len(divided)
        # What no rank has whole, and no mesh divides evenly, is gathered: the embedding, with its unit.
        units = {slot.name: unit for unit in engine._parts.partition.units for slot in unit.layout.slots}
        uneven = {units[m.name] for m in metadata if not m.placements and m.name in units}
        if options.get("layout") == "model":
            expected_gathers = sum(unit.degrees.parameters > 1 for unit in uneven)
            assert expected_gathers == (engine._parts.partition.units[0].degrees.parameters > 1)
            assert collectives.counts["all_gather"] <= expected_gathers
        assert collectives.received <= sum(pieces[m.name].numel() for m in divided if m.name in pieces)
    # With one receiver no other rank owns anything.
    source = engine.weight_source(ranks=0, dtype=dtype, **options)
    for iteration in (source.iter_full, source.__iter__, source.iter_local):
        got = {name: value.clone() for name, value in iteration()}
        assert list(got) == source.owned_names(rank) == ([] if rank else [m.name for m in metadata])
        assert all(torch.equal(value, whole[name]) for name, value in got.items())


class Source(Model):
    """Each of its tied tensors once, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))


def step(engine: zeroengine.Engine) -> None:
    engine.backward(engine(*batch(engine.global_steps, engine.rank)))
    engine.step()


def sources_of_stages() -> None:
    start()
    protocol = import_protocol()
    bf16: dict[str, Any] = {"bf16": {"enabled": True}}
    offload = {"zero_optimization": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}
    cases: list[tuple[int, dict[str, Any], torch.dtype | None]] = [
        (0, {}, None),
        (1, bf16, None),
        (2, bf16, torch.float32),
        (3, {}, torch.bfloat16),
        (3, bf16, None),
        (3, bf16 | offload, None),
        (3, {"comm": {"transport": "gloo"}}, None),
    ]
    for stage, more, dtype in cases:
        model = build(Source)
        engine = zeroengine.initialize(model, adamw(model), config(stage, optimizer=None, **more))
        step(engine)
        follow_protocol(engine, protocol, dtype, rounds=2 - stage // 3, layout="model", bucket_bytes=7000)
        with pytest.raises(ZeroEngineError, match=r"since; it takes .*bucket_bytes"):
            engine.weight_source(since=zeroengine.WeightsToken())
        step(engine)
        engine.close()


def test_a_source_yields_what_its_metadata_says_on_every_rank_without_gathering_pieces() -> None:
    run_ranks(2, sources_of_stages)


def sources_of_files() -> None:
    start()
    import transformers

    settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_local_experts": 4}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB}
    model = build(lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings)))
    engine = zeroengine.initialize(model, config=config(3))
    # The names are those of the files, and each expert's matrices are computed from those of all experts.
    follow_protocol(engine, import_protocol(), None)
    names = [meta.name for meta in engine.weight_source().metadata]
    assert {name: value.shape for name, value in model.named_parameters()}.keys() != set(names)
    engine.close()


@pytest.mark.slow
def test_a_source_has_the_names_and_values_of_the_files_of_a_mixture() -> None:
    pytest.importorskip("transformers")
    run_ranks(2, sources_of_files, timeout=180)


def sources_of_groups() -> None:
    start()
    protocol = import_protocol()
    halves = {"parameters": 2, "gradients": 4, "optimizer": 4}
    # Shards are not in the order of ranks where units have other degrees.
    mixed = {"parameters": 4, "gradients": 4, "optimizer": 4, "per_unit": [{"units": "blocks.1", **halves}]}
    gloo = {"comm": {"transport": "gloo"}}
    for degrees, more in ((halves, gloo), (mixed, gloo), (mixed, {})):
        model = build(Source)
        engine = zeroengine.initialize(model, config=config(3, zero_optimization={"degrees": degrees}, **more))
        step(engine)
        follow_protocol(engine, protocol, None, layout="model", bucket_bytes=7000)
        engine.close()
    # Replicas that train apart have other weights: the first one has those that are sent.
    local: dict[str, Any] = {"local_steps": {"steps": 2, "replica_ranks": 2}}
    engine = zeroengine.initialize(build(Source), config=config(3, **local))
    step(engine)
    source = engine.weight_source(layout="model")
    assert {meta.owners for meta in source.metadata} == {(0, 1)}
    for iteration in (source.iter_full, source.iter_local):
        assert [name for name, _ in iteration()] == source.owned_names(engine.rank)
    assert bool(source.owned_names(engine.rank)) is (engine.rank < 2)
    engine.close()


def test_a_source_has_the_pieces_of_any_degrees_and_of_one_replica() -> None:
    run_ranks(4, sources_of_groups)


def public_names(cls: type) -> Iterator[str]:
    return (name for name in vars(cls) if not name.startswith("_"))


def test_a_source_has_every_member_of_the_installed_vllm() -> None:
    base = pytest.importorskip(BASE)
    from zeroengine.weights.vllm_source import VllmWeightSource

    # Before 0.33 the defaults of its own class, which is not ours, serve for some backends.
    if not hasattr(base, "Shard"):
        pytest.skip("an older protocol")
    assert set(public_names(base.WeightSource)) <= set(public_names(VllmWeightSource))
    for cls in (ParamMeta, Shard, Replicate):
        theirs = getattr(base, cls.__name__)
        assert list(theirs.__dataclass_fields__) == list(cls.__dataclass_fields__)
