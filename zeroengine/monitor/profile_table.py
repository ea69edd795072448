"""Write the profile of a forward as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zeroengine.config.sinks import FlopsProfile
from zeroengine.utils.formats import aligned, counted, format_count

HEADS = ("parameters", "share", "FLOPs", "share", "time", "share", "FLOP/s", "MFU")


@dataclass(frozen=True)
class ModuleProfile:
    """What the forwards of one module took, with those of the modules within.

    Attributes:
        name: Its fully qualified name; empty for the model.
        class_name: The name of its class.
        num_parameters: Elements of its parameters.
        flops: Operations; a multiplication and an addition are two.
        seconds: The time, with exposed gathers of the units within.
        is_unit: Whether it is gathered and released as a whole.
    """

    name: str
    class_name: str
    num_parameters: int
    flops: int
    seconds: float
    is_unit: bool = False

    @property
    def depth(self) -> int:
        """The number of modules around it."""
        return self.name.count(".") + 1 if self.name else 0


@dataclass(frozen=True)
class ProfiledRank:
    """What the table says of the rank.

    Attributes:
        world_size: The number of ranks.
        micro_batch: Samples of a forward.
        peak_flops: The peak rate of a rank in FLOP/s, if it is known.
    """

    world_size: int
    micro_batch: int
    peak_flops: float | None


def profile_table(profiles: Sequence[ModuleProfile], section: FlopsProfile, rank: ProfiledRank, step: int) -> str:
    """Return the table: the whole forward, the classes that take most time at each depth, and every module.

    Args:
        profiles: The model first, then the modules within, each behind the one around it.
        section: How much the table shows.
        rank: What its head says.
        step: The steps before the forward.
    """
    model = profiles[0]
    deepest = max(profile.depth for profile in profiles)
    shown_depth = deepest if section.module_depth < 0 else min(section.module_depth, deepest)
    backward = round((2 + section.recompute_fwd_factor) * model.flops)
    operations = (
        f"{format_count(backward)} FLOP in the backward, if every parameter is trained"
        if model.flops
        else "no operations are counted, as in a model with compiled parts"
    )
    lines = [
        f"forward after {counted(step, 'step')}, on rank 0 of {rank.world_size}, "
        f"{counted(rank.micro_batch, 'sample')} in a micro-batch:",
        f"  {format_count(model.flops)} FLOP and {model.seconds * 1000:.2f} ms in the forward; {operations}",
    ]
    rows: list[tuple[str, ...]] = [("depth", "class", *HEADS)]
    for depth in range(shown_depth + 1):
        classes = sorted(_by_class(profiles, depth), key=lambda profile: profile.seconds, reverse=True)
        rows += [
            (str(depth), profile.class_name, *_cells(profile, model, rank))
            for profile in classes[: section.top_modules]
        ]
    lines += aligned(rows)
    if section.detailed:
        rows = [("module", "class", *HEADS)]
        for profile in profiles:
            if profile.depth <= shown_depth:
                name = "  " * profile.depth + (profile.name.rpartition(".")[2] or "model") + "*" * profile.is_unit
                rows.append((name, profile.class_name, *_cells(profile, model, rank)))
        lines += [*aligned(rows), "  * a unit. The time of a module has that of gathers for the modules within."]
    return "\n".join(lines)


def _by_class(profiles: Sequence[ModuleProfile], depth: int) -> Iterator[ModuleProfile]:
    """Yield the sum of the modules of each class at a depth; its class name says how many they are."""
    classes: dict[str, list[ModuleProfile]] = {}
    for profile in profiles:
        if profile.depth == depth:
            classes.setdefault(profile.class_name, []).append(profile)
    for class_name, members in classes.items():
        yield ModuleProfile(
            "",
            f"{class_name} x {len(members)}" if len(members) > 1 else class_name,
            sum(member.num_parameters for member in members),
            sum(member.flops for member in members),
            sum(member.seconds for member in members),
        )


def _cells(profile: ModuleProfile, model: ModuleProfile, rank: ProfiledRank) -> Iterator[str]:
    rate = profile.flops / profile.seconds if profile.seconds > 0 else 0.0
    yield format_count(profile.num_parameters)
    yield _share(profile.num_parameters, model.num_parameters)
    yield format_count(profile.flops)
    yield _share(profile.flops, model.flops)
    yield f"{profile.seconds * 1000:.2f} ms"
    yield _share(profile.seconds, model.seconds)
    yield format_count(rate)
    yield f"{rate / rank.peak_flops:.1%}" if rank.peak_flops else "-"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
