"""Records how parameters get their values while modules are built, and keeps few of those values in memory.

[Note: Recording]
Inside, everything is computed as ever. A dispatch mode sees each operation and makes versions of what it writes
(see ``trace``). Of a parameter whose values have a version the memory can be freed: its storage is emptied, and filled
again by a replay when an operation takes it (see ``room``). What cannot be followed keeps its memory:

- memory that was not made here, or that something outside of torch has the address of (``numpy()``, ``data_ptr()``);
- values of operations that are not torch's own, or that read a large tensor which was not made here;
- values whose steps take more memory than a part of the values.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from zeroengine.deferred_init.dispatch_modes import Operations, Unseen, is_recording
from zeroengine.deferred_init.memory_budget import Holder, Known, Room
from zeroengine.deferred_init.op_schema import METADATA, Facts, facts_of
from zeroengine.deferred_init.parameter import has_graph, make_meta
from zeroengine.deferred_init.trace import Ref, Step, Trace, UnsetTrace, Version, default_generator, mapped, tensors_of
from zeroengine.errors import ZeroEngineError
from zeroengine.utils.malloc_trim import return_freed_memory

SMALL = 1 << 16  # bytes: of a tensor that a trace may hold a copy of, and of a trace of any parameter
SHARE = 4  # a trace takes at most one such part of the values' bytes

_KNOWN = "_zeroengine_known"  # the attribute of a storage
_aten = torch.ops.aten


class Recorder:
    """Builds modules whose parameters take little memory: call ``start``, build, and ``finish``.

    Args:
        room: bytes of parameters that may be in memory at a time, beside those in use.
        values: False: parameters get none here, for others will be loaded.
    """

    def __init__(self, room: int, values: bool = True) -> None:
        self._room, self._values = Room(room), values
        self._thread = threading.get_ident()
        self._numbers = 0
        self._params: Any = WeakIdKeyDictionary()  # to their names
        self._known: weakref.WeakSet[Known] = weakref.WeakSet()
        self._modes = (Unseen(self), Operations(self))
        self._hooks: list[Any] = []

    def start(self) -> None:
        """
        Raises:
            ZeroEngineError: another one is recording in this thread.
        """
        if is_recording():
            raise ZeroEngineError(
                "meta_init() inside of meta_init(): one `with` does for everything that is built inside it"
            )
        self._hooks = [
            register_module_parameter_registration_hook(self._registered),
            register_module_module_registration_hook(self._added),
        ]
        for mode in self._modes:
            mode.__enter__()

    def finish(self) -> list[tuple[str, int, str]]:
        """Parameters are on the meta device from now on, with tapes.

        Returns:
            Those that keep memory: name, bytes, and why.

        Raises:
            ZeroEngineError: another thread wrote to one.
        """
        for hook in self._hooks:
            hook.remove()
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)
        kept: list[tuple[str, int, str]] = []
        unseen: ZeroEngineError | None = None
        for known in list(self._known):
            try:
                known.check()
            except ZeroEngineError as error:
                unseen = error
        for param, name in self._params.items():
            if param.is_meta or torch.nn.parameter.is_lazy(param):
                continue
            found = self._tape(param)
            if isinstance(found, Trace):
                make_meta(param, found)
            else:
                kept.append((name, param.nbytes, found))
        self._room.close()
        for known in list(self._known):
            alive = known.storage()
            if alive is None:
                continue
            if known.empty:  # of parameters that stay, and of other tensors
                self._room.use(known)
                if not known.holders():
                    kept.append(("a tensor", known.nbytes, "it shares memory with a parameter"))
            delattr(alive, _KNOWN)
        return_freed_memory()
        if unseen is not None:
            raise unseen
        return kept

    def _tape(self, param: nn.Parameter) -> Trace | str:
        """A parameter's trace; or why it has none."""
        known = self._of(param) if _is_plain(param) else None
        if known is None:
            return "its memory was not made by torch inside of the `with`"
        if has_graph(param):
            return "autograd has a graph or a gradient of it"
        if not self._values and not known.why:
            return UnsetTrace()
        if known.version is None:
            return known.why
        return Trace(Ref.to(param, known.number, known.nbytes, known.version))

    # -- what happens meanwhile -------------------------------------------------------------------

    def _registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == self._thread:
            self.watch(param, f"{type(module).__name__}.{name}")

    def _added(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """A copy of a module registers none of its parameters."""
        if child is not None and threading.get_ident() == self._thread:
            for prefix, each in child.named_modules():
                for key, param in each._parameters.items():
                    if param is not None and param not in self._params:
                        self.watch(param, f"{type(module).__name__}.{name}.{prefix}{'.' * bool(prefix)}{key}")

    def watch(self, param: nn.Parameter, name: str) -> None:
        """``param``'s memory may be freed."""
        with torch._C.DisableTorchFunction():
            self._params.setdefault(param, name)
            self._own(param)
            self._room.make()

    def given_data(self, param: torch.Tensor) -> None:
        if param in self._params:
            self._own(param)

    def _own(self, param: Any) -> None:
        known = None if torch.nn.parameter.is_lazy(param) or not _is_plain(param) else self._of(param)
        if known is not None:
            if not any(holder.param() is param for holder in known.params):
                known.params.append(Holder(weakref.ref(param), self._params[param], param._version))
            self._room.use(known)

    def is_blank(self, tensor: torch.Tensor) -> bool:
        """Whether nobody has written to ``tensor``."""
        with torch._C.DisableTorchFunction():
            known = self._of(tensor)
            return known is not None and known.version is not None and known.version.blank

    def is_unset(self, tensor: Any) -> bool:
        return not self._values and isinstance(tensor, nn.Parameter) and tensor in self._params

    def before_unseen(self, tensors: list[torch.Tensor], address: str) -> None:
        with torch._C.DisableTorchFunction():
            for tensor in tensors:
                known = self._of(tensor) if _is_plain(tensor) else None
                if known is not None:
                    self._room.use(known)
                    if address:
                        known.version = None
                        known.why = known.address = f"{address}() gave its memory away"

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(operation, torch._ops.OpOverload) or operation in METADATA:
            return operation(*args, **kwargs)
        if operation.overloadpacket is _aten.set_:
            return self._set(operation, args, kwargs)
        facts = facts_of(operation)
        inputs = tensors_of((args, kwargs))
        of = {id(tensor): self._of(tensor) for tensor in inputs if _is_plain(tensor)}
        involved = {known for known in of.values() if known is not None}
        for known in involved:
            known.check()
        written = tensors_of([args[i] if i < len(args) else kwargs.get(name) for i, name in facts.written])
        targets = {target: tensor for tensor in written if (target := of.get(id(tensor))) is not None}
        # Of these nothing is read.
        whole = {
            known
            for known, tensor in targets.items()
            if facts.overwrites
            and sum(other is known for other in map(of.get, map(id, inputs))) == 1
            and Ref.to(tensor, 0, known.nbytes, None).whole
        }
        awaiting = [known for known in whole if known.empty]
        for known in involved:
            self._room.use(known, values=known not in whole)
        if facts.view and operation is not _aten.lift_fresh.default:
            return operation(*args, **kwargs)
        why, step = "", None
        if self._values:
            why = self._why_not(facts, inputs, of) or next((s.why for s in targets if s not in whole), "")
            if len(targets) < len(written):
                why = why or "one operation wrote it and a tensor from outside of the `with`"
            if not why:
                step = self._step(operation, args, kwargs, facts.random, of, whole)
        try:
            outputs = operation(*args, **kwargs)
        except BaseException:
            for known in awaiting:
                self._room.empty(known)
            raise
        if operation is _aten.lift_fresh.default:  # numbers of Python's
            self._lift(outputs)
            return outputs
        self._record(step, why, targets, whole, inputs, tensors_of(outputs))
        for tensor in written:
            if (target := of.get(id(tensor))) is not None:
                for holder, _ in target.holders():
                    holder.coming += 1
        self._room.make(busy=targets)
        return outputs

    def _why_not(self, facts: Facts, inputs: list[torch.Tensor], of: dict[int, Known | None]) -> str:
        """Why no step can be made of an operation."""
        if not facts.known:
            return "an operation that is not torch's own wrote it"
        for tensor in inputs:
            known = of.get(id(tensor))
            if id(tensor) not in of:
                return f"it was computed with a {type(tensor).__name__} that is not plain memory"
            if (known is None or known.version is None) and tensor.nbytes > SMALL:
                return f"it was computed with a tensor of shape {tuple(tensor.shape)} " + (
                    "from outside of the `with`" if known is None else f"of which {known.why}"
                )
        return ""

    def _step(
        self, operation: Any, args: Any, kwargs: Any, random: bool, of: dict[int, Known | None], whole: set[Known]
    ) -> Step:
        refs: list[Ref] = []
        nbytes = 1024
        drawn: list[torch.Generator] = []
        devices: list[torch.device] = []

        def kept(leaf: Any) -> Any:
            nonlocal nbytes
            if isinstance(leaf, torch.Generator):
                drawn.append(leaf)
            if isinstance(leaf, torch.device):
                devices.append(leaf)
            if not isinstance(leaf, torch.Tensor):
                return leaf
            devices.append(leaf.device)
            known = of[id(leaf)]
            if known is not None and (known in whole or known.version is not None):
                version = None if known in whole else known.version
                refs.append(Ref.to(leaf, known.number, known.nbytes, version))
                return refs[-1]
            nbytes += leaf.nbytes
            return leaf.detach().clone()

        args, kwargs = mapped(kept, args), mapped(kept, kwargs)
        state = None
        if random:
            generator = drawn[0] if drawn else default_generator((devices or [torch.device("cpu")])[0])
            state = (generator.device, generator.get_state())
            nbytes += state[1].nbytes
        self._numbers += 1
        dtype = torch.get_default_dtype()
        return Step(self._numbers, operation, args, kwargs, tuple(refs), dtype, state, nbytes, [])

    def _record(
        self,
        step: Step | None,
        why: str,
        targets: dict[Known, torch.Tensor],
        whole: set[Known],
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        before = {id(tensor.untyped_storage()) for tensor in inputs if _is_plain(tensor)}
        news: dict[Known, None] = {}
        for index, tensor in enumerate(outputs):
            if _is_plain(tensor) and id(tensor.untyped_storage()) not in before and self._of(tensor) is None:
                known = self._new(tensor)
                news[known] = None
                if step is not None:
                    step.made.append((index, known.number))
        for known in (*targets, *news):
            alive = known.storage()
            assert alive is not None
            if alive.nbytes() != known.nbytes:
                known.version, known.why, known.nbytes = None, "its memory was resized", alive.nbytes()
            elif why:
                known.version, known.why = None, why
            elif step is not None:
                previous = None if known in news or known in whole else known.version
                self._write(known, Version.after(step, previous))
            self._room.use(known)

    def _write(self, known: Known, version: Version) -> None:
        most = max(SMALL, known.nbytes // SHARE)
        if version.nbytes > most:
            version = version.exact()
        known.version, known.why = version, ""
        if known.address:
            known.version, known.why = None, known.address
        elif version.nbytes > most:
            if known.nbytes <= SMALL:
                known.version = self._copy(known)
            else:
                known.version, known.why = None, "it takes many steps to make its values"

    def _set(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A tensor gets another storage."""
        out = operation(*args, **kwargs)
        if args[0] in self._params:
            self._own(args[0])
            known = self._of(args[0])
            for holder, param in known.holders() if known is not None else ():
                holder.coming += param is args[0]
        return out

    def _lift(self, tensor: torch.Tensor) -> None:
        alive = tensor.untyped_storage()
        if self._of(tensor) is None and alive.nbytes() <= SMALL and alive.resizable():  # numpy's is not
            known = self._new(tensor)
            if self._values:
                known.version = self._copy(known)

    def _copy(self, known: Known) -> Version:
        """A version that is a copy of the values."""
        values = known.as_bytes()
        target = Ref.to(values, known.number, known.nbytes, None)
        self._numbers += 1
        dtype = torch.get_default_dtype()
        args = (target, values.clone())
        return Version(
            Step(self._numbers, _aten.copy_.default, args, {}, (target,), dtype, None, known.nbytes, []), None, 0
        )

    def _of(self, tensor: torch.Tensor) -> Known | None:
        """What is known of a tensor's storage; None: it was not made here."""
        found = getattr(tensor.untyped_storage(), _KNOWN, None)
        return found if found is not None and found.owner is self else None

    def _new(self, tensor: torch.Tensor) -> Known:
        alive = tensor.untyped_storage()
        self._numbers += 1
        known = Known(self._numbers, self, weakref.ref(alive), alive.nbytes())
        setattr(alive, _KNOWN, known)
        self._known.add(known)
        return known


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a piece of memory and nothing else."""
    if not (isinstance(tensor, nn.Parameter) or type(tensor) is torch.Tensor) or is_traceable_wrapper_subclass(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return False
    return tensor.device.type in ("cpu", "cuda")
