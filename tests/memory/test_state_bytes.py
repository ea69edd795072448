"""What a rank will hold is predicted to the byte, at every stage, precision and offload."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.conftest import ROOT
from tests.distributed.experts import NESTED
from tests.distributed.experts import SINGLE as EXPERTS
from tests.distributed.models import TinyLM, build
from tests.distributed.ranks import run_ranks
from tests.plan.predicted import ADAMW, FAMILIES, Case, assert_as_predicted, outcomes, predict
from zeroengine import ZeroEngineError
from zeroengine.memory.state_bytes import STATES, RankTopology

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True}}
DISK = {"device": "nvme", "nvme_path": "disk"}
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
SGD = {"type": "SGD", "params": {"momentum": 0.9}}
MIXED = {"communication_data_type": "fp32", "optimizer_state_dtype": "bf16"}
# The keys that change sizes, each at a stage where it matters.
SETTINGS: list[tuple[int, dict[str, Any]]] = [
    *((stage, {"more": precision}) for stage in range(4) for precision in ({}, BF16, FP16)),
    (1, {"more": BF16, "micro_steps": 2}),
    (1, {"more": {"communication_data_type": "bf16"}}),
    (2, {"more": BF16 | MIXED, "micro_steps": 2}),
    (2, {"more": BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}}),
    (2, {"zero": {"reduce_bucket_size": 10**9}}),
    (3, {"optimizer": SGD}),
    (2, {"optimizer": {"type": "Lion", "params": {}}}),
    (2, {"optimizer": {"type": "Adagrad", "params": {}}}),
    (3, {"optimizer": {"type": "torch.optim.AdamW", "params": {"lr": 1e-3, "amsgrad": True}}, "more": BF16}),
    (3, {"zero": {"param_persistence_threshold": 5000, "prefetch_bucket_size": 0}}),
    (3, {"zero": {"prefetch_bucket_size": 20_000, "max_live_parameters": 40_000}}),
    (3, {"zero": QUANTIZED | {"zeropp_loco_param": {}}}),
    (0, {"zero": QUANTIZED}),
    (0, {"zero": {"offload_optimizer": DISK}}),
    (2, {"zero": {"offload_optimizer": DISK}, "more": BF16}),
    (3, {"zero": {"offload_optimizer": DISK}}),
    (3, {"zero": {"offload_optimizer": DISK | {"ratio": 0.5}, "offload_param": DISK}, "more": BF16, "micro_steps": 2}),
    (3, {"zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, "more": BF16}),
]
IN_BF16 = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
EMA = {"ema": {"decay": 0.999}}
EIGHT_BITS = {"optimizer_state_dtype": "int8"}
# Moments of 8 bits, parameters without masters, and averages.
FORMATS: list[tuple[int, dict[str, Any]]] = [
    (0, {"more": EIGHT_BITS}),
    (2, {"more": EMA | BF16}),
    (
        3,
        {
            "more": EIGHT_BITS | BF16 | {"ema": {"decay": 0.9, "dtype": "bf16"}},
            "zero": {"offload_optimizer": DISK, "offload_param": DISK},
        },
    ),
    (2, {"more": EIGHT_BITS, "optimizer": SGD, "zero": {"offload_optimizer": DISK}}),
    (3, {"more": EIGHT_BITS | IN_BF16, "optimizer": {"type": "Lion", "params": {}}, "micro_steps": 2}),
    (1, {"more": IN_BF16, "micro_steps": 2}),
]
MUON = {"type": "Muon", "params": {"lr": 1e-3}}
ADAFACTOR = {"type": "torch.optim.Adafactor", "params": {}}
# Rules that need whole matrices. No optimizer stands for a mixed one that is handed to ``initialize``.
WHOLE: list[tuple[int, dict[str, Any]]] = [
    *((stage, {"optimizer": {}}) for stage in range(4)),
    (1, {"optimizer": MUON}),
    (2, {"optimizer": MUON, "more": BF16}),
    (3, {"optimizer": MUON, "zero": {"offload_optimizer": DISK}}),
    (3, {"optimizer": ADAFACTOR, "more": BF16 | {"keep_fp32_modules": ["*Norm*"]}}),
]
# A few of them, which together have each value once.
SHORT = [SETTINGS[i] for i in (0, 4, 8, 9, 12, 13, 14, 16, 17, 18, 21, 22, 23, 25, 28)]
SINGLE = [SETTINGS[i] for i in (4, 17, 25, 28)]


def cases(model: str, settings: list[tuple[int, dict[str, Any]]]) -> list[Case]:
    # The fused kernels, which alone serve offload and bf16 moments, take no fp64 parameters, and neither do packets.
    refused = ("disk", "optimizer_state_dtype", "zero_quantized") if model == "odd" else ()
    usable = [s for s in settings if not any(key in str(s) for key in refused)]
    return [Case(model, stage, **more) for stage, more in usable]


def assert_all_as_predicted(chosen: list[Case], transport: str, world_size: int, disk: Path) -> None:
    num_processes = 1 if transport == "fake" else world_size
    by_rank = run_ranks(num_processes, outcomes, chosen, transport, world_size, str(disk), timeout=500)
    for rank, rows in enumerate(by_rank):
        for outcome in rows:
            assert_as_predicted(outcome, rank)


@pytest.mark.parametrize(
    ("transport", "world_size", "settings"),
    [
        pytest.param("single", 1, SINGLE, id="single"),
        pytest.param("shm", 2, SHORT[::2], id="shm, some"),
        pytest.param("fake", 1024, SHORT[1::2], id="fake, some"),
        pytest.param("shm", 2, SHORT, id="shm", marks=pytest.mark.slow),
        pytest.param("fake", 1024, SHORT, id="fake", marks=pytest.mark.slow),
    ],
)
def test_states_are_predicted_to_the_byte(transport: str, world_size: int, settings: Any, tmp_path: Path) -> None:
    whole = WHOLE if world_size == 2 else WHOLE[3:4]
    chosen = cases("tiny", settings + whole) + cases("odd", settings[:4] + WHOLE[3:4]) + cases("wide", FORMATS)
    assert_all_as_predicted(chosen, transport, world_size, tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        # Without prefetching the experts that a rank does not use are gathered one at a time.
        [{"prefetch_bucket_size": 0}],
        pytest.param([{}, {"prefetch_bucket_size": 3000}], marks=pytest.mark.slow),
    ],
    ids=["without prefetching", "with it"],
)
def test_states_of_experts_of_which_a_rank_uses_some_are_predicted(
    settings: list[dict[str, int]], tmp_path: Path
) -> None:
    cases = [Case("experts", 3, zero=zero, more={"units": units}) for units in (EXPERTS, NESTED) for zero in settings]
    assert_all_as_predicted(cases, "gloo", 2, tmp_path)


def replicas(replica_ranks: int, outer: str = "nesterov") -> dict[str, Any]:
    return {"local_steps": {"steps": 2, "outer": outer, "replica_ranks": replica_ranks}}


LOCAL_STEPS: list[tuple[int, dict[str, Any]]] = [
    (0, {"more": replicas(2)}),
    (2, {"more": replicas(2) | BF16}),
    (3, {"more": replicas(2, "average")}),
    (3, {"more": replicas(1), "optimizer": SGD}),
    (3, {"more": replicas(2), "zero": {"offload_optimizer": DISK | {"ratio": 0.5}}}),
]
# Each rank of such a replica has a copy of its shard on others, with which it gathers over a communicator of its own.
HYBRID = {"degrees": {"parameters": 1, "gradients": 2, "optimizer": 2}}


@pytest.mark.parametrize(("transport", "world_size"), [pytest.param("shm", 4, marks=pytest.mark.slow), ("fake", 64)])
def test_states_of_replicas_are_predicted_to_the_byte(transport: str, world_size: int, tmp_path: Path) -> None:
    chosen = cases("tiny", LOCAL_STEPS) + cases("odd", LOCAL_STEPS[:2])
    if world_size > 4:
        chosen.append(Case("tiny", 2, zero=HYBRID, more=replicas(8)))
    assert_all_as_predicted(chosen, transport, world_size, tmp_path)


def test_states_of_split_models_are_predicted_to_the_byte(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    layers: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}}
    experts: dict[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": 4}}
    chosen = [Case("llama", 1, more=layers), Case("llama", 3, MUON, more=layers | BF16)]
    chosen += [Case("mixtral", stage, more=experts) for stage in (1, 3)]
    assert_all_as_predicted(chosen, "shm", 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "odd", *FAMILIES])
@pytest.mark.parametrize(
    ("transport", "world_size"),
    [("single", 1), ("shm", 2), ("gloo", 2), ("shm", 4), ("fake", 64), ("fake", 1024)],
)
def test_states_of_every_family_are_predicted_to_the_byte(
    model: str, transport: str, world_size: int, tmp_path: Path
) -> None:
    assert_all_as_predicted(cases(model, SETTINGS + WHOLE), transport, world_size, tmp_path)


def test_nothing_of_a_large_model_is_allocated() -> None:
    with torch.device("meta"):
        blocks = nn.ModuleList(nn.TransformerEncoderLayer(8192, 64, 28_672) for _ in range(80))
    numel = sum(p.numel() for p in blocks.parameters())
    predicted = predict(
        nn.Sequential(blocks),
        {"zero_optimization": {"stage": 3}, "optimizer": ADAMW, **BF16},
        RankTopology(512, "cuda", "nccl"),
    )
    assert sum(predicted.device[name] for name in STATES) == pytest.approx(numel * (2 + 2 + 12) / 512, rel=0.01)


def test_offload_moves_states_to_the_memory_of_the_host() -> None:
    def rows(**zero: Any) -> Any:
        with torch.device("meta"):
            model = TinyLM()
        config = {"zero_optimization": {"stage": 3, "param_persistence_threshold": 0, **zero}, "optimizer": ADAMW}
        return predict(model, config | BF16, RankTopology(8, "cuda", "nccl"))

    device, apart = rows(), rows(offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    assert {name: apart.cpu[name] for name in STATES} == {name: device.device[name] for name in STATES}
    assert not any(apart.device[name] for name in STATES) and apart.cpu["staging"] > 0


@pytest.mark.parametrize("optimizer", [ADAMW, MUON])
def test_the_copy_of_a_checkpoint_is_predicted(
    optimizer: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {
        "zero_optimization": {"stage": 0},
        "optimizer": optimizer,
        "checkpoint": {"async_save": True},
        "check_grad_overflow": False,
        **EMA,
    }
    with torch.device("meta"):
        predicted = predict(TinyLM(), config, RankTopology(1, "cpu", "single"))
    with caplog.at_level("INFO", "zeroengine"):
        engine = zeroengine.initialize(build(TinyLM), config=config)
    assert ("Muon updates 6 matrices (10.4 k parameters), AdamW updates 15 " in caplog.text) == (optimizer is MUON)
    engine.save_checkpoint(tmp_path / "saved")
    assert 0 < engine.memory().checkpoint <= predicted.checkpoint_copy <= 2 * engine.memory().checkpoint
    engine.close()


PEAKS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fp32 at stage 0": (1, "real", {"zero_optimization": {"stage": 0}}),
    "bf16 at stage 2": (2, "real", {"zero_optimization": {"stage": 2}} | BF16),
    "fp32 at stage 3": (2, "deferred", {"zero_optimization": {"stage": 3}}),
    "fp32 at stage 2 over Gloo": (2, "deferred", {"zero_optimization": {"stage": 2}, "comm": {"transport": "gloo"}}),
    "Adafactor at stage 2": (2, "real", {"zero_optimization": {"stage": 2}, "optimizer": ADAFACTOR}),
    "SGD": (1, "real", {"zero_optimization": {"stage": 0}, "optimizer": SGD}),
}


@pytest.mark.slow
@pytest.mark.parametrize("peak", PEAKS)
def test_a_process_grows_by_what_is_predicted(peak: str) -> None:
    world_size, values, config = PEAKS[peak]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # glibc raises this threshold at each free of a large tensor, and then keeps freed memory in its heap.
    common = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_PORT": port}
    common |= {"MASTER_ADDR": "127.0.0.1", "MALLOC_MMAP_THRESHOLD_": "1000000", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.plan.peak_growth", values, json.dumps({"optimizer": ADAMW} | config)]
    ranks = [
        subprocess.Popen(command, env=os.environ | common | {"RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE)
        for rank in map(str, range(world_size))
    ]
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    grown, predicted = json.loads(outputs[0].splitlines()[-1])
    print(f"{peak}: grew by {grown:,} bytes, predicted {predicted:,}: {grown / predicted:.3f}")
    assert grown == pytest.approx(predicted, rel=0.07)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, "cpu", "shm"), "world_size is the number of ranks, at least 1; found 0"),
        ((2, "tpu", "shm"), 'device is "cpu" or "cuda", found \'tpu\''),
        ((2, "cpu", "mpi"), "transport is one of shm, gloo, two-level, nccl, fake, single; found 'mpi'"),
    ],
)
def test_a_wrong_setting_says_what_to_write(arguments: Any, message: str) -> None:
    with pytest.raises(ZeroEngineError, match=message):
        RankTopology(*arguments)
