"""The choice of an update backend, and the state that each one gives of the shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import adamw, start
from zeroengine.engine.initialize import make_engine
from zeroengine.optim.backends.blocking_update import BlockingUpdate
from zeroengine.optim.lion import Lion


class CustomAdam(torch.optim.Adam):
    """An Adam whose update may be another one."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "AMSGrad":
        return torch.optim.Adam(model.parameters(), amsgrad=True)
    return {"CustomAdam": CustomAdam, "Lion": Lion}.get(name, getattr(torch.optim, name, Lion))(model.parameters())


def backend_after_a_step(name: str, on_device: bool) -> tuple[str, bool, list[str], bool]:
    start()
    model = build(TinyLM)
    engine = make_engine(model, make_optimizer(name, model), config(2, optimizer=None), async_step=on_device)
    engine.backward(engine(*batch(0, engine.rank)))
    assert engine.step()
    optimizer, names, complete = engine.optimizer, set(), True
    for shard in optimizer.shards:
        for span in shard.spans():
            state = optimizer.state_of(shard).of(shard, span)
            names |= {*state.elements, *state.numbers}
            complete &= all(values.shape == (span.numel,) for values in state.elements.values())
            keys = optimizer.state_of(shard).keys(shard)
            # Torch's Lion counts no steps, so a checkpoint need not have them.
            complete &= keys is None or keys == {*state.elements, *(() if name == "Lion" else state.numbers)}
    backend = optimizer.backend
    updates = backend.rules[0] if isinstance(backend, BlockingUpdate) else backend
    found = type(updates).__name__, optimizer.backend.is_async, sorted(names), complete
    engine.close()
    return found


@pytest.mark.parametrize(
    ("name", "on_device", "backend", "state"),
    [
        ("AdamW", False, "FusedUpdate", ["exp_avg", "exp_avg_sq", "step"]),
        ("AdamW", True, "AsyncUpdate", ["exp_avg", "exp_avg_sq", "step"]),
        ("CustomAdam", True, "ElementwiseUpdate", ["exp_avg", "exp_avg_sq", "step"]),
        ("AMSGrad", False, "ElementwiseUpdate", ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"]),
        ("Lion", False, "FusedUpdate", ["exp_avg", "step"]),
    ],
)
def test_the_first_backend_or_rule_that_serves_an_optimizer_runs_it(
    name: str, on_device: bool, backend: str, state: list[str]
) -> None:
    expected = (backend, backend == "AsyncUpdate", state, True)
    assert run_ranks(2, backend_after_a_step, name, on_device) == [expected, expected]


class SkippingLM(TinyLM):
    """Leaves a block out on demand."""

    skipped: int | None = None

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for number, block in enumerate(self.blocks):
            x = x if number == self.skipped else block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def farthest_from_torch(stage: int, on_device: bool, path: Path) -> list[float]:
    """After each step, the largest difference to the parameters of torch's AdamW, over the largest parameter."""
    start()
    model, plain = build(SkippingLM), build(SkippingLM)
    optimizer = adamw(plain)
    engine = make_engine(model, adamw(model), config(stage, optimizer=None), async_step=on_device)
    differences, taken = [], list[torch.Tensor]()
    for step in range(9):
        # What differs from the step before: which parameters have gradients, the step count of one, where states lie,
        # and the settings of a group.
        plain.skipped = model.skipped = 1 if step in (2, 3, 7) else None  # type: ignore[assignment]
        if step == 5:
            optimizer.state[plain.norm.weight]["step"].fill_(50)  # type: ignore[union-attr, index]
            zeroengine.set_full_optimizer_state(model.norm.weight, "step", torch.tensor(50.0))  # type: ignore[arg-type, union-attr]
        if step == 6:
            engine.offload_states(device="nvme", nvme_path=path)
            # Takes the memory that the states leave.
            taken += [torch.ones(shard.param.numel()) for shard in engine.optimizer.shards for _ in range(8)]
            engine.reload_states()
        if step == 8:
            optimizer.param_groups[0] |= {"lr": 0.1, "maximize": True}
            engine.optimizer.param_groups[0] |= {"lr": 0.1, "maximize": True}
        optimizer.zero_grad()
        plain(*batch(step, 0)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        engine.backward(engine(*batch(step, 0)))
        assert engine.step()
        state = engine.full_state_dict()
        wanted = {name: value.cpu() for name, value in plain.state_dict().items()}
        most = max(value.abs().max().item() for value in wanted.values())
        differences.append(max((state[name].cpu() - value).abs().max().item() for name, value in wanted.items()) / most)
    engine.close()
    return differences


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_step_follows_whatever_has_changed_since_the_last_one(stage: int, on_device: bool, tmp_path: Path) -> None:
    for differences in run_ranks(2, farthest_from_torch, stage, on_device, tmp_path):
        assert max(differences) < 1e-5, differences
