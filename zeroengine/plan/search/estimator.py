"""Estimate candidates on a machine, and search the largest micro-batch that fits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from zeroengine.config import Config, load
from zeroengine.memory.optimizer_state import OptimizerProbe
from zeroengine.memory.snapshot_bytes import copies_of, snapshot_memory_bytes
from zeroengine.memory.state_bytes import RankTopology, StateBytes, predict_states
from zeroengine.partition.cut import UnitPlan
from zeroengine.plan.search.candidates import (
    HEADROOM,
    Choices,
    Estimate,
    PlanCandidate,
    ZeroSetting,
    micro_batches,
    settings_of,
)
from zeroengine.plan.search.scaling import extrapolated, largest, merged
from zeroengine.plan.seconds.machine import Machine
from zeroengine.plan.seconds.step_time import machine_of_slice, predict_step, topology_of
from zeroengine.plan.trace.activations import MicroStep, trace_micro_step
from zeroengine.plan.trace.model_facts import ModelFacts
from zeroengine.plan.trace.operation_trace import MAX_REAL_NUMEL
from zeroengine.runtime.mixed_precision import dtype_of_model
from zeroengine.utils.formats import format_byte_size

# Device memory that a process takes before its first tensor: the CUDA context with its kernels. Measured by Hugging
# Face, "Model training anatomy" (transformers documentation): 1343 MB.
CONTEXT_BYTES = 1343 << 20
# CPU memory of a rank's process without its model: Python, torch and zeroengine. Measured with torch 2.13: 249 MiB.
PROCESS_BYTES = 250 << 20
# The share of activations that the caching allocator holds beside them, in blocks that do not fit the next request.
# An assumption: it depends on the model, and nobody has measured it on a GPU here.
ALLOCATOR_SHARE = 0.03
# The share of activations that glibc holds beside them in freed blocks: 7 to 50 % were measured, the least with large
# activations.
HEAP_SHARE = 0.5
# A larger micro-batch is hardly meant, and would make the search endless where activations are unknown or tiny.
MAX_MICRO_BATCH = 1 << 16
# Traces at these sizes determine those of all larger ones, because bytes and FLOPs grow linearly with the samples.
TRACED_SIZES = (1, 2)
# The longest sequence is searched in steps of so many tokens, from the second number on, in few traces. Positions of
# longer ones would have no values in a trace.
TOKEN_UNIT, FIRST_TOKENS, MAX_TRACES, MAX_TOKENS = 1024, 8192, 8, MAX_REAL_NUMEL - 1024


class Estimator:
    """Estimate candidates for one model on one machine.

    Args:
        model: The model.
        tree: The keys of the configuration that all candidates share.
        machine: The machine.

    Attributes:
        base: A candidate that leaves all to the configuration that all candidates share.
    """

    def __init__(self, model: ModelFacts, tree: Mapping[str, Any], machine: Machine) -> None:
        self.model, self.machine, self._tree = model, machine, tree
        self._data_machine = machine_of_slice(machine, model.split.size)
        self.base = PlanCandidate(
            0, "none", "none", 1, 1, False, tensor_parallel=model.split.size, expert_parallel=model.split.expert_size
        )
        self._buffer_bytes = sum(buffer.nbytes for buffer in model.model.buffers())
        self._configs: dict[PlanCandidate, Config] = {}
        self._states: dict[tuple[Any, ...], StateBytes] = {}

    def tree(self, candidate: PlanCandidate) -> dict[str, Any]:
        """Return the keys of the configuration of a candidate."""
        base = dict(self._tree)
        if (written := base.get("zero_optimization")) and candidate.stage != written.get("stage"):
            # Degrees belong to another stage than that of the candidate.
            base["zero_optimization"] = {key: value for key, value in written.items() if key != "degrees"}
        tree = merged(base, candidate.changes())
        if self._tree.get("gradient_accumulation_steps") == "manual":
            tree["gradient_accumulation_steps"] = "manual"
        elif "train_batch_size" in tree:
            tree["train_batch_size"] = candidate.samples(self.machine.world_size)
        # A section that says nothing but the default would only distract.
        sections = tree["zero_optimization"].items()
        zero = {key: value for key, value in sections if value not in ({"device": "none"}, None)}
        return {**tree, "zero_optimization": zero}

    def config(self, candidate: PlanCandidate) -> Config:
        """Return the resolved configuration of a candidate."""
        if candidate not in self._configs:
            config = load(self.tree(candidate))
            self._configs[candidate] = config.resolve(
                world_size=self.machine.world_size,
                model_dtype=dtype_of_model(self.model.model, config),
                ranks_per_node=self._data_machine.ranks_per_node,
                ranks_per_model=self.model.split.size,
            )
        return self._configs[candidate]

    @functools.cached_property
    def _base_config(self) -> Config:
        """Return a configuration of what all candidates share, such as the precision."""
        return self.config(self.base)

    @functools.cached_property
    def _topology(self) -> RankTopology:
        return topology_of(self.machine, self._base_config)

    @functools.cached_property
    def _plans(self) -> list[UnitPlan]:
        # How a model is cut depends on nothing that candidates differ in.
        return self.model.plans(self._base_config)

    @functools.cached_property
    def _probe(self) -> OptimizerProbe:
        return OptimizerProbe(self.model.optimizer(self._base_config), self._base_config, self._plans)

    def states(self, candidate: PlanCandidate) -> StateBytes:
        """Return the bytes of the states of one rank."""
        # Several micro-steps may accumulate in another dtype than one.
        key = (candidate.setting._replace(checkpointing=False, sequence_parallel=1), candidate.accumulation > 1)
        if key not in self._states:
            self._states[key] = predict_states(self._plans, self.config(candidate), self._topology, self._probe)
        return self._states[key]

    def micro_step(self, candidate: PlanCandidate) -> MicroStep | None:
        """Return what one micro-step of a rank takes, or None if the model's inputs are unknown."""
        if self.model.make_batch is None:
            return None
        return self._micro_step(candidate.micro_batch, candidate.checkpointing, candidate.sequence_parallel)

    @functools.cache  # noqa: B019  the estimator lives as long as one plan is made
    def _micro_step(self, size: int, checkpointing: bool, sharing: int) -> MicroStep:
        if size in TRACED_SIZES:
            config = self.config(replace(self.base, sequence_parallel=sharing))
            return trace_micro_step(self.model, config, size, checkpointing, self.machine.device)
        first, second = (self._micro_step(n, checkpointing, sharing) for n in TRACED_SIZES)
        return extrapolated(first, second, size)

    def estimate(self, candidate: PlanCandidate) -> Estimate:
        """Return what a candidate takes and gives."""
        estimate = self._weigh(candidate, self.states(candidate), self.micro_step(candidate))
        if estimate.micro is None:
            return estimate
        time = predict_step(self.model, self.config(candidate), estimate.micro, estimate.states, self.machine)
        return replace(estimate, time=time)

    def _weigh(self, candidate: PlanCandidate, states: StateBytes, micro: MicroStep | None) -> Estimate:
        """Return the estimate of a candidate without its time."""
        machine = self.machine
        on_gpu, ranks = machine.device == "cuda", machine.ranks_per_node
        # Updates have temporaries of their own, but an update begins when the activations are gone.
        working = max(micro.peak_bytes if micro is not None else 0, states.peak_device_extra)
        process, share = (CONTEXT_BYTES, ALLOCATOR_SHARE) if on_gpu else (PROCESS_BYTES, HEAP_SHARE)
        copies = copies_of(self._base_config, machine.world_size // ranks)
        snapshots = snapshot_memory_bytes(states.snapshot, copies)
        overhead = self._buffer_bytes + process + int(share * working) + (0 if on_gpu else snapshots)
        # Ranks of one node map each other's pages where they share memory, and so gather without memory of their own.
        device_total = sum(states.device.values()) - states.shared_pages + working + overhead
        # A model that is built under meta_init has no values on the CPU (`peak_cpu_extra`).
        per_host_rank = sum(states.cpu.values()) + states.checkpoint_copy + snapshots + PROCESS_BYTES
        per_host_rank += micro.host_bytes if micro is not None else 0
        host_total = ranks * per_host_rank if on_gpu else 0
        disk_total = ranks * states.disk_files
        needs = [
            ("memory of a GPU" if on_gpu else "memory of a rank", device_total, machine.device_bytes),
            ("CPU memory of a node", host_total, machine.host_bytes),
            ("disk of a node", disk_total, machine.disk_bytes),
        ]
        reasons = tuple(_shortage(name, need, size) for name, need, size in needs if need > size)
        # The scarcest memory is the one of which the smallest share stays free.
        free_share, headroom = min((1 - need / size if size else -1.0, size - need) for _, need, size in needs if need)
        return Estimate(
            candidate=candidate,
            states=states,
            micro=micro,
            overhead_bytes=overhead,
            device_total=device_total,
            host_total=host_total,
            disk_total=disk_total,
            headroom=headroom,
            time=None,
            samples=candidate.samples(machine.world_size),
            fits=not reasons,
            has_headroom=not reasons and free_share >= HEADROOM,
            reasons=reasons,
        )

    def candidate(self, setting: ZeroSetting, micro_batch: int, choices: Choices) -> PlanCandidate:
        """Return the candidate of a setting and a micro-batch, with the micro-steps that the choices ask for."""
        accumulation, num_groups = choices.accumulation or 1, self.machine.world_size // setting.ranks_per_sample
        if choices.batch is not None and choices.accumulation is None:
            accumulation = max(choices.batch // (micro_batch * num_groups), 1)
        return PlanCandidate(**setting._asdict(), micro_batch=micro_batch, accumulation=accumulation)

    def largest_micro_batch(self, setting: ZeroSetting, choices: Choices, *, headroom: bool = False) -> int:
        """Return the largest micro-batch that fits, with headroom if asked for, or 0 if none does."""
        if self.model.make_batch is None:
            return 0

        def fits(size: int) -> bool:
            candidate = self.candidate(setting, size, choices)
            estimate = self._weigh(candidate, self.states(candidate), self.micro_step(candidate))
            return estimate.has_headroom if headroom else estimate.fits

        return largest(fits, MAX_MICRO_BATCH)

    def longest_sequence(self, choices: Choices, sharing: int) -> int:
        """Return the most tokens of a sample, in steps of ``TOKEN_UNIT``, that fit with one of the settings.

        Activations grow nearly linearly with the tokens. So the length on the line through the last two traced ones is
        traced next, until it is the last one.

        Args:
            choices: What is left open. Blocks are checkpointed if they may be.
            sharing: The number of ranks that share each sample.
        """
        kind = replace(choices, checkpointing=choices.checkpointing[-1:], sequence_parallel=(sharing,))
        settings, size = settings_of(kind, self.machine.world_size), choices.micro_batch or 1
        candidates = [self.candidate(setting, size, choices) for setting in settings]
        # The others lack memory in any case, perhaps of the host.
        candidates = [each for each in candidates if self._weigh(each, self.states(each), None).fits]

        def free_bytes(micro: MicroStep | None) -> int:
            needs = (self._weigh(each, self.states(each), micro).device_total for each in candidates)
            return self.machine.device_bytes - min(needs)

        points, tokens = [(0, free_bytes(None))] if candidates else [], FIRST_TOKENS * bool(candidates)
        while 0 < tokens != points[-1][0] and len(points) <= MAX_TRACES:
            model = Estimator(self.model.with_tokens(tokens), self._tree, self.machine)
            points.append((tokens, free_bytes(model.micro_step(candidates[0]))))
            (before, free_before), (_, free) = points[-2:]
            per_unit = max((free_before - free) * TOKEN_UNIT // (tokens - before), 1)
            tokens = min(tokens + free // per_unit * TOKEN_UNIT, MAX_TOKENS)
        return max((tokens for tokens, free in points if free >= 0), default=0)

    def estimates(self, choices: Choices, progress: Callable[[str], None]) -> tuple[list[Estimate], dict[Any, int]]:
        """Return an estimate of every candidate, and the largest micro-batch of each setting that fits.

        Args:
            choices: What is left open.
            progress: Called with what is being estimated.
        """
        estimates: list[Estimate] = []
        sizes: dict[ZeroSetting, int] = {}
        for setting in settings_of(choices, self.machine.world_size):
            num_groups = self.machine.world_size // setting.ranks_per_sample
            progress(f"estimating {setting.title}")
            sizes[setting] = self.largest_micro_batch(setting, choices)
            with_headroom = self.largest_micro_batch(setting, choices, headroom=True)
            for size in micro_batches(choices, num_groups, max(sizes[setting], 1), with_headroom):
                estimates.append(self.estimate(self.candidate(setting, size, choices)))
        return estimates, sizes


def _shortage(name: str, need: int, size: int) -> str:
    """Return the sentence about a memory that does not suffice."""
    there = f"{format_byte_size(size)} there" if size else "none there"
    return f"{name}: {format_byte_size(need)} needed, {there}, {format_byte_size(need - size)} too little"
