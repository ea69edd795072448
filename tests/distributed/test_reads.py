"""Parameters that are read where no module hook announces it: right at every stage, as in plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.distributed.models import WIDTH, Block, TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    Task,
    Train,
    Trained,
    assert_close,
    check_every_stage,
    make_engine,
    ordinary_loop,
    start,
    take_steps,
    train_at,
    train_plainly,
)
from tests.parametrization import SHARED_MEMORY_AND_SLOW_GLOO, TRANSPORTS, in_turn


class BlockTwice(TinyLM):
    """Calls each block twice, each time under a reentrant checkpoint: a backward of its own for each call."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block in [*self.blocks, *self.blocks]:
            x = checkpoint(block, x, use_reentrant=True)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class ChunkedLoss(torch.autograd.Function):
    """Cross entropy by rows, whose backward computes each chunk again and runs a backward of its own for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, head: nn.Module, labels: torch.Tensor, num_chunks: int) -> torch.Tensor:
        ctx.head, ctx.labels, ctx.num_chunks = head, labels, num_chunks
        ctx.save_for_backward(x)
        with torch.no_grad():
            return F.cross_entropy(head(x), labels, reduction="sum") / labels.numel()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        parts = []
        for rows, labels in zip(x.detach().chunk(ctx.num_chunks), ctx.labels.chunk(ctx.num_chunks), strict=True):
            with torch.enable_grad():
                rows.requires_grad_()
                loss = F.cross_entropy(ctx.head(rows), labels, reduction="sum") / ctx.labels.numel()
            loss.backward(gradient)
            parts.append(rows.grad)
        return torch.cat(parts), None, None, None


class LossInChunks(TinyLM):
    def num_chunks(self) -> int:
        return 4

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return ChunkedLoss.apply(self.norm(x).flatten(0, 1), self.head, labels.flatten(), self.num_chunks())


class LossInChunksByRank(LossInChunks):
    """Of which the ranks make different numbers, and each rank another from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def num_chunks(self) -> int:
        self.calls += 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        return 1 + (self.calls + rank) % 4


class Router(Block):
    """Keeps a loss of its own output, which no output leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.loss = self.auxiliary(x).square().mean()
        return x


class LossInAttributes(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Router() for _ in range(3))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, labels) + sum(block.loss for block in self.blocks)


class Cache:
    """An object whose tensors nobody can find."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get(self) -> torch.Tensor:
        return self._tensor


class Caching(Block):
    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), Cache(self.key(x))


