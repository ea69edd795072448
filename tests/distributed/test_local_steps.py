"""Replicas that take steps of their own and are averaged after some of them (`local_steps`)."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import STAGES, start, take_steps
from tests.distributed.whole_states import whole_states
from zeroengine.errors import ZeroEngineError

State = dict[str, torch.Tensor]

LEARNING_RATE, MOMENTUM = 0.7, 0.9
NESTEROV = {"outer": "nesterov", "learning_rate": LEARNING_RATE, "momentum": MOMENTUM}


class PartlyFrozen(TinyLM):
    """A tied head, a frozen block and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.register_buffer("scale", torch.ones(3))


def local(stage: int, steps: int, replica_ranks: int, outer: Mapping[str, Any] | None = None, **more: Any) -> Any:
    """A configuration with replicas."""
    return config(stage, local_steps={"steps": steps, "replica_ranks": replica_ranks, **(outer or {})}, **more)


def with_degrees(settings: dict[str, Any], degrees: Sequence[int]) -> dict[str, Any]:
    """The configuration with degrees of parameters, gradients and optimizer in place of its stage."""
    del settings["zero_optimization"]["stage"]
    names = ("parameters", "gradients", "optimizer")
    settings["zero_optimization"]["degrees"] = dict(zip(names, degrees, strict=True))
    return settings


def differences(first: State, second: State) -> list[str]:
    """The names of tensors whose bits differ."""
    assert first.keys() == second.keys()
    return [name for name, value in first.items() if not torch.equal(value, second[name])]


def states_after_steps(all_settings: Sequence[dict[str, Any]], steps: int) -> list[list[State]]:
    """For each of some settings: the replica's parameters after each step, and those of the model in the end."""
    start()
    found = []
    for settings in all_settings:
        engine = zeroengine.initialize(build(PartlyFrozen), config=settings)
        states = []
        for step in range(steps):
            take_steps(engine, range(step, step + 1))
            states.append(engine.full_state_dict())
        engine.close()
        found.append([*states, {name: value.detach().clone() for name, value in engine.module.state_dict().items()}])
    return found


BF16 = {"bf16": {"enabled": True}}
EQUAL_AFTER_ROUNDS = [
    local(1, 2, 2, comm={"transport": "gloo"}, **BF16),
    local(3, 2, 2, NESTEROV),
    local(0, 2, 2),
    local(2, 2, 1, optimizer_state_dtype="bf16", **BF16),
    local(3, 2, 2, NESTEROV, comm={"transport": "gloo"}),
    local(3, 2, 2, NESTEROV, **BF16),
]


