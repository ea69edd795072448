"""``meta_init``: builds a model without memory. ``initialize`` gives it its values unit by unit."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zeroengine.config import ConfigLike, load
from zeroengine.deferred_init.dispatch_modes import is_recording
from zeroengine.deferred_init.parameter import has_graph, swap_data, take_trace, trace_of
from zeroengine.deferred_init.recorder import Recorder
from zeroengine.errors import ZeroEngineError
from zeroengine.migration.messages import explains_arguments
from zeroengine.utils.formats import listed
from zeroengine.utils.torch_internals import RESET_PARAMETERS, buffers_of

log = logging.getLogger("zeroengine")

# Bytes of parameters that are in memory at a time while a model is built, beside those in use.
CACHE_BYTES = 1 << 26
# The names that a message shows.
NUM_SHOWN = 5


@explains_arguments
@contextlib.contextmanager
def meta_init(config: ConfigLike | None = None, *, values: bool = True) -> Iterator[None]:
    """Return a context in which modules are built without memory for their parameters.

    Everything inside is computed as usual, but of each parameter only the trace of its values is kept: the operations
    that made them. After the ``with`` the parameters, the same objects, are on the meta device. ``initialize`` replays
    each trace straight into the memory that it trains in. The values are the bits of an ordinary build with the same
    seed, and random generators are left where that build would leave them. Buffers are ordinary tensors throughout.

        with zeroengine.meta_init():
            model = Model()
        engine = zeroengine.initialize(model, config="zero3.json")

    Only what this thread does is recorded. Parameters whose values cannot be replayed, such as those that numpy wrote,
    keep their memory, and a warning names them.

    Args:
        config: The configuration for ``initialize``, to be checked right away. None is not checked.
        values: False where weights will be loaded. No values are recorded or computed, parameters start as zeros, and a
            forward is an error until ``engine.load_weights`` or ``engine.load_checkpoint`` has filled all of them.

    Raises:
        ZeroEngineError: This is inside of another ``meta_init``.
        ConfigError: ``config`` cannot be honored.
    """
    if config is not None:
        load(config)
    recorder = Recorder(CACHE_BYTES, values)
    recorder.start()
    try:
        yield
    finally:
        # Also after an error torch's modes must end, and parameters that outlive the block need their traces.
        in_memory = recorder.finish()
    if in_memory:
        log.warning("%s", _notice(in_memory))


def _notice(in_memory: Sequence[tuple[str, int, str]]) -> str:
    """Return the warning about parameters that keep their memory, the largest first."""
    shown = [f"{name} ({nbytes:,} bytes): {why}" for name, nbytes, why in sorted(in_memory, key=lambda row: -row[1])]
    more = f"; and {len(shown) - NUM_SHOWN} more" if len(shown) > NUM_SHOWN else ""
    total = sum(nbytes for _, nbytes, _ in in_memory)
    return f"meta_init(): {total:,} bytes of parameters stay in memory. {'; '.join(shown[:NUM_SHOWN])}{more}"


def check_not_recording() -> None:
    """Raise ``ZeroEngineError`` inside of a ``meta_init``."""
    if is_recording():
        raise ZeroEngineError(
            "initialize() inside `with zeroengine.meta_init():`: only the model is to be built there. Leave the `with` "
            "first."
        )


def check_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``ZeroEngineError`` if an optimizer already holds states of parameters that have no values yet."""
    if any(t.is_meta for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)):
        raise ZeroEngineError(
            f"{type(optimizer).__name__} keeps state from its construction on, here of parameters without memory. "
            "Build the model without meta_init() for it."
        )


def initialize_meta_parameters(model: nn.Module) -> None:
    """Give traces to parameters, and values to buffers, that are on the meta device and have none.

    The ``reset_parameters`` methods of their modules run for this, children first. They draw from the random
    generators.

    Raises:
        ZeroEngineError: A parameter has no module with such a method, or autograd has a graph of it.
    """
    # A graph refers to the parameter's old tensor, and a backward through it would not reach the new one.
    in_graph = [name for name, p in model.named_parameters() if p.is_meta and has_graph(p)]
    if in_graph:
        raise ZeroEngineError(
            f"autograd has a graph or a gradient of parameters on the meta device: {listed(in_graph, NUM_SHOWN)}. "
            "Drop what was computed with them, such as outputs of the model, before initialize()."
        )
    # Parameters with a trace come from ``meta_init`` and get their values from it.
    params = {p: name for name, p in model.named_parameters() if p.is_meta and trace_of(p) is None}
    buffers = [
        (module, key, buffer, f"{prefix}.{key}" if prefix else key)
        for prefix, module in model.named_modules()
        for key, buffer in buffers_of(module).items()
        if buffer is not None and buffer.is_meta
    ]
    if not params and not buffers:
        return
    on_meta = {buffer: name for _, _, buffer, name in buffers}
    recorder = Recorder(CACHE_BYTES)
    recorder.start()
    try:
        for param, name in params.items():
            swap_data(param, torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="cpu"))
            recorder.watch(param, name)
        # One new buffer for each old one, also where several modules share it.
        cpu_buffers = {b: torch.empty_strided(b.shape, b.stride(), dtype=b.dtype, device="cpu") for b in on_meta}
        for module, key, buffer, _ in buffers:
            buffers_of(module)[key] = cpu_buffers[buffer]
        new_tensors = {*params, *cpu_buffers.values()}
        for module in _children_first(model, set()):
            reset = getattr(module, "reset_parameters", None) or getattr(module, RESET_PARAMETERS, None)
            tensors = [*module.parameters(), *module.buffers()]
            # A module that also holds values of its own is left alone: resetting it would overwrite them.
            if reset is not None and tensors and new_tensors.issuperset(tensors):
                reset()
        # A module may have a ``reset_parameters`` that leaves some of its parameters out.
        uninitialized = [name for param, name in params.items() if recorder.is_uninitialized(param)]
        uninitialized += [name for buffer, name in on_meta.items() if recorder.is_uninitialized(cpu_buffers[buffer])]
    finally:
        recorder.finish()
    if not uninitialized:
        return
    for param, name in params.items():
        if name in uninitialized:
            # Its trace would give uninitialized memory.
            take_trace(param)
    # The model is left as it was.
    for module, key, buffer, _ in buffers:
        buffers_of(module)[key] = buffer
    raise ZeroEngineError(
        f"on the meta device and without values: {listed(uninitialized, NUM_SHOWN)}. Their modules have no "
        "reset_parameters() that gives some. Build the model inside `with zeroengine.meta_init():` instead of "
        "torch.device('meta'); where weights will be loaded, `with zeroengine.meta_init(values=False):`, and then "
        "engine.load_weights(path)."
    )


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module
