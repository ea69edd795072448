"""Weights out of checkpoints and live engines, as Hugging Face loads them."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zeroengine
from tests.checkpoint.dying import Died, dying_after
from tests.checkpoint.models import engine_at
from tests.checkpoint.test_interop import theirs
from tests.distributed.models import batch
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.emulated import cpu_alone
from zeroengine.checkpoint.dcp_metadata import StoredPiece, read_metadata
from zeroengine.cli import checkpoint_commands
from zeroengine.errors import CheckpointError
from zeroengine.weights import huggingface_format
from zeroengine.weights.export import export
from zeroengine.weights.output_folder import OutputFolder

Case = tuple[int, int, str]  # number of ranks, stage and precision
CASES: list[Case] = [(world, stage, "fp32") for world in (1, 2, 3) for stage in (0, 1, 2, 3)]
CASES += [(2, 1, "bf16"), (2, 3, "bf16")]
SHORT: list[Case] = [(2, 3, "fp32"), (3, 1, "fp32"), (2, 3, "bf16")]


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """What Hugging Face would find in ``folder``."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    found = json.loads(index.read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(found.values())}
    return {name: files[file][name] for name, file in found.items()}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def train_and_save(folder: Path, stage: int, precision: str) -> None:
    engine = engine_at(stage, bf16={"enabled": precision == "bf16"})
    for step in range(2):
        engine.backward(engine(*batch(step, engine.rank)))
        engine.step()
    engine.save_checkpoint(folder / "runs")
    engine.save_weights(folder / "live", shard_size="20KB")
    engine.save_weights(folder / "live16", "bf16")
    masters = {name: zeroengine.full_master(param) for name, param in engine.module.named_parameters()}
    state = engine.full_state_dict()
    if engine.rank == 0:
        torch.save((state, masters), folder / "state.pt")
    engine.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """Train and save a case at its first use, and return its folder; not to be changed."""

    @functools.cache
    def save(case: Case) -> Path:
        folder = tmp_path_factory.mktemp("runs")
        run_ranks(case[0], train_and_save, folder, *case[1:])
        return folder

    return save


@pytest.fixture(scope="module")
def run(saved: Callable[[Case], Path]) -> Path:
    """One folder of checkpoints; not to be changed."""
    return saved((2, 3, "fp32")) / "runs"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in SHORT else pytest.mark.slow, id="{} ranks, stage {}, {}".format(*case))
        for case in CASES
    ],
)
def test_an_export_is_the_whole_state_from_any_stage_and_number_of_ranks(
    case: Case, saved: Callable[[Case], Path], tmp_path: Path
) -> None:
    folder = saved(case)
    state, masters = torch.load(folder / "state.pt")
    export(folder / "runs", tmp_path / "out", shard_size="20KB")
    found = whole(tmp_path / "out")
    assert found.keys() == state.keys() - {"head.weight"}, "tied to tok.weight; frozen ones and buffers are there"
    for name, value in found.items():
        expected = masters.get(name, state[name])
        assert torch.equal(value, expected) and value.shape == expected.shape, name
    assert files_of(tmp_path / "out") == files_of(folder / "live"), "as from the live engine, byte for byte"
    export(folder / "runs", tmp_path / "16", dtype="bf16")
    assert files_of(tmp_path / "16") == files_of(folder / "live16")
    for name, value in whole(tmp_path / "16").items():
        assert torch.equal(value, state[name].bfloat16()), name


