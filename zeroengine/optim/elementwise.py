"""Find out what an optimizer's update of an element depends on: this element, its parameter, or other parameters too.

An optimizer of an unknown class is tried on two small parameters, whole and cut as two ranks would cut them. If the
results differ, it needs whole parameters, or the model would train otherwise at each number of ranks. If they also
differ where each rank has one whole parameter, no rank can update by itself. Where its steps raise, nothing is known,
and it is refused.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zeroengine.deferred_init.dispatch_modes import OperationMode
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.caller_optimizer import copy_without_parameters
from zeroengine.optim.mixed_optimizer import members_of
from zeroengine.utils.tensors import leaves_in
from zeroengine.utils.torch_internals import COLLECTIVES

# The update of an element depends on other elements, so these optimizers need whole parameters.
NOT_ELEMENTWISE = {"Adafactor", "Muon", "SparseAdam", "Shampoo", "LAMB", "Lamb", "LARS"}
# Some optimizers begin to look at other elements after some steps.
NUM_STEPS = 30
# The parameters that are tried. Some optimizers take matrices alone.
TRIED = (((4, 6), (8,)), ((4, 6), (2, 4)))
# Those that are tried if steps raise on all of ``TRIED``, because some optimizers refuse small parameters. Others cut
# large ones, and so look at fewer elements. The sizes have many divisors, for optimizers that divide rows into heads.
LARGER = (((240, 144), (120,)), ((240, 144), (120, 96)))
# The first rank has this many of the elements of all parameters. The cut goes through a row of the first parameter.
CUT = 15
Shapes = Sequence[Sequence[int]]
# Optimizers of these modules look at one parameter to update it, and at other elements only if they are named above.
KNOWN_MODULES = ("torch.optim.", "zeroengine.")


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` is known to update each element by its own gradients alone.

    The classes of ``torch.optim`` are known. Others are tried. One that draws random numbers, or whose steps change
    nothing, counts as one that needs whole parameters.
    """
    if {cls.__name__ for cls in type(optimizer).__mro__} & NOT_ELEMENTWISE:
        return False
    if type(optimizer).__module__.startswith(KNOWN_MODULES):
        return True
    return _try(optimizer, lambda copied: None, _cut).agrees is True


def check_looks_at_one_parameter(optimizer: torch.optim.Optimizer) -> None:
    """Check that ``optimizer`` updates each parameter by its own gradients alone. Of several each must do so.

    Raises:
        ZeroEngineError: It looks at several parameters, or starts collectives; or its step raised on all parameters on
            which it was tried, so that this is unknown.
    """
    for member in members_of(optimizer):
        if type(member).__module__.startswith(KNOWN_MODULES) or is_elementwise(member):
            continue
        agrees, error = _try(member, lambda copied: None, lambda shapes: [(shape,) for shape in shapes])
        name = type(member).__name__
        if error is not None:
            raise ZeroEngineError(
                f"{name} cannot be tried, to see whether its update of a parameter looks at other parameters, of which "
                f"no rank has all: step() of a copy with small parameters raised {type(error).__name__}: "
                f"{textwrap.shorten(str(error), 200)}. "
                "Before initialize(), do what step() needs, such as set keys of its param_groups or call a method of "
                "its own. Otherwise use zero_optimization.stage 0, or an optimizer such as AdamW."
            ) from error
        if agrees is False:
            raise ZeroEngineError(
                f"{name} looks at several parameters to update one, or starts collectives of its own, and no rank has "
                "all parameters. Use zero_optimization.stage 0, or an optimizer that updates each parameter by itself, "
                "such as AdamW or Muon."
            )


def acts_elementwise(optimizer: torch.optim.Optimizer, act: Callable[[torch.optim.Optimizer], Any]) -> bool:
    """Return whether steps of ``optimizer`` and then ``act`` do and return the same on whole parameters and on parts.

    What cannot be tried counts as such.

    Args:
        optimizer: Copies of it take the steps.
        act: Is called with a copy after its steps. What it does may depend on its state.
    """
    return _try(optimizer, act, _cut).agrees is not False


def _cut(shapes: Shapes) -> list[Shapes]:
    """Return the shapes that each of two ranks has, where a cut goes through the first parameter."""
    return [((CUT,),), ((torch.Size(shapes[0]).numel() - CUT,), shapes[1])]


class _Trial(NamedTuple):
    """Whether one rank and several did the same, or None where that is unknown; and the error of steps that raise."""

    agrees: bool | None
    error: Exception | None = None


