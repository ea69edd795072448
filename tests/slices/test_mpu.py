"""A model whose plain parameters are slices, as an ``mpu`` says, trains and is saved as the whole model is."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import zeroengine
from tests.distributed.models import batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, Trained, adamw, assert_same_bits, start, take_steps, train_plainly
from tests.emulated import cpu_alone
from tests.slices.mpu_models import SLICES, Unit, make_mpu_engine, sliced_lm
from tests.slices.split_models import by_sample_group, make_split_engine, small_lm
from tests.slices.test_checkpoints import States, assert_same, train_and_save, whole_states
from tests.slices.test_muon import muon
from tests.slices.test_refusals import message
from tests.weights.test_stream import same, taken
from zeroengine.integrations import deepspeed

pytestmark = cpu_alone("the ranks of a model group talk over Gloo")

TASK, CLIPPED = Task(small_lm, steps=3), Task(small_lm, steps=3, clip=0.1)
BY_MUON = Task(small_lm, optimizer=muon, steps=3)
WHATS = ("group", "world_size", "rank")
UP, DOWN, WHOLE = "blocks.0.up.weight", "blocks.1.down.weight", "blocks.0.norm.weight"


def train(task: Task, stage: int) -> Trained:
    engine = make_mpu_engine(2, stage, task=task)
    losses, norms = by_sample_group(task, engine)
    trained = Trained(losses, norms, engine.full_state_dict())
    engine.close()
    return trained


def train_megatron_model(stage: int) -> Trained:
    """On one rank: train a model of fused matrices with Megatron's names and marks, by ``deepspeed.initialize``."""
    unit = Unit(2)
    model = build(lambda: sliced_lm(unit, num_parts=2))
    for name, param in model.named_parameters():
        if ".up." in name or name.endswith("down.weight"):
            param.tensor_model_parallel, param.partition_stride = True, 2  # type: ignore[attr-defined]
            param.partition_dim = int("down" in name)  # type: ignore[attr-defined]
    more = {"train_micro_batch_size_per_gpu": None, "train_batch_size": 4}
    settings = config(stage, optimizer=None, **more)
    kinds = {"tensor_model_parallel": "model_parallel", "data_parallel": "data_parallel"}
    mpu = SimpleNamespace(
        get_pipeline_model_parallel_world_size=lambda: 1,
        **{f"get_{new}_{what}": getattr(unit, f"get_{old}_{what}") for new, old in kinds.items() for what in WHATS},
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=settings, mpu=mpu)
    assert engine.mpu is mpu and engine.train_micro_batch_size_per_gpu() == 2
    losses, norms = by_sample_group(TASK, engine.engine)
    trained = Trained(losses, norms, engine.engine.full_state_dict())
    engine.destroy()
    return trained


def overflow() -> tuple[list[int], bool]:
    """On one rank: the skipped steps so far, as a slice of rank 3 overflows, and whether that step changed values."""
    engine = make_mpu_engine(2, 3, {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}})
    overflows = False

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, float("inf")) if overflows and engine.rank == 3 else gradient

    engine.module.get_parameter(DOWN).register_hook(spoil)
    skipped, states = [], []
    for step in range(2):
        overflows = step == 1
        take_steps(engine, range(step, step + 1), share=engine.sample_group)
        skipped.append(engine.skipped_steps)
        states.append(engine.full_state_dict())
    engine.close()
    return skipped, any(not torch.equal(states[0][key], states[1][key]) for key in states[0])


