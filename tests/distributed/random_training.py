"""Trains the models of `random_models` by plain PyTorch and by the engine, compares, and reduces what fails."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import math
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

import zeroengine

from .models import config
from .random_blocks import LENGTH, PLAIN_BODIES, VOCAB
from .random_models import Op, RandomModel, Recipe, random_recipe
from .ranks import RankFailed, run_ranks
from .training import start

STAGES = (0, 1, 2, 3)
WORLD_SIZE = 2
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=0.01),
    # A large eps keeps elements of almost no gradient from magnifying the order of additions.
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3, weight_decay=0.1),
    "adamw in groups": lambda params: torch.optim.AdamW(
        [{"params": params[::2]}, {"params": params[1::2], "lr": 2e-3, "weight_decay": 0.0}], lr=1e-2, eps=1e-3
    ),
}


class PlannedFault(RuntimeError):
    """What a recipe raises inside of a forward or a backward."""


def planned_fault(recipe: Recipe) -> BaseException:
    return KeyboardInterrupt("planned") if recipe.fault_error == "KeyboardInterrupt" else PlannedFault("planned")


@dataclass
class Trace:
    """What one rank saw: everything that was computed, the norm of each step, and the parameters in the end."""

    values: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)


# -- two ways to train -------------------------------------------------------------------------------------


class Trainer(Protocol):
    """The few calls by which the engine's loop and plain PyTorch's differ."""

    module: RandomModel
    scale: float  # of the losses whose backward is run

    def forward(self, *args: Any) -> Any: ...
    def backward(self, loss: torch.Tensor, by_engine: bool, **options: Any) -> None: ...
    def step(self) -> float:
        """Ends a step; the norm of its gradient before clipping."""
        ...

    def end_micro_step(self) -> None: ...
    def zero_grad(self) -> None: ...
    def gathered(self) -> contextlib.AbstractContextManager[None]: ...
    def no_sync(self) -> contextlib.AbstractContextManager[None]: ...
    def interrupted(self) -> contextlib.AbstractContextManager[None]:
        """Around a micro-step that raises: its gradients do not count."""
        ...


class Plain:
    """Plain PyTorch: one process on the data of all ranks.

    Args:
        ranks: how many ranks the mean is over.
    """

    def __init__(self, recipe: Recipe, ranks: int) -> None:
        self.module = RandomModel(recipe)
        self.optimizer = OPTIMIZERS[recipe.optimizer](list(self.module.parameters()))
        self.scale, self.clip = 1 / (ranks * recipe.micro_steps), recipe.clip

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: torch.Tensor, by_engine: bool, **options: Any) -> None:
        (loss * self.scale).backward(**options)

    def step(self) -> float:
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip or math.inf).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def end_micro_step(self) -> None: ...

    def zero_grad(self) -> None: ...

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        yield

    no_sync = gathered

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        before = [None if param.grad is None else param.grad.clone() for param in self.module.parameters()]
        yield
        for param, grad in zip(self.module.parameters(), before, strict=True):
            param.grad = grad


class ByEngine:
    """The engine at one stage."""

    def __init__(self, recipe: Recipe, stage: int) -> None:
        self.module = RandomModel(recipe)
        self.scale, self.stepped = 1.0, False
        settings = config(
            stage,
            optimizer=None,
            gradient_clipping=recipe.clip,
            gradient_accumulation_steps=recipe.micro_steps,
            zero_optimization={"param_persistence_threshold": 0} | dict(recipe.zero),
            comm={"transport": recipe.transport, "timeout_seconds": 20},
            **({"units": list(recipe.units)} if recipe.units else {}),
        )
        settings["zero_optimization"].pop("stage3_param_persistence_threshold")
        optimizer = OPTIMIZERS[recipe.optimizer](list(self.module.parameters()))
        self.engine = zeroengine.initialize(self.module, optimizer, settings)

    def forward(self, *args: Any) -> Any:
        return self.engine(*args)

    def backward(self, loss: torch.Tensor, by_engine: bool, **options: Any) -> None:
        if by_engine:
            self.engine.backward(loss, **options)
        else:
            loss.backward(**options)

    def step(self) -> float:
        assert self.stepped and self.engine.grad_norm is not None
        return self.engine.grad_norm

    def end_micro_step(self) -> None:
        self.stepped = bool(self.engine.step())

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        return zeroengine.gathered(self.module)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.engine.no_sync()

    def interrupted(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


# -- one micro-step ------------------------------------------------------------------------------------------


@dataclass
class MicroStep:
    """One micro-step of one rank."""

    recipe: Recipe
    trainer: Trainer
    trace: Trace
    step: int
    number: int
    rank: int

    def forward(self, part: int = 0) -> tuple[torch.Tensor, Any]:
        """The loss and the hidden states on one part of the micro-batch."""
        with self.trainer.gathered() if self.recipe.gathered_forward else contextlib.nullcontext():
            output = self.trainer.forward(*batch(self.number, self.rank, part), self.step)
        if isinstance(output, dict):
            return output["loss"], output["hidden"]
        return output if isinstance(output, tuple) else (output, None)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.trace.values.append(loss.item())
        if self.recipe.evaluate_when == "before backward":
            self.evaluate()
        self.trainer.backward(loss, self.recipe.backward == "engine", **options)

    def params(self) -> list[nn.Parameter]:
        return [param for param in self.trainer.module.parameters() if param.requires_grad]

    def note(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.trace.values += [
            tensor.detach().double().square().sum().item() for tensor in tensors if tensor is not None
        ]

    def evaluate(self) -> None:
        if not self.recipe.evaluate:
            return
        self.trainer.module.eval()
        with torch.no_grad() if self.recipe.evaluate == "no_grad" else torch.inference_mode():
            output = self.trainer.forward(*batch(self.number, self.rank, 7), self.step)
        loss = output["loss"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
        self.trace.values.append(loss.item())
        self.trainer.module.train()

    def run(self) -> None:
        torch.manual_seed(1000 * self.number + self.rank)  # of dropout
        leaf = self.trainer.module.query if self.recipe.query == "leaf" else None
        if leaf is not None:
            leaf.grad = None
        if self.recipe.evaluate_when == "before forward":
            self.evaluate()
        if self.recipe.dropped_forward:
            self.trace.values.append(self.forward(part=5)[0].item())
        MODES[self.recipe.mode](self)
        if leaf is not None and leaf.grad is not None:
            self.note([leaf.grad / self.trainer.scale])


def _one(step: MicroStep) -> None:
    step.backward(step.forward()[0])


def _two_losses(step: MicroStep) -> None:
    loss, hidden = step.forward()
    step.backward(loss, retain_graph=True)
    step.backward(hidden.square().mean())


def _one_loss_twice(step: MicroStep) -> None:
    loss, _ = step.forward()
    step.backward(loss, retain_graph=True)
    step.backward(loss)


def _partial_backward(step: MicroStep) -> None:
    """The first backward reaches only what is before the head."""
    loss, hidden = step.forward()
    step.backward(hidden[:, :1].square().mean(), retain_graph=True)
    step.backward(loss)


def _two_forwards(step: MicroStep) -> None:
    first, second = step.forward()[0], step.forward(part=1)[0]
    step.backward(second)
    step.backward(first)


def _two_forwards_first_first(step: MicroStep) -> None:
    first, second = step.forward()[0], step.forward(part=1)[0]
    step.backward(first)
    step.backward(second)


def _cached_gradients(step: MicroStep) -> None:
    """The loss is of representations computed without gradients; then each part's are computed again with them."""
    with torch.no_grad():
        found = [step.forward(part)[1] for part in range(2)]
    cached = [hidden.detach().requires_grad_() for hidden in found]
    loss = torch.cat(cached).square().mean() + (cached[0] * cached[1]).sum().tanh()
    grads = torch.autograd.grad(loss, cached)
    for part, grad in enumerate(grads):
        torch.manual_seed(step.number)
        whole, hidden = step.forward(part)
        step.backward((hidden * grad).sum() + 0.1 * whole)


