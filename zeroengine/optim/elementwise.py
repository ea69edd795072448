"""Find out whether an optimizer's update of an element depends on other elements, which it would not see on a shard.

An optimizer of an unknown class is tried on two small parameters, whole and cut as two ranks would cut them. If the
results differ, the model would train otherwise at each number of ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from zeroengine.optim.caller_optimizer import copy_without_parameters

# The update of an element depends on other elements, so these optimizers are wrong on a shard.
NOT_ELEMENTWISE = {"Adafactor", "Muon", "SparseAdam", "Shampoo", "LAMB", "Lamb", "LARS"}
NUM_STEPS = 3
SHAPES = ((4, 6), (8,))
# The first rank has this many of the elements of all parameters. The cut goes through a row of the first parameter.
CUT = 15


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` updates each element by its own gradients alone.

    The classes of ``torch.optim`` are known. An optimizer that cannot be tried, because it needs parameters of a model
    or a GPU, or that draws random numbers, is taken to be element-wise.
    """
    if {cls.__name__ for cls in type(optimizer).__mro__} & NOT_ELEMENTWISE:
        return False
    if type(optimizer).__module__.startswith(("torch.optim.", "zeroengine.")):
        return True
    try:
        with torch.random.fork_rng(devices=[]):
            whole_result, other_seed_result = (_updated(optimizer, [SHAPES], seed=seed) for seed in (0, 1))
            if not torch.equal(whole_result, other_seed_result):
                return True
            cut_result = _updated(optimizer, [((CUT,),), ((SHAPES[0][0] * SHAPES[0][1] - CUT,), SHAPES[1])], seed=0)
    except Exception:
        # Whatever an optimizer of another project raises here, it may not raise on the model's parameters.
        return True
    return torch.allclose(whole_result, cut_result, rtol=1e-5, atol=1e-7)


def _updated(optimizer: torch.optim.Optimizer, ranks: list[Any], seed: int) -> torch.Tensor:
    """Return the elements of all parameters after a few steps, where each rank updates parameters of some shapes.

    Args:
        optimizer: The optimizer. A copy of it takes the steps.
        ranks: For each rank the shapes of its parameters. Together they have as many elements as ``SHAPES``.
        seed: Of torch's random generator.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    draws = [torch.randn(numel, generator=generator, device="cpu") for _ in range(1 + NUM_STEPS)]
    updated, start = [], 0
    for shapes in ranks:
        torch.manual_seed(seed)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        stop = start + sum(sizes)
        parts = [draw[start:stop].split(sizes) for draw in draws]
        on_rank = _independent_copy(optimizer)
        # Each group has a copy of the parameters, because groups may have rules of their own.
        params = []
        for group in on_rank.param_groups:
            group["params"] = [
                torch.nn.Parameter(value.clone().view(shape)) for value, shape in zip(parts[0], shapes, strict=True)
            ]
            # A schedule's warmup may begin at 0, which would hide every difference.
            if "lr" in group and not float(group["lr"]):
                group["lr"] = 0.01
            params.append(group["params"])
        for gradients in parts[1:]:
            for group_params in params:
                for param, gradient in zip(group_params, gradients, strict=True):
                    param.grad = gradient.clone().view_as(param)
            on_rank.step()
        updated.append(torch.stack([torch.cat([p.detach().flatten() for p in group]) for group in params]))
        start = stop
    return torch.cat(updated, dim=1)


def _independent_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy without parameters whose steps leave ``optimizer`` as it is."""
    clone = copy_without_parameters(optimizer)
    # Attributes may hold the model's parameters, which are not copied.
    memo: dict[int, Any] = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    for name, value in vars(clone).items():
        if name not in ("param_groups", "state"):
            vars(clone)[name] = copy.deepcopy(value, memo)
    for group in clone.param_groups:
        group.update({key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"})
    return clone
