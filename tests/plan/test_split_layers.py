"""What ranks compute, send and hold of a model that is split over them is planned without them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional as F

import zeroengine
from tests.distributed.fake_group import init_fake_group
from tests.distributed.ranks import run_ranks
from zeroengine.config import load
from zeroengine.errors import ZeroEngineError
from zeroengine.plan.search.estimator import Estimator
from zeroengine.plan.seconds.known_machines import load_machine
from zeroengine.plan.seconds.step_time import machine_of_slice
from zeroengine.plan.trace.activations import MicroStep, trace_micro_step
from zeroengine.plan.trace.meta_copy import copy_to_meta
from zeroengine.plan.trace.model_facts import ModelFacts, from_module, from_numbers
from zeroengine.plan.trace.operation_trace import OperationTrace
from zeroengine.plan.trace.split_layers import split_facts
from zeroengine.runtime.dtensors import inside
from zeroengine.runtime.released_parameter import drop_gradient_of
from zeroengine.utils.tensors import tensors_in

MACHINE = load_machine("h100-80gb")
NUM_RANKS = 4
STAGE_1 = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}, "optimizer": {"type": "AdamW"}}
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "use_cache": False}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# By name the class and how it is split: over how many ranks layers, and over how many experts.
SPLITS = {"layers": ("Llama", 2, 1), "fused experts": ("Mixtral", 2, 1), "experts": ("Mixtral", 1, 4)}
SPLITS["both"] = ("Mixtral", 2, 4)


def transformers_model(kind: str, **more: Any) -> Any:
    import transformers

    cls = getattr(transformers, f"{kind}ForCausalLM")
    return cls(cls.config_class(**SHAPE, **(HEADS | more), **(EXPERTS if kind == "Mixtral" else {})))


def tokens(samples: int) -> dict[str, torch.Tensor]:
    return dict.fromkeys(("input_ids", "labels"), torch.zeros(samples, 16, dtype=torch.int64, device="meta"))


class Sent(OperationTrace):
    """Counts the bytes that live, and those that collectives take, by their kind. A gather takes this rank's part."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any("DTensor" in kind.__name__ for kind in types):
            return NotImplemented
        name = func.overloadpacket.__name__.replace("_", "")
        for kind in ("allreduce", "allgather", "alltoallsingle"):
            if "c10d" in func.namespace and name.startswith(kind):
                tensor = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
                self.nbytes[kind] += tensor.nbytes
                self.count[kind] += 1
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            # DTensors find the shapes of results by fake tensors.
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and not func.is_view:
                self._track(tensor)
        return result


