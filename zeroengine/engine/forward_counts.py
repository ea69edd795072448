"""The samples, the tokens and the operations of the forwards of a step, for the monitor."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from zeroengine.engine.setup import EngineSetup
from zeroengine.utils.tensors import tensors_in

# Images may be integers as well, of 8 bits.
TOKEN_DTYPES = (torch.int32, torch.int64)


class ForwardCounts:
    """Counts the samples, the tokens and the operations of the forwards of a step.

    Args:
        setup: What the engine is made from.
    """

    def __init__(self, setup: EngineSetup) -> None:
        # torch's formulas take half a second to import, so an engine without a monitor does not, nor does a step.
        from zeroengine.monitor import flops

        # The ranks with parts of each sample, and those that have each of them whole.
        self._ranks_per_sample = setup.config.sequence_parallel_size
        self._num_copies = len(setup.model_groups[0]) if setup.model_groups else 1
        self._flop_counting, self._numel_of_products = flops, flops.numel_of_products(setup.model)
        trainable = sum(plan.numel for plan in setup.plans if plan.trainable)
        self._trainable_share = trainable / max(sum(plan.numel for plan in setup.plans), 1)
        # Counted after the first step, whose forward may compile.
        self._flops_per_element: float | None = None
        self._has_stepped = False
        # Of the forward of training in progress: the shape of its first tensor, whether the elements of that are
        # tokens, and what counts its operations.
        self._input: tuple[torch.Size, bool] | None = None
        self._flop_counter: flops.ForwardFlops | None = None
        # The samples, tokens and elements of the step in progress. What no forward had is absent.
        self._counts: Counter[str] = Counter()

    def begin(self, inputs: Any) -> None:
        """Note the samples and the tokens of a forward of training that begins, and perhaps count its operations.

        Args:
            inputs: Tensors in nested containers.
        """
        first = next(iter(tensors_in(inputs)), None)
        if first is None or not first.dim():
            return
        self._input = first.shape, first.dtype in TOKEN_DTYPES
        if self._flops_per_element is None and self._has_stepped and not self._flop_counting.is_anything_compiled():
            self._flop_counter = self._flop_counting.ForwardFlops()
            self._flop_counter.__enter__()  # type: ignore[no-untyped-call]

    def end(self, completed: bool) -> None:
        """Count the forward that began, unless it raised.

        Args:
            completed: Whether it returned.
        """
        counter, self._flop_counter = self._flop_counter, None
        begun, self._input = self._input, None
        if counter is not None:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if begun is None or not completed:
            return
        shape, is_tokens = begun
        if self._flops_per_element is None and self._has_stepped:
            if counter is not None:
                forward_flops = counter.total / max(shape.numel(), 1)
            else:
                # For each token and parameter a multiplication and an addition (arXiv 2001.08361, section 2.1).
                forward_flops = 2.0 * self._numel_of_products * is_tokens
            self._flops_per_element = self._flop_counting.step_flops(forward_flops, self._trainable_share)
        self._counts.update(samples=shape[0], elements=shape.numel())
        if is_tokens:
            self._counts["tokens"] += shape.numel()

    def drop(self) -> None:
        """Forget the samples of the step in progress, which starts again."""
        self._counts.clear()

    def take(self) -> dict[str, float | None]:
        """Return the numbers of a step that ends, and begin with the next. None for what no forward had.

        Ranks that share a sample count equal shares of it, so that the sum over all ranks is that of the samples.
        """
        flops, counts = self._flops_per_element, self._counts
        self._counts, self._has_stepped = Counter(), True
        return {
            "samples": counts["samples"] / self._ranks_per_sample / self._num_copies if "samples" in counts else None,
            "tokens": counts["tokens"] / self._num_copies if "tokens" in counts else None,
            # Operations on a split matrix are counted as those on the whole.
            "flops": flops * counts["elements"] / self._num_copies if flops else None,
        }
