"""What torch's operations do with their arguments: what a recorder needs to know of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_aten = torch.ops.aten
# Take no values.
METADATA = {_aten.detach.default, _aten.alias.default, _aten.view.default, _aten._unsafe_view.default}
# Write all of their first argument, and read nothing of it.
_OVERWRITE = {
    *(_aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_, _aten.random_, _aten.bernoulli_),
    *(_aten.exponential_, _aten.log_normal_, _aten.cauchy_, _aten.geometric_),
}


@dataclass(frozen=True)
class Facts:
    """What an operation's schema says."""

    view: bool  # gives views, and writes nothing
    written: tuple[tuple[int, str], ...]  # arguments: position and name
    overwrites: bool  # reads nothing of what it writes
    random: bool
    known: bool  # torch's own


@cache
def facts_of(operation: Any) -> Facts:
    schema = operation._schema
    infos = [(i, arg) for i, arg in enumerate(schema.arguments) if arg.alias_info is not None]
    written = tuple((i, arg.name) for i, arg in infos if arg.alias_info.is_write)
    return Facts(
        view=not written and any(result.alias_info is not None for result in schema.returns),
        written=written,
        overwrites=operation.overloadpacket in _OVERWRITE
        or (bool(written) and all(schema.arguments[i].is_out for i, _ in written)),
        random=torch.Tag.nondeterministic_seeded in operation.tags,
        known=operation.namespace in ("aten", "prims"),
    )
