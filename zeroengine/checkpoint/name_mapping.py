"""Match the model's names with those that a checkpoint or a file has for the same tensors.

Whoever wrote the file may have put a prefix such as `module.` before all names, and may have stored a tied parameter
under another of its names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from zeroengine.checkpoint.dcp_metadata import DcpMetadata
from zeroengine.checkpoint.entries import MODEL, OPTIMIZER, SCALES, UNSAVED, StateEntries
from zeroengine.errors import CheckpointError
from zeroengine.ops import MOMENT_SIGNS
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
        shape_problems: A sentence for each tensor that has another shape in the model.
    """

    prefix: str
    stored_names: dict[str, str]
    missing: list[str]
    unexpected: list[str]
    shape_problems: list[str]

    def check(self, source: str, *, strict: bool) -> None:
        """Check that the stored tensors are the model's.

        Args:
            source: What holds the stored tensors, for the message.
            strict: Both sides must have the same names.

        Raises:
            CheckpointError: Shapes differ or, where `strict`, names do: the first ten, and the number of the others.
        """
        problems, advice = self.shape_problems, ""
        # With no common name at all, a list of all missing names would hide the reason.
        if not self.stored_names:
            problems = ["it has none of the model's names"]
        elif strict and (self.missing or self.unexpected):
            # Another shape cannot be ignored by strict=False, so the advice is left out where it would not help.
            advice = "" if problems else " Pass strict=False to load what fits."
            problems = problems + [f"{name} is not there" for name in self.missing]
            problems += [f"{name} is not in the model" for name in self.unexpected]
        if problems:
            more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
            raise CheckpointError(f"{source} is another model's: {'; '.join(problems[:MAX_PROBLEMS])}{more}.{advice}")


def match_names(
    stored: Mapping[str, Shape], own: Mapping[str, Shape], aliases: Mapping[str, str], default_prefix: str = ""
) -> NameMatch:
    """Return which stored name belongs to each of the model's names.

    Args:
        stored: The shapes by stored name.
        own: The shapes by the model's name, each tensor once.
        aliases: Further names of the model's tied parameters, and the one in `own` for each.
        default_prefix: The prefix to assume where no other explains more names.
    """
    prefix = _find_prefix(stored, list(own), default_prefix)
    # A tied parameter may be stored under any of its names, and its own name counts first. Every alias is expected, so
    # a file that stores a tied parameter under two names has no unexpected one.
    name_of = {prefix + name: name for name in own}
    name_of |= {prefix + alias: name for alias, name in aliases.items() if name in own}
    stored_names: dict[str, str] = {}
    for stored_name, name in name_of.items():
        if stored_name in stored:
            stored_names.setdefault(name, stored_name)
    return NameMatch(
        prefix,
        {name: stored_names[name] for name in own if name in stored_names},
        missing=[name for name in own if name not in stored_names],
        unexpected=[name for name in stored if name not in name_of],
        shape_problems=[
            f"{name} has shape {stored[stored_name]} there and {own[name]} here"
            for name, stored_name in stored_names.items()
            if stored[stored_name] != own[name]
        ],
    )


def _find_prefix(stored: Collection[str], names: Sequence[str], default: str) -> str:
    """Return what stands before most of the stored names: the default or the shortest, where several do."""
    prefixes = {default}
    # Three names suffice to find every prefix that the whole file may have.
    for name in names[:3]:
        prefixes |= {other.removesuffix(name) for other in stored if other == name or other.endswith(f".{name}")}
    counts = {prefix: sum(prefix + name in stored for name in names) for prefix in sorted(prefixes, key=len)}
    # max returns the first of several, and the prefixes are ordered by length, so the shortest one wins a tie.
    return max(counts, key=lambda prefix: (counts[prefix], prefix == default))


