"""Say in sentences how two runs differ: since when, in what, and what differs in their settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroengine.errors import ZeroEngineError
from zeroengine.utils.files import STEPS
from zeroengine.utils.flat_items import flat_items
from zeroengine.utils.formats import counted, listed
from zeroengine.utils.masking import masked_tree
from zeroengine.view.clean_values import finite
from zeroengine.view.digest_comparison import MAX_NAMES, DigestComparison, FirstDifference
from zeroengine.view.run_reader import GrowingLines, RunReader

# What has no influence on the numbers: facts of run.json, and sections that say what is written, and where.
NO_SETTINGS = ("config", "units", "format", "started", "peak_flops", "zeroengine")
LOGGERS = ("tensorboard.", "csv_monitor.", "wandb.", "comet.", "steps_per_print", "wall_clock_breakdown")
OTHER_SETTINGS = (*LOGGERS, "monitor.", "digests.", "replay.", "snapshots.", "checkpoint.", "trace.", "command.")
# What changes the numbers of an update, and leaves the order of sums as it is.
UPDATE_SETTINGS = ("optimizer.", "scheduler.", "gradient_clipping", "steps_planned", "step", "param_groups.")
KERNELS = ("device", "versions.")
INEXACT = [f"zero_optimization.zero_quantized_{what}" for what in ("weights", "nontrainable_weights", "gradients")]
LOW_PRECISIONS = {"bf16.enabled": "bf16", "fp16.enabled": "fp16", "torch_autocast.enabled": "autocast"}
# What the records of steps say, and what it is called.
NUMBERS = {"lr": "learning rate", "loss": "loss"}
# What to look at, by the kind of state that differs first.
CAUSES = {
    "gradients": "the data, the kernels of forward and backward, the order of reductions, or the hardware",
    "moments": "the update: the settings of the optimizer, or a moment that was changed in memory",
    "parameters": "the update: the learning rate and other settings, or a parameter that was changed in memory",
}


@dataclass(frozen=True)
class Side:
    """One of two things that are compared.

    Attributes:
        name: What the user calls it.
        facts: What run.json says, or a manifest in the same form.
        numbers: Those of ``NUMBERS`` by step.
        is_run: Whether it is a run, and no checkpoint.
    """

    name: str
    facts: Mapping[str, Any]
    numbers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    is_run: bool = False

    def settings(self) -> dict[str, Any]:
        """Return everything that may change the numbers, by dotted key, without secrets."""
        facts = {key: value for key, value in self.facts.items() if key not in NO_SETTINGS}
        if "hosts" in facts:
            facts["hosts"] = sorted(set(facts["hosts"]))
        settings = flat_items(masked_tree(facts | self.facts.get("config", {})))
        return {key: value for key, value in settings if not key.startswith(OTHER_SETTINGS)}


# The key of a setting, and both values. None where one has no such setting.
Settings = list[list[Any]]


@dataclass
class DiffReport:
    """What zero-diff shows, as JSON types.

    Attributes:
        names: What the two are called.
        differences: Sentences about the differences; none if they are equal in everything that was compared.
        coverage: Sentences about what was compared.
        settings: The settings that differ: key, and both values; None where one has no such setting.
        heat: The picture of units by steps. See ``DigestComparison.heat``.
        tensors: Of two checkpoints, the tensors that differ.
    """

    names: Sequence[str]
    differences: list[str]
    coverage: list[str]
    settings: Settings
    heat: dict[str, Any] | None = None
    tensors: Sequence[dict[str, Any]] = ()


def read_side(folder: Path, name: str) -> Side:
    """Return what a run folder says of the run and its steps, besides digests, by the name that users read."""
    numbers = {
        record["step"]: finite({key: record.get(key) for key in NUMBERS})
        for record in GrowingLines(folder / STEPS).read()
        if isinstance(record.get("step"), int)
    }
    return Side(name, RunReader(folder, wait=True).facts, numbers, is_run=True)


def compare_runs(comparison: DigestComparison, sides: Sequence[Side]) -> DiffReport:
    """Return the report of a run and another run or a checkpoint, from their digests."""
    first, settings, names = comparison.first(), different_settings(sides), [side.name for side in sides]
    report = DiffReport(names, [], comparison.coverage(), settings, heat=comparison.heat())
    if first is not None:
        given = list(comparison.given(first.step))
        report.differences += [*_place(comparison, first, names), *given]
        report.differences += [*rounding(sides, settings, first.world_sizes)]
        report.differences += [*_reading(comparison, first, sides, bool(given)), *_numbers(sides)]
    return report


def compare_records(sides: Sequence[Side], reason: str) -> DiffReport | None:
    """Return the report of two runs without common digests, from their losses and settings; None without a common step.

    Args:
        sides: The two.
        reason: Why there are no digests to compare.
    """
    settings, differences = different_settings(sides), list(_numbers(sides))
    if not (num_steps := len(sides[0].numbers.keys() & sides[1].numbers.keys())):
        for side in sides:
            if side.is_run and not side.numbers:
                raise ZeroEngineError(f"{side.name} has recorded no step yet, so there is nothing to compare")
        return None
    if differences:
        differences += rounding(sides, settings, [side.facts.get("world_size", 0) for side in sides])
    unknown = [side.name for side in sides if not side.facts]
    and_settings = "" if unknown else ", and settings"
    compared = [f"Compared: losses and learning rates of {counted(num_steps, 'step')}{and_settings}."]
    compared += [f"No settings: {' and '.join(unknown)} has no whole run.json."] if unknown else []
    return DiffReport([side.name for side in sides], differences, [*compared, f"No states: {reason}."], settings)


def different_settings(sides: Sequence[Side]) -> Settings:
    """Return the settings that differ: the key, and the value of each side; None where it has none."""
    a, b = (side.settings() for side in sides)
    # A checkpoint says less of its run than the run does.
    keys = dict.fromkeys([*a, *b]) if all("units" in side.facts for side in sides) else [key for key in a if key in b]
    return [[key, a.get(key), b.get(key)] for key in keys if a.get(key) != b.get(key)]


def _place(comparison: DigestComparison, first: FirstDifference, names: Sequence[str]) -> Iterator[str]:
    """Yield where they differ first, and how often afterwards."""
    kind, units = next(iter(first.units.items()))
    yield f"{names[0]} and {names[1]} differ first at step {first.step:,}, in the {kind} of {listed(units, MAX_NAMES)}."
    parts = []
    for kind in comparison.kinds:
        units, of = first.units.get(kind, []), len(comparison.units)
        all_units = f"all {of} units" if of > 1 else "the unit"
        where = all_units if len(units) == of else f"{len(units)} of {of} units"
        parts.append(f"{kind} differ in {where}" if units else f"{kind} are equal")
    later, different = int((comparison.steps > first.step).sum()), len(comparison.different_steps) - 1
    after = (
        f" Of {counted(later, 'compared step')} after it, {different:,} differ{'s' if different == 1 else ''}."
        if later
        else ""
    )
    yield f"At that step {', '.join(parts)}.{after}"


def _reading(
    comparison: DigestComparison, first: FirstDifference, sides: Sequence[Side], is_given_other: bool
) -> Iterator[str]:
    """Yield what the place of the first difference says about its cause."""
    (kind, names), units, step = next(iter(first.units.items())), comparison.units, first.step
    equal = comparison.kinds[: comparison.kinds.index(kind)]
    is_backward = kind == "gradients"
    if is_backward and is_given_other:
        yield "That changes gradients, whatever computes them: look at the data loader, and at the seeds of the ranks."
    elif step == 0:
        yield "They differ before the first step: in the seed, the initial weights, or the checkpoint that was loaded."
    elif not equal and (first.before or 0) < step - 1:
        # A difference in any earlier step changes the gradients of all later ones.
        yield (
            f"It began in one of the steps {(first.before or 0) + 1:,} to {step:,}. To find out in which, and in what, "
            'repeat both from the last equal step with "digests": {"every": 1}.'
        )
    else:
        since = f"Since the {' and '.join(equal)} of step {step:,} are equal, look at" if equal else "Look at"
        start = "the seed, the loaded checkpoint, " if not equal and first.before is None else ""
        yield f"{since} {start}{CAUSES[kind]}."
        a, b = (side.numbers.get(step, {}).get("loss") for side in sides)
        if is_backward and None not in (a, b):
            how, where = ("equal", "backward or the reduction") if a == b else ("different", "forward or before it")
            yield f"The losses of step {step:,} are {how}, so the difference begins in {where}."
        # Backward comes to the last unit first, and each unit passes a difference on to those before it.
        if is_backward and names == units[: len(names)] != units:
            yield f"The units after {names[-1]}, to which backward comes earlier, are equal: look at {names[-1]} first."
        if not is_backward and len(names) == 1 < len(units):
            yield "A setting changes all units, and only one differs: a bit that flipped in memory is more likely."


def _numbers(sides: Sequence[Side]) -> Iterator[str]:
    """Yield how learning rates and losses differ over the steps that both have recorded."""
    a, b = (side.numbers for side in sides)
    common = sorted(a.keys() & b.keys())
    for key, name in NUMBERS.items():
        steps = [step for step in common if a[step][key] != b[step][key]]
        if steps:
            values = " and ".join(str(numbers[steps[0]][key]).strip("[]") for numbers in (a, b))
            always = steps == common[common.index(steps[0]) :]
            until = "on" if always else f"to {steps[-1]:,}, in {counted(len(steps), 'step')}"
            yield f"The {name} differs from step {steps[0]:,} {until}: {values} at first."


def rounding(sides: Sequence[Side], settings: Settings, world_sizes: Sequence[int]) -> Iterator[str]:
    """Yield why equal bits are not to be expected, if that is so.

    Args:
        sides: The two.
        settings: What differs between their settings.
        world_sizes: The number of ranks of each; 0 if it is not known.
    """
    both = [side.settings() for side in sides]
    a, b = (next((name for key, name in LOW_PRECISIONS.items() if own.get(key) is True), "fp32") for own in both)
    changed = any(not key.startswith(UPDATE_SETTINGS) for key, _, _ in settings)
    are_ranks_first = {(own.get("zero_optimization.stage") or 0) > 1 for own in both}
    accumulates = any(own.get("gradient_accumulation_steps", 1) != 1 for own in both)
    reasons = {
        f"{world_sizes[0]} and {world_sizes[1]} ranks add up gradients in another order": len({0, *world_sizes}) == 3,
        f"one computes in {a} and the other in {b}": a != b,
        f"{a} rounds sums coarsely, so another order of them gives other bits": a == b != "fp32" and changed,
        "quantized communication is inexact": changed and any(own.get(key) for own in both for key in INEXACT),
        "with accumulation, stages 2 and 3 add in another order": accumulates and len(are_ranks_first) == 2,
        "other devices and versions have other kernels": any(key.startswith(KERNELS) for key, _, _ in settings),
        "NCCL chooses the order of sums": changed and any(own.get("device", "cpu") != "cpu" for own in both),
    }
    if given := [reason for reason, holds in reasons.items() if holds]:
        yield (
            f"Equal bits are not to be expected between these two: {'; '.join(given)}. What is equal all the same: the "
            "parameters before the first step, of equal seeds or of one loaded checkpoint."
        )