def use_values(folder: Path) -> dict[str, Any]:
    """On one rank: what is read and written as whole values, and what the parameters are meanwhile and afterwards."""
    engine = make_mpu_engine(2, 3)
    params = dict(engine.module.named_parameters())
    batches = torch.cat([ids for (ids,) in engine.dataloader(TensorDataset(torch.arange(12)))])
    found: dict[str, Any] = {"samples": (engine.sample_group, batches.tolist())}
    found["before"] = engine.full_state_dict()
    engine.backward(engine(*batch(0, engine.sample_group)))
    found["gradient"] = zeroengine.full_gradient(params[UP])
    zeroengine.set_full_master(params[DOWN], torch.ones_like(found["before"][DOWN]))
    with zeroengine.gathered(engine.module), torch.no_grad():
        found["local"] = params[UP].clone()
        params[UP].mul_(2)
    found["after"] = engine.full_state_dict()
    engine.save_weights(folder)
    engine.load_weights({name: value + 1 for name, value in found["before"].items()} if engine.rank == 0 else None)
    found["loaded"] = engine.full_state_dict()
    engine.load_weights(folder)
    found["from files"] = engine.full_state_dict()
    found["streamed"] = taken(engine.stream_weights())
    engine.close()
    assert type(params[UP]) is nn.Parameter
    found["own"] = params[UP].detach().clone()
    return found


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)


def build_with_and_without_values() -> list[States]:
    """On one rank: the whole parameters of a model of two slices that was built at once, and under ``meta_init``."""
    unit, found = Unit(2), []
    for context in (contextlib.nullcontext, zeroengine.meta_init):
        torch.manual_seed(unit.number)
        with context():
            model = Perceptron()
        slices = {"slices": {"up.*": 0, "down.weight": 1}}
        engine = zeroengine.initialize(model, config=config(3, tensor_parallel=slices), mpu=unit)
        found.append(engine.full_state_dict())
        engine.close()
    return found


def plain_data_parallelism() -> tuple[list[float], list[float]]:
    """On one rank: the losses with an ``mpu`` of one rank a model, and without one."""
    unit = Unit(1)
    losses = []
    for more in ({"mpu": unit}, {}):
        model = build(small_lm)
        engine = zeroengine.initialize(model, adamw(model), config(3, optimizer=None), **more)  # type: ignore[arg-type]
        losses.append(take_steps(engine, range(2)))
        engine.close()
    return losses[0], losses[1]


def step_without_biases() -> None:
    """Take a step of a model of which the patterns leave some slices out."""
    some = {"blocks.*.up.weight": 0, "blocks.*.down.weight": 1}
    engine = make_mpu_engine(2, 1, {"tensor_parallel": {"slices": some}})
    take_steps(engine, range(1), share=engine.sample_group)


