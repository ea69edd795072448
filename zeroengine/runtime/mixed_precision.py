"""Set up mixed precision: casts at the root's inputs, modules that keep fp32, buffers, and autocast."""

from __future__ import annotations

import fnmatch
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from zeroengine.config import FLOATS, Config
from zeroengine.errors import ZeroEngineError
from zeroengine.partition.cut import Algorithm, UnitPlan, cut_units, is_wide_float, plain_name
from zeroengine.partition.storages import exact_storages
from zeroengine.utils.compiler_disable import disable_compile
from zeroengine.utils.formats import listed
from zeroengine.utils.tensors import map_tensors
from zeroengine.utils.torch_internals import BatchNorm, buffers_of

# How a note about dtypes begins.
NOTE = "The model computes in"
# The buffers that a note names.
NUM_SHOWN = 5


def check_supported(dtype: torch.dtype, device: torch.device) -> None:
    """Check by a small computation that torch computes in ``dtype`` on ``device``.

    Raises:
        ZeroEngineError: It does not.
    """
    # torch has no list of supported dtypes, and a missing kernel shows only when it is called.
    try:
        x = torch.ones(2, 2, dtype=dtype, device=device, requires_grad=True)
        (x @ x).float().sum().backward()
    except RuntimeError as error:
        raise ZeroEngineError(
            f"torch {torch.__version__} does not compute in {str(dtype)[6:]} on {device.type}: {error}. Write another "
            'precision, such as "bf16": {"enabled": true}, or none for fp32.'
        ) from error


def units_of_model(
    model: nn.Module, config: Config, algorithms: Mapping[nn.Parameter, Algorithm] = MappingProxyType({})
) -> list[UnitPlan]:
    """Return the units that a model is cut into, in the precision that a resolved configuration asks for.

    Args:
        model: The model.
        config: The resolved configuration.
        algorithms: What updates each trainable parameter.
    """
    keep_fp32 = {param for module in fp32_modules(model, config) for param in module.parameters()}
    return cut_units(
        model,
        patterns=config.units,
        compute_dtype=config.low_precision,
        keep_fp32=keep_fp32,
        keep_dtype=kept_tensors(model, config),
        algorithms=algorithms,
        fp32_masters=not config.has_low_masters,
    )


