"""A model that is split over ranks trains as plain PyTorch does, at every stage, and its states are partitioned."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import zeroengine
from tests.distributed.models import batch
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    Task,
    Train,
    Trained,
    assert_same_bits,
    start,
    take_steps,
    train_at,
    train_plainly,
)
from tests.emulated import cpu_alone
from tests.slices.split_models import (
    adapted_lm,
    by_sample_group,
    make_split_engine,
    small_lm,
    split_task,
    tied_lm,
    uneven_lm,
    untied_lm,
)

pytestmark = cpu_alone("the ranks of a model group talk over Gloo")

ALL_STAGES = (0, 1, 2, 3)


# -- models and loops ---------------------------------------------------------------------------------


def frozen_lm() -> nn.Module:
    """Return a model whose first block is frozen, and of the second a split and a whole parameter."""
    model = small_lm()
    for param in (*model.blocks[0].parameters(), model.blocks[1].up.bias, model.blocks[1].norm.bias):
        param.requires_grad_(False)
    return model


def checkpointed_lm(use_reentrant: bool) -> nn.Module:
    model = small_lm()
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=use_reentrant)
    return model


def split_by_torch(dimension: str) -> nn.Module:
    """Return a model that torch's own calls have split, over one dimension of a mesh of 2 x 2 ranks."""
    start()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("first", "last"))[dimension]
    model = small_lm()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def with_evaluations(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """Evaluate before each step, which changes nothing."""
    losses, norms = [], []
    for step in range(task.steps):
        engine.eval()
        with torch.no_grad():
            before = engine(*batch(step, engine.sample_group))
        engine.train()
        found = by_sample_group(Task(steps=1, data=lambda _, rank, step=step: batch(step, rank)), engine)
        assert found[0] == [before.item()]
        losses += found[0]
        norms += found[1]
    return losses, norms


def plain_backwards(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """Train with ``loss.backward()`` and the caller's optimizer, as plain PyTorch does."""
    losses, norms = [], []
    for step in range(task.steps):
        loss = engine(*batch(step, engine.sample_group))
        loss.backward()
        engine.step()
        assert engine.grad_norm is not None
        losses.append(loss.item())
        norms.append(engine.grad_norm)
    return losses, norms


# -- numbers ------------------------------------------------------------------------------------------


TASK = Task(small_lm, steps=3)


@dataclass(frozen=True)
class Case:
    """A training of a split model, and how near to plain PyTorch it is to be.

    Attributes:
        task: What plain PyTorch trains.
        loop: Of the engine.
        more: Further keys of the configuration.
        stages: Trained one after another.
        same_bits: Whether the stages compute the same bits. With accumulation, micro-steps or ranks are added first.
        factory: What the engine trains, if it is not the model of ``task`` split by ``PLAN``.
        tolerance: Of losses and parameters.
    """

    task: Task = TASK
    loop: Train = by_sample_group
    more: Mapping[str, Any] = field(default_factory=dict)
    stages: Sequence[int] = (1, 3)
    same_bits: bool = True
    factory: Any = None
    tolerance: float = 1e-5

    def split(self, size: int) -> Task:
        return split_task(self.task, size) if self.factory is None else Task(self.factory, steps=self.task.steps)


# DeepSpeed's words for the layers of the plan, the embedding and the head.
SPECS = [
    {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.down\.weight$", r"tok\.weight$"], "partition_type": "row"},
    {"patterns": [r"head\.weight$"], "partition_type": "column", "gather_output": True},
]
LAYER_SPECS = {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": SPECS}}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
NVME = {"offload_optimizer": {"device": "nvme", "nvme_path": tempfile.gettempdir()}}
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
CASES = {
    "ordinary": Case(stages=ALL_STAGES),
    "split by torch": Case(factory=functools.partial(split_by_torch, "last"), stages=(3,)),
    "ranks that are no neighbors": Case(factory=functools.partial(split_by_torch, "first"), stages=(3,)),
    "uneven slices": Case(Task(uneven_lm, steps=3)),
    "split embedding and head": Case(Task(untied_lm, steps=3)),
    "layer_specs": Case(Task(untied_lm, steps=3), more=LAYER_SPECS, factory=untied_lm),
    "tied embedding and head": Case(Task(tied_lm, steps=3)),
    "accumulation": Case(Task(small_lm, steps=2, micro_steps=2), same_bits=False),
    "clipping": Case(Task(small_lm, steps=3, clip=0.1), stages=(3,)),
    "no clipping": Case(Task(small_lm, steps=3, clip=0.0), stages=(3,)),
    "adapters": Case(Task(adapted_lm, steps=3)),
    "frozen parts": Case(Task(frozen_lm, steps=3)),
    "reentrant checkpoints": Case(Task(functools.partial(checkpointed_lm, True), steps=3), stages=(3,)),
    "checkpoints": Case(Task(functools.partial(checkpointed_lm, False), steps=3), stages=(3,)),
    "evaluations": Case(loop=with_evaluations, stages=(3,)),
    "plain backwards": Case(loop=plain_backwards, stages=(3,)),
    "offload": Case(more={"zero_optimization": OFFLOAD}, stages=(3,)),
    "states on NVMe": Case(more={"zero_optimization": NVME}, stages=(3,)),
    "copies of parameters": Case(more={"zero_optimization": {"degrees": {"secondary_parameters": 1}}}, stages=(3,)),
    "shards of two ranks": Case(more={"zero_optimization": {"mics_shard_size": 2}}, stages=(3,)),
    "8 bits on the way": Case(more={"zero_optimization": QUANTIZED}, stages=(3,), tolerance=5e-2),
    "Gloo": Case(more={"comm": {"transport": "gloo"}}, stages=(3,)),
    "bf16": Case(more={"bf16": {"enabled": True}}, tolerance=2e-2),
    "fp16": Case(more={"fp16": {"enabled": True, "initial_scale_power": 8}}, tolerance=5e-3),
}


# Each is near to another one, or to one of whole parameters.
SLOW = (
    *("no clipping", "frozen parts", "checkpoints", "evaluations", "plain backwards"),
    *("offload", "copies of parameters", "Gloo", "bf16"),
)


def train_cases(names: Sequence[str], size: int) -> dict[str, list[Trained]]:
    """On one rank: each case at each of its stages."""
    return {
        name: train_at(CASES[name].stages, CASES[name].split(size), CASES[name].loop, CASES[name].more)
        for name in names
    }


def check(name: str, ranks: Sequence[Sequence[Trained]], num_groups: int) -> None:
    """Check that the ranks together have seen what plain PyTorch has seen."""
    case, plain = CASES[name], train_plainly(CASES[name].task, num_groups)
    norm_tolerance = 1e-6 if case.tolerance == 1e-5 else 10 * case.tolerance
    for number, stage in enumerate(case.stages):
        found = [rank[number] for rank in ranks]
        means = [sum(losses) / len(ranks) for losses in zip(*(trained.losses for trained in found), strict=True)]
        assert means == pytest.approx(plain.losses, rel=case.tolerance), stage
        for rank, trained in enumerate(found):
            assert trained.norms == pytest.approx(plain.norms, rel=norm_tolerance), stage
            assert trained.state.keys() == plain.state.keys()
            for key, value in trained.state.items():
                torch.testing.assert_close(
                    value.float(), plain.state[key], rtol=10 * case.tolerance, atol=case.tolerance, msg=f"{stage} {key}"
                )
            if case.same_bits:
                assert_same_bits(trained, ranks[rank][0], f"stage {stage}")


@pytest.fixture(scope="module")
def trained() -> list[dict[str, list[Trained]]]:
    """What each of 4 ranks saw, of two slices of the model: many cases in one start of the ranks."""
    return run_ranks(4, train_cases, tuple(name for name in CASES if name not in SLOW), 2, timeout=180)


@pytest.mark.parametrize("name", [name for name in CASES if name not in SLOW])
def test_two_slices_train_as_plain_pytorch_does(name: str, trained: list[dict[str, list[Trained]]]) -> None:
    check(name, [found[name] for found in trained], num_groups=2)


def test_model_groups_see_their_own_samples_and_the_ranks_of_one_the_same_losses(
    trained: list[dict[str, list[Trained]]],
) -> None:
    first, second, third, fourth = (found["ordinary"][0].losses for found in trained)
    assert first == second and third == fourth
    assert first[0] != third[0]


def test_layer_specs_and_a_plan_split_alike(trained: list[dict[str, list[Trained]]]) -> None:
    for found in trained:
        for by_specs, by_plan in zip(found["layer_specs"], found["split embedding and head"], strict=True):
            assert_same_bits(by_specs, by_plan)


def test_parallelize_and_torch_split_alike(trained: list[dict[str, list[Trained]]]) -> None:
    for found in trained:
        assert_same_bits(found["ordinary"][0], found["split by torch"][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_two_slices_train_as_plain_pytorch_does_in_other_ways(name: str) -> None:
    check(name, [found[name] for found in run_ranks(4, train_cases, (name,), 2)], num_groups=2)


@pytest.mark.slow  # 8 ranks
def test_shards_of_two_of_four_data_ranks_train_as_plain_pytorch_does() -> None:
    name = "shards of two ranks"
    check(name, [found[name] for found in run_ranks(8, train_cases, (name,), 2)], num_groups=4)


@pytest.mark.slow  # as with two slices, over one data rank
@pytest.mark.parametrize("name", ["ordinary", "uneven slices", "split embedding and head"])
def test_four_slices_train_as_plain_pytorch_does(name: str) -> None:
    check(name, [found[name] for found in run_ranks(4, train_cases, (name,), 4)], num_groups=1)


# -- skipped steps, and bytes -------------------------------------------------------------------------

WIDE = 128  # the parameters of a block are many times the padding


class WideLM(nn.Module):
    """Blocks whose states are large beside their padding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential() for _ in range(2))
        for block in self.blocks:
            block.up, block.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block.down(block.up(x).relu())
        return x.square().mean()


def states_after_a_step(stages: Sequence[int], more: Mapping[str, Any]) -> list[tuple[zeroengine.Memory, int]]:
    """On one rank: the memory of an engine at each stage, and the number of its units."""
    found = []
    for stage in stages:
        engine = make_split_engine(2, stage, WideLM, more)
        engine.backward(engine(torch.ones(1, WIDE)))
        engine.step()
        found.append((engine.memory(), len(engine._parts.partition.units)))
        engine.close()
    return found


def overflow_on_one_rank() -> tuple[list[int], list[float], bool]:
    """On one rank: the skipped steps so far, the loss scales, and whether the skipped step changed a parameter."""
    engine = make_split_engine(2, 3, more={"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}})
    param = engine.module.blocks[1].up.weight
    overflows = False

    def overflow(gradient: torch.Tensor) -> None:
        if overflows and engine.rank == 3:
            gradient.to_local()[0, 0] = float("inf")  # type: ignore[attr-defined]

    param.register_hook(overflow)
    skipped, scales, states = [], [], []
    for step in range(3):
        overflows = step == 1
        engine.backward(engine(*batch(step, engine.sample_group)))
        engine.step()
        skipped.append(engine.skipped_steps)
        scales.append(engine.loss_scale)
        states.append(engine.full_state_dict())
    changed = any(not torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not all(torch.equal(states[1][key], states[2][key]) for key in states[1])
    assert engine.memory().gathered == 0
    engine.close()
    return skipped, scales, changed


def records(folder: str) -> list[dict[str, Any]]:
    """On one rank: train with a run folder. Return the records of the steps on rank 0."""
    engine = make_split_engine(2, 3, more={"monitor": {"folder": folder}})
    take_steps(engine, range(2), share=engine.sample_group)
    engine.close()
    if engine.rank:
        return []
    return [json.loads(line) for line in Path(folder, "steps.jsonl").read_text().splitlines()]


def test_a_record_counts_the_samples_of_a_model_group_once(tmp_path: Path) -> None:
    ids = batch(0, 0)[0]
    for record in (found := run_ranks(4, records, str(tmp_path / "run"))[0]):
        # There are two model groups.
        assert (record["samples"], record["tokens"]) == (2 * len(ids), 2 * ids.numel())
    assert found


def samples() -> tuple[list[int], list[torch.Tensor]]:
    """On one rank: the sample group, the groups' number and the batch size; and what the loader of the engine gives."""
    engine = make_split_engine(2, 3)
    numbers = [engine.sample_group, engine.num_sample_groups, engine.config.train_batch_size]
    batches = [ids for (ids,) in engine.dataloader(TensorDataset(torch.arange(12)))]
    engine.close()
    return numbers, batches


def observe() -> tuple[Any, Any, Any, Any]:
    bf16 = {"bf16": {"enabled": True}}
    return states_after_a_step(ALL_STAGES, {}), states_after_a_step((3,), bf16), overflow_on_one_rank(), samples()


@pytest.fixture(scope="module")
def observed() -> list[tuple[Any, Any, Any, Any]]:
    return run_ranks(4, observe)


def test_ranks_of_a_model_group_load_the_same_samples_and_groups_others(observed: list[Any]) -> None:
    numbers, batches = zip(*(samples for *_, samples in observed), strict=True)
    # Each group takes batches of 2.
    assert numbers == ([0, 2, 4], [0, 2, 4], [1, 2, 4], [1, 2, 4])
    loaded = [torch.cat(own).tolist() for own in batches]
    assert loaded[0] == loaded[1] and loaded[2] == loaded[3]
    assert sorted(loaded[0] + loaded[2]) == list(range(12))


def test_an_overflow_in_the_slice_of_one_rank_skips_the_step_on_all(observed: list[Any]) -> None:
    for _, _, (skipped, scales, changed), _ in observed:
        assert skipped == [0, 1, 1]
        assert scales == [256.0, 128.0, 128.0]
        assert not changed


def test_states_take_the_bytes_of_the_slice_over_the_ranks_that_have_it(observed: list[Any]) -> None:
    split, whole = 2 * (2 * 4 * WIDE * WIDE + 4 * WIDE), 2 * WIDE
    numel = split // 2 + whole
    for in_fp32, in_bf16, *_ in observed:
        for stage, (memory, num_units) in zip((*ALL_STAGES, "bf16"), (*in_fp32, *in_bf16), strict=True):
            size, masters = (2, 4) if stage == "bf16" else (4, 0)
            degrees = {0: (1, 1, 1), 1: (1, 1, 2), 2: (1, 2, 2), 3: (2, 2, 2), "bf16": (2, 2, 2)}[stage]
            expected = {
                "parameters": size * numel // degrees[0],
                "gradients": size * numel // degrees[1],
                "master": masters * numel // degrees[2],
                "optimizer": 8 * numel // degrees[2],
            }
            for state, nbytes in expected.items():
                # The shard of each of the two ranks fills whole pages. Two moments are two buffers.
                padding = 2 * 4096 * num_units * (2 if state == "optimizer" else 1) * bool(nbytes)
                assert nbytes <= getattr(memory, state) <= nbytes + padding, (stage, state)
