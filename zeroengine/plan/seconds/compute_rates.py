"""Fit the rates of matrix products and of other operations to the times of small transformers.

A large product alone reaches rates that no model does. So forwards and backwards of decoders of several shapes are
timed. Their operations are counted as ``trace_micro_step`` counts them, and the rates are those that explain the times
best: seconds = FLOPs / matmul + bytes / elementwise + operations x dispatch + bytes of large new tensors / new_memory.
Fused attention is far from the rate of other products, and its rate depends on the sequence: it is timed alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from zeroengine.config import FLOATS, load
from zeroengine.plan.seconds.machine import MAPPED_BYTES, rate_at_length
from zeroengine.plan.seconds.timing import median_seconds
from zeroengine.plan.trace.activations import OperationCount, trace_micro_step
from zeroengine.plan.trace.model_facts import from_module
from zeroengine.plan.trace.standard_decoder import StandardDecoder


class DecoderShape(NamedTuple):
    """The size of a decoder and its batch."""

    layers: int
    width: int
    vocab: int
    samples: int
    sequence: int
    is_gelu: bool = False  # has the blocks of GPT-2 in the place of Llama's: LayerNorm, GELU and biases


# Wide blocks of two kinds, a large vocabulary, and many small operations.
SHAPES = {
    "cpu": (
        DecoderShape(2, 512, 1024, 2, 128),
        DecoderShape(2, 512, 1024, 2, 128, is_gelu=True),
        DecoderShape(2, 768, 1024, 2, 128),
        DecoderShape(2, 768, 1024, 2, 128, is_gelu=True),
        DecoderShape(1, 512, 8192, 2, 128),
        DecoderShape(1, 512, 32768, 2, 128),
        DecoderShape(1, 256, 49152, 2, 128),
        DecoderShape(4, 128, 512, 2, 128),
        DecoderShape(1, 1024, 1024, 2, 256),
    ),
    "cuda": (
        DecoderShape(4, 4096, 1024, 1, 4096),
        DecoderShape(4, 2048, 1024, 2, 2048),
        DecoderShape(4, 2048, 1024, 2, 2048, is_gelu=True),
        DecoderShape(1, 2048, 65536, 2, 2048),
        DecoderShape(1, 4096, 65536, 1, 4096),
        DecoderShape(16, 256, 512, 1, 256),
        DecoderShape(2, 8192, 1024, 1, 2048),
    ),
}
HEAD_WIDTH = 64
# The tokens of sequences that attention is timed with, and the tokens of a batch.
ATTENTION_LENGTHS = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (512, 2048, 8192)}
ATTENTION_TOKENS = {"cpu": 256, "cuda": 16384}
ATTENTION_HEADS = 8
REPEATS = 5
# Most CPUs have no instructions for fp16, and products are hundreds of times slower: the smallest shape has to do.
SMALL = DecoderShape(1, 128, 512, 1, 64)
# The rate of what no operation needed.
UNBOUNDED = 1e18


@dataclass
class ComputeRates:
    """Rates as in ``machine.Rates``."""

    matmul: dict[str, float]
    elementwise: dict[str, float]
    dispatch: float
    new_memory: float
    attention: dict[str, dict[int, float]]


def measure_compute(device: torch.device, meet: Callable[[], object]) -> ComputeRates:
    """Measure this rank.

    Args:
        device: What to compute on.
        meet: Called before each timing, to let all ranks begin together.
    """
    rates = ComputeRates({}, {}, 0.0, 0.0, {})
    for dtype in FLOATS:
        shapes = (SMALL,) if dtype == "fp16" and device.type == "cpu" else SHAPES[device.type]
        for length in (SMALL.sequence,) if len(shapes) == 1 else ATTENTION_LENGTHS[device.type]:
            meet()
            rates.attention.setdefault(dtype, {})[length] = _attention_rate(length, dtype, device)
        samples = []
        for shape in shapes:
            meet()
            samples.append(_time_decoder(shape, dtype, device))
        _add_dtype(rates, dtype, samples, is_cpu=device.type == "cpu")
    return rates


def _add_dtype(
    rates: ComputeRates, dtype: str, samples: Sequence[tuple[float, Sequence[OperationCount]]], *, is_cpu: bool
) -> None:
    """Add the rates of one more dtype, of which operations and their seconds are known."""
    rows: list[tuple[float, ...]] = []
    targets = []
    for seconds, operations in samples:
        flops = sum(o.flops * o.count for o in operations if o.dtype == dtype and not o.attention_length)
        nbytes = sum(o.nbytes * o.count for o in operations if o.dtype == dtype and not o.flops)
        # In low precision the loss is still computed in fp32, whose rate is known by then.
        others = [o for o in operations if o.dtype != dtype]
        known = sum(o.count * (o.nbytes / rates.elementwise[o.dtype]) for o in others)
        known += sum(
            o.count * o.flops / rate_at_length(rates.attention[dtype], o.attention_length)
            for o in operations
            if o.attention_length
        )
        count = sum(o.count for o in operations)
        mapped = sum(o.new_bytes * o.count for o in operations if o.new_bytes >= MAPPED_BYTES)
        if dtype == "fp32":
            rows.append((flops, nbytes, count, mapped if is_cpu else 0))
        else:
            rows.append((flops, nbytes))
            known += count * rates.dispatch + (mapped / rates.new_memory if rates.new_memory else 0.0)
        targets.append(max(seconds - known, seconds / 100))
    inverse = fit(rows, targets)
    rates.matmul[dtype], rates.elementwise[dtype] = (1 / value if value else UNBOUNDED for value in inverse[:2])
    if dtype == "fp32":
        rates.dispatch, rates.new_memory = inverse[2], 1 / inverse[3] if inverse[3] else 0.0


def fit(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Return the factors, none below 0, with which the columns of ``rows`` add up to ``targets`` best.

    Errors count relative to the targets.
    """
    scaled = torch.tensor(rows, dtype=torch.float64) / torch.tensor(targets, dtype=torch.float64).unsqueeze(1)
    # Columns of equal size make the problem well conditioned.
    sizes = scaled.norm(dim=0).clamp_min(1e-300)
    matrix, ones = scaled / sizes, torch.ones(len(targets), 1, dtype=torch.float64)
    best, best_error = torch.zeros(len(sizes), dtype=torch.float64), math.inf
    columns = range(len(sizes))
    # There are few columns, so every choice of those with a factor is tried.
    for chosen in itertools.chain.from_iterable(itertools.combinations(columns, n + 1) for n in columns):
        part = matrix[:, list(chosen)]
        factors = torch.linalg.lstsq(part, ones).solution
        error = float((part @ factors - ones).norm())
        if bool((factors > 0).all()) and error < best_error - 1e-12:
            best, best_error = torch.zeros_like(best), error
            best[list(chosen)] = factors.squeeze(1)
    return [float(value) for value in best / sizes]