def _grad_first(step: MicroStep) -> None:
    loss, _ = step.forward()
    step.note(torch.autograd.grad(loss, step.params(), retain_graph=True, allow_unused=True))
    step.backward(loss)


def _grad_of_some_first(step: MicroStep) -> None:
    loss, _ = step.forward()
    step.note(torch.autograd.grad(loss, step.params()[-2:], retain_graph=True, allow_unused=True))
    step.backward(loss)


def _grad_alone_first(step: MicroStep) -> None:
    """The gradients of one forward, and the backward of another."""
    loss, _ = step.forward(part=1)
    step.note(torch.autograd.grad(loss, step.params(), allow_unused=True))
    step.backward(step.forward()[0])


def _backward_of_some(step: MicroStep) -> None:
    step.backward(step.forward()[0], inputs=step.params()[::2])


def _penalty_on_parameters(step: MicroStep) -> None:
    loss, _ = step.forward()
    grads = torch.autograd.grad(loss, step.params(), create_graph=True, allow_unused=True)
    step.backward(loss + 0.01 * sum(grad.square().sum() for grad in grads if grad is not None))


def _penalty_on_hidden(step: MicroStep) -> None:
    loss, hidden = step.forward()
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    step.backward(loss + 0.1 * grad.square().sum())


MODES: dict[str, Callable[[MicroStep], None]] = {
    "one": _one,
    "two losses": _two_losses,
    "one loss twice": _one_loss_twice,
    "partial backward": _partial_backward,
    "two forwards": _two_forwards,
    "two forwards, first first": _two_forwards_first_first,
    "cached gradients": _cached_gradients,
    "grad first": _grad_first,
    "grad of some first": _grad_of_some_first,
    "grad alone first": _grad_alone_first,
    "backward of some": _backward_of_some,
    "penalty on parameters": _penalty_on_parameters,
    "penalty on hidden": _penalty_on_hidden,
}
SEVERAL_BACKWARDS = {  # of one step: gradient degree 1 adds them up first, higher degrees add ranks first
    "two losses", "one loss twice", "partial backward", "two forwards", "two forwards, first first",
    "cached gradients",
}  # fmt: skip

