"""A step that is issued before its norm is known gives the bits of one that waits for it."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, SequentialLR

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from zeroengine import ZeroEngineError
from zeroengine.engine.initialize import make_engine
from zeroengine.optim.lion import Lion

NAN, INF = float("nan"), float("inf")


class Branching(TinyLM):
    """Has a branch that it takes when told to, and a parameter whose gradient may be spoilt."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(24, 24)
        self.takes_side = True
        self.spoil = 1.0
        self.blocks[1].down.weight.register_hook(lambda grad: grad * self.spoil)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = super().forward(ids, labels)
        return loss + self.side(self.tok(ids)).square().mean() if self.takes_side else loss


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": plain, "weight_decay": 0.0, "lr": 1e-2}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-5)


def with_l2(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=0.1, maximize=True)


def with_lion(model: nn.Module) -> torch.optim.Optimizer:
    return Lion(model.parameters(), lr=1e-3, weight_decay=0.1)


def with_momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Two rules, in segments of one buffer."""
    params = list(model.parameters())
    groups = [{"params": params[::2], "momentum": 0.9, "nesterov": True}, {"params": params[1::2]}]
    return torch.optim.SGD(groups, lr=1e-2, weight_decay=0.1)


def with_adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1)


def decaying(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.8**step)


def in_turns(optimizer: torch.optim.Optimizer) -> SequentialLR:
    schedules = [decaying(optimizer), CosineAnnealingWarmRestarts(optimizer, 2)]
    return SequentialLR(optimizer, schedules, milestones=[2])


class Untyped:
    """A schedule that cannot be taken back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9


@dataclass(frozen=True)
class Case:
    more: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = grouped
    schedule: Callable[[torch.optim.Optimizer], Any] | None = decaying
    micro_steps: int = 1
    spoilt: dict[int, float] = field(default_factory=dict)  # what the gradients of a step are multiplied by, on rank 1
    weighted: bool = False


