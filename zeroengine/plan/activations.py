"""The memory and the arithmetic of one micro-step, traced under fake tensors: nothing is computed or allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OperationCount:
    """Equal operations of one pass of a micro-step.

    Attributes:
        flops: Of each one's matrix products and convolutions, counting a multiplication and an addition as two; 0 where
            there are none.
        nbytes: That each one reads and writes.
        dtype: ``fp32``, ``bf16`` or ``fp16``: what the matrix products compute in.
        count: How many there are.
    """

    flops: int
    nbytes: int
    dtype: str
    count: int


@dataclass(frozen=True)
class MicroStep:
    """One forward and backward of one rank.

    Attributes:
        micro_batch: Samples.
        checkpointing: Whether each block of the model is recomputed in backward.
        saved_bytes: The batch and the activations that live between forward and backward, at their peak.
        peak_bytes: The most bytes at any time of activations, their gradients, the gradient of a parameter before it is
            copied into its bucket, and temporaries. Parameters and buffers of the model do not count.
        forward_flops: Floating-point operations of matrix products and convolutions in forward.
        backward_flops: The same of backward. Recomputation counts.
        unit_flops: Of forward, by the name of the unit.
        forward: The operations of forward.
        backward: The operations of backward. Recomputation counts.
    """

    micro_batch: int
    checkpointing: bool
    saved_bytes: int
    peak_bytes: int
    forward_flops: int
    backward_flops: int
    unit_flops: Mapping[str, int]
    forward: Sequence[OperationCount]
    backward: Sequence[OperationCount]
