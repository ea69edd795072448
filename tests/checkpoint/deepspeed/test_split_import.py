"""`zero-import` of checkpoints that DeepSpeed 0.19.8 wrote with tensor parallelism (AutoTP): whole tensors.

Those in data/split.tar.xz are of ``deepspeed_runs.SPLIT_RUNS``.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroengine
from tests.checkpoint.deepspeed.deepspeed_runs import (
    DATA,
    SHARED,
    SPLIT_RUNS,
    digests,
    llama,
    split_adamw,
    train_split,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.slices.test_checkpoints import whole_states
from zeroengine.checkpoint.deepspeed.checkpoint_import import import_checkpoint
from zeroengine.checkpoint.deepspeed.merged_slices import merge_slices
from zeroengine.checkpoint.entries import StateEntry
from zeroengine.errors import CheckpointError
from zeroengine.partition.boxes import Box, pieces_of_run

Entries = dict[str, StateEntry]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder for each run, as DeepSpeed wrote it."""
    with tarfile.open(DATA / "split.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not every Python 3.11 has it
        archive.extractall(tmp_path / "ds")
    return tmp_path / "ds"


# -- resuming -------------------------------------------------------------------------------------


def resume(root: Path, expected: dict[str, Any], cases: Sequence[tuple[str, int, int]]) -> None:
    """On one rank: load each run at a stage and over a number of slices. It goes on as DeepSpeed did."""
    start()
    rank = torch.distributed.get_rank()
    for name, stage, size in cases:
        model = llama(name)
        config = {key: value for key, value in SHARED.items() if key != "scheduler"}
        config |= {key: value for key, value in SPLIT_RUNS[name].items() if key != "zero_optimization"}
        config["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config["tensor_parallel"] = {"autotp_size": size}
        engine = zeroengine.initialize(model, split_adamw(model), config)
        assert engine.load_checkpoint(root / name) == {"epoch": 1}
        assert engine.global_steps == 3
        states = {key: value for key, value in whole_states(engine).items() if not key.endswith(" step")}
        assert digests(states) == expected[name]["state"], (name, stage, size)
        # Also ranks that hold no model together take the samples of those that did.
        losses = torch.tensor([train_split(engine, step, rank // 2) for step in range(3, 6)]) / 4
        torch.distributed.all_reduce(losses)
        rel = 1e-2 if "bf16" in config else 1e-5
        assert losses.tolist() == pytest.approx(expected[name]["losses"], rel=rel), (name, stage, size)
        engine.close()


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([("split-1", 3, 2), ("tied-2", 1, 1)], id="some"),
        pytest.param(
            [("split-2", 1, 2), ("split-3", 3, 2), ("split-3", 2, 1), ("tied-2", 3, 2)],
            id="others",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_goes_on_as_under_deepspeed_over_slices_and_without(
    cases: list[tuple[str, int, int]], written: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    expected = json.loads((DATA / "split.json").read_text())
    assert expected.keys() == SPLIT_RUNS.keys()
    for name in SPLIT_RUNS:
        result = import_checkpoint(written / name, tmp_path / "out" / name)
        assert (result.manifest.world_size, result.notes) == (4, [])
    run_ranks(4, resume, tmp_path / "out", expected, cases, timeout=300)


# -- how parameters are split ---------------------------------------------------------------------


def piece(shape: Sequence[int], start: int, strides: Sequence[int], local_start: int, local: Sequence[int]) -> Any:
    view = {"shape": list(shape), "source": [start, list(strides)], "dest": [local_start, list(local)]}
    return view | {"locations": [0]}


def info_of(layout: Any) -> dict[str, Any]:
    return {"affine_map": {"params": {r"^p\.w$": layout}}, "autotp_unsupported_parameter_patterns": {}}


def entry(values: torch.Tensor, cuts: Sequence[int] = ()) -> Entries:
    """Return the entry of a tensor, in runs that end at these elements."""
    result, first = StateEntry(tuple(values.shape), values.dtype), 0
    for run in values.flatten().tensor_split(list(cuts)):
        result.pieces += pieces_of_run(values.shape, first, run)
        first += run.numel()
    return {"model.p.w": result}


def assembled(merged: StateEntry) -> torch.Tensor:
    result = torch.full(merged.shape, float("nan"))
    for box, values in merged.pieces:
        result[tuple(slice(o, o + size) for o, size in zip(box.offsets, box.sizes, strict=True))] = values
    return result


def test_parts_of_fused_matrices_come_to_their_places() -> None:
    # Queries of four rows above keys of two, which two ranks split each; DeepSpeed's shards end within a row.
    whole = torch.arange(18.0).view(6, 3)
    ranks, layouts = [], {}
    for rank in range(2):
        queries, keys = 2 * rank, 4 + rank
        parts = [piece((2, 3), 3 * queries, (3, 1), 0, (3, 1)), piece((1, 3), 3 * keys, (3, 1), 6, (3, 1))]
        layouts[rank] = {"shard_shape": [3, 3], "pieces": parts}
        ranks.append(entry(torch.cat([whole[queries : queries + 2], whole[keys : keys + 1]]), (4, 7)))
    merged = merge_slices(ranks, info_of({"logical_shape": [6, 3], "ranks": layouts}))
    assert torch.equal(assembled(merged["model.p.w"]), whole)


def test_columns_of_different_numbers_come_to_their_places() -> None:
    whole = torch.arange(20.0).view(4, 5)
    layouts = {
        0: {"shard_shape": [4, 3], "pieces": [piece((4, 3), 0, (5, 1), 0, (3, 1))]},
        1: {"shard_shape": [4, 2], "pieces": [piece((4, 2), 3, (5, 1), 0, (2, 1))]},
    }
    ranks = [entry(whole[:, :3].contiguous(), (5,)), entry(whole[:, 3:].contiguous(), (3, 4))]
    merged = merge_slices(ranks, info_of({"logical_shape": [4, 5], "ranks": layouts}))
    assert torch.equal(assembled(merged["model.p.w"]), whole)
    assert sum(box.numel for box, _ in merged["model.p.w"].pieces) == Box.whole((4, 5)).numel


# -- bad input ------------------------------------------------------------------------------------


def rewrite(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        for file in path.glob("*_model_states.pt"):
            tree = torch.load(file, weights_only=False)
            change(tree)
            torch.save(tree, file)

    return damage


def layout_in(tree: dict[str, Any], name: str) -> dict[str, Any]:
    params = tree["universal_checkpoint_info"]["affine_map"]["params"]
    layout: dict[str, Any] = next(value for pattern, value in params.items() if name in pattern)
    return layout


def unsupported(tree: dict[str, Any]) -> None:
    info = tree["universal_checkpoint_info"]
    pattern = next(pattern for pattern in info["affine_map"]["params"] if "q_proj" in pattern)
    del info["affine_map"]["params"][pattern]
    info["autotp_unsupported_parameter_patterns"][pattern] = "the fused layout is unknown"


RANK_1 = "mp_rank_01_model_states.pt"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "model of a rank": (lambda p: (p / RANK_1).unlink(), f"lacks the model's states, {RANK_1}"),
    "states of a rank": (
        lambda p: [file.unlink() for file in p.glob("*mp_rank_01_optim*")],
        "lacks zero_pp_rank_0_mp_rank_01_optim_states.pt: copy all files into it",
    ),
    "states of one of its ranks": (
        lambda p: (p / "zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink(),
        "is of 2 ranks and lacks zero_pp_rank_1_mp_rank_01_optim_states.pt",
    ),
    "all files of a rank": (
        lambda p: [file.unlink() for file in p.glob("*mp_rank_01*")],
        "is of 2 tensor-parallel ranks, and has files of 1: copy the files of mp_rank_00 to mp_rank_01 into it",
    ),
    "an older version": (
        rewrite(lambda tree: tree.pop("universal_checkpoint_info")),
        "does not say how parameters are split over its ranks, as DeepSpeed 0.19.8 does",
    ),
    "fused": (rewrite(unsupported), "self_attn.q_proj.weight is split over 2 ranks, and the fused layout is unknown"),
    "several dimensions": (
        rewrite(lambda tree: layout_in(tree, "o_proj")["ranks"][1]["pieces"][0].update(shape=[4, 4])),
        "o_proj.weight is split over 2 ranks, and its slices are not those of one dimension",
    ),
    "another shape": (
        rewrite(lambda tree: layout_in(tree, "o_proj").update(logical_shape=[8, 12])),
        "o_proj.weight is split over 2 ranks, and its slices are not those of one dimension",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_cannot_be_merged_is_refused_by_name(what: str, written: Path, tmp_path: Path) -> None:
    damage, message = DAMAGE[what]
    damage(written / "split-2" / "global_step3")
    with pytest.raises(CheckpointError) as error:
        import_checkpoint(written / "split-2", tmp_path / "out")
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()
