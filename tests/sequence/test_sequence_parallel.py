"""Ranks that share samples train as one rank with the whole samples does."""

from __future__ import annotations

import copy
import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zeroengine
from tests.distributed.imagined_hosts import imagine_hosts
from tests.distributed.models import build, config
from tests.distributed.quantized_models import Adapted, Linear4bit
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, Trained, start, train_plainly
from tests.nccl_over_gloo import use_nccl_transport
from tests.sequence.models import TASK, CausalLM, call_not_reentrant, call_reentrant, sample, train

TOLERANCE = 1e-6
RANKS = 4


def partly_frozen() -> CausalLM:
    model = CausalLM(call_reentrant)
    for part in (model.tokens, model.positions, model.blocks[0].norm, model.blocks[1].attention.key):
        part.requires_grad_(False)
    return model


def save_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "mm" in str(operation) else CheckpointPolicy.PREFER_RECOMPUTE


def call_selective(module: nn.Module, *args: Any) -> torch.Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    output: torch.Tensor = checkpoint(module, *args, use_reentrant=False, context_fn=contexts)
    return output


def count_compilations() -> int:
    """Train blocks that are compiled, and return how many graphs the first step has compiled."""
    start()
    number = 0

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal number
        number += 1
        return graph.forward

    model = build(CausalLM)
    model.blocks[0].compile(backend=count)
    engine = zeroengine.initialize(model, config=config(1, sequence_parallel_size=2))
    ids, labels = sample(0, 0)
    engine(**zeroengine.shard_sequence({"input_ids": ids, "labels": labels}))
    engine.close()
    return number


@pytest.mark.slow
def test_the_check_of_a_model_compiles_nothing() -> None:
    # One graph before the exchange of heads, one between both exchanges, and what follows.
    assert max(run_ranks(2, count_compilations)) <= 6


def on_quantized_base() -> CausalLM:
    """Adapters on frozen matrices of 4 bits."""
    model = CausalLM(call_not_reentrant)
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("up", "down"):
            shape = getattr(block, name).weight.T.shape
            setattr(block, name, Adapted(Linear4bit(*shape), *shape))
    for parameter in model.parameters():
        if hasattr(parameter, "_quantize"):
            parameter._quantize("cpu")
    return model


def compiled() -> CausalLM:
    model = CausalLM()
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for name, parameter in model.named_parameters() if "blocks" in name and parameter.dim() == 2]
    ids = set(map(id, matrices))
    others = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    return zeroengine.MixedOptimizer(
        [zeroengine.Muon(matrices, lr=1e-2, ns_dtype="fp32"), torch.optim.AdamW(others, lr=3e-3, eps=1e-4)]
    )


def with_factory(factory: Any) -> Task:
    return dataclasses.replace(TASK, factory=factory)


# The task, and keys of the configuration.
Case = tuple[Task, dict[str, Any]]
CASES: dict[str, Case] = {
    "plain": (TASK, {}),
    "accumulation": (dataclasses.replace(TASK, steps=2, micro_steps=3), {}),
    "partly frozen in reentrant checkpoints": (with_factory(partly_frozen), {}),
    "checkpoints": (with_factory(functools.partial(CausalLM, call_not_reentrant)), {}),
    "selective checkpoints": (with_factory(functools.partial(CausalLM, call_selective)), {}),
    "compiled blocks": (with_factory(compiled), {}),
    "gloo": (TASK, {"comm": {"transport": "gloo"}}),
    "hpz": (TASK, {"zero_optimization": {"zero_hpz_partition_size": 2}}),
    "mics": (TASK, {"zero_optimization": {"mics_shard_size": 2}}),
    "cpu": (TASK, {"zero_optimization": {n: {"device": "cpu"} for n in ("offload_param", "offload_optimizer")}}),
    "nvme": (
        TASK,
        {
            "zero_optimization": {
                n: {"device": "nvme", "nvme_path": tempfile.gettempdir()}
                for n in ("offload_param", "offload_optimizer")
            }
        },
    ),
    "ema": (TASK, {"ema": {"decay": 0.9}}),
    "quantized base": (with_factory(on_quantized_base), {}),
    "muon": (dataclasses.replace(TASK, optimizer=muon), {}),
}
# The case, the stage and the degree.
Run = tuple[str, int, int]
NORMAL: list[Run] = [
    ("plain", 0, 4),
    ("accumulation", 1, 2),
    ("partly frozen in reentrant checkpoints", 3, 4),
    ("gloo", 2, 4),
    ("mics", 3, 4),
    ("quantized base", 3, 4),
]
ALL: list[Run] = [
    (case, stage, degree)
    for case, (_, more) in CASES.items()
    for stage in ((3,) if "zero_optimization" in more else range(4))
    for degree in (1, 2, 4)
]


def task_of(case: str, steps: int | None) -> Task:
    task = CASES[case][0]
    return task if steps is None else dataclasses.replace(task, steps=steps)


