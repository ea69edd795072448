"""Parameters of every kind train at every stage as they do in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zeroengine
from tests.distributed.models import WIDTH, Block, TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    STAGES,
    Task,
    adamw,
    check_every_stage,
    make_engine,
    ordinary_loop,
    settings,
    start,
)
from tests.emulated import a_real_gpu
from tests.parametrization import SHARED_MEMORY_AND_SLOW_GLOO
from zeroengine.optim.backends.fused_update import MAX_CACHED_LISTS


def features(step: int, rank: int) -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(3, WIDTH, generator=generator),)


class Net(nn.Module):
    """Blocks between a stem and a head, and a loss; subclasses change what a forward does."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 5)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).square().mean() + x.abs().mean()

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.loss(x)


# -- groups and frozen parameters ---------------------------------------------------------------------


def four_groups(model: nn.Module) -> torch.optim.Optimizer:
    params = dict(model.named_parameters())
    norms = [p for name, p in params.items() if "norm" in name]
    biases = [p for name, p in params.items() if name.endswith("bias") and "norm" not in name]
    first = [model.blocks[0].up.weight]
    taken = {id(p) for p in norms + biases + first}
    groups = [
        {"params": [p for p in params.values() if id(p) not in taken], "weight_decay": 0.2},
        {"params": norms, "lr": 1e-2, "weight_decay": 0.0},
        {"params": biases, "lr": 5e-4, "betas": (0.8, 0.9)},
        {"params": first, "lr": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-5)


def test_each_group_trains_with_its_own_hyperparameters_and_lr_0_leaves_its_values() -> None:
    trained = check_every_stage(Task(optimizer=four_groups))[0]
    before = build(TinyLM).state_dict()
    assert torch.equal(trained.state["blocks.0.up.weight"], before["blocks.0.up.weight"])
    assert not torch.equal(trained.state["blocks.1.up.weight"], before["blocks.1.up.weight"])


def half_frozen() -> nn.Module:
    model = TinyLM()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    return model


def trainable_only(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, eps=1e-5)


@pytest.mark.parametrize(
    "optimizer",
    [
        # Adapters are trained by such an optimizer.
        pytest.param(trainable_only, id="left out of the optimizer", marks=pytest.mark.slow),
        pytest.param(adamw, id="among its groups"),
    ],
)
def test_frozen_parameters_keep_their_bits_while_gradients_flow_through_them(optimizer: Any) -> None:
    trained = check_every_stage(Task(factory=half_frozen, optimizer=optimizer))[0]
    model = build(half_frozen)
    for name, param in model.named_parameters():
        assert torch.equal(trained.state[name], param) is not param.requires_grad, name


def memory_of(stage: int, factories: list[Any]) -> list[zeroengine.Memory]:
    start()
    found = []
    for factory in factories:
        engine = make_engine(Task(factory=factory), stage)
        engine.backward(engine(*batch(0, engine.rank)))
        engine.step()
        found.append(engine.memory())
    return found


def all_but_norm_frozen() -> nn.Module:
    model = TinyLM().requires_grad_(False)
    model.norm.requires_grad_(True)
    return model


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_frozen_parameters_have_no_gradient_and_no_optimizer_state(stage: int) -> None:
    whole, frozen = run_ranks(2, memory_of, stage, [TinyLM, all_but_norm_frozen])[0]
    assert frozen.gradients < whole.gradients / 4 and frozen.optimizer < whole.optimizer / 4
    assert frozen.parameters >= whole.parameters


# -- parameters without a gradient --------------------------------------------------------------------


class Skipping(Net):
    """The second block runs on some steps only; one parameter never takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(11))

    def forward(self, x: torch.Tensor, runs: bool) -> torch.Tensor:  # type: ignore[override]
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = block(x) if runs or i != 1 else x
        return self.loss(x)


def skipping_on_all_ranks(step: int, rank: int) -> tuple[torch.Tensor, bool]:
    return (*features(step, rank), step % 3 != 1)


def skipping_on_rank_1(step: int, rank: int) -> tuple[torch.Tensor, bool]:
    return (*features(step, rank), rank == 0 or step % 3 != 1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("optimizer", [adamw, pytest.param(momentum, marks=pytest.mark.slow)])
def test_a_parameter_without_gradient_keeps_value_moments_and_step_count(optimizer: Any) -> None:
    """Weight decay, decaying moments or a counted step would show in the values of the steps that follow."""
    task = Task(factory=Skipping, data=skipping_on_all_ranks, steps=7, optimizer=optimizer)
    trained = check_every_stage(task)[0]
    assert torch.equal(trained.state["unused"], torch.ones(11))


def skipping_at_random(step: int, rank: int) -> tuple[torch.Tensor, bool]:
    return (*features(step, rank), step * step % 7 < 3)


def count_remembered(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    found = ordinary_loop(task, engine)
    sizes = [
        segments.cache_info().currsize for segments in engine.optimizer.backend.rules[0].segments_of_shard.values()
    ]
    assert max(sizes) <= MAX_CACHED_LISTS < task.steps
    return found


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_steps_that_fall_behind_at_random_use_no_more_memory(stage: int) -> None:
    check_every_stage(Task(factory=Skipping, data=skipping_at_random, steps=40), loop=count_remembered, stages=(stage,))


def test_a_module_that_one_rank_skips_gets_the_other_ranks_gradient() -> None:
    check_every_stage(Task(factory=Skipping, data=skipping_on_rank_1, steps=5), stages=(0, 1, 2))


def skip_inside_gathered(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(task.steps):
        with zeroengine.gathered(engine.module.blocks[1]):
            loss = engine(*task.data(step, engine.rank))
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.grad_norm)
    return losses, norms


@SHARED_MEMORY_AND_SLOW_GLOO
def test_at_stage_3_one_rank_may_skip_a_module_that_is_gathered(transport: str) -> None:
    task = Task(factory=Skipping, data=skipping_on_rank_1, steps=5)
    check_every_stage(task, loop=skip_inside_gathered, stages=(2, 3), comm={"transport": transport})


class OnePart(nn.Module):
    """Which of two halves takes part depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.halves[which](x).square().mean()


def by_rank(step: int, rank: int) -> tuple[torch.Tensor, int]:
    return (*features(step, rank), rank)


def test_a_unit_whose_parameters_get_gradients_on_different_ranks_trains_as_plain_pytorch() -> None:
    check_every_stage(Task(factory=OnePart, data=by_rank))


# -- parameters in several places ---------------------------------------------------------------------


def untied() -> nn.Module:
    return TinyLM(tied=False)


@pytest.mark.parametrize(
    "factory", [pytest.param(TinyLM, id="tied"), pytest.param(untied, id="untied", marks=pytest.mark.slow)]
)
def test_tied_weights_train_as_one(factory: Any) -> None:
    trained = check_every_stage(Task(factory=factory))[0]
    assert torch.equal(trained.state["tok.weight"], trained.state["head.weight"]) is (factory is TinyLM)


class Recurrent(Net):
    """One block several times, among others: as in ALBERT."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.blocks.append(self.blocks[0])
        self.blocks.append(self.blocks[1])


def test_a_module_called_several_times_in_one_forward_trains_as_plain_pytorch() -> None:
    check_every_stage(Task(factory=Recurrent, data=features))


class Direct(Net):
    """Uses parameters of released units in its own operations, before and after their modules run."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = F.linear(x * self.scale, self.blocks[2].up.weight, self.blocks[2].up.bias)[:, :WIDTH]
        for block in self.blocks:
            x = block(x)
        x = F.linear(x, self.blocks[0].up.weight)[:, :WIDTH]
        penalty = torch.stack([block.norm.weight for block in self.blocks]).square().sum()
        return self.loss(x) + 1e-2 * penalty


def test_a_parent_may_use_its_children_s_parameters_itself() -> None:
    check_every_stage(Task(factory=Direct, data=features))


def by_parts(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """Never calls the model as a whole, only its modules."""
    losses, norms = [], []
    model = engine.module
    for step in range(task.steps):
        x = model.stem(*task.data(step, engine.rank))
        for block in model.blocks:
            x = block(x)
        loss = model.loss(x)
        engine.backward(loss)
        assert engine.step()
        losses.append(loss.item())
        norms.append(engine.grad_norm)
    return losses, norms


@SHARED_MEMORY_AND_SLOW_GLOO
def test_a_model_may_be_called_by_its_parts(transport: str) -> None:
    check_every_stage(Task(factory=Net, data=features), loop=by_parts, comm={"transport": transport})


class Branching(Block):
    """The gradient of its input is done while a branch without input still has to read the weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = torch.tanh(self.up.weight @ self.down.weight).square().mean() * self.norm.weight.square().mean()
        return x * 1.5 + branch


class Branched(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branching() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = x.requires_grad_()  # a leaf: its gradient is due before anything else
        return super().forward(self.blocks[0](x))


def test_a_branch_that_depends_on_weights_alone_trains_as_plain_pytorch() -> None:
    check_every_stage(Task(factory=Branched, data=features))


class Attention(nn.Module):
    """torch's own attention, which reads ``out_proj``'s weight without calling it, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[None]
        return self.lstm(self.attention(x, x, x, need_weights=False)[0])[0].square().mean()


@a_real_gpu("a kernel of its own for LSTM cells")
def test_attention_and_recurrent_layers_of_torch_train_as_plain_pytorch() -> None:
    check_every_stage(Task(factory=Attention, data=features), units=["attention.out_proj", "lstm"])


class Adapted(nn.Module):
    """A frozen layer and a trainable low-rank one beside it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x)) + self.up(self.down(x))


def adapted() -> nn.Module:
    model = Net()
    model.blocks = nn.ModuleList(Adapted() for _ in range(3))
    model.stem.requires_grad_(False)
    return model


def test_low_rank_adapters_beside_frozen_layers_train_as_plain_pytorch() -> None:
    check_every_stage(Task(factory=adapted, data=features, optimizer=trainable_only))


# -- identity -----------------------------------------------------------------------------------------


def identities(stage: int) -> None:
    start()
    model = build(TinyLM)
    before = {name: (id(param), param.shape, param.dtype, type(param)) for name, param in model.named_parameters()}
    task = Task()
    engine = zeroengine.initialize(model, task.optimizer(model), settings(task, stage))

    def check() -> None:
        assert engine.module is model
        found = {name: (id(p), p.shape, p.dtype) for name, p in model.named_parameters()}
        assert found == {name: facts[:3] for name, facts in before.items()}
        assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf for p in model.parameters())
        assert [id(p) for group in engine.optimizer.param_groups for p in group["params"]] == [
            id(p) for p in model.parameters()
        ]

    check()
    for step in range(2):
        loss = engine(*batch(step, engine.rank))
        check()
        engine.backward(loss)
        check()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        engine.step()
        assert all(p.grad is None for p in model.parameters())
        check()
    with zeroengine.gathered(model):
        check()
        assert {name: type(p) for name, p in model.named_parameters()} == {n: facts[3] for n, facts in before.items()}


def all_identities() -> None:
    for stage in STAGES:
        identities(stage)


def test_a_parameter_stays_the_same_object_of_the_same_shape() -> None:
    run_ranks(2, all_identities)


# -- dtypes -------------------------------------------------------------------------------------------


def in_double() -> nn.Module:
    return Net().double()


def double_features(step: int, rank: int) -> tuple[torch.Tensor]:
    return (features(step, rank)[0].double(),)


def test_a_float64_model_trains_in_float64() -> None:
    trained = check_every_stage(Task(factory=in_double, data=double_features))[0]
    assert {value.dtype for value in trained.state.values()} == {torch.float64}
