"""One optimizer whose groups are updated by several algorithms, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.optim.caller_optimizer import add_param_group, loss_of
from zeroengine.utils.formats import format_count

ALGORITHM = "algorithm"
# The shapes that an error lists.
NUM_SHOWN = 3


class MixedOptimizer(torch.optim.Optimizer):
    """Update each group of parameters by an optimizer of its own.

    The groups are those of the optimizers, with one key more, "algorithm", which names the optimizer's class. Schedules
    and users change their hyperparameters at any time::

        optimizer = MixedOptimizer([Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4)])

    Args:
        optimizers: The optimizers, one of each class, over different parameters.

    Raises:
        ZeroEngineError: There are none, or two of one class, or one has taken steps, or two have the same parameter.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        optimizers = [member for optimizer in optimizers for member in members_of(optimizer)]
        _check(optimizers)
        # By the name of the class. A dict, because attributes that are optimizers mark one that wraps others.
        self._members = {type(optimizer).__name__: optimizer for optimizer in optimizers}
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for name, optimizer in self._members.items():
            for group in optimizer.param_groups:
                group[ALGORITHM] = name
        super().__init__(groups, {})
        # One state serves all, so that ``state_dict()`` has it.
        for optimizer in optimizers:
            self.state.update(optimizer.state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group that is of none of the optimizers."""
        if param_group.get(ALGORITHM) not in self._members:
            raise ZeroEngineError("MixedOptimizer: add groups to one of the optimizers, before they are joined")
        add_param_group(self, param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies have, the optimizers among it."""
        return {**super().__getstate__(), "_members": self._members}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let each optimizer take a step, and return the loss of ``closure`` if there is one."""
        loss = loss_of(closure)
        # An engine runs this method on a copy without parameters, and the members keep their groups.
        if any(group["params"] for group in self.param_groups):
            for member in members_of(self):
                member.step()
        return loss

    def refuse_member_step(self) -> None:
        """Raise: one of the optimizers was asked for a step, and the engine updates all parameters at once."""
        raise ZeroEngineError(
            "step() of one optimizer of several: the engine updates all parameters at once. Write engine.step() in the "
            "place of the calls of step() of the optimizers that were passed to initialize()."
        )


def members_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that update, with their present groups: those of a ``MixedOptimizer``, or ``optimizer``."""
    if not isinstance(optimizer, MixedOptimizer):
        return [optimizer]
    for name, member in optimizer._members.items():
        # A user may have replaced the list of groups, and ``load_state_dict`` replaces both.
        member.state = optimizer.state
        member.param_groups = [group for group in optimizer.param_groups if group[ALGORITHM] == name]
    return list(optimizer._members.values())


def describe_algorithms(optimizer: torch.optim.Optimizer) -> str:
    """Return what each algorithm of a ``MixedOptimizer`` updates, in words; "" if there is one algorithm."""
    texts: list[str] = []
    for member in members_of(optimizer) if isinstance(optimizer, MixedOptimizer) else ():
        trained = [(group, p) for group in member.param_groups for p in group["params"] if p.requires_grad]
        # One parameter of Muon may hold several matrices.
        count = sum(group.get("num_matrices", 1) for group, _ in trained)
        nouns = ("matrix", "matrices") if all(p.ndim > 1 for _, p in trained) else ("tensor", "tensors")
        numel = format_count(sum(p.numel() for _, p in trained))
        texts.append(f"{type(member).__name__} updates {count} {nouns[count != 1]} ({numel} parameters)")
    return ", ".join(texts)


def _check(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    if not optimizers or not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
        raise ZeroEngineError(f"several optimizers are a list of torch.optim.Optimizer, found one of {kinds or 'none'}")
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ZeroEngineError(
                f"MixedOptimizer: found {kinds.count(kind)} optimizers of class {kind}; make one, with groups"
            )
    counts = Counter(p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    if shared := [tuple(param.shape) for param, count in counts.items() if count > 1]:
        raise ZeroEngineError(
            f"MixedOptimizer: several of {', '.join(kinds)} have the same parameters, of shapes "
            f"{', '.join(map(str, shared[:NUM_SHOWN]))}; each parameter belongs to one optimizer"
        )
