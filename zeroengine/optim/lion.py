"""Lion, the sign of a momentum (Chen et al., arXiv 2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeroengine.optim.caller_optimizer import loss_of


class Lion(torch.optim.Optimizer):
    """Moves each element by ``lr`` against the sign of an interpolation of gradient and momentum.

    It is element-wise, so it runs on shards. It keeps one state, ``exp_avg``, of the parameter's shape and dtype.

    Args:
        params: Parameters or groups, as for any torch optimizer.
        lr: The learning rate, a third to a tenth of AdamW's.
        betas: The factors of the momentum in the update's direction, and in the next momentum.
        weight_decay: The decoupled weight decay.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and return the loss of ``closure`` if there is one."""
        loss = loss_of(closure)
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                if "exp_avg" not in self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
                # The direction uses the old momentum, so the momentum changes only after the update.
                momentum = self.state[param]["exp_avg"]
                direction = momentum.lerp(param.grad, 1 - beta1).sign_()
                param.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                momentum.lerp_(param.grad, 1 - beta2)
        return loss