def split_state_name(stored: str) -> tuple[str, str] | None:
    """Return the parameter and the key of a name of optimizer state, `optimizer.state.<parameter>.<key>`, or None."""
    # Other writers put the state under prefixes of their own, so only the part after `state.` counts.
    before, separator, rest = stored.partition("state.")
    if not separator or (before and not before.endswith(".")):
        return None
    # Parameter names contain dots, and so does the prefix. The key is what follows the last dot, and before it the name
    # of the list that it is a place in, or of the moment whose scales it has.
    parameter, _, key = rest.rpartition(".")
    outer, _, name = parameter.rpartition(".")
    if key.isdigit() or (f".{key}" == SCALES and name in MOMENT_SIGNS):
        return outer, f"{name}.{key}"
    return parameter, key


class CheckpointNames:
    """Locate the model's tensors and the optimizer's state in a checkpoint.

    Args:
        metadata: The checkpoint's.
        entries: The parameters and buffers of the model, by their own names.
        aliases: Further names of these, such as their keys in the model's state dict.
        computed: The keys of the state dict that are no parameters or buffers.

    Attributes:
        metadata: The checkpoint's.
        model: Which stored tensor belongs to each parameter and buffer.
        state_names: The stored name of the optimizer's state, by its name in `EngineTensors.optimizer_entries`.
        state_keys: By parameter, the dtype of each key of its state, and the shape of a state for the whole parameter.
            A moment of 8 bits is float32 here, and its scales are no key.
    """

    def __init__(
        self, metadata: DcpMetadata, entries: StateEntries, aliases: Mapping[str, str], computed: Collection[str]
    ) -> None:
        self.metadata = metadata
        shapes = {name: entry.shape for name, entry in entries.items()}
        stored_shapes = {name: tensor.shape for name, tensor in metadata.tensors.items()}
        # What a hook computed may be stored under the name of a parameter, which is stored elsewhere then.
        unsaved = {MODEL + name: UNSAVED + name for name in shapes if UNSAVED + name in stored_shapes}
        stored_shapes |= {name: stored_shapes[unsaved_name] for name, unsaved_name in unsaved.items()}
        match = match_names(stored_shapes, shapes, aliases, default_prefix=MODEL)
        stored_names = {name: unsaved.get(stored, stored) for name, stored in match.stored_names.items()}
        self.model = replace(
            match,
            stored_names=stored_names,
            shape_problems=match.shape_problems
            # A complex number as a real one, or a float as an integer, would be another value.
            + [
                f"{name} is {metadata.tensors[stored].dtype} there and {str(dtype).removeprefix('torch.')} here"
                for name, stored in stored_names.items()
                if not torch.can_cast(torch_dtype(metadata.tensors[stored].dtype), dtype := entries[name].dtype)
            ],
            # DCP stores nothing of a tensor without elements.
            missing=[name for name in match.missing if 0 not in shapes[name]],
            unexpected=[
                name.removeprefix(match.prefix)
                for name in match.unexpected
                # Names of the optimizer's state share the prefix where that is empty, and are matched below.
                if name.startswith(match.prefix) and "state." not in name
                if name.removeprefix(match.prefix) not in computed and not name.startswith(UNSAVED)
            ],
        )
        self.state_names: dict[str, str] = {}
        self.state_keys: dict[str, StateKeys] = {}
        for stored_name, tensor in metadata.tensors.items():
            parameter, key = split_state_name(stored_name) or ("", "")
            name = aliases.get(parameter, parameter)
            if name in shapes:
                self.state_names[f"{OPTIMIZER}{name}.{key}"] = stored_name
                if key.endswith(SCALES):
                    continue
                # A state of another shape, such as a number or a mean over rows, belongs to the whole parameter. A
                # parameter without dimensions has state without dimensions, of which only the step is a number.
                is_number = tensor.shape != shapes[name] or (key == "step" and not tensor.shape)
                number_shape = tensor.shape if is_number else None
                dtype = torch.float32 if stored_name + SCALES in metadata.tensors else torch_dtype(tensor.dtype)
                self.state_keys.setdefault(name, {})[key] = (dtype, number_shape)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name in a checkpoint.

    Raises:
        CheckpointError: torch has no such dtype.
    """
    # The name may come from a file of another version of torch.
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint has tensors of dtype {name}, which torch {torch.__version__} lacks")
    return dtype
