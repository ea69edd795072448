"""Where memory runs out, the error says what zeroengine holds of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import Block, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start


class Exhausting(nn.Module):
    """Runs out of memory in forward or in backward."""

    where = "nowhere"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.run_out("forward")
        y = self.linear(x)
        for block in self.blocks:
            y = block(y)
        y.register_hook(lambda grad: self.run_out("backward"))
        return y.sum()

    def run_out(self, where: str) -> None:
        if self.where == where:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def runs_out(stage: int, more: dict[str, Any]) -> tuple[list[str], bool]:
    start()
    engine = zeroengine.initialize(build(Exhausting), config=config(stage, **more))
    found = []
    for where in ("forward", "backward"):
        engine.module.where = where
        with pytest.raises(torch.OutOfMemoryError) as error:
            engine.backward(engine(torch.ones(2, 64)))
        found.append(str(error.value))
    engine.module.where = "nowhere"
    engine.backward(engine(torch.ones(2, 64)))
    return found, bool(engine.step())


def test_out_of_memory_says_what_is_held_and_what_would_take_less() -> None:
    for messages, trains_on in run_ranks(2, runs_out, 2, {}):
        for message in messages:
            assert message.startswith("CUDA out of memory. Tried to allocate 2.00 GiB.\n\nzeroengine holds, on cpu\n")
            assert "\nparameters " in message and "\ntotal " in message
            numbers = r"\(([\d.]+) MiB of states and buffers a rank instead of ([\d.]+) MiB\)"
            found = re.search(
                rf'"zero_optimization": {{"stage": 3}} {numbers}, or "bf16": {{"enabled": true}}, or', message
            )
            assert found is not None and float(found[1]) < float(found[2]), message
        assert trains_on
    (messages, _), _ = run_ranks(2, runs_out, 3, {"bf16": {"enabled": True}})
    assert "What takes less: a smaller micro-batch" in messages[0], "nothing that is on already"


class Enormous(nn.Module):
    """Asks for more of the host's memory than there is, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() + torch.empty(2**52, device="cpu")[0]


def test_the_host_s_memory_is_explained_as_a_gpu_s_is() -> None:
    engine = zeroengine.initialize(build(Enormous), config=config(0))
    with pytest.raises(
        RuntimeError, match=r"can't allocate memory(.|\n)*zeroengine holds, on cpu(.|\n)*What takes less"
    ):
        engine(torch.ones(2, 64))
    engine.close()


def test_initialize_says_what_would_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(self: Any, *args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = build(Exhausting)
    with monkeypatch.context() as patch:
        patch.setattr("zeroengine.runtime.full_buffer.FullBuffer._set_tensor", allocate)
        with pytest.raises(torch.OutOfMemoryError, match=r"\S+ parameters over 1 rank\. What takes less: .bf16"):
            zeroengine.initialize(model, config=config(0))
    engine = zeroengine.initialize(model, config=config(0))
    engine.backward(engine(torch.ones(2, 64)))
    assert engine.step()
    engine.close()