class TensorBesideObject(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Caching() for _ in range(3))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x, cache = block(x)
            x = x + cache.get()
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class DirectUses(TinyLM):
    """Uses parameters directly, first without gradients and then with them."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(3))
        self.head = nn.Identity()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        with torch.no_grad():
            offset = sum(scale.sum() for scale in self.scales) - self.tok.weight.mean()
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale + offset * 1e-3
        return F.cross_entropy(F.linear(self.norm(x), self.tok.weight).flatten(0, 1), labels.flatten())


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, WIDTH) * 0.1)
        self.token = nn.Parameter(torch.randn(WIDTH))

    def forward(self, n: int) -> torch.Tensor:
        return self.weight[:n]


class Token(Positions):
    def forward(self, n: int) -> torch.Tensor:
        return self.token


class ReturnsOfParameters(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.token = Positions(), Token()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        positions, token = self.positions(ids.shape[1]), self.token(1)
        x = self.tok(ids) + positions * token + self.token(1)
        for block in self.blocks:
            x = block(x) + positions
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class SavesWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class KeepsWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class FunctionSavesWeight(TinyLM):
    function: type[torch.autograd.Function] = SavesWeight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.function.apply(self.norm(x), self.head.weight).flatten(0, 1), labels.flatten())


class FunctionKeepsWeight(FunctionSavesWeight):
    function = KeepsWeight


class CheckpointedFunctions(TinyLM):
    """Checkpoints functions that use parameters directly, and parts of blocks that are never called themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block, reentrant in zip(self.blocks, (True, False, True), strict=True):
            x = checkpoint(lambda x: x * self.scale + F.linear(x, self.tok.weight[:WIDTH]), x, use_reentrant=reentrant)
            x = x + checkpoint(lambda x, block=block: block.down(block.up(block.norm(x))), x, use_reentrant=reentrant)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Forces(TinyLM):
    """Takes a derivative by ``torch.autograd.grad`` in its forward."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids).detach().requires_grad_()
        energy = self.blocks[1](self.blocks[0](x)).square().mean()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return super().forward(ids, labels) + force.square().sum() * 1e2


class NoGradient(torch.autograd.Function):
    """Gives its weight no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight.mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class FunctionWithoutGradient(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = NoGradient.apply(self.tok(ids), self.scale)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


MODELS: list[Callable[[], nn.Module]] = [
    LossInAttributes,
    TensorBesideObject,
    DirectUses,
    ReturnsOfParameters,
    FunctionSavesWeight,
    FunctionKeepsWeight,
    FunctionWithoutGradient,
    CheckpointedFunctions,
    Forces,
]
# In the normal run other tests have them, or what differs little from them.
SLOW_MODELS = (LossInAttributes, TensorBesideObject, DirectUses, FunctionSavesWeight)


@in_turn(
    ("factory", "transport"),
    [
        pytest.param(model, id=model.__name__, marks=pytest.mark.slow if model in SLOW_MODELS else ())
        for model in MODELS
    ],
    TRANSPORTS,
)
def test_unhooked_parameter_uses_train_as_plain_pytorch(factory: Callable[[], nn.Module], transport: str) -> None:
    check_every_stage(Task(factory=factory), comm={"transport": transport})


class ReadsData(TinyLM):
    """Computes with the ``.data`` of a weight, whose version counter is another than the weight's."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        x = x + F.linear(x, self.head.weight.data[:WIDTH])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def test_the_data_of_a_parameter_is_read_in_a_forward_as_in_plain_pytorch() -> None:
    check_every_stage(Task(factory=ReadsData, steps=3), stages=(3,))


class ChangingBlock(Block):
    """Its graph changes from forward to forward.

    In some forwards it saves a frozen parameter where it saves another tensor, in a node of the same class, in others.
    """

    def __init__(self, calls_in_step: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=False)
        self.num_calls, self.calls_in_step = 0, calls_in_step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = self.num_calls // self.calls_in_step
        self.num_calls += 1
        x = x * (self.scale if step % 3 == 1 else torch.ones(WIDTH))
        return super().forward(x.sin() if step % 4 == 2 else x)


class ChangingGraph(TinyLM):
    def __init__(self, calls_in_step: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ChangingBlock(calls_in_step) for _ in range(3))


def test_a_graph_that_saves_other_parameters_in_each_forward_trains_as_plain_pytorch() -> None:
    # Plain PyTorch runs the forwards of both ranks in turn.
    plain = train_plainly(Task(factory=functools.partial(ChangingGraph, 2), steps=8))
    check_every_stage(Task(factory=ChangingGraph, steps=8), stages=(3,), plain=plain)


class ScalesOfNorms(TinyLM):
    """The graph saves parameters themselves, and no views of them, of modules that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH)) for _ in range(2))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        for scale in self.scales:
            x = x * scale[0].weight
        x = x + sum(scale[0].bias for scale in self.scales)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def loop_with_packed_tensors(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """What the graph saves goes through hooks of the user's, which keep parameters as they are, but for the first step.

    In one step all units are gathered before the forward and released before the backward.
    """
    losses, norms = [], []
    for step in range(task.steps):
        with contextlib.ExitStack() as stack:
            if step == 1:
                stack.enter_context(zeroengine.gathered(engine.module.parameters()))
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), lambda packed: packed[0])
            if step:
                stack.enter_context(hooks)
            loss = engine(*task.data(step, engine.rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.grad_norm)
    assert engine.memory().gathered == 0
    return losses, norms


def test_parameters_that_hooks_of_the_user_save_train_as_plain_pytorch() -> None:
    for factory in (TinyLM, ScalesOfNorms):
        check_every_stage(Task(factory=factory, steps=3), loop=loop_with_packed_tensors, stages=(3,))


@SHARED_MEMORY_AND_SLOW_GLOO
@pytest.mark.parametrize(
    ("number", "factory"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, BlockTwice), (1, LossInChunks))),
        (2, LossInChunksByRank),
    ],
)
def test_backwards_within_a_backward_lose_no_gradient(
    number: int, factory: Callable[[], nn.Module], transport: str
) -> None:
    """From the first step on, in which nobody knows yet how many gradients each parameter gets."""
    for micro_steps in (1, 2):
        task = Task(factory=factory, micro_steps=micro_steps, steps=3)
        plain = train_plainly(task)
        loops: list[tuple[Train, tuple[int, ...]]] = [
            (loop, STAGES if transport == "gloo" else stages_in_turn(number + micro_steps, turn))
            for turn, loop in enumerate((ordinary_loop, plain_backward))
        ]
        ranks = run_ranks(2, train_each, loops, task, {"comm": {"transport": transport}})
        for turn, (_, stages) in enumerate(loops):
            for stage in stages:
                assert_close([found[turn][stage] for found in ranks], plain)