def _attention_rate(length: int, dtype: str, device: torch.device) -> float:
    """Return the FLOP per second of a forward and backward of causal attention."""
    samples = max(ATTENTION_TOKENS[device.type] // length, 1)
    shape = (3, samples, ATTENTION_HEADS, length, HEAD_WIDTH)
    inputs = query, key, value = torch.randn(*shape, dtype=FLOATS[dtype], device=device).unbind()
    for tensor in inputs:
        tensor.requires_grad_(True)

    def attend() -> None:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(output, inputs, torch.ones_like(output))

    seconds = median_seconds(attend, device, REPEATS)
    # As operation_trace counts them: two products in forward, and five of their size in backward.
    return (2 + 5) * 2 * samples * ATTENTION_HEADS * length**2 * HEAD_WIDTH / seconds


def _decoder(shape: DecoderShape) -> nn.Module:
    heads = shape.width // HEAD_WIDTH
    model = StandardDecoder(shape.vocab, shape.layers, shape.width, heads, 4 * shape.width, heads)
    if shape.is_gelu:
        options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layers = (
            nn.TransformerEncoderLayer(shape.width, heads, 4 * shape.width, **options) for _ in range(shape.layers)
        )
        model.blocks = nn.ModuleList(layers)
        model.norm = nn.LayerNorm(shape.width)  # type: ignore[assignment]
    return model


def _time_decoder(shape: DecoderShape, dtype: str, device: torch.device) -> tuple[float, list[OperationCount]]:
    """Return the median seconds of a forward and backward, and its operations."""
    size = (shape.samples, shape.sequence)
    with torch.device("meta"):
        traced = _decoder(shape)
    config = load({} if dtype == "fp32" else {dtype: {"enabled": True}}).resolve(world_size=1)
    facts = from_module(traced, None, lambda _: torch.zeros(2, *size, dtype=torch.int64, device="meta").unbind())
    micro = trace_micro_step(facts, config, 1, checkpointing=False, device=device.type)
    with torch.device(device):
        model = _decoder(shape).to(FLOATS[dtype])
        batch = torch.randint(0, shape.vocab, (2, *size)).unbind()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    seconds = median_seconds(lambda: model(*batch).backward(), device, REPEATS)
    return seconds, [*micro.forward, *micro.backward]