# -- the whole training ----------------------------------------------------------------------------------------


def batch(number: int, rank: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + 10 * part + rank)
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
    return ids, (3 * ids + 1) % VOCAB


@contextlib.contextmanager
def armed(recipe: Recipe, model: RandomModel) -> Iterator[BaseException]:
    """The model raises the recipe's fault, once or more."""
    fault, handle = planned_fault(recipe), None
    block = model.blocks[recipe.ops[recipe.fault_at].block]

    def hook(*_: Any) -> None:
        raise fault

    if recipe.fault == "backward":
        model.fault = fault
    elif recipe.fault == "hook":
        handle = block.register_forward_pre_hook(hook, prepend=True)
    elif recipe.fault == "hook after":
        handle = block.register_forward_hook(hook)
    else:
        block.fault, block.fault_in_recompute = fault, recipe.fault == "recompute"
    try:
        yield fault
    finally:
        model.fault = block.fault = None
        if handle is not None:
            handle.remove()


def add_hooks(recipe: Recipe, model: RandomModel) -> None:
    """Hooks of the user's."""

    def scale(grads: Any) -> Any:
        return tuple(grad if grad is None else grad * 0.9 for grad in grads)

    for block in model.blocks:
        if block.spec.body not in PLAIN_BODIES or block.spec.output != "tensor":
            continue
        if recipe.hooks == "parameter":
            for param in block.parameters():
                if param.requires_grad:
                    param.register_hook(lambda grad: grad * 0.5)
        elif recipe.hooks == "backward":
            block.register_full_backward_hook(lambda module, inputs, outputs: scale(inputs))
        elif recipe.hooks == "forward":
            block.register_forward_hook(lambda module, args, output: output * 1.1)
        elif recipe.hooks == "forward before":
            block.register_forward_pre_hook(lambda module, args: scale(args))


