"""Keep the inputs of activation checkpoints in CPU memory between forward and backward.

[Note: Inputs of checkpoints]
An activation checkpoint (``torch.utils.checkpoint``, which transformers calls too) keeps its inputs until the backward
recomputes the rest. Whenever a module with parameters begins, and when the model's forward ends, the part of the graph
that is new since then is walked. The saved inputs of the checkpoints in it get hooks (``SavedTensor.register_hooks``):
the graph keeps a ``HostInput``, which copies the values to the host and back.
- A reentrant checkpoint is a node of the graph, which has saved its inputs.
- The nodes inside another checkpoint have saved everything through its hooks, which refer to its inputs.

So a tensor that is saved outside of checkpoints is never touched, autograd goes on checking it for changes in place,
and torch.func runs as ever. ``torch.autograd.graph.saved_tensors_hooks`` around the forward would prevent both.

[Note: Order of copies]
The host never waits for a copy. Before device memory is freed, or a host buffer is reused, the current stream is
ordered behind their last copy (``HostInput.free_device_memory``). Whatever uses that memory next is ordered behind the
current stream.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from zeroengine.errors import ZeroEngineError
from zeroengine.offload.device_copies import GPUCopies
from zeroengine.offload.host_memory import available_memory
from zeroengine.runtime.saved_views import saved_behind
from zeroengine.runtime.uncopied_hook import UncopiedHook
from zeroengine.runtime.unit import Unit
from zeroengine.utils.compiler_disable import hidden_from_activation_checkpoint
from zeroengine.utils.formats import round_up
from zeroengine.utils.tensors import tensors_in
from zeroengine.utils.torch_internals import (
    RAW_SAVED_TENSORS,
    CheckpointNode,
    current_graph_task_id,
    functorch_active,
    node_number,
    unpack_saved,
    version_of,
)
from zeroengine.utils.work import Completed

# Smaller inputs stay on the device: copying them takes longer than it takes memory.
MIN_BYTES = 1 << 18
NOTHING_MOVED = "cpu_checkpointing moved nothing: call torch.utils.checkpoint, or model.gradient_checkpointing_enable()"
# Those of all engines, whose buffers are in one memory.
_instances: weakref.WeakSet[HostActivations] = weakref.WeakSet()
FULL = "cpu_checkpointing fills half of the CPU memory that was free at the start: further inputs stay on the device"


class HostInput:
    """An input of checkpoints in a host buffer, and on the device while it is copied or was fetched ahead.

    Args:
        tensor: The input. Its elements fill a range of memory, in any order.
        buffer: Memory of the host for the values.
        owner: Takes the buffer back. Its ``latest`` are the inputs that a backward needs next.

    Attributes:
        view: Which elements of its memory the input has, and autograd's count of changes in place when it was saved.
    """

    def __init__(self, tensor: torch.Tensor, buffer: torch.Tensor, owner: HostActivations) -> None:
        self._buffer, self._owner, self._previous, self._is_changed = buffer, owner, owner.latest, False
        self.view, self._on_host = _view_of(tensor), buffer[: tensor.nbytes].view(tensor.dtype)
        # The view shares the version counter, so a change in place while the copy may be under way is noticed.
        self._on_device: torch.Tensor | None = tensor.detach().as_strided((tensor.numel(),), (1,))
        self._work = owner.copies.copy(self._on_host, self._on_device)

    def fetch(self) -> torch.Tensor:
        """Return the values on the device. They may be used when ``_work`` is done."""
        if self._on_device is None:
            values = self._owner.copies.device_memory(self._on_host.nbytes).view(self._on_host.dtype)
            # A ``.data`` has a version counter of its own, which stays 0: nobody else knows this memory.
            self._work, self._on_device = self._owner.copies.copy(values, self._on_host), values.data
        return self._on_device

    def read(self) -> torch.Tensor:
        """Return the input on the device for a recomputation, and start to fetch the inputs of the next one.

        Raises:
            ZeroEngineError: The input was changed in place while it was being copied.
        """
        tensor = self.fetch().as_strided(*self.view[:2])
        self.free_device_memory()
        if self._is_changed:
            raise ZeroEngineError("the input of a checkpoint was changed in place: write x = x + y instead of x += y")
        # Fetching ahead is a hint, and takes memory that may be missing.
        with suppress(torch.OutOfMemoryError):
            for host_input in self._previous:
                host_input.fetch()
        return tensor

    def free_device_memory(self) -> None:
        """Free the values on the device, in the order of the current stream."""
        if self._on_device is not None:
            self._work.wait_stream()
            self._is_changed |= version_of(self._on_device) not in (0, self.view[-1])
            # The work of a copy keeps its tensors alive, too.
            self._on_device, self._work = None, Completed()

    def __del__(self) -> None:
        # Torch may be gone when the interpreter exits.
        with suppress(Exception):
            self.free_device_memory()
            self._owner.give_back(self._buffer)


class HostActivations:
    """Moves the inputs of the activation checkpoints of a model to the host in forward.

    Args:
        model: The model.
        units: Its units. Where a module of one begins, checkpoints that have ended are looked for.
        copies: Copies between the device of the model and the host.
        undo: Takes the calls that end this object.

    Attributes:
        copies: As given.
        nbytes: The bytes of all buffers on the host, in use or not.
        max_bytes: The largest number of these bytes, with those of other engines. Further inputs stay on the device.
        latest: The inputs of the last checkpoint.
    """

    def __init__(self, model: nn.Module, units: Iterable[Unit], copies: GPUCopies, undo: ExitStack) -> None:
        self.copies, self.nbytes, self._device = copies, 0, copies.device_memory(0).device
        self.max_bytes = available_memory() / 2 / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # By their size: buffers that are not in use. The current stream is ordered behind the copies of each.
        self._unused: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        # Older nodes have been looked at. Tensors that were moved, with what holds their values.
        self._first_node, self.latest, self._input_of = 0, weakref.WeakSet[HostInput](), WeakTensorKeyDictionary()
        self._warn_once = functools.cache(logging.getLogger("zeroengine").warning)
        _instances.add(self)
        # In the end the unused buffers are freed, and later each of the others when its graph is gone.
        undo.callback(self._has_space, 0)
        undo.callback(setattr, self, "max_bytes", 0)
        undo.callback(model.register_forward_hook(UncopiedHook(self._end_forward)).remove)
        for module in dict.fromkeys(module for unit in units for module in unit.modules):
            undo.callback(module.register_forward_pre_hook(UncopiedHook(self._move), with_kwargs=True).remove)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back whose copies the current stream is ordered behind."""
        self._unused[buffer.nbytes].append(buffer)
        self._has_space(0)

    def _has_space(self, nbytes: int) -> bool:
        """Return whether there may be ``nbytes`` bytes more. Free the unused buffers if need be."""
        others = sum(instance.nbytes for instance in _instances if instance is not self)
        if self.nbytes + others + nbytes > self.max_bytes and self._unused:
            # The device may still be copying from memory that only its stream was ordered behind.
            self.copies.synchronize()
            self.nbytes -= sum(size * len(buffers) for size, buffers in self._unused.items())
            self._unused.clear()
        return self.nbytes + others + nbytes <= self.max_bytes

    def _host_input(self, tensor: Any) -> HostInput | None:
        """Return what holds the values of ``tensor``, which several checkpoints may have saved; None: they stay."""
        # Masks and tables need no gradient, and all blocks share them. Parameters, a subclass, have their own place.
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device == self._device
        # Torch keeps the strides where the elements fill a range of memory, without gaps.
        is_large = is_plain and tensor.requires_grad and tensor.nbytes >= MIN_BYTES
        if not is_large or torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            return None
        # A reentrant checkpoint that returns an input returns a view of it.
        memory = tensor if tensor._base is None else tensor._base
        host_input: HostInput | None = self._input_of.get(memory, lambda: None)()
        if host_input is None or host_input.view != _view_of(tensor):
            # Sequences may differ in length from step to step. So there are four sizes between two powers of two.
            size = round_up(tensor.nbytes, 1 << max(12, tensor.nbytes.bit_length() - 3))
            if not self._unused[size]:
                if not self._has_space(size):
                    self._warn_once(FULL)
                    return None
                self._unused[size].append(self.copies.host_memory(size, torch.uint8))
                self.nbytes += size
            host_input = HostInput(tensor, self._unused[size].pop(), self)
            self._input_of[memory] = weakref.ref(host_input)
        return host_input

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._move(module, output)
        if not self.nbytes and module.training and any(tensor.requires_grad for tensor in tensors_in(output)):
            self._warn_once(NOTHING_MOVED)

    def _move(self, module: nn.Module, *tree: Any) -> None:
        """Move the inputs of the new checkpoints in the graph behind the tensors in ``tree``."""
        # What is saved in a recomputation is read at once. Tensors of torch.func have no graph.
        if current_graph_task_id() != -1 or functorch_active():
            return
        checkpoints: dict[int, SavedInputs] = {}
        for node, name, saved_tensors in saved_behind(tensors_in(tree), self._first_node):
            inputs = dict(checkpoint for saved in saved_tensors for checkpoint in _checkpoints_around(saved))
            if isinstance(node, CheckpointNode):
                inputs[id(node)] = SavedInputs(node, name, saved_tensors)
            if inputs:
                checkpoints |= inputs
                self._first_node = max(self._first_node, node_number(node) + 1)
        with hidden_from_activation_checkpoint():
            # The walk comes to the latest checkpoint first.
            for saved_inputs in reversed(checkpoints.values()):
                self._move_inputs(saved_inputs)

    def _move_inputs(self, inputs: SavedInputs) -> None:
        """Move those inputs of one checkpoint that are worth it."""
        moved = weakref.WeakSet[HostInput]()
        # A saved tensor has at most one pair of hooks.
        without_hooks = [i for i, saved in enumerate(inputs.saved) if getattr(saved, "unpack_hook", self) is None]
        for position, tensor in unpack_saved(inputs.node, inputs.name, inputs.saved, without_hooks):
            if (host_input := self._host_input(tensor)) is not None:
                inputs.saved[position].register_hooks(lambda _, host_input=host_input: host_input, HostInput.read)
                moved.add(host_input)
        if moved:
            # The copies to the host had the time of a block.
            for host_input in self.latest - moved:
                host_input.free_device_memory()
            self.latest = moved


