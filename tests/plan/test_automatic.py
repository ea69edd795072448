"""``initialize`` chooses by free memory what is "auto", and refuses what cannot fit, with numbers that are right."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.distributed.ranks import run_ranks
from zeroengine import ZeroEngineError
from zeroengine.config import load
from zeroengine.memory.free_memory import FreeMemory
from zeroengine.memory.state_bytes import RankTopology
from zeroengine.memory.state_choice import StateChoice
from zeroengine.memory.state_memory import StateMemory, fit_configuration
from zeroengine.offload.host_memory import HOST_LIMIT_VARIABLE, available_memory
from zeroengine.partition.cut import cut_units
from zeroengine.plan.search.automatic import choose_states

GIB = 1 << 30
AUTO = {"stage": "auto", "offload_optimizer": {"device": "auto"}}


def blocks(num_blocks: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_blocks)))


def config_of(zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}}
    return {"zero_optimization": zero, "optimizer": optimizer, **more}


def memory_of(zero: dict[str, Any], world_size: int = 8, device: Any = "cuda", **more: Any) -> StateMemory:
    """The memory of the states of a billion parameters, in bf16 unless ``more`` says otherwise."""
    with torch.device("meta"):
        model = blocks(16, 8192)
    config = load(config_of(zero, **({"bf16": {"enabled": True}} | more))).resolve(world_size=world_size)
    plans = cut_units(model, compute_dtype=config.low_precision)
    return StateMemory(plans, config, RankTopology(world_size, device, "nccl" if device == "cuda" else "gloo"), None)


def fit(memory: StateMemory, free_memory: FreeMemory) -> tuple[StateMemory, str | None]:
    return fit_configuration(memory, lambda _: free_memory, choose_states)


def free(device: float, host: float = 1000, disk: float = 0) -> FreeMemory:
    return FreeMemory(int(device * GIB), int(host * GIB), int(disk * GIB), 8, 3)


# Sixteen bytes a parameter at stage 0: 16 GiB of states, of which 12 GiB are partitioned at stage 1.
@pytest.mark.parametrize(
    ("device_gib", "stage", "place"),
    [(80, 0, "none"), (14, 1, "none"), (7, 2, "none"), (4, 3, "none"), (2.2, 3, "cpu")],
)
def test_the_first_choice_is_taken_that_leaves_a_quarter_for_activations(
    device_gib: float, stage: int, place: str
) -> None:
    memory, notice = fit(memory_of(AUTO), free(device_gib))
    chosen = memory.current()
    assert (chosen.stage, chosen.offload_optimizer) == (stage, place)
    assert memory.requirement(chosen).device <= 0.75 * device_gib * GIB
    assert notice is not None and notice.startswith(f'"auto" is stage {stage}, offload_optimizer {place}: it takes ')


def test_only_what_is_auto_is_chosen() -> None:
    memory, notice = fit(memory_of({"stage": 1, "offload_optimizer": {"device": "auto"}}), free(6))
    assert memory.current() == StateChoice(1, "cpu")
    assert notice is not None and notice.startswith('"auto" is offload_optimizer cpu: ')
    memory, _ = fit(memory_of({"stage": "auto", "offload_param": {"device": "cpu"}}), free(80))
    assert memory.current() == StateChoice(3, "none", "cpu"), "no lower stage releases parameters"
    memory, notice = fit(memory_of({"stage": 2}), free(80))
    assert memory.current() == StateChoice(2) and notice is None


def test_a_disk_is_chosen_only_where_a_folder_is_named(tmp_path: Path) -> None:
    small = free(2.2, host=0.1, disk=1000)
    with pytest.raises(ZeroEngineError, match="does not fit"):
        fit(memory_of(AUTO), small)
    named = AUTO | {"offload_optimizer": {"device": "auto", "nvme_path": str(tmp_path), "buffer_size": 1 << 12}}
    memory, _ = fit(memory_of(named), free(2.2, host=1, disk=1000))
    assert memory.current() == StateChoice(3, "nvme")


def test_what_cannot_fit_is_refused_with_the_two_nearest_choices_that_do() -> None:
    with pytest.raises(ZeroEngineError) as error:
        fit(memory_of({"stage": 1}), free(5))
    message = str(error.value)
    assert message.startswith("the model does not fit: stage 1 takes 5.")
    assert "of a rank's GPU memory, and 5.0 GiB are free (rank 3)" in message
    assert "parameters 2.0 GiB, gradients 2.0 GiB, master 512." in message
    assert re.search(r'"stage": 2\} takes 4\.\d GiB a rank, or "zero_optimization": \{"stage": 3\} takes 2', message)


def test_a_warning_takes_the_place_of_the_refusal_where_it_is_asked_for() -> None:
    memory, notice = fit(memory_of({"stage": 1}, memory_check="warn"), free(5))
    assert memory.current() == StateChoice(1) and notice is not None and "does not fit" in notice
    memory, notice = fit(memory_of({"stage": 1}, memory_check="off"), free(5))
    assert notice is None


def test_too_little_on_every_machine_names_zero_plan_or_the_unit_that_is_the_cause() -> None:
    with pytest.raises(ZeroEngineError, match=r"No stage and no offload fits .* zero-plan --nodes N says"):
        fit(memory_of({"stage": 3}), free(2.2, host=0.1))
    with pytest.raises(ZeroEngineError, match=r"Even unit 0 alone, 128\.0 MiB where it is gathered, is too large: cut"):
        fit(memory_of({"stage": 3}), free(0.1))


def test_optimizers_of_torch_are_never_offloaded_by_choice_and_serve_every_stage() -> None:
    memory = memory_of(AUTO)
    optimizer = torch.optim.Adafactor([p for plan in memory.plans for _, p in plan.params])
    memory = StateMemory(memory.plans, memory.config, RankTopology(8, "cuda", "nccl"), optimizer)
    choices = memory.choices("auto", "auto", "auto", any_disk=True)
    assert {(choice.stage, choice.offload_optimizer) for choice in choices} == {(stage, "none") for stage in range(4)}
    # A value per row and per column, where Adam has two per element.
    assert memory.requirement(choices[-1]).states.device["optimizer"] < 2**20


def starts(limits: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """On a rank: the stages that ``initialize`` chooses, or what it says, at limits of the machine's free memory."""
    dist.init_process_group("gloo")
    found: list[Any] = []
    for limit, config in limits:
        # Rank 1 has half of the memory that rank 0 has.
        os.environ[HOST_LIMIT_VARIABLE] = limit if dist.get_rank() == 0 else f"{int(limit[:-3]) // 2}MiB"
        try:
            engine = zeroengine.initialize(blocks(8, 512), config=config)
        except ZeroEngineError as error:
            found.append(str(error))
        else:
            found.append(engine.config.zero_optimization.stage)
            engine.backward(engine(torch.ones(2, 512)).sum())
            engine.step()
            engine.close()
    return found


