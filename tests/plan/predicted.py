"""Trains small models at many settings on one set of ranks, and compares what they hold with what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.distributed.experts import ExpertsLM, Style, draw
from tests.distributed.fake_group import init_fake_group
from tests.distributed.models import TinyLM, batch, build
from zeroengine.config import Config, load
from zeroengine.memory.state_bytes import STATES, RankTopology, StateBytes, planned_units, predict_states
from zeroengine.optim.algorithms import algorithms_of
from zeroengine.optim.mixed_optimizer import MixedOptimizer
from zeroengine.optim.muon import Muon
from zeroengine.partition.cut import UnitPlan
from zeroengine.plan.seconds.host_traffic import HostTraffic
from zeroengine.plan.seconds.step_collectives import StepCollectives
from zeroengine.plan.trace.model_facts import from_module
from zeroengine.plan.trace.split_layers import split_facts
from zeroengine.runtime.mixed_precision import units_of_model

Inputs = tuple[Any, ...]


class Odd(nn.Module):
    """Tied, frozen, empty and fp64 parameters, and modules inside a module with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.nothing = nn.Parameter(torch.empty(0))
        self.body = TinyLM(tied=True)
        self.frozen = nn.Linear(70, 70).requires_grad_(False)
        self.wide = nn.Linear(5, 7).double()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        more = self.frozen(self.frozen.weight.new_ones(2, 70)).mean()
        wide = self.wide(self.wide.weight.new_ones(2, 5)).mean()
        return self.body(ids, labels) * self.scale.mean() + more + wide + self.nothing.sum()


class Wide(nn.Module):
    """Units of parameters large and small, whose moments have 8 bits and fp32 where a configuration asks for 8."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 211), nn.Linear(211, 24)) for _ in range(2))
        self.body = TinyLM(tied=True)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.body.norm.weight.new_ones(2, 24)
        for layer in self.layers:
            x = layer(x)
        return self.body(ids, labels) + x.float().mean()


FAMILIES = ("gpt2", "llama", "mixtral", "vit", "t5")
ADAMW = {"type": "AdamW", "params": {"lr": 1e-4}}


def family(name: str) -> tuple[Callable[[], nn.Module], Callable[[int, int], Inputs]]:
    """A model's factory, and its inputs by micro-step and rank."""
    own: dict[str, Callable[[], nn.Module]] = {"tiny": TinyLM, "odd": Odd, "wide": Wide}
    if name in own:
        return own[name], batch
    if name == "experts":
        return partial(ExpertsLM, Style()), lambda number, rank: (*batch(number, rank, 1), draw(number, rank, 1, 3))
    # These import transformers, which takes seconds.
    from tests.models import test_families, test_transformers

    test_transformers.quietly(lambda: None)
    if name == "mixtral":
        return test_families.FAMILIES[name]
    return getattr(test_transformers, name), test_transformers.images if name == "vit" else test_transformers.text


@dataclass(frozen=True)
class Case:
    """A model and a configuration. ``disk`` stands for a folder in every value. No optimizer stands for ``mixed``."""

    model: str
    stage: int
    optimizer: Mapping[str, Any] = field(default_factory=lambda: ADAMW)
    zero: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    micro_steps: int = 1

    def config(self, disk: str) -> dict[str, Any]:
        zero = {"stage": self.stage, "param_persistence_threshold": 0, **self.zero}
        zero = {
            key: {k: disk if v == "disk" else v for k, v in value.items()} if isinstance(value, dict) else value
            for key, value in zero.items()
        }
        return {
            "zero_optimization": zero,
            **({"optimizer": dict(self.optimizer)} if self.optimizer else {}),
            "gradient_accumulation_steps": self.micro_steps,
            "check_grad_overflow": False,
            **self.more,
        }


@dataclass(frozen=True)
class Outcome:
    """What one rank held after its steps and at its most, and what was predicted."""

    case: Case
    memory: zeroengine.Memory
    most_gathered: int
    predicted: StateBytes