def of_errors() -> dict[str, str]:
    unit = Unit(2)

    def error(mpu: Any = unit, slices: Any = SLICES, model: nn.Module | None = None, **more: Any) -> str:
        more = {"tensor_parallel": {"slices": slices} | more}
        return message(zeroengine.initialize, model or build(lambda: sliced_lm(unit)), None, config(1, **more), mpu=mpu)

    class Changed(Unit):
        def __init__(self, **results: Any) -> None:
            vars(self).update(vars(unit))
            vars(self).update({name: lambda result=result: result for name, result in results.items()})

    marked = build(lambda: sliced_lm(unit))
    marked.get_parameter(UP).tensor_model_parallel = True  # type: ignore[attr-defined]
    parts = build(lambda: sliced_lm(unit))
    parts.get_parameter(WHOLE).sequence_parallel = True  # type: ignore[attr-defined]
    # Ranks 0 and 2, and 1 and 3, would hold one model together, while rank 3 says otherwise.
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    of_rank_3 = Changed(get_model_parallel_group=across, get_model_parallel_rank=1)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    of_dtensors = small_lm()
    zeroengine.parallelize(of_dtensors, {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, size=2)
    assert mesh.size() == 2
    return {
        "method": error(object()),
        "group": error(
            Changed(get_data_parallel_group=dist.new_group([dist.get_rank()], use_local_synchronization=True))
        ),
        "groups that overlap": error(of_rank_3 if dist.get_rank() == 3 else unit),
        "one rank without": error(*(unit, SLICES) if dist.get_rank() else (None, {})),
        "pipeline": error(Changed(get_pipe_parallel_world_size=2)),
        "pattern": error(slices={"layers.*.up": 0}),
        "dimension": error(slices={UP: 2}),
        "parts": error(slices={UP: [0, 5]}),
        "mark": error(slices={}, model=marked),
        "no slices": error(slices={}),
        "sequence_parallel": error(model=parts),
        "autotp_size": error(autotp_size=2),
        "DTensors": error(model=of_dtensors),
        "no mpu": error(None),
        "forgotten": message(step_without_biases),
    }


MESSAGES = {
    "method": r"takes an object with the method get_model_parallel_world_size\(\), which object has not",
    "group": r"rank . is number . of 2 in the model group \[., .\], and in a data group of 1: let .* be the 4 ranks",
    "groups that overlap": r"split over ranks .*: each rank must split its model over as many ranks",
    "one rank without": r"the ranks were started differently; .* rank 1: configuration tensor_parallel.slices",
    "pipeline": r"the mpu has pipeline parallelism, which is not supported",
    "pattern": r"slices: the pattern 'layers.\*.up' matches no parameter. Parameters are named like: tok.weight",
    "dimension": rf"parameter {UP} of shape \(36, 24\) is no slice along dimension 2 .*: write a dimension from 0 to 1",
    "parts": rf"parameter {UP} of shape \(36, 24\) is no slice along dimension 0 of 5 equal parts",
    "mark": rf"parameter {UP} of shape \(36, 24\) is no slice along dimension 2",
    "no slices": r'the mpu splits no parameter: write "tensor_parallel": {"slices"',
    "sequence_parallel": rf"parameter {WHOLE} is marked sequence_parallel: sum the parts",
    "autotp_size": r"initialize\(mpu=...\) is for plain parameters, and .* autotp_size",
    "DTensors": r"initialize\(mpu=...\) is for plain parameters, and the model has DTensors",
    "forgotten": r"different gradients of blocks.0.up.bias, .* slices that no pattern of tensor_parallel.slices names",
    "no mpu": r"tensor_parallel.slices are those of an mpu: pass initialize\(mpu=...\)",
}


def observe(folder: Path) -> dict[str, Any]:
    start()
    return {
        "stages": [train(TASK, stage) for stage in range(4)],
        "clipped": train(CLIPPED, 3),
        "Muon": train(BY_MUON, 2),
        "megatron": train_megatron_model(2),
        "overflow": overflow(),
        "values": use_values(folder / "weights"),
        "plain": plain_data_parallelism(),
        "built": build_with_and_without_values(),
        "errors": of_errors(),
    }


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, observe, tmp_path_factory.mktemp("mpu"), timeout=240)


def check(ranks: list[Trained], task: Task) -> None:
    plain = train_plainly(task, 2)
    means = [sum(losses) / len(ranks) for losses in zip(*(trained.losses for trained in ranks), strict=True)]
    assert means == pytest.approx(plain.losses, rel=1e-5)
    for trained in ranks:
        assert trained.norms == pytest.approx(plain.norms, rel=1e-6)
        for name, value in plain.state.items():
            torch.testing.assert_close(trained.state[name], value, rtol=1e-4, atol=1e-5)


def test_plain_slices_train_as_one_process_does_with_the_same_bits_at_every_stage(observed: list[Any]) -> None:
    for rank in observed:
        for stage, trained in enumerate(rank["stages"]):
            assert_same_bits(trained, rank["stages"][0], f"stage {stage}")
    check([rank["stages"][0] for rank in observed], TASK)


def test_one_norm_of_all_slices_clips_them(observed: list[Any]) -> None:
    check([rank["clipped"] for rank in observed], CLIPPED)


def test_muon_updates_the_whole_matrices_of_plain_slices(observed: list[Any]) -> None:
    check([rank["Muon"] for rank in observed], BY_MUON)


def test_megatron_s_marks_under_deepspeed_s_name_say_what_is_a_slice_of_fused_matrices(observed: list[Any]) -> None:
    check([rank["megatron"] for rank in observed], TASK)


