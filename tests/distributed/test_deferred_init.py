"""Models from meta_init on several ranks: the same training, and a rank holds its shards and one unit."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.deferred_init.test_meta_init import BIG, BLOCKS, Big, Peak
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.test_offload import OPTIMIZER_AND_PARAM, offloaded
from tests.distributed.training import start
from zeroengine.deferred_init import meta_init


def train(all_settings: list[dict[str, Any]], under_meta_init: bool) -> list[Any]:
    """Ranks other than 0 draw other values: those of rank 0 win."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    meta_init.CACHE_BYTES = 0
    for settings in all_settings:
        if under_meta_init:
            torch.manual_seed(rank)
            with zeroengine.meta_init(settings):
                model = TinyLM()
        else:
            model = build(TinyLM, rank)
        after = torch.rand(1).item()
        engine = zeroengine.initialize(model, config=settings)
        losses = []
        for step in range(3):
            loss = engine(*batch(step, rank))
            engine.backward(loss)
            assert engine.step()
            losses.append(loss.item())
        found.append((after, losses, engine.full_state_dict()))
        engine.close()
    return found


@pytest.mark.parametrize(
    ("precision", "stages"),
    [
        pytest.param({}, (2,), id="fp32"),
        pytest.param({}, (0, 1, 3), id="fp32 at other stages", marks=pytest.mark.slow),
        pytest.param({"bf16": {"enabled": True}}, (1, 3), id="bf16"),
        pytest.param({"bf16": {"enabled": True}}, (0, 2), id="bf16 at other stages", marks=pytest.mark.slow),
    ],
)
def test_deferred_init_trains_as_an_ordinary_build(
    tmp_path: Path, precision: dict[str, Any], stages: tuple[int, ...]
) -> None:
    settings = [
        *(config(stage, **precision) for stage in stages),
        offloaded(3, tmp_path, OPTIMIZER_AND_PARAM, **precision),
    ]
    expected = run_ranks(2, train, settings, False)
    found = run_ranks(2, train, settings, True)
    for one, other in zip(chain(*expected), chain(*found), strict=True):
        assert one[:2] == other[:2]
        assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])


def load(path: str) -> tuple[float, list[str]]:
    dist.init_process_group("gloo")
    with zeroengine.meta_init(values=False):
        model = TinyLM()
    engine = zeroengine.initialize(model, config=config(3))
    errors = []
    try:
        engine(*batch(0, 0))
    except zeroengine.ZeroEngineError as error:
        errors.append(str(error))
    engine.load_weights(path)
    return engine(*batch(0, 0)).item(), errors


def test_loaded_weights_fill_a_model_built_without_values(tmp_path: Path) -> None:
    model = build(TinyLM)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    for loss, errors in run_ranks(2, load, str(tmp_path / "weights.pt")):
        assert loss == model(*batch(0, 0)).item()
        assert len(errors) == 1 and "tok.weight" in errors[0]


def write_before_initialize() -> None:
    rank = start()
    expected = build(TinyLM)
    with torch.no_grad():
        expected.norm.bias.fill_(0.5)
        expected.blocks[0].up.weight[:2] = 0.25
    torch.manual_seed(0)
    with zeroengine.meta_init():
        model = TinyLM()
    plain = nn.Linear(2, 2)
    with torch.no_grad(), zeroengine.gathered([*model.parameters(), plain.weight]):
        for param, other in zip(model.blocks[1].parameters(), expected.blocks[1].parameters(), strict=True):
            assert torch.equal(param, other)
        # An initializer gathers what it writes, inside of what its caller has gathered.
        with zeroengine.gathered(model.norm):
            model.norm.bias.fill_(0.5 + rank)
        model.blocks[0].up.weight.data[:2] = 0.25
    assert not plain.weight.is_meta
    assert {name for name, param in model.named_parameters() if not param.is_meta} == {
        "norm.bias",
        "blocks.0.up.weight",
    }
    engine = zeroengine.initialize(model, config=config(3))
    state = engine.full_state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())


def test_gathered_before_initialize_gives_values_and_keeps_what_is_written() -> None:
    run_ranks(2, write_before_initialize)


def set_some() -> None:
    rank = start()
    with zeroengine.meta_init(values=False):
        model = TinyLM()
    with zeroengine.gathered(model.norm):
        nn.init.zeros_(model.norm.bias)
    assert not model.norm.bias.is_meta and model.norm.weight.is_meta
    engine = zeroengine.initialize(model, config=config(3))

    def unset() -> set[str]:
        try:
            engine(*batch(0, 0))
        except zeroengine.ZeroEngineError as error:
            return {name for name, _ in model.named_parameters() if name in str(error)}
        return set()

    rest = [*model.tok.parameters(), *model.blocks.parameters()]
    with zeroengine.gathered(rest):
        for param in rest:
            nn.init.constant_(param, 0.1)
    assert unset() == {"norm.weight"}
    # The ranks write different parameters of one unit, one of them zeros.
    with zeroengine.gathered(model.norm):
        (nn.init.zeros_(model.norm.weight) if rank else nn.init.ones_(model.norm.bias))
    assert unset() == set()
    state = engine.full_state_dict()
    assert set(state["norm.bias"].tolist()) == {1.0} and not state["norm.weight"].any()


def test_a_write_inside_gathered_sets_the_written_parameter_alone() -> None:
    run_ranks(2, set_some)


def test_gathered_before_initialize_refuses_what_has_no_values() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(zeroengine.ZeroEngineError, match=r"has no values\. Build the model inside"):
        with zeroengine.gathered(model):
            pass
    with zeroengine.meta_init(values=False):
        model = nn.Linear(2, 2)
    with pytest.raises(zeroengine.ZeroEngineError, match=r"no values yet\. Compute with them under torch.no_grad\(\)"):
        with zeroengine.gathered(model):
            loss = model(torch.ones(2)).sum()
    assert loss.item() == 0


def build_big(under_meta_init: bool) -> tuple[int, int]:
    dist.init_process_group("gloo")
    settings = config(3, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    dist.barrier()
    with Peak() as peak:
        if under_meta_init:
            with zeroengine.meta_init():
                model = Big()
        else:
            model = Big()
        engine = zeroengine.initialize(model, config=settings)
    memory = engine.memory()
    assert memory.gathered == 0
    return peak.growth, memory.total


@pytest.mark.slow  # test_meta_init measures what a rank holds
def test_deferred_init_holds_a_rank_s_shards_and_one_unit() -> None:
    unit = 4 * (4 * BIG * BIG + 3 * BIG)
    for growth, total in run_ranks(2, build_big, True):
        assert total < 1.1 * BLOCKS * unit  # half of parameters and of gradients
        assert growth < total + 4 * unit