def test_files_hold_at_most_the_shard_size_or_one_larger_tensor(run: Path, tmp_path: Path) -> None:
    done = export(run, tmp_path / "out", shard_size="8KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["tied"] == '{"head.weight": "tok.weight"}'
    assert done.files == len(set(index["weight_map"].values())) > 3
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert names == [f"model-{i:05}-of-{done.files:05}.safetensors" for i in range(1, done.files + 1)]
    total = 0
    for name in names:
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            assert file.metadata() == {"format": "pt", "tied": '{"head.weight": "tok.weight"}'}
            tensors = [file.get_tensor(key) for key in file.keys()]
            assert {key for key, where in index["weight_map"].items() if where == name} == set(file.keys())
        size = sum(tensor.nbytes for tensor in tensors)
        assert size <= 8000 or len(tensors) == 1
        total += size
    assert total == index["metadata"]["total_size"]
    assert done.tensors == len(index["weight_map"]) and done.tied == 1
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_only_floating_tensors_are_cast(tmp_path: Path) -> None:
    values = {"w": torch.randn(5), "d": torch.randn(3).double(), "n": torch.arange(4), "flag": torch.tensor(True)}
    dcp.save({"model": values | {"empty": torch.empty(0, 3), "t": torch.randn(2, 3).t()}}, checkpoint_id=tmp_path / "a")
    export(tmp_path / "a", tmp_path / "out")
    found = whole(tmp_path / "out")
    assert all(torch.equal(found[name], value) and found[name].dtype is value.dtype for name, value in values.items())
    export(tmp_path / "a", tmp_path / "half", dtype=torch.float16)
    dtypes = {name: value.dtype for name, value in whole(tmp_path / "half").items()}
    half = torch.float16
    assert dtypes == {"w": half, "d": half, "n": torch.int64, "flag": torch.bool, "empty": half, "t": half}


# -- Hugging Face ---------------------------------------------------------------------------------


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=61, n_embd=24, n_layer=3, n_head=4))


IDS = torch.arange(20).view(2, 10)


def from_transformers(root: Path) -> None:
    start()
    for factory in (llama, gpt2):
        torch.manual_seed(3)
        settings = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        engine = zeroengine.initialize(factory(), torch.optim.AdamW, settings)
        ids = IDS.to(engine.device)
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
        engine.save_checkpoint(root / factory.__name__ / "runs")
        engine.save_weights(root / factory.__name__ / "live", shard_size="50KB")
        engine.eval()
        with torch.no_grad():
            logits = engine(IDS.to(engine.device)).logits.cpu()
        if engine.rank == 0:
            torch.save(logits, root / factory.__name__ / "logits.pt")
        engine.close()


