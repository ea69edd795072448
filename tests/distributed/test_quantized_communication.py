"""Quantized gathers and sums: ranks agree, masters stay exact, overflows are noticed, and a quarter travels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.distributed.fake_group import init_fake_group
from tests.distributed.imagined_hosts import imagine_hosts
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.test_degrees import PartlyTrained
from tests.distributed.training import take_steps
from tests.nccl_over_gloo import use_nccl_transport
from zeroengine.comm.transports import nccl
from zeroengine.comm.transports.gloo import GlooChannel
from zeroengine.config import load
from zeroengine.errors import ConfigError, ZeroEngineError

WEIGHTS = {"zero_quantized_weights": True}
GRADIENTS = {"zero_quantized_gradients": True}
BOTH = WEIGHTS | GRADIENTS
DEGREES = {"parameters": 2, "gradients": 2, "optimizer": 4}
SECOND_COPY = {"parameters": 4, "secondary_parameters": 2}
# Each a section zero_optimization and other keys.
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stage": 3, **BOTH}, {}),
    ({"stage": 3, **BOTH, "overlap_comm": False}, {"bf16": {"enabled": True}}),
    ({"stage": 3, **BOTH, "zeropp_loco_param": {"reset_T": 2}}, {"gradient_accumulation_steps": 2}),
    *(({"stage": stage, **GRADIENTS}, {"gradient_accumulation_steps": 2}) for stage in (0, 1, 2)),
    ({"stage": 3, **GRADIENTS, "quantized_gradient_bits": 4}, {}),
    ({"degrees": DEGREES, **BOTH}, {}),
    ({"degrees": {"parameters": 2}, **BOTH}, {"communication_data_type": "bf16"}),
    ({"degrees": SECOND_COPY, **BOTH}, {"gradient_accumulation_steps": 2}),
    ({"stage": 3, **BOTH, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}, {}),
]
# Those that together take each path: two hops, several micro-steps, some ranks, and gathers of two kinds.
SHORT = [CASES[number] for number in (2, 3, 7, 9)]


def engine_of(zero: dict[str, Any], **more: Any) -> zeroengine.Engine:
    settings = config(0, gradient_clipping=0.5, **more)
    settings["zero_optimization"] = {"param_persistence_threshold": 0, **zero}
    return zeroengine.initialize(build(PartlyTrained), config=settings)


def train(engine: zeroengine.Engine, steps: int) -> list[float]:
    return take_steps(engine, range(steps * int(engine.config.gradient_accumulation_steps)))


def both_ways(cases: list[Any], transport: str) -> list[Any]:
    """For each case: the losses quantized and exact, and sums of the weights that this rank computes with."""
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        if transport == "nccl":
            use_nccl_transport(patch)
        if transport == "two-level":
            imagine_hosts(2)
        comm = {"comm": {"transport": {"nccl": "gloo", "two-level": "auto"}.get(transport, transport)}}
        found = []
        for zero, more in cases:
            engine = engine_of(zero, **comm, **more)
            losses, seen = train(engine, 3), []
            handle = engine.module.head.register_forward_pre_hook(
                lambda module, _, seen=seen: seen.append(module.weight.double().sum().item())
            )
            engine(*batch(0, 0))
            handle.remove()
            engine.close()
            exact = engine_of({key: value for key, value in zero.items() if "quant" not in key and "loco" not in key},
                              **comm, **more)  # fmt: skip
            found.append((losses, train(exact, 3), seen))
            exact.close()
    return found


def assert_close_and_agreed(cases: list[Any], transport: str) -> None:
    ranks = run_ranks(4, both_ways, cases, transport)
    for number, (zero, _) in enumerate(cases):
        assert len({str(found[number][2]) for found in ranks}) == 1, zero
        for found in ranks:
            losses, exact, _ = found[number]
            assert losses == pytest.approx(exact, rel=0.05), zero
            assert losses != exact, zero


@pytest.mark.parametrize("transport", ["shm", pytest.param("gloo", marks=pytest.mark.slow), "two-level", "nccl"])
def test_losses_follow_the_exact_ones_and_ranks_compute_with_the_same_values(transport: str) -> None:
    # Two hops, and gathers of quantized parameters on two of the hosts' ranks, are what the others take apart.
    assert_close_and_agreed({"shm": SHORT[::3], "two-level": SHORT[1:3]}.get(transport, SHORT[2:3]), transport)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo", "two-level", "nccl"])
def test_all_cases_follow_the_exact_losses(transport: str) -> None:
    assert_close_and_agreed(CASES, transport)


def exact_values(zero: dict[str, Any]) -> list[bool]:
    dist.init_process_group("gloo")
    engine = engine_of(zero)
    shards = [unit.shard.clone() for unit in engine.units]
    before = engine.full_state_dict()
    engine(*batch(0, 0))
    with zeroengine.gathered(engine.module.head.weight):
        found = [torch.equal(engine.module.head.weight, before["head.weight"])]
    # Leaving the block wrote the values back.
    found += [torch.equal(unit.shard, shard) for unit, shard in zip(engine.units, shards, strict=True)]
    after = engine.full_state_dict()
    found += [torch.equal(after[name], value) for name, value in before.items()]
    engine.close()
    plain = dict(engine.module.state_dict())
    return found + [torch.equal(plain[name], value) for name, value in before.items()]


@pytest.mark.parametrize(
    "degrees",
    [pytest.param({"stage": 3}, marks=pytest.mark.slow), {"degrees": SECOND_COPY}],
    ids=["stage 3", "second copy"],
)
def test_shards_gathered_values_and_the_model_in_the_end_stay_exact(degrees: dict[str, Any]) -> None:
    for found in run_ranks(4, exact_values, degrees | WEIGHTS):
        assert all(found)


def overflow(bits: int) -> list[Any]:
    dist.init_process_group("gloo")
    engine = engine_of({"stage": 2, **GRADIENTS, "quantized_gradient_bits": bits, "zeropp_loco_param": {}})
    train(engine, 2)
    before = engine.full_state_dict()
    loss = engine(*batch(9, engine.rank))
    engine.backward(loss * (float("inf") if engine.rank == 1 else 1.0))
    updated = bool(engine.step())
    after = engine.full_state_dict()
    same = all(torch.equal(after[name], value) for name, value in before.items())
    found = [updated, same, train(engine, 2)]
    engine.close()
    return found


@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.slow), 4])
def test_an_overflow_of_one_rank_skips_the_step_and_leaves_no_trace_in_the_errors(bits: int) -> None:
    for updated, same, losses in run_ranks(2, overflow, bits):
        assert not updated and same
        assert all(torch.tensor(losses).isfinite())


def frozen_only() -> tuple[list[bool], list[bool]]:
    dist.init_process_group("gloo")
    engine = engine_of({"stage": 3, "zero_quantized_nontrainable_weights": True})
    found = [unit.is_quantized for unit in engine.units], [unit.trainable for unit in engine.units]
    train(engine, 1)
    engine.close()
    return found


def test_frozen_parameters_alone_may_be_quantized() -> None:
    quantized, trainable = run_ranks(2, frozen_only)[0]
    assert quantized == [not flag for flag in trainable] and any(quantized)


def resume(folder: Path) -> tuple[int, float]:
    dist.init_process_group("gloo")
    engine = engine_of({"stage": 2, **GRADIENTS, "zeropp_loco_param": {}})
    train(engine, 2)
    errors = engine._parts.ranks.quantized_reduce.packing._errors.values()  # type: ignore[union-attr]
    kept = sum(int(error.count_nonzero()) for error in errors)
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    left = sum(float(error.abs().sum()) for error in errors)
    engine.close()
    return kept, left


def test_errors_restart_from_zero_after_a_load(tmp_path: Path) -> None:
    for kept, left in run_ranks(2, resume, tmp_path):
        assert kept > 0 and left == 0


def norms_of_equal_gradients(folder: Path) -> list[list[float]]:
    """The norms of three steps of the same gradients, and of three more after a load."""
    dist.init_process_group("gloo")
    zero = {"stage": 2, **GRADIENTS, "quantized_gradient_bits": 4, "zeropp_loco_param": {"err_beta": 0.5, "reset_T": 2}}
    engine = engine_of(zero, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    engine.save_checkpoint(folder)
    found = []
    for _ in range(2):
        norms = []
        for _ in range(3):
            engine.backward(engine(*batch(0, engine.rank)))
            engine.step()
            norms.append(float(engine.grad_norm or 0))
        found.append(norms)
        engine.load_checkpoint(folder)
    engine.close()
    return found


def test_errors_are_forgotten_after_as_many_reduces_as_configured_and_counted_anew_after_a_load(tmp_path: Path) -> None:
    for norms, later in run_ranks(2, norms_of_equal_gradients, tmp_path):
        assert norms[0] == norms[2] != norms[1]
        assert later == norms


# -- bytes ------------------------------------------------------------------------------------------


def travelled(world_size: int, zero: dict[str, Any]) -> dict[str, int]:
    """The bytes of each kind of collective in a step, from the arguments of the process group."""
    init_fake_group(world_size)
    engine = zeroengine.initialize(
        build(lambda: TinyLM(tied=False)), config=config(3, units=["tok", "blocks.*", "norm", "head"], **zero)
    )
    counted = {"gather": 0, "reduce": 0}
    names = {"_all_gather": ("gather", 0), "_reduce_scatter": ("reduce", 1), "_all_to_all": ("reduce", 1)}
    with pytest.MonkeyPatch.context() as patch:
        for name, (kind, place) in names.items():
            real = getattr(nccl, name)

            def spy(*tensors: Any, kind: str = kind, place: int = place, real: Any = real, **more: Any) -> Any:
                counted[kind] += tensors[place].nbytes
                return real(*tensors, **more)

            patch.setattr(nccl, name, spy)
        with mock.patch.object(engine, "step", lambda: None):
            engine.backward(engine(*batch(0, 0)))
            engine.reducer.launcher.wait()
    return counted


@pytest.mark.parametrize("world_size", [pytest.param(64, marks=pytest.mark.slow), 1024])
def test_a_quarter_of_the_bytes_travels_and_the_scales(world_size: int) -> None:
    whole = run_ranks(1, travelled, world_size, {})[0]
    for zero, kind, share in (
        ({"zero_quantized_weights": True}, "gather", 1 / 4),
        (GRADIENTS, "reduce", 1 / 4),
        (GRADIENTS | {"quantized_gradient_bits": 4}, "reduce", 1 / 8),
    ):
        found = run_ranks(1, travelled, world_size, {"zero_optimization": zero})[0]
        other = "reduce" if kind == "gather" else "gather"
        assert found[other] == whole[other]
        # The shards of so small a model on so many ranks are shorter than a block, which has a scale all the same.
        assert share < found[kind] / whole[kind] < share * 1.6, (zero, found, whole)


class Wide(nn.Module):
    """Units whose shards are many blocks long."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().mean()


