"""Every private name of torch that the engine reads, once: what it is for, and its public name where there is one.

Only public names of torch are promised to stay. So no other file reads a private one, which a test checks, and one that
a release of torch has lost is an error with its name, in ``check_torch`` or at the first use of it. Of several
spellings of a name the first is the public one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from operator import attrgetter, methodcaller
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

from zeroengine.errors import ZeroEngineError

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# The releases that the tests pass with.
OLDEST_TORCH = "2.11.0"
NEWEST_TORCH = "2.15.0"

_missing_names: list[str] = []


class _Missing:
    """Stands for a name that this torch lacks, and raises at its first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise.

        Raises:
            ZeroEngineError: Always.
        """
        raise _error([self._name])

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return ()


def check_torch() -> None:
    """Check that this torch has every name that the engine reads.

    Raises:
        ZeroEngineError: It lacks some. The text names torch's version, the names and a version that works.
    """
    if _missing_names:
        raise _error(_missing_names)


def _error(names: list[str]) -> ZeroEngineError:
    version = torch.__version__
    return ZeroEngineError(
        f"torch {version} lacks what zeroengine reads of it: {', '.join(names)}. zeroengine is known to work with "
        f"torch {OLDEST_TORCH} to {NEWEST_TORCH}: install one of these, as by `pip install torch=={NEWEST_TORCH}`, or "
        f"a zeroengine that was made for torch {version.partition('+')[0]}"
    )


def _find(*spellings: str) -> Any:
    """Return what torch has under the first of ``spellings`` that it knows."""
    for name in spellings:
        value: Any = torch
        for part in name.split(".")[1:]:
            value = getattr(value, part, _missing_names)
        if value is not _missing_names:
            return value
    _missing_names.append(spellings[-1])
    return _Missing(spellings[-1])


def _attribute(name: str, owner: Any) -> str:
    """Return ``name``, after a check that ``owner`` has an attribute of this name."""
    if not hasattr(owner, name):
        _missing_names.append(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
    return name


# -- autograd: what runs, and in which order -------------------------------------------------------

# Call a function when the innermost backward in progress ends, unless that backward raises. Public since torch 2.15.
queue_callback: Callable[[Callable[[], None]], None] = _find(
    "torch.autograd.graph.queue_callback", "torch.autograd.Variable._execution_engine.queue_callback"
)
# The number of the backward that this thread runs; -1: none.
current_graph_task_id: Callable[[], int] = _find("torch._C._current_graph_task_id")
# Whether that backward keeps its graph.
current_graph_task_keeps_graph: Callable[[], bool] = _find("torch._C._autograd._get_current_graph_task_keep_graph")
# The node that this thread runs; None: none.
current_autograd_node: Callable[[], Any] = _find("torch._C._current_autograd_node")
# Whether the backward in progress comes to a node.
will_engine_execute_node: Callable[[Any], bool] = _find("torch._C._will_engine_execute_node")
# The number of the next node that this thread makes, and that of a node. Of ready nodes autograd runs the latest.
next_node_number: Callable[[], int] = _find("torch._C._autograd._get_sequence_nr")
node_number: Callable[[Any], int] = methodcaller(_attribute("_sequence_nr", torch.autograd.Function))
# The code of the function through which Python runs every backward.
RUN_BACKWARD_CODE: CodeType = _find("torch.autograd.graph._engine_run_backward.__code__")
# The tensors that a node saved, as objects that take hooks: those of a Function, and the prefix for those of torch's.
RAW_SAVED_TENSORS = _attribute("_raw_saved_tensors", torch.autograd.Function)
RAW_SAVED_PREFIX = "_raw_saved_"
# Torch 2.11 unpacks all that a node saved under a name, by a public attribute, and no single one.
UNPACKS_SINGLE_ONES = hasattr(_find("torch._C._autograd.SavedTensor"), "unpack")
# The pair of hooks through which tensors are saved now; None: there are none. Takes whether tracing counts.
top_saved_tensors_hooks: Callable[[bool], Any] = _find("torch._C._autograd._top_saved_tensors_default_hooks")
# The hooks of a tensor, a dict in the order in which they are called.
BACKWARD_HOOKS = _attribute("_backward_hooks", torch.Tensor)
POST_ACCUMULATE_GRAD_HOOKS = _attribute("_post_accumulate_grad_hooks", torch.Tensor)
# Whether a profiler records ranges.
profiler_enabled: Callable[[], bool] = _find("torch.autograd._profiler_enabled")


def unpack_saved(
    node: Any, name: str, saved_tensors: Sequence[Any], positions: Sequence[int]
) -> list[tuple[int, torch.Tensor]]:
    """Return tensors that a node of the graph saved, with their positions, as a backward would read them.

    Those that were changed in place since they were saved, for which autograd raises, are left out; in torch 2.11 so
    are all that the node saved under the name, and all where one of them was saved through hooks.

    Args:
        name: The attribute of the node that has the saved tensors; ``RAW_SAVED_TENSORS`` or one with the prefix.
        saved_tensors: Its values.
        positions: Which of them; they are not None and have no hooks.
    """
    tensors = []
    if UNPACKS_SINGLE_ONES:
        for position in positions:
            # This runs for each weight and forward, and contextlib.suppress costs as much as the rest.
            try:
                tensors.append((position, saved_tensors[position].unpack()))
            except RuntimeError:
                continue
    elif all(saved is None or saved.unpack_hook is None for saved in saved_tensors):
        public = name.removeprefix("_raw_" if name == RAW_SAVED_TENSORS else "_raw")
        with contextlib.suppress(RuntimeError):
            values = getattr(node, public)
            values = values if type(values) in (tuple, list) else (values,)
            tensors = [(position, values[position]) for position in positions]
    return tensors


@functools.lru_cache(maxsize=4096)
def is_function_forward(code: CodeType) -> bool:
    """Return whether ``code`` is that of the forward of a ``torch.autograd.Function``, or of a wrapper of one.

    Torch 2.14 and later call forwards from C++, which leaves no frame of ``apply``.
    """
    return any(code is getattr(forward, "__code__", None) for forward in _forwards_of(torch.autograd.Function))


def _forwards_of(cls: type[torch.autograd.Function]) -> Iterator[Any]:
    forward: Any = cls.__dict__.get("forward")
    forward = getattr(forward, "__func__", forward)
    while forward is not None and cls is not torch.autograd.Function:
        yield forward
        forward = getattr(forward, "__wrapped__", None)
    for subclass in cls.__subclasses__():
        yield from _forwards_of(subclass)


# -- activation checkpoints ------------------------------------------------------------------------

# The class of the nodes of reentrant checkpoints.
CheckpointNode: Any = _find("torch.utils.checkpoint.CheckpointFunction._backward_cls")
# The end of a recomputation that has reached the last saved tensor.
StopRecomputation: Any = _find("torch.utils.checkpoint._StopRecomputationError")
# The class of the hooks that save tensors in a recomputation, whose name their own begin with.
RecomputationHook: Any = _find("torch.utils.checkpoint._recomputation_hook")


# -- tensors, and who refers to their memory -------------------------------------------------------

# Contexts in which subclasses, or subclasses and modes, see no call.
DisableTorchFunctionSubclass: Callable[[], AbstractContextManager[Any]] = _find("torch._C.DisableTorchFunctionSubclass")
DisableTorchFunction: Callable[[], AbstractContextManager[Any]] = _find("torch._C.DisableTorchFunction")
# The address of a storage, which names it while it lives, and the number of tensors that refer to it.
storage_address: Callable[[torch.UntypedStorage], int] = attrgetter(_attribute("_cdata", torch.UntypedStorage))
storage_use_count: Callable[[int], int] = _find("torch._C._storage_Use_Count")
# The number of references to the tensor in C++.
tensor_use_count: Callable[[torch.Tensor], int] = methodcaller(_attribute("_use_count", torch.Tensor))
# How often the values of a tensor were changed in place.
version_of: Callable[[torch.Tensor], int] = attrgetter(_attribute("_version", torch.Tensor))
# Exchange all of two tensors but the Python objects.
swap_tensor_impl: Callable[[torch.Tensor, torch.Tensor], None] = _find("torch._C._swap_tensor_impl")
make_subclass: Callable[[type, torch.Tensor], Any] = _find("torch.Tensor._make_subclass")
is_traceable_wrapper_subclass: Callable[[object], bool] = _find(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass"
)
# The operations of optimizers and of torch.amp.GradScaler.
foreach_zero: Any = _find("torch._foreach_zero_")
unscale_and_check: Any = _find("torch._amp_foreach_non_finite_check_and_unscale_")
fused_adam: Any = _find("torch._fused_adam_")
fused_adamw: Any = _find("torch._fused_adamw_")


# -- modules, optimizers and schedules -------------------------------------------------------------

CALL_MODULE_CODE: CodeType = _find("torch.nn.Module._call_impl.__code__")
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter(
    _attribute("_parameters", nn.Module())
)
CHILDREN = _attribute("_modules", nn.Module())
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter(CHILDREN)
buffers_of: Callable[[nn.Module], dict[str, torch.Tensor | None]] = attrgetter(_attribute("_buffers", nn.Module()))
non_persistent_buffers_of: Callable[[nn.Module], set[str]] = attrgetter(
    _attribute("_non_persistent_buffers_set", nn.Module())
)
# The attributes of a module that hold the hooks of load_state_dict(), and the method that it calls.
LOAD_PRE_HOOKS = _attribute("_load_state_dict_pre_hooks", nn.Module())
LOAD_POST_HOOKS = _attribute("_load_state_dict_post_hooks", nn.Module())
LOAD_FROM_STATE_DICT = _attribute("_load_from_state_dict", nn.Module)
# What some modules call their reset_parameters().
RESET_PARAMETERS = _attribute("_reset_parameters", nn.MultiheadAttention)
# What torch.compile(module) calls the module inside, and where module.compile() keeps what it compiled.
COMPILED_MODULE = "_orig_mod"
COMPILED_CALL = _attribute("_compiled_call_impl", nn.Module)
BatchNorm: type[nn.Module] = _find("torch.nn.modules.batchnorm._BatchNorm")
# The attributes of an optimizer that hold the hooks of its step().
STEP_PRE_HOOKS = "_optimizer_step_pre_hooks"
STEP_POST_HOOKS = "_optimizer_step_post_hooks"
# By this attribute of their optimizer schedules learn that it has stepped.
OPTIMIZER_STEPPED = "_opt_called"
# The function of torch.distributed.checkpoint.state_dict that steps an optimizer to make its state.
INIT_OPTIMIZER_STATE = "_init_optim_state"


def copy_state_dict_metadata(source: Any, target: Any) -> None:
    """Give the state dict ``target`` the versions of modules that torch attached to ``source``, if there are any."""
    if hasattr(source, "_metadata"):
        target._metadata = source._metadata


# -- dispatch, fake tensors and torch.func ---------------------------------------------------------

if not TYPE_CHECKING:
    TorchDispatchMode = _find("torch.utils._python_dispatch.TorchDispatchMode")
    FakeTensor = _find("torch._subclasses.fake_tensor.FakeTensor")
    FakeTensorMode = _find("torch._subclasses.fake_tensor.FakeTensorMode")
    OpOverload = _find("torch._ops.OpOverload")
unset_fake_temporarily: Any = _find("torch._subclasses.fake_tensor.unset_fake_temporarily")
# What a fake tensor cannot tell: a shape that depends on data, or the result of an operation that torch does not know.
FAKE_TENSOR_ERRORS: tuple[type[Exception], ...] = (
    _find("torch._subclasses.fake_tensor.DataDependentOutputException"),
    _find("torch._subclasses.fake_tensor.DynamicOutputShapeException"),
    _find("torch._subclasses.fake_tensor.UnsupportedOperatorException"),
)
dispatch_mode: Callable[[], Any] = _find("torch.utils._python_dispatch._get_current_dispatch_mode")
dispatch_modes: Callable[[], list[Any]] = _find("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
num_dispatch_modes: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack")
disable_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _find(
    "torch.utils._python_dispatch._disable_current_modes"
)
function_modes: Callable[[], list[Any]] = _find("torch.overrides._get_current_function_mode_stack")
tree_leaves: Callable[[Any], list[Any]] = _find("torch.utils._pytree.tree_leaves")
tree_map: Callable[[Callable[[Any], Any], Any], Any] = _find("torch.utils._pytree.tree_map")
functorch_active: Callable[[], bool] = _find("torch._C._are_functorch_transforms_active")
leave_functorch: Callable[[], AbstractContextManager[Any]] = _find(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack"
)
tracing_state: Callable[[], Any] = _find("torch._C._get_tracing_state")
TracingContext: Any = _find("torch._guards.TracingContext")
# An operation without its overload, and the types of what it takes and returns.
operation_schema: Callable[[Any], Any] = attrgetter("_schema")
# The operations of ATen without a public name.
unsafe_view: Any = _find("torch.ops.aten._unsafe_view")
grouped_mm: Any = _find("torch.ops.aten._grouped_mm")
cpu_attention: Any = _find("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu")
cpu_attention_backward: Any = _find("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")


# -- torch.compile, without importing torch._dynamo ------------------------------------------------

set_code_exec_strategy: Any = _find("torch._C._dynamo.eval_frame.set_code_exec_strategy")
FrameExecStrategy: Any = _find("torch._C._dynamo.eval_frame._FrameExecStrategy")
FrameAction: Any = _find("torch._C._dynamo.eval_frame._FrameAction")
# The attributes by which torch.compile knows that it shall break its graph at a function, and why.
COMPILE_DISABLED = "_torchdynamo_disable"
COMPILE_DISABLED_REASON = "_torchdynamo_disable_msg"


def num_compiled_frames() -> int:
    """Return how many frames torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["frames"]["total"])


