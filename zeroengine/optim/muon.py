"""Muon: momentum whose matrices are made orthogonal (Jordan et al., 2024, kellerjordan.github.io/posts/muon).

The rule has three parts. The first and the last look at single elements, so they run on shards; the second needs whole
matrices, so it runs at their owners (``backends/muon_update.py``):

1. ``direction``: the momentum takes the gradient; the direction is the momentum, or Nesterov's look ahead.
2. ``orthogonalize``: a Newton-Schulz iteration moves all singular values of the direction's matrix towards 1.
3. ``apply_direction``: decoupled weight decay, and a step against the orthogonal direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.optim.caller_optimizer import add_param_group, loss_of
from zeroengine.partition.owners import matrix_shape
from zeroengine.partition.slices import whole_shape

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
CHOICES = {
    "adjust_lr_fn": (None, "original", "match_rms_adamw", "spectral_unclamped"),
    "ns_dtype": ("bf16", "fp32"),
    "ns_method": ("standard", "gram"),
}
# Products of "gram" lose digits with each iteration, so it starts afresh from the matrix after so many of them.
GRAM_ITERATIONS = 3


class Muon(torch.optim.Optimizer):
    """Update matrices by an orthogonal direction. Takes the arguments of ``torch.optim.Muon``, and three more.

    Parameters have two or more dimensions; kernels of convolutions count as matrices whose rows are output channels.
    The rest of a model needs another optimizer: ``MixedOptimizer`` joins both, as the type "Muon" of a configuration.

    Args:
        params: Parameters or groups, as for any torch optimizer.
        lr: The learning rate.
        weight_decay: The decoupled weight decay.
        momentum: The factor of the momentum.
        nesterov: Whether the direction looks ahead of the momentum.
        ns_coefficients: The coefficients a, b and c of the iteration.
        eps: The smallest Frobenius norm that a direction is divided by.
        ns_steps: The number of iterations.
        adjust_lr_fn: How the rate depends on the rows A and columns B of a matrix: "original" or None for
            sqrt(max(1, A / B)); "match_rms_adamw" for 0.2 sqrt(max(A, B)), with which AdamW's rates and weight decay
            serve (arXiv 2502.16982); "spectral_unclamped" for sqrt(A / B) (jeremybernste.in/writing/deriving-muon).
        ns_dtype: What the iteration computes in: "bf16" as in torch, or "fp32", which is float64 for such parameters.
        ns_method: "standard", or "gram" for the same polynomial in fewer products: see ``_orthogonal_factor``.
        num_matrices: The number of matrices in each parameter, which are equal blocks of its rows: such as 3 for a
            fused projection of queries, keys and values, or the number of heads. Each is made orthogonal by itself.

    Raises:
        ZeroEngineError: A parameter is no matrix, or does not divide into its matrices, or an argument is unknown.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_dtype: str = "bf16",
        ns_method: str = "standard",
        num_matrices: int = 1,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name not in ("self", "params", "__class__")}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices."""
        add_param_group(self, param_group)
        _check_group(self.param_groups[-1])
        if len({group["ns_dtype"] for group in self.param_groups}) > 1:
            raise ZeroEngineError("Muon: found groups of different ns_dtype; write one for all of them")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and return the loss of ``closure`` if there is one."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, shape = self.state[param], matrix_shape(param.shape, group["num_matrices"])
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                matrices = direction(state["momentum_buffer"], param.grad, group).to(
                    iteration_dtype(group, param.dtype)
                )
                update = orthogonalize(matrices.view(-1, *shape), group)
                apply_direction(param, update.view_as(param), group, shape)
        return loss


def _check_group(group: Mapping[str, Any]) -> None:
    """Check the values of a group that a rule on matrices needs, and that each of its parameters has matrices.

    Raises:
        ZeroEngineError: Something is wrong.
    """
    for key, known in CHOICES.items():
        if group[key] not in known:
            raise ZeroEngineError(f"Muon: {key} is one of {', '.join(map(repr, known))}, found {group[key]!r}")
    count = group["num_matrices"]
    for param in group["params"]:
        if param.ndim < 2:
            raise ZeroEngineError(
                f"Muon: found a parameter of shape {tuple(param.shape)}, which is no matrix. Give vectors, such as "
                "biases and the weights of norms, to AdamW: zeroengine.MixedOptimizer joins both, and the type "
                '"Muon" of a configuration divides a model by itself.'
            )
        shape = whole_shape(param)
        rows = shape[0] if count == 1 else math.prod(shape) // max(shape[-1], 1)
        if not isinstance(count, int) or count < 1 or rows % count:
            raise ZeroEngineError(
                f"Muon: num_matrices is {count!r} for a parameter of shape {shape}, whose {rows} rows do "
                "not divide into so many blocks"
            )


def iteration_dtype(group: Mapping[str, Any], dtype: torch.dtype) -> torch.dtype:
    """Return what the iteration computes in, for masters of ``dtype``."""
    return torch.bfloat16 if group["ns_dtype"] == "bf16" else dtype


def direction(momentum: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Return the direction of some elements. ``momentum`` becomes the next one, ``gradient`` keeps its values.

    Each element takes the same roundings wherever it lies: products and sums are rounded one by one, because the
    vectors and the last elements of a loop may otherwise differ in what they fuse.
    """
    factor = group["momentum"]
    weighted = gradient * (1 - factor)
    momentum.mul_(factor).add_(weighted)
    return weighted.add_(momentum * factor) if group["nesterov"] else momentum.clone()


