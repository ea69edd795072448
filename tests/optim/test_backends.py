"""The choice of an update backend, and the state that each one gives of the shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
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
