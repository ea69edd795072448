"""Read from an operation's schema what the recorder needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_aten = torch.ops.aten
# Operations that neither read nor write values.
METADATA = {_aten.detach.default, _aten.alias.default, _aten.view.default, _aten._unsafe_view.default}
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
    schema = operation._schema
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
