"""`zero-import`: checkpoints that DeepSpeed 0.19.8 wrote, and what it held and computed next.

Those in data/ are of the runs in ``deepspeed_runs``, as are those made here where DeepSpeed is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import errno
import importlib.util
import io
import json
import os
import random
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn import functional as F

import zeroengine
from tests.checkpoint.deepspeed.deepspeed_runs import DATA, MOMENTS, RUNS, SHARED, Small, adamw, digests, run, train
from tests.checkpoint.test_matrix import whole_state
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from zeroengine.checkpoint import dcp_save
from zeroengine.checkpoint.dcp_load import load_files
from zeroengine.checkpoint.dcp_metadata import read_metadata
from zeroengine.checkpoint.deepspeed import checkpoint_import, converted_state, pickled_files
from zeroengine.checkpoint.directory import CheckpointFolder
from zeroengine.checkpoint.inspect import inspect_folder
from zeroengine.cli import checkpoint_commands
from zeroengine.errors import CheckpointError


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each run, as DeepSpeed wrote it."""
    root = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(DATA / "deepspeed.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not every Python 3.11 has it
        archive.extractall(root)
    return root


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "deepspeed.json").read_text())
    return found


# -- resuming -------------------------------------------------------------------------------------


def resume(root: Path, expected: dict[str, Any], stages: tuple[int, ...], names: Sequence[str] = tuple(RUNS)) -> int:
    """Loads each run at each stage: it has DeepSpeed's bits, and goes on as DeepSpeed did."""
    start()
    done = 0
    for name in names:
        there = expected[name]
        for stage in stages:
            what = f"{name} at stage {stage} of {torch.distributed.get_world_size()}"
            low = {key: RUNS[name][key] for key in ("bf16", "fp16") if key in RUNS[name]}
            zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
            torch.manual_seed(1)
            model = Small()
            engine = zeroengine.initialize(model, adamw(model), SHARED | low | {"zero_optimization": zero})
            client_state = engine.load_checkpoint(root / name)
            assert client_state["epoch"] == 1, what
            assert torch.equal(client_state["best"], torch.tensor([0.5])), what
            taken = there["steps"] - there["skipped"]
            assert (engine.global_steps, engine.skipped_steps) == (taken, there["skipped"]), what
            assert engine.micro_steps == there["steps"], what
            assert [group["lr"] for group in engine.optimizer.param_groups] == there["rates"], what
            assert engine.loss_scale == there["scale"], what
            steps = {int(zeroengine.full_optimizer_state(p, "step")) for p in model.parameters() if p.requires_grad}
            assert steps == {taken}, what
            state = expected["fp32-2" if name == "round-robin" else name]["state"]  # DeepSpeed mixes it up, see RUNS
            assert digests(whole_state(engine, MOMENTS)) == state, what
            losses = [train(engine, there["steps"] + i) for i in range(3)]
            assert losses == pytest.approx(there["losses"], rel=1e-2 if low else 1e-5), what  # bit for bit, as measured
            engine.close()
            done += 1
    return done


def import_all(root: Path, names: Any, out: Path) -> Path:
    for name in names:
        assert checkpoint_commands.import_deepspeed([str(root / name), str(out / name)]) == 0
    return out


@pytest.mark.parametrize(
    ("world_size", "stages", "names"),
    [
        pytest.param(2, (3,), tuple(RUNS)[::2], id="2 ranks, stage 3, some"),
        *(
            pytest.param(ranks, (stage,), tuple(RUNS), id=f"{ranks} ranks, stage {stage}", marks=pytest.mark.slow)
            for ranks, stage in ((2, 3), (1, 0), (2, 1), (3, 2))
        ),
    ],
)
def test_training_goes_on_as_under_deepspeed(
    world_size: int,
    stages: tuple[int, ...],
    names: tuple[str, ...],
    written: Path,
    expected: dict[str, Any],
    tmp_path: Path,
) -> None:
    assert expected.keys() == RUNS.keys()
    imported = import_all(written, names, tmp_path)
    counts = run_ranks(world_size, resume, imported, expected, stages, names, timeout=300)
    assert counts == [len(stages) * len(names)] * world_size


