"""`zero-diff` of two checkpoints: the size of each difference, whatever the cut; and of a checkpoint and a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroengine
from tests.checkpoint.models import engine_at
from tests.distributed.models import batch
from tests.distributed.ranks import run_ranks
from tests.view.generated_digests import UNITS, write_digests
from tests.view.generated_runs import data_of
from zeroengine.checkpoint.dcp_save import save_files
from zeroengine.checkpoint.entries import StateEntry
from zeroengine.checkpoint.manifest import MANIFEST, read_manifest
from zeroengine.checkpoint.tensor_differences import TensorDifference, compare_checkpoints
from zeroengine.cli.zero_diff import main
from zeroengine.partition.boxes import pieces_of_run
from zeroengine.view.digest_table import KINDS

NAME = "model.blocks.0.up.weight"


def save(root: Path) -> None:
    engine = engine_at(3)
    engine.backward(engine(*batch(0, engine.rank)))
    engine.step()
    engine.save_checkpoint(root, "a")
    weight = engine.module.blocks[0].up.weight
    with zeroengine.gathered(weight), torch.no_grad():
        weight[1, 2] = torch.nextafter(weight[1, 2], torch.tensor(torch.inf))
    engine.save_checkpoint(root, "b")
    engine.close()
    engine = engine_at(1, seed=1)
    engine.load_checkpoint(root, "a")
    engine.save_checkpoint(root, "c")
    engine.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_ranks(2, save, root)
    return root


def compare(capsys: pytest.CaptureFixture[str], *arguments: Path | str) -> tuple[int, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, " ".join((out + err).split())


def test_one_element_that_differs_is_found_with_its_size(
    saved: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    code, text = compare(capsys, saved / "a", saved / "b", "--html", page)
    report = data_of(page.read_text())
    (row,) = report["tensors"]
    assert code == 1 and (row["name"], row["differing"], row["ulps"]) == (NAME, 1, 1)
    assert 0 < row["absolute"] < row["relative"] < 2**-22
    assert f"1 of {report['coverage'][0].split()[1]} tensors differ, in 1 element." in text and NAME in text


def test_one_checkpoint_saved_at_two_stages_is_equal(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = compare(capsys, saved / "a", saved / "c")
    assert code == 0 and "are equal. Compared:" in text and "zero_optimization.stage 3 1" in text


def write(path: Path, tensors: dict[str, torch.Tensor], cut: int) -> Path:
    """Save tensors without an engine, each in runs of at most `cut` elements."""
    path.mkdir()
    entries = {}
    for name, tensor in tensors.items():
        runs = enumerate(tensor.reshape(-1).split(cut))
        pieces = [piece for index, run in runs for piece in pieces_of_run(tuple(tensor.shape), index * cut, run)]
        entries[name] = StateEntry(tuple(tensor.shape), tensor.dtype, pieces)
    save_files(path, entries, {}, {}, None, lambda n: None)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_pieces_of_any_cut_give_the_differences_of_whole_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    a = torch.randn(7, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    b = a.clone()
    b[0, 0], b[3, 4], b[6, 10] = a[0, 0] * 2, torch.nextafter(a[3, 4], torch.tensor(9, dtype=dtype)), -a[6, 10]
    paths = [write(tmp_path / "a", {"x": a}, 13), write(tmp_path / "b", {"x": b}, 10)]
    (found,), sentences = compare_checkpoints(paths)
    gaps = (a.double() - b.double()).abs()
    relative = (gaps / torch.maximum(a.abs(), b.abs()).double()).max()
    assert not sentences and (found.elements, found.differing) == (77, 3)
    assert (found.absolute, found.relative) == (float(gaps.max()), float(relative))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (0.0, -0.0, (1, 0.0, 0.0, 0)),
        (1.0, math.nan, (1, math.inf, math.inf, None)),
        (math.nan, math.nan, (0, 0.0, 0.0, 0)),
        (math.inf, -math.inf, (1, math.inf, math.inf, None)),
        (2**-149, -(2**-149), (1, 2**-148, 2.0, 2)),
        (2.0, 1.0, (1, 1.0, 0.5, 1 << 23)),
    ],
)
def test_odd_values_have_a_difference(a: float, b: float, expected: tuple[int, float, float, int | None]) -> None:
    found = TensorDifference("x")
    found.add(torch.tensor([a]), torch.tensor([b]))
    ulps = found.ulps if expected[3] is not None else None
    assert (found.differing, found.absolute, found.relative, ulps) == expected


def test_tensors_of_one_checkpoint_alone_and_of_other_shapes_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ones = torch.ones(4)
    a = write(tmp_path / "a", {"x": ones, "y": ones, "z": ones, "codes": ones.to(torch.uint8)}, 4)
    b = write(tmp_path / "b", {"x": ones.bfloat16(), "y": ones.view(2, 2), "codes": ones.to(torch.uint8) * 200}, 4)
    code, text = compare(capsys, a, b)
    assert code == 1 and f"Only {a} has z. y has the shapes (4,) and (2, 2)." in text
    assert "1 of 2 tensors differ, in 4 elements. The largest difference is 199, in codes" in text


def test_a_run_is_compared_with_the_digests_of_a_checkpoint(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is one of a real engine, with the digests of a generated run in its manifest."""
    run = write_digests(tmp_path / "run", steps=3)
    code, text = compare(capsys, run, saved / "a")
    assert code == 2 and f"{saved / 'a'} has no digests" in text and '"digests": {"every": 100}' in text
    row = json.loads((run / "digests.jsonl").read_text().splitlines()[1])
    manifest = read_manifest(saved / "a" / MANIFEST)
    folder = tmp_path / "saved" / "a"
    folder.mkdir(parents=True)

    def compare_with(**changes: Any) -> tuple[int, str]:
        digests = {"units": UNITS, **{kind: row[kind] for kind in KINDS if kind != "gradients"}} | changes
        (folder / MANIFEST).write_text(manifest.model_copy(update={"digests": digests}).to_json())
        return compare(capsys, run, folder)

    code, text = compare_with()
    assert code == 0 and "Compared: moments, parameters of 10 units at step 1." in text
    code, text = compare_with(moments="1" * 16 + row["moments"][16:])
    assert code == 1 and f"{run} and {folder} differ first at step 1, in the moments of embedding." in text
