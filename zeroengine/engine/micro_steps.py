"""The micro-steps of a step as they were run, so that they can be run again. See ``engine/out_of_memory.py``."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zeroengine.checkpoint.content import random_states, set_random_states
from zeroengine.utils.tensors import tensors_in
from zeroengine.utils.torch_internals import version_of

# Where a tensor is in what the model has returned: keys, indices and names of attributes.
Path = tuple[Any, ...]


@dataclass
class RunMicroStep:
    """One forward of the model, and the backward of its loss.

    Attributes:
        args: The positional inputs of the model.
        kwargs: Its other inputs.
        device: The device that the model computes on.
        random: The states of the generators before the forward.
        buffers: The buffers of the model that forwards change, and their values before it.
        autocast: The arguments of the ``torch.autocast`` that the forward ran in.
        versions: The tensors among the inputs, with autograd's count of their changes in place.
        outputs: The tensors that the model has returned, and where. It does not keep them.
        loss_path: Where the loss is among them.
        options: The arguments of ``Engine.backward`` beside the loss.
        has_ended: Whether ``Engine.step`` has ended it.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    random: dict[str, Any]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    autocast: dict[str, Any]
    versions: list[tuple[torch.Tensor, int]]
    outputs: list[tuple[weakref.ref[torch.Tensor], Path]] = field(default_factory=list)
    loss_path: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    has_ended: bool = False

    @classmethod
    def begin(
        cls,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        model: nn.Module,
        device: torch.device,
        changing: Collection[torch.Tensor] | None,
    ) -> RunMicroStep:
        """Return the micro-step whose forward begins now.

        Args:
            args: The positional inputs.
            kwargs: The other inputs.
            model: The model.
            device: The device that it computes on.
            changing: Its buffers that forwards change; None: any of them may.
        """
        buffers = [(own, own.clone()) for own in model.buffers() if changing is None or own in changing]
        kind = device.type
        autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        versions = [(tensor, version_of(tensor)) for tensor in tensors_in((args, kwargs))]
        return cls(args, kwargs, device, random_states(device), buffers, autocast, versions)

    def note_output(self, output: Any) -> None:
        """Note what the model has returned."""
        self.outputs = [(weakref.ref(tensor), path) for path, tensor in _tensors_with_paths(output)]

    def find(self, loss: torch.Tensor) -> Path | None:
        """Return where a loss is in what the model has returned; None: it is not there."""
        return next((path for tensor, path in self.outputs if tensor() is loss), None)

    @property
    def has_its_inputs(self) -> bool:
        """Whether no tensor among the inputs was changed in place."""
        return all(version_of(tensor) == version for tensor, version in self.versions)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Let the forward begin inside as it did before."""
        set_random_states(self.random, self.device)
        with torch.no_grad():
            for buffer, values in self.buffers:
                buffer.copy_(values)
        with torch.autocast(**self.autocast):
            yield

    def loss_of(self, output: Any) -> torch.Tensor:
        """Return the loss in what the model has returned again."""
        for key in self.loss_path or ():
            output = output[key] if isinstance(output, (Mapping, list, tuple)) else getattr(output, key)
        return output  # type: ignore[no-any-return]

    def drop_graph(self) -> None:
        """Let what the loop holds of the outputs be without a graph, whose memory it would keep."""
        for reference, _ in self.outputs:
            if (tensor := reference()) is not None:
                drop_graph_of(tensor)


def drop_graph_of(tensor: torch.Tensor) -> None:
    """Let a tensor be without the graph that it was computed by."""
    # torch refuses that of views, and a leaf has none.
    with contextlib.suppress(RuntimeError):
        tensor.detach_()


def _tensors_with_paths(output: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(output, torch.Tensor):
        yield path, output
        return
    items: list[tuple[Any, Any]] = []
    if isinstance(output, Mapping):
        items = list(output.items())
    elif isinstance(output, (list, tuple)):
        items = list(enumerate(output))
    elif dataclasses.is_dataclass(output):
        items = [(own.name, getattr(output, own.name)) for own in dataclasses.fields(output)]
    elif hasattr(output, "__dict__") and not isinstance(output, (type, nn.Module)):
        items = list(vars(output).items())
    for key, value in items:
        yield from _tensors_with_paths(value, (*path, key))
