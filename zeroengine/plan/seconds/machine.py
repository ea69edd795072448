"""The memory and the rates of the machines that a plan is for."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, NonNegativeFloat, PositiveFloat, TypeAdapter, ValidationError

from zeroengine.config import FLOATS
from zeroengine.errors import ZeroEngineError
from zeroengine.utils.files import replace_file

FORMAT = 1
# glibc maps larger blocks anew for each use (M_MMAP_THRESHOLD of mallopt(3), whose dynamic maximum this is).
MAPPED_BYTES = 32 << 20


def _has_all_dtypes(rates: Mapping[str, float]) -> Mapping[str, float]:
    if missing := FLOATS.keys() - rates.keys():
        raise ValueError(f"it lacks {', '.join(missing)}; write a rate of each dtype")
    return rates


RateByDtype = Annotated[Mapping[str, PositiveFloat], AfterValidator(_has_all_dtypes)]


@dataclass(frozen=True)
class Rates:
    """What a machine achieves, in bytes or FLOP per second, of one rank while the other ranks of its node do the same.

    Attributes:
        matmul: FLOP per second of matrix products of a model's sizes, by dtype: ``fp32``, ``bf16`` and ``fp16``.
        memory: The device's memory, read plus written, in an update of the optimizer.
        elementwise: Bytes read plus written per second in a model's operations that are no matrix products, by dtype.
            On a GPU the memory bounds them. On a CPU the arithmetic of functions such as GELU does.
        host_memory: The memory of a node's CPUs, read plus written, in an update there. Of the whole node.
        link: Within a node, in each direction, in all-gathers.
        reduce_link: The same in reduce-scatters, the sum included.
        node_link: Between nodes, in each direction. Of the whole node.
        latency: Seconds of one collective of no size.
        host_link: Between a device and its host, in each direction; 0 on CPU.
        disk_read: Of the disk, while nothing is written. Of the whole node; 0: there is no disk.
        disk_write: Of the disk, while nothing is read. Of the whole node.
        new_memory: Bytes per second of a CPU's first writes to memory that the C library maps anew for each tensor of
            32 MiB or more, beside the writes themselves; 0: memory is reused, as on a GPU.
        dispatch: Seconds that the host takes for one operation of a model.
        disk_both: Bytes read plus bytes written per second of the disk, while half of each is under way. Of the whole
            node; 0: as if reads and writes took turns.
        attention: FLOP per second of fused attention, by dtype and then by the tokens of a sequence; without it,
            attention is as fast as other matrix products.
    """

    matmul: RateByDtype
    memory: PositiveFloat
    elementwise: RateByDtype
    host_memory: PositiveFloat
    link: NonNegativeFloat
    reduce_link: NonNegativeFloat
    node_link: NonNegativeFloat
    latency: NonNegativeFloat
    host_link: NonNegativeFloat
    disk_read: NonNegativeFloat
    disk_write: NonNegativeFloat
    dispatch: NonNegativeFloat
    new_memory: NonNegativeFloat = 0.0
    disk_both: NonNegativeFloat = 0.0
    attention: Mapping[str, Mapping[int, PositiveFloat]] = field(default_factory=dict)

    def attention_rate(self, dtype: str, length: int) -> float:
        """Return the FLOP per second of fused attention over sequences of ``length`` tokens."""
        rates = self.attention.get(dtype)
        return rate_at_length(rates, length) if rates else self.matmul[dtype]


def rate_at_length(rates: Mapping[int, float], length: int) -> float:
    """Return the rate of sequences of ``length`` tokens, given those of some lengths.

    Between two of them the rate lies on a line over the logarithm of the length, and outside it is that of the nearest.
    """
    lengths = sorted(rates)
    if not lengths[0] < length < lengths[-1]:
        return rates[lengths[0] if length <= lengths[0] else lengths[-1]]
    low, high = next(pair for pair in pairwise(lengths) if pair[0] <= length <= pair[1])
    return rates[low] + (rates[high] - rates[low]) * math.log(length / low) / math.log(high / low)


@dataclass(frozen=True)
class Machine:
    """The nodes that a run is planned for; they are equal.

    Attributes:
        name: The preset's name, or that of the machine that was measured.
        device: What the ranks compute on.
        nodes: The number of nodes.
        ranks_per_node: Ranks of one node, such as its GPUs.
        device_bytes: The device memory of one rank. On CPU its share of ``host_bytes``.
        host_bytes: The CPU memory of one node.
        disk_bytes: The free bytes of one node's disk; 0: there is none.
        rates: What the machine achieves.
        sources: Where figures come from, by their names; one key may hold several names.
    """

    name: str
    device: Literal["cpu", "cuda"]
    nodes: int
    ranks_per_node: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    rates: Rates
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "device_bytes", "host_bytes"):
            if getattr(self, name) < 1:
                raise ZeroEngineError(f"machine {self.name}: {name} is {getattr(self, name)}; write a number above 0")

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.ranks_per_node


def default_machine_file() -> Path:
    """Return the file in which measurements of this machine are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zeroengine" / "machine.json"


def save_machine(machine: Machine, path: str | Path) -> None:
    """Write ``machine`` as JSON. ``load_machine`` reads it.

    Raises:
        ZeroEngineError: The file cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"format": FORMAT, **dataclasses.asdict(machine)}, indent=2) + "\n")
    except OSError as error:
        raise ZeroEngineError(f"cannot write the machine file {path}: {error.strerror}") from error


def read_machine(path: str | Path) -> Machine:
    """Read what ``save_machine`` wrote.

    Raises:
        ZeroEngineError: The file cannot be read, is no machine file, or is of a newer version.
    """
    advice = "Measure the machine: `zero-plan --measure FILE`."
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise ZeroEngineError(f"cannot read the machine file {path}: {error.strerror}. {advice}") from error
    except ValueError as error:
        raise ZeroEngineError(f"the machine file {path} is not JSON: {error}. {advice}") from error
    version = content.pop("format", None) if isinstance(content, dict) else None
    if version != FORMAT:
        raise ZeroEngineError(f"{path} is no machine file of format {FORMAT} (format: {version}). {advice}")
    try:
        return TypeAdapter(Machine).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise ZeroEngineError(f"the machine file {path}: {where}: {message}. {advice}") from error
