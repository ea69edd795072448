"""The section of degrees: over how many ranks each state of each unit is partitioned."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, model_validator

from zeroengine.config.fields import NULL, Positive, Section
from zeroengine.config.source import describe
from zeroengine.utils.formats import counted

# The states of ``Degrees`` in the order in which their degrees divide one another.
STATES = ("parameters", "gradients", "optimizer")


def number_of_ranks(value: Any, words: tuple[str, ...], remedy: str) -> int | str:
    """Return the value if it is a number of ranks or one of the words.

    Raises:
        ValueError: It is neither; `remedy` says what to write.
    """
    if value in words or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value  # type: ignore[no-any-return]
    raise ValueError(f"found {describe(value)}; write a number of ranks, {remedy}")


def _degree(value: Any) -> int | str:
    return number_of_ranks(value, ("all", "node"), '"node" or "all"')


Degree = Annotated[int | str, PlainValidator(_degree, json_schema_input_type=Positive | Literal["all", "node"])]


class UnitDegreesSection(Section):
    """The degrees of the units whose names match a pattern. One that is left out is that of the other units."""

    units: str
    """Pattern of the names of units, such as "layers.*.experts.*" (`fnmatch`)."""
    parameters: Annotated[Degree | None, NULL] = None
    """Ranks that hold the parameters of these units once."""
    gradients: Annotated[Degree | None, NULL] = None
    """Ranks that hold the gradients of these units once."""
    optimizer: Annotated[Degree | None, NULL] = None
    """Ranks that hold the optimizer's state of these units once."""
    secondary_parameters: Annotated[Degree | None, NULL] = None
    """Ranks that hold a second copy of their parameters once. null: as the other units where `parameters` is left out,
    and otherwise there is no second copy."""


