"""States partitioned over some of the ranks: the bits, the bytes and the checkpoints of stage 0."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroengine
from tests.distributed.imagined_hosts import imagine_hosts
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import take_steps
from tests.nccl_over_gloo import use_nccl_transport
from tests.parametrization import SHARED_MEMORY_AND_SLOW_GLOO
from zeroengine import ZeroEngineError
from zeroengine.config import load
from zeroengine.errors import ConfigError
from zeroengine.memory.state_bytes import RankTopology, predict_states
from zeroengine.partition.cut import cut_units

Triple = tuple[int, int, int]
# The degrees of most units, and of those whose names match a pattern.
PerUnit = tuple[int, int, int, tuple[str, Triple]]
STATES = ("parameters", "gradients", "optimizer")
# Parameters, gradients and optimizer, where four ranks have hybrid degrees.
SHORT: tuple[Triple, ...] = ((2, 2, 2), (1, 1, 2), (1, 2, 4), (2, 2, 4), (2, 4, 4), (4, 4, 4))
PER_UNIT: tuple[PerUnit, ...] = (
    (2, 2, 4, ("blocks.*", (4, 4, 4))),
    (1, 1, 1, ("blocks.0", (2, 2, 2))),
    (4, 4, 4, ("rest*", (1, 2, 2))),
)


def triples(world_size: int) -> list[Triple]:
    """All legal degrees: each divides the next one, and the last divides the number of ranks."""
    divisors = [degree for degree in range(1, world_size + 1) if world_size % degree == 0]
    return [
        (parameters, gradients, optimizer)
        for optimizer in divisors
        for gradients in divisors
        for parameters in divisors
        if optimizer % gradients == 0 and gradients % parameters == 0
    ]


class PartlyTrained(TinyLM):
    """A tied head, a frozen block, and a layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__(tied=True, blocks=3)
        self.blocks[1].requires_grad_(False)
        self.unused = nn.Linear(5, 7)


def degree_config(triple: Triple | PerUnit, secondary: int | None = None, **more: Any) -> dict[str, Any]:
    settings = config(0, gradient_clipping=0.5, **more)
    zero = settings["zero_optimization"]
    del zero["stage"]
    zero["degrees"] = dict(zip(STATES, triple[:3], strict=True))
    zero["degrees"]["secondary_parameters"] = secondary
    zero["degrees"]["per_unit"] = [
        {"units": pattern, **dict(zip(STATES, other, strict=True))} for pattern, other in triple[3:]
    ]
    return settings