def train(recipe: Recipe, trainer: Trainer, ranks: Sequence[int]) -> dict[int, Trace]:
    """What each of `ranks` sees, which this process plays in turn."""
    traces = {rank: Trace() for rank in ranks}
    model = trainer.module
    trainable = {param for param in model.parameters() if param.requires_grad}
    for step in range(recipe.steps):
        if 0 <= recipe.toggled < len(model.blocks) and step in (1, 2):
            for param in model.blocks[recipe.toggled].parameters():
                if param in trainable:
                    param.requires_grad_(step == 2)
        if recipe.zero_grad:
            trainer.zero_grad()
        for micro_step in range(recipe.micro_steps):
            last = micro_step == recipe.micro_steps - 1
            for rank in ranks:
                one = MicroStep(recipe, trainer, traces[rank], step, step * recipe.micro_steps + micro_step, rank)
                with trainer.no_sync() if recipe.no_sync and not last else contextlib.nullcontext():
                    if recipe.fault and (step, micro_step) == (recipe.fault_step, 0):
                        _interrupt(one)
                    one.run()
            trainer.end_micro_step()
        norm = trainer.step()
        for rank in ranks:
            traces[rank].norms.append(norm)
            if recipe.evaluate_when == "after step":
                MicroStep(recipe, trainer, traces[rank], step, step * recipe.micro_steps, rank).evaluate()
    return traces


def _interrupt(step: MicroStep) -> None:
    values = len(step.trace.values)
    with step.trainer.interrupted(), armed(step.recipe, step.trainer.module) as fault:
        try:
            step.run()
        except type(fault) as error:
            assert str(error) == "planned", error
        else:
            raise AssertionError("the planned fault did not happen")
    del step.trace.values[values:]
    step.trainer.module.train()


def train_plainly(recipe: Recipe, ranks: int = WORLD_SIZE) -> dict[int, Trace]:
    plain = Plain(recipe, ranks)
    add_hooks(recipe, plain.module)
    traces = train(recipe, plain, range(ranks))
    for trace in traces.values():
        trace.state = {name: value.detach().clone() for name, value in plain.module.state_dict().items()}
    return traces


def train_by_engine(recipe: Recipe, stage: int) -> Trace:
    """On one rank. What fails leaves its engine open: its process is to end."""
    rank = start()
    by_engine = ByEngine(recipe, stage)
    add_hooks(recipe, by_engine.module)
    trace = train(recipe, by_engine, [rank])[rank]
    trace.state = by_engine.engine.full_state_dict()
    by_engine.engine.close()
    return trace


# -- comparing ---------------------------------------------------------------------------------------------------


def differences(recipe: Recipe, plain: dict[int, Trace], stages: dict[int, list[Trace]]) -> list[str]:
    """What is wrong with what the ranks saw at each stage."""
    wrong = []
    tolerance = 1e-9 if recipe.dtype == "float64" else 2e-4
    for stage, traces in stages.items():
        for rank, trace in enumerate(traces):
            expected = plain[rank]
            for what, seen, wanted in (
                ("value", trace.values, expected.values),
                ("norm", trace.norms, expected.norms),
            ):
                if not _close(seen, wanted, tolerance):
                    wrong.append(f"stage {stage}, rank {rank}: {what}s {_row(seen)}, plain PyTorch's {_row(wanted)}")
            for name, value in trace.state.items():
                if not torch.allclose(value, expected.state[name], rtol=tolerance, atol=tolerance):
                    error = (value - expected.state[name]).abs().max().item()
                    wrong.append(f"stage {stage}, rank {rank}: parameter {name} differs by {error:.2g}")
                    break
    for first, other in _equal_stages(recipe):
        if first in stages and other in stages and not wrong:
            for rank, (one, two) in enumerate(zip(stages[first], stages[other], strict=True)):
                if not _same_bits(one, two):
                    wrong.append(f"rank {rank}: stages {first} and {other} differ in bits: {_first_bits(one, two)}")
    return wrong