class DegreesSection(Section):
    """The number of ranks that each state is partitioned over: a number, "node" for the ranks of one machine, or "all".

    Each divides the next one, and the last divides the number of ranks. One that is left out is that before it.
    """

    parameters: Degree = 1
    """Ranks that hold the parameters once. 1: every rank holds them whole."""
    gradients: Degree = 1
    """Ranks that hold the gradients once."""
    optimizer: Degree = 1
    """Ranks that hold the optimizer's state once."""
    secondary_parameters: Annotated[Degree | None, NULL] = None
    """Ranks that hold a second copy of the parameters once, such as "node". A step gathers from `parameters` ranks at
    first, and from these in backward. null: there is no second copy."""
    per_unit: Annotated[list[UnitDegreesSection] | None, NULL] = None
    """Other degrees for some units, such as [{"units": "layers.*.experts.*", "parameters": "all", "gradients":
    "all"}]. The first pattern that matches the name of a unit decides."""

    @model_validator(mode="before")
    @classmethod
    def _take_over(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        # A second copy alone, as DeepSpeed's hpZ, belongs to parameters that are partitioned over all ranks.
        taken_over: dict[str, Any] = {"parameters": "all"} if data.get("secondary_parameters") else {}
        for before, name in pairwise(STATES):
            value = data.get(before, taken_over.get(before, 1))
            try:
                taken_over[name] = _degree(value)
            except ValueError:
                # The wrong value is reported where it is written, and only there.
                break
        return {**taken_over, **data}

    def by_pattern(self) -> list[tuple[str, DegreesSection]]:
        """Return the patterns of `per_unit` and all degrees of their units."""
        by_pattern = []
        for entry in self.per_unit or []:
            written = entry.model_dump(exclude={"units"}, exclude_none=True)
            # A second copy belongs to the degree of the parameters beside which it is written.
            if entry.parameters is not None:
                written.setdefault("secondary_parameters", None)
            by_pattern.append((entry.units, self.model_copy(update={"per_unit": None, **written})))
        return by_pattern

    def _all(self) -> list[DegreesSection]:
        return [self, *(degrees for _, degrees in self.by_pattern())]

    @property
    def stage(self) -> int:
        """The ZeRO stage that partitions the same states, of the units that are partitioned most."""
        return max(sum(bool(getattr(part, name) != 1) for name in STATES) for part in self._all())

    @property
    def has_second_copy(self) -> bool:
        """Whether some units keep a second copy of their parameters."""
        return any(part.secondary_parameters for part in self._all())

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers of `partition.degrees.Degrees`. Needs `over`."""
        # Where every rank holds the parameters, there is nothing to gather twice.
        secondary = self.secondary_parameters if self.parameters != 1 else None
        return {
            "optimizer": int(self.optimizer),
            "gradients": int(self.gradients),
            "parameters": int(self.parameters),
            "secondary": int(secondary or 0),
        }

    def over(self, world_size: int, ranks_per_node: int | None, of_what: str = "") -> DegreesSection:
        """Return the degrees as numbers.

        Args:
            world_size: The number of ranks, or of those of a replica.
            ranks_per_node: The number of ranks of each machine. None: unknown, and "node" stays. 0: they differ.
            of_what: What messages add to "ranks", such as " of a replica".

        Raises:
            ValueError: They do not divide one another or the number of ranks. The message says which would do.
        """
        key = "zero_optimization.degrees"
        own = _as_numbers(self, key, world_size, ranks_per_node, of_what)
        resolved = self.model_copy(update=own)
        entries, levels = [], {own[name]: f"{key}.{name}" for name in reversed(STATES)}
        for index, (pattern, degrees) in enumerate(resolved.by_pattern()):
            where = f"{key}.per_unit.{index}"
            numbers = _as_numbers(degrees, where, world_size, ranks_per_node, of_what)
            _check_one_chain(levels, numbers, where, world_size)
            levels |= {numbers[name]: f"{where}.{name}" for name in STATES if numbers[name] not in levels}
            entries.append(UnitDegreesSection(units=pattern, **numbers))
        return resolved.model_copy(update={"per_unit": entries or None})

    @classmethod
    def of_mesh(cls, written: DegreesSection | None, stage: int | str, shard_ranks: int) -> DegreesSection:
        """Return the degrees of a stage whose states are partitioned over one dimension of a mesh.

        Args:
            written: The degrees of the configuration as numbers; None: it has a stage alone.
            stage: The stage of the configuration.
            shard_ranks: The size of that dimension.

        Raises:
            ValueError: The stage is "auto", or the degrees of the configuration are others.
        """
        if not isinstance(stage, int):
            raise ValueError(
                f"zero_optimization.stage is {stage!r}, and process_group is a mesh for hybrid sharding; write "
                '"stage": 3'
            )
        numbers = [shard_ranks if stage >= lowest else 1 for lowest in (3, 2, 1)]
        degrees = cls(parameters=numbers[0], gradients=numbers[1], optimizer=numbers[2])
        if written is None:
            return degrees
        if [written.parameters, written.gradients, written.optimizer] != numbers:
            raise ValueError(
                f"zero_optimization.degrees are {written}, and process_group is a mesh that partitions over "
                f"{shard_ranks} ranks; leave one of them out"
            )
        return written


def _as_numbers(
    part: DegreesSection, where: str, world_size: int, ranks_per_node: int | None, of_what: str
) -> dict[str, Any]:
    """Return the degrees of some units as numbers, by the names of their keys. See ``DegreesSection.over``."""
    written = {name: getattr(part, name) for name in (*STATES, "secondary_parameters")}
    if ranks_per_node == 0 and "node" in written.values():
        raise ValueError(
            f'{where}: "node" needs equally many ranks on every machine, and consecutive ones; write a number'
        )
    words = {"all": world_size, "node": "node" if ranks_per_node is None else ranks_per_node}
    numbers: dict[str, Any] = {name: words.get(value, value) for name, value in written.items() if value is not None}
    _check_secondary(numbers.get("secondary_parameters"), numbers["parameters"], where)
    below, below_name = 1, ""
    for name in STATES:
        number = numbers[name]
        if not isinstance(number, int):
            continue
        if number % below or world_size % number:
            fitting = [d for d in range(below, world_size + 1, below) if world_size % d == 0]
            over = f" and be a multiple of {below_name}, {below}" if below > 1 else ""
            raise ValueError(
                f"{where}.{name} is {number}, and must divide the {counted(world_size, 'rank')}{of_what}{over}; write "
                f"{' or '.join(map(str, fitting)) or world_size}"
            )
        below, below_name = number, name
    return numbers


def _check_secondary(secondary: Any, parameters: Any, where: str) -> None:
    if not isinstance(secondary, int) or not isinstance(parameters, int):
        return
    if secondary >= parameters > 1 or parameters % secondary:
        fitting = [d for d in range(1, parameters) if parameters % d == 0]
        raise ValueError(
            f"{where}.secondary_parameters is {secondary}, and must divide {where}.parameters, {parameters}, "
            f"and be less; write {' or '.join(map(str, fitting)) or 'null'}"
        )


def _check_one_chain(levels: dict[Any, str], numbers: dict[str, Any], where: str, world_size: int) -> None:
    """Check that the degrees of all units together divide one another.

    Args:
        levels: The degrees of the units before, with the keys that say so.
        numbers: The degrees of one more entry.
        where: The key of that entry.
        world_size: The number of ranks.

    Raises:
        ValueError: Two degrees do not divide one another, so that the shards of one unit would not nest in those of
            another.
    """
    known = [level for level in levels if isinstance(level, int)]
    for name in STATES:
        number = numbers[name]
        other = next((d for d in known if isinstance(number, int) and number % d and d % number), None)
        if other is not None:
            raise ValueError(
                f"{where}.{name} is {number}, and {levels[other]} is {other}: of two degrees, also of different units, "
                f"one must divide the other; write {other}"
            )
