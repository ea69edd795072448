"""Models that are never whole anywhere: built without memory, given their values unit by unit in ``initialize``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroengine.config import Config, load
from zeroengine.deferred_init.dispatch_modes import is_recording
from zeroengine.deferred_init.parameter import has_graph, swap_data, take_trace, trace_of
from zeroengine.deferred_init.recorder import Recorder
from zeroengine.errors import ZeroEngineError
from zeroengine.migration.messages import explains_arguments

log = logging.getLogger("zeroengine")

CACHE_BYTES = 1 << 26  # bytes of parameters in memory at a time, beside those in use
SHOWN = 5


@explains_arguments
@contextlib.contextmanager
def meta_init(config: str | Path | Mapping[str, Any] | Config | None = None, *, values: bool = True) -> Iterator[None]:
    """Modules that are built inside have parameters without memory; ``initialize`` gives them their values.

    They are the bits of an ordinary build with the same seed, and random generators are afterwards where that build
    would have left them: everything inside is computed as ever, but of parameters only the way to their values is kept.
    After the ``with`` they are on the meta device, the same objects. ``initialize`` runs each one's way again, straight
    into the memory that it trains in. Buffers are ordinary tensors all along.

        with zeroengine.meta_init():
            model = Model()
        engine = zeroengine.initialize(model, config="zero3.json")

    It works on what this thread does. Parameters whose values cannot be followed (those that numpy wrote, say) keep
    their memory, and a warning names them.

    Args:
        config: as of ``initialize``, checked right away; None is not.
        values: False where weights will be loaded: no values are kept or made, parameters start as zeros, and until
            ``engine.load_weights`` or ``engine.load_checkpoint`` has filled all of them a forward is an error.

    Raises:
        ZeroEngineError: inside of another ``meta_init``.
        ConfigError: ``config`` cannot be honoured.
    """
    if config is not None:
        load(config)
    recorder = Recorder(CACHE_BYTES, values)
    recorder.start()
    kept: list[tuple[str, int, str]] = []
    try:
        yield
    finally:
        kept += recorder.finish()
    if kept:
        log.warning("%s", _notice(kept))


def _notice(kept: Sequence[tuple[str, int, str]]) -> str:
    """What keeps memory, the largest first."""
    shown = [f"{name} ({nbytes:,} bytes): {why}" for name, nbytes, why in sorted(kept, key=lambda k: -k[1])]
    more = f"; and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    total = sum(nbytes for _, nbytes, _ in kept)
    return f"meta_init(): {total:,} bytes of parameters stay in memory. {'; '.join(shown[:SHOWN])}{more}"


def check_not_recording() -> None:
    """
    Raises:
        ZeroEngineError: this is inside of a ``meta_init``.
    """
    if is_recording():
        raise ZeroEngineError(
            "initialize() inside `with zeroengine.meta_init():`: only the model is to be built there. Leave the `with` "
            "first."
        )


def check_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        ZeroEngineError: it has made states of parameters that have no values yet.
    """
    if any(t.is_meta for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)):
        raise ZeroEngineError(
            f"{type(optimizer).__name__} keeps state from its construction on, here of parameters without memory. "
            "Build the model without meta_init() for it."
        )


def initialize_meta_parameters(model: nn.Module) -> None:
    """Finds a way to the values of parameters and buffers that are on the meta device and have none.

    By the ``reset_parameters`` of their modules, which draw from the random generators, children first.

    Raises:
        ZeroEngineError: some have no such module, or autograd has a graph of some.
    """
    held = [name for name, p in model.named_parameters() if p.is_meta and has_graph(p)]
    if held:
        raise ZeroEngineError(
            f"autograd has a graph or a gradient of parameters on the meta device: {', '.join(held[:SHOWN])}. "
            "Drop what was computed with them, such as outputs of the model, before initialize()."
        )
    params = {p: name for name, p in model.named_parameters() if p.is_meta and trace_of(p) is None}
    places = [
        (module, key, f"{prefix}.{key}" if prefix else key)
        for prefix, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    if not params and not places:
        return
    on_meta: dict[Any, str] = {module._buffers[key]: name for module, key, name in places}
    recorder = Recorder(CACHE_BYTES)
    recorder.start()
    try:
        for param, name in params.items():
            swap_data(param, torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="cpu"))
            recorder.watch(param, name)
        made = {b: torch.empty_strided(b.shape, b.stride(), dtype=b.dtype, device="cpu") for b in on_meta}
        for module, key, _ in places:
            module._buffers[key] = made[module._buffers[key]]
        blank_buffers = set(made.values())
        for module in _children_first(model, set()):
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            theirs = [*module.parameters(), *module.buffers()]
            new = [t in params or t in blank_buffers for t in theirs]
            if reset is not None and theirs and all(new):
                reset()
        blank = [name for param, name in params.items() if recorder.is_blank(param)]
        blank += [name for buffer, name in on_meta.items() if recorder.is_blank(made[buffer])]
    finally:
        recorder.finish()
    if not blank:
        return
    for param, name in params.items():
        if name in blank:
            take_trace(param)
    was = {new: old for old, new in made.items()}
    for module, key, _ in places:
        module._buffers[key] = was[module._buffers[key]]
    more = f" and {len(blank) - SHOWN} more" if len(blank) > SHOWN else ""
    raise ZeroEngineError(
        f"on the meta device and without values: {', '.join(blank[:SHOWN])}{more}. Their modules have no "
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
