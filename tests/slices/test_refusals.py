"""What split models do not support, and wrong input, is an error on every rank that says what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroengine
from tests.distributed.models import batch, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import adamw, start
from tests.emulated import cpu_alone
from tests.slices.split_models import PLAN, make_split_engine, small_lm
from zeroengine.sequence.agreement import MICRO_STEPS

pytestmark = cpu_alone("the ranks of a model group talk over Gloo")

Mesh = dist.DeviceMesh


def message(function: Callable[..., Any], *args: Any, **more: Any) -> str:
    try:
        function(*args, **more)
    except zeroengine.ZeroEngineError as error:
        return str(error)
    return "no error"


def replace(module: nn.Module, name: str, mesh: Mesh, *placements: Placement) -> None:
    values = getattr(module, name).data
    setattr(module, name, nn.Parameter(distribute_tensor(values, mesh, placements)))


def blocks_over(*meshes: Mesh) -> nn.Module:
    """Return a model whose blocks are split over these meshes in turn."""
    model = small_lm()
    for block, mesh in zip(model.blocks, meshes, strict=True):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def over_both_dimensions(mesh: Mesh) -> nn.Module:
    model = small_lm()
    replace(model.blocks[0].up, "weight", mesh, Replicate(), Shard(0))
    return model


def with_terms_of_a_sum(mesh: Mesh) -> nn.Module:
    model = small_lm()
    up = model.blocks[0].up
    up.weight = nn.Parameter(DTensor.from_local(up.weight.data, mesh, [Partial()]))
    return model


def split_on_some_ranks(meshes: Mesh) -> nn.Module:
    """Return a model that ranks 0 and 1 have split, and the others have whole."""
    return blocks_over(meshes["tp"], meshes["tp"]) if dist.get_rank() < 2 else small_lm()


def in_another_order() -> nn.Module:
    """Return a model of which ranks 0 and 2 have the first slices, and ranks 3 and 1 the second ones."""
    mesh = Mesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("dp", "tp"))["tp"]
    return blocks_over(mesh, mesh)


def without_values() -> nn.Module:
    with zeroengine.meta_init():
        return small_lm()


def gather_slices_without_values() -> None:
    with zeroengine.gathered(zeroengine.parallelize(without_values(), PLAN, size=2)):
        pass


def blocks_without_values(mesh: Mesh) -> nn.Module:
    """Return a model of ``meta_init`` that torch has split."""
    model = without_values()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def initialize(model: nn.Module, **more: Any) -> None:
    zeroengine.initialize(
        model, adamw(model) if "optimizer" not in more else None, config(3, **({"optimizer": None} | more))
    ).close()


def of_plans(square: Mesh) -> dict[str, str]:
    """Return the errors of ``parallelize``."""
    split = zeroengine.parallelize(small_lm(), PLAN, size=2)
    return {
        "size": message(zeroengine.parallelize, small_lm(), PLAN, size=3),
        "style": message(zeroengine.parallelize, small_lm(), {"blocks.*.up": "columnwise"}, size=2),
        "pattern": message(zeroengine.parallelize, small_lm(), {"layers.*.up": "colwise"}, size=2),
        "kind": message(zeroengine.parallelize, small_lm(), {"blocks.*.norm": "colwise"}, size=2),
        "no size": message(zeroengine.parallelize, small_lm(), PLAN),
        "uneven": message(zeroengine.parallelize, nn.Sequential(nn.Linear(4, 7)), {"0": "colwise"}, size=2),
        "split already": message(zeroengine.parallelize, split, PLAN, size=2),
        "ties": message(zeroengine.parallelize, small_lm(), {"tok": "rowwise_whole_input"}, size=2),
        "values of some ranks": message(
            zeroengine.parallelize, without_values() if dist.get_rank() else small_lm(), PLAN, size=2
        ),
        "gathered without values": message(gather_slices_without_values),
        "no plan": message(zeroengine.parallelize, small_lm(), size=2),
        "no plan for autotp_size": message(initialize, small_lm(), tensor_parallel={"autotp_size": 2}),
        "another autotp_size": message(
            initialize, blocks_over(square["tp"], square["tp"]), tensor_parallel={"autotp_size": 4}
        ),
        "one rank's mistake": message(
            zeroengine.initialize,
            small_lm(),
            None,
            config(3, tensor_parallel={"autotp_size": 2}) if dist.get_rank() else "missing.json",
        ),
        "sizes of ranks": message(
            initialize, small_lm(), tensor_parallel={"autotp_size": 2 + 2 * (dist.get_rank() > 2)}
        ),
        "group with autotp_size": message(
            zeroengine.initialize,
            small_lm(),
            None,
            config(3, tensor_parallel={"autotp_size": 2}),
            process_group=square["dp"].get_group(),
        ),
    }


def of_models(square: Mesh) -> dict[str, str]:
    """Return the errors about how a model is split."""
    buffered = small_lm()
    buffered.register_buffer("table", distribute_tensor(torch.ones(4), square["tp"], [Shard(0)]))
    return {
        "without values": message(initialize, blocks_without_values(square["tp"])),
        "two meshes": message(initialize, blocks_over(square["tp"], square["dp"])),
        "two dimensions": message(initialize, over_both_dimensions(square)),
        "Partial": message(initialize, with_terms_of_a_sum(square["tp"])),
        "some ranks": message(initialize, split_on_some_ranks(square)),
        "another order": message(initialize, in_another_order()),
        "buffer": message(initialize, buffered),
        "process_group": message(
            zeroengine.initialize,
            blocks_over(square["tp"], square["tp"]),
            None,
            {},
            process_group=square["dp"].get_group(),
        ),
    }


def of_features(square: Mesh) -> dict[str, str]:
    """Return the errors about keys of the configuration, and about calls."""

    def refusal(**more: Any) -> str:
        return message(initialize, zeroengine.parallelize(small_lm(), PLAN, size=2), **more)

    int8 = {"type": "AdamW", "params": {"lr": 1e-3}}
    found = {
        "local_steps": refusal(local_steps={"steps": 2, "replica_ranks": 1}),
        "sequence_parallel_size": refusal(sequence_parallel_size=2),
        "Adafactor": message(with_adafactor),
        "int8": refusal(optimizer=int8, optimizer_state_dtype="int8"),
    }
    engine = make_split_engine(2, 3)
    found["stream with merge"] = message(engine.stream_weights, merge="peft")
    found["full_tensor"] = message(lambda: engine.module.blocks[0].up.weight.full_tensor())
    found["to_local"] = message(lambda: engine.module.blocks[0].up.weight.to_local())
    found["merge"] = message(engine.full_state_dict, merge="peft")
    # A refused call changes nothing: the engine trains on.
    engine.backward(engine(*batch(0, engine.sample_group)))
    engine.step()
    engine.close()
    return found


def with_adafactor() -> None:
    model = zeroengine.parallelize(small_lm(), PLAN, size=2)
    zeroengine.initialize(model, torch.optim.Adafactor(model.parameters()), config(3, optimizer=None))


def refusals() -> dict[str, str]:
    start()
    square = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return of_plans(square) | of_models(square) | of_features(square)


REFUSED = r"does not work with parameters that are split over ranks"
MESSAGES = {
    "size": r"parallelize\(size=3\): the number of ranks of this job, 4, is no multiple of it",
    "style": r"the style of 'blocks.\*.up' is 'columnwise'; write one of 'colwise', ",
    "pattern": r"the pattern 'layers.\*.up' matches no module. Modules are named like: tok, blocks",
    "split already": r"parameter blocks.0.up.weight is split already, over .*: split it once",
    "no plan": r"TinyLM has no plan of tensor parallelism \(base_model_tp_plan\). Write one: zeroengine.parallelize\(",
    "no plan for autotp_size": r"TinyLM has no plan of tensor parallelism \(base_model_tp_plan\). Write one: ",
    "another autotp_size": r"this model is split already, over 2 ranks .* ask for 4 and 1: leave the keys out",
    "values of some ranks": r"no values yet \(meta_init\) on some ranks, and has some on others: build it in the same",
    "gathered without values": r"of shape \(72, 24\) is split over ranks and has no values .* before parallelize\(\)",
    "without values": r"blocks.0.up.weight was split on the meta device, .*: split the model by zeroengine.para",
    "no size": r"parallelize\(model, plan\) needs the number of ranks of a group: write size=2",
    "uneven": r"0 returns 7 values, which 2 ranks do not divide: .* ColwiseParallel\(use_local_output=False\)",
    "kind": r"'blocks.\*.norm' matches blocks.0.norm, a LayerNorm, and 'colwise' splits a Linear or an Embedding",
    "one rank's mistake": r"missing.json",
    "sizes of ranks": r"over different numbers of ranks, or other layers: 2 and 1, 4 and 1. Give each rank",
    "ties": r"tok.weight and head.weight are one parameter, and the plan splits it as S\(0\) and as a whole: name both",
    "group with autotp_size": r"split over groups of all ranks, and initialize\(\) .* process_group",
    "two meshes": r"parameter blocks.1.up.weight is split over .* and others over .*: split the model over one mesh",
    "two dimensions": r"blocks.0.up.weight is a DTensor over .*, of several dimensions. .* such as mesh\[\"tp\"\]",
    "Partial": r"blocks.0.up.weight is a DTensor with the placement P\S*: only Shard and Replicate are parts",
    "some ranks": r"the ranks were started differently; .* rank 2: .* blocks.0.down.weight",
    "buffer": r"buffer table is a DTensor",
    "Adafactor": r"blocks.0.\S+ is split over ranks, and Adafactor needs whole parameters: let AdamW or zeroengine.M",
    "another order": r"split over ranks \[0, 3\], \[1, 2\], .* as the others, in one order, and be in one such group",
    "process_group": r"the model is split over the ranks \[., .\], and process_group has the ranks \[., .\], ",
    "local_steps": rf"local_steps {REFUSED}",
    "sequence_parallel_size": rf"sequence_parallel_size {REFUSED}",
    "int8": rf'optimizer_state_dtype "int8" {REFUSED}',
    "stream with merge": r"stream_weights\(\) cannot merge adapters into parameters that are split over ranks",
    "full_tensor": r"blocks.0.up.weight.*full_tensor.*gathered",
    "to_local": r"blocks.0.up.weight.*to_local.*gathered",
    "merge": r"full_state_dict\(\) cannot merge adapters into parameters that are split over ranks",
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return run_ranks(4, refusals)


@pytest.mark.parametrize("name", MESSAGES)
def test_what_does_not_work_is_refused_by_name_on_every_rank(name: str, found: list[dict[str, str]]) -> None:
    for messages in found:
        assert re.search(MESSAGES[name], messages[name], re.DOTALL), messages[name]


def write_differently(data_group: bool) -> str:
    """On one rank: the error of a step after writes that differ within one data group, or within each model group."""
    engine = make_split_engine(2, 1)
    block = engine.module.blocks[0]
    engine.backward(engine(*batch(0, engine.sample_group)))
    with torch.no_grad():
        if not data_group:
            block.norm.weight.fill_(1.0 + engine.rank % 2)
        elif engine.rank % 2:
            block.up.weight.fill_(1.0 + engine.rank)
    return message(engine.step)


@pytest.mark.parametrize("data_group", [True, False])
def test_writes_that_differ_are_an_error_on_every_rank(data_group: bool) -> None:
    name = "blocks.0.up.weight" if data_group else "blocks.0.norm.weight"
    for text in run_ranks(4, write_differently, data_group):
        assert f"the ranks have different values of {name}, which were written" in text


def train_on_other_samples() -> int:
    """On one rank: give each rank samples of its own, as without slices, and return the micro-steps that ended."""
    engine = make_split_engine(2, 3)
    for step in range(MICRO_STEPS + 2):
        try:
            engine.backward(engine(*batch(step, engine.rank)))
            engine.step()
        except zeroengine.DivergenceError as error:
            assert re.search(r"hold one model together.* the same: engine.dataloader\(dataset\)", str(error)), error
            return step
    return -1


class PartOfALoss(nn.Module):
    """Takes the loss of what its layer returns, which is to be the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).square().mean()


def train_on_parts_of_losses() -> str:
    """On one rank: the error where the loss of each rank is that of its part of the head."""
    model = zeroengine.parallelize(PartOfALoss(), {"head": "colwise"}, size=2)
    engine = zeroengine.initialize(model, config=config(1))
    with pytest.raises(zeroengine.DivergenceError) as error:
        for step in range(MICRO_STEPS):
            engine.backward(engine(torch.full((2, 4), 1.0 + step + engine.sample_group)))
            engine.step()
    return str(error.value)


def test_losses_that_differ_within_a_model_group_are_an_error_that_names_the_style() -> None:
    for text in run_ranks(4, train_on_parts_of_losses):
        assert re.search(r"ranks 0, 1 hold one model.* different losses of the same inputs.*colwise_gathered", text)


def test_ranks_of_a_model_group_with_different_samples_are_told_within_three_micro_steps() -> None:
    assert all(0 <= step < MICRO_STEPS for step in run_ranks(4, train_on_other_samples))