def sent_between_hosts(chosen: list[dict[str, Any]]) -> list[int]:
    """The bytes that this rank sends to the other host in a step."""
    dist.init_process_group("gloo")
    imagine_hosts(2)
    found = []
    for zero in chosen:
        settings = config(3, units=["first", "second"])
        settings["zero_optimization"] = {"param_persistence_threshold": 0, **zero}
        engine = zeroengine.initialize(Wide(), config=settings)
        for _ in range(2):
            with mock.patch.object(GlooChannel, "exchange", autospec=True, side_effect=GlooChannel.exchange) as spy:
                engine.backward(engine(torch.randn(2, 256)))
                engine.step()
        # The first arguments are the channel, the kind of operation, its label, and what each rank gets.
        sent = [(rank, tensor) for call in spy.call_args_list for rank, tensor in call.args[3].items()]
        found.append(sum(tensor.nbytes for rank, tensor in sent if rank // 2 != engine.rank // 2))
        engine.close()
    return found


def test_a_quarter_of_the_bytes_goes_to_another_host() -> None:
    node = {"degrees": {"parameters": "node"}}
    chosen = [{"stage": 3}, {"stage": 3, **BOTH}, node, node | GRADIENTS, {"stage": 0}, {"stage": 0, **GRADIENTS}]
    for found in run_ranks(4, sent_between_hosts, chosen):
        for exact, packed in zip(found[::2], found[1::2], strict=True):
            assert 0.25 < packed / exact < 0.27, found


# -- the configuration ------------------------------------------------------------------------------


def test_error_feedback_without_quantized_gradients_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match='write "zero_quantized_gradients": true'):
        load({"zero_optimization": {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}})
    with pytest.raises(ConfigError, match="err_beta"):
        load({"zero_optimization": GRADIENTS | {"zeropp_loco_param": {"err_beta": 1.0}}})


@pytest.mark.parametrize(
    ("key", "add", "advice"),
    [
        ("zero_quantized_weights", lambda model: model.double(), "head.weight is float64.*model.float"),
        ("zero_quantized_gradients", lambda model: model.double(), "head.weight is float64.*model.float"),
        (
            "zero_quantized_nontrainable_weights",
            lambda model: model.register_parameter("table", nn.Parameter(torch.zeros(3, dtype=torch.int32), False)),
            "table is int32.*register_buffer",
        ),
    ],
)
def test_a_parameter_that_cannot_be_quantized_is_refused_by_name(
    key: str, add: Callable[[nn.Module], object], advice: str
) -> None:
    model = nn.ModuleDict({"head": nn.Linear(3, 3)})
    add(model)
    with pytest.raises(ZeroEngineError, match=f"parameter {advice}.*leave {key} out"):
        zeroengine.initialize(model, config=config(3, zero_optimization={"stage": 3, key: True}))


def test_frozen_fp64_parameters_have_no_gradients_to_quantize() -> None:
    model = nn.ModuleDict({"head": nn.Linear(3, 3), "table": nn.Linear(3, 3).double().requires_grad_(False)})
    zeroengine.initialize(model, config=config(2, zero_optimization={"stage": 2} | GRADIENTS)).close()


def test_nothing_is_quantized_without_being_asked_for() -> None:
    zero = load({}).zero_optimization
    assert zero.gradient_bits is None and not zero.quantizes_gathers(trainable=False)
