"""See the operations of a computation, and the bytes of the tensors that are alive.

[Note: Which memory is counted]
A storage counts from the operation that made it until it dies. Storages from before, such as parameters, do not count.
Memory that a kernel takes and frees inside of one operation is not seen.

[Note: Small integers are real]
Under ``FakeTensorMode`` a tensor has no values, and a model that asks for one cannot go on. transformers also takes
another path under fake tensors: it builds masks that a training step does without. So small tensors of integers and
booleans, such as positions, are computed while they depend on nothing fake.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from zeroengine.monitor.flop_formulas import flops_of
from zeroengine.utils.compiler_disable import disable_compile
from zeroengine.utils.tensors import tensors_in
from zeroengine.utils.torch_internals import (
    FakeTensor,
    TorchDispatchMode,
    cpu_attention,
    grouped_mm,
    operation_schema,
    storage_address,
    unset_fake_temporarily,
)

_aten = torch.ops.aten
# The names of dtypes that matrix products are timed in.
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_ATTENTION = cpu_attention
# Operations that read as many bytes of a table as they write, and not the whole table.
_LOOKUPS = {_aten.embedding, _aten.index_select, _aten.index, _aten.gather}


def _attention_output(output: torch.Tensor) -> torch.Tensor:
    """Return an output with the layout of the kernel: batch, sequence, heads, width.

    The fake one has that of the query (torch 2.13), and what follows would copy where the kernel's output is a view.
    """
    return torch.empty_permuted(output.shape, (0, 2, 1, 3), dtype=output.dtype, device=output.device)


def _grouped_output(a: Any, b: Any, offs: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    """Return what a mixture of experts' grouped matrix product does. The fake one of torch 2.13 takes bf16 only."""
    groups = () if a.dim() != b.dim() else (offs.numel() if a.dim() == 2 else a.shape[0],)
    output: torch.Tensor = a.new_empty((*groups, a.shape[-2], b.shape[-1]))
    return output


# Elements up to which tensors of integers are computed.
MAX_REAL_NUMEL = 1 << 24

# FLOPs, bytes, the name of a dtype, bytes of the largest new tensor, tokens of attention's sequences.
OperationKind = tuple[int, int, str, int, int]


class OperationTrace(TorchDispatchMode):
    """A mode that counts operations by kind, and the bytes of living storages.

    Attributes:
        live_bytes: Of the storages that were made under this mode and are alive.
        peak_bytes: The most of them so far.
        operations: The number of each kind in the pass that runs.
        weight: As how many an operation counts.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self.operations: Counter[OperationKind] = Counter()
        self.weight = 1
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # See ``OperationMode`` of deferred_init.
        return False

    @disable_compile
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        kwargs = kwargs or {}
        # Queries of metadata of fake tensors come as operations of "prim".
        if func.namespace == "prim":
            return func(*args, **kwargs)
        inputs = list(tensors_in((args, kwargs)))
        result = _run(func, args, kwargs, inputs)
        if func.is_view:
            return result
        packet = func.overloadpacket
        outputs = list(tensors_in(result))
        new_bytes = max((self._track(output) for output in outputs), default=0)
        flops = flops_of(func, args, kwargs, result)
        written = sum(map(_nbytes, outputs))
        read = written if packet in _LOOKUPS else sum(map(_nbytes, inputs))
        dtype = outputs[0].dtype if outputs else torch.float32
        name = DTYPE_NAMES.get(dtype, "fp32")
        self.operations[flops, read + written, name, new_bytes, _attention_length(packet, inputs)] += self.weight
        return result

    def _track(self, tensor: torch.Tensor) -> int:
        """Count a tensor's storage if it is new, and return its bytes, or else 0."""
        storage = tensor.untyped_storage()
        key = storage_address(storage)
        if key in self._storages:
            return 0
        nbytes = storage.nbytes()

        def freed(_: object) -> None:
            del self._storages[key]
            self.live_bytes -= nbytes

        self._storages[key] = weakref.ref(storage, freed)
        self.add_bytes(nbytes)
        return nbytes

    def add_bytes(self, nbytes: int) -> None:
        """Count bytes as alive."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    @contextmanager
    def counted(self, times: int) -> Iterator[None]:
        """Let operations inside count as so many more."""
        weight, self.weight = self.weight, self.weight * times
        try:
            yield
        finally:
            self.weight = weight

    def ignore(self, tensors: Any) -> None:
        """Leave storages out that exist already, so that operations in place do not count them."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage_address(storage)] = weakref.ref(storage)


def _run(func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
    """Run an operation: for real where it is one on small integers, and otherwise as the mode below does."""
    is_fake = any(isinstance(tensor, FakeTensor) for tensor in inputs)
    if is_fake and func.overloadpacket is grouped_mm:
        return _grouped_output(*args, **kwargs)
    # These return no tensors, but values.
    if inputs and not is_fake and not any(isinstance(r.type, torch.TensorType) for r in operation_schema(func).returns):
        with unset_fake_temporarily():
            return func(*args, **kwargs)
    result = func(*args, **kwargs)
    outputs = list(tensors_in(result))
    if not outputs or not isinstance(outputs[0], FakeTensor):
        return result
    if func.overloadpacket is _ATTENTION:
        return (_attention_output(result[0]), *result[1:])
    if not is_fake and all(map(_is_small_integer, outputs)):
        with unset_fake_temporarily():
            return func(*args, **kwargs)
    return result


def _attention_length(packet: Any, inputs: list[torch.Tensor]) -> int:
    """Return the tokens of the keys or queries, whichever are more, of fused attention; 0: it is another operation."""
    if not packet.__name__.startswith("_scaled_dot_product"):
        return 0
    return max(tensor.shape[-2] for tensor in inputs if tensor.dim() == 4)


def _is_small_integer(tensor: torch.Tensor) -> bool:
    is_integer = not tensor.is_floating_point() and not tensor.is_complex()
    return is_integer and tensor.device.type == "cpu" and tensor.numel() <= MAX_REAL_NUMEL


def _nbytes(tensor: torch.Tensor) -> int:
    # An expanded tensor has fewer bytes than elements.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


class AttentionWithoutDropout(torch.overrides.TorchFunctionMode):
    """Leaves dropout out of ``scaled_dot_product_attention``, whose kernels for GPUs drop inside.

    The kernels for CPUs do not: there a model with dropout computes the attention matrix.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run a function."""
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)
