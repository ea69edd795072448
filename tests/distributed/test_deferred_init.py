"""Models from meta_init on several ranks: the same training, and a rank holds its shards and one unit."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroengine
from tests.deferred_init.test_meta_init import BIG, BLOCKS, Big, Peak
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.test_offload import OPTIMIZER_AND_PARAM, offloaded
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
        pytest.param({}, (0, 1, 2, 3), id="fp32"),
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


def test_deferred_init_holds_a_rank_s_shards_and_one_unit() -> None:
    unit = 4 * (4 * BIG * BIG + 3 * BIG)
    for growth, total in run_ranks(2, build_big, True):
        assert total < 1.1 * BLOCKS * unit  # half of parameters and of gradients
        assert growth < total + 4 * unit
