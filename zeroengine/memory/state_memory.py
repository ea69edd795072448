"""Refuse at ``initialize`` what cannot fit into free memory, and advise where memory ran out.

Every rank takes the same decision: predictions are equal on all ranks, and ``FreeMemory`` is that of the rank with the
least.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch

from zeroengine.config import Config
from zeroengine.config.fields import CHOSEN
from zeroengine.errors import ZeroEngineError
from zeroengine.memory.free_memory import UNKNOWN_BYTES, FreeMemory
from zeroengine.memory.optimizer_state import OptimizerProbe
from zeroengine.memory.state_bytes import BUFFERS, STATES, RankTopology, StateBytes, predict_states
from zeroengine.memory.state_choice import SECTIONS, StateChoice
from zeroengine.memory.unit_bytes import value_bytes
from zeroengine.optim.choice import can_offload
from zeroengine.optim.elementwise import check_looks_at_one_parameter
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.degrees import STAGES
from zeroengine.utils.formats import format_byte_size

# Advice is to save at least this share of the bytes.
LEAST_SAVING = 0.05
# A message names so many alternatives.
NUM_SHOWN = 2


@dataclass(frozen=True)
class MemoryRequirement:
    """Bytes that one rank takes beyond what it holds before ``initialize``.

    Attributes:
        states: The prediction.
        device: Bytes of the device's memory.
        host: Bytes of CPU memory, if the device is a GPU.
        disk: Bytes of files.
    """

    states: StateBytes
    device: int
    host: int
    disk: int

    def fits(self, free: FreeMemory, share: float = 1.0) -> bool:
        """Return whether it fits, into a share of the free device memory."""
        return self.device <= free.device * share and self.host <= free.host and self.disk <= free.disk

    def shortage(self, free: FreeMemory, device: str) -> str:
        """Return what does not fit, in words."""
        shares = f", its share of what {free.ranks_per_host} ranks of a machine have"
        note = f"{shares if device == 'cpu' and free.ranks_per_host > 1 else ''} (rank {free.scarcest_rank})"
        needs = (
            (self.device, free.device, f"of a rank's {'GPU' if device == 'cuda' else 'CPU'} memory", note),
            (self.host, free.host, "of CPU memory a rank", ""),
            (self.disk, free.disk, "of disk a rank", ""),
        )
        return "; and ".join(
            f"{format_byte_size(need)} {where}, and {format_byte_size(size)} are free{note}"
            for need, size, where, note in needs
            if need > size
        )

    def breakdown(self) -> str:
        """Return the bytes of the device by state, in words."""
        rows = [(name, self.states.device[name]) for name in (*STATES, *BUFFERS)]
        rows.append(("more for a moment", self.states.peak_device_extra))
        return ", ".join(f"{name} {format_byte_size(nbytes)}" for name, nbytes in rows if nbytes)


class StateMemory:
    """The memory that states take with each choice, for one model, configuration and group of ranks.

    Args:
        plans: The units.
        config: The resolved configuration; its stage and devices may be "auto".
        topology: The ranks, the device and the transport.
        optimizer: The optimizer over the model's parameters; None: that of the configuration.

    Attributes:
        plans: The units.
        config: The configuration.
        topology: The ranks, the device and the transport.
        optimizer: The optimizer.
    """

    def __init__(
        self,
        plans: Sequence[UnitPlan],
        config: Config,
        topology: RankTopology,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.plans, self.config, self.topology = plans, config, topology
        # One object serves all predictions: after ``initialize`` the caller's optimizer has no state to look at.
        self._probe = OptimizerProbe(optimizer, config, plans)
        self.optimizer = self._probe.optimizer
        self._requirements: dict[StateChoice, MemoryRequirement] = {}

    def with_config(self, config: Config) -> StateMemory:
        """Return that of another configuration, whose states have equal sizes."""
        other = copy.copy(self)
        other.config = config
        return other

    @property
    def is_automatic(self) -> bool:
        """Whether anything is left to choose."""
        zero = self.config.zero_optimization
        return CHOSEN in (zero.stage, zero.offload_optimizer.device, zero.offload_param.device)

    def nvme_paths(self) -> set[str]:
        """Return the folders that the configuration names for states."""
        sections = (getattr(self.config.zero_optimization, name) for name in SECTIONS)
        return {section.nvme_path for section in sections if section.nvme_path}

    def current(self) -> StateChoice:
        """Return the configured choice, in which nothing is left open."""
        zero = self.config.zero_optimization
        return StateChoice(int(zero.stage), zero.offload_optimizer.device, zero.offload_param.device)

    def requirement(self, choice: StateChoice) -> MemoryRequirement:
        """Return what a choice takes."""
        if choice not in self._requirements:
            states = predict_states(self.plans, choice.applied(self.config), self.topology, self._probe)
            # The model's own values are counted as taken already, and are freed while the units are made.
            values = sum(value_bytes(plan, self.topology.device) for plan in self.plans)
            device = states.device_total + states.peak_device_extra - states.shared_pages - values
            self._requirements[choice] = MemoryRequirement(states, device, states.cpu_total, states.disk_files)
        return self._requirements[choice]

    @cached_property
    def _serves_stages(self) -> bool:
        """Whether the optimizer works where its states are partitioned."""
        try:
            check_looks_at_one_parameter(self.optimizer)
        except ZeroEngineError:
            return False
        return True

    def choices(self, stage: int | str, optimizer: str, param: str, *, any_disk: bool) -> list[StateChoice]:
        """Return the choices that the arguments leave open by "auto", the cheapest first.

        Args:
            stage: A stage, or "auto".
            optimizer: A device of the optimizer's states, or "auto".
            param: A device of the parameter shards, or "auto".
            any_disk: Whether a disk may be chosen for which the configuration names no folder.
        """

        def places(place: str, section: str) -> list[str]:
            """Return the devices that ``place`` allows for the states of ``section``."""
            if place != CHOSEN:
                return [place]
            if not can_offload(self.optimizer):
                return ["none"]
            path = getattr(self.config.zero_optimization, section).nvme_path
            # On a machine without a GPU, CPU memory is where states are anyway.
            return ["none"] + ["cpu"] * (self.topology.device == "cuda") + ["nvme"] * bool(any_disk or path)

        stages = tuple(STAGES) if self._serves_stages or self.topology.world_size == 1 else (0,)
        choices = [
            StateChoice(s, o, p)
            for s in (stages if stage == CHOSEN else (int(stage),))
            for o in places(optimizer, "offload_optimizer")
            for p in places(param, "offload_param")
            # Parameters are partitioned, and so released between uses, at stage 3 alone.
            if p == "none" or s == 3
        ]
        return sorted(choices, key=lambda choice: choice.cost)

    def others(self, current: StateChoice) -> list[StateChoice]:
        """Return all choices but ``current``, those that change the least first."""
        everything = self.choices(CHOSEN, CHOSEN, CHOSEN, any_disk=True)
        others = [choice for choice in everything if choice != current]
        return sorted(others, key=lambda choice: (current.num_changes(choice), choice.cost))

    def describe(self, choice: StateChoice) -> str:
        """Return what to write for a choice, and what it takes, in words."""
        requirement = self.requirement(choice)
        places = ((requirement.device, "a rank"), (requirement.host, "of CPU memory"), (requirement.disk, "of disk"))
        numbers = [
            f"{format_byte_size(max(nbytes, 0))} {where}" for nbytes, where in places if nbytes or where == "a rank"
        ]
        return f"{choice.written(self.config)} takes {' and '.join(numbers)}"

    def check(self, free: FreeMemory) -> None:
        """Check that the configuration, in which nothing is "auto", fits.

        Raises:
            ZeroEngineError: It does not. The message has the numbers, and the nearest choices that fit.
        """
        current = self.current()
        requirement = self.requirement(current)
        if requirement.fits(free):
            return
        # Nothing is known of a disk for which the configuration names no folder.
        known = free if self.nvme_paths() else dataclasses.replace(free, disk=UNKNOWN_BYTES)
        fitting = (self.describe(choice) for choice in self.others(current) if self.requirement(choice).fits(known))
        if shown := list(islice(fitting, NUM_SHOWN)):
            remedy = f"What fits: {', or '.join(shown)}"
        else:
            remedy = self._say_nothing_fits(free)
        raise ZeroEngineError(
            f"the model does not fit: {current.in_words()} takes {requirement.shortage(free, self.topology.device)}. "
            f"These are {requirement.breakdown()}; activations come on top. {remedy}. "
            'With "memory_check": "warn" it is tried.'
        )

    def _say_nothing_fits(self, free: FreeMemory) -> str:
        choice = min(
            self.choices(CHOSEN, CHOSEN, CHOSEN, any_disk=True), key=lambda option: self.requirement(option).device
        )
        text = "No stage and no offload fits on these machines"
        if choice != self.current():
            text += f": {self.describe(choice)}, the least"
        unit = max(self.plans, key=lambda plan: plan.numel)
        unit_bytes = unit.numel * unit.dtype.itemsize
        if unit_bytes > free.device:
            return (
                f"{text}. Even unit {unit.name} alone, {format_byte_size(unit_bytes)} where it is gathered, is too "
                'large: cut the model into smaller units ("units": ["layers.*"]), or take devices with more memory'
            )
        return f"{text}. zero-plan --nodes N says whether more machines suffice"

    def advice(self) -> tuple[list[str], list[str]]:
        """Return stages, and offloads, that take less of the device than the configuration, with numbers."""
        current = self.current()
        now = self.requirement(current).states.device_total
        stages: list[str] = []
        # By section, the cheapest place that would help.
        offloads: dict[str, str] = {}
        for choice in self.others(current):
            total = self.requirement(choice).states.device_total
            if total > now * (1 - LEAST_SAVING) or current.num_changes(choice) > 1:
                continue
            less = f"{format_byte_size(total)} of states and buffers a rank instead of {format_byte_size(now)}"
            text = f"{choice.written(self.config)} ({less})"
            section = next((name for name in SECTIONS if getattr(choice, name) != getattr(current, name)), None)
            if section is None:
                stages.append(text)
            else:
                offloads.setdefault(section, text)
        return stages[:NUM_SHOWN], list(offloads.values())


def fit_configuration(
    memory: StateMemory,
    measure: Callable[[Collection[str]], FreeMemory],
    choose: Callable[[StateMemory, FreeMemory], tuple[Config, str]],
) -> tuple[StateMemory, str | None]:
    """Fill in what the configuration leaves to ``initialize``, and check that it fits as ``memory_check`` says.

    Args:
        memory: What states take with the resolved configuration.
        measure: Returns the free memory, and the free space of folders; a collective.
        choose: Returns the configuration with a choice for every "auto", and what the user should read.

    Returns:
        What states take with a configuration in which nothing is "auto", and what the user should read, if anything.

    Raises:
        ZeroEngineError: It does not fit, and ``memory_check`` is "error".
    """
    notice = None
    if memory.config.memory_check == "off" and not memory.is_automatic:
        return memory, None
    free = measure(memory.nvme_paths())
    if memory.is_automatic:
        config, notice = choose(memory, free)
        memory = memory.with_config(config)
    if memory.config.memory_check != "off":
        try:
            memory.check(free)
        except ZeroEngineError as error:
            if memory.config.memory_check == "error":
                raise
            notice = f"{notice} {error}" if notice else str(error)
    return memory, notice
