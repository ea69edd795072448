"""Experts that are split over ranks train as on one rank, and their states are partitioned over those with the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

import zeroengine
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.emulated import cpu_alone

pytestmark = cpu_alone("experts exchange tokens over Gloo")

WIDTH, WORDS, STEPS = 8, 13, 3


class GatherTokens(torch.autograd.Function):
    """The tokens of all ranks of a group, one behind the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return SumParts.apply(grad, ctx.group), None


class SumParts(torch.autograd.Function):
    """This rank's rows of the sum over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total.chunk(group.size())[group.rank()]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return GatherTokens.apply(grad, ctx.group), None


class Experts(nn.Module):
    """Four experts in one tensor, of which each token takes one. Those of a rank compute on the tokens of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        up, down = self.up, self.down
        if not isinstance(up, DTensor):
            return self.compute(x, chosen, up, down, 0)
        mesh = up.device_mesh
        group, own = mesh.get_group(), mesh.get_local_rank()
        tokens, choices = GatherTokens.apply(x, group), GatherTokens.apply(chosen, group)
        parts = self.compute(tokens, choices, up.to_local(), down.to_local(), own * 4 // mesh.size())
        return SumParts.apply(parts, group)

    def compute(
        self, x: torch.Tensor, chosen: torch.Tensor, up: torch.Tensor, down: torch.Tensor, first: int
    ) -> torch.Tensor:
        """The outputs of some experts, from number ``first`` on, and zeros for the tokens of others."""
        result = torch.zeros_like(x)
        for index in range(len(up)):
            rows = (chosen == first + index).nonzero()[:, 0]
            result = result.index_add(0, rows, F.gelu(x[rows] @ up[index]) @ down[index])
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        return x + (self.experts(tokens, chosen) * weights[:, None]).view_as(x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, WORDS, (2, 6), generator=generator)
    return ids, (3 * ids + 1) % WORDS


def build(size: int = 1) -> Mixture:
    """The model, with its experts split over groups of ``size`` ranks."""
    torch.manual_seed(0)
    model = Mixture()
    if size > 1:
        shape = dist.get_world_size() // size, size
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("copies", "experts"))["experts"]
        for block in model.blocks:
            for name, param in list(block.experts.named_parameters()):
                setattr(block.experts, name, nn.Parameter(distribute_tensor(param.data, mesh, [Shard(0)])))
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def make_engine(size: int, stage: int, **more: Any) -> zeroengine.Engine:
    start()
    model = build(size)
    zero = {"stage": stage, "param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5, "zero_optimization": zero}
    return zeroengine.initialize(model, adamw(model), config | more)


def take_steps(engine: zeroengine.Engine, steps: range) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in steps:
        loss = engine(*batch(step, engine.rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        assert engine.grad_norm is not None
        norms.append(engine.grad_norm)
    return losses, norms


def train_plainly(num_ranks: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = build()
    optimizer, losses, norms = adamw(model), [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([model(*batch(step, rank)) for rank in range(num_ranks)]).mean()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


Found = tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def states(engine: zeroengine.Engine) -> dict[str, torch.Tensor]:
    """All masters and moments, whole."""
    named = dict(engine.module.named_parameters())
    masters = {name: zeroengine.full_master(param) for name, param in named.items()}
    keys = ("exp_avg", "exp_avg_sq", "step")
    moments = {(n, key): zeroengine.full_optimizer_state(p, key) for n, p in named.items() for key in keys}
    return masters | {f"{name}.{key}": value for (name, key), value in moments.items()}


def train_and_save(size: int, stages: tuple[int, ...], folder: str) -> list[Found]:
    found = []
    for stage in stages:
        engine = make_engine(size, stage)
        losses, norms = take_steps(engine, range(STEPS))
        assert engine.memory().gathered == 0
        found.append((losses, norms, engine.full_state_dict(), states(engine)))
        if stage == stages[-1] and folder:
            engine.save_checkpoint(folder)
        engine.close()
    return found


def load(size: int, stage: int, folder: str, again: str = "") -> dict[str, torch.Tensor]:
    engine = make_engine(size, stage)
    engine.load_checkpoint(folder)
    found = states(engine)
    if again:
        engine.save_checkpoint(again)
    engine.close()
    return found


def test_experts_train_as_on_one_rank_and_their_checkpoints_load_at_any_number_of_ranks(tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    ranks = run_ranks(4, train_and_save, 2, (0, 1, 2, 3), first, timeout=120)
    losses, norms, state = train_plainly(4)
    for stage in range(4):
        of_stage = [found[stage] for found in ranks]
        means = [sum(values) / 4 for values in zip(*(found[0] for found in of_stage), strict=True)]
        assert means == pytest.approx(losses, rel=1e-5)
        for rank, found in enumerate(of_stage):
            assert found[1] == pytest.approx(norms, rel=1e-6)
            assert found[:2] == ranks[rank][0][:2], "the bits differ between stages"
            for name, value in found[2].items():
                torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-6)
                assert torch.equal(value, ranks[0][0][2][name])
    saved = ranks[0][3][3]
    # Whole experts on three ranks, and back to two groups of two, by way of a checkpoint of the former.
    for found in (run_ranks(3, load, 1, 1, first, second)[0], run_ranks(4, load, 4, 3, second)[0]):
        assert found.keys() == saved.keys()
        assert all(torch.equal(value, saved[name]) for name, value in found.items())


def bytes_and_overflow() -> tuple[tuple[int, int, int], list[int], bool]:
    """Bytes of parameters, gradients and states; the skipped steps; whether the skipped step changed anything."""
    engine = make_engine(4, 3, fp16={"enabled": True, "loss_scale": 4})
    memory = engine.memory()
    sizes = (memory.parameters, memory.gradients, memory.optimizer)
    before, skipped = engine.full_state_dict(), []
    # The gradient of one rank's experts is too large for fp16.
    experts = engine.module.blocks[0].experts.down
    handle = experts.register_hook(lambda grad: grad * (torch.inf if engine.rank == 2 else 1.0))
    take_a_step(engine)
    skipped.append(engine.skipped_steps)
    changed = any(not torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
    handle.remove()
    take_a_step(engine)
    skipped.append(engine.skipped_steps)
    engine.close()
    return sizes, skipped, changed


def assign_gradients(size: int) -> list[torch.Tensor]:
    """On one rank: the gradients of the step after ones were assigned, of experts and of another parameter."""
    engine = make_engine(size, 0)
    take_a_step(engine)
    engine.backward(engine(*batch(1, engine.rank)))
    params = [engine.module.blocks[0].experts.up, engine.module.head.weight]
    for param in params:
        param.grad = torch.ones(param.shape)
    found = [zeroengine.full_gradient(param) for param in params]
    engine.close()
    return found


def test_gradients_that_user_code_assigns_to_experts_are_those_of_the_step() -> None:
    for found in run_ranks(4, assign_gradients, 2):
        assert all(gradient.eq(1).all() for gradient in found)


def take_a_step(engine: zeroengine.Engine) -> None:
    engine.backward(engine(*batch(0, engine.rank)))
    engine.step()


def test_an_overflow_in_one_ranks_experts_skips_the_step_of_all_and_states_take_no_more_than_the_slices() -> None:
    numel_of_experts = 2 * 4 * 2 * 2 * WIDTH * WIDTH
    rest = sum(param.numel() for name, param in build().named_parameters() if "experts" not in name)
    for (parameters, gradients, optimizer), skipped, changed in run_ranks(4, bytes_and_overflow, timeout=100):
        assert skipped == [1, 1] and not changed
        # A rank has a fourth of the experts by itself, and a fourth of the rest; shards are padded.
        own, padding = (numel_of_experts + rest) / 4, 6 * 4096
        for found, size in ((parameters, 2), (gradients, 2), (optimizer, 12)):
            assert own * size <= found <= own * size + size * padding
