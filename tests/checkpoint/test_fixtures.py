"""Checkpoints of earlier versions still load: those in ``fixtures/``, which no change writes anew."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.make_fixtures import CLIENT_STATE, FIXTURES, KINDS, OTHER_STAGE, Kind, Run
from tests.distributed.ranks import run_ranks


def load_all(root: Path) -> dict[str, list[str]]:
    """Load each at another stage, into an engine that has trained something else. Return the kinds in each archive."""
    loaded: dict[str, list[str]] = {}
    for path in sorted(FIXTURES.glob("*.json")):
        for name, saved in json.loads(path.read_text()).items():
            check_load(root / path.stem / name, KINDS[name], saved)
            loaded.setdefault(path.stem, []).append(name)
    return loaded


def check_load(folder: Path, kind: Kind, saved: dict[str, Any]) -> None:
    run = Run(kind, OTHER_STAGE[kind.stage], 7, "auto")
    run.train(1)
    client_state = kind.load(run.engine, folder)
    found = run.record()
    run.engine.close()
    if "rank" not in saved:  # not written by an engine
        assert found["state"] | saved["state"] == found["state"], folder
        return
    assert repr(client_state) == repr(CLIENT_STATE), folder
    saved["rank"] = saved["rank"][run.engine.rank]
    saved["losses"] = pytest.approx(saved["losses"], rel=kind.tolerance)
    assert found == saved, folder


def test_checkpoints_of_earlier_versions_load_at_another_stage(tmp_path: Path) -> None:
    for path in FIXTURES.glob("*.tar.xz"):
        with tarfile.open(path) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not every Python 3.11 has it
            archive.extractall(tmp_path / path.name.removesuffix(".tar.xz"))
    first, second = run_ranks(2, load_all, tmp_path)
    assert first == second
    assert set(KINDS) == {kind for kinds in first.values() for kind in kinds}
    assert len(first) == len(list(tmp_path.iterdir()))
