"""A model that has no values yet is split, and its slices get those of the model that is not split."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroengine
from tests.distributed.models import batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import adamw, start
from tests.emulated import cpu_alone
from tests.slices.split_models import PLAN, PLANS, small_lm, tied_lm, uneven_lm, untied_lm
from zeroengine.weights import sources

pytestmark = cpu_alone("the ranks of a model group talk over Gloo")

State = dict[str, torch.Tensor]
WIDE = 1024


def frozen_lm() -> nn.Module:
    """Return the model with a frozen block."""
    model = small_lm()
    model.blocks[0].requires_grad_(False)
    return model


def without_values(factory: Callable[[], nn.Module], **more: Any) -> nn.Module:
    """Return a model of ``meta_init``. Its values would be other ones on each rank, of which those of rank 0 count."""
    with zeroengine.meta_init(**more):
        return build(factory, seed=dist.get_rank())


def make_engine(model: nn.Module, stage: int = 3, **more: Any) -> zeroengine.Engine:
    return zeroengine.initialize(model, adamw(model), config(stage, **({"optimizer": None} | more)))


def state_of(model: nn.Module, stage: int = 3, **more: Any) -> State:
    """Return the whole values that an engine of the model has at first: the masters, and what has none."""
    engine = make_engine(model, stage, **more)
    state = engine.full_state_dict()
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.requires_grad:
            state[name] = zeroengine.full_master(param)
    engine.close()
    return state


def check_values(model: nn.Module, factory: Callable[[], nn.Module], stage: int, **more: Any) -> None:
    assert all(param.is_meta for param in model.parameters())
    expected = build(factory).state_dict()
    state = state_of(model, stage, **more)
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(state[key], value), (factory, stage, key)


def split_recorded(cases: Sequence[tuple[Callable[[], nn.Module], int]]) -> None:
    start()
    for factory, stage in cases:
        # A frozen parameter is rounded, and has no master.
        for low in ({}, {"bf16": {"enabled": True}})[: 1 if factory is frozen_lm else 2]:
            model = zeroengine.parallelize(without_values(factory), PLANS.get(factory, PLAN), size=2)
            check_values(model, factory, stage, **low)
    # A model of torch's own device gets its values from ``reset_parameters``.
    expected, found = (state_of(build_on_meta(size)) for size in (1, 2))
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def build_on_meta(size: int) -> nn.Module:
    with torch.device("meta"):
        model = small_lm()
    torch.manual_seed(0)
    return zeroengine.parallelize(model, PLAN, size=size)


def test_slices_get_the_bits_of_the_model_that_is_not_split() -> None:
    run_ranks(4, split_recorded, ((small_lm, 1), (tied_lm, 3), (uneven_lm, 3), (frozen_lm, 3)))


def split_by_own_plan() -> None:
    from tests.slices.test_transformers import make_model

    start()
    for name, keys in (
        ("qwen3", {"tensor_parallel": {"autotp_size": 2}}),
        ("mixtral", {"expert_parallel": {"enabled": True, "autoep_size": 4}}),
    ):
        factory = functools.partial(make_model, name)
        check_values(without_values(factory), factory, 3, **keys)


def test_models_of_transformers_and_experts_get_the_bits_of_the_model_that_is_not_split() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    run_ranks(4, split_by_own_plan)


class Reads:
    """Counts the bytes that ``load_weights`` reads of files."""

    def __init__(self) -> None:
        self._read_at, self.nbytes = sources.read_at, 0
        sources.read_at = self

    def __call__(self, file: Any, path: Path, memory: memoryview, position: int) -> None:
        self.nbytes += memory.nbytes
        self._read_at(file, path, memory, position)


class Down(nn.Module):
    """Has one layer, whose columns are split. The rows of the slice are partitioned over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(256, 64, bias=False)


def load_slices(folder: Path) -> float:
    """On one rank: load slices of models without values, and return the part of a file's bytes that was read."""
    start()
    part = 0.0
    for number, (factory, plan) in enumerate(((Down, {"down": "rowwise_whole_input"}), (untied_lm, PLAN))):
        engine = make_engine(build(factory))
        expected = engine.full_state_dict()
        engine.save_weights(folder / str(number))
        engine.close()
        reads = Reads()
        engine = make_engine(zeroengine.parallelize(without_values(factory, values=False), plan, size=2))
        with pytest.raises(zeroengine.ZeroEngineError, match="have no values yet"):
            engine(*batch(0, 0))
        engine.load_weights(folder / str(number))
        nbytes = reads.nbytes
        found = engine.full_state_dict()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
        engine.close()
        if factory is Down:
            part = nbytes / sum(value.nbytes for value in expected.values())
    # What torch has split on its own device takes memory by ``to_empty``, and its values from the file.
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))["model"]
    with torch.device("meta"):
        model = untied_lm()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    engine = make_engine(model.to_empty(device="cpu"))
    engine.load_weights(folder / "1")
    found = engine.full_state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    engine.close()
    return part


def test_slices_are_loaded_from_files_of_which_a_rank_reads_its_own_rows(tmp_path: Path) -> None:
    # What lies between the columns of a rank is read with them: about half of the file, less half a row.
    assert run_ranks(4, load_slices, tmp_path) == [pytest.approx(1 / 2, abs=1 / 64)] * 4


class Large(nn.Module):
    """Has 256 MiB in 16 layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(WIDE, 4 * WIDE, bias=False) for _ in range(16))
        self.layers = nn.ModuleList(layers)


def peak() -> float:
    """Return the MiB that this process had at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def initialize_large() -> float:
    """On one rank: return the MiB by which it grew at most."""
    start()
    settings = config(3, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    # What is imported and made once is there.
    zeroengine.initialize(zeroengine.parallelize(small_lm(), PLAN, size=4), None, settings).close()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    model = zeroengine.parallelize(without_values(Large), {"layers.*": "colwise_gathered"}, size=4)
    engine = zeroengine.initialize(model, None, settings)
    grown = peak() - before
    engine.close()
    return grown


@pytest.mark.slow  # what it needs of memory shows only in a large model
def test_no_rank_has_memory_for_all_of_a_model() -> None:
    # Slices and their gradients take 128 MiB, building 64 before them, and computing a parameter 16 and its slice 4.
    assert max(run_ranks(4, initialize_large)) < 128 + 40