@pytest.mark.slow
def test_with_the_deepspeed_installed_here(tmp_path: Path) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    run_ranks(2, run, tmp_path, list(RUNS), timeout=900)
    expected = {name: torch.load(tmp_path / f"{name}.pt") for name in RUNS}
    for there in expected.values():
        there["state"] = digests(there["state"])
    run_ranks(2, resume, import_all(tmp_path, RUNS, tmp_path / "out"), expected, (0, 3), timeout=300)


# -- what is written ------------------------------------------------------------------------------


def whole_tensors(path: Path) -> dict[str, torch.Tensor]:
    """By plain torch, with no code of ours."""
    reader = torch.distributed.checkpoint.FileSystemReader(path)
    known = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.zeros(item.size, dtype=item.properties.dtype)
        for name, item in known.items()
        if isinstance(item, TensorStorageMetadata)
    }
    torch.distributed.checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def test_it_is_a_checkpoint_like_any_other(written: Path, tmp_path: Path) -> None:
    assert checkpoint_commands.import_deepspeed([str(written / "bf16-3"), str(tmp_path / "out")]) == 0
    found = inspect_folder(tmp_path / "out")
    assert not found.damaged
    assert [(one.tag, one.verdict, one.latest) for one in found.checkpoints] == [("global_step3", "whole", True)]
    manifest = found.checkpoints[0].manifest
    assert manifest is not None
    about = (manifest.step, manifest.stage, manifest.world_size, manifest.precision, manifest.optimizer)
    assert about == (3, 3, 2, "bfloat16", "AdamW")
    assert manifest.versions["deepspeed"] == "0.19.8"
    assert [group["weight_decay"] for group in manifest.param_groups] == [0.1, 0.0]
    tensors = whole_tensors(tmp_path / "out" / "global_step3")
    assert torch.equal(tensors["model.head.weight"], tensors["model.embed.weight"])
    assert tensors["model.layers.1.weight"].dtype is torch.bfloat16  # frozen: there is no other copy
    assert tensors["model.embed.weight"].dtype is torch.float32
    assert "model.scratch" not in tensors


def import_alone(root: Path, out: Path) -> tuple[int, str]:
    """Import in a process that can import no DeepSpeed; return the exit code and what was printed as an error."""
    sys.modules["deepspeed"] = None  # type: ignore[assignment]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = checkpoint_commands.import_deepspeed([str(root), str(out)])
    assert not torch.distributed.is_initialized()
    return code, errors.getvalue()


def test_deepspeed_is_not_needed(written: Path, tmp_path: Path) -> None:
    assert run_ranks(1, import_alone, written / "fp16-3" / "global_step22", tmp_path / "out") == [(0, "")]
    assert (tmp_path / "out" / "latest").read_text() == "global_step22\n"


def test_force_adds_to_a_folder_and_replaces_a_tag(written: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert checkpoint_commands.import_deepspeed([str(written / "fp32-1"), out]) == 0
    assert checkpoint_commands.import_deepspeed([str(written / "fp16-2"), out]) == 2
    assert checkpoint_commands.import_deepspeed([str(written / "fp16-2"), out, "--force"]) == 0
    assert checkpoint_commands.import_deepspeed([str(written / "bf16-3"), out, "--force"]) == 0
    found = inspect_folder(out)
    assert not found.damaged
    assert {one.tag for one in found.checkpoints} == {"global_step22", "global_step3"}
    assert [one.tag for one in found.checkpoints if one.latest] == ["global_step3"]
    assert CheckpointFolder(out).manifest("global_step3").stage == 3


# -- where elements lie ---------------------------------------------------------------------------

SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)
GROUPS = st.lists(st.lists(SHAPES, min_size=1, max_size=4), min_size=1, max_size=3)


