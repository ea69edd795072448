"""Find out what an optimizer's update of an element depends on: this element, its parameter, or other parameters too.

An optimizer of an unknown class is tried on two small parameters, whole and cut as two ranks would cut them. If the
results differ, it needs whole parameters, or the model would train otherwise at each number of ranks. If they also
differ where each rank has one whole parameter, no rank can update by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from zeroengine.optim.caller_optimizer import copy_without_parameters
from zeroengine.utils.tensor_tree import leaves_in

# The update of an element depends on other elements, so these optimizers need whole parameters.
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
    return acts_elementwise(optimizer, lambda copied: None)


def looks_at_one_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` updates each parameter by its own gradients alone.

    An optimizer that cannot be tried is taken to do so.
    """
    return _agree(optimizer, lambda copied: None, [(shape,) for shape in SHAPES])


def acts_elementwise(optimizer: torch.optim.Optimizer, act: Callable[[torch.optim.Optimizer], Any]) -> bool:
    """Return whether steps of ``optimizer`` and then ``act`` do and return the same on whole parameters and on parts.

    Args:
        optimizer: Copies of it take the steps.
        act: Is called with a copy after its steps. What it does may depend on its state.
    """
    return _agree(optimizer, act, [((CUT,),), ((SHAPES[0][0] * SHAPES[0][1] - CUT,), SHAPES[1])])


def _agree(
    optimizer: torch.optim.Optimizer, act: Callable[[torch.optim.Optimizer], Any], ranks: Sequence[Sequence[Any]]
) -> bool:
    """Return whether steps and then ``act`` do and return the same on one rank and on ``ranks``. See ``_updated``."""
    try:
        with torch.random.fork_rng(devices=[]):
            whole, other_seed = (_updated(optimizer, [SHAPES], act, seed=seed) for seed in (0, 1))
            if not torch.equal(whole.elements, other_seed.elements):
                return True
            cut = _updated(optimizer, ranks, act, seed=0)
    except Exception:
        # Whatever an optimizer of another project raises here, it may not raise on the model's parameters.
        return True
    if not torch.allclose(whole.elements, cut.elements, rtol=1e-5, atol=1e-7):
        return False
    return all(_is_same(whole.results[0], result) for result in cut.results)


def _is_same(whole: Any, part: Any) -> bool:
    """Return whether two results hold the same numbers. Objects of other kinds count as the same."""
    results = (whole, part)
    expected, found = ([leaf for leaf in leaves_in(x) if isinstance(leaf, (torch.Tensor, int, float))] for x in results)
    try:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7, equal_nan=True, check_dtype=False)
    # The last two come where one is a tensor or a flag, and the other a number.
    except (AssertionError, RuntimeError, TypeError):
        return False
    return True


class _Updated(NamedTuple):
    """The elements of all parameters after a few steps, and what each rank's ``act`` returned then."""

    elements: torch.Tensor
    results: list[Any]


def _updated(
    optimizer: torch.optim.Optimizer, ranks: Sequence[Any], act: Callable[[torch.optim.Optimizer], Any], seed: int
) -> _Updated:
    """Take a few steps and then ``act``, where each rank has parameters of some shapes.

    Args:
        optimizer: The optimizer. A copy of it takes the steps.
        ranks: For each rank the shapes of its parameters. Together they have as many elements as ``SHAPES``.
        seed: Of torch's random generator.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    draws = [torch.randn(numel, generator=generator, device="cpu") for _ in range(1 + NUM_STEPS)]
    updated, results, start = [], [], 0
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
        results.append(act(on_rank))
        updated.append(torch.stack([torch.cat([p.detach().flatten() for p in group]) for group in params]))
        start = stop
    return _Updated(torch.cat(updated, dim=1), results)


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