def train_all(
    runs: Sequence[Run], hosts: Sequence[int] = (), nccl: bool = False, steps: int | None = None
) -> list[Trained]:
    start()
    if hosts:
        imagine_hosts(*hosts)
    with pytest.MonkeyPatch.context() as patch:
        if nccl:
            use_nccl_transport(patch)
        found = []
        for case, stage, degree in runs:
            found.append(train(task_of(case, steps), stage, degree, **copy.deepcopy(CASES[case][1])))
    return found


def check(runs: Sequence[Run], hosts: Sequence[int] = (), nccl: bool = False, steps: int | None = None) -> None:
    ranks = run_ranks(RANKS, train_all, runs, hosts, nccl, steps, timeout=1200)
    for number, (case, stage, degree) in enumerate(runs):
        plain = train_plainly(task_of(case, steps), RANKS // degree)
        where = f"{case}, stage {stage}, degree {degree}"
        groups = [ranks[first : first + degree] for first in range(0, RANKS, degree)]
        for group in groups:
            assert len({tuple(rank[number].losses) for rank in group}) == 1, where
        losses = zip(*(group[0][number].losses for group in groups), strict=True)
        assert [sum(row) / len(groups) for row in losses] == pytest.approx(plain.losses, rel=0, abs=TOLERANCE), where
        for rank in ranks:
            assert rank[number].norms == pytest.approx(plain.norms, rel=TOLERANCE), where
            for name, value in rank[number].state.items():
                torch.testing.assert_close(value, plain.state[name], rtol=0, atol=5e-6, msg=f"{where}: {name}")


def test_degrees_train_as_plain_pytorch_on_the_whole_samples() -> None:
    check(NORMAL)


@pytest.mark.slow
def test_all_stages_and_degrees_train_as_plain_pytorch_in_all_cases() -> None:
    check(ALL, steps=20)


@pytest.mark.parametrize(
    ("hosts", "degree"),
    [((2,), 2), pytest.param((1,), 2, marks=pytest.mark.slow), ((2,), 4)],
    ids=["inside hosts", "hosts of 1 rank", "across hosts"],
)
def test_groups_may_be_inside_a_host_or_across(hosts: Sequence[int], degree: int) -> None:
    # Across hosts of several ranks, a rank that waits for tokens also takes the steps of gathers within its host.
    check([("plain", 3, degree)], hosts)


@pytest.mark.slow
def test_nccl_exchanges_among_some_of_the_ranks() -> None:
    check([("plain", 3, 2), ("plain", 1, 4), ("mics", 3, 2)], nccl=True, steps=20)


INEXACT: list[dict[str, Any]] = [
    {"bf16": {"enabled": True}},
    {"zero_optimization": {"zero_quantized_weights": True, "zero_quantized_gradients": True}},
]


def inexact() -> list[list[list[float]]]:
    start()
    return [[train(TASK, 3, degree, **copy.deepcopy(more)).losses for degree in (1, 4)] for more in INEXACT]


@pytest.mark.slow
def test_low_precision_and_quantized_communication_train_with_parts() -> None:
    ranks = run_ranks(RANKS, inexact)
    for number in range(len(INEXACT)):
        expected = train_plainly(TASK, 1).losses
        assert ranks[0][number][1] == pytest.approx(expected, abs=0.03)


def resume(folder: Path) -> dict[str, list[float]]:
    """Train at a degree, save within an epoch, and go on at each degree from there, with evaluations in between."""
    start()
    # All samples have equally many labels, so the mean over a group is that over its samples.
    data = [{"input_ids": ids[1], "labels": labels[1]} for ids, labels in (sample(n, 0) for n in range(16))]
    losses: dict[str, list[float]] = {}
    for degree, tag in ((2, "from 2"), (4, "at 4"), (1, "at 1")):
        # The samples of a step are the same at all degrees.
        settings = config(3, train_micro_batch_size_per_gpu=degree, sequence_parallel_size=degree)
        engine = zeroengine.initialize(build(CausalLM), config=settings)
        loader = engine.dataloader(data, shuffle=True)  # type: ignore[arg-type]
        if degree != 2:
            engine.load_checkpoint(folder)
        losses[tag] = []
        for step, batch in enumerate(loader):
            loss = engine(**batch)
            engine.backward(loss)
            engine.step()
            with torch.no_grad():
                engine(**batch)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses[tag].append(mean.item() / dist.get_world_size())
            if degree == 2 and step == 1:
                engine.save_checkpoint(folder)
        engine.close()
    return losses


def test_a_checkpoint_and_its_place_in_the_data_load_at_other_degrees(tmp_path: Path) -> None:
    losses = run_ranks(RANKS, resume, tmp_path)[0]
    assert len(losses["from 2"]) == 4
    assert losses["at 4"] == pytest.approx(losses["from 2"][2:], rel=0, abs=TOLERANCE)
    assert losses["at 1"] == pytest.approx(losses["from 2"][2:], rel=0, abs=TOLERANCE)