def train(settings: dict[str, Any], steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Each step's loss of this rank, and the final state on rank 0."""
    engine = zeroengine.initialize(build(PartlyTrained), config=settings)
    losses = take_steps(engine, range(steps * int(engine.config.gradient_accumulation_steps)))
    state = engine.full_state_dict(rank0_only=True)
    engine.close()
    return losses, state


def differences(
    chosen: Sequence[Triple | PerUnit],
    steps: int,
    expected_of: Triple,
    more: dict[str, Any],
    tolerance: float = 0.0,
    ranks_per_host: int = 0,
) -> list[Any]:
    """The triples whose losses or weights differ from those of ``expected_of``."""
    dist.init_process_group("gloo")
    if ranks_per_host:
        imagine_hosts(ranks_per_host)
    losses, state = train(degree_config(expected_of, **more), steps)
    assert len(set(losses)) == len(losses)
    found = []
    for triple in chosen:
        own_losses, own_state = train(degree_config(triple, **more), steps)
        if tolerance:
            same = own_losses == pytest.approx(losses, rel=0, abs=tolerance)
        else:
            same = own_losses == losses and all(torch.equal(own_state[name], state[name]) for name in state)
        if not same:
            found.append((triple, own_losses, losses))
    return found


def assert_no_differences(world_size: int, *arguments: Any, timeout: float = 90.0) -> None:
    assert run_ranks(world_size, differences, *arguments, timeout=timeout) == [[]] * world_size


@pytest.mark.parametrize(("transport", "chosen"), [("shm", (*SHORT, *PER_UNIT)), ("gloo", (SHORT[2], PER_UNIT[0]))])
def test_losses_and_weights_have_the_bits_of_stage_0(transport: str, chosen: Sequence[Triple | PerUnit]) -> None:
    assert_no_differences(4, chosen, 3, (1, 1, 1), {"comm": {"transport": transport}})


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_all_degrees_have_the_bits_of_stage_0(world_size: int, transport: str) -> None:
    more = {"comm": {"transport": transport}}
    assert_no_differences(world_size, triples(world_size), 20, (1, 1, 1), more, timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_degrees_of_single_units_have_the_bits_of_stage_0(transport: str) -> None:
    """Between two degrees of one model there may be others, which number the shards of all units."""
    middle: Any = [(2, 2, 2, ("blocks.*", other)) for other in ((4, 4, 4), (8, 8, 8), (1, 1, 4), (2, 2, 8), (1, 4, 8))]
    middle += [(8, 8, 8, ("blocks.0", (4, 4, 4))), (1, 1, 8, ("blocks.*", (2, 4, 4)))]
    assert_no_differences(8, middle, 10, (1, 1, 1), {"comm": {"transport": transport}}, timeout=300)


def accumulated(world_size: int, chosen: Sequence[Triple], ranks_per_host: int = 0) -> None:
    """With accumulation, gradients of one rank are summed first at degree 1, and those of one micro-step above."""
    more = {"gradient_accumulation_steps": 3}
    whole = [triple for triple in chosen if triple[1] == 1]
    assert_no_differences(world_size, whole, 2, (1, 1, 1), more, 0.0, ranks_per_host)
    cut = [triple for triple in chosen if triple[1] > 1]
    assert_no_differences(world_size, cut, 2, (world_size,) * 3, more, 0.0, ranks_per_host)
    arguments = (cut, 2, (1, 1, 1), more, 1e-5, ranks_per_host)
    assert_no_differences(world_size, *arguments)


def test_with_accumulation_degrees_agree_on_each_side_of_gradient_degree_1() -> None:
    accumulated(4, ((1, 1, 2), (1, 2, 4), (2, 2, 2)))


@pytest.mark.slow
def test_with_accumulation_all_degrees_agree_on_each_side_of_gradient_degree_1() -> None:
    accumulated(4, triples(4))


@pytest.mark.slow  # the test in bf16 has two hosts, too, and the one of every transport fp32
def test_two_hosts_have_the_bits_of_stage_0_at_all_degrees() -> None:
    assert_no_differences(4, ((2, 2, 2), (1, 2, 4), (4, 4, 4)), 3, (1, 1, 1), {}, 0.0, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "ranks_per_host"), [(4, 2), (6, 3), (6, 2), (8, 4), (8, 2)])
def test_hosts_have_the_bits_of_stage_0_at_all_degrees(world_size: int, ranks_per_host: int) -> None:
    """Where hosts have three ranks, or there are three, some degrees straddle hosts."""
    assert_no_differences(world_size, triples(world_size), 20, (1, 1, 1), {}, 0.0, ranks_per_host, timeout=900)


@pytest.mark.slow
def test_two_hosts_with_accumulation_agree_on_each_side_of_gradient_degree_1() -> None:
    accumulated(4, triples(4), ranks_per_host=2)


def losses_on_hosts(*sizes: int) -> list[Any]:
    """The transport and the losses of each of the ways to connect the ranks, over hosts with these numbers of ranks."""
    dist.init_process_group("gloo")
    imagine_hosts(*sizes)
    found = []
    for transport, triple in (("auto", (4, 4, 4)), ("gloo", (4, 4, 4)), ("gloo", (1, 1, 1))):
        settings = degree_config(triple, comm={"transport": transport})
        engine = zeroengine.initialize(build(PartlyTrained), config=settings)
        name = engine._parts.ranks.transport.name
        engine.close()
        found.append((name, train(settings, 3)[0]))
    return found


@pytest.mark.parametrize(
    ("sizes", "name"), [((2, 2), "two-level"), pytest.param((1, 3), "gloo", marks=pytest.mark.slow)]
)
def test_sums_go_host_by_host_on_every_transport(sizes: tuple[int, ...], name: str) -> None:
    for auto, *others in run_ranks(4, losses_on_hosts, *sizes):
        assert auto[0] == name and all(losses == auto[1] for _, losses in others)


def test_bf16_has_the_same_bits_on_two_hosts() -> None:
    assert_no_differences(4, ((2, 2, 2), (2, 2, 4)), 3, (4, 4, 4), {"bf16": {"enabled": True}}, 0.0, 2)


@pytest.mark.slow  # the test above has two hosts besides
def test_bf16_has_the_same_bits_at_all_degrees() -> None:
    assert_no_differences(4, ((2, 2, 2), (2, 2, 4)), 3, (4, 4, 4), {"bf16": {"enabled": True}})


def test_offloaded_states_have_the_same_bits(tmp_path: Path) -> None:
    away = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    assert_no_differences(4, ((2, 2, 2), (1, 2, 4)), 3, (1, 1, 1), away)


@pytest.mark.slow  # the test above offloads the other states
def test_offloaded_parameters_have_the_same_bits() -> None:
    away = {"zero_optimization": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}
    assert_no_differences(4, ((2, 2, 2), (4, 4, 4)), 3, (2, 2, 2), away)


def differences_on_collectives(chosen: Sequence[Triple | PerUnit]) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        use_nccl_transport(patch)
        return differences(chosen, 3, (1, 1, 1), {}, 1e-5)


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param((SHORT[2], PER_UNIT[2]), id="short"),
        pytest.param((*triples(4), *PER_UNIT), id="all", marks=pytest.mark.slow),
    ],
)
def test_the_collectives_of_nccl_give_the_sums_of_stage_0(chosen: Sequence[Triple | PerUnit]) -> None:
    assert run_ranks(4, differences_on_collectives, chosen) == [[]] * 4


