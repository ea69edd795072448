"""Sums of gradients as packets of integers, and the errors that a rank keeps of what it has packed.

[Note: Error feedback]
LoCo (arXiv 2407.04480): each rank keeps a moving average of what packing lost, and adds it to what it packs next in the
same place. What a rank packs there in each step is its own gradients, or on several hosts the sums of its host. Sums
that a later exchange packs have no feedback.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import torch

from zeroengine import ops


@dataclass(frozen=True)
class ErrorFeedback:
    """How a rank keeps the error of its own quantized gradients.

    Attributes:
        decay: The part of the kept error that stays; the rest comes from the latest error.
        reset_interval: The number of reduces of a unit after which its error is forgotten.
    """

    decay: float
    reset_interval: int


def is_quantizable(dtype: torch.dtype) -> bool:
    """Return whether values of ``dtype`` can be quantized. Others travel exactly."""
    return dtype in ops.DTYPE_CODES


class Packing:
    """How gradients are packed (``ops.quantize``).

    Args:
        bits: 8 or 4.
        feedback: How the errors are kept. None: they are lost.

    Attributes:
        packet_bytes: ``ops.packet_bytes`` for these bits.
        add: ``ops.dequantize_sum`` for these bits.
    """

    def __init__(self, bits: int, feedback: ErrorFeedback | None = None) -> None:
        self._bits, self._feedback = bits, feedback
        self.packet_bytes, self.add = partial(ops.packet_bytes, bits=bits), partial(ops.dequantize_sum, bits=bits)
        # By what is packed: the error, and the number of times that it was packed since the error was zero.
        self._errors: dict[Hashable, torch.Tensor] = {}
        self._counts: dict[Hashable, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the errors."""
        return sum(error.untyped_storage().nbytes() for error in self.errors)

    @property
    def errors(self) -> list[torch.Tensor]:
        """The errors that are kept for the next time."""
        return list(self._errors.values())

    def forget_errors(self) -> None:
        """Let every error restart from zero."""
        for error in self._errors.values():
            error.zero_()
        self._counts.clear()

    def pack(
        self, values: torch.Tensor, packets: torch.Tensor, *, num_slices: int = 1, error_of: Hashable | None = None
    ) -> None:
        """Pack each slice of ``values`` into a packet.

        Args:
            values: 1-D, float32, bfloat16 or float16, of ``num_slices`` slices of one length.
            packets: uint8, 1-D, ``packet_bytes`` for each slice.
            num_slices: The number of slices.
            error_of: Names what is packed, whose error is kept for the next time. None: the error is lost.
        """
        feedback = self._feedback if error_of is not None else None
        error = None if feedback is None else self._error(error_of, values, feedback)
        decay = 0.0 if feedback is None else feedback.decay
        ops.quantize(values, packets, bits=self._bits, num_slices=num_slices, error=error, error_decay=decay)

    def _error(self, name: Hashable, values: torch.Tensor, feedback: ErrorFeedback) -> torch.Tensor:
        error = self._errors.get(name)
        if error is None:
            error = self._errors[name] = torch.zeros(values.numel(), dtype=torch.bfloat16, device=values.device)
        count = self._counts.get(name, 0)
        if count and count % feedback.reset_interval == 0:
            error.zero_()
        self._counts[name] = count + 1
        return error