def plain_backward(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for micro_step in range(task.steps * task.micro_steps):
        loss = engine(*task.data(micro_step, engine.rank))
        loss.backward()
        if engine.step():
            norms.append(engine.grad_norm)
        losses.append(loss.item())
    return losses, norms


# -- several backwards through a graph ----------------------------------------------------------------


def twice_through_one_graph(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    return several(task, engine, lambda loss: (engine.backward(loss, retain_graph=True), engine.backward(loss)))


def gradient_before_backward(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    def backward(loss: torch.Tensor) -> None:
        params = [param for param in engine.module.parameters() if param.requires_grad]
        torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
        engine.backward(loss)
        engine.backward(engine(*batch(77, engine.rank)))

    return several(task, engine, backward)


def several(task: Task, engine: zeroengine.Engine, backward: Callable[[torch.Tensor], Any]) -> Any:
    losses, norms = [], []
    for step in range(task.steps):
        loss = engine(*task.data(step, engine.rank))
        backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.grad_norm)
    return losses, norms


def two_forwards_two_backwards(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(task.steps):
        first, second = engine(*task.data(step, engine.rank)), engine(*task.data(step, engine.rank))
        engine.backward(first)
        engine.backward(second)
        engine.step()
        losses.append(first.item())
        norms.append(engine.grad_norm)
    return losses, norms


def forward_inside_gathered(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(task.steps):
        with zeroengine.gathered(engine.module):
            loss = engine(*task.data(step, engine.rank))
        engine.backward(loss)
        engine.backward(engine(*task.data(step, engine.rank)))
        engine.step()
        losses.append(loss.item())
        norms.append(engine.grad_norm)
    return losses, norms


def doubled(task: Task, *, also: int | None = None) -> Trained:
    """What plain PyTorch trains from twice the gradient, or the gradient of two batches."""
    model = build(task.factory)
    optimizer = task.optimizer(model)
    losses, norms = [], []
    for step in range(task.steps):
        optimizer.zero_grad()
        mean = torch.stack([model(*task.data(step, rank)) for rank in range(2)]).mean()
        (mean if also is not None else 2 * mean).backward()
        if also is not None:
            torch.stack([model(*batch(also, rank)) for rank in range(2)]).mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip).item())
        optimizer.step()
        losses.append(mean.item())
    return Trained(losses, norms, {name: value.clone() for name, value in model.state_dict().items()})


LOOPS: list[tuple[Train, int | None]] = [
    (twice_through_one_graph, None),
    (two_forwards_two_backwards, None),
    (forward_inside_gathered, None),
    (gradient_before_backward, 77),
]


STAGES = (0, 1, 2, 3)


def stages_in_turn(factory: int, loop: int) -> tuple[int, ...]:
    """Two of the stages, so that each loop runs at all stages over the models, and each model over the loops."""
    return ((0, 3), (1, 2))[(factory + loop) % 2]


def train_each(
    loops: list[tuple[Train, tuple[int, ...]]], task: Task, more: dict[str, Any]
) -> list[dict[int, Trained]]:
    start()
    found: list[dict[int, Trained]] = []
    for loop, stages in loops:
        found.append({})
        for stage in stages:
            engine = make_engine(task, stage, **copy.deepcopy(more))
            losses, norms = loop(task, engine)
            found[-1][stage] = Trained(losses, norms, engine.full_state_dict())
            engine.close()
    return found


@SHARED_MEMORY_AND_SLOW_GLOO
@pytest.mark.parametrize(
    ("number", "factory"),
    [*(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, TinyLM), (1, DirectUses))), (2, LossInAttributes)],
)
def test_several_backwards_through_a_graph_add_up(
    number: int, factory: Callable[[], nn.Module], transport: str
) -> None:
    task = Task(factory=factory, steps=3)
    chosen = [STAGES if transport == "gloo" else stages_in_turn(number, loop) for loop in range(len(LOOPS))]
    loops = [(loop, stages) for (loop, _), stages in zip(LOOPS, chosen, strict=True)]
    ranks = run_ranks(2, train_each, loops, task, {"comm": {"transport": transport}})
    for loop, (_, also) in enumerate(LOOPS):
        for stage in chosen[loop]:
            assert_close([found[loop][stage] for found in ranks], doubled(task, also=also))