# -- the second copy of the parameters --------------------------------------------------------------


def with_second_copy(transport: str) -> list[Any]:
    """Losses with and without it, and the bytes that gathers bring in a step, by the degree of the second copy."""
    dist.init_process_group("gloo")
    found = []
    for secondary in (None, 2, 1):
        # Bytes are counted for the records of a monitor.
        more = {"comm": {"transport": transport}, "gradient_accumulation_steps": 2, "monitor": {"enabled": True}}
        settings = degree_config((4, 4, 4), secondary, **more)
        engine = zeroengine.initialize(build(PartlyTrained), config=settings)
        received = engine._parts.reports.timer.count = CountedBytes()  # type: ignore[method-assign, assignment]
        losses = take_steps(engine, range(6))
        # Three steps bring three quarters of the trained units each, and of the frozen ones once.
        least = sum(unit.layout.numel * 4 * 3 // 4 * (3 if unit.trainable else 1) for unit in engine.units)
        found.append((losses, received.total["gather"] / least, engine.memory().parameters))
        engine.close()
    return found


def load_frozen(folder: Path) -> list[float]:
    """The loss before a load into a model whose units have second copies, after it, and of the saved weights."""
    dist.init_process_group("gloo")
    away = {"offload_param": {"device": "nvme", "nvme_path": str(folder)}}
    unaligned = degree_config((2, 4, 4), comm={"transport": "gloo"}, zero_optimization=away)
    with pytest.raises(ZeroEngineError, match=r"inside a block of the disk\. Write the same number"):
        zeroengine.initialize(build(PartlyTrained), config=unaligned)
    found = []
    for seed in (1, 0):
        engine = zeroengine.initialize(build(PartlyTrained, seed=seed), config=degree_config((4, 4, 4), 2))
        loss = engine(*batch(0, 0))
        engine.backward(loss)
        engine.step()
        found.append(engine(*batch(1, 0)).item())
        if seed == 1:
            engine.save_checkpoint(folder)
            engine.close()
            continue
        engine.load_checkpoint(folder)
        found.append(engine(*batch(1, 0)).item())
    return found


def test_what_is_loaded_replaces_the_second_copies_of_frozen_parameters(tmp_path: Path) -> None:
    saved, before, after = run_ranks(4, load_frozen, tmp_path)[0]
    assert after == saved != before


def offload_second_copy(folder: Path, is_offloaded: bool) -> tuple[list[float], list[int]]:
    """Losses around a time in which the parameters are away, and the bytes of parameters before, then and after."""
    dist.init_process_group("gloo")
    settings = degree_config((4, 4, 4), 2, comm={"transport": "gloo"})
    engine = zeroengine.initialize(build(PartlyTrained), config=settings)
    losses, sizes = take_steps(engine, range(2)), [engine.memory().parameters]
    if is_offloaded:
        engine.offload_states(["parameters"], device="nvme", nvme_path=folder)
        sizes.append(engine.memory().parameters)
        engine.reload_states()
        sizes.append(engine.memory().parameters)
    losses += take_steps(engine, range(2, 4))
    engine.close()
    return losses, sizes


def test_a_second_copy_leaves_the_device_with_the_parameters_and_comes_back(tmp_path: Path) -> None:
    expected = run_ranks(4, offload_second_copy, tmp_path, False)
    for (losses, _), (found, (before, away, after)) in zip(
        expected, run_ranks(4, offload_second_copy, tmp_path, True), strict=True
    ):
        assert found == losses
        assert away == 0 < before == after


class CountedBytes:
    def __init__(self) -> None:
        self.total: dict[str, int] = {"gather": 0, "reduce": 0}

    def __call__(self, kind: str, nbytes: int) -> None:
        self.total[kind] += nbytes


@SHARED_MEMORY_AND_SLOW_GLOO
def test_a_second_copy_changes_no_bit_and_is_gathered_from_within_its_ranks(transport: str) -> None:
    for (losses, received, parameters), two, one in run_ranks(4, with_second_copy, transport):
        assert two[0] == losses and one[0] == losses
        # After the first gather the others bring a half of a unit, or nothing.
        assert one[1] == 1 < two[1] < received
        # A quarter of the parameters, and a half or all of them.
        assert two[2] == pytest.approx(parameters * 3, rel=0.01) and one[2] == pytest.approx(parameters * 5, rel=0.01)


# -- bytes ------------------------------------------------------------------------------------------


def state_bytes(chosen: Sequence[Triple]) -> list[Any]:
    dist.init_process_group("gloo")
    found = []
    for triple in chosen:
        engine = zeroengine.initialize(build(TinyLM), config=degree_config(triple))
        memory = engine.memory()
        found.append((memory.parameters, memory.gradients, memory.optimizer))
        engine.close()
    return found


def test_each_state_takes_its_bytes_divided_by_its_degree() -> None:
    chosen = ((1, 1, 1), *SHORT)
    whole, *others = run_ranks(4, state_bytes, chosen)[0]
    for (parameters, gradients, optimizer), found in zip(SHORT, others, strict=True):
        expected = (whole[0] / parameters, whole[1] / gradients, whole[2] / optimizer)
        assert found == pytest.approx(expected, rel=0.01)


def bytes_of_single_units() -> list[tuple[int, int, int]]:
    """Of one engine: the bytes of each state that are measured, predicted, and expected by the units' own degrees."""
    dist.init_process_group("gloo")
    settings = degree_config((2, 2, 4, ("blocks.*", (4, 4, 4))))
    engine = zeroengine.initialize(build(TinyLM), config=settings)
    memory = engine.memory()
    resolved = load(settings).resolve(world_size=4)
    predicted = predict_states(cut_units(build(TinyLM)), resolved, RankTopology(4, "cpu", "shm")).device
    expected = dict.fromkeys(STATES, 0)
    for unit in engine.units:
        degrees = (4, 4, 4) if unit.name.startswith("blocks.") else (2, 2, 4)
        for state, degree in zip(STATES, degrees, strict=True):
            expected[state] += 4 * unit.layout.numel * (2 if state == "optimizer" else 1) // degree
    return [(getattr(memory, state), predicted[state], expected[state]) for state in STATES]


def test_each_state_of_a_unit_takes_its_bytes_divided_by_the_units_own_degree() -> None:
    for measured, predicted, expected in run_ranks(4, bytes_of_single_units)[0]:
        assert measured == predicted == pytest.approx(expected, rel=0.01)


# -- checkpoints ------------------------------------------------------------------------------------


def save(folder: Path, triple: Triple | PerUnit) -> list[float]:
    dist.init_process_group("gloo")
    engine = zeroengine.initialize(build(PartlyTrained), config=degree_config(triple))
    losses = take_steps(engine, range(3), same_on_all_ranks)
    engine.save_checkpoint(folder)
    return losses + take_steps(engine, range(3, 6), same_on_all_ranks)


def same_on_all_ranks(number: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Data of which the number of ranks changes nothing but rounding."""
    return batch(number, 0)


def resume(folder: Path, chosen: Sequence[Triple | PerUnit]) -> list[list[float]]:
    dist.init_process_group("gloo")
    found = []
    for triple in chosen:
        engine = zeroengine.initialize(build(PartlyTrained, seed=7), config=degree_config(triple))
        engine.load_checkpoint(folder)
        found.append(take_steps(engine, range(3, 6), same_on_all_ranks))
        engine.close()
    return found


@pytest.mark.slow  # checkpoint/test_matrix has those of stages
def test_checkpoints_go_from_any_degrees_to_any_others(tmp_path: Path) -> None:
    losses = run_ranks(4, save, tmp_path, PER_UNIT[0])[0]
    of_four, of_two = ((1, 1, 1), (4, 4, 4)), ((1, 2, 2), PER_UNIT[1])
    for world_size, chosen in ((4, of_four), (2, of_two)):
        for found in run_ranks(world_size, resume, tmp_path, chosen)[0]:
            assert found[0] == pytest.approx(losses[3], abs=1e-6) and found == pytest.approx(losses[3:], rel=1e-4)
            assert world_size == 2 or found == losses[3:]


# -- a mesh ----------------------------------------------------------------------------------------


def mesh_degrees(names: tuple[str, str], settings: list[dict[str, Any]]) -> list[Any]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    found: list[Any] = []
    for zero in settings:
        model, settings_of_engine = build(TinyLM), config(0)
        zero["stage3_param_persistence_threshold"] = 0
        settings_of_engine["zero_optimization"] = zero
        try:
            engine = zeroengine.initialize(model, config=settings_of_engine, process_group=mesh)
        except ZeroEngineError as error:
            found.append(str(error))
            continue
        loss = engine(*batch(0, engine.rank))
        engine.backward(loss)
        engine.step()
        degrees = engine.units[0].degrees
        found.append((degrees.parameters, degrees.gradients, degrees.optimizer))
        engine.close()
    return found


def test_a_mesh_of_replicas_partitions_over_its_second_axis() -> None:
    settings: list[dict[str, Any]] = [{"stage": stage} for stage in (0, 1, 2, 3)]
    settings += [{"degrees": {"parameters": 2}}, {"degrees": {"parameters": 4}}, {"stage": "auto"}]
    found = run_ranks(4, mesh_degrees, ("dp_replicate", "dp_shard"), settings)[1]
    assert found[:5] == [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2)]
    assert "zero_optimization.degrees are" in found[5]
    assert "process_group is a mesh that partitions over 2 ranks; leave one of them out" in found[5]
    assert 'write "stage": 3' in found[6]
    found = run_ranks(4, mesh_degrees, ("dp", "tp"), [{"stage": 3}])[0]
    assert "found a DeviceMesh of 2 dimensions" in found[0] and '"replicate" and "shard"' in found[0]


# -- the configuration ------------------------------------------------------------------------------


def degrees_of(section: dict[str, Any], world_size: int = 8, ranks_per_node: int | None = 4) -> tuple[int, int, int]:
    resolved = load({"zero_optimization": section}).resolve(world_size=world_size, ranks_per_node=ranks_per_node)
    numbers = resolved.zero_optimization.degree_numbers
    assert numbers is not None
    return numbers["parameters"], numbers["gradients"], numbers["optimizer"]


def test_words_stand_for_numbers_of_ranks_and_a_degree_is_that_before_it() -> None:
    assert degrees_of({"degrees": {"parameters": "node", "gradients": "node", "optimizer": "all"}}) == (4, 4, 8)
    assert degrees_of({"degrees": {"parameters": "node"}}) == (4, 4, 4)
    assert degrees_of({"degrees": {"gradients": 2, "optimizer": "all"}}) == (1, 2, 8)
    assert degrees_of({"degrees": {"optimizer": "all"}}) == (1, 1, 8)


@pytest.mark.parametrize(
    ("degrees", "stage"),
    [({"optimizer": 4}, 1), ({"gradients": 4}, 2), ({"parameters": "node"}, 3), ({"parameters": 1}, 0)],
)
def test_degrees_are_those_of_one_stage(degrees: dict[str, Any], stage: int) -> None:
    assert load({"zero_optimization": {"degrees": degrees}}).zero_optimization.stage == stage
    assert load({"zero_optimization": {"degrees": degrees, "stage": stage}}).zero_optimization.stage == stage
    with pytest.raises(
        ConfigError, match=f"is stage {stage}, and stage is {(stage + 1) % 4}; leave stage out, or write {stage}"
    ):
        load({"zero_optimization": {"degrees": degrees, "stage": (stage + 1) % 4}})


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"parameters": 3}, "degrees.parameters is 3, and must divide the 8 ranks; write 1 or 2 or 4 or 8"),
        ({"parameters": 2, "gradients": 1}, r"degrees.gradients is 1, .* multiple of parameters, 2; write 2 or 4 or 8"),
        ({"gradients": 8, "optimizer": 4}, r"degrees.optimizer is 4, .* a multiple of gradients, 8; write 8"),
    ],
)
def test_degrees_that_do_not_divide_say_which_would_do(degrees: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        degrees_of({"degrees": degrees})


def test_degrees_of_single_units_complete_those_of_the_rest() -> None:
    zero = {"parameters": "node", "optimizer": "all"}
    one = {"units": "experts.*", "gradients": "all"}
    section = {"degrees": {**zero, "per_unit": [one, {"units": "*", "parameters": 1, "gradients": 1}]}}
    resolved = load({"zero_optimization": section}).resolve(world_size=8, ranks_per_node=4)
    (first, experts), (_, others) = resolved.zero_optimization.unit_degree_numbers
    assert first == "experts.*" and tuple(experts[state] for state in STATES) == (4, 8, 8)
    assert tuple(others[state] for state in STATES) == (1, 1, 8)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (
            {"parameters": 3, "gradients": 6, "optimizer": 6},
            r"per_unit.0.parameters is 3, and .*degrees.parameters is 2: .* write 2",
        ),
        ({"parameters": 8, "gradients": 4}, r"per_unit.0.gradients is 4, and must divide .* multiple of parameters, 8"),
        ({"parameter": 2}, r"per_unit.0.parameter: unknown key. Did you mean .*per_unit.0.parameters"),
    ],
)
def test_degrees_of_single_units_that_do_not_fit_say_which_would_do(degrees: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        degrees_of({"degrees": {"parameters": 2, "per_unit": [{"units": "*", **degrees}]}}, 24)


def test_a_pattern_that_matches_no_unit_is_an_error_that_lists_units() -> None:
    with pytest.raises(ZeroEngineError, match=r"'experts.\*' matches no unit. The units are .*blocks.0, blocks.1"):
        zeroengine.initialize(build(TinyLM), config=degree_config((1, 1, 1, ("experts.*", (1, 1, 1)))))


def test_a_second_copy_alone_belongs_to_parameters_over_all_ranks() -> None:
    section = {"stage": 3, "zero_hpz_partition_size": 4}
    assert degrees_of(section) == (8, 8, 8)
    resolved = load({"zero_optimization": section}).resolve(world_size=8, ranks_per_node=4)
    assert resolved.zero_optimization.degree_numbers["secondary"] == 4  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"secondary_parameters is 3, .* less; write 1 or 2 or 4"):
        degrees_of({"degrees": {"secondary_parameters": 3}})
    with pytest.raises(ConfigError, match="leave one of them out"):
        load({"zero_optimization": section | {"offload_param": {"device": "cpu"}}})


def test_the_degree_of_a_node_needs_even_nodes() -> None:
    with pytest.raises(ConfigError, match="equally many ranks on every machine"):
        degrees_of({"degrees": {"parameters": "node"}}, ranks_per_node=0)


def test_degrees_of_the_engine_are_checked_against_its_ranks() -> None:
    with pytest.raises(ZeroEngineError, match="must divide the 1 rank; write 1"):
        zeroengine.initialize(build(TinyLM), config=degree_config((2, 2, 2)))