def predict(model: nn.Module, config: Mapping[str, Any], topology: RankTopology) -> StateBytes:
    """``predict_states`` for a model on the meta device, and the optimizer of the configuration."""
    num_ranks, keys = topology.world_size * topology.num_replicas, load(config)
    size = max(keys.tensor_parallel.autotp_size, 1)
    resolved = resolve(config, model, num_ranks // size)
    facts = split_facts(from_module(model), size, keys.expert_parallel.size, num_ranks, None)
    optimizer = mixed(model) if resolved.optimizer is None else facts.optimizer(resolved)
    assert optimizer is not None
    plans = units_of_model(facts.model, resolved, algorithms_of(optimizer, facts.model, resolved))
    return predict_states(plans, resolved, topology, optimizer)


def mixed(model: nn.Module) -> MixedOptimizer:
    """Optimizers of three rules: at owners by directions, at owners by whole parameters, and by elements."""
    params = [param for param in model.parameters() if param.requires_grad]
    matrices, vectors = ([p for p in params if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    muon, others = Muon(matrices[::2], lr=1e-3), torch.optim.Adafactor(matrices[1::2])
    return MixedOptimizer([muon, others, torch.optim.RAdam(vectors, lr=1e-3)])


def bytes_between_hosts(
    plans: Sequence[UnitPlan], config: Config, topology: RankTopology, micro_steps: int = 1
) -> float:
    """What the first host sends to the others in a step."""
    units, _ = planned_units(plans, config, topology)
    step, traffic = StepCollectives.of_units(units, micro_steps), HostTraffic.of_units(units, config, topology)
    gathers = [*step.first, *step.updates, *((micro_steps - 1) * [*step.later]), *(micro_steps * [*step.backward])]
    reduces = [*(micro_steps * [*step.sharded]), *step.whole]
    return sum(map(traffic.gather_bytes, gathers)) + sum(map(traffic.reduce_bytes, reduces))


def resolve(config: Mapping[str, Any], model: nn.Module, world_size: int) -> Config:
    return load(config).resolve(world_size=world_size, model_dtype=next(model.parameters()).dtype)


def outcome(case: Case, transport: str, world_size: int, disk: str) -> Outcome:
    """Train two steps of a case on the ranks that were started."""
    factory, data = family(case.model)
    # Where it can, "auto" takes shared memory.
    config = case.config(disk) | {"comm": {"transport": "gloo" if transport == "gloo" else "auto"}}
    num_slices = config.get("tensor_parallel", {}).get("autotp_size", 1)
    replica_ranks = config.get("local_steps", {}).get("replica_ranks", world_size // num_slices)
    own_transport = transport if replica_ranks > 1 else "single"
    topology = RankTopology(replica_ranks, "cpu", own_transport, 1, world_size // replica_ranks, transport)
    with torch.device("meta"):
        predicted = predict(factory(), config, topology)
    model = build(factory)
    engine = zeroengine.initialize(model, None if case.optimizer else mixed(model), config=config)
    planned = engine._parts.setup.state_memory
    # Values of a model on the meta device take no memory at the start.
    at_start = {"peak_device_extra": 0, "peak_cpu_extra": 0}
    assert replace(planned.requirement(planned.current()).states, **at_start) == replace(predicted, **at_start)
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, engine.memory().gathered)

    for module in engine.module.modules():
        module.register_forward_pre_hook(look)
        module.register_forward_hook(look)
    for param in engine.module.parameters():
        param.register_post_accumulate_grad_hook(look) if param.requires_grad else None
    for micro_step in range(2 * case.micro_steps):
        inputs = data(micro_step, engine.sample_group)
        result = engine(**inputs[0]) if isinstance(inputs[0], dict) else engine(*inputs)
        engine.backward(result if isinstance(result, torch.Tensor) else result.loss)
        engine.step()
    memory = engine.memory()
    if transport == "shm" and not case.zero and "local_steps" not in case.more:
        assert memory.staging == predicted.device["staging"], "memory of an exchange is kept, and equal on all ranks"
    engine.close()
    return Outcome(case, memory, most, predicted)


def outcomes(cases: list[Case], transport: str, world_size: int, disk: str) -> list[Outcome]:
    """On a rank: train every case. Over "fake" and "single" this process is the only one."""
    torch.set_num_threads(1)
    if transport == "fake":
        init_fake_group(world_size)
    elif not dist.is_initialized():
        dist.init_process_group("gloo")
    return [outcome(case, transport, world_size, disk) for case in cases]


def assert_as_predicted(outcome: Outcome, rank: int = 0) -> None:
    """The four states to the byte where shards are equal, and buffers at most as many as predicted."""
    memory, predicted = outcome.memory, outcome.predicted
    found = {name: getattr(memory, name) for name in STATES}
    expected = {name: predicted.device[name] for name in STATES}
    where = (outcome.case, rank)
    if rank:
        # Optimizers of torch keep no state for padding, which lies in the shards of the last ranks, and a step count of
        # each parameter in a shard. Those that update whole parameters keep that of other ones.
        share = 1.01 if outcome.case.optimizer.get("type", "").startswith(("Adam", "Muon", "SGD", "Lion")) else 2
        assert found.pop("optimizer") <= share * expected.pop("optimizer"), where
    assert found == expected, where
    assert {name: memory.nvme[name] for name in STATES if name in memory.nvme} == dict(predicted.nvme), where
    assert memory.buckets <= predicted.device["buckets"], where
    assert memory.quantized <= predicted.device["quantized"], where
    assert memory.staging <= predicted.device["staging"], where
    assert outcome.most_gathered <= predicted.device["gathered"], where
