"""Match the model's names with those that a checkpoint or a file has for the same tensors.

Whoever wrote the file may have put a prefix such as `module.` before all names, and may have stored a tied parameter
under another of its names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from zeroengine.checkpoint.dcp_metadata import DcpMetadata
from zeroengine.checkpoint.entries import MODEL, OPTIMIZER, StateEntries, torch_dtype
from zeroengine.errors import CheckpointError
from zeroengine.optim.backends.interface import StateKeys

# One message shows at most so many problems.
MAX_PROBLEMS = 10

Shape = tuple[int, ...]


@dataclass(frozen=True)
class NameMatch:
    """The stored tensor that belongs to each tensor of the model.

    Attributes:
        prefix: What stands before the stored names.
        stored_names: The stored name by the model's name, where there is one.
        missing: The model's names that nothing is stored for.
        unexpected: The stored names that the model has no tensor for.
    """

    prefix: str
    stored_names: dict[str, str]
    missing: list[str]
    unexpected: list[str]

    def check(
        self, source: str, stored_shapes: Mapping[str, Shape], own_shapes: Mapping[str, Shape], *, strict: bool
    ) -> None:
        """Check that the stored tensors are the model's.

        Args:
            source: What holds the stored tensors, for the message.
            stored_shapes: The shapes by stored name.
            own_shapes: The shapes by the model's name.
            strict: Both sides must have the same names.

        Raises:
            CheckpointError: Shapes differ or, where `strict`, names do: the first ten, and the number of the others.
        """
        problems = [
            f"{name} has shape {stored_shapes[stored]} there and {own_shapes[name]} here"
            for name, stored in self.stored_names.items()
            if stored_shapes[stored] != own_shapes[name]
        ]
        advice = ""
        # With no common name at all, a list of all missing names would hide the reason.
        if not self.stored_names:
            problems = ["it has none of the model's names"]
        elif strict and (self.missing or self.unexpected):
            # Another shape cannot be ignored by strict=False, so the advice is left out where it would not help.
            advice = "" if problems else " Pass strict=False to load what fits."
            problems += [f"{name} is not there" for name in self.missing]
            problems += [f"{name} is not in the model" for name in self.unexpected]
        if problems:
            more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
            raise CheckpointError(f"{source} is another model's: {'; '.join(problems[:MAX_PROBLEMS])}{more}.{advice}")


def match_names(
    stored: Collection[str], names: Sequence[str], aliases: Mapping[str, str], default_prefix: str = ""
) -> NameMatch:
    """Return which stored name belongs to each of the model's names.

    Args:
        stored: The stored names.
        names: The model's names, each tensor once.
        aliases: Further names of the model's tied parameters, and the one of `names` for each.
        default_prefix: The prefix to assume where no other explains more names.
    """
    all_names = names_by_tensor(names, aliases)
    prefix = _find_prefix(stored, names, default_prefix)
    stored_names: dict[str, str] = {}
    for name, candidates in all_names.items():
        # A tied parameter may be stored under any of its names, and its own name counts first.
        match = next((prefix + candidate for candidate in candidates if prefix + candidate in stored), None)
        if match is not None:
            stored_names[name] = match
    # Every alias is expected, so a file that stores a tied parameter under two names has no unexpected one.
    expected = {prefix + candidate for candidates in all_names.values() for candidate in candidates}
    return NameMatch(
        prefix,
        stored_names,
        missing=[name for name in names if name not in stored_names],
        unexpected=[name for name in stored if name not in expected],
    )


def names_by_tensor(names: Sequence[str], aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """Return all names of each tensor, its own first."""
    all_names = {name: [name] for name in names}
    for alias, name in aliases.items():
        if name in all_names:
            all_names[name].append(alias)
    return all_names


def _find_prefix(stored: Collection[str], names: Sequence[str], default: str) -> str:
    """Return what stands before most of the stored names: the default or the shortest, where several do."""
    prefixes = {default}
    # Three names suffice to find every prefix that the whole file may have.
    for name in names[:3]:
        prefixes |= {other.removesuffix(name) for other in stored if other == name or other.endswith(f".{name}")}
    counts = {prefix: sum(prefix + name in stored for name in names) for prefix in sorted(prefixes, key=len)}
    # max returns the first of several, and the prefixes are ordered by length, so the shortest one wins a tie.
    return max(counts, key=lambda prefix: (counts[prefix], prefix == default))


class CheckpointNames:
    """Locate the model's tensors and the optimizer's state in a checkpoint.

    Attributes:
        model: Which stored tensor belongs to each parameter and buffer.
        state_names: The stored name of the optimizer's state, by its name in a `StateIndex`.
        state_keys: By parameter, the dtype of each key of its state and whether it is one number for the parameter.
    """

    def __init__(self, metadata: DcpMetadata, entries: StateEntries, aliases: Mapping[str, str]) -> None:
        self._shapes = {name.removeprefix(MODEL): entry.shape for name, entry in entries.items()}
        self._stored_shapes = {name: tensor.shape for name, tensor in metadata.tensors.items()}
        names = list(self._shapes)
        match = match_names(self._stored_shapes, names, aliases, default_prefix=MODEL)
        self.model = replace(
            match,
            # DCP stores nothing of a tensor without elements.
            missing=[name for name in match.missing if 0 not in self._shapes[name]],
            unexpected=[
                name.removeprefix(match.prefix)
                for name in match.unexpected
                # Names of the optimizer's state share the prefix where that is empty, and are matched below.
                if name.startswith(match.prefix) and "state." not in name
            ],
        )
        self.state_names: dict[str, str] = {}
        # Other writers put the optimizer's state under prefixes of their own, so only the part after `state.` is
        # compared.
        self.state_keys: dict[str, StateKeys] = {}
        tensor_of = {alias: name for name, all_names in names_by_tensor(names, aliases).items() for alias in all_names}
        for stored, tensor in metadata.tensors.items():
            # Parameter names contain dots, and so does the prefix. The key is what follows the last dot.
            before, separator, rest = stored.partition("state.")
            parameter, _, key = rest.rpartition(".")
            if not separator or parameter not in tensor_of or (before and not before.endswith(".")):
                continue
            name = tensor_of[parameter]
            self.state_names[f"{OPTIMIZER}{name}.{key}"] = stored
            # A parameter without dimensions has state without dimensions, of which only the step is a number.
            is_number = not tensor.shape and (key == "step" or bool(self._shapes[name]))
            self.state_keys.setdefault(name, {})[key] = (torch_dtype(tensor.dtype), is_number)

    def check_model(self, source: str, *, strict: bool) -> None:
        """Check that the checkpoint's model is the engine's.

        Raises:
            CheckpointError: Shapes differ or, where `strict`, names do.
        """
        if self.model.stored_names or strict:
            self.model.check(source, self._stored_shapes, self._shapes, strict=strict)
