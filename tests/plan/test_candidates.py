"""What a plan promises of its candidates: what fits, what is the best, and what stays as it was given."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import VOCAB, TinyLM
from zeroengine.config import load
from zeroengine.errors import ConfigError, ZeroEngineError
from zeroengine.plan.api import machine_with
from zeroengine.plan.report.result import Plan
from zeroengine.plan.search.candidates import HEADROOM, Choices, micro_batches
from zeroengine.plan.search.estimator import Estimator
from zeroengine.plan.search.scaling import largest
from zeroengine.plan.seconds.known_machines import load_machine
from zeroengine.plan.trace.model_facts import from_numbers

GIB = 2**30
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
BF16 = {**ADAM, "bf16": {"enabled": True}}


def decoder(layers: int = 4) -> Any:
    """Return a model whose states count on a GPU of some GiB, of which the context takes 1.3."""
    return from_numbers(12.6e6 * layers + 16.4e6, layers, width=1024, vocab=8000, sequence=256)


def machine(gpu: int, **sizes: int) -> Any:
    """Return 8 GPUs of so many bytes."""
    return machine_with(load_machine("a100-40gb"), device_bytes=gpu, **sizes)


@pytest.fixture(scope="module")
def small() -> Plan:
    """A plan where some candidates fit and others do not."""
    return zeroengine.plan(decoder(), BF16, machine(int(2.2 * GIB), disk_bytes=GIB), batch=512)


def test_the_best_is_the_fastest_with_headroom(small: Plan) -> None:
    roomy = [estimate for estimate in small.estimates if estimate.has_headroom]
    assert small.best in roomy
    assert small.best.samples_per_second >= 0.99 * max(e.samples_per_second for e in roomy)


def test_fits_and_reasons_agree_with_the_sizes(small: Plan) -> None:
    limits = small.machine
    for e in small.estimates:
        pairs = [
            (e.device_total, limits.device_bytes),
            (e.host_total, limits.host_bytes),
            (e.disk_total, limits.disk_bytes),
        ]
        lacking = [need for need, size in pairs if need > size]
        assert e.fits == (not lacking) == (e.headroom >= 0) and len(e.reasons) == len(lacking)
        assert not e.has_headroom or all(need <= (1 - HEADROOM) * size for need, size in pairs if need)
    assert {e.fits for e in small.estimates} == {True, False}


def test_every_candidate_keeps_the_batch(small: Plan) -> None:
    for estimate, configuration in zip(small.estimates, small.configurations, strict=True):
        c = estimate.candidate
        assert c.micro_batch * c.accumulation * 8 == 512 == configuration["train_batch_size"]


def test_the_largest_micro_batch_fits_and_one_more_sample_does_not() -> None:
    target, model = machine(int(2.2 * GIB)), decoder()
    plan = zeroengine.plan(model, BF16, target, checkpointing=False, overrides=["zero_optimization.stage=2"])
    setting, size = max(plan.largest_micro_batch.items(), key=lambda item: item[1])
    fits = []
    for micro in (size, size + 1):
        given = zeroengine.plan(model, {**BF16, "train_micro_batch_size_per_gpu": micro}, target, checkpointing=False)
        (estimate,) = [e for e in given.estimates if e.candidate.setting == setting]
        fits.append(estimate.fits)
    assert size > 1 and fits == [True, False]


def test_what_the_configuration_gives_stays() -> None:
    config = {**BF16, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    config["train_micro_batch_size_per_gpu"] = 2
    plan = zeroengine.plan(decoder(2), config, machine(8 * GIB), checkpointing=True)
    assert {(c.stage, c.offload_optimizer, c.micro_batch) for c in (e.candidate for e in plan.estimates)} == {
        (2, "cpu", 2)
    }


@pytest.mark.parametrize("secondary", [None, "node"])
def test_degrees_of_the_configuration_stay(secondary: str | None) -> None:
    parameters = "node" if secondary is None else "all"
    degrees = {"parameters": parameters, "optimizer": "all", "secondary_parameters": secondary}
    config = {**BF16, "zero_optimization": {"degrees": degrees}, "train_micro_batch_size_per_gpu": 1}
    plan = zeroengine.plan(decoder(2), config, machine(8 * GIB, nodes=2), checkpointing=True)
    assert {estimate.candidate.stage for estimate in plan.estimates} == {3}
    assert plan.configurations[0]["zero_optimization"]["degrees"] == degrees
    stage_3 = {"stage": 3, "degrees": None}
    plain = zeroengine.plan(
        decoder(2), config | {"zero_optimization": stage_3}, machine(8 * GIB, nodes=2), checkpointing=True
    )
    copies = [estimates[0].states.device["parameters"] for estimates in (plan.estimates, plain.estimates)]
    # Sixteen ranks in two nodes of eight: a shard is an eighth, or a sixteenth and an eighth of the second copy.
    assert copies[0] == pytest.approx(copies[1] * (2 if secondary is None else 3), rel=0.01)


@pytest.fixture(scope="module")
def far_apart() -> Plan:
    """A plan for two nodes whose network is much slower than their links."""
    nodes = machine(8 * GIB, nodes=2)
    nodes = replace(nodes, rates=replace(nodes.rates, node_link=1e9))
    given = {**BF16, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    given["zero_optimization"] = {"stage": 3, "offload_optimizer": {"device": "none"}}
    return zeroengine.plan(decoder(2), given, nodes, checkpointing=True)


def test_degrees_within_a_node_are_compared_where_there_are_several(far_apart: Plan) -> None:
    found = {e.candidate.degrees: e for e in far_apart.estimates}
    assert set(found) == {"default", "node", "node/node/all", "node/all/all", "hpZ"}
    seconds = {name: e.time.total for name, e in found.items() if e.time is not None}
    # Four micro-steps gather eight times at stage 3. Sums of node shards cross the network in each of them.
    assert seconds["default"] > 1.2 * max(seconds[name] for name in seconds if name != "default")
    assert seconds["node"] < seconds["node/node/all"]
    assert far_apart.best is not None and far_apart.best.candidate.degrees != "default"
    # A node of eight ranks holds the parameters once, and with hpZ twice.
    parameters = {name: e.states.device["parameters"] for name, e in found.items()}
    copies = {"default": 1, "node": 2, "node/node/all": 2, "node/all/all": 2, "hpZ": 3}
    assert parameters == {name: pytest.approx(copies[name] * parameters["default"], rel=0.01) for name in parameters}


def test_the_degrees_to_write_are_shown_and_are_those_of_the_candidate(far_apart: Plan) -> None:
    shown = re.sub(" +", " ", far_apart.to_table(width=120))
    assert '\n3 hpZ "degrees": {"parameters": "all", "secondary_parameters": "node"}\n' in shown
    for estimate, configuration in zip(far_apart.estimates, far_apart.configurations, strict=True):
        zero = load(configuration).resolve(world_size=16, ranks_per_node=8).zero_optimization
        assert zero.stage == 3 and (zero.degrees is None) == (estimate.candidate.degrees == "default")
    numbers = {e.candidate.degrees: far_apart.configuration(n) for n, e in enumerate(far_apart.estimates, start=1)}
    degrees = load(numbers["node/all/all"]).resolve(world_size=16, ranks_per_node=8).zero_optimization.degrees
    assert degrees is not None and degrees.numbers == {
        "optimizer": 16,
        "gradients": 16,
        "parameters": 8,
        "secondary": 0,
    }


@pytest.mark.parametrize(
    ("sizes", "zero"),
    [
        ({"nodes": 1}, {}),
        ({"nodes": 2, "ranks_per_node": 1}, {}),
        ({"nodes": 2}, {"degrees": None}),
        ({"nodes": 2}, {"zero_hpz_partition_size": 4}),
        ({"nodes": 2}, {"stage": 2}),
    ],
    ids=["one node", "one rank a node", "null", "given", "another stage"],
)
def test_no_degrees_are_compared_on_one_node_or_where_they_are_given(
    sizes: dict[str, int], zero: dict[str, Any]
) -> None:
    given = {**ADAM, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **zero}}
    plan = zeroengine.plan(decoder(2), given, machine(8 * GIB, **sizes), checkpointing=True)
    assert {estimate.candidate.degrees for estimate in plan.estimates} == {"default"}
    assert "as a configuration says them" not in str(plan)


def test_degrees_that_do_not_fit_the_planned_ranks_are_the_error_of_initialize() -> None:
    config = {**ADAM, "zero_optimization": {"degrees": {"parameters": 3}}}
    with pytest.raises(ConfigError) as planned:
        zeroengine.plan(decoder(2), config, machine(8 * GIB, nodes=2))
    with pytest.raises(ConfigError) as started:
        load(config).resolve(world_size=16, ranks_per_node=8)
    assert str(planned.value) == str(started.value) and "parameters is 3" in str(planned.value)


def test_a_batch_that_the_ranks_cannot_share_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Change train_batch_size to 96 or 104"):
        zeroengine.plan(decoder(), BF16, machine(8 * GIB), batch=100)


def test_an_optimizer_that_cannot_be_offloaded_is_not() -> None:
    radam = {"optimizer": {"type": "torch.optim.RAdam"}, "train_micro_batch_size_per_gpu": 1}
    plan = zeroengine.plan(decoder(2), radam, machine(8 * GIB), checkpointing=True)
    assert {(e.candidate.offload_optimizer, e.candidate.offload_param) for e in plan.estimates} == {("none", "none")}


def test_a_plan_says_what_each_algorithm_updates() -> None:
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}, "train_micro_batch_size_per_gpu": 1}
    plan = zeroengine.plan(decoder(2), muon, machine(8 * GIB), checkpointing=True)
    assert {estimate.candidate.stage for estimate in plan.estimates} == {0, 1, 2, 3}
    assert any(note.startswith("Muon updates 14 matrices (25.2 M parameters), AdamW updates 7") for note in plan.notes)


def test_a_machine_that_holds_nothing_says_what_lacks() -> None:
    given = {**BF16, "train_micro_batch_size_per_gpu": 1}
    plan = zeroengine.plan(decoder(2), given, machine(GIB, host_bytes=GIB, disk_bytes=0), checkpointing=True)
    assert plan.best is None and all(estimate.reasons for estimate in plan.estimates)
    assert "Nothing fits" in str(plan) and "too little" in str(plan)


def test_one_rank_compares_no_stages_that_are_equal() -> None:
    given = {**BF16, "train_micro_batch_size_per_gpu": 1}
    plan = zeroengine.plan(decoder(2), given, machine(8 * GIB, ranks_per_node=1), checkpointing=True)
    assert {(c.stage, c.offload_param != "none") for c in (e.candidate for e in plan.estimates)} == {
        (0, False),
        (3, True),
    }


def test_a_module_is_planned_for_without_a_change_or_memory() -> None:
    model = TinyLM(tied=True)
    before = copy.deepcopy(model.state_dict())
    ids = torch.zeros(3, 8, dtype=torch.long)
    plan = zeroengine.plan(model, ADAM, "this", batch=4, example=(ids, ids))
    assert all(not p.is_meta and torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert plan.tokens_per_sample == 8 and plan.num_parameters == sum(p.numel() for p in model.parameters())


def test_the_configuration_of_the_best_trains_the_model() -> None:
    model, ids = TinyLM(tied=False), torch.randint(VOCAB, (8, 9))
    plan = zeroengine.plan(model, ADAM, "this", batch=8, example=(ids[:, :-1], ids[:, 1:]))
    engine = zeroengine.initialize(model, config=plan.configuration())
    for rows in ids.split(engine.config.train_micro_batch_size_per_gpu):
        engine.backward(engine(rows[:, :-1], rows[:, 1:]))
        engine.step()
    assert plan.best is not None and engine.global_steps == 1
    engine.close()


def test_links_that_were_not_measured_are_asked_for() -> None:
    known = machine(8 * GIB)
    alone = replace(known, rates=replace(known.rates, link=0.0, reduce_link=0.0))
    with pytest.raises(ZeroEngineError, match="--measure FILE --ranks-per-node 8"):
        zeroengine.plan(decoder(2), BF16, alone)
    one_node = replace(known, nodes=2, rates=replace(known.rates, node_link=0.0))
    with pytest.raises(ZeroEngineError, match="link between nodes"):
        zeroengine.plan(decoder(2), BF16, one_node)


def test_a_model_too_large_for_the_memory_of_its_node_is_to_be_built_without_memory() -> None:
    given = {**BF16, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    notes = {
        gib: zeroengine.plan(decoder(2), given, machine(8 * GIB, host_bytes=gib * GIB), checkpointing=True).notes
        for gib in (1, 64)
    }
    assert any("meta_init" in note for note in notes[1]) and not any("meta_init" in note for note in notes[64])


def test_wrong_models_say_what_to_write(tmp_path: Path) -> None:
    for model, message in [
        (3, "takes a torch.nn.Module"),
        ("train", "write module:function"),
        ("nothing_of_this_name:build", "cannot import it"),
        (tmp_path / "config.json", "cannot read"),
    ]:
        with pytest.raises(ZeroEngineError, match=message):
            zeroengine.plan(model, ADAM, "h100-80gb")  # type: ignore[arg-type]
    with pytest.raises(ZeroEngineError, match="example holds no tensor"):
        zeroengine.plan(nn.Linear(2, 2), ADAM, "h100-80gb", example=(1,))


def test_a_model_whose_computation_needs_values_is_planned_by_its_states() -> None:
    class Routed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).mean() if x.sum() > 0 else x.mean()

    plan = zeroengine.plan(Routed(4, 4), ADAM, "h200", example=torch.zeros(1, 4))
    assert plan.best is not None and plan.best.time is None and "depends on values" in plan.notes[0]
    with pytest.raises(ZeroEngineError, match="micro-step with micro-batch 1 failed"):
        zeroengine.plan(nn.Linear(4, 4), ADAM, "h200", example=torch.zeros(1, 5))


@pytest.mark.parametrize("batch", [None, 96, 7 * 8])
def test_micro_batches_divide_the_share_of_a_rank(batch: int | None) -> None:
    sizes = micro_batches(Choices(batch=batch), 8, largest=11, largest_with_headroom=10)
    assert sizes == {None: [1, 2, 4, 8, 10, 11], 96: [1, 2, 4, 6], 56: [1, 7]}[batch]


def test_largest_finds_the_last_number_that_fits() -> None:
    for limit in range(0, 40):
        assert largest(lambda n, limit=limit: n <= limit, 30) == min(limit, 30)  # type: ignore[misc]


def test_json_has_all_numbers_and_adds_up(small: Plan) -> None:
    data = json.loads(small.to_json())
    assert [c["number"] for c in data["candidates"]] == list(range(1, len(small.estimates) + 1))
    for c in data["candidates"]:
        assert sum(c["device"].values()) == c["device_total"]
        assert sum(v for k, v in c["seconds"].items() if k != "total") == pytest.approx(c["seconds"]["total"])


@pytest.mark.slow
def test_more_memory_never_makes_the_best_slower() -> None:
    model = decoder()
    rates = []
    for gib in (1.7, 2, 8):
        best = zeroengine.plan(model, BF16, machine(int(gib * GIB)), batch=512, checkpointing=False).best
        rates.append(best.samples_per_second if best else 0.0)
    assert all(b >= 0.99 * a for a, b in pairwise(rates)) and rates[-1] > rates[0]


def test_a_machine_of_cpu_ranks_shares_the_memory_of_its_node() -> None:
    cpu = replace(load_machine("this"), host_bytes=64 * GIB)
    assert machine_with(cpu, ranks_per_node=4).device_bytes == 16 * GIB


def test_estimator_is_given_unit_plans_of_the_configuration() -> None:
    estimator = Estimator(decoder(), {**BF16, "units": ["blocks.0"]}, machine(8 * GIB))
    assert "blocks.0" in {plan.name for plan in estimator._plans}
