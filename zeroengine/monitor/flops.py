"""Count the floating-point operations of a forward."""

from __future__ import annotations

from typing import Any

from torch import nn

from zeroengine.monitor.flop_formulas import flops_of
from zeroengine.utils.torch_internals import TorchDispatchMode, num_compiled_frames


class ForwardFlops(TorchDispatchMode):
    """Counts matrix products, convolutions and attention inside its ``with``, by torch's formulas.

    ``torch.utils.flop_counter.FlopCounterMode`` uses the same formulas and also hooks every module, which would
    disturb the engine's own hooks.

    Attributes:
        total: Operations so far; a multiplication and an addition are two.
    """

    # Attention of ``torch.nn.attention.flex_attention`` and other such operators are counted or passed through as well.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default would import torch._dynamo within a step, which takes a second or more.
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.total += flops_of(func, args, kwargs, out)
        return out


def is_anything_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process.

    A dispatch mode would make compiled functions compile again, and compute with other kernels, in the forward whose
    operations are counted.
    """
    return num_compiled_frames() > 0


def numel_of_products(model: nn.Module) -> int:
    """Return the number of parameters that each token is multiplied with: matrices that are no lookup tables."""
    modules = (module for module in model.modules() if not isinstance(module, nn.Embedding))
    matrices = {param for module in modules for param in module.parameters(recurse=False) if param.dim() > 1}
    return sum(param.numel() for param in matrices)


def step_flops(forward_flops: float, trainable_share: float) -> float:
    """Return the operations of a forward and backward, without recomputation.

    The backward computes the gradients of activations and those of parameters, each as many operations as the forward
    (PaLM, arXiv 2204.02311, appendix B). Frozen parameters need no gradients.

    Args:
        forward_flops: Operations of the forward.
        trainable_share: The share of the parameters that is trained.
    """
    return forward_flops * (2 + trainable_share)
