from __future__ import annotations

import copy
import itertools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import ROOT
from tests.plan.peak_memory import FAMILIES, PRECISIONS
from zeroengine.config import load
from zeroengine.errors import ZeroEngineError
from zeroengine.plan.trace.activations import MicroStep, OperationCount, _trace, trace_micro_step
from zeroengine.plan.trace.model_facts import from_module, from_numbers
from zeroengine.plan.trace.repeated_blocks import omit_equal_blocks

CONFIG = load({}).resolve(world_size=1)
QUICK = [("LlamaForCausalLM", "bf16", "1")]


def flops(operations: Sequence[OperationCount]) -> int:
    return sum(operation.flops * operation.count for operation in operations)


def check_growth(cases: list[tuple[str, str, str]]) -> None:
    pytest.importorskip("transformers")
    if not os.path.exists("/proc/self/clear_refs"):
        pytest.skip("the peak of a process is reset through /proc")
    command = [sys.executable, "-m", "tests.plan.peak_memory", *itertools.chain.from_iterable(cases)]
    # Below this size glibc keeps freed memory for later, and the process is larger than its tensors.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "4096", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for case, bytes_of in zip(cases, json.loads(done.stdout), strict=True):
        # A process grows by whole pages, and by what kernels take and free, which counts where so little is saved.
        allowance = 0.05 * bytes_of["real"] + (1 << 20)
        assert abs(bytes_of["predicted"] - bytes_of["real"]) < allowance, (case, bytes_of)


@pytest.mark.slow  # test_published_memory compares with measured memory
def test_a_process_grows_by_the_traced_bytes() -> None:
    check_growth(QUICK)


@pytest.mark.slow
def test_a_process_grows_by_the_traced_bytes_in_every_family_and_precision() -> None:
    check_growth([case for case in itertools.product(FAMILIES, PRECISIONS, "01") if case not in QUICK])


@pytest.mark.slow
def test_a_model_of_70b_parameters_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    facts = from_numbers(70e9, layers=80, width=8192, vocab=32000, sequence=4096, kv_heads=8)
    for checkpointing in (False, True):
        micro = trace_micro_step(facts, load({"bf16": {"enabled": True}}).resolve(world_size=64), 1, checkpointing)
        assert micro.peak_bytes > 1 << 32
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before < 1 << 28


@pytest.mark.parametrize("checkpointing", [False, True])
def test_equal_blocks_need_not_be_traced(checkpointing: bool) -> None:
    facts = from_numbers(60e6, layers=10, width=512, vocab=1000, sequence=64)
    omitting, whole = (_trace(facts, CONFIG, 2, checkpointing, "cpu", omits_blocks=omits) for omits in (True, False))
    assert _comparable(omitting) == _comparable(whole)
    replica = copy.deepcopy(facts.model)
    assert [len(run.omitted) for run in omit_equal_blocks(replica)] == [7]


def _comparable(micro: MicroStep) -> dict[str, Any]:
    # The order of operations differs.
    return vars(micro) | {"forward": set(micro.forward), "backward": set(micro.backward)}


def test_attention_with_dropout_can_be_checkpointed_on_a_gpu() -> None:
    with torch.device("meta"):
        block = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.1, batch_first=True)
        model = nn.Sequential(block, nn.Linear(64, 1))
    facts = from_module(model, None, lambda samples: torch.zeros(samples, 512, 64, device="meta"))
    whole, checkpointed = (trace_micro_step(facts, CONFIG, 1, choice, "cuda") for choice in (False, True))
    assert checkpointed.saved_bytes < whole.saved_bytes
    assert flops(checkpointed.backward) > flops(whole.backward)
    # Fused attention keeps no matrix of all pairs of tokens, of which two heads have one each.
    on_cpu = trace_micro_step(facts, CONFIG, 1, checkpointing=False)
    assert on_cpu.saved_bytes > whole.saved_bytes + 2 * 512 * 512 * 4


def test_blocks_that_differ_are_traced() -> None:
    model = copy.deepcopy(from_numbers(60e6, layers=10, width=512, vocab=1000, sequence=64).model)
    blocks = model.get_submodule("blocks")
    next(blocks.children()).eval()
    for index, block in enumerate(blocks.children()):
        block.window = index % 2  # type: ignore[assignment]
    assert omit_equal_blocks(model) == []


def test_arithmetic_is_that_of_the_paper() -> None:
    facts = from_numbers(25e6, layers=4, width=512, vocab=1000, sequence=64)
    micro = trace_micro_step(facts, CONFIG, 2, checkpointing=False)
    in_products = facts.num_parameters - 1000 * 512 - 9 * 512
    attention = 4 * 4 * 2 * 64 * 64 * 512
    # Two operations for each parameter and token; the embedding is a lookup. Backward has two products for each one.
    forward, backward = flops(micro.forward), flops(micro.backward)
    assert forward == 2 * in_products * 2 * 64 + attention
    assert backward == pytest.approx(2 * forward, rel=0.05)
    recomputed = trace_micro_step(facts, CONFIG, 2, checkpointing=True)
    # The recomputation of a block ends when backward has what it needs, which is before its last product.
    assert backward < flops(recomputed.backward) <= backward + forward
    assert recomputed.saved_bytes < micro.saved_bytes / 3


def test_memory_grows_with_the_micro_batch_and_halves_in_bf16() -> None:
    facts = from_numbers(25e6, layers=4, width=512, vocab=1000, sequence=64)
    one, two = (trace_micro_step(facts, CONFIG, samples, checkpointing=False) for samples in (1, 2))
    assert two.saved_bytes == pytest.approx(2 * one.saved_bytes, rel=0.01)
    bf16 = load({"bf16": {"enabled": True}}).resolve(world_size=1)
    # The loss stays in fp32.
    assert 0.5 < trace_micro_step(facts, bf16, 2, checkpointing=False).saved_bytes / two.saved_bytes < 0.6


def test_a_trace_leaves_the_model_as_it_was() -> None:
    facts = from_numbers(25e6, layers=4, width=512, vocab=1000, sequence=64)
    trace_micro_step(facts, CONFIG, 1, checkpointing=True)
    assert all(param.is_meta and not param._post_accumulate_grad_hooks for param in facts.model.parameters())
    assert not any(module._forward_hooks for module in facts.model.modules())


class Counting(nn.Module):
    """Its computation depends on values of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y if y.sum() > 0 else -y


def test_models_that_cannot_be_traced_say_why() -> None:
    with pytest.raises(ZeroEngineError, match="no batch is known"):
        trace_micro_step(from_module(Counting()), CONFIG, 1, checkpointing=False)
    with pytest.raises(ZeroEngineError, match="depends on values"):
        trace_micro_step(from_module(Counting(), None, lambda n: torch.zeros(n, 4)), CONFIG, 1, checkpointing=False)
    with pytest.raises(ZeroEngineError, match="micro-step with micro-batch 1 failed: RuntimeError"):
        trace_micro_step(from_module(Counting(), None, lambda n: torch.zeros(n, 5)), CONFIG, 1, checkpointing=False)
