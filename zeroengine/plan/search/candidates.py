"""Enumerate the settings that a model could be trained with, and put their estimates in order.

A setting is a stage, degrees, the places of the states, and whether activations are checkpointed. A candidate is a
setting with a micro-batch size and a number of micro-steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple, cast

from zeroengine.memory.state_bytes import StateBytes
from zeroengine.plan.search.degree_choices import DEFAULT, DEGREES, STAGE, has_second_copy
from zeroengine.plan.seconds.machine import Machine
from zeroengine.plan.seconds.step_time import StepTime
from zeroengine.plan.trace.activations import MicroStep

Place = Literal["none", "cpu", "nvme"]
PLACES: tuple[Place, ...] = ("none", "cpu", "nvme")
# The folder that a configuration gets where none was given.
NVME_PATH = "/local_nvme"
# The share of a memory that stays free with headroom. The peak of a process is predicted within this share.
HEADROOM = 0.07
# Two rates that differ by less than this count as equal, and the simpler candidate comes first.
EQUAL_RATES = 0.01


class ZeroSetting(NamedTuple):
    """What candidates with different micro-batches share, from the simplest to the most involved."""

    stage: int
    offload_param: Place
    offload_optimizer: Place
    checkpointing: bool
    degrees: str = DEFAULT  # a name of ``degree_choices``
    sequence_parallel: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1

    @property
    def ranks_per_sample(self) -> int:
        """The number of ranks that compute each sample together."""
        return self.sequence_parallel * self.tensor_parallel

    @property
    def title(self) -> str:
        """Return the setting in words, such as ``stage 3, optimizer on CPU``."""
        names = {"cpu": "in CPU memory", "nvme": "on NVMe"}
        moved = {"optimizer": self.offload_optimizer, "parameters": self.offload_param}
        parts = [f"{state} {names[place]}" for state, place in moved.items() if place != "none"]
        degrees = [] if self.degrees == DEFAULT else [f"degrees {self.degrees}"]
        degrees += [f"{self.sequence_parallel} ranks a sample"] * (self.sequence_parallel > 1)
        degrees += [f"layers over {self.tensor_parallel} ranks"] * (self.tensor_parallel > 1)
        degrees += [f"experts over {self.expert_parallel} ranks"] * (self.expert_parallel > 1)
        return ", ".join([f"stage {self.stage}", *degrees, *parts, *["checkpointing"] * self.checkpointing])


@dataclass(frozen=True)
class PlanCandidate:
    """One way to train a model.

    Attributes:
        stage: The ZeRO stage.
        offload_optimizer: Where master weights, moments and summed gradients live. "none": on the device.
        offload_param: Where parameter shards live.
        micro_batch: Samples of one micro-step of a rank.
        accumulation: Micro-steps of one step.
        checkpointing: Whether the activations of each unit are computed again in backward. The model does this: no
            configuration key switches it on.
        degrees: The name of the degrees; see ``degree_choices``.
        sequence_parallel: The number of ranks that share each sample.
        tensor_parallel: The number of ranks that layers are split over.
        expert_parallel: The number of ranks that hold all experts together.
    """

    stage: int
    offload_optimizer: Place
    offload_param: Place
    micro_batch: int
    accumulation: int
    checkpointing: bool
    degrees: str = DEFAULT
    sequence_parallel: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1

    def samples(self, world_size: int) -> int:
        """Return the samples of a step over all ranks."""
        return self.micro_batch * self.accumulation * world_size // self.setting.ranks_per_sample

    @property
    def setting(self) -> ZeroSetting:
        """Return the candidate without its batch sizes."""
        return ZeroSetting(*(getattr(self, name) for name in ZeroSetting._fields))

    def changes(self) -> dict[str, Any]:
        """Return the keys of a configuration that make it this candidate, as nested dicts."""
        zero: dict[str, Any] = {"stage": self.stage}
        for section, place in (("offload_optimizer", self.offload_optimizer), ("offload_param", self.offload_param)):
            zero[section] = {"device": place} | ({"nvme_path": NVME_PATH} if place == "nvme" else {})
        if self.degrees != DEFAULT:
            zero["degrees"] = dict(DEGREES[self.degrees])
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": zero,
            **({"sequence_parallel_size": self.sequence_parallel} if self.sequence_parallel > 1 else {}),
        }


@dataclass(frozen=True)
class Estimate:
    """What a candidate takes and gives. Sizes are bytes.

    Attributes:
        candidate: The candidate.
        states: The states of one rank.
        micro: Activations and FLOPs of one micro-step of a rank. None: the model's inputs are unknown.
        overhead_bytes: The device context, the allocator's share, and the model's buffers, of one rank.
        device_total: The most that a rank holds in its device's memory at one time.
        host_total: The most that the ranks of a node hold in CPU memory. 0 where the device is the CPU.
        disk_total: What the ranks of a node hold on disk.
        headroom: What stays free of the memory that is the scarcest by share. Negative: what lacks.
        time: The time of a step. None: the model's inputs are unknown.
        samples: Samples of a step, over all ranks.
        fits: Whether every memory suffices.
        has_headroom: Whether every memory suffices with a share of ``HEADROOM`` to spare.
        reasons: Which memory does not suffice, and by how much.
    """

    candidate: PlanCandidate
    states: StateBytes
    micro: MicroStep | None
    overhead_bytes: int
    device_total: int
    host_total: int
    disk_total: int
    headroom: int
    time: StepTime | None
    samples: int
    fits: bool
    has_headroom: bool
    reasons: tuple[str, ...]

    @property
    def samples_per_second(self) -> float:
        """Samples per second over all ranks; 0 where the time is unknown."""
        return self.samples / self.time.total if self.time is not None else 0.0


@dataclass(frozen=True)
class Choices:
    """The values that candidates take. What a configuration fixes has one value.

    Attributes:
        stages: ZeRO stages.
        offload_optimizer: Places of the optimizer's states.
        offload_param: Places of the parameter shards.
        checkpointing: Whether activations are checkpointed.
        micro_batch: The micro-batch size, or None if it is to be chosen.
        accumulation: The number of micro-steps, or None if the batch decides.
        batch: Samples of a step over all ranks, or None.
        degrees: Names of degrees.
        sequence_parallel: Numbers of ranks that share each sample.
        split: The numbers of ranks that layers and experts are split over.
    """

    stages: tuple[int, ...] = (0, 1, 2, 3)
    offload_optimizer: tuple[Place, ...] = PLACES
    offload_param: tuple[Place, ...] = PLACES
    checkpointing: tuple[bool, ...] = (False, True)
    micro_batch: int | None = None
    accumulation: int | None = None
    batch: int | None = None
    degrees: tuple[str, ...] = (DEFAULT,)
    sequence_parallel: tuple[int, ...] = (1,)
    split: tuple[int, int] = (1, 1)


def choices_of(
    tree: Mapping[str, Any], machine: Machine, *, can_offload: bool = True, degrees: tuple[str, ...] = (DEFAULT,)
) -> Choices:
    """Return what a configuration leaves open on a machine.

    Args:
        tree: The keys that are written in the configuration. "auto" and absent keys are open.
        machine: The machine. Without a disk nothing is put on NVMe, and on CPU ranks nothing into CPU memory.
        can_offload: Whether the optimizer can be offloaded.
        degrees: Names of the degrees to compare.
    """
    zero = tree.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    places = tuple(
        place
        for place in PLACES
        if place == "none"
        or (place == "cpu" and machine.device == "cuda")
        or (place == "nvme" and machine.disk_bytes > 0)
    )

    def open_places(section: str) -> tuple[Place, ...]:
        written = zero.get(section, {})
        device = "none" if written is None else written.get("device", "auto")
        return (cast(Place, device),) if device != "auto" else places

    def size(key: str) -> int | None:
        value = tree.get(key)
        return value if isinstance(value, int) else None

    # A second copy of the parameters on the device contradicts parameters that are away.
    has_second_copy = bool((zero.get("degrees") or {}).get("secondary_parameters"))
    stage = zero.get("stage", "auto")
    return Choices(
        stages=(stage,) if isinstance(stage, int) else (0, 1, 2, 3),
        offload_optimizer=open_places("offload_optimizer") if can_offload else ("none",),
        offload_param=open_places("offload_param") if can_offload and not has_second_copy else ("none",),
        micro_batch=size("train_micro_batch_size_per_gpu"),
        accumulation=1 if tree.get("gradient_accumulation_steps") == "manual" else size("gradient_accumulation_steps"),
        batch=size("train_batch_size"),
        degrees=degrees,
    )


def settings_of(choices: Choices, world_size: int) -> Iterator[ZeroSetting]:
    """Yield the settings that ``choices`` leave, the simplest first, without those that equal another one.

    One rank has nothing to partition, so its stages 1 to 3 equal stage 0 unless parameters are offloaded. Parameters
    are offloaded together with the optimizer's states, which are larger and are used less often. Degrees that spare the
    network take memory for it, so they are compared with offloaded parameters only where these are given.
    """
    for stage, degrees, param, optimizer, checkpointing in product(
        choices.stages, choices.degrees, choices.offload_param, choices.offload_optimizer, choices.checkpointing
    ):
        is_free = len(choices.offload_param) > 1 or len(choices.offload_optimizer) > 1
        if param != "none" and (stage != 3 or (is_free and PLACES.index(param) > PLACES.index(optimizer))):
            continue
        if world_size == 1 and stage > 0 and len(choices.stages) > 1 and param == "none":
            continue
        if degrees != DEFAULT and (
            stage != STAGE or (param != "none" and (len(choices.offload_param) > 1 or has_second_copy(degrees)))
        ):
            continue
        for sharing in choices.sequence_parallel:
            yield ZeroSetting(stage, param, optimizer, checkpointing, degrees, sharing, *choices.split)


def micro_batches(choices: Choices, num_groups: int, largest: int, largest_with_headroom: int) -> list[int]:
    """Return the micro-batch sizes to compare: powers of two, the largest that fits, and that with headroom.

    Args:
        choices: A given micro-batch is the only one; of a given batch, each size divides a group's share.
        num_groups: The number of ranks, or of groups of them that share samples.
        largest: The largest micro-batch that fits. At least 1, even if that does not fit.
        largest_with_headroom: The largest that fits with headroom, or 0.
    """
    if choices.batch is not None and choices.accumulation is not None:
        return [choices.batch // (num_groups * choices.accumulation)]
    if choices.micro_batch is not None:
        return [choices.micro_batch]
    sizes = {1 << n for n in range(largest.bit_length())} | {largest, largest_with_headroom}
    if choices.batch is not None:
        share = choices.batch // num_groups
        allowed = [d for d in range(1, min(share, largest) + 1) if share % d == 0]
        sizes = {max(d for d in allowed if d <= max(size, 1)) for size in sizes}
    return sorted(sizes - {0})


def order_of(setting: ZeroSetting) -> tuple[int, int, int, int, int, int, bool, int]:
    """Return the place of a setting among others: the fields as numbers, the simplest values first."""
    return (
        setting.stage,
        PLACES.index(setting.offload_param),
        PLACES.index(setting.offload_optimizer),
        setting.sequence_parallel,
        setting.tensor_parallel,
        setting.expert_parallel,
        setting.checkpointing,
        list(DEGREES).index(setting.degrees),
    )


def rank_estimates(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimates with the best first: those with headroom, those that fit, and those that do not fit.

    Among those that fit, the fastest comes first; of equally fast ones, the simplest with the smallest micro-batch.
    Those that do not fit are in the order of what lacks.
    """

    def key(estimate: Estimate) -> tuple[Any, ...]:
        rate, candidate = estimate.samples_per_second, estimate.candidate
        if not estimate.fits:
            return (2, -estimate.headroom, order_of(candidate.setting), candidate.micro_batch)
        # The logarithm sorts rates into classes of nearly equal ones.
        rate_class = round(math.log(rate) / math.log1p(EQUAL_RATES)) if rate else 0
        stage, *places, checkpointing, degrees = order_of(candidate.setting)
        simplicity = (*places, checkpointing, stage, degrees)
        return (int(not estimate.has_headroom), -rate_class, simplicity, candidate.micro_batch)

    return sorted(estimates, key=key)