def kept_tensors(model: nn.Module, config: Config) -> set[torch.Tensor]:
    """Return the parameters and buffers that keep their own dtype in any precision: those that ``keep_dtype`` matches.

    Raises:
        ZeroEngineError: A pattern matches nothing.
    """
    kept: set[torch.Tensor] = set()
    named = dict(named_tensors(model)) if config.keep_dtype else {}
    for pattern in config.keep_dtype or ():
        matches = fnmatch.filter(named, pattern)
        if not matches:
            nearest = ", ".join(get_close_matches(pattern, sorted(named), NUM_SHOWN, cutoff=0.0))
            raise ZeroEngineError(
                f"keep_dtype: the pattern {pattern!r} matches no parameter or buffer. The nearest names are: {nearest}"
            )
        kept.update(named[name] for name in matches)
    return kept


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of ``module``, tied ones by each of their names."""
    for named in (module.named_parameters, module.named_buffers):
        yield from ((plain_name(name), tensor) for name, tensor in named(remove_duplicate=False))


def exact_tensors(model: nn.Module, config: Config) -> set[torch.Tensor]:
    """Return what leaves the engine in its own dtype: what ``keep_dtype`` matches, and what holds quantized values."""
    return kept_tensors(model, config) | exact_storages(model)


def dtype_of_model(model: nn.Module, config: Config) -> torch.dtype | None:
    """Return the dtype of what trains, or of a model of which nothing does; for ``Config.resolve``.

    Frozen floats may be packed bytes, and parameters that keep their dtype are exceptions.
    """
    kept = kept_tensors(model, config)
    floats = [param for param in model.parameters() if is_wide_float(param)]
    first = min(floats, key=lambda param: (not param.requires_grad, param in kept), default=None)
    return None if first is None else first.dtype


def fp32_modules(model: nn.Module, config: Config) -> list[nn.Module]:
    """Return the outermost modules that keep fp32 under bf16 or fp16.

    They are:

    - the modules that ``keep_fp32_modules`` matches by qualified name or class name (``fnmatch``);
    - BatchNorm, for torch takes its fp32 running statistics with fp32 weights alone, and in low precision they would
      hardly move;
    - a module that shares a parameter with one of these, such as an embedding with its head.

    Raises:
        ZeroEngineError: A pattern matches no module.
    """
    modules = {plain_name(name): module for name, module in model.named_modules() if plain_name(name)}
    # Patterns are checked in fp32 as well, so that a misspelled one does not surface only when precision is lowered.
    fp32_names = _matching(modules, config.keep_fp32_modules or ())
    if config.low_precision is None:
        return []
    if config.data_types.buffer_dtype in (None, "fp32"):
        norms = {name: module for name, module in modules.items() if isinstance(module, BatchNorm)}
        fp32_names |= {name for name, norm in norms.items() if norm.running_mean is not None}
    # A parameter has one dtype, so modules that share it with an fp32 module have to compute in fp32, too. Only leaf
    # modules are taken: their parents would bring other parameters along.
    params = {param for name in fp32_names for param in modules[name].parameters()}
    fp32_names |= {
        name
        for name, module in modules.items()
        if not list(module.children()) and any(param in params for param in module.parameters(recurse=False))
    }
    # A module inside another one of the list already gets fp32 inputs from it, and needs no casts of its own.
    return [module for name, module in modules.items() if name in fp32_names and not _is_below(name, fp32_names)]


def _matching(modules: dict[str, nn.Module], patterns: Sequence[str]) -> set[str]:
    """Return the names of the modules that match ``patterns``.

    A container is never called itself, so the modules that it holds stand for it.
    """
    matching: set[str] = set()
    for pattern in patterns:
        matches = {
            name
            for name, module in modules.items()
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(type(module).__name__, pattern)
        }
        if not matches:
            kinds = ", ".join(dict.fromkeys(type(module).__name__ for module in modules.values()))
            raise ZeroEngineError(
                f"keep_fp32_modules: the pattern {pattern!r} matches no module, by name or class. Names are like "
                f"{', '.join(list(modules)[:8]) or 'none'}; classes are {kinds or 'none'}."
            )
        matching |= matches
    containers = {name for name in matching if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict))}
    below = {name for name in modules if _is_below(name, containers)}
    return {name for name in matching | below if not isinstance(modules[name], (nn.ModuleList, nn.ModuleDict))}


def _is_below(name: str, names: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:n]) in names for n in range(1, len(parts)))


def install(model: nn.Module, config: Config, device: torch.device, undo: ExitStack) -> None:
    """Register the hooks on ``model`` that make it compute as configured.

    On a GPU, tensors in CPU memory among the root's inputs are copied to it. In mixed precision floating inputs of the
    root are cast to its dtype; modules that keep fp32 take fp32 inputs, and their outputs are cast to the lower dtype.
    ``torch_autocast`` is entered around the root's forward. ``undo`` removes the hooks.
    """
    low_precision = config.low_precision
    # Only the root's inputs are cast. Inside, outputs of one module are inputs of the next in the same dtype.
    if low_precision is not None:
        lower = cast_floating(low_precision)
        _map_inputs(model, lower, undo)
        for module in fp32_modules(model, config):
            _map_inputs(module, cast_floating(torch.float32), undo)
            undo.callback(module.register_forward_hook(partial(_replace_outputs, lower)).remove)
    if device.type != "cpu":
        # This hook runs before the cast, since each goes to the front, so the device does the cast.
        _map_inputs(model, move_to(device), undo)
    autocast = config.autocast_dtype
    if autocast is not None:
        hooks = _AutocastHooks(device.type, autocast)
        # Autocast is entered before every other hook, and left even if the forward raises. It would otherwise stay on
        # for the rest of the process.
        undo.callback(model.register_forward_pre_hook(hooks.enter, prepend=True).remove)
        undo.callback(model.register_forward_hook(hooks.leave, always_call=True).remove)


def _map_inputs(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], undo: ExitStack) -> None:
    """Apply ``function`` to every tensor that ``module`` is called with, before the hooks that are there already."""
    handle = module.register_forward_pre_hook(partial(_replace_inputs, function), prepend=True, with_kwargs=True)
    undo.callback(handle.remove)


# These hooks are functions of this module with their arguments, so that a model that has them can be pickled. Copies of
# the model go on computing in its precision.
def _replace_inputs(
    function: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    return map_tensors(function, args), map_tensors(function, kwargs)


def _replace_outputs(
    function: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, args: Any, output: Any
) -> Any:
    return map_tensors(function, output)


class _AutocastHooks:
    """Enters ``torch.autocast`` before a forward, and leaves it afterwards."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self._device_type, self._dtype = device_type, dtype
        # The contexts form a stack, for the root may be called within its own forward.
        self._contexts: list[Any] = []

    @disable_compile
    def enter(self, module: nn.Module, args: Any) -> None:
        self._contexts.append(torch.autocast(self._device_type, self._dtype))
        self._contexts[-1].__enter__()

    @disable_compile
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # A forward that failed before `enter` leaves nothing to exit, although this hook is always called.
        if self._contexts:
            self._contexts.pop().__exit__(None, None, None)


