"""The samples, the tokens and the operations of the forwards of a step, for the monitor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zeroengine.engine.parts import EngineSetup
from zeroengine.engine.run_description import trainable_share
from zeroengine.utils.tensor_tree import tensors_in

# Images may be integers as well, of 8 bits.
TOKEN_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class ForwardInput:
    """The first tensor that a forward was given.

    Attributes:
        num_samples: Its first dimension.
        numel: Its elements.
        is_tokens: Whether its elements are tokens.
    """

    num_samples: int
    numel: int
    is_tokens: bool


class ForwardCounts:
    """Counts the samples, the tokens and the operations of the forwards of a step.

    Args:
        setup: What the engine is made from.
    """

    def __init__(self, setup: EngineSetup) -> None:
        # torch's formulas take half a second to import, so an engine without a monitor does not, nor does a step.
        from zeroengine.monitor import flops

        self._flop_counting, self._numel_of_products = flops, flops.numel_of_products(setup.model)
        self._trainable_share = trainable_share(setup.plans)
        # Counted after the first step, whose forward may compile.
        self._flops_per_element: float | None = None
        self._has_stepped = False
        # The input of the forward of training in progress, and what counts its operations.
        self._forward: ForwardInput | None = None
        self._flop_counter: flops.ForwardFlops | None = None
        self._samples = self._tokens = self._elements = 0
        self._has_input = self._has_tokens = False

    def begin(self, inputs: Any) -> None:
        """Note the samples and the tokens of a forward of training that begins, and perhaps count its operations.

        Args:
            inputs: Tensors in nested containers.
        """
        first = next(iter(tensors_in(inputs)), None)
        if first is None or not first.dim():
            return
        self._forward = ForwardInput(first.shape[0], first.numel(), first.dtype in TOKEN_DTYPES)
        if self._flops_per_element is None and self._has_stepped and not self._flop_counting.is_anything_compiled():
            self._flop_counter = self._flop_counting.ForwardFlops()
            self._flop_counter.__enter__()  # type: ignore[no-untyped-call]

    def end(self, completed: bool) -> None:
        """Count the forward that began, unless it raised.

        Args:
            completed: Whether it returned.
        """
        counter, self._flop_counter = self._flop_counter, None
        forward, self._forward = self._forward, None
        if counter is not None:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if forward is None or not completed:
            return
        if self._flops_per_element is None and self._has_stepped:
            if counter is not None:
                forward_flops = counter.total / max(forward.numel, 1)
            else:
                # For each token and parameter a multiplication and an addition (arXiv 2001.08361, section 2.1).
                forward_flops = 2.0 * self._numel_of_products * forward.is_tokens
            self._flops_per_element = self._flop_counting.step_flops(forward_flops, self._trainable_share)
        self._has_input = True
        self._samples += forward.num_samples
        self._elements += forward.numel
        if forward.is_tokens:
            self._has_tokens = True
            self._tokens += forward.numel

    def drop(self) -> None:
        """Forget the samples of the step in progress, which starts again."""
        self._samples = self._tokens = self._elements = 0

    def take(self) -> dict[str, float | None]:
        """Return the numbers of a step that ends, and begin with the next. None for what no forward had."""
        flops = self._flops_per_element
        numbers: dict[str, float | None] = {
            "samples": self._samples if self._has_input else None,
            "tokens": self._tokens if self._has_tokens else None,
            "flops": flops * self._elements if flops else None,
        }
        self.drop()
        self._has_input, self._has_tokens, self._has_stepped = False, False, True
        return numbers