def write_run(path: Path, stage: int, world_size: int, groups: Any, lean: bool = True) -> dict[str, torch.Tensor]:
    """A checkpoint as DeepSpeed lays it out; gives each parameter's weights. Its moments are these and 0.5, 0.25."""
    path.mkdir(parents=True)
    weights: dict[str, torch.Tensor] = {}
    shapes: list[dict[str, Any]] = []
    rows: list[list[torch.Tensor]] = []  # of each group, of each rank
    paddings: list[list[int]] = []
    for g, group in enumerate(groups):
        named = {f"p{g}.{i}": torch.randn(shape) for i, shape in enumerate(group)}
        weights |= named
        shapes.append({name: tensor.shape for name, tensor in named.items()})
        flats = [tensor.flatten() for tensor in named.values()]
        if stage == 3:
            chunks = [_padded(flat, world_size).chunk(world_size) for flat in flats]
            rows.append([torch.cat(parts) for parts in zip(*chunks, strict=True)])
            paddings.append([0] * world_size)
        else:
            whole = torch.cat(flats)
            rows.append(list(_padded(whole, 2 * world_size).chunk(world_size)))
            size = rows[-1][0].numel()
            paddings.append([size - min(max(whole.numel() - rank * size, 0), size) for rank in range(world_size)])
    for rank in range(world_size):
        mine = [row[rank] for row in rows]
        kept = {i: {"step": torch.tensor(7.0), "exp_avg": v + 0.5, "exp_avg_sq": v + 0.25} for i, v in enumerate(mine)}
        base = {"state": kept, "param_groups": [{"lr": 0.1, "params": [i]} for i in range(len(mine))]}
        state: dict[str, Any] = {"zero_stage": stage, "ds_version": "test"}
        if stage == 3:
            state |= {"partition_count": world_size, "fp32_flat_groups": mine, "optimizer_state_dict": base}
        else:
            ends = [v.numel() - lost[rank] if lean else v.numel() for v, lost in zip(mine, paddings, strict=True)]
            state |= {
                "partition_count": [world_size] * len(mine),
                "single_partition_of_fp32_groups": [v[:end] for v, end in zip(mine, ends, strict=True)],
                "group_paddings": [lost[rank] for lost in paddings],
                "base_optimizer_state": base,
            }
        torch.save({"optimizer_state_dict": state}, path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model = {"module": {}, "buffer_names": [], "param_shapes": shapes, "shared_params": {}, "global_steps": 7}
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(model, path / name)
    return weights


def _padded(flat: torch.Tensor, multiple: int) -> torch.Tensor:
    return F.pad(flat, (0, -flat.numel() % multiple))


@given(groups=GROUPS, stage=st.sampled_from([1, 2, 3]), world_size=st.integers(1, 5), lean=st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_element_of_any_model_at_any_number_of_ranks(
    groups: list[list[tuple[int, ...]]], stage: int, world_size: int, lean: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        weights = write_run(Path(folder) / "ds" / "a", stage, world_size, groups, lean)
        done = checkpoint_import.import_checkpoint(Path(folder) / "ds" / "a", Path(folder) / "out")
        found = whole_tensors(done.path)
        assert len(found) == 4 * len(weights)
        for name, value in weights.items():
            assert torch.equal(found[f"model.{name}"], value), name
            assert torch.equal(found[f"optimizer.state.{name}.exp_avg"], value + 0.5), name
            assert torch.equal(found[f"optimizer.state.{name}.exp_avg_sq"], value + 0.25), name
            assert found[f"optimizer.state.{name}.step"] == 7, name


def test_large_tensors_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converted_state, "PIECE", 64)
    weights = write_run(tmp_path / "ds", 3, 3, [[(7, 5), (50,), (2, 30), ()]])
    done = checkpoint_import.import_checkpoint(tmp_path / "ds", tmp_path / "out")
    stored = read_metadata(done.path).tensors
    assert [len(stored[f"model.p0.{i}"].pieces) for i in range(4)] == [7, 5, 7, 1]
    found = whole_tensors(done.path)
    for name, value in weights.items():
        assert torch.equal(found[f"model.{name}"], value), name


def test_a_compiled_model_s_names_are_the_plain_ones(tmp_path: Path) -> None:
    write_run(tmp_path / "ds", 2, 2, [[(2,), (3,)]])
    rewrite(tmp_path / "ds" / STATES, lambda t: t.update(param_shapes=[{"_orig_mod.a": (2,), "b._orig_mod.c": (3,)}]))
    done = checkpoint_import.import_checkpoint(tmp_path / "ds", tmp_path / "out")
    assert [name for name in whole_tensors(done.path) if name.startswith("model.")] == ["model.a", "model.b.c"]
    assert done.manifest.param_groups[0]["params"] == ["a", "b.c"]


# -- bad input ------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tree = torch.load(path)
    change(tree)
    torch.save(tree, path)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


RANK_0, RANK_1 = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
STATES = "mp_rank_00_model_states.pt"
DAMAGE: dict[str, tuple[int, Callable[[Path], Any], str]] = {
    "rank 1 missing": (1, lambda p: (p / RANK_1).unlink(), f"is of 2 ranks and lacks {RANK_1}"),
    "rank 0 missing": (1, lambda p: (p / RANK_0).unlink(), f"is of 2 ranks and lacks {RANK_0}"),
    "model missing": (1, lambda p: (p / STATES).unlink(), f"lacks the model's states, {STATES}"),
    "rank 1's model missing": (
        3,
        lambda p: (p / f"zero_pp_rank_1_{STATES}").unlink(),
        f"is of 2 ranks and lacks zero_pp_rank_1_{STATES}",
    ),
    "no optimizer": (1, lambda p: [file.unlink() for file in p.glob("*optim*")], "has no *_optim_states.pt files"),
    "a third rank": (
        2,
        lambda p: shutil.copy(p / RANK_1, p / "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        "zero_pp_rank_2_mp_rank_00_optim_states.pt of another run",
    ),
    "two of a rank": (2, lambda p: shutil.copy(p / RANK_1, p / f"bf16_{RANK_1}"), "of two runs"),
    "optimizer cut short": (1, lambda p: cut_short(p / RANK_1), f"{RANK_1} cannot be read, or is damaged"),
    "model cut short": (
        3,
        lambda p: cut_short(p / f"zero_pp_rank_0_{STATES}"),
        f"{STATES} cannot be read, or is damaged",
    ),
    "empty file": (1, lambda p: os.truncate(p / RANK_0, 0), f"{RANK_0} cannot be read, or is damaged"),
    "no checkpoint": (1, lambda p: (p / RANK_0).write_bytes(b"hello"), f"{RANK_0} cannot be read, or is damaged"),
    "tensor parallel": (
        1,
        lambda p: shutil.copy(p / STATES, p / "mp_rank_01_model_states.pt"),
        "lacks zero_pp_rank_0_mp_rank_01_optim_states.pt: copy all files into it",
    ),
    "pipeline": (1, lambda p: (p / "layer_00-model_states.pt").touch(), "a pipeline-parallel model"),
    "experts": (1, lambda p: (p / f"layer_0_expert_1_{STATES}").touch(), "a mixture of experts"),
    "NVMe": (3, lambda p: (p / "offloaded_tensors").mkdir(), "optimizer state was on NVMe"),
    "universal": (
        1,
        lambda p: ([file.unlink() for file in p.glob("*.pt")], (p / "zero").mkdir()),
        "is a universal checkpoint",
    ),
    "elastic": (
        1,
        lambda p: rewrite(p / RANK_0, lambda t: t["optimizer_state_dict"].update(base_optimizer_state=[{}])),
        "elastic_checkpoint",
    ),
    "MiCS": (
        3,
        lambda p: rewrite(
            p / f"zero_pp_rank_0_{STATES}", lambda t: t.update(ds_config={"zero_optimization": {"mics_shard_size": 2}})
        ),
        "partitioned by MiCS",
    ),
    "stage 0": (1, lambda p: rewrite(p / STATES, lambda t: t.update(param_shapes=None)), "of ZeRO stage 0"),
    "another run's rank": (
        1,
        lambda p: rewrite(p / RANK_1, lambda t: t["optimizer_state_dict"].update(zero_stage=2)),
        "holds files of several runs",
    ),
    "vectors cut short": (
        3,
        lambda p: rewrite(p / RANK_0, lambda t: t["optimizer_state_dict"]["fp32_flat_groups"][0].resize_(3)),
        "lacks part of p0.1: vector 0 of rank 0 has 3 elements and 4 are needed",
    ),
    "another state": (
        1,
        lambda p: rewrite(
            p / RANK_1,
            lambda t: t["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(factor=torch.ones(2)),
        ),
        "holds optimizer state 'factor' that is not of each element",
    ),
    "state of one rank alone": (
        3,
        lambda p: rewrite(
            p / RANK_1, lambda t: t["optimizer_state_dict"]["optimizer_state_dict"]["state"][0].pop("exp_avg_sq")
        ),
        "lacks optimizer state of part of p0.0",
    ),
    "other keys": (
        2,
        lambda p: rewrite(p / RANK_0, lambda t: t["optimizer_state_dict"].pop("partition_count")),
        "is not what DeepSpeed writes at ZeRO stages 1 to 3: KeyError: 'partition_count'",
    ),
}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command says where it ends with 2."""
    assert checkpoint_commands.import_deepspeed([str(argument) for argument in arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("zero-import: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("what", DAMAGE)
def test_what_cannot_be_imported(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage, damage, message = DAMAGE[what]
    write_run(tmp_path / "ds" / "a", stage, 2, [[(2, 2), (3,)], [(5,)]])
    damage(tmp_path / "ds" / "a")
    assert message in refusal(capsys, tmp_path / "ds", tmp_path / "out", "--tag", "a")
    assert [path.name for path in tmp_path.iterdir()] == ["ds"]


def test_where_there_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "ds", tmp_path / "out"
    assert "does not exist" in refusal(capsys, run, out)
    run.mkdir()
    assert "holds no DeepSpeed checkpoint" in refusal(capsys, run, out)
    (tmp_path / "file").touch()
    assert "is a file" in refusal(capsys, tmp_path / "file", out)
    for tag in ("step9", "step10"):
        write_run(run / tag, 1, 1, [[(2,)]])
    assert "choose with --tag, of step9, step10" in refusal(capsys, run, out)
    assert "checkpoint 'step3' in" in refusal(capsys, run, out, "--tag", "step3")
    assert "there are: step9, step10" in refusal(capsys, run, out, "--tag", "step3")
    (run / "latest").write_text("step11")
    assert "checkpoint 'step11'" in refusal(capsys, run, out)
    assert "Usage: zero-import DEEPSPEED_DIR OUT" in refusal(capsys, run)
    assert not out.exists()
    assert checkpoint_commands.import_deepspeed([str(run), str(out), "--tag", "step9"]) == 0
    capsys.readouterr()
    assert "checkpoints of zeroengine already" in refusal(capsys, out, tmp_path / "other")


def test_where_it_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "ds", tmp_path / "out"
    write_run(run / "a", 1, 1, [[(2,)]])
    (run / "latest").write_text("a")
    out.mkdir()
    (out / "mine").touch()
    assert "is there already" in refusal(capsys, run, out)
    assert "one in the other" in refusal(capsys, run, run / "a" / "out")
    assert "one in the other" in refusal(capsys, run, tmp_path, "--force")
    assert "is a file" in refusal(capsys, run, out / "mine")
    write_run(out / "b", 1, 1, [[(2,)]])
    assert "holds checkpoints of DeepSpeed" in refusal(capsys, run, out, "--force")
    shutil.rmtree(out / "b")
    (out / "a").mkdir()
    assert "no checkpoint of zeroengine" in refusal(capsys, run, out, "--force")
    fresh = tmp_path / "fresh"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
        assert "disk of" in refusal(capsys, run, fresh)
    with monkeypatch.context() as patch:
        patch.setattr(dcp_save, "create", _full)
        assert "was not written: the disk is full" in refusal(capsys, run, fresh)
    assert not fresh.exists()
    assert checkpoint_commands.import_deepspeed([str(run), str(fresh)]) == 0


def _full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# -- pickles --------------------------------------------------------------------------------------


class Malicious:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("function", "name"), [(os.system, "posix.system"), (eval, "builtins.eval"), (getattr, "builtins.getattr")]
)
def test_a_pickle_that_runs_code_is_refused(
    function: Any, name: str, zipped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds"
    write_run(path, 2, 1, [[(2,)]])
    tree = {"module": {}, "epoch": Malicious(function, f"touch {tmp_path}/ran")}
    torch.save(tree, path / STATES, _use_new_zipfile_serialization=zipped)
    assert f"{STATES}: it holds {name}, which could run code: it is refused" in refusal(capsys, path, tmp_path / "out")
    assert {entry.name for entry in tmp_path.iterdir()} == {"ds"}


def test_what_torch_would_run_or_unpack_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds"
    write_run(path, 2, 1, [[(2,)]])
    with zipfile.ZipFile(path / STATES, "a") as archive:
        archive.writestr("mp_rank_00_model_states/constants.pkl", b"")
    assert "TorchScript" in refusal(capsys, path, tmp_path / "out")
    with tarfile.open(path / STATES, "w") as archive:
        archive.add(path / RANK_0, "pickle")
    assert "tar archive" in refusal(capsys, path, tmp_path / "out")


def test_an_archive_that_is_more_than_it_looks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds"
    write_run(path, 2, 1, [[(2,)]])
    with zipfile.ZipFile(path / STATES) as before, zipfile.ZipFile(tmp_path / "z", "w", zipfile.ZIP_DEFLATED) as after:
        for info in before.infolist():
            after.writestr(info.filename, before.read(info))
        after.writestr("mp_rank_00_model_states/data/99", b"\0" * (1 << 26))
    (path / STATES).write_bytes((tmp_path / "z").read_bytes())
    assert "it is a compressed archive, which torch.save does not write" in refusal(capsys, path, tmp_path / "out")


def flips_of(path: Path, count: int, seed: int) -> Iterator[tuple[int, int]]:
    chance = random.Random(seed)
    return ((chance.randrange(path.stat().st_size), 1 << chance.randrange(8)) for _ in range(count))


def test_a_flipped_bit_in_a_deepspeed_file_is_refused_or_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds"
    write_run(path, 2, 1, [[(40, 5)]])
    expected = whole_tensors(checkpoint_import.import_checkpoint(path, tmp_path / "expected").path)
    refusals = 0
    for file in (path / STATES, path / RANK_0):
        whole = file.read_bytes()
        for at, bit in flips_of(file, 40, seed=0):
            content = bytearray(whole)
            content[at] ^= bit
            file.write_bytes(content)
            try:
                done = checkpoint_import.import_checkpoint(path, tmp_path / "out", force=True)
            except CheckpointError:
                refusals += 1
            else:
                found = whole_tensors(done.path)
                assert found.keys() == expected.keys()
                assert all(torch.equal(value, expected[name]) for name, value in found.items()), (file.name, at, bit)
        file.write_bytes(whole)
    assert refusals > 20, "the rest hit what separates the entries"


def test_classes_of_others_are_stood_in_for(tmp_path: Path) -> None:
    args = argparse.Namespace(lr=0.1, layers=[1, 2])
    tree = {"args": args, "rate": numpy.float64(0.5), "array": numpy.arange(3), "bytes": b"ab\xff", "set": {1}}
    for zipped in (True, False):
        torch.save(tree, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
        found = pickled_files.load_pickled_file(tmp_path / "a.pt")
        assert isinstance(found["args"], pickled_files.InertObject)
        assert found["args"].state == {"lr": 0.1, "layers": [1, 2]}
        assert isinstance(found["array"], pickled_files.InertObject)
        assert (found["rate"], found["bytes"], found["set"]) == (0.5, b"ab\xff", {1})


class ZeroStageEnum(int, enum.Enum):
    gradients = 2
    weights = 3


@pytest.mark.parametrize("call", [(getattr, ZeroStageEnum, "weights"), (ZeroStageEnum, 3)], ids=["name", "value"])
def test_a_stage_is_read_whichever_way_its_python_pickled_enums(
    call: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write_run(tmp_path / "ds", 3, 1, [[(2,)]])
    theirs = ModuleType("deepspeed")
    theirs.ZeroStageEnum = ZeroStageEnum  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(ZeroStageEnum, "__module__", theirs.__name__)
        patch.setitem(sys.modules, theirs.__name__, theirs)
        rewrite(tmp_path / "ds" / RANK_0, lambda t: t["optimizer_state_dict"].update(zero_stage=Malicious(*call)))
    assert pickled_files.load_pickled_file(tmp_path / "ds" / RANK_0)["optimizer_state_dict"]["zero_stage"].args == (
        call[-1],
    )
    done = checkpoint_import.import_checkpoint(tmp_path / "ds", tmp_path / "out")
    assert torch.equal(whole_tensors(done.path)["model.p0.0"], weights["p0.0"])


def test_client_state_that_has_no_place_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "ds", 1, 1, [[(2,)]])
    rewrite(tmp_path / "ds" / STATES, lambda t: t.update(epoch=3, lr_scheduler={"last_epoch": 7}))
    tree = torch.load(tmp_path / "ds" / STATES) | {"args": argparse.Namespace(a=1)}
    torch.save(tree, tmp_path / "ds" / STATES)
    assert checkpoint_commands.import_deepspeed([str(tmp_path / "ds"), str(tmp_path / "out")]) == 0
    assert "left out: client state 'args'" in capsys.readouterr().err
    path = tmp_path / "out" / "ds"
    objects = load_files(path, read_metadata(path), {}, ["zeroengine.client_state", "zeroengine.lr_scheduler"], print)
    assert objects == {"zeroengine.client_state": {"epoch": 3}, "zeroengine.lr_scheduler": {"last_epoch": 7}}