def note_buffers(error: RuntimeError, model: nn.Module, config: Config) -> None:
    """Add a note to an error about dtypes in a forward: which buffers may be its cause, and the keys that cast them.

    Args:
        error: What the forward of ``model`` raised.
        model: The model.
        config: The resolved configuration.
    """
    low_precision = config.low_precision
    # torch has no class for these errors. Their texts speak of a dtype, a scalar type, or a type.
    if low_precision is None or "type" not in str(error):
        return
    # Of two calls that pass the error on, the inner one has explained it.
    if any(NOTE in note for note in getattr(error, "__notes__", ())):
        return
    kept = {tensor for tensor in kept_tensors(model, config) if tensor.dtype is not low_precision}
    passed_over = kept.union(*(module.buffers() for module in fp32_modules(model, config)))
    names = {
        buffer: plain_name(name)
        for name, buffer in model.named_buffers()
        if is_wide_float(buffer) and buffer.dtype is not low_precision and buffer not in passed_over
    }
    low = "bf16" if low_precision is torch.bfloat16 else "fp16"
    # The innermost module that was running and has such buffers is the likely cause.
    frames = traceback.walk_tb(error.__traceback__)
    running = [frame.f_locals.get("self") for frame, _ in frames]
    for module in [*reversed([m for m in running if isinstance(m, nn.Module)]), model]:
        if own := [tensor for _, tensor in named_tensors(module) if module is not model and tensor in kept]:
            name = next(name for name, tensor in named_tensors(model) if tensor is own[0])
            error.add_note(
                f"{NOTE} {low}, and keep_dtype keeps {name} in {str(own[0].dtype)[6:]}. Its module casts what it takes "
                "itself, such as `F.linear(x.float(), self.weight)`; with keep_fp32_modules the engine casts it."
            )
            return
        suspects = [buffer for buffer in module.buffers() if buffer in names]
        if suspects:
            break
    else:
        return
    listing = listed([f"{names[buffer]} ({str(buffer.dtype)[6:]})" for buffer in suspects], NUM_SHOWN)
    # A parametrization computes a weight of the module that it lies in.
    owner = names[suspects[0]].rpartition(".")[0].partition(".parametrizations.")[0]
    in_fp32 = f', or "keep_fp32_modules": ["{owner}"], which computes that module in fp32' if owner else ""
    error.add_note(
        f"{NOTE} {low}, and buffers keep their dtype: {listing}. If one met a {low} tensor here, write "
        f'"data_types": {{"buffer_dtype": "{low}"}}, which casts all floating buffers of the model, as DeepSpeed does'
        f"{in_fp32}."
    )


def cast_floating(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that casts floating tensors to ``dtype``; others, and floats of 8 bits, stay as they are."""
    return partial(_cast_floating, dtype)


def _cast_floating(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if is_wide_float(tensor) else tensor


def move_to(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that copies tensors in CPU memory to ``device``; others stay where they are.

    The host does not wait for the device: torch stages memory that is not page-locked before the call returns, and
    copies memory that is (``pin_memory=True``) beside the computation.
    """
    return partial(_move_to, device)


def _move_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device, non_blocking=True) if tensor.device.type == "cpu" else tensor


def prepare_buffers(
    model: nn.Module,
    config: Config,
    device: torch.device,
    broadcast: Callable[[torch.Tensor], None],
    undo: ExitStack,
) -> None:
    """Move buffers to the device and give them rank 0's values. Modules that share a buffer go on sharing it.

    Floating buffers take ``buffer_dtype``, or keep their own; in modules that keep fp32 they are fp32. Those that
    ``keep_dtype`` matches keep their own in any case.

    Args:
        model: The model.
        config: The resolved configuration.
        device: The device that the model computes on.
        broadcast: Gives all ranks the values that rank 0 has of a tensor.
        undo: Casts buffers back to the dtypes that they had.
    """
    name = config.data_types.buffer_dtype
    fp32_buffers = {buffer for module in fp32_modules(model, config) for buffer in module.buffers()}
    kept = kept_tensors(model, config)
    # A buffer may be shared by several modules. It is moved once, and each of them refers to the same copy.
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for key, buffer in buffers_of(module).items():
            if buffer is not None and buffer not in moved:
                dtype = FLOATS[name] if name is not None else buffer.dtype
                dtype = torch.float32 if buffer in fp32_buffers else dtype
                dtype = buffer.dtype if buffer in kept else dtype
                # An expanded buffer has less memory than elements, which a broadcast could not write.
                moved[buffer] = cast_floating(dtype)(buffer.to(device)).contiguous().resolve_conj().resolve_neg()
                broadcast(moved[buffer])
            if buffer is not None:
                buffers_of(module)[key] = moved[buffer]
    dtypes = {copy: buffer.dtype for buffer, copy in moved.items() if copy.dtype is not buffer.dtype}
    if dtypes:
        undo.callback(_cast_buffers, model, dtypes)


def _cast_buffers(model: nn.Module, dtypes: Mapping[torch.Tensor, torch.dtype]) -> None:
    cast = {buffer: buffer.to(dtype) for buffer, dtype in dtypes.items()}
    for module in model.modules():
        for key, buffer in buffers_of(module).items():
            if buffer in cast:
                buffers_of(module)[key] = cast[buffer]