BF16 = {"bf16": {"enabled": True}}
BF16_MOMENTS = {"optimizer_state_dtype": "bf16"}
CASES = {
    "fp32": Case(),
    "bf16": Case(BF16),
    "without clipping": Case({"gradient_clipping": 0}, with_l2, None),
    "accumulation": Case(BF16, micro_steps=2, schedule=in_turns),
    "moments in bf16": Case(BF16_MOMENTS),
    "bf16, moments in bf16": Case(BF16 | BF16_MOMENTS),
    "Lion, moments in 8 bits": Case(BF16 | {"optimizer_state_dtype": "int8"}, with_lion, spoilt={2: INF}),
    "SGD with and without momentum": Case(BF16_MOMENTS, with_momentum),
    "Adagrad": Case(BF16, with_adagrad, micro_steps=2),
    "predivided": Case({"gradient_predivide_factor": 8.0}),
    "weights of losses": Case(micro_steps=2, weighted=True),
    "an outlier": Case({"skip_steps": {"window": 4, "sigma": 100}}, spoilt={3: 1e6}, schedule=in_turns, weighted=True),
    "overflow": Case(spoilt={1: INF, 3: NAN}, schedule=in_turns),
    "overflow in bf16": Case(BF16, spoilt={0: NAN, 2: INF, 3: INF}, micro_steps=2),
    "overflow, a schedule that stays": Case(spoilt={2: INF}, schedule=Untyped),
    "overflow, unchecked": Case({"check_grad_overflow": False}, spoilt={3: INF}),
    "overflow in fp16": Case({"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}, spoilt={2: INF}),
}


def train(case: Case, stage: int, on_device: bool) -> dict[str, Any]:
    """Everything that five steps leave behind, by name."""
    rank, model, given = start(), build(Branching), {"optimizer": None, **case.more}
    settings = config(stage, gradient_accumulation_steps=case.micro_steps, **given)
    engine = make_engine(model, case.optimizer(model), settings, case.schedule, async_step=on_device)
    assert engine.optimizer.backend.is_async == on_device
    found: dict[str, Any] = {"losses": [], "norms": [], "results": [], "rates": [], "scales": []}
    for micro_step in range(5 * case.micro_steps):
        step = micro_step // case.micro_steps
        model.takes_side = step != 2 and (rank == 0 or stage == 3)  # where modules are partitioned, all run the same
        model.spoil = case.spoilt.get(step, 1.0) if rank == 1 else 1.0
        loss = engine(*batch(micro_step, rank))
        engine.backward(loss, weight=torch.tensor(3 + micro_step + rank) if case.weighted else None)
        found["results"].append(engine.step())  # asked in the end
        found["losses"].append(loss.item())
        found["scales"].append(engine.loss_scale)
        if engine.is_gradient_accumulation_boundary() and step % 2:
            found["norms"].append(engine.grad_norm)  # without which the next backward asks
            found["rates"].append([group["lr"] for group in engine.optimizer.param_groups])
    found["results"] = list(map(bool, found["results"]))
    found["counters"] = (engine.global_steps, engine.skipped_steps, engine.micro_steps, engine.grad_norm)
    found["rates"].append([group["lr"] for group in engine.optimizer.param_groups])
    for states in engine.optimizer.shards:
        unit = states.unit
        for span in unit.layout.spans(rank, unit.degrees.optimizer):
            name, state = unit.layout.slots[span.param_index].name, engine.optimizer.state_of(states).of(states, span)
            found[f"master of {name}"] = states.master[span.shard_slice].clone()
            found[f"moments of {name}"] = torch.stack([state.read(key).float() for key in state.elements])
            found[f"step of {name}"] = state.numbers["step"]
    found |= {f"value of {name}": value for name, value in engine.full_state_dict().items()}
    engine.close()
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())
        return repr(a) == repr(b)  # nan is nan

    assert one.keys() == other.keys()
    return [name for name in one if not same(one[name], other[name])]


def compared(name: str, stages: tuple[int, ...]) -> list[tuple[int, list[str], int, int]]:
    found = []
    for stage in stages:
        waiting, issued = (train(CASES[name], stage, on_device) for on_device in (False, True))
        found.append((stage, differences(waiting, issued), *issued["counters"][:2]))
    return found


# The others differ from these in what is computed, not in what is waited for.
SHORT = (
    "fp32",
    "accumulation",
    "an outlier",
    "weights of losses",
    "overflow",
    "overflow in fp16",
    "Lion, moments in 8 bits",
)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        *((name, ((0,), (3,), (1,), (2,))[number % 4]) for number, name in enumerate(SHORT)),
        *(pytest.param(name, (0, 1, 2, 3), marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_losses_states_and_norms_are_those_of_a_step_that_waits(name: str, stages: tuple[int, ...]) -> None:
    case = CASES[name]
    skipped = len(case.spoilt) if case.more.get("check_grad_overflow", True) else 0
    for ranks in run_ranks(2, compared, name, stages):
        assert ranks == [(stage, [], 5 - skipped, skipped) for stage in stages]


# -- a result that comes late ------------------------------------------------------------------------


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logging.getLogger("zeroengine").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def spoilt_step(engine: zeroengine.Engine, number: int, value: float) -> Any:
    engine.module.spoil = value if engine.rank == 1 else 1.0
    engine.backward(engine(*batch(number, engine.rank)))
    return engine.step()


def asked_by_one_rank(stage: int) -> tuple[list[str], list[float], int]:
    start()
    log, model = Log(), build(Branching)
    engine = make_engine(model, grouped(model), config(stage, optimizer=None), decaying, async_step=True)
    spoilt_step(engine, 0, 1.0)
    before = [group["lr"] for group in engine.optimizer.param_groups]
    spoilt_step(engine, 1, INF)
    rates = [[group["lr"] for group in engine.optimizer.param_groups]]
    if engine.rank == 0:
        assert engine.skipped_steps == 1 and engine.grad_norm == INF and engine.global_steps == 1
        rates.append([group["lr"] for group in engine.optimizer.param_groups])
        assert rates[0] == pytest.approx([0.8 * rate for rate in before]), "stepped at once"
        assert rates[1] == before, "and taken back"
        assert log.messages == [], "the name takes all ranks"
    engine.optimizer.param_groups[1]["lr"] = 0.5
    engine.module.spoil = 1.0
    engine.backward(engine(*batch(2, engine.rank)))
    if engine.rank == 0:
        assert log.messages == ["step 2 skipped: the gradient of blocks.1.down.weight is not finite"]
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    assert rates == [before[0], 0.5], "what somebody wrote since stays"
    assert engine.step() and engine.global_steps == 2
    return log.messages, rates, engine.skipped_steps


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_one_rank_may_query_a_step_and_the_next_backward_names_the_overflow(stage: int) -> None:
    (first, *rest), (second, *others) = run_ranks(2, asked_by_one_rank, stage)
    assert rest == others and len(first) == 1 and second == [], "rank 0 speaks"


def surgery() -> list[Any]:
    start()
    found = []
    for on_device in (False, True):
        model = build(Branching)
        engine = make_engine(model, grouped(model), config(3, optimizer=None), async_step=on_device)
        param = model.blocks[0].up.weight
        for step in range(3):
            spoilt_step(engine, step, NAN if step == 1 else 1.0)
            if step == 1:
                count = zeroengine.full_optimizer_state(param, "step")
                zeroengine.set_full_optimizer_state(param, "step", count + 40)
        found.append((count.item(), zeroengine.full_optimizer_state(param, "step").item(), engine.full_state_dict()))
    return found


def test_step_counts_can_be_read_and_written_while_a_step_result_is_unknown() -> None:
    (waiting, issued), _ = run_ranks(2, surgery)
    assert waiting[:2] == issued[:2] == (1, 42)
    assert differences(waiting[2], issued[2]) == []


def resumed(folder: str) -> list[str]:
    start()
    found: list[tuple[dict[str, torch.Tensor], ...]] = []
    for on_device in (False, True):
        path = f"{folder}/{on_device}"

        def make(on_device: bool = on_device) -> zeroengine.Engine:
            model = build(Branching)
            return make_engine(model, grouped(model), config(2, optimizer=None), decaying, async_step=on_device)

        engine = make()
        for step in range(3):
            spoilt_step(engine, step, INF if step == 2 else 1.0)
        engine.save_checkpoint(path)
        assert (engine.global_steps, engine.skipped_steps) == (2, 1)
        other = make()
        spoilt_step(other, 7, 1.0)
        other.load_checkpoint(path)
        assert (other.global_steps, other.skipped_steps, other.lr_scheduler.last_epoch) == (2, 1, 2)
        for each in (engine, other):
            assert spoilt_step(each, 3, 1.0)
        found.append((engine.full_state_dict(), other.full_state_dict()))
    (first, *rest) = [state for pair in found for state in pair]
    return [name for state in rest for name in differences(first, state)]


def test_a_checkpoint_after_a_skipped_step_has_its_counts_and_its_schedule(tmp_path: Any) -> None:
    assert run_ranks(2, resumed, str(tmp_path)) == [[], []]


def exhausted() -> tuple[str, int, int]:
    start()
    model, fp16 = build(Branching), {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 4, "hysteresis": 1}
    engine = make_engine(model, grouped(model), config(2, optimizer=None, fp16=fp16), decaying, async_step=True)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    with pytest.raises(ZeroEngineError) as error:
        spoilt_step(engine, 0, INF)
    assert [group["lr"] for group in engine.optimizer.param_groups] == rates
    assert spoilt_step(engine, 1, 1.0)
    return str(error.value), engine.global_steps, engine.skipped_steps


def test_fp16_overflow_at_the_smallest_scale_is_an_error_of_its_own_step() -> None:
    for message, updates, skipped in run_ranks(2, exhausted):
        assert message.startswith("step 1: the gradient of blocks.1.down.weight is not finite, at the smallest loss")
        assert (updates, skipped) == (1, 0)


def progress() -> list[str]:
    start()
    model = build(Branching)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        engine = make_engine(model, grouped(model), config(2, optimizer=None, steps_per_print=2), async_step=True)
        for step in range(5):
            spoilt_step(engine, step, NAN if step == 1 else 1.0)
    return [line.split(":")[0] for line in out.getvalue().splitlines()]


def test_progress_is_printed_once_it_is_known() -> None:
    assert run_ranks(2, progress) == [["step 2"], []]


def ended(how: str) -> tuple[list[str], list[str], float]:
    """What is said at the end of a run whose last step was skipped, and the rate that is left."""
    start()
    log, model = Log(), build(Branching)
    engine = make_engine(model, grouped(model), config(2, optimizer=None, steps_per_print=1), decaying, async_step=True)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for step in range(2):
            result = spoilt_step(engine, step, INF if step == 1 else 1.0)
        if how == "asked":
            assert not result and engine.lr_scheduler.last_epoch == 1, "the schedule is taken back with the answer"
        if how == "away":
            engine.offload_states()
        if how == "failed":
            with contextlib.suppress(KeyError), contextlib.closing(engine):
                raise KeyError
        else:
            engine.close()
    return log.messages, [line.split(":")[0] for line in out.getvalue().splitlines()], engine.lr_scheduler.last_epoch


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("simply", ["step 2 skipped: a gradient is not finite"]),
        pytest.param("asked", ["step 2 skipped: a gradient is not finite"], marks=pytest.mark.slow),
        ("away", ["step 2 skipped: the gradient of blocks.1.down.weight is not finite"]),
        ("failed", []),
    ],
)
def test_the_end_of_a_run_says_what_became_of_its_last_step(how: str, said: list[str]) -> None:
    """Unless it ends by an error: then nobody knows whether the device gets there."""
    first, other = run_ranks(2, ended, how)
    assert first == (said, ["step 1"], 2 if how == "failed" else 1)
    assert other == ([], [], first[2])
