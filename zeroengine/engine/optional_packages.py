"""What the engine takes from packages around the core, which are imported where a configuration asks for them.

Nothing else in the core imports one of them, so the core trains without them (``tests/test_core_stands_alone.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroengine.checkpoint.newest import SnapshotStore
from zeroengine.comm.group import Group
from zeroengine.config import Config
from zeroengine.engine.setup import EngineSetup
from zeroengine.errors import ZeroEngineError
from zeroengine.memory.free_memory import FreeMemory
from zeroengine.memory.state_memory import StateMemory


def choose_states(state_memory: StateMemory, free: FreeMemory) -> tuple[Config, str]:
    """Return the configuration with a choice for every "auto". See ``plan.search.automatic``.

    Raises:
        ZeroEngineError: The configuration leaves no choice, or the planner is not there.
    """
    with _asked_for(
        'zero_optimization: "auto"', "zeroengine.plan", 'Write a stage, and "none", "cpu" or "nvme" as devices.'
    ):
        from zeroengine.plan.search import automatic
    return automatic.choose_states(state_memory, free)


def open_snapshots(setup: EngineSetup, group: Group) -> SnapshotStore | None:
    """Return what takes snapshots in memory; None if that is not configured. A collective.

    Raises:
        ZeroEngineError: Snapshots cannot be taken, or the package for them is not there.
    """
    if setup.config.snapshots.every_seconds is None:
        return None
    with _asked_for("snapshots.every_seconds", "zeroengine.recovery", "Write null, and save checkpoints."):
        from zeroengine.recovery.snapshots import MemorySnapshots
    states = setup.state_memory.requirement(setup.state_memory.current()).states
    snapshots = MemorySnapshots(setup.config, group, states.snapshot)
    setup.undo.callback(snapshots.close)
    return snapshots


def split_by_own_plan(
    model: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh, num_ranks: int, **options: bool
) -> dict[str, str]:
    """Split the layers and the experts of a model by the plan of its library. See ``integrations.own_plan``.

    Raises:
        ZeroEngineError: The model has no plan, or the package that knows its library is not there.
    """
    remedy = "Pass a plan: zeroengine.parallelize(model, {...}, size=2)."
    with _asked_for("tensor_parallel.autotp_size", "zeroengine.integrations", remedy):
        from zeroengine.integrations import own_plan
    return own_plan.split_by_own_plan(model, mesh, expert_mesh, num_ranks, **options)


@contextmanager
def _asked_for(setting: str, package: str, remedy: str) -> Iterator[None]:
    """Make an import error of ``package``, which ``setting`` asks for, say what to write instead."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(package):
            raise
        raise ZeroEngineError(f"{setting} needs the package {package}, which is not installed. {remedy}") from error