def _view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return which elements of its memory ``tensor`` has, and autograd's count of changes in place."""
    return tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype, version_of(tensor)


class SavedInputs(NamedTuple):
    """The saved inputs of a checkpoint, and the node of the graph and its attribute that have them, if one has."""

    node: Any
    name: str
    saved: Sequence[Any]


def _checkpoints_around(saved: Any) -> Iterator[tuple[int, SavedInputs]]:
    """Yield each non-reentrant checkpoint through whose hooks ``saved`` was saved: an id, and its saved inputs."""
    hook: Any = getattr(saved, "unpack_hook", None)
    if getattr(hook, "__module__", "") == "torch.utils.checkpoint" and "frame" in hook.__code__.co_freevars:
        frame = hook.__closure__[hook.__code__.co_freevars.index("frame")].cell_contents
        # In torch 2.11 the inputs are those of a node.
        if hasattr(frame, "saved_args"):
            inputs = SavedInputs(None, "", frame.saved_args)
        else:
            node = frame.input_saver.grad_fn
            inputs = SavedInputs(node, RAW_SAVED_TENSORS, getattr(node, RAW_SAVED_TENSORS))
        yield id(frame), inputs
        # Inside another checkpoint the inputs were saved through that one's hooks.
        for saved_input in inputs.saved:
            yield from _checkpoints_around(saved_input)
