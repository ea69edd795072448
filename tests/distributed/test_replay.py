"""A step that is taken again has the digests that it had, from what the run has kept."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from zeroengine.engine.replay import REPLAY_VARIABLE, ReplayTarget, StepRecorder, file_of_step
from zeroengine.errors import ZeroEngineError

SAVED, LAST = 2, 5


class RandomLM(TinyLM):
    """Draws random numbers in its forward."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        noise = nn.functional.dropout(torch.ones(()), 0.5) if self.training else 1.0
        return super().forward(ids, labels) * (1.0 + noise)


def make(stage: int, folder: Path, **more: Any) -> zeroengine.Engine:
    settings = {"monitor": {"folder": str(folder)}, "digests": {"every": 1}, "gradient_accumulation_steps": 2}
    return zeroengine.initialize(build(RandomLM), config=config(stage, **(settings | more)))


def train(engine: zeroengine.Engine, checkpoints: Path, first_batch: int) -> dict[int, Any]:
    taken = {}
    for number in range(engine.global_steps, LAST):
        for micro_step in (0, 1):
            loss = engine(*batch(first_batch + 2 * number + micro_step, engine.rank))
            engine.backward(loss)
            try:
                engine.step()
            except SystemExit as end:
                assert end.code == 0
                micro_step = -1
        step, digests = engine._checkpoints.digests.taken or (0, {})
        taken[step] = digests
        if micro_step < 0:
            break
        if step == SAVED:
            engine.save_checkpoint(checkpoints, client_state={"saved": step})
    engine.close()
    return taken


def record(folder: Path) -> dict[int, Any]:
    return train(make(1, folder / "run", replay={"keep": LAST - SAVED}), folder / "checkpoints", 0)


def repeat(folder: Path, stage: int, first_batch: int) -> tuple[dict[int, Any], Any]:
    """What zero-replay starts, of a script that loads and saves, draws random numbers, and may have other data."""
    target = ReplayTarget(LAST - 1, str(folder / "run"), str(folder / f"checkpoints/step-{SAVED}"))
    os.environ[REPLAY_VARIABLE] = json.dumps(vars(target))
    engine = make(stage, folder / f"replay-{stage}")
    loaded = engine.load_checkpoint(folder / "nowhere")
    engine.save_checkpoint(folder / "other")
    torch.rand(3)
    return train(engine, folder / "other", first_batch), loaded


def test_a_replay_with_other_data_takes_the_kept_inputs_and_generators(tmp_path: Path) -> None:
    recorded = run_ranks(2, record, tmp_path)
    assert list(recorded[0]) == list(range(1, LAST + 1))
    assert not file_of_step(tmp_path / "run", 0, SAVED).exists() and file_of_step(tmp_path / "run", 1, LAST).exists()
    for (replayed, loaded), first in zip(run_ranks(2, repeat, tmp_path, 0, 100), recorded, strict=True):
        assert list(replayed) == list(range(SAVED + 1, LAST)) and loaded == {"saved": SAVED}
        assert all(replayed[step] == first[step] for step in replayed)
    # Nothing but the run itself has saved.
    assert not (tmp_path / "other").exists()


def test_a_replay_without_kept_inputs_takes_those_of_the_script(tmp_path: Path) -> None:
    recorded = run_ranks(2, record, tmp_path)
    for rank in (0, 1):
        for step in range(1, LAST + 1):
            file_of_step(tmp_path / "run", rank, step).unlink(missing_ok=True)
    for (same, _), (other, _), first in zip(
        run_ranks(2, repeat, tmp_path, 1, 0), run_ranks(2, repeat, tmp_path, 2, 100), recorded, strict=True
    ):
        assert all(same[step] == first[step] for step in same)
        assert other[SAVED + 1]["inputs"] != first[SAVED + 1]["inputs"]
        assert other[SAVED + 1]["gradients"] != first[SAVED + 1]["gradients"]


def test_keeping_steps_needs_a_run_folder() -> None:
    with pytest.raises(ZeroEngineError, match=r'replay\.keep needs a run folder.*"monitor": \{"folder": "runs/a"\}'):
        zeroengine.initialize(build(), config=config(0, replay={"keep": 2}))


def fail_to_write(*_: Any) -> None:
    raise RuntimeError("file write failed")


def keep_a_view_and_fail(folder: Path) -> int:
    engine = make(0, folder / "run", replay={"keep": 2}, gradient_accumulation_steps=1)
    corpus = torch.zeros(1 << 20, dtype=torch.int64)
    ids = corpus[: batch(0, 0)[0].numel()].view_as(batch(0, 0)[0])
    engine.backward(engine(ids, ids))
    engine.step()
    nbytes = file_of_step(folder / "run", engine.rank, 1).stat().st_size
    # A full disk is torch's own error.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepRecorder, "forward_began", lambda *_: None)
        patch.setattr(torch, "save", fail_to_write)
        engine.backward(engine(ids, ids))
        engine.step()
    engine.close()
    return nbytes


def test_keeping_a_view_keeps_no_more_than_it_and_a_full_disk_ends_no_rank(tmp_path: Path) -> None:
    assert all(nbytes < 1 << 20 for nbytes in run_ranks(2, keep_a_view_and_fail, tmp_path))