def shown_estimates(ranked: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimates that a table shows: the best of each setting, without dominated settings.

    A setting is dominated if another one is at least as fast and holds at least as large a micro-batch. The best of
    every stage, of all degrees and of each number of ranks that share samples, layers or experts, and its best without
    offload, are shown in any case, so that they can be compared.

    Args:
        ranked: Estimates in the order of `rank_estimates`.
    """
    fitting = [estimate for estimate in ranked if estimate.fits]
    largest: dict[ZeroSetting, int] = {}
    for estimate in fitting:
        setting = estimate.candidate.setting
        largest[setting] = max(largest.get(setting, 0), estimate.candidate.micro_batch)
    shown: list[Estimate] = []
    has_no_offload = {setting for setting in largest if setting.offload_param == setting.offload_optimizer == "none"}
    for estimate in fitting:
        setting = estimate.candidate.setting
        # The first estimate of a setting is its best.
        dominated = any(largest[other.candidate.setting] >= largest[setting] for other in shown)
        others = [other.candidate.setting for other in shown]
        # These differ in the offload and in checkpointing alone.
        alike = [other for other in others if (other.stage, *other[4:]) == (setting.stage, *setting[4:])]
        is_first = not alike or (setting in has_no_offload and not has_no_offload.intersection(alike))
        if is_first or not dominated:
            shown.append(estimate)
    return shown
