"""The result of planning: the candidates in order, and what a table and a program show of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from zeroengine.plan.report.report import table
from zeroengine.plan.search.candidates import Estimate, ZeroSetting
from zeroengine.plan.seconds.machine import Machine

# The version of the JSON.
FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """What a model could be trained with on a machine. ``str`` of it is a table for people.

    Attributes:
        model_name: The model.
        num_parameters: Its parameters.
        num_trainable: Those of them that are trained.
        tokens_per_sample: Tokens of one sample, or None if samples have none.
        machine: The machine.
        precision: "fp32", "bf16" or "fp16".
        optimizer: The type of the optimizer.
        estimates: Every candidate: first those that a table shows, the best first; then the others, in the same order.
        num_shown: The number of estimates that a table shows.
        largest_micro_batch: The largest micro-batch of each setting that fits, or 0.
        configurations: The configuration of each estimate.
        notes: Sentences that the user should read, such as what was assumed.
        longest_sequence: The most tokens of a sample that fit, by the number of ranks that share it, where
            ``sequence_parallel`` asks for it. 0: fewer than 1,024.
    """

    model_name: str
    num_parameters: int
    num_trainable: int
    tokens_per_sample: int | None
    machine: Machine
    precision: str
    optimizer: str
    estimates: Sequence[Estimate]
    num_shown: int
    largest_micro_batch: Mapping[ZeroSetting, int]
    configurations: Sequence[Mapping[str, Any]]
    notes: tuple[str, ...] = ()
    longest_sequence: Mapping[int, int] = field(default_factory=dict)

    @property
    def best(self) -> Estimate | None:
        """Return the first estimate, or None if nothing fits."""
        return self.estimates[0] if self.estimates and self.estimates[0].fits else None

    def configuration(self, number: int = 1) -> dict[str, Any]:
        """Return the configuration of a candidate, which `zeroengine.initialize` takes.

        Args:
            number: Its number in the table, from 1.
        """
        return dict(self.configurations[number - 1])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types. Sizes are bytes, times are seconds."""
        return {
            "format": FORMAT,
            "model": {
                "name": self.model_name,
                "parameters": self.num_parameters,
                "trainable": self.num_trainable,
                "tokens_per_sample": self.tokens_per_sample,
            },
            "machine": {**asdict(self.machine), "world_size": self.machine.world_size},
            "precision": self.precision,
            "optimizer": self.optimizer,
            "notes": list(self.notes),
            "longest_sequence": dict(self.longest_sequence),
            "shown": self.num_shown,
            "candidates": [
                {"number": number, **self._entry(estimate), "configuration": dict(configuration)}
                for number, (estimate, configuration) in enumerate(
                    zip(self.estimates, self.configurations, strict=True), start=1
                )
            ],
            "settings": [
                {**setting._asdict(), "title": setting.title, "largest_micro_batch": size}
                for setting, size in self.largest_micro_batch.items()
            ],
        }

    def _entry(self, estimate: Estimate) -> dict[str, Any]:
        micro, time, tokens = estimate.micro, estimate.time, self.tokens_per_sample
        device = dict(estimate.states.device)
        # Pages of other ranks, which shared memory maps, take no memory of this rank.
        device["gathered"] -= estimate.states.shared_pages
        device["activations"] = micro.peak_bytes if micro is not None else 0
        # What an update takes beyond the memory that activations have left.
        device["temporaries"] = estimate.device_total - sum(device.values()) - estimate.overhead_bytes
        device["overhead"] = estimate.overhead_bytes
        # The time is infinite where a disk is needed that is not there.
        known = time is not None and math.isfinite(time.total)
        seconds = {**asdict(time), "total": time.total} if time is not None and known else None
        rate = estimate.samples_per_second
        return {
            **asdict(estimate.candidate),
            "title": estimate.candidate.setting.title,
            "fits": estimate.fits,
            "has_headroom": estimate.has_headroom,
            "reasons": list(estimate.reasons),
            "headroom": estimate.headroom,
            "device": device,
            "device_total": estimate.device_total,
            "cpu": dict(estimate.states.cpu),
            "host_total": estimate.host_total,
            "nvme": dict(estimate.states.nvme),
            "disk_total": estimate.disk_total,
            "seconds": seconds,
            "samples": estimate.samples,
            "samples_per_second": rate or None,
            "tokens_per_second": rate * tokens if rate and tokens else None,
        }

    def to_json(self) -> str:
        """Return everything as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_table(self, width: int | None = None, *, everything: bool = False, color: bool = False) -> str:
        """Return the table for people.

        Args:
            width: Columns of the terminal. None: those of the terminal, or 80.
            everything: Show every candidate.
            color: Include escape sequences for colors.
        """
        return table(self.to_dict(), width, everything=everything, color=color)

    def __str__(self) -> str:
        """Return the table for people."""
        return self.to_table()