def planned_and_found() -> dict[str, tuple[MicroStep, Counter[str], Counter[str], int]]:
    """In a process that is one of four ranks."""
    init_fake_group(NUM_RANKS)
    found = {}
    for name, (kind, size, expert_size) in SPLITS.items():
        model = transformers_model(kind)
        facts = split_facts(from_module(copy_to_meta(model), kind, tokens), size, expert_size, NUM_RANKS, None)
        micro = trace_micro_step(facts, load({}).resolve(world_size=NUM_RANKS // size), 2, checkpointing=False)
        zeroengine.parallelize(model, size=size, expert_size=expert_size)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(drop_gradient_of)
        ids, sent = torch.zeros(2, 16, dtype=torch.int64), Sent()
        sent.ignore([inside(param) for param in model.parameters()])
        with sent:
            model(input_ids=ids, labels=ids).loss.backward()
        found[name] = micro, sent.count, sent.nbytes, sent.peak_bytes
    return found


def test_the_bytes_that_split_models_exchange_and_hold_are_planned() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    (found,) = run_ranks(1, planned_and_found)
    for name, (micro, count, nbytes, peak_bytes) in found.items():
        _, size, expert_size = SPLITS[name]
        assert micro.num_sums == count["allreduce"] + count["allgather"], name
        # A gather of parts into a whole is half of a sum of the whole.
        assert micro.summed_bytes == nbytes["allreduce"] + size * nbytes["allgather"] // 2, name
        assert micro.exchanged_bytes * expert_size == nbytes["alltoallsingle"] * (expert_size - 1), name
        assert (count["allreduce"] > 0, count["alltoallsingle"] > 0) == (size > 1, expert_size > 1)
        assert micro.peak_bytes == pytest.approx(peak_bytes, rel=0.05), name


def decoder(layers: int = 2) -> ModelFacts:
    return from_numbers(2e6, layers, width=256, vocab=1000, sequence=64)


def flops_of(micro: MicroStep | None) -> int:
    assert micro is not None
    return sum(o.flops * o.count for o in (*micro.forward, *micro.backward))


def test_a_plan_compares_numbers_of_ranks_that_layers_are_split_over() -> None:
    options: dict[str, Any] = {"batch": 16, "checkpointing": False}
    plan = zeroengine.plan(decoder(), STAGE_1, MACHINE, tensor_parallel=(1, 2), **options)
    by_size = {}
    for estimate, tree in zip(plan.estimates, plan.configurations, strict=True):
        by_size.setdefault(estimate.candidate.tensor_parallel, (estimate, tree))
    (whole, _), (split, tree) = by_size[1], by_size[2]
    assert (tree["tensor_parallel"], tree["train_batch_size"], split.samples) == ({"autotp_size": 2}, 16, 16)
    load(tree).resolve(world_size=8)
    one, two = (
        Estimator(split_facts(decoder(), size, 1, 8, None), STAGE_1, MACHINE).micro_step(
            replace(estimate.candidate, micro_batch=2)
        )
        for size, estimate in ((1, whole), (2, split))
    )
    assert one is not None and two is not None
    assert flops_of(one) == 2 * flops_of(two) and one.peak_bytes > two.peak_bytes
    assert "TP 2" in str(plan)
    found = {(c["tensor_parallel"], c["expert_parallel"]) for c in json.loads(plan.to_json())["candidates"]}
    assert found == {(1, 1), (2, 1)}
    # The time of sums is that of all-reduces over the ranks of a model group, which nothing hides.
    assert split.time is not None and split.micro is not None and split.micro.num_sums > 0
    rates, sums = MACHINE.rates, split.candidate.accumulation * split.micro.num_sums
    received = split.candidate.accumulation * split.micro.summed_bytes  # two times a half
    assert split.time.exchange == pytest.approx(sums * rates.latency + received / rates.reduce_link, rel=1e-3)
    assert whole.time is not None and whole.time.exchange == 0


def test_a_configuration_that_splits_layers_is_planned_so() -> None:
    config = {**STAGE_1, "tensor_parallel": {"autotp_size": 2}, "train_batch_size": 8}
    plan = zeroengine.plan(decoder(), config, MACHINE, checkpointing=False)
    assert {(e.candidate.tensor_parallel, e.samples) for e in plan.estimates} == {(2, 8)}
    assert {tree["tensor_parallel"]["autotp_size"] for tree in plan.configurations} == {2}
    # An option counts more than what is written.
    plan = zeroengine.plan(decoder(), config, MACHINE, checkpointing=False, tensor_parallel=(1,))
    assert all(e.candidate.tensor_parallel == 1 for e in plan.estimates)
    assert all("tensor_parallel" not in tree for tree in plan.configurations)


def mixtral(**more: Any) -> ModelFacts:
    with torch.device("meta"):
        return from_module(transformers_model("Mixtral", **more), "mixtral", tokens)


def test_experts_and_layers_are_compared_where_their_numbers_of_ranks_fit_together() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    options: dict[str, Any] = {"checkpointing": False, "batch": 16, "overrides": ["zero_optimization.stage=3"]}
    sizes: dict[str, Any] = {"tensor_parallel": (1, 4), "expert_parallel": (1, 2)}
    plan = zeroengine.plan(mixtral(num_key_value_heads=4), None, MACHINE, **sizes, **options)
    found = {(e.candidate.tensor_parallel, e.candidate.expert_parallel): e for e in plan.estimates}
    assert found.keys() == {(1, 1), (4, 1), (1, 2)}
    experts = found[1, 2]
    assert {e.candidate.offload_optimizer for e in plan.estimates if e.candidate.expert_parallel > 1} == {"none"}
    assert experts.time is not None and experts.micro is not None and experts.micro.num_sums == 0
    sent = experts.candidate.accumulation * experts.micro.exchanged_bytes
    assert experts.time.exchange == pytest.approx(sent / MACHINE.rates.link)
    # Units as small as these stay whole on each rank, but it has half of the experts.
    assert experts.states.device["parameters"] < 0.7 * found[1, 1].states.device["parameters"]
    assert "EP 2" in str(plan)
    with pytest.raises(ZeroEngineError, match=r"`ep_size` must be a multiple of `tp_size`"):
        zeroengine.plan(mixtral(num_key_value_heads=4), None, MACHINE, tensor_parallel=(4,), expert_parallel=(2,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 7), nn.Linear(7, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block())


def test_a_plan_of_patterns_splits_a_model_of_ones_own() -> None:
    with torch.device("meta"):
        facts = from_module(blocks(), "blocks", lambda n: torch.zeros(n, 8, device="meta"))
    plan = {"*.up": ColwiseParallel(use_local_output=False), "*.down": "rowwise"}
    facts, numel = split_facts(facts, 2, 1, 4, plan), facts.num_parameters
    # The first rank has four of seven rows and columns; what is added to sums is whole.
    units = facts.plans(load({}).resolve(world_size=2))
    assert sum(unit.numel for unit in units) == 2 * (8 * 4 + 4 + 4 * 8 + 8) and facts.num_parameters == numel
    micro = trace_micro_step(facts, load({}).resolve(world_size=2), 3, checkpointing=False)
    # Forward sums what is returned; backward sums the gradients of inputs that have one.
    assert (micro.num_sums, micro.summed_bytes) == (3, 3 * (3 * 8 * 4))


def test_the_ranks_of_a_slice_are_on_all_nodes_and_share_the_network_of_each() -> None:
    nodes = replace(MACHINE, nodes=2)
    shapes = {size: machine_of_slice(nodes, size) for size in (1, 2, 8, 16)}
    assert shapes[1] == nodes
    assert {size: (m.nodes, m.ranks_per_node) for size, m in shapes.items()} == {
        1: (2, 8),
        2: (2, 4),
        8: (2, 1),
        16: (1, 1),
    }
    assert shapes[2].rates.node_link == nodes.rates.node_link / 2
    assert shapes[8].rates.node_link == nodes.rates.node_link / 8


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        ({}, {"tensor_parallel": (4,)}, "has 2 heads of keys and values, which cannot be split over 4 ranks"),
        ({}, {"expert_parallel": (2,)}, r"StandardDecoder has no plan of expert parallelism \(base_model_ep_plan\)"),
        (
            {"tensor_parallel": {"autotp_size": 2}, "optimizer_state_dtype": "int8"},
            {},
            'optimizer_state_dtype "int8" does not work with param',
        ),
        ({"sequence_parallel_size": 2}, {"tensor_parallel": (2,)}, "sequence_parallel_size does not work with"),
        ({"train_batch_size": 6}, {"tensor_parallel": (2,)}, "train_batch_size"),
    ],
)
def test_what_cannot_be_split_says_what_to_write(more: dict[str, Any], options: Any, message: str) -> None:
    with pytest.raises(ZeroEngineError, match=message):
        zeroengine.plan(decoder(), STAGE_1 | more, MACHINE, checkpointing=False, **options)


def test_a_model_without_a_plan_is_refused_by_name() -> None:
    with pytest.raises(ZeroEngineError, match=r"Sequential has no plan of tensor parallelism \(base_model_tp_plan\)"):
        zeroengine.plan(blocks(), machine=MACHINE, example=torch.zeros(1, 8), tensor_parallel=(2,))
    with pytest.raises(ZeroEngineError, match=r"size=3\): the number of ranks of this job, 8, is no multiple"):
        split_facts(from_module(blocks().to("meta")), 3, 1, 8, {"*.up": "colwise"})