def _try(
    optimizer: torch.optim.Optimizer,
    act: Callable[[torch.optim.Optimizer], Any],
    cut: Callable[[Shapes], Sequence[Shapes]],
) -> _Trial:
    """Find out whether steps and then ``act`` do and return the same on one rank and on several.

    Args:
        optimizer: See ``acts_elementwise``.
        act: See ``acts_elementwise``.
        cut: Returns the shapes that each rank has, from those of whole parameters.
    """
    cpu, error = torch.device("cpu"), None
    own = next((param.device for group in optimizer.param_groups for param in group["params"]), cpu)
    # Parameters may be on the CPU still, to be moved to the GPU that this process uses.
    if own.type != "cuda" and torch.cuda.is_initialized():
        own = torch.device("cuda", torch.cuda.current_device())
    gpus = [own] if own.type == "cuda" else []
    # Some optimizers run on GPUs alone, or in fp32 alone. In float64 the tiniest steps show.
    kinds = itertools.product((TRIED, LARGER), dict.fromkeys((cpu, *gpus)), (torch.float64, torch.float32), (0, 1))
    for tried, device, dtype, index in kinds:
        shapes = tried[index]
        try:
            with torch.random.fork_rng(gpus), OperationMode(_without_communication), _without_output():
                uncut, other_seed, parts = (
                    _updated(optimizer, ranks, act, torch.empty(0, device=device, dtype=dtype), seed=seed)
                    for ranks, seed in (([shapes], 0), ([shapes], 1), (cut(shapes), 0))
                )
        except _Communicates:
            return _Trial(False)
        # Whatever an optimizer of another project raises here, it may not raise on other parameters.
        except Exception as raised:
            error = raised
            continue
        if not torch.equal(uncut.movement, other_seed.movement) or not uncut.movement.any():
            return _Trial(None)
        # A small movement may grow later, so what counts is the difference relative to it.
        tolerance = 1e-6 * float(uncut.movement.abs().max())
        agrees = torch.allclose(uncut.movement, parts.movement, rtol=1e-5, atol=tolerance)
        return _Trial(agrees and all(_is_same(uncut.results[0], result) for result in parts.results))
    return _Trial(None, error)


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    """Drop what is printed, and warnings, which Python would not show again in training."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Communicates(BaseException):
    """The optimizer starts a collective. No ``Exception``, which the optimizer might catch."""


def _without_communication(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation. One that waits for other ranks raises: they may not take part in this trial."""
    if function.namespace in ("c10d", COLLECTIVES):
        raise _Communicates
    return function(*args, **kwargs)


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
    """How far the elements of all parameters have moved, and what each rank's ``act`` returned then."""

    movement: torch.Tensor
    results: list[Any]


def _updated(
    optimizer: torch.optim.Optimizer,
    ranks: Sequence[Shapes],
    act: Callable[[torch.optim.Optimizer], Any],
    like: torch.Tensor,
    seed: int,
) -> _Updated:
    """Take steps and then ``act``, where each rank has parameters of some shapes.

    Args:
        optimizer: The optimizer. A copy of it takes the steps.
        ranks: For each rank the shapes of its parameters. Together they have as many elements as whole parameters.
        act: See ``acts_elementwise``.
        like: Has the dtype and the device of the parameters.
        seed: Of torch's random generator.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    numel = sum(torch.Size(shape).numel() for shapes in ranks for shape in shapes)
    draws = [torch.randn(numel, generator=generator, device="cpu") for _ in range(2 + NUM_STEPS)]
    # Gradients have a mean, by which optimizers that estimate a rate make progress.
    values, mean, *noise = (draw.to(like) for draw in draws)
    moved, results, start = [], [], 0
    for shapes in ranks:
        # ``torch.manual_seed`` would seed every GPU for good.
        torch.default_generator.manual_seed(seed)
        if like.is_cuda:
            torch.cuda.default_generators[like.device.index].manual_seed(seed)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        stop = start + sum(sizes)
        part = values[start:stop]
        on_rank = _independent_copy(optimizer)
        # Each group has a copy of the parameters, because groups may have rules of their own.
        params = []
        for group, given in zip(on_rank.param_groups, optimizer.param_groups, strict=True):
            group["params"] = [
                torch.nn.Parameter(value.clone().view(tuple(shape)))
                for value, shape in zip(part.split(sizes), shapes, strict=True)
            ]
            # Some optimizers make their state in the constructor.
            with_state = next((param for param in given["params"] if optimizer.state.get(param)), None)
            if with_state is not None:
                state = optimizer.state[with_state]
                on_rank.state |= {param: _initial_state(state, with_state, param) for param in group["params"]}
            # A schedule's warmup may begin at 0, which would hide every difference.
            if group.get("lr") is not None and not float(group["lr"]):
                group["lr"] = 0.01
            params.append(group["params"])
        # Schedule-free optimizers begin in evaluation mode, in which a step raises.
        with contextlib.suppress(Exception):
            on_rank.train()  # type: ignore[attr-defined]
        for draw in noise:
            gradients = (mean + 0.5 * draw)[start:stop].split(sizes)
            for group_params in params:
                for param, gradient in zip(group_params, gradients, strict=True):
                    param.grad = gradient.clone().view_as(param)
            on_rank.step()
        results.append(act(on_rank))
        moved.append(torch.stack([torch.cat([p.detach().flatten() for p in group]) - part for group in params]))
        start = stop
    return _Updated(torch.cat(moved, dim=1), results)


def _initial_state(state: Mapping[str, Any], given: torch.Tensor, param: torch.Tensor) -> dict[str, Any]:
    """Return the state of ``given``, with tensors of its shape in the shape of ``param`` and filled with one value."""
    return {
        key: torch.full_like(param, float(value.flatten()[0]), dtype=value.dtype, requires_grad=False)
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == given.shape
        else copy.deepcopy(value)
        for key, value in state.items()
    }


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
