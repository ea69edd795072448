"""Lion against its paper's algorithm."""

from __future__ import annotations

import math

import torch

from zeroengine.optim.lion import Lion


def test_steps_follow_algorithm_2() -> None:
    """arXiv 2302.06675, in Python floats."""
    lr, (beta1, beta2), decay = 0.01, (0.9, 0.99), 0.5
    start, grads = [1.0, -2.0, 0.5, 0.0], [[0.3, -0.1, 0.0, 1.0], [-0.5, 0.2, 0.0, -0.01], [-4.0, -3.0, 0.0, 0.2]]
    param, other = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64)), torch.nn.Parameter(torch.ones(2))
    optimizer = Lion([{"params": [param]}, {"params": [other], "lr": 1.0}], lr, (beta1, beta2), decay)
    values, momentum = list(start), [0.0] * 4
    for grad in grads:
        param.grad = torch.tensor(grad, dtype=torch.float64)
        assert optimizer.step(lambda: 7.0) == 7.0
        for i, g in enumerate(grad):
            update = beta1 * momentum[i] + (1 - beta1) * g
            sign = math.copysign(1, update) if update else 0
            values[i] -= lr * (sign + decay * values[i])
            momentum[i] = beta2 * momentum[i] + (1 - beta2) * g
    torch.testing.assert_close(param.tolist(), values, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"].tolist(), momentum, rtol=1e-12, atol=1e-15)
    assert torch.equal(other, torch.ones(2)) and other not in optimizer.state, "it got no gradient"
