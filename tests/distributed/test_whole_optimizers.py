"""States of optimizers that see whole matrices: checkpoints between stages and numbers of ranks, reads, offload."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.training import start
from zeroengine.optim.mixed_optimizer import MixedOptimizer
from zeroengine.optim.muon import Muon


class Sided(torch.optim.Optimizer):
    """It keeps a matrix for each side of a parameter, as SOAP does: in lists, and none for sides that are too long.

    Another state is in bf16, in the order of the transposed parameter.
    """

    MAX_SIDE = 48

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    sides = [
                        torch.eye(n, device=param.device) if n <= self.MAX_SIDE and param.dim() > 1 else []
                        for n in param.shape
                    ]
                    low = torch.zeros(*reversed(param.shape), dtype=torch.bfloat16, device=param.device).movedim(0, -1)
                    state |= {"step": 0, "exp_avg": torch.zeros_like(param), "low": low, "GG": sides, "Q": None}
                assert state["Q"] is None
                state["step"] += 1
                update = state["exp_avg"].lerp_(param.grad, 0.1)
                for dim, side in enumerate(state["GG"]):
                    if len(side):
                        rows = param.grad.movedim(dim, 0).flatten(1)
                        side.lerp_(rows @ rows.T, 0.5)
                        update = torch.tensordot(side / side.norm(), update, ([1], [dim])).movedim(0, dim)
                low = state["low"].lerp_(param.grad.bfloat16(), 0.5)
                param.sub_(torch.tanh(100 * update) + low, alpha=group["lr"])


def sided(model: nn.Module) -> torch.optim.Optimizer:
    return Sided(model.parameters())


def mixed(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [param for param in model.blocks.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if not any(param is matrix for matrix in matrices)]
    return MixedOptimizer([Muon(matrices, lr=0.02, ns_dtype="fp32"), torch.optim.Adafactor(others, lr=1e-2)])


MUON = {"type": "Muon", "params": {"lr": 0.02, "ns_dtype": "fp32"}}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer] | dict[str, Any]] = {
    "muon": MUON,
    "mixed": mixed,
    "sided": sided,
}
# States with a value per element, with one for each row or column, of lists, and numbers.
STATES = {
    "muon": {"blocks.1.up.weight": ["momentum_buffer"]},
    "mixed": {"blocks.1.up.weight": ["momentum_buffer"], "tok.weight": ["row_var", "col_var", "step"]},
    "sided": {"blocks.1.up.weight": ["GG.1", "low"]},
}


def engine_at(stage: int, name: str, seed: int = 0) -> zeroengine.Engine:
    start()
    model, kind = build(TinyLM, seed), OPTIMIZERS.get(name)
    if callable(kind):
        return zeroengine.initialize(model, kind(model), config(stage, optimizer=None))
    return zeroengine.initialize(model, config=config(stage, **({} if kind is None else {"optimizer": kind})))


def take_steps(engine: zeroengine.Engine, numbers: range) -> list[float]:
    """The losses on this rank, of its share of batches that are the same for any number of ranks."""
    losses = []
    for number in numbers:
        loss = engine(*(whole.chunk(engine.world_size)[engine.rank] for whole in batch(number, 0, size=6)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def go_on(engine: zeroengine.Engine, name: str) -> tuple[list[float], list[torch.Tensor]]:
    """Further losses, and states after them."""
    losses, params = take_steps(engine, range(2, 4)), dict(engine.module.named_parameters())
    states = [(params[param], key) for param, keys in STATES[name].items() for key in keys]
    return losses, [zeroengine.full_optimizer_state(param, key) for param, key in states]


def save_and_go_on(folder: Path) -> dict[str, Any]:
    """Save, move the states off the device for a while, and go on."""
    found: dict[str, Any] = {}
    for name in (*OPTIMIZERS, "adamw"):
        engine = engine_at(3, name)
        take_steps(engine, range(2))
        engine.save_checkpoint(folder / name)
        if name in OPTIMIZERS:
            engine.offload_states(["optimizer"], device="nvme", nvme_path=folder)
            assert engine.memory().optimizer == 0, name
            engine.reload_states()
            found[name] = go_on(engine, name)
        engine.close()
    return found


def load_and_go_on(folder: Path, stage: int, steps_before: int, resaved: Path | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in OPTIMIZERS:
        engine = engine_at(stage, name, seed=1)
        take_steps(engine, range(7, 7 + steps_before))  # states of its own, to be replaced
        if resaved is not None and name == "muon":
            for other, described in (("adamw", "AdamW"), ("mixed", "Muon and Adafactor")):
                with pytest.raises(zeroengine.CheckpointError, match=rf"state of {described} \(.* is Muon and AdamW"):
                    engine.load_checkpoint(folder / other)
        engine.load_checkpoint(folder / name)
        if resaved is not None:
            engine.save_checkpoint(resaved / name)
        found[name] = go_on(engine, name)
        engine.close()
    return found


@pytest.mark.slow  # checkpoint/test_matrix has AdamW's
@pytest.mark.parametrize("sizes", [(3,), pytest.param((3, 1), marks=pytest.mark.slow)], ids=str)
def test_checkpoints_load_at_any_stage_and_number_of_ranks(sizes: tuple[int, ...], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    saved = run_ranks(2, save_and_go_on, first)
    # At stage 0 every rank has all states, and the ranks share the saving.
    loaded = run_ranks(2, load_and_go_on, first, 0, 0, second)
    for (rank, found), name in itertools.product(enumerate(loaded), OPTIMIZERS):
        assert found[name][0] == saved[rank][name][0], name
        assert all(map(torch.equal, found[name][1], saved[rank][name][1])), name
    for world_size in sizes:
        stage, steps_before, folder = {3: (1, 1, second), 1: (1, 0, first)}[world_size]
        loaded = run_ranks(world_size, load_and_go_on, folder, stage, steps_before)
        for name in OPTIMIZERS:
            here, there = (torch.tensor([found[name][0] for found in ranks]).mean(0) for ranks in (loaded, saved))
            torch.testing.assert_close(here, there, rtol=1e-6, atol=0)
            for state, before in zip(loaded[0][name][1], saved[0][name][1], strict=True):
                torch.testing.assert_close(state, before, rtol=1e-4, atol=1e-6)


class Opaque(Sided):
    """Its state is an object that no checkpoint knows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["history"] = {"norm": 1.0}


def save_opaque(folder: Path) -> None:
    start()
    model = build(TinyLM)
    engine = zeroengine.initialize(model, Opaque(model.parameters()), config(2, optimizer=None))
    take_steps(engine, range(1))
    # At degree 2 one of the ranks alone has the state.
    with pytest.raises(zeroengine.ZeroEngineError, match="Opaque keeps a dict as state 'history'"):
        zeroengine.full_optimizer_state(model.tok.weight, "low")
    engine.save_checkpoint(folder)


def test_a_state_that_no_checkpoint_takes_is_an_error_at_the_save(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="Opaque keeps a dict as state 'history': a checkpoint takes tensors"):
        run_ranks(2, save_opaque, tmp_path)
