"""What happens in one micro-step of one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.distributed.random_models.recipe import LENGTH, VOCAB, Recipe
from tests.distributed.random_models.trainers import Trainer


@dataclass
class Trace:
    """What one rank saw: everything that was computed, the norm of each step, and the parameters in the end."""

    values: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)


def batch(number: int, rank: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + 10 * part + rank)
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
    return ids, (3 * ids + 1) % VOCAB


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


def _loss_of_another_forward_between(step: MicroStep) -> None:
    """Two losses of one forward, whose graph is retained; between them the loss of a later forward."""
    (first, hidden), second = step.forward(), step.forward(part=1)[0]
    step.backward(first, retain_graph=True)
    step.backward(second)
    step.backward(hidden.square().mean())


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
    "loss of another forward between": _loss_of_another_forward_between,
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
    "loss of another forward between", "cached gradients",
}  # fmt: skip