def orthogonalize(matrices: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Return matrices of the same row and column spaces whose singular values are near 1.

    Args:
        matrices: Of shape (number, rows, columns), in the dtype of the iteration. It may be overwritten.
        group: The hyperparameters.
    """
    # Batched products of a CPU may round otherwise than single ones, and would not be faster.
    if matrices.device.type == "cpu" and len(matrices) > 1:
        return torch.stack([orthogonalize(matrix, group)[0] for matrix in matrices.split(1)])
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_(min=group["eps"])
    a, b, c = group["ns_coefficients"]
    # Five iterations take 4 products with the long side and 14 of square matrices, instead of 10 and 5.
    if group["ns_method"] == "gram" and 2 * x.shape[-1] > 3 * x.shape[-2]:
        # The first run is a short one, because singular values are the smallest at the start.
        for start in range(-1, group["ns_steps"], GRAM_ITERATIONS):
            num_steps = min(start + GRAM_ITERATIONS, group["ns_steps"]) - max(start, 0)
            x = _orthogonal_factor(x @ x.mT, num_steps, (a, b, c)) @ x
    else:
        for _ in range(group["ns_steps"]):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _orthogonal_factor(gram: torch.Tensor, num_steps: int, coefficients: tuple[float, float, float]) -> torch.Tensor:
    """Return the square matrix whose product with x is x after some iterations, from ``gram``, which is x @ x.mT.

    An iteration multiplies x by P = a + b gram + c gram^2, and so gram becomes P gram P, without a product with the
    long side of x (tridao.me/blog/2026/gram-newton-schulz).
    """
    a, b, c = coefficients
    # The factor of one iteration lacks a on its diagonal, which would round the other summands away.
    factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    if num_steps == 1:
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        return factor
    half = torch.baddbmm(gram, factor, gram, beta=a)
    later = _orthogonal_factor(torch.baddbmm(half, factor, half, beta=a), num_steps - 1, coefficients)
    return torch.baddbmm(later, later, factor, beta=a)


def apply_direction(
    master: torch.Tensor, update: torch.Tensor, group: Mapping[str, Any], shape: tuple[int, int]
) -> None:
    """Move some elements of ``master`` against their part of the orthogonal direction, in place.

    Args:
        master: The elements.
        update: The direction, in any dtype, on any device.
        group: The hyperparameters.
        shape: Rows and columns of the matrix.
    """
    lr, scale = float(group["lr"]), rate_factor(group["adjust_lr_fn"], *shape)
    # Masters that are offloaded from a GPU are updated on the host.
    step = torch.empty_like(master).copy_(update).mul_(-lr * scale)
    master.mul_(1 - lr * group["weight_decay"]).add_(step)


def rate_factor(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """Return the factor of the learning rate for a matrix of this shape. See ``Muon``."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    ratio = rows / columns
    return math.sqrt(ratio if adjust_lr_fn == "spectral_unclamped" else max(1, ratio))


def update_cost(rows: int, columns: int) -> int:
    """Return the multiplications of one iteration on a matrix, which owners are balanced by."""
    short, long = min(rows, columns), max(rows, columns)
    return 2 * short * short * long + short**3