# -- what shares the memory of a parameter ------------------------------------------------------------


def keep_views(transport: str) -> dict[str, Any]:
    rank = start()
    engine = make_engine(Task(), 3, comm={"transport": transport})
    take_steps(engine, range(2))
    with zeroengine.gathered(engine.module):
        weight = engine.module.blocks[1].up.weight
        shared = weight.detach().cpu()  # no copy
        expected = shared.clone()
    found: dict[str, Any] = {"after gathered": torch.equal(shared, expected)}
    found["counted"] = engine.memory().put_off.get("blocks.1", 0)
    found["others"] = len(engine.memory().put_off)
    found["printed"] = "unit blocks.1" in str(engine.memory())
    losses = take_steps(engine, range(2, 4))
    found["after steps"] = torch.equal(shared, expected)
    with zeroengine.gathered(engine.module):
        found["trained on"] = not torch.equal(shared, weight)
    found["after another step"] = engine.memory().put_off
    del shared
    gc.collect()
    take_steps(engine, range(4, 5))
    found["gathered"] = engine.memory().gathered
    return found | {"losses": losses, "rank": rank}


def keep_none(transport: str) -> list[float]:
    start()
    engine = make_engine(Task(), 3, comm={"transport": transport})
    take_steps(engine, range(2))
    return take_steps(engine, range(2, 4))