def _close(seen: list[float], wanted: list[float], tolerance: float) -> bool:
    return len(seen) == len(wanted) and all(
        math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) for a, b in zip(seen, wanted, strict=True)
    )


def _row(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in values[:12]) + (", ..." if len(values) > 12 else "") + "]"


def _equal_stages(recipe: Recipe) -> list[tuple[int, int]]:
    """Stages with the same bits: all, unless gradients are added up over micro-steps or backwards."""
    if recipe.micro_steps > 1 or recipe.mode in SEVERAL_BACKWARDS:
        return [(0, 1), (2, 3)]
    return [(0, 1), (0, 2), (0, 3)]


def _same_bits(one: Trace, two: Trace) -> bool:
    same = one.values == two.values and one.norms == two.norms and one.state.keys() == two.state.keys()
    return same and all(torch.equal(value, two.state[name]) for name, value in one.state.items())


def _first_bits(one: Trace, two: Trace) -> str:
    for what, a, b in (("value", one.values, two.values), ("norm", one.norms, two.norms)):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                return f"{what} {index}, {x!r} and {y!r}"
    return next(name for name, value in one.state.items() if not torch.equal(value, two.state[name]))


# -- many seeds ----------------------------------------------------------------------------------------------------


def _train_some(recipes: list[Recipe], stages: Sequence[int], folder: Path) -> None:
    """On one rank: leaves each trace in a file, so that those before a crash are not lost."""
    rank = start()
    logging.getLogger("zeroengine").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # torch's, of checkpoints and hooks that a recipe combines
    for index, recipe in enumerate(recipes):
        for stage in stages:
            path = folder / f"{index}.{stage}.{rank}"
            try:
                found: Any = train_by_engine(recipe, stage)
            except BaseException as error:
                found = "".join(traceback.format_exception(error, limit=-5))
            unfinished = folder / f"{path.name}.unfinished"
            unfinished.write_bytes(pickle.dumps(found))
            unfinished.rename(path)
            if isinstance(found, str):
                return  # the engine may be in any state, and the other rank waits for it


def check(recipes: Sequence[Recipe], stages: Sequence[int] = STAGES, seconds: float = 60) -> dict[Recipe, list[str]]:
    """What is wrong with each recipe at these stages, for those with which something is.

    Args:
        seconds: that one recipe may take, as long as it takes to notice a hang.
    """
    wrong: dict[Recipe, list[str]] = {}
    remaining = list(recipes)
    while remaining:
        with tempfile.TemporaryDirectory() as name:
            folder, ending = Path(name), ""
            try:
                run_ranks(WORLD_SIZE, _train_some, remaining, stages, folder, timeout=seconds + 4 * len(remaining))
            except RankFailed as failed:
                ending = ", ".join(f"rank {rank}: {text}" for rank, (_, text, _) in failed.failures.items())
            finished, ended = 0, False
            while finished < len(remaining) and not ended:
                recipe = remaining[finished]
                problems, ended = _judge(recipe, finished, stages, folder, ending)
                finished += 1
                if problems:
                    wrong[recipe] = problems
            remaining = remaining[finished:]
    return wrong


def _judge(recipe: Recipe, index: int, stages: Sequence[int], folder: Path, ending: str) -> tuple[list[str], bool]:
    """What is wrong with one recipe, and whether that ended the run."""
    found: dict[int, list[Trace]] = {}
    for stage in stages:
        paths = [folder / f"{index}.{stage}.{rank}" for rank in range(WORLD_SIZE)]
        answers = [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]
        errors = [answer for answer in answers if isinstance(answer, str)]
        if errors or None in answers:
            return [f"stage {stage}: {error}" for error in dict.fromkeys(errors or [f"no answer ({ending})"])], True
        found[stage] = answers
    return differences(recipe, train_plainly(recipe), found), False


