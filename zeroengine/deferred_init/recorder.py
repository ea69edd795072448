"""Records how parameters get their values while modules are built, and keeps few of those values in memory.

[Note: Recording]
Inside ``meta_init`` everything is computed as usual. A dispatch mode sees each operation and makes versions of the
storages that it writes (see ``trace.py``). The storage of a parameter that has a version can be emptied, and is filled
again by a replay when an operation takes it (see ``memory_budget.py``). These cannot be replayed and keep their memory:

- memory that was not made while recording, or whose address left torch (``numpy()``, ``data_ptr()``);
- values of operations that are not torch's own, or that read a large tensor which was not made while recording;
- values whose records take more than a fraction of the values' own memory.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from zeroengine.deferred_init.dispatch_modes import OpaqueAccessMode, OperationMode, is_recording
from zeroengine.deferred_init.memory_budget import ParamRef, StorageCache, TrackedStorage
from zeroengine.deferred_init.op_call import METADATA, OpCall, is_plain
from zeroengine.deferred_init.parameter import has_graph, make_meta, swap_data, take_trace
from zeroengine.deferred_init.trace import RecordedOp, StorageVersion, TensorRef, Trace, tensors_of
from zeroengine.errors import ZeroEngineError
from zeroengine.utils.host_memory import trim_heap
from zeroengine.utils.torch_internals import DisableTorchFunction, OpOverload, tree_map, version_of

# A trace may hold copies of tensors up to this size, and may itself have this size.
SMALL_BYTES = 1 << 16
# A larger trace takes at most this fraction (a quarter) of its values' bytes, or keeping the values would be cheaper.
MAX_TRACE_FRACTION = 0.25

# The attribute of a storage that holds its ``TrackedStorage``. It lives and dies with the storage.
_TRACKED_ATTRIBUTE = "_zeroengine_tracked"
_aten = torch.ops.aten


def _view_of(storage: torch.UntypedStorage, param: nn.Parameter) -> torch.Tensor:
    """Return the view of ``storage`` that ``param`` is of its own."""
    view = torch.empty(0, dtype=param.dtype, device=storage.device)
    return view.set_(storage, param.storage_offset(), param.shape, param.stride())


class Recorder:
    """Builds modules whose parameters take little memory: call ``start``, build, and ``finish``.

    Args:
        cache_bytes: Bytes of parameters that may be in memory at a time, beside those in use.
        values: False where values will be loaded, so that none are recorded.
    """

    def __init__(self, cache_bytes: int, values: bool = True) -> None:
        self._cache, self._values = StorageCache(cache_bytes), values
        self._thread = threading.get_ident()
        # Operations and storages are numbered in the order in which they were made, which is the order of a replay.
        self._numbers = itertools.count(1)
        # The name of each parameter. The keys are weak, so that a module that is dropped gives its memory back.
        self._params: Any = WeakIdKeyDictionary()
        self._tracked: weakref.WeakSet[TrackedStorage] = weakref.WeakSet()
        # Ends the modes and hooks of torch.
        self._exits = contextlib.ExitStack()

    def start(self) -> None:
        """Begin to record this thread.

        Raises:
            ZeroEngineError: Another recorder is active in this thread.
        """
        if is_recording():
            raise ZeroEngineError(
                "meta_init() inside of meta_init(): one `with` does for everything that is built inside it"
            )
        # The hooks are global in torch. Those of other threads' modules are told apart by the thread.
        self._exits.callback(register_module_parameter_registration_hook(self._param_registered).remove)
        self._exits.callback(register_module_module_registration_hook(self._module_registered).remove)
        self._exits.enter_context(OpaqueAccessMode(self._before_opaque_access, self._data_assigned, self._skips_init))
        self._exits.enter_context(OperationMode(self._run))

    def finish(self) -> list[tuple[str, int, str]]:
        """Stop recording and move the parameters to the meta device, each with its trace.

        Returns:
            Name, bytes and reason of each parameter that keeps its memory.

        Raises:
            ZeroEngineError: Another thread wrote to a parameter.
        """
        # The modes end first, so that what follows is neither recorded nor taken for a use.
        self._exits.close()
        in_memory: list[tuple[str, int, str]] = []
        # The error is raised at the end, when every parameter has its values or its trace again.
        unseen_write: ZeroEngineError | None = None
        for tracked in list(self._tracked):
            try:
                tracked.check_writes()
            except ZeroEngineError as error:
                unseen_write = error
        params_of: dict[TrackedStorage, list[nn.Parameter]] = {}
        for param, name in self._params.items():
            # A lazy parameter gets its shape in the first forward, and its values after that.
            if param.is_meta or torch.nn.parameter.is_lazy(param):
                continue
            tracked_or_reason = self._tracked_or_reason(param)
            if isinstance(tracked_or_reason, str):
                in_memory.append((name, param.nbytes, tracked_or_reason))
            else:
                params_of.setdefault(tracked_or_reason, []).append(param)
        for tracked, params in params_of.items():
            # Parameters that share memory go on sharing it, so that ``initialize`` sees that they do.
            meta_storage = torch.UntypedStorage(tracked.nbytes, device="meta")
            for param in params:
                ref = TensorRef.of_tensor(param, tracked.number, tracked.nbytes, tracked.version)
                make_meta(param, Trace(ref if self._values else None), _view_of(meta_storage, param))
        # Nothing is evicted any more: the storages that are left are filled for good.
        for tracked in list(self._tracked):
            storage = tracked.storage()
            if storage is None:
                continue
            # Parameters that keep their memory, and other tensors, get their values back.
            if tracked.is_empty:
                self._cache.touch(tracked)
                if not tracked.live_params():
                    in_memory.append(("a tensor", tracked.nbytes, "it shares memory with a parameter"))
            # Such a tensor may be a buffer. The parameters keep the memory with it, so that both are seen to share it.
            for param in params_of.get(tracked, ()) if self._values else ():
                take_trace(param)
                swap_data(param, _view_of(storage, param))
            delattr(storage, _TRACKED_ATTRIBUTE)
        trim_heap()
        if unseen_write is not None:
            raise unseen_write
        return in_memory

    def _tracked_or_reason(self, param: nn.Parameter) -> TrackedStorage | str:
        """Return the storage whose version has a parameter's values, or the reason why the values stay in memory."""
        tracked = self._tracked_of(param) if is_plain(param) else None
        if tracked is None:
            return "its memory was not made by torch inside of the `with`"
        # The graph would go on with the old tensor, which ``make_meta`` takes away.
        if has_graph(param):
            return "autograd has a graph or a gradient of it"
        is_lost = tracked.version is None if self._values else bool(tracked.reason)
        return tracked.reason if is_lost else tracked

    # -- what happens while recording ----------------------------------------------------------------

    def _param_registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == self._thread:
            self.watch(param, f"{type(module).__name__}.{name}")

    def _module_registered(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """Watch the parameters of a new child. A deep copy of a module registers none of its parameters."""
        if child is not None and threading.get_ident() == self._thread:
            for key, param in child.named_parameters():
                if param not in self._params:
                    self.watch(param, f"{type(module).__name__}.{name}.{key}")

    def watch(self, param: nn.Parameter, name: str) -> None:
        """Let the memory of ``param`` be freed between uses."""
        with DisableTorchFunction():
            self._params.setdefault(param, name)
            self._link_param(param)
            # A module registers its parameters one by one, so memory is freed while a large module is built.
            self._cache.evict()

    def _data_assigned(self, param: torch.Tensor) -> None:
        """Follow a parameter into its new storage."""
        if param in self._params:
            self._link_param(param)

    def _link_param(self, param: Any) -> None:
        tracked = None if torch.nn.parameter.is_lazy(param) or not is_plain(param) else self._tracked_of(param)
        if tracked is not None:
            if not any(ref.param() is param for ref in tracked.params):
                tracked.params.append(ParamRef(weakref.ref(param), self._params[param], version_of(param)))
            self._cache.touch(tracked)

    def is_uninitialized(self, tensor: torch.Tensor) -> bool:
        """Return whether nothing has been written to ``tensor`` yet."""
        with DisableTorchFunction():
            tracked = self._tracked_of(tensor)
            return tracked is not None and tracked.version is not None and tracked.version.is_uninitialized

    def _skips_init(self, tensor: Any) -> bool:
        """Return whether ``tensor`` is a parameter whose values will be loaded."""
        return not self._values and isinstance(tensor, nn.Parameter) and tensor in self._params

    def _before_opaque_access(self, tensors: list[torch.Tensor], leaked_by: str) -> None:
        """Fill the storages of ``tensors``. Keep them in memory for good if their address leaves torch."""
        with DisableTorchFunction():
            for tensor in tensors:
                tracked = self._tracked_of(tensor) if is_plain(tensor) else None
                if tracked is not None:
                    self._cache.touch(tracked)
                    if leaked_by:
                        # Whoever has the address may write at any time, without an operation that could be recorded.
                        tracked.version = None
                        tracked.reason = tracked.leaked_by = f"{leaked_by}() gave its memory away"

    def _run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, record it, and free memory that exceeds the budget."""
        # These need no values in memory, so a parameter may stay empty.
        if not isinstance(operation, OpOverload) or operation in METADATA:
            return operation(*args, **kwargs)
        if operation.overloadpacket is _aten.set_:
            return self._run_set(operation, args, kwargs)
        call = OpCall(operation, args, kwargs, self._tracked_of)
        # The writes of earlier operations are counted before this one adds its own.
        for tracked in call.storages:
            tracked.check_writes()
        # ``_skips_init`` covers ``torch.nn.init``, and some libraries initialize by functions of their own.
        if not self._values and call.only_initializes():
            call.count_writes()
            return args[0]
        # An operation that raises leaves these with memory and without values. They are emptied again, and a replay
        # fills them.
        unfilled = [tracked for tracked in call.overwritten if tracked.is_empty]
        for tracked in call.storages:
            self._cache.touch(tracked, values=tracked not in call.overwritten)
        is_literal = operation is _aten.lift_fresh.default
        if call.schema.is_view and not is_literal:
            return call.run()
        reason = self._reason_not_recorded(call) if self._values else ""
        # The record is made before the operation runs, because it needs the generator's state and the versions of
        # before.
        op = self._record(call) if self._values and not reason else None
        try:
            outputs = call.run()
        except BaseException:
            for tracked in unfilled:
                self._cache.free(tracked)
            raise
        # `torch.tensor(...)` ends with this operation, on memory that it filled with Python's numbers.
        if is_literal:
            self._track_literal(outputs)
            return outputs
        self._update_versions(call, op, reason, tensors_of(outputs))
        call.count_writes()
        # What was written last is likely to be written again, as by an initialization of several steps.
        self._cache.evict(busy=call.targets)
        return outputs

    def _reason_not_recorded(self, call: OpCall) -> str:
        """Return why an operation cannot be replayed, or "" if it can."""
        if not call.schema.is_builtin:
            return "an operation that is not torch's own wrote it"
        for tensor in call.inputs:
            if id(tensor) not in call.tracked_by_id:
                return f"it was computed with a {type(tensor).__name__} that is not plain memory"
            tracked = call.tracked_by_id[id(tensor)]
            if (tracked is None or tracked.version is None) and tensor.nbytes > SMALL_BYTES:
                return f"it was computed with a tensor of shape {tuple(tensor.shape)} " + (
                    "from outside of the `with`" if tracked is None else f"of which {tracked.reason}"
                )
        for target in call.targets:
            if target.reason and target not in call.overwritten:
                return target.reason
        if len(call.targets) < len(call.written):
            return "one operation wrote it and a tensor from outside of the `with`"
        return ""

    def _record(self, call: OpCall) -> RecordedOp:
        """Return the record of an operation that is about to run."""
        refs: list[TensorRef] = []
        cost_bytes = 1024

        def reference(leaf: Any) -> Any:
            nonlocal cost_bytes
            if not isinstance(leaf, torch.Tensor):
                return leaf
            tracked = call.tracked_by_id[id(leaf)]
            if tracked is not None and (tracked in call.overwritten or tracked.version is not None):
                version = None if tracked in call.overwritten else tracked.version
                refs.append(TensorRef.of_tensor(leaf, tracked.number, tracked.nbytes, version))
                return refs[-1]
            # The tensor has no version, and it is small enough for a copy of its own.
            cost_bytes += leaf.nbytes
            return leaf.detach().clone()

        args, kwargs = tree_map(reference, (call.args, call.kwargs))
        state = None
        if call.schema.is_random:
            generator = call.generator()
            # The state from before the draw gives the same numbers at a replay, whatever was drawn since.
            state = (generator.device, generator.get_state())
            cost_bytes += state[1].nbytes
        return RecordedOp(next(self._numbers), call.operation, args, kwargs, tuple(refs), cost_bytes, state)

    def _update_versions(
        self, call: OpCall, op: RecordedOp | None, reason: str, outputs: Sequence[torch.Tensor]
    ) -> None:
        """Give every storage that an operation wrote or made its new version, or the reason why it has none."""
        storages_before = {id(tensor.untyped_storage()) for tensor in call.inputs if is_plain(tensor)}
        new: dict[TrackedStorage, None] = {}
        for index, tensor in enumerate(outputs):
            # An output may be an input or a view of one, whose storage is not new.
            is_new = is_plain(tensor) and id(tensor.untyped_storage()) not in storages_before
            if is_new and self._tracked_of(tensor) is None:
                tracked = self._track(tensor)
                new[tracked] = None
                if op is not None:
                    op.new_storages.append((index, tracked.number))
        for tracked in (*call.targets, *new):
            nbytes = tracked.live_storage().nbytes()
            if nbytes != tracked.nbytes:
                tracked.version, tracked.reason, tracked.nbytes = None, "its memory was resized", nbytes
            elif reason:
                tracked.version, tracked.reason = None, reason
            elif op is not None:
                previous = None if tracked in new or tracked in call.overwritten else tracked.version
                self._set_version(tracked, StorageVersion.after(op, previous))
            self._cache.touch(tracked)

    def _set_version(self, tracked: TrackedStorage, version: StorageVersion) -> None:
        max_bytes = max(SMALL_BYTES, int(tracked.nbytes * MAX_TRACE_FRACTION))
        # The cost counts shared records several times. The exact cost takes a walk, so it is computed only where it
        # matters.
        if version.cost_bytes > max_bytes:
            version = version.with_exact_cost()
        tracked.version, tracked.reason = version, ""
        if tracked.leaked_by:
            tracked.version, tracked.reason = None, tracked.leaked_by
        elif version.cost_bytes > max_bytes:
            if tracked.nbytes <= SMALL_BYTES:
                tracked.version = self._copied_version(tracked)
            else:
                tracked.version, tracked.reason = None, "it takes many steps to make its values"

    def _run_set(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``set_``, which gives a tensor another storage."""
        out = operation(*args, **kwargs)
        if args[0] in self._params:
            self._link_param(args[0])
            tracked = self._tracked_of(args[0])
            for ref, param in tracked.live_params() if tracked is not None else ():
                # ``set_`` raises the version counter of the tensor without writing a value.
                ref.num_pending_writes += param is args[0]
        return out

    def _track_literal(self, tensor: torch.Tensor) -> None:
        """Track a small tensor of Python's numbers. Its version is a copy of its values."""
        storage = tensor.untyped_storage()
        # A storage over numpy's memory is not resizable.
        if self._tracked_of(tensor) is None and storage.nbytes() <= SMALL_BYTES and storage.resizable():
            tracked = self._track(tensor)
            if self._values:
                tracked.version = self._copied_version(tracked)

    def _copied_version(self, tracked: TrackedStorage) -> StorageVersion:
        """Return a version that holds a copy of the values."""
        values = tracked.as_bytes()
        target = TensorRef.of_tensor(values, tracked.number, tracked.nbytes, None)
        args = target, values.clone()
        op = RecordedOp(next(self._numbers), _aten.copy_.default, args, {}, (target,), tracked.nbytes)
        return StorageVersion(op, None, 0)

    def _tracked_of(self, tensor: torch.Tensor) -> TrackedStorage | None:
        """Return the tracked storage of a tensor, or None where it was not made while this recorder was active."""
        # A storage of an earlier recorder is like any memory from outside.
        tracked = getattr(tensor.untyped_storage(), _TRACKED_ATTRIBUTE, None)
        return tracked if tracked is not None and tracked.owner is self else None

    def _track(self, tensor: torch.Tensor) -> TrackedStorage:
        storage = tensor.untyped_storage()
        tracked = TrackedStorage(next(self._numbers), self, weakref.ref(storage), storage.nbytes())
        setattr(storage, _TRACKED_ATTRIBUTE, tracked)
        self._tracked.add(tracked)
        return tracked
