"""The section of local steps: replicas that train apart and are averaged now and then."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainValidator, model_validator

from zeroengine.config.batch import FULL_VARIABLE
from zeroengine.config.degrees import DegreesSection, number_of_ranks
from zeroengine.config.fields import AUTO, NULL, AboveZero, Decay, Positive, Section
from zeroengine.config.source import describe


def _replica_ranks(value: Any) -> int | str:
    return number_of_ranks(value, ("node",), 'or "node" for those of one machine')


ReplicaRanks = Annotated[int | str, PlainValidator(_replica_ranks, json_schema_input_type=Positive | Literal["node"])]


class LocalSteps(Section):
    """Replicas of the model that take steps of their own, and are averaged after some of them: local SGD (arXiv
    1805.09767) and DiLoCo (arXiv 2311.08105). Inexact. A number alone stands for `steps`."""

    steps: Positive
    """Steps of a round, after which the replicas are averaged."""
    outer: Annotated[Literal["average", "nesterov"], AUTO] = "average"
    """average: a round ends with the mean of the replicas' parameters. nesterov: it ends with a step of SGD with
    Nesterov momentum by what the mean has moved, which takes 8 bytes for every parameter, over the ranks of a
    replica."""
    learning_rate: Annotated[AboveZero | None, AUTO] = None
    """nesterov: learning rate of the outer step. null: 0.7."""
    momentum: Annotated[Decay | None, AUTO] = None
    """nesterov: momentum of the outer step. null: 0.9."""
    replica_ranks: Annotated[ReplicaRanks | None, NULL] = None
    """Ranks of a replica, which are consecutive: a number, or "node" for those of one machine. null: the optimizer's
    degree where `degrees` names one between 1 and all, else "node"."""

    @model_validator(mode="after")
    def _check_outer(self) -> LocalSteps:
        unused = [name for name in ("learning_rate", "momentum") if getattr(self, name) is not None]
        if self.outer == "average" and unused:
            raise ValueError(
                f'found {" and ".join(unused)}, which only the outer step "nesterov" has, and outer is "average"; '
                f'write "outer": "nesterov", or leave {" and ".join(unused)} out'
            )
        return self

    @property
    def nesterov(self) -> tuple[float, float] | None:
        """The learning rate and the momentum of the outer step; None: the mean alone."""
        if self.outer == "average":
            return None
        rate, momentum = self.learning_rate, self.momentum
        return 0.7 if rate is None else rate, 0.9 if momentum is None else momentum

    def over(
        self, world_size: int, ranks_per_node: int | None, degrees: DegreesSection | None, shard_ranks: int | None
    ) -> LocalSteps:
        """Return the section with a number as `replica_ranks`, if that can be known.

        Args:
            world_size: The number of ranks.
            ranks_per_node: The number of ranks of each machine. None: unknown. 0: they differ.
            degrees: The degrees of the configuration, as they were written.
            shard_ranks: The ranks that a mesh for hybrid sharding partitions over.

        Raises:
            ValueError: There are not several replicas of equally many ranks. The message says what to write.
        """
        written = self.replica_ranks or _default(world_size, ranks_per_node, degrees, shard_ranks)
        if written == "node" and ranks_per_node is None:
            return self
        if written == "node" and ranks_per_node == 0:
            raise ValueError(
                'local_steps.replica_ranks: "node" needs equally many ranks on every machine, and consecutive ones; '
                f"write {_choices(world_size)}"
            )
        size = int(ranks_per_node or 0) if written == "node" else int(written)
        # An elastic run may go on with a single replica until other machines are back.
        is_reduced = int(os.environ.get(FULL_VARIABLE) or world_size) > world_size
        if size == world_size and not is_reduced:
            which = "a replica is one machine, which has" if written == "node" else "a replica has"
            raise ValueError(
                f"local_steps: {which} all {world_size} ranks of the run, so there is nothing to average; write "
                f'"local_steps": {{"steps": {self.steps}, "replica_ranks": ...}} with {_choices(world_size)}, or leave '
                "local_steps out"
                if world_size > 1
                else "local_steps averages replicas, and this run has 1 rank; start more ranks, or leave it out"
            )
        if world_size % size:
            raise ValueError(
                f"local_steps.replica_ranks is {size}, and must divide the {world_size} ranks; write "
                f"{_choices(world_size)}"
            )
        return self.model_copy(update={"replica_ranks": size})


def _default(
    world_size: int, ranks_per_node: int | None, degrees: DegreesSection | None, shard_ranks: int | None
) -> int | str:
    degree = shard_ranks if shard_ranks is not None else degrees.optimizer if degrees is not None else 1
    number = ranks_per_node if degree == "node" else degree
    return number if isinstance(number, int) and 1 < number < world_size else "node"


def _choices(world_size: int) -> str:
    return " or ".join(str(size) for size in range(1, world_size) if world_size % size == 0) or "1"


def _expand(value: Any) -> Any:
    """Return the section that a number of steps stands for."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"steps": value}
    if value is None or isinstance(value, dict | LocalSteps):
        return value
    raise ValueError(f'found {describe(value)}; write a number of steps, such as 16, or an object, {{"steps": 16}}')


LocalStepsField = Annotated[
    LocalSteps | None, BeforeValidator(_expand, json_schema_input_type=Positive | LocalSteps | None), NULL
]