def test_all_ranks_choose_and_refuse_alike_by_the_least_memory() -> None:
    limits = [
        ("1000MiB", config_of({"stage": "auto"})),
        ("120MiB", config_of({"stage": "auto"})),
        ("30MiB", config_of({"stage": "auto"})),
        ("60MiB", config_of({"stage": 0})),
        ("60MiB", config_of({"stage": 0}, memory_check="warn")),
    ]
    first, second = run_ranks(2, starts, limits)
    assert first == second
    large, small, none, refused, warned = first
    assert (large, small, warned) == (0, 1, 0)
    assert "stage 0 takes 24.2 MiB of a rank's CPU memory, and 15.0 MiB are free" in refused and "(rank 1)" in refused
    fitting = [
        f'"zero_optimization": {{"stage": {stage}}} takes {size} MiB a rank' for stage, size in ((2, 14.2), (3, 10.1))
    ]
    assert f"What fits: {', or '.join(fitting)}. With" in refused
    assert "No stage and no offload fits" in none


def test_a_limit_of_the_user_counts_and_must_be_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_LIMIT_VARIABLE, "1MiB")
    assert available_memory() == 1 << 20
    monkeypatch.setenv(HOST_LIMIT_VARIABLE, "5 apples")
    with pytest.raises(ZeroEngineError, match="ZEROENGINE_FREE_HOST_MEMORY 5 apples: write a size such as 5GB"):
        available_memory()


def test_a_framework_s_stage_and_device_win_over_auto() -> None:
    values = {"zero_optimization.stage": 2, "zero_optimization.offload_optimizer.device": "cpu"}
    zero = load({"zero_optimization": AUTO}).fill_auto(values).zero_optimization
    assert (zero.stage, zero.offload_optimizer.device) == (2, "cpu")
