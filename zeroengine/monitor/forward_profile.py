"""Profile one forward by module: parameters, FLOPs and time, for the section ``flops_profiler`` of the configuration.

[Note: Two forwards]
Counting operations slows a forward down, so they are counted in one forward and the next one is timed. With batches of
different sizes the rates are as far off as the sizes are.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroengine.config.sinks import FlopsProfile
from zeroengine.monitor.flops import ForwardFlops, is_anything_compiled
from zeroengine.monitor.profile_table import ModuleProfile, ProfiledRank, profile_table
from zeroengine.monitor.sinks.log_folder import LogFolder
from zeroengine.monitor.timer import clock_of
from zeroengine.utils.files import replace_file
from zeroengine.utils.torch_internals import COMPILED_CALL, COMPILED_MODULE, dispatch_mode

log = logging.getLogger("zeroengine")


class ForwardProfiler:
    """Profiles the first forward after ``profile_step`` steps, and prints a table.

    Args:
        model: The model.
        section: The section of the configuration.
        units: The names of the units, which the table marks.
        rank: What the table says of this rank.
        device: The device that the model computes on.
    """

    def __init__(
        self, model: nn.Module, section: FlopsProfile, units: Collection[str], rank: ProfiledRank, device: torch.device
    ) -> None:
        self._section, self._units, self._rank = section, units, rank
        path = Path(section.output_file or "").absolute()
        self._folder = LogFolder(f"flops_profiler {path.name}", path.parent) if section.output_file else None
        self._clock = clock_of(device)
        self._model = model
        self._modules = dict(_profiled_modules(model))
        self._is_compiled = any(map(_is_compiled, model.modules()))
        self._flops: dict[str, int] | None = None
        self._has_ended = not self._modules
        if self._has_ended:
            log.warning("flops_profiler: the whole model is compiled, so no module has a forward that could be timed")

    def observe(self, num_steps: int) -> AbstractContextManager[None]:
        """Return a context for a forward of training, which measures it if it is one of the two.

        Enter it in the model's last forward pre-hook, or around the call of a model without other hooks.

        Args:
            num_steps: The steps so far. A run that resumes behind the step is not profiled.
        """
        step = self._section.profile_step
        if self._has_ended:
            return contextlib.nullcontext()
        if self._flops is None:
            # Compiled functions would compile again to be counted, and compute with other kernels.
            if self._is_compiled or is_anything_compiled():
                self._flops = dict.fromkeys(self._modules, 0)
                return contextlib.nullcontext()
            return self._count() if num_steps == max(step - 1, 0) else contextlib.nullcontext()
        # Another count, such as the monitor's, would be timed as well.
        is_counted = isinstance(dispatch_mode(), ForwardFlops)
        return self._time(num_steps) if num_steps >= step and not is_counted else contextlib.nullcontext()

    @contextlib.contextmanager
    def _count(self) -> Iterator[None]:
        """Count the operations of every module, those of its parts included."""
        flops = dict.fromkeys(self._modules, 0)
        before: dict[str, list[int]] = {name: [] for name in self._modules}
        with ForwardFlops() as counter:

            def begin(name: str) -> None:
                before[name].append(counter.total)

            def end(name: str) -> None:
                flops[name] += counter.total - before[name].pop()

            with self._hooked(begin, end):
                yield
        self._flops = flops

    @contextlib.contextmanager
    def _time(self, num_steps: int) -> Iterator[None]:
        """Time every module, and print the table."""
        began: dict[str, list[Any]] = {name: [] for name in self._modules}
        timed: dict[str, list[tuple[Any, Any]]] = {name: [] for name in self._modules}

        def begin(name: str) -> None:
            began[name].append(self._clock.now())

        def end(name: str) -> None:
            timed[name].append((began[name].pop(), self._clock.now()))

        with self._hooked(begin, end):
            yield
        self._has_ended = True
        assert self._flops is not None
        # This is the only place that waits for a GPU, once in a run, since the user asked for it.
        profiles = [
            ModuleProfile(
                name,
                type(module).__name__,
                sum(param.numel() for param in module.parameters()),
                self._flops[name],
                sum(self._clock.wait_seconds(*moments) for moments in timed[name]),
                name in self._units,
            )
            for name, module in self._modules.items()
        ]
        self._publish(profile_table(profiles, self._section, self._rank, num_steps))

    @contextlib.contextmanager
    def _hooked(self, begin: Any, end: Any) -> Iterator[None]:
        """Call ``begin`` and ``end`` with the name of each module whose forward begins and ends."""
        handles: list[Any] = []
        try:
            for name, module in self._modules.items():
                # Hooks that are registered on the model now would not all run in the forward that has begun.
                if module is self._model:
                    continue
                # After the gatherer's hooks and before those that release, so that a unit's own wait does not count.
                handles.append(module.register_forward_pre_hook(lambda *_, name=name: begin(name)))
                handles.append(module.register_forward_hook(lambda *_, name=name: end(name), prepend=True))
            root = next((name for name, module in self._modules.items() if module is self._model), None)
            if root is not None:
                begin(root)
            yield
            if root is not None:
                end(root)
        finally:
            for handle in handles:
                handle.remove()

    def _publish(self, table: str) -> None:
        if self._folder is None:
            print(table, flush=True)
            return
        path = self._folder.path / Path(str(self._section.output_file)).name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, table + "\n")
        except OSError as error:
            log.warning("flops_profiler.output_file %s cannot be written, so it is printed: %s", path, error)
            print(table, flush=True)


def _profiled_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by name, without scripted and compiled ones, whose hooks are compiled, and all inside of them."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or isinstance(module, torch.jit.ScriptModule) or _is_compiled(module):
            return
        seen.add(module)
        yield name, module
        for child_name, child in module.named_children():
            yield from walk(child, f"{name}.{child_name}".lstrip("."))

    yield from walk(model, "")


def _is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` or ``torch.compile(module)`` compiles its forward."""
    return getattr(module, COMPILED_CALL, None) is not None or hasattr(module, COMPILED_MODULE)