@pytest.mark.parametrize(
    "chosen",
    [EQUAL_AFTER_ROUNDS[:2], pytest.param(EQUAL_AFTER_ROUNDS[2:], marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_replicas_are_equal_in_bits_after_each_round_and_differ_within(chosen: list[dict[str, Any]]) -> None:
    for ranks in zip(*run_ranks(4, states_after_steps, chosen, 3), strict=True):
        assert not differences(ranks[0][1], ranks[2][1])
        for step in (0, 2):
            assert differences(ranks[0][step], ranks[2][step])
        # The end of the engine ends the round.
        for states in ranks[1:]:
            assert not differences(ranks[0][3], states[3])
        assert differences(ranks[0][2], ranks[0][3])


def own_replica(settings: dict[str, Any], steps: int, ranks_per_replica: int) -> tuple[Any, Any]:
    """Losses, norms and states within a round, and those of an ordinary run on the ranks of the replica alone."""
    rank = start()
    found = []
    for alone in (False, True):
        more, group = copy.deepcopy(settings), None
        if alone:
            del more["local_steps"]
            replicas = range(0, dist.get_world_size(), ranks_per_replica)
            groups = [dist.new_group(list(range(first, first + ranks_per_replica))) for first in replicas]
            group = groups[rank // ranks_per_replica]
        engine = zeroengine.initialize(build(PartlyFrozen), config=more, process_group=group)
        losses, norms = [], []
        for step in range(steps):
            loss = engine(*batch(step, rank))
            engine.backward(loss)
            if engine.step():
                norms.append(engine.grad_norm)
            losses.append(loss.item())
        found.append((losses, norms, whole_states(engine)))
        engine.close()
    return found[0], found[1]


@pytest.mark.parametrize(
    ("stage", "ranks_per_replica", "more"),
    [
        (3, 2, {"gradient_accumulation_steps": 2, "gradient_clipping": 0.3}),
        pytest.param(2, 2, {"bf16": {"enabled": True}, "comm": {"transport": "gloo"}}, marks=pytest.mark.slow),
        pytest.param(0, 2, {}, marks=pytest.mark.slow),
        pytest.param(1, 2, {"optimizer_state_dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param(3, 1, {}, marks=pytest.mark.slow),
    ],
)
def test_within_a_round_a_replica_has_the_bits_of_a_run_on_its_ranks_alone(
    stage: int, ranks_per_replica: int, more: dict[str, Any]
) -> None:
    ranks = run_ranks(4, own_replica, local(stage, 100, ranks_per_replica, **more), 6, ranks_per_replica)
    for (losses, norms, state), (own_losses, own_norms, own_state) in ranks:
        assert losses == own_losses
        assert norms == own_norms
        assert not differences(state, own_state)
    assert ranks[0][0][0] != ranks[3][0][0]


# -- against the algorithm in plain PyTorch ---------------------------------------------------------


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2)


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)


def plain_diloco(
    world_size: int,
    ranks_per_replica: int,
    steps: int,
    round_steps: int,
    nesterov: bool,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = make_adamw,
) -> State:
    """Train replicas by plain PyTorch as DiLoCo, algorithm 1, has it, with `torch.optim.SGD` as outer optimizer."""
    model = build(PartlyFrozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    outer = torch.optim.SGD(
        trained,
        lr=LEARNING_RATE if nesterov else 1.0,
        momentum=MOMENTUM if nesterov else 0.0,
        nesterov=nesterov,
    )
    firsts = range(0, world_size, ranks_per_replica)
    replicas = [build(PartlyFrozen) for _ in firsts]
    inner = [make_optimizer(replica) for replica in replicas]
    for step in range(steps):
        for replica, optimizer, first in zip(replicas, inner, firsts, strict=True):
            losses = [replica(*batch(step, rank)) for rank in range(first, first + ranks_per_replica)]
            torch.stack(losses).mean().backward()
            torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % round_steps:
            continue
        own = [[p for p in replica.parameters() if p.requires_grad] for replica in replicas]
        for param, *versions in zip(trained, *own, strict=True):
            param.grad = param.detach() - torch.stack([v.detach() for v in versions]).mean(0)
        outer.step()
        with torch.no_grad():
            for versions in own:
                for param, version in zip(trained, versions, strict=True):
                    version.copy_(param)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def trained_states(all_settings: Sequence[dict[str, Any]], steps: int, make_optimizer: Any = make_adamw) -> list[State]:
    """The parameters after some steps, for each of some settings."""
    start()
    states = []
    for settings in all_settings:
        model = build(PartlyFrozen)
        engine = zeroengine.initialize(model, make_optimizer(model), settings)
        take_steps(engine, range(steps))
        states.append(engine.full_state_dict())
        engine.close()
    return states


def assert_all_close(ranks: Sequence[Sequence[State]], expected: State, which: slice = slice(None)) -> None:
    for states in ranks:
        for number, state in enumerate(states[which]):
            for name, value in expected.items():
                torch.testing.assert_close(
                    state[name], value, rtol=0, atol=1e-6, msg=lambda m, n=number, x=name: f"settings {n}, {x}: {m}"
                )


def test_the_outer_step_is_that_of_diloco_in_plain_pytorch() -> None:
    chosen = [local(stage, 2, 2, NESTEROV, optimizer=None) for stage in STAGES]
    means = [local(stage, 2, 2, optimizer=None) for stage in (0, 2)]
    ranks = run_ranks(4, trained_states, [*chosen, *means], 6)
    assert_all_close(ranks, plain_diloco(4, 2, 6, 2, nesterov=True), slice(len(STAGES)))
    assert_all_close(ranks, plain_diloco(4, 2, 6, 2, nesterov=False), slice(len(STAGES), None))


@pytest.mark.slow  # the test above has stages, and test_degrees hybrid degrees
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_the_outer_step_is_that_of_diloco_at_degrees_below_the_ranks_of_a_replica(transport: str) -> None:
    all_degrees = [(1, 1, 2), (2, 2, 4)] if transport == "shm" else [(1, 1, 2), (2, 2, 2), (1, 2, 4), (2, 2, 4)]
    settings = local(3, 2, 4, NESTEROV, optimizer=None, comm={"transport": transport})
    ranks = run_ranks(8, trained_states, [with_degrees(copy.deepcopy(settings), d) for d in all_degrees], 4)
    assert_all_close(ranks, plain_diloco(8, 4, 4, 2, nesterov=True))


@pytest.mark.slow  # the outer step is that of DiLoCo, which is this at a round of one step
def test_rounds_of_one_step_of_sgd_are_data_parallel_training() -> None:
    plain = {"optimizer": None, "gradient_clipping": 0.0}
    chosen = [config(3, **plain), local(3, 1, 2, **plain), local(3, 2, 2, **plain)]
    ordinary, every_step, apart = run_ranks(4, trained_states, chosen, 4, make_sgd)[0]
    for name, value in ordinary.items():
        torch.testing.assert_close(every_step[name], value, rtol=0, atol=1e-6)
    # Two steps of each replica are something else.
    assert any((apart[name] - value).abs().max() > 1e-5 for name, value in ordinary.items())


# -- what crosses between replicas ------------------------------------------------------------------


def sums_between_replicas(steps: int, round_steps: int, folder: Path) -> tuple[list[int], float]:
    """The elements that this rank sums with its counterparts in each step. Rank 1 waits for rank 0's first round."""
    rank = start()
    settings = local(1, round_steps, 1, NESTEROV, optimizer=None)
    model = build()
    engine = zeroengine.initialize(model, make_adamw(model), settings)
    channel = engine._parts.ranks.replicas.between.reduce  # type: ignore[union-attr]
    sums: list[int] = []
    flag = folder / "rank 0 has taken all steps of its round but one"
    with mock.patch.object(channel, "all_reduce", wraps=channel.all_reduce) as all_reduce:
        for step in range(steps):
            while rank == 1 and not flag.exists():
                time.sleep(0.01)
            before = all_reduce.call_count
            take_steps(engine, range(step, step + 1))
            sums.append(sum(call.args[0].numel() for call in all_reduce.call_args_list[before:]))
            if step == round_steps - 2:
                flag.touch()
    numel = sum(p.numel() for p in model.parameters())
    engine.close()
    return sums, numel


def test_replicas_exchange_their_parameters_once_in_a_round_and_nothing_else(tmp_path: Path) -> None:
    for sums, numel in run_ranks(2, sums_between_replicas, 8, 4, tmp_path):
        assert sums == [0, 0, 0, sums[3], 0, 0, 0, sums[3]]
        # Units are padded.
        assert numel <= sums[3] <= 1.3 * numel


def stall(transport: str) -> str:
    """What a rank raises while rank 3, of the second replica, does not come to the outer step."""
    rank = start()
    engine = zeroengine.initialize(
        build(), config=local(2, 2, 2, comm={"transport": transport, "timeout_seconds": 1.0})
    )
    take_steps(engine, range(1))
    if rank == 3:
        time.sleep(6)
        return ""
    try:
        take_steps(engine, range(1, 2))
    except ZeroEngineError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("transport", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_replica_that_does_not_come_to_the_outer_step_is_named(transport: str) -> None:
    errors = run_ranks(4, stall, transport)
    # Rank 2 waits for the other rank of its replica, and rank 1 for its counterpart.
    for rank in (1, 2):
        assert "rank 3" in errors[rank], errors
    assert "outer step after step 2" in errors[1], errors


# -- reading and writing between rounds -------------------------------------------------------------


def write_within_a_round() -> tuple[list[bool], State, State]:
    start()
    engine = zeroengine.initialize(build(), config=local(3, 100, 2, NESTEROV))
    changed = [engine.average_replicas()]
    take_steps(engine, range(1))
    model = engine.module
    loss = engine(*batch(1, engine.rank))
    engine.backward(loss)
    seen = {"master": zeroengine.full_master(model.blocks[0].up.weight)}
    gradient = zeroengine.full_gradient(model.blocks[0].up.weight)
    assert gradient is not None
    seen["gradient"] = gradient
    with pytest.raises(ZeroEngineError, match="micro-steps of a step"):
        engine.average_replicas()
    engine.step()
    with zeroengine.gathered(model.head.weight), torch.no_grad():
        # As scripts for one copy of the model do it.
        if engine.rank == 0:
            model.head.weight.fill_(5.0)
        with pytest.raises(ZeroEngineError, match="inside"):
            engine.average_replicas()
    zeroengine.set_full_master(model.norm.bias, torch.full((24,), 3.0))
    written = engine.full_state_dict()
    changed += [engine.average_replicas(), engine.average_replicas()]
    averaged = engine.full_state_dict()
    engine.close()
    return changed, {**seen, **{f"written {name}": value for name, value in written.items()}}, averaged


def test_reads_concern_the_own_replica_and_writes_all_of_them() -> None:
    ranks = run_ranks(4, write_within_a_round)
    (changed, first, averaged), (_, second, _) = ranks[0], ranks[2]
    assert changed == [False, True, False]
    for name in ("master", "gradient"):
        assert torch.equal(first[name], ranks[1][1][name])
        assert not torch.equal(first[name], second[name])
    for _, seen, state in ranks:
        for prefix, values in (("written ", seen), ("", state)):
            # The outer step begins at what was written, and so leaves it.
            assert torch.equal(values[f"{prefix}head.weight"], torch.full((61, 24), 5.0))
            assert torch.equal(values[f"{prefix}norm.bias"], torch.full((24,), 3.0))
        assert not differences(state, averaged)
    name = "written blocks.0.up.weight"
    assert not torch.equal(first[name], second[name])


def round_masters_of_replicas() -> None:
    rank = start()
    models, states = [build(), build().bfloat16().float()], []
    for model in models:
        engine = zeroengine.initialize(model, config=local(2, 2, 1, NESTEROV, bf16={"enabled": True}))
        if model is models[0]:
            engine.round_masters()
        take_steps(engine, range(3))
        states.append(whole_states(engine))
        if model is models[1]:
            # In the middle of a round the replicas differ.
            engine.round_masters()
            head = zeroengine.full_master(model.head.weight)
            assert len({value.sum().item() for value in engine.group.all_gather_object(head)}) == 1, rank
        engine.close()
    assert not differences(*states)


def test_rounding_masters_rounds_what_all_replicas_start_from() -> None:
    run_ranks(2, round_masters_of_replicas)


def train_offloaded(folder: Path, cases: Sequence[tuple[int, str]]) -> list[list[str]]:
    """The names of what differs between states on the device and elsewhere, for stages and places."""
    start()
    states: list[State] = []
    for stage, place in cases:
        for device in ("none", place):
            section = {"offload_optimizer": {"device": device, "nvme_path": str(folder)}}
            if stage == 3:
                section["offload_param"] = {"device": device, "nvme_path": str(folder)}
            settings = local(stage, 2, 2, NESTEROV, bf16={"enabled": True}, zero_optimization=section)
            engine = zeroengine.initialize(build(PartlyFrozen), config=settings)
            take_steps(engine, range(3))
            if device == "none":
                engine.offload_states(include=["optimizer"], device="nvme", nvme_path=folder)
                with pytest.raises(ZeroEngineError, match="offloaded"):
                    engine.average_replicas()
                engine.reload_states()
            assert (engine.memory().nvme["optimizer"] > 0) == (device == "nvme")
            engine.average_replicas()
            states.append(whole_states(engine))
            engine.close()
    return [differences(first, other) for first, other in zip(states[::2], states[1::2], strict=True)]


@pytest.mark.parametrize("case", [(3, "nvme"), pytest.param((1, "cpu"), marks=pytest.mark.slow)], ids=str)
def test_states_in_files_and_in_cpu_memory_give_the_same_bits(tmp_path: Path, case: tuple[int, str]) -> None:
    assert run_ranks(4, train_offloaded, tmp_path, [case]) == [[[]]] * 4


# -- saving and loading -----------------------------------------------------------------------------


def outer_momentum(engine: zeroengine.Engine) -> State:
    """The whole momentum of the outer step of this rank's replica."""
    parts, momentum = engine._parts, {}
    for outer in parts.states.outer_step.shards:  # type: ignore[union-attr]
        assert outer.state is not None
        slots = outer.shard.unit.layout.slots
        for slot in slots:
            momentum[slot.name] = torch.zeros(slot.numel)
        for span, place in outer.spans():
            momentum[slots[span.param_index].name][span.param_slice] = outer.state.momentum[place]
    for value in momentum.values():
        parts.ranks.replica_group.all_reduce(value, "of values")
    return momentum


WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 3e-3, "warmup_num_steps": 9}}


def take_steps_of_which_one_overflows(engine: zeroengine.Engine, numbers: range, overflow: int = -1) -> list[float]:
    """Losses of this rank. In the step `overflow` the gradients of ranks from 2 on, the second replica, are NaN."""
    losses = []
    for number in numbers:
        loss = engine(*batch(number, engine.rank))
        engine.backward(loss * float("nan") if number == overflow and engine.rank >= 2 else loss)
        engine.step()
        losses.append(loss.item())
    return losses


def save_and_resume(folder: Path, more: dict[str, Any]) -> dict[str, Any]:
    start()
    settings = local(2, 3, 2, NESTEROV, scheduler=WARMUP, **more)
    engine = zeroengine.initialize(build(PartlyFrozen), config=settings)
    # One round, and a step of the next, of which one is skipped by the second replica.
    take_steps_of_which_one_overflows(engine, range(4), overflow=1)
    skipped = engine.skipped_steps
    engine.save_checkpoint(folder / "a")
    saved, momentum = whole_states(engine), outer_momentum(engine)
    counters = (engine.global_steps, engine.skipped_steps, engine.optimizer.param_groups[0]["lr"])
    losses = take_steps(engine, range(4, 9))
    later = whole_states(engine)
    engine.save_weights(folder / "weights")
    averaged = engine.full_state_dict()
    engine.close()
    found: dict[str, Any] = {"skipped": skipped, "counters": counters, "saved": saved, "averaged": averaged}
    for name, other in {
        "resumed": settings,
        "smaller replicas": local(3, 3, 1, NESTEROV, scheduler=WARMUP, **more),
        "one run": config(1, scheduler=WARMUP, **more),
    }.items():
        engine = zeroengine.initialize(build(PartlyFrozen, seed=1), config=other)
        engine.load_checkpoint(folder / "a")
        found[name] = {
            "saved": differences(saved, whole_states(engine)),
            "counters": (engine.global_steps, engine.skipped_steps, engine.optimizer.param_groups[0]["lr"]) == counters,
        }
        if "local_steps" in other:
            found[name]["momentum"] = differences(momentum, outer_momentum(engine))
        if name == "resumed":
            found[name]["losses"] = take_steps(engine, range(4, 9)) == losses
            found[name]["later"] = differences(later, whole_states(engine))
        engine.close()
    return found


@pytest.mark.parametrize("more", [{}, pytest.param({"bf16": {"enabled": True}}, marks=pytest.mark.slow)])
def test_a_save_ends_the_round_and_a_resumed_run_has_the_same_bits(tmp_path: Path, more: dict[str, Any]) -> None:
    ranks = run_ranks(4, save_and_resume, tmp_path, more)
    assert [found["skipped"] for found in ranks] == [0, 0, 1, 1]
    for found in ranks:
        # Replicas are equal, in their optimizers' states and counters as well.
        assert found["counters"] == ranks[0]["counters"]
        assert not differences(found["saved"], ranks[0]["saved"])
        assert not differences(found["averaged"], ranks[0]["averaged"])
        same = {"saved": [], "counters": True}
        assert found["resumed"] == {**same, "momentum": [], "losses": True, "later": []}
        assert found["smaller replicas"] == {**same, "momentum": []}
        assert found["one run"] == same


def load_other_checkpoints(folder: Path) -> dict[str, Any]:
    start()
    messages: list[str] = []
    found: dict[str, Any] = {}

    @contextlib.contextmanager
    def noting(name: str) -> Any:
        messages.clear()
        with mock.patch("zeroengine.checkpoint.load_plan.log.warning", lambda text, *a: messages.append(text % a)):
            yield
        found[name] = list(messages)

    engine = zeroengine.initialize(build(), config=config(2))
    take_steps(engine, range(2))
    engine.save_checkpoint(folder / "ordinary")
    engine.save_weights(folder / "weights")
    expected = whole_states(engine)
    engine.close()
    engine = zeroengine.initialize(build(seed=1), config=local(3, 2, 1, NESTEROV))
    take_steps(engine, range(3))
    assert all(value.any() for value in outer_momentum(engine).values())
    with noting("ordinary into replicas"):
        engine.load_checkpoint(folder / "ordinary")
    found["loaded"] = differences(expected, whole_states(engine))
    found["unmoved"] = not any(value.any() for value in outer_momentum(engine).values())
    # The loaded parameters are where the next outer step begins.
    anchors = [outer.state.anchor for outer in engine._parts.states.outer_step.shards]  # type: ignore[union-attr]
    masters = [outer.region.values for outer in engine._parts.states.outer_step.shards]  # type: ignore[union-attr]
    found["anchors"] = all(torch.equal(a, m) for a, m in zip(anchors, masters, strict=True))
    # Weights alone, within a round.
    take_steps(engine, range(1))
    engine.load_weights(folder / "weights")
    found["anchors of weights"] = all(torch.equal(a, m) for a, m in zip(anchors, masters, strict=True))
    take_steps(engine, range(1))
    engine.save_checkpoint(folder / "replicas")
    engine.close()
    engine = zeroengine.initialize(build(), config=local(2, 3, 1))
    with noting("momentum into averages"):
        engine.load_checkpoint(folder / "replicas")
    engine.close()
    return found


def test_checkpoints_of_runs_with_and_without_an_outer_momentum_load_into_one_another(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, load_other_checkpoints, tmp_path)):
        assert found["loaded"] == []
        assert found["unmoved"] and found["anchors"] and found["anchors of weights"]
        if rank == 0:
            (text,) = found["ordinary into replicas"]
            assert "starts from zero" in text
            (text,) = found["momentum into averages"]
            assert "its checkpoints will not hold: local_steps.blocks.0" in text


# -- edges ------------------------------------------------------------------------------------------


def predicted_copy(engine: zeroengine.Engine) -> int:
    state_memory = engine._parts.setup.state_memory
    return state_memory.requirement(state_memory.current()).states.checkpoint_copy


def edges(folder: Path) -> dict[str, Any]:
    rank = start()
    found: dict[str, Any] = {}
    ordinary = zeroengine.initialize(build(), config=config(1))
    take_steps(ordinary, range(1))
    found["without replicas"] = ordinary.average_replicas()
    ordinary.close()
    # The copy of an asynchronous save is shared out among the replicas.
    settings = local(0, 3, 1, NESTEROV, checkpoint={"async_save": True})
    engine = zeroengine.initialize(build(), config=settings)
    take_steps(engine, range(2))
    engine.save_checkpoint(folder)
    found["copy"] = engine.memory().checkpoint
    found["samples"] = torch.cat(list(engine.dataloader(range(12), batch_size=2))).tolist()
    found["sampler"] = engine.sample_group, engine.num_sample_groups
    found["predicted"] = predicted_copy(engine) if rank == 0 else 0
    engine.close()
    # Quantized gradients, with error feedback, are those of a replica.
    quantized = {"zero_quantized_gradients": True, "zeropp_loco_param": {}}
    engine = zeroengine.initialize(build(), config=local(2, 2, 1, zero_optimization=quantized))
    take_steps(engine, range(2))
    found["quantized"] = engine.full_state_dict()
    engine.close()
    # An elastic run that has lost its other machines goes on with one replica.
    with mock.patch.dict("os.environ", {"ZEROENGINE_FULL_WORLD_SIZE": "4"}):
        engine = zeroengine.initialize(build(), config=local(2, 2, 2, NESTEROV))
        # Each rank accumulates the work of a rank that is gone.
        take_steps(engine, range(2))
        before = engine.full_state_dict()
        found["changed"] = engine.average_replicas()
        found["moved"] = bool(differences(before, engine.full_state_dict()))
        engine.close()
    return found


def test_other_features_work_beside_replicas(tmp_path: Path) -> None:
    ranks = run_ranks(2, edges, tmp_path)
    for found in ranks:
        assert found["without replicas"] is False
        assert found["changed"] and found["moved"]
    assert not differences(ranks[0]["quantized"], ranks[1]["quantized"])
    assert sorted(ranks[0]["samples"] + ranks[1]["samples"]) == list(range(12))
    assert [found["sampler"] for found in ranks] == [(0, 2), (1, 2)]
    assert 0 < ranks[0]["copy"] <= ranks[0]["predicted"] <= 2 * ranks[0]["copy"]