def test_from_pretrained_computes_what_the_engine_did(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_ranks(2, from_transformers, tmp_path, timeout=180)
    for factory in (llama, gpt2):
        folder = tmp_path / factory.__name__
        export(folder / "runs", folder / "one")
        export(folder / "runs", folder / "many", shard_size="50KB")
        expected = torch.load(folder / "logits.pt")
        for out in ("one", "many", "live"):
            config = factory().config
            config.save_pretrained(folder / out)
            model, report = type(factory()).from_pretrained(folder / out, output_loading_info=True)
            assert not report["missing_keys"] and not report["unexpected_keys"]
            with torch.no_grad():
                torch.testing.assert_close(model.eval()(IDS).logits, expected, rtol=1e-5, atol=1e-6)


# -- checkpoints of plain PyTorch -----------------------------------------------------------------


@cpu_alone("FSDP2 over Gloo")
@pytest.mark.parametrize("nested", [pytest.param(False, marks=pytest.mark.slow), True])
def test_fsdp2s_checkpoints_are_exported(nested: bool, tmp_path: Path) -> None:
    expected, _ = run_ranks(2, theirs, tmp_path / "runs", nested)[0]
    export(tmp_path / "runs", tmp_path / "out")
    found = whole(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def columns(root: Path) -> None:
    start()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = torch.arange(4 * 6 * 5.0).view(4, 6, 5)
    dcp.save(
        {"model": {f"w{dim}": distribute_tensor(whole, mesh, [Shard(dim)]) for dim in range(3)}}, checkpoint_id=root
    )


def test_tensors_that_are_cut_along_any_dimension_are_put_together(tmp_path: Path) -> None:
    run_ranks(2, columns, tmp_path / "runs")
    export(tmp_path / "runs", tmp_path / "out")
    found = whole(tmp_path / "out")
    assert all(torch.equal(found[f"w{dim}"], torch.arange(4 * 6 * 5.0).view(4, 6, 5)) for dim in range(3))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("tree", "prefix", "expected"),
    [
        ({"lm.weight": 1, "model.x": 1}, None, {"lm.weight", "model.x"}),
        ({"model": {"a.b": 1, "c": 1}}, None, {"a.b", "c"}),
        ({"net": {"a": 1, "state.b": 1}, "other": {"c": 1}}, "net.", {"a", "state.b"}),
        (
            {"weights": {"a": 1, "b": 1, "c": 1}, "opt": {"state": {"a": {"m": 1}, "b": {"m": 1}}}},
            None,
            {"a", "b", "c"},
        ),
    ],
)
def test_names_lose_the_prefix_of_whoever_saved_them(
    tree: dict[str, Any], prefix: str | None, expected: set[str], tmp_path: Path
) -> None:
    def filled(tree: Any) -> Any:
        return {key: filled(value) for key, value in tree.items()} if isinstance(tree, dict) else torch.randn(3)

    dcp.save(filled(tree), checkpoint_id=tmp_path / "a")
    export(tmp_path / "a", tmp_path / "out", prefix=prefix)
    assert set(whole(tmp_path / "out")) == expected


# -- damage ---------------------------------------------------------------------------------------


def damaged(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "runs")
    return tmp_path / "runs" / "step-2"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def items(folder: Path, prefix: str) -> list[StoredPiece]:
    return [
        piece
        for name, stored in read_metadata(folder).tensors.items()
        if name.startswith(prefix)
        for piece in stored.pieces
    ]


@pytest.mark.parametrize("where", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_left(how: str, where: str, run: Path, tmp_path: Path) -> None:
    file = damaged(run, tmp_path) / where
    if how == "cut":
        os.truncate(file, file.stat().st_size - 100)
        with pytest.raises(CheckpointError, match=rf"{where} has .* bytes, not"):
            export(tmp_path / "runs", tmp_path / "out")
    else:
        file.unlink()
        with pytest.raises(CheckpointError, match=where):
            export(tmp_path / "runs", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_bit_that_flipped_is_noticed_wherever_it_matters(run: Path, tmp_path: Path) -> None:
    folder = damaged(run, tmp_path)
    export(run, tmp_path / "expected")
    expected, refused = files_of(tmp_path / "expected"), 0
    piece = max(items(folder, "model.blocks.2.up.bias"), key=lambda piece: piece.length)
    places = [(piece.file, piece.start + at) for at in range(0, piece.length, 33)]
    for piece in items(folder, "model."):
        places.append((piece.file, piece.start + piece.length // 2))
    for name, at in places:
        flip(folder / name, at)
        try:
            export(tmp_path / "runs", tmp_path / "out", force=True)
            assert files_of(tmp_path / "out") == expected, (name, at)  # it was padding
        except CheckpointError as error:
            assert "has been changed: " in str(error)
            refused += 1
        flip(folder / name, at)
    assert refused > len(places) // 4
    flip(folder / ".metadata", 300)
    with pytest.raises(CheckpointError, match=r".metadata has been changed: its checksum differs"):
        export(tmp_path / "runs", tmp_path / "new")


def test_optimizer_state_need_not_be_whole_and_checks_can_be_left_out(run: Path, tmp_path: Path) -> None:
    folder = damaged(run, tmp_path)
    export(run, tmp_path / "expected")
    state, weight = items(folder, "optimizer.")[-1], items(folder, "model.tok.weight")[0]
    flip(folder / state.file, state.start + state.length // 2)
    export(tmp_path / "runs", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "expected")
    flip(folder / weight.file, weight.start + weight.length // 2)
    with pytest.raises(CheckpointError, match=r"has been changed: the checksum of model.tok.weight differs"):
        export(tmp_path / "runs", tmp_path / "again")
    export(tmp_path / "runs", tmp_path / "again", verify=False)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("crc", [True, False])
def test_plain_checkpoints_are_checked_by_what_torch_keeps_of_them(crc: bool, tmp_path: Path) -> None:
    values = {f"w{i}": torch.randn(100) for i in range(3)}
    with set_crc32(crc):
        dcp.save({"model": values}, checkpoint_id=tmp_path / "a")
    export(tmp_path / "a", tmp_path / "out")
    assert all(torch.equal(value, values[name]) for name, value in whole(tmp_path / "out").items())
    piece = items(tmp_path / "a", "model.w1")[0]
    flip(tmp_path / "a" / piece.file, piece.start + piece.length // 2)
    if crc:
        with pytest.raises(CheckpointError, match=r"has been changed: the checksum of model.w1 differs"):
            export(tmp_path / "a", tmp_path / "other")


@contextlib.contextmanager
def set_crc32(on: bool) -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(on)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def weights_alone(root: Path, crc: bool) -> None:
    with set_crc32(crc):
        start()
        model, settings = nn.Linear(300, 300), {"zero_optimization": {"stage": 1}}
        engine = zeroengine.initialize(model, lambda params: torch.optim.SGD(params, lr=0.1), settings)
        engine.save_checkpoint(root)


@pytest.mark.parametrize("crc", [True, False])
def test_a_changed_weight_is_noticed_whether_or_not_torch_writes_checksums(crc: bool, tmp_path: Path) -> None:
    run_ranks(2, weights_alone, tmp_path / "runs", crc)
    export(tmp_path / "runs", tmp_path / "out")
    piece = items(tmp_path / "runs" / "step-0", "model.weight")[-1]
    flip(tmp_path / "runs" / "step-0" / piece.file, piece.start + piece.length // 2)
    message = rf"{piece.file} has been changed: the checksum of model.weight differs"
    with pytest.raises(CheckpointError, match=message):
        export(tmp_path / "runs", tmp_path / "other")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_that_lies_is_refused(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.randn(4, 4)}}, checkpoint_id=tmp_path / "a")
    reader = dcp.FileSystemReader(tmp_path / "a")

    def refused(change: Any, message: str) -> None:
        metadata: Metadata = reader.read_metadata()
        change(metadata)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        writer = dcp.FileSystemWriter(tmp_path / "b")
        storage = metadata.storage_data
        writer.finish(metadata, [[type("", (), {"index": index, "storage_data": storage[index]}) for index in storage]])
        with pytest.raises(CheckpointError, match=message):
            export(tmp_path / "b", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        shutil.rmtree(tmp_path / "b")

    def move(metadata: Metadata) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../a/__0_0.distcp"

    def grow(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.w"].size = torch.Size((8, 4))

    def twist(metadata: Metadata) -> None:
        tensor = metadata.state_dict_metadata["model.w"]
        assert isinstance(tensor, TensorStorageMetadata)
        tensor.size = torch.Size((2, 8))
        tensor.chunks[:] = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 8)))]

    def empty(metadata: Metadata) -> None:
        next(iter(metadata.storage_data.values())).length = 0

    def overlap(metadata: Metadata) -> None:
        tensor = metadata.state_dict_metadata["model.w"]
        assert isinstance(tensor, TensorStorageMetadata)
        half = torch.Size((2, 4))
        places = [torch.Size((0, 0)), torch.Size((1, 0))]
        tensor.chunks[:] = [ChunkStorageMetadata(place, half) for place in places]
        place = next(iter(metadata.storage_data.values()))
        metadata.storage_data.update({MetadataIndex("model.w", offsets): place for offsets in places})

    refused(empty, "part of model.w is said to have 0 bytes")
    refused(overlap, "part of model.w is missing: the checkpoint is incomplete")
    refused(move, "outside of the checkpoint")
    refused(grow, "part of model.w is missing: the checkpoint is incomplete")
    refused(twist, "does not hold what it is said to of model.w")


def two_saves(root: Path) -> None:
    start()
    model = nn.Linear(300, 300)
    engine = zeroengine.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.1), {"steps_per_print": None})
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 300)).square().mean())
        engine.step()
        engine.save_checkpoint(root)