def describe(wrong: dict[Recipe, list[str]], stages: Sequence[int] = STAGES) -> str:
    lines = []
    for recipe, problems in wrong.items():
        again = " ".join(f"--stage {stage}" for stage in stages) if tuple(stages) != STAGES else ""
        lines += [
            f"seed {recipe.seed}: python -m tests.distributed.random_models --seed {recipe.seed} {again}".rstrip()
        ]
        lines += [str(recipe), *problems, ""]
    return "\n".join(lines)


# -- reducing ------------------------------------------------------------------------------------------------------


def smaller(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes that differ from this one by one part that is gone or ordinary."""
    for f in dataclasses.fields(recipe):
        if f.name not in ("seed", "blocks", "ops", "fault_at") and getattr(recipe, f.name) != f.default:
            yield dataclasses.replace(recipe, **{f.name: f.default})
    for index, op in enumerate(recipe.ops):
        ops = recipe.ops[:index] + recipe.ops[index + 1 :]
        if not (recipe.fault and index == recipe.fault_at):
            yield dataclasses.replace(recipe, ops=ops, fault_at=recipe.fault_at - (index < recipe.fault_at))
        if op.kind == "block" and op.how != "plain":
            yield dataclasses.replace(
                recipe, ops=(*recipe.ops[:index], Op("block", op.block), *recipe.ops[index + 1 :])
            )
    for index, spec in enumerate(recipe.blocks):
        for f in dataclasses.fields(spec):
            if getattr(spec, f.name) != f.default:
                ordinary = dataclasses.replace(spec, **{f.name: f.default})
                yield dataclasses.replace(
                    recipe, blocks=(*recipe.blocks[:index], ordinary, *recipe.blocks[index + 1 :])
                )
        if len(recipe.blocks) > 1 and index == len(recipe.blocks) - 1 and index not in recipe.tied:
            if all(op.kind != "block" or op.block != index for op in recipe.ops):
                yield dataclasses.replace(recipe, blocks=recipe.blocks[:-1])
    if recipe.steps > 1:
        yield dataclasses.replace(recipe, steps=recipe.steps - 1)
    if recipe.micro_steps > 2:
        yield dataclasses.replace(recipe, micro_steps=2)


def reduce(recipe: Recipe, stages: Sequence[int]) -> tuple[Recipe, list[str]]:
    """A smallest recipe that still fails, and how."""
    problems = check([recipe], stages).get(recipe, [])
    again = bool(problems)
    while again:
        again = False
        for candidate in smaller(recipe):
            with contextlib.suppress(Exception):
                train_plainly(candidate)
                found = check([candidate], stages, seconds=30).get(candidate)
                if found:
                    recipe, problems, again = candidate, found, True
                    break
    return recipe, problems


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.random_models", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--stage", type=int, action="append", choices=STAGES, help="all by default")
    parser.add_argument("--transport", choices=("shm", "gloo"), help="instead of the recipe's")
    parser.add_argument("--reduce", action="store_true", help="look for a smallest recipe that still fails")
    parser.add_argument("--plain", action="store_true", help="train by plain PyTorch alone")
    given = parser.parse_args()
    stages = tuple(given.stage or STAGES)
    recipes = [random_recipe(seed) for seed in range(given.seed, given.seed + given.count)]
    if given.transport:
        recipes = [dataclasses.replace(recipe, transport=given.transport) for recipe in recipes]
    if given.plain:
        for recipe in recipes:
            print(recipe.seed, train_plainly(recipe)[0])
        return
    failed = 0
    for begin in range(0, len(recipes), 20):
        wrong = check(recipes[begin : begin + 20], stages)
        failed += len(wrong)
        if given.reduce:
            wrong = dict(reduce(recipe, stages) for recipe in wrong)
        print(describe(wrong, stages), end="", flush=True)
    print(f"{failed} of {len(recipes)} seeds failed")
    raise SystemExit(bool(failed))
