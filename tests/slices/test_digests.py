"""Digests of split parameters are those of a model that is not split, and find a bit that differs between copies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zeroengine
from tests.distributed.models import batch, config
from tests.distributed.ranks import run_ranks
from tests.distributed.test_digests import flip
from tests.emulated import cpu_alone
from tests.slices import test_experts as experts
from tests.slices.split_models import make_split_engine, tied_lm, uneven_lm
from zeroengine.cli import zero_diff
from zeroengine.errors import DivergenceError

pytestmark = cpu_alone("the ranks of a model group talk over Gloo")

Digests = dict[str, dict[str, str]]
EVERY: dict[str, Any] = {"digests": {"every": 1}}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
Make = Callable[..., zeroengine.Engine]


def make_lm(size: int, stage: int, **more: Any) -> zeroengine.Engine:
    return make_split_engine(size, stage, tied_lm, EVERY | more)


def make_mixture(size: int, stage: int, **more: Any) -> zeroengine.Engine:
    return experts.make_engine(size, stage, **(EVERY | more))


def take_steps(engine: zeroengine.Engine, data: Callable[[int, int], Iterable[Any]]) -> None:
    """Take two steps, at whose ends copies are compared."""
    for step in range(2):
        engine.backward(engine(*data(step, engine.sample_group)))
        engine.step()


def digests_of_cases(
    make: Make, data: Any, cases: list[tuple[int, int]], folder: Path, settings: dict[str, Any]
) -> list[Digests]:
    """Digests before training and of one checkpoint: of a whole model, and then of each size and stage."""
    whole = make(1, 1, monitor={"folder": str(folder / "run")}, **settings)
    found = [whole.state_digests()]
    take_steps(whole, data)
    whole.save_checkpoint(folder / "whole")
    found.append(whole.state_digests())
    whole.close()
    for size, stage in cases:
        engine = make(size, stage, **settings)
        found.append(engine.state_digests())
        engine.load_checkpoint(folder / "whole")
        found.append(engine.state_digests())
        engine.save_checkpoint(folder / f"split-{size}-{stage}")
        take_steps(engine, data)
        engine.close()
    return found


@pytest.mark.parametrize(
    ("make", "data", "cases", "settings"),
    [
        (make_lm, batch, [(2, 0), (2, 3), (4, 2)], {}),
        pytest.param(make_lm, batch, [(2, 3)], BF16, marks=pytest.mark.slow),
        (make_mixture, experts.batch, [(2, 3), (4, 1)], {}),
    ],
    ids=["layers", "layers in bf16", "experts"],
)
def test_digests_are_those_of_the_whole_model(
    tmp_path: Path, make: Make, data: Any, cases: list[tuple[int, int]], settings: dict[str, Any]
) -> None:
    for initial, saved, *others in run_ranks(4, digests_of_cases, make, data, cases, tmp_path, settings):
        assert initial != saved and len(set(saved["parameters"].values())) == len(saved["parameters"])
        assert others == [initial, saved] * len(cases)
    manifests = [json.loads((path / "step-2/zeroengine.json").read_text()) for path in tmp_path.glob("split-*")]
    whole = json.loads((tmp_path / "whole/step-2/zeroengine.json").read_text())
    assert all(manifest["digests"] == whole["digests"] for manifest in manifests)
    # The run has the digests of its last step, and the checkpoints those of what was loaded.
    for path in tmp_path.glob("split-*"):
        assert zero_diff.main([str(tmp_path / "run"), str(path / "step-2")]) == 0


def flips() -> dict[tuple[int, str, str], str]:
    """Flip bits of the states of rank 1, one at a time, and return what is said by stage, kind and parameter."""
    found = {}
    for stage in (0, 3):
        engine = make_lm(2, stage)
        take_steps(engine, batch)
        optimizer = engine._parts.states.optimizer
        for shard in optimizer.shards:
            moments = optimizer.state_of(shard).tensors(shard)
            for index, slot in enumerate(shard.unit.layout.slots):
                span = next((span for span in shard.spans() if span.param_index == index), None)
                for kind, tensor in (("parameters", shard.master), ("moments", moments[1])):
                    flipped = tensor[span.shard_slice] if engine.rank == 1 and span is not None else None
                    if flipped is not None:
                        flip(flipped, len(flipped) // 2, 9)
                    try:
                        found[stage, kind, slot.name] = str(engine.state_digests() and "nothing")
                    except DivergenceError as error:
                        found[stage, kind, slot.name] = str(error)
                    if flipped is not None:
                        flip(flipped, len(flipped) // 2, 9)
        engine.state_digests()
        engine.close()
    return found


def test_a_bit_flipped_in_a_copy_of_a_slice_or_of_a_whole_parameter_is_named_by_rank_and_unit() -> None:
    for found in run_ranks(4, flips):
        for kind in ("parameters", "moments"):
            for name in ("blocks.1.up.weight", "blocks.1.down.weight", "tok.weight"):
                # Rank 3 has the same slice.
                text, unit = found[0, kind, name], "blocks.1" if name.startswith("blocks") else "rest"
                assert f"the {kind} of unit {unit} on rank 1 (" in text and "rank 3 (" in text and "rank 0" not in text
                assert found[3, kind, name] == "nothing", "no other rank has this part of the slice"
            # All ranks have what is whole, so the one that differs is known.
            text = found[0, kind, "blocks.1.norm.bias"]
            assert f"the {kind} of unit blocks.1 (float32, whole) on rank 1 (" in text and "rank 3" not in text
        # At stage 3 the ranks of a model group have the same part of what is whole.
        text = found[3, "moments", "blocks.1.norm.weight"]
        assert "the moments of unit blocks.1 (float32, whole) on rank 0 (" in text and "rank 1 (" in text


def refusals() -> list[str]:
    found = []
    for call in (lambda: make_split_engine(2, 3, uneven_lm, EVERY), make_split_engine(2, 3, uneven_lm).state_digests):
        with pytest.raises(zeroengine.ZeroEngineError) as error:
            call()
        found.append(str(error.value))
    # Sums of gradients in 16 bits have fewer bytes than the parameters.
    model = zeroengine.parallelize(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)), {"0": "colwise"}, size=2)
    with pytest.raises(zeroengine.ZeroEngineError) as error:
        zeroengine.initialize(model, config=config(3, data_types={"grad_accum_dtype": "bf16"}, **EVERY))
    return [*found, str(error.value)]


def test_a_parameter_that_is_split_within_a_word_of_digests_is_refused_by_name() -> None:
    for *messages, of_gradients in run_ranks(2, refusals):
        assert "parameter 0.bias of shape (12,) is split within 8 bytes" in of_gradients
        for text in messages:
            assert "parameter blocks.0.down.weight of shape (24, 7) is split within 8 bytes" in text
            assert "split dimension 1 into parts of multiples of 2, or write" in text