# -- torch.distributed and files -------------------------------------------------------------------

default_store: Callable[[], dist.Store] = _find("torch.distributed.distributed_c10d._get_default_store")
store_of_group: Callable[[dist.ProcessGroup], dist.Store] = _find(
    "torch.distributed.distributed_c10d._get_process_group_store"
)
# The options of a collective, among them a timeout of its own, which the functions of ``torch.distributed`` lack.
AllgatherOptions: Any = _find("torch.distributed.distributed_c10d.AllgatherOptions")
# The methods of a process group that those functions call. Public since torch 2.13.
all_gather_single: Callable[..., dist.Work | None] = _find(
    "torch.distributed.ProcessGroup.all_gather_single", "torch.distributed.ProcessGroup._allgather_base"
)
reduce_scatter_single: Callable[..., dist.Work | None] = _find(
    "torch.distributed.ProcessGroup.reduce_scatter_single", "torch.distributed.ProcessGroup._reduce_scatter_base"
)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return what moves a group's tensors of ``device``, such as a ``ProcessGroupNCCL``."""
    return group._get_backend(device)


def high_priority_options(timeout: timedelta | None) -> Any:
    """Return options of an NCCL group whose kernels start before others that wait; None without NCCL.

    Args:
        timeout: The group's, which torch compares with that of the options.
    """
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        return None
    options = nccl.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    return options