def test_a_file_that_another_checkpoint_has_under_the_same_name_is_refused(tmp_path: Path) -> None:
    run_ranks(2, two_saves, tmp_path / "runs")
    for name in ("__0_0.distcp", "__1_0.distcp"):
        shutil.copy(tmp_path / "runs" / "step-1" / name, tmp_path / "runs" / "step-2" / name)
        with pytest.raises(CheckpointError, match=r"has been changed: its checksum differs"):
            export(tmp_path / "runs", tmp_path / "out", "step-2")
    export(tmp_path / "runs", tmp_path / "out", "step-1")


# -- whole or absent ------------------------------------------------------------------------------


def test_what_is_there_is_replaced_only_when_asked_and_other_files_stay(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    export(run, out, shard_size="8KB")
    (out / "config.json").write_text("{}")
    (out / "more").mkdir()
    with pytest.raises(CheckpointError, match=r"is there already: .* --force"):
        export(run, out)
    export(run, out, force=True)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "more"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    (tmp_path / "empty").mkdir()
    export(run, tmp_path / "empty")


def test_a_failed_export_leaves_what_was_there(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(run, tmp_path / "out", dtype="fp16")
    before = files_of(tmp_path / "out")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_format, "_write_all", full)
    for out in (tmp_path / "out", tmp_path / "new"):
        with pytest.raises(OSError, match="No space left"):
            export(run, out, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and files_of(tmp_path / "out") == before


def test_an_export_that_dies_between_any_two_operations_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes first, the next export finds the old weights or the new ones, and the other files."""
    for instant in range(30):
        out = tmp_path / str(instant) / "out"
        out.mkdir(parents=True)
        (out / "config.json").write_text("{}")
        (out / "model.safetensors").write_text("old")

        output, died = OutputFolder(out), False
        with dying_after(instant, monkeypatch):
            try:
                writing = output.begin(3)
                (writing / "model.safetensors").write_text("new")
                output.commit()
            except Died:
                died = True
        output._unlock()  # as the kernel does
        again = OutputFolder(out)
        again.begin(3)
        assert (out / "config.json").read_text() == "{}", instant
        assert (out / "model.safetensors").read_text() in ("old", "new"), instant
        again.abandon()
        assert [entry.name for entry in out.parent.iterdir()] == ["out"], instant
        if not died:
            assert instant > 4, "it died nowhere"
            return
    raise AssertionError("the export never got through")


def test_what_a_killed_export_left_is_cleared(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "expected")
    (tmp_path / ".out.writing").mkdir()
    (tmp_path / ".out.writing" / "model-00001-of-00009.safetensors").write_text("half")
    export(run, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "expected")
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "out").rename(tmp_path / ".out.replaced")  # killed between two renames
    export(run, tmp_path / "out")
    assert set(files_of(tmp_path / "out")) == {"config.json", "model.safetensors"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "out"]


def test_two_exports_into_one_folder_do_not_mix(run: Path, tmp_path: Path) -> None:
    other = OutputFolder(tmp_path / "out")
    other.begin(0)
    with pytest.raises(CheckpointError, match="another process is writing"):
        export(run, tmp_path / "out")
    other.abandon()
    export(run, tmp_path / "out")


def test_a_full_disk_is_noticed_before(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"the disk of .* is full: the weights take"):
        export(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# -- the command ----------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done, out = export(run, tmp_path / "same", dtype="bf16", shard_size="10KB"), str(tmp_path / "out")
    assert (
        checkpoint_commands.export([str(run), out, "--tag", "step-2", "--dtype", "bf16", "--shard-size", "10KB"]) == 0
    )
    size = f"{done.nbytes / 1024:.1f} KiB"
    expected = f"{out}: {done.tensors} tensors and 1 tied name of step-2 in {done.files} files, {size}\n"
    assert capsys.readouterr().out == expected
    assert checkpoint_commands.export([str(run / "step-2"), out, "--force", "--no-verify"]) == 0, (
        "one checkpoint's own folder"
    )
    assert f"{done.tensors} tensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/nowhere", "{tmp}/out"], "there is no folder {tmp}/nowhere"),
        (["{tmp}", "{tmp}/out"], "{tmp} holds no checkpoint"),
        (["{tmp}/file", "{tmp}/out"], "{tmp}/file is a file: checkpoints are kept in a folder"),
        (["{run}", "{tmp}/out", "--tag", "step-7"], "checkpoint 'step-7' in {run} does not exist; there are: step-2"),
        (["{run}", "{tmp}/out", "--tag", "a/b"], "a tag is a folder's name"),
        (["{run}", "{tmp}/file"], "{tmp}/file is a file: weights are written to a folder"),
        (["{run}", "{tmp}"], "{tmp} is there already: name another folder, or replace its weights with --force"),
        (["{run}", "{run}", "--force"], "{run} and the checkpoint {run}/step-2 are one in the other"),
        (["{run}", "{run}/step-2/out"], "{run}/step-2/out and the checkpoint {run}/step-2 are one in the other"),
        (["{run}", "{tmp}/out", "--dtype", "int8"], "dtype int8: write fp32, bf16, fp16, or leave it out"),
        (["{run}", "{tmp}/out", "--shard-size", "5 apples"], "shard size 5 apples: write a size such as 5GB"),
        (["{run}", "{tmp}/out", "--shard-size", "0"], "shard size 0: write a size such as 5GB"),
        (["{run}", "{tmp}/out", "--prefix", "net."], "holds no weights: no name in it begins with 'net.'"),
        (["{run}"], "the following arguments are required: OUT. Usage: zero-export DIR OUT"),
        (["{run}", "{tmp}/out", "--size", "5GB"], "unrecognized arguments: --size 5GB. Usage: zero-export DIR OUT"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(
    arguments: list[str], message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert checkpoint_commands.export([argument.format(tmp=tmp_path, run=run) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("zero-export: ") and message.format(tmp=tmp_path, run=run) in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow  # test_zero_launch starts a command of a checkout
def test_it_is_a_command_of_a_checkout(run: Path, tmp_path: Path) -> None:
    command = Path(__file__).resolve().parents[2] / "bin" / "zero-export"
    environment = os.environ | {"ZEROENGINE_PYTHON": sys.executable}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([command, run, tmp_path / "out"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and " tensors and 1 tied name of step-2 in 1 file" in done.stdout and done.stderr == ""


MEASURE = """
import sys
from zeroengine.weights.export import export
peak = lambda: next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
export(sys.argv[1], sys.argv[2], dtype="bf16", shard_size="50MB")
print(peak() - before)
"""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_memory_is_that_of_a_chunk_whatever_the_model(tmp_path: Path) -> None:
    piece = torch.randn(50 * 2**18).view(-1, 512)  # 50 MiB, saved over and over
    dcp.save({"model": {f"layers.{i}.weight": piece for i in range(5)}}, checkpoint_id=tmp_path / "runs")
    command = [sys.executable, "-c", MEASURE, tmp_path / "runs", tmp_path / "out"]
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": root})
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) > 125 * 2**20
    assert int(done.stdout) < 40 * 2**20, "of 250 MiB, less than one tensor"


# -- arithmetic -----------------------------------------------------------------------------------


@given(st.data())
def test_a_box_is_written_where_it_belongs(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True))
    whole = torch.arange(int(torch.Size(shape).numel())).view(shape)
    box = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].flatten().tolist()
    first = data.draw(st.integers(0, len(box) - 1))
    numel = data.draw(st.integers(0, len(box) - first))
    runs = list(huggingface_format.runs_of_box(shape, offsets, sizes, first, numel))
    assert [i for start, count in runs for i in range(start, start + count)] == box[first : first + numel]
    whole_rows = len(shape) < 2 or (sizes[1:] == shape[1:])
    assert len(runs) <= 1 or not whole_rows, "one run where rows are whole"
