"""What a random model and its training are made of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

VOCAB, LENGTH = 11, 4


def non_defaults(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as in an instance built without arguments."""
    fields = [(f.name, getattr(instance, f.name), f.default) for f in dataclasses.fields(instance)]
    return {name: value for name, value, default in fields if value != default}


def compact(instance: Any) -> str:
    """The expression that builds a dataclass, without its defaults."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in non_defaults(instance).items())
    return f"{type(instance).__name__}({arguments})"


@dataclass(frozen=True)
class BlockSpec:
    """How one block is built.

    Attributes:
        body: a key of BODIES.
        output: a key of OUTPUTS, or "tensor", or "attribute": the extra tensor is kept in `block.extra`.
        weight_output: the extra tensor is a view of a parameter of the block's own.
        frozen: "no", "part" (the body's first parameter) or "all".
        unused: a parameter that nothing uses.
    """

    body: str = "mlp"
    output: str = "tensor"
    weight_output: bool = False
    frozen: str = "no"
    unused: bool = False

    __repr__ = compact


@dataclass(frozen=True)
class Op:
    """One operation of a model's forward.

    Attributes:
        kind: "block", "direct" (a parameter of the model itself), "gain", "in place", "push" or "join" (a skip
            connection).
        block: the index of the block, or of the parameter.
        how: a key of BLOCK_CALLS or of DIRECT_CALLS.
        skip: steps in which it is left out.
    """

    kind: str
    block: int = 0
    how: str = "plain"
    skip: tuple[int, ...] = ()

    __repr__ = compact


@dataclass(frozen=True)
class Recipe:
    """A model and its training. Every default is the ordinary case, so a failure can be reduced field by field."""

    seed: int
    blocks: tuple[BlockSpec, ...] = (BlockSpec(), BlockSpec())
    ops: tuple[Op, ...] = (Op("block", 0), Op("block", 1))
    width: int = 6
    dtype: str = "float64"
    head: str = "linear"  # a key of HEADS
    positions: str = ""  # "view" or "whole": what the module of learned positions returns
    query: str = ""  # "parameter" or "leaf": what every block gets as a second argument
    tied: tuple[int, ...] = ()  # blocks that share a weight
    extras: str = "loss"  # where blocks' extra tensors go: "loss", "stream" (into the next block) or "nowhere"
    frozen: tuple[str, ...] = ()  # top-level modules
    unused: bool = False  # a top-level parameter
    output: str = "loss"  # what the model returns: "loss", "tuple" or "dict"
    # Training
    loop: str = "engine"  # who steps: a key of trainers.LOOPS
    steps: int = 3
    micro_steps: int = 1
    optimizer: str = "sgd"
    clip: float = 0.0
    backward: str = "engine"  # or "plain": loss.backward()
    mode: str = "one"  # a key of MODES
    evaluate: str = ""  # "no_grad" or "inference"
    evaluate_when: str = "after step"  # or "before backward" or "before forward"
    gathered_forward: bool = False  # the forward is inside `gathered`, the backward outside
    dropped_forward: bool = False  # a forward with gradients that no backward follows
    no_sync: bool = False  # of all micro-steps but the last
    zero_grad: bool = False  # called before the first forward of each step
    toggled: int = -1  # a block that is frozen in the second step alone
    hooks: str = ""  # of the user's: "parameter", "backward", "forward" or "forward before"
    fault: str = ""  # where the first micro-step of `fault_step` raises: a key of FAULTS
    fault_step: int = 1
    fault_at: int = 0  # the operation of the forward
    fault_error: str = "RuntimeError"
    # The engine's configuration
    ranks: int = 2
    transport: str = "shm"
    units: tuple[str, ...] = ()
    zero: tuple[tuple[str, Any], ...] = ()
    offload: str = ""  # a key of trainers.OFFLOADS

    def __str__(self) -> str:
        """What differs from the defaults, a line each."""
        return "\n".join(f"  {name} = {value!r}" for name, value in non_defaults(self).items())