_group_registry: Any = _find("torch.distributed.distributed_c10d._world")
_group_name_code: CodeType = _find("torch.distributed.distributed_c10d._hash_ranks_to_str.__code__")


def number_of_groups() -> int:
    """Return the number from which, with its ranks, torch makes the name of the next group that some ranks make.

    It counts the groups that this process has made in torch 2.15, and those that it belongs to in earlier releases.
    """
    if "group_count" in _group_name_code.co_names:
        return int(_group_registry.group_count)
    return len(_group_registry.pg_names)


# The attributes of a DTensor that hold its tensor on this rank, and its layout.
LOCAL_TENSOR, DTENSOR_SPEC = "_local_tensor", "_spec"
flatten_mesh: Callable[[Any], Any] = methodcaller(_attribute("_flatten", dist.DeviceMesh))


def mesh_without_processes(size: int, name: str) -> dist.DeviceMesh:
    """Return a mesh of one dimension in the view of its first rank. It has no process group, so nothing can be sent."""
    # DTensor caches by meshes, which are equal if their ranks are: no job has ranks of these numbers.
    first = 1 << 30
    ranks = torch.arange(first, first + size, device="cpu")
    return dist.DeviceMesh("cpu", ranks, mesh_dim_names=(name,), _init_backend=False, _rank=first)


# The namespace of collectives as operations.
COLLECTIVES = "_c10d_functional"
# Storages of pickles by name, and the function that makes a tensor of one.
storage_dtypes: Callable[[], dict[str, torch.dtype]] = _find("torch.storage._storage_type_to_dtype_map")
rebuild_tensor: Any = _find("torch._utils._rebuild_tensor_v2")


def storage_info(file: str, start: int, length: int) -> Any:
    """Return what the metadata of a checkpoint records of an item: its file, first byte and number of bytes."""
    # Its module takes long to import, and only a save needs it.
    from torch.distributed.checkpoint import filesystem

    return filesystem._StorageInfo(file, start, length)