def test_an_overflow_in_one_slice_skips_the_step_on_all_ranks(observed: list[Any]) -> None:
    assert [rank["overflow"] for rank in observed] == [([0, 1], False)] * 4


def test_whole_values_are_read_and_written_and_the_slices_are_plain_parameters(observed: list[Any]) -> None:
    initial = {name: value.detach() for name, value in build(small_lm).named_parameters()}
    for number, rank in enumerate(observed):
        found = rank["values"]
        for name, value in initial.items():
            assert torch.equal(found["before"][name], value)
            assert torch.equal(found["loaded"][name], value + 1)
            expected = {UP: value * 2, DOWN: torch.ones_like(value)}.get(name, value)
            assert torch.equal(found["after"][name], expected) and torch.equal(found["from files"][name], expected)
        assert found["gradient"].shape == initial[UP].shape and found["gradient"].any()
        own = initial[UP].chunk(2)[number % 2]
        assert torch.equal(found["local"], own) and torch.equal(found["own"], own * 2)
        assert same(found["streamed"], {name: found["from files"][name] for name in initial})


def test_slices_without_values_get_those_that_each_rank_has_recorded(observed: list[Any]) -> None:
    for rank in observed:
        values, recorded = rank["built"]
        assert_same(recorded, values, "meta_init")
        assert values["up.weight"].shape == (12, 8)


def test_ranks_of_a_model_group_load_the_same_samples_and_groups_others(observed: list[Any]) -> None:
    groups, samples = zip(*(rank["values"]["samples"] for rank in observed), strict=True)
    assert groups == (0, 0, 1, 1)
    assert samples[0] == samples[1] and samples[2] == samples[3]
    assert sorted(samples[0] + samples[2]) == list(range(12))


def test_an_mpu_of_one_rank_is_plain_data_parallelism(observed: list[Any]) -> None:
    for rank in observed:
        assert rank["plain"][0] == rank["plain"][1]


@pytest.mark.parametrize("name", MESSAGES)
def test_wrong_input_is_an_error_by_name_on_every_rank(name: str, observed: list[Any]) -> None:
    for rank in observed:
        assert re.search(MESSAGES[name], rank["errors"][name], re.DOTALL), rank["errors"][name]


# -- checkpoints --------------------------------------------------------------------------------------


def save(folder: Path) -> tuple[States, list[float]]:
    """On one rank: the states that are saved after two steps, and the losses of two more."""
    return train_and_save(make_mpu_engine(2, 3), folder)


def load(size: int, stage: int, source: Path, target: Path) -> tuple[States, list[float]]:
    """On one rank: the states that are loaded, and saved again, and the losses of two steps."""
    engine = make_split_engine(1, stage) if size == 1 else make_mpu_engine(size, stage)
    engine.load_checkpoint(source)
    loaded = whole_states(engine)
    engine.save_checkpoint(target)
    losses = take_steps(engine, range(2, 4), share=engine.sample_group)
    engine.close()
    return loaded, losses


def test_a_checkpoint_moves_to_a_whole_model_and_back_with_equal_bits(tmp_path: Path) -> None:
    saved = run_ranks(4, save, tmp_path / "home")
    for loaded, _ in run_ranks(2, load, 1, 1, tmp_path / "home", tmp_path / "whole"):
        assert_same(loaded, saved[0][0], "whole")
    for (states, losses), (loaded, continued) in zip(
        saved, run_ranks(4, load, 2, 3, tmp_path / "whole", tmp_path / "back"), strict=True
    ):
        assert_same(loaded, states, "back")
        assert losses == continued


@pytest.mark.slow  # as to a whole model, to another number of slices
def test_a_checkpoint_moves_to_another_number_of_slices(tmp_path: Path) -> None:
    saved = run_ranks(4, save, tmp_path / "home")
    for loaded, _ in run_ranks(4, load, 4, 0, tmp_path / "home", tmp_path / "four"):
        assert_same(loaded, saved[0][0], "four")