@SHARED_MEMORY_AND_SLOW_GLOO
def test_a_tensor_that_shares_a_parameter_keeps_its_values(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = run_ranks(2, keep_none, transport)
    for found, losses in zip(run_ranks(2, keep_views, transport), expected, strict=True):
        assert found["after gathered"] and found["after steps"] and found["trained on"] and found["printed"]
        assert found["counted"] > 0 and found["others"] == 1
        assert found["after another step"] == {}  # the memory is the tensor's own by now
        assert found["gathered"] == 0
        assert found["losses"] == losses


def keep_on_one_rank(transport: str) -> Any:
    rank = start()
    engine = make_engine(Task(), 3, comm={"transport": transport})
    losses = take_steps(engine, range(2))
    with zeroengine.gathered(engine.module):
        shared = engine.module.tok.weight[:2].detach() if rank == 0 else None
    before = None if shared is None else shared.clone()
    losses += take_steps(engine, range(2, 4))
    return losses, shared is None or torch.equal(shared, before)


def test_ranks_may_keep_different_tensors() -> None:
    for transport in ("shm", "gloo"):
        answers = run_ranks(2, keep_on_one_rank, transport)
        expected = run_ranks(2, train_at, (3,), Task(), ordinary_loop, {})
        for (losses, same), (trained,) in zip(answers, expected, strict=True):
            assert same and losses == trained.losses


# -- a graph from before a step -----------------------------------------------------------------------


def backward_after_step(stage: int, transport: str) -> list[str]:
    start()
    engine = make_engine(Task(), stage, comm={"transport": transport})
    old = engine(*batch(0, engine.rank))
    engine.backward(engine(*batch(1, engine.rank)))
    engine.step()
    refused = []
    for backward in (engine.backward, torch.Tensor.backward):
        with pytest.raises((RuntimeError, ValueError)) as error:
            backward(old, retain_graph=True)
        refused.append(str(error.value))
    engine.zero_grad()
    losses = take_steps(engine, range(2, 4))
    assert all(loss == loss for loss in losses)
    return refused


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
def test_backward_through_a_forward_from_before_a_step_is_refused(stage: int) -> None:
    for transport in ("shm", "gloo"):
        for messages in run_ranks(2, backward_after_step, stage, transport):
            for message in messages:
                assert "has been changed since" in message or "modified by an inplace operation" in message


# -- forwards that end without a word -----------------------------------------------------------------


def interrupted(transport: str) -> list[list[float]]:
    start()
    found = []
    for how in ("nothing", "interrupt", "module interrupted", "hook"):
        engine = make_engine(Task(), 3, comm={"transport": transport})
        losses = take_steps(engine, range(1))
        block = engine.module.blocks[1]

        def stop(*_: Any, how: str = how) -> None:
            raise ValueError("from a hook of the user's") if how == "hook" else KeyboardInterrupt()

        if how != "nothing":
            module = block if how == "hook" else block.up
            handle = module.register_forward_pre_hook(stop, prepend=True)
            with pytest.raises((KeyboardInterrupt, ValueError)):
                (engine.module if how == "module interrupted" else engine)(*batch(5, engine.rank))
            handle.remove()
        found.append(losses + take_steps(engine, range(1, 4)))
        assert engine.memory().gathered == 0
        engine.close()
    return found


@SHARED_MEMORY_AND_SLOW_GLOO
def test_a_forward_that_was_interrupted_leaves_nothing_behind(transport: str) -> None:
    for losses in run_ranks(2, interrupted, transport):
        assert losses[1:] == losses[:1] * 3


# -- hooks --------------------------------------------------------------------------------------------


class Queries(TinyLM):
    """Gives each block a parameter as an argument."""

    class Querying(Block):
        def forward(self, x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x + query)

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Queries.Querying() for _ in range(3))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x, self.query)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def count_hooks() -> tuple[int, int]:
    start()
    engine = make_engine(Task(factory=Queries), 3)
    counts = []
    for step in range(3):
        take_steps(engine, range(step, step + 1))
        with zeroengine.gathered(engine.module.query):
            counts.append(len(engine.module.query._backward_hooks or {}))
    return counts[0], counts[-1]


def test_a_parameter_that_is_an_argument_collects_no_hooks() -> None:
    check_every_stage(Task(factory=Queries))
    for first, last in run_ranks(2, count_hooks):
        assert first == last == 0


# -- ranks that differ --------------------------------------------------------------------------------


class ReadsOnOneRank(TinyLM):
    """Its backward reads a weight on one rank alone."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.tok(ids))
        x = self.norm(x).flatten(0, 1)
        function = ReadsAnotherWeight if torch.distributed.get_rank() == 0 else ReadsNothing
        return F.cross_entropy(self.head(function.apply(x, self.blocks[1].up.weight)), labels.flatten())


class ReadsNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class ReadsAnotherWeight(ReadsNothing):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * (1 + ctx.weight.mean()), None


def read_on_one_rank(transport: str) -> str:
    start()
    engine = make_engine(Task(factory=ReadsOnOneRank), 3, comm={"transport": transport, "timeout_seconds": 4})
    try:
        take_steps(engine, range(3))
    except zeroengine.DivergenceError as error:
        return str(error)
    return "no error"


@SHARED_MEMORY_AND_SLOW_GLOO
def test_a_use_on_one_rank_alone_is_an_error_that_names_the_parameter(transport: str) -> None:
    messages = run_ranks(2, read_on_one_rank, transport)
    assert any("blocks.1" in message for message in messages), messages
    assert "no error" not in messages
