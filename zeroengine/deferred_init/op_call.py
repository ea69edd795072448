"""An operation that is about to run: what its schema says, and the tracked storages among its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from zeroengine.deferred_init.memory_budget import TrackedStorage
from zeroengine.deferred_init.trace import TensorRef, default_generator, tensors_of
from zeroengine.utils.torch_internals import is_traceable_wrapper_subclass, operation_schema, tree_leaves, unsafe_view

_aten = torch.ops.aten
# Operations that neither read nor write values.
METADATA = {_aten.detach.default, _aten.alias.default, _aten.view.default, unsafe_view.default}
# Operations that write all of their first argument and read nothing of it.
_OVERWRITE = {
    *(_aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_, _aten.random_, _aten.bernoulli_),
    *(_aten.exponential_, _aten.log_normal_, _aten.cauchy_, _aten.geometric_),
}


@dataclass(frozen=True)
class OpSchema:
    """The uses that an operation makes of its arguments."""

    is_view: bool  # returns views of its arguments and writes nothing
    written_args: tuple[tuple[int, str], ...]  # position and name of each argument that it writes
    overwrites: bool  # writes all of these arguments and reads nothing of them
    is_random: bool
    is_builtin: bool  # one of torch's own


@cache
def schema_of(operation: Any) -> OpSchema:
    """Return the schema of an ``OpOverload``."""
    schema = operation_schema(operation)
    # An argument has alias information if the operation writes it or returns a view of it.
    infos = [(i, arg) for i, arg in enumerate(schema.arguments) if arg.alias_info is not None]
    written = tuple((i, arg.name) for i, arg in infos if arg.alias_info.is_write)
    return OpSchema(
        # Without a write, a result that aliases an argument is a view of it.
        is_view=not written and any(result.alias_info is not None for result in schema.returns),
        written_args=written,
        # Arguments named ``out`` are overwritten by convention, and resized to fit.
        overwrites=operation.overloadpacket in _OVERWRITE
        or (bool(written) and all(schema.arguments[i].is_out for i, _ in written)),
        is_random=torch.Tag.nondeterministic_seeded in operation.tags,
        is_builtin=operation.namespace in ("aten", "prims"),
    )


class OpCall:
    """An operation and its arguments.

    Args:
        operation: An ``OpOverload``.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        tracked_of: Returns the tracked storage of a plain tensor, or None where it has none.

    Attributes:
        inputs: The tensors among the arguments.
        written: Those that it writes.
        tracked_by_id: The tracked storage of each plain input, by the id of the tensor.
        storages: The tracked storages of all inputs.
        targets: Those that it writes, each with the tensor through which it does.
        overwritten: Those that it overwrites as a whole. Their old values are not needed.
    """

    def __init__(
        self, operation: Any, args: Any, kwargs: Any, tracked_of: Callable[[torch.Tensor], TrackedStorage | None]
    ) -> None:
        self.operation, self.args, self.kwargs = operation, args, kwargs
        self.schema = schema_of(operation)
        self.inputs = tensors_of((args, kwargs))
        self.tracked_by_id = {id(tensor): tracked_of(tensor) for tensor in self.inputs if is_plain(tensor)}
        self.storages = {tracked for tracked in self.tracked_by_id.values() if tracked is not None}
        self.written = tensors_of([args[i] if i < len(args) else kwargs.get(n) for i, n in self.schema.written_args])
        self.targets = {target: t for t in self.written if (target := self.tracked_by_id.get(id(t))) is not None}
        of_inputs = [self.tracked_by_id.get(id(tensor)) for tensor in self.inputs]
        self.overwritten = {
            tracked
            for tracked, tensor in self.targets.items()
            if self.schema.overwrites
            and of_inputs.count(tracked) == 1
            and TensorRef.of_tensor(tensor, 0, tracked.nbytes, None).covers_storage
        }

    def run(self) -> Any:
        """Run the operation and return its result."""
        return self.operation(*self.args, **self.kwargs)

    def generator(self) -> torch.Generator:
        """Return the generator that the operation draws from: its argument, or the default one of its device."""
        leaves = tree_leaves((self.args, self.kwargs))
        generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        devices = [leaf.device if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        devices = [device for device in devices if isinstance(device, torch.device)]
        return generators[0] if generators else default_generator((devices or [torch.device("cpu")])[0])

    def only_initializes(self) -> bool:
        """Return whether it overwrites parameters in place, and does nothing else."""
        is_in_place = len(self.written) == 1 and bool(self.args) and self.written[0] is self.args[0]
        return is_in_place and bool(self.overwritten) and all(target.params for target in self.overwritten)

    def count_writes(self) -> None:
        """Count the writes that the parameters' version counters will show."""
        for tensor in self.written:
            if (target := self.tracked_by_id.get(id(tensor))) is not None:
                for ref, _ in target.live_params():
                    ref.num_pending_writes += 1


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided CPU or CUDA memory and nothing more."""
    if not (isinstance(tensor, nn.Parameter) or type(tensor) is torch.Tensor) or is_traceable_wrapper_subclass(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return False
    return tensor.device.type in ("cpu", "cuda")
