"""Open a stream of whole tensors, send one, and collect a state dict: checks, names, and what reads the values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import torch

from zeroengine import ops
from zeroengine.checkpoint.engine_state import EngineTensors
from zeroengine.comm.group import check_same
from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.public_call import ALL, Inside, PublicCall
from zeroengine.errors import ZeroEngineError
from zeroengine.partition.cut import plain_name
from zeroengine.partition.slices import whole_shape
from zeroengine.partition.storages import storages_of
from zeroengine.runtime.named_tensors import sorted_patterns
from zeroengine.runtime.quantized_parameters import map_wrapper
from zeroengine.utils.formats import parse_byte_size
from zeroengine.utils.tensors import map_tensors
from zeroengine.weights.changes import WeightsToken, digests_of
from zeroengine.weights.huggingface_format import TensorSpec
from zeroengine.weights.output_folder import parse_dtype
from zeroengine.weights.selection import LocalValue, Selection, SelectionOptions, Slot, StoredValue, select
from zeroengine.weights.stream import BucketMemory, PlanBuckets, WeightStream, plan_buckets
from zeroengine.weights.tensor_reads import TensorReads
from zeroengine.weights.transfer import Sender

STREAM = PublicCall(
    "stream_weights()",
    "to stream weights",
    ALL & ~Inside.AVERAGES,
    ("parameters",),
    needs_own_parameters=True,
    ends_backward=True,
)
# A parameter that was added to the model would silently be missing from the result.
STATE_DICT = PublicCall(
    "full_state_dict()", "to collect the state dict", Inside.STREAM, ("parameters",), needs_own_parameters=True
)


@dataclass(frozen=True)
class StreamArguments:
    """The arguments of ``Engine.stream_weights``, and what a sender chooses besides.

    Attributes:
        plan: Divides tensors into buckets.
        allocate: Returns the memory of a bucket. None: that of ``device``.
        in_pieces: As of `TensorReads`.
    """

    dtype: str | torch.dtype | None = None
    bucket_bytes: int | str = "256MiB"
    names: str | Iterable[str] | None = None
    ranks: Literal["all"] | int = "all"
    device: str | torch.device | None = None
    since: WeightsToken | None = None
    merge: Literal["peft"] | None = None
    buffers: bool = False
    layout: Literal["model", "files"] = "model"
    plan: PlanBuckets = plan_buckets
    allocate: Callable[[int], torch.Tensor] | None = None
    in_pieces: bool = False

    @classmethod
    def of(cls, call: str, passed: Mapping[str, Any], **own: Any) -> StreamArguments:
        """Return those that the user has passed to another call, and what this call decides itself.

        Raises:
            ZeroEngineError: One of them is no argument of a stream, or the call decides it.
        """
        known = {field.name for field in fields(cls)} - {"plan", "allocate", "in_pieces"} - own.keys()
        if unknown := passed.keys() - known:
            raise ZeroEngineError(f"{call}: found the argument {min(unknown)}; it takes {', '.join(sorted(known))}")
        return cls(**own, **passed)


def open_stream(parts: EngineParts, tensors: EngineTensors, arguments: StreamArguments) -> WeightStream:
    """Return a stream. A collective. See ``Engine.stream_weights``."""
    call = STREAM.name
    group, gatherer = parts.ranks.group, parts.passes.gatherer
    compared: dict[str, object] = {}
    with STREAM.on_all_ranks(parts, compared) as all_compared:
        _check_merge(parts, arguments.merge, call)
        options, nbytes, receiver, device = _checked(arguments, call, group.world_size, group.device)
        since = arguments.since
        if since is not None:
            since.check_belongs_to(gatherer)
        compared |= vars(options) | {"bucket_bytes": nbytes, "ranks": receiver, "in_pieces": arguments.in_pieces}
        compared["since"] = None if since is None else f"the token of {since.number} streams"
    check_same(call, all_compared)
    parts.loop.step_runner.await_and_report()
    # Averages that the model has for a while are what the model computes with, and nothing was written into them.
    if gatherer.has_averages:
        gatherer.quiesce(values_change=False)
    else:
        parts.states.master_weights.settle()
    with group.collective_errors("to stream weights"):
        selection = select(tensors, tensors.saved_names(), options, parameter_spec, call)
    token, outgoing = None, selection.tensors
    if since is not None:
        ranks, placement = parts.ranks, parts.partition.placement
        digests = digests_of(outgoing, selection.stored, group, ranks.data_group, ranks.slice_number, placement)
        outgoing = [tensor for tensor in outgoing if since.digests.get(tensor.name) != digests[tensor.name]]
        token = since.next(digests, gatherer)
    buckets = arguments.plan(outgoing, nbytes)
    memory = None
    if receives := receiver is None or receiver == group.rank:
        size = max((runs[-1].end for runs in buckets if runs), default=0)
        memory = BucketMemory(size, arguments.allocate or partial(_bucket, device, group.device))
    reads = _reads(parts, selection, receiver, receives=receives, in_pieces=arguments.in_pieces)
    fill_stream = torch.cuda.Stream(group.device) if group.device.type == "cuda" else None
    specs = {tensor.name: tensor.spec for tensor in outgoing}
    return WeightStream(group, gatherer, reads, specs, buckets, memory, fill_stream, token)


def send_weights(
    parts: EngineParts, tensors: EngineTensors, sender_arguments: tuple[Any, ...], stream_arguments: Mapping[str, Any]
) -> WeightsToken | None:
    """Send the weights, and return the token of the stream, if it has one. A collective. See ``Engine.send_weights``.

    Args:
        parts: The engine.
        tensors: Its tensors.
        sender_arguments: Those of `Sender`, which rank 0 has.
        stream_arguments: The arguments of the stream.
    """
    group = parts.ranks.group
    sender: Sender | None = None
    with group.collective_errors("to send weights"):
        arguments = StreamArguments.of("send_weights()", stream_arguments, ranks=0, device=None)
        if group.rank == 0:
            sender = Sender(*sender_arguments)
            arguments = replace(arguments, device=sender.device, allocate=sender.allocate)
    with sender or nullcontext(), open_stream(parts, tensors, arguments) as stream:
        if sender is None:
            list(stream)
        else:
            sender.send(stream, is_whole=arguments.names is None and arguments.since is None)
        # The stream has ended, and the other ranks still wait for what becomes of its last bucket.
        with group.collective_errors("to send weights"):
            if sender is not None:
                sender.end()
    return None if arguments.since is None else stream.token


def collect_state_dict(
    parts: EngineParts,
    tensors: EngineTensors,
    names: str | Iterable[str] | None,
    merge: Literal["peft"] | None,
    *,
    trainable_only: bool,
    rank0_only: bool,
) -> dict[str, Any]:
    """Return copies of the values of a state dict. A collective. See ``Engine.full_state_dict``."""
    call, group = STATE_DICT.name, parts.ranks.group
    compared: dict[str, object] = {"trainable_only": trainable_only, "merge": merge}
    with STATE_DICT.on_all_ranks(parts, compared) as all_compared:
        compared["names"] = patterns = sorted_patterns(names, call)
        _check_merge(parts, merge, call)
        saved = tensors.saved_names()
        options = SelectionOptions(patterns, trainable_only, merge=merge)
        selection = select(tensors, saved, options, parameter_spec, call)
    # Ranks that ask for other names would gather other units.
    check_same(call, all_compared)
    returns_values = group.rank == 0 or not rank0_only
    reads = _reads(parts, selection, receives=returns_values)
    state: dict[str, Any] = {}
    try:
        for tensor in selection.tensors:
            values = None
            if isinstance(tensor.source, LocalValue):
                if returns_values:
                    # In its own layout, such as a sparse one.
                    values = tensor.source.value.detach().to("cpu", copy=True)
            else:
                if returns_values:
                    values = torch.empty(tensor.spec.shape, dtype=tensor.spec.dtype, device="cpu")
                reads.read(None if values is None else values.view(-1), tensor, 0, tensor.spec.numel)
            state[tensor.name] = values
        with group.collective_errors(STATE_DICT.purpose):
            reads.raise_error()
    finally:
        reads.close()
    if not returns_values:
        return {}
    state |= {alias: state[first] for alias, first in selection.tied.items()}
    # Values other than tensors are copies of theirs already.
    state |= {name: map_tensors(torch.Tensor.cpu, value) for name, value in selection.others.items()}
    if merge is not None:
        return state
    keys = {plain_name(key): key for key in saved.state.values}
    result = {key: state[name] for name, key in keys.items() if name in state}
    for key, wrapper in saved.state.wrappers.items():
        storages = storages_of(wrapper)
        if all(key + suffix in result for suffix, _ in storages):
            by_id = {id(storage): result.pop(key + suffix) for suffix, storage in storages}
            result[key] = map_wrapper(wrapper, lambda tensor, by_id=by_id: by_id[id(tensor)])  # type: ignore[misc]
    return saved.state.like(result)


def _check_merge(parts: EngineParts, merge: str | None, call: str) -> None:
    if parts.setup.is_split and merge is not None:
        raise ZeroEngineError(f"{call} cannot merge adapters into parameters that are split over ranks: no merge=")


def _reads(parts: EngineParts, selection: Selection, receiver: int | None = None, **flags: bool) -> TensorReads:
    ranks = parts.ranks
    numbers, device = ranks.replica_group.numbers, ranks.group.device
    return TensorReads(
        parts.passes.gatherer, ranks.transport, numbers, ranks.model_group, selection.stored, device, receiver, **flags
    )


def parameter_spec(stored: StoredValue) -> TensorSpec:
    """Return the shape of a tensor, and the dtype that the model computes with."""
    if isinstance(stored, Slot):
        return TensorSpec(whole_shape(stored.unit.params[stored.param_index]), stored.unit.dtype)
    return TensorSpec(tuple(stored.value.shape), stored.value.dtype)


def _checked(
    arguments: StreamArguments, call: str, world_size: int, engine_device: torch.device
) -> tuple[SelectionOptions, int, int | None, torch.device]:
    """Return what leaves, the bytes of a bucket, the only rank that gets values (None: all do), and the device."""
    patterns = sorted_patterns(arguments.names, call)
    nbytes = parse_byte_size(arguments.bucket_bytes, f"{call}: bucket_bytes", ZeroEngineError)
    ranks = arguments.ranks
    if ranks != "all" and not (isinstance(ranks, int) and 0 <= ranks < world_size):
        raise ZeroEngineError(
            f'{call}: ranks is {ranks!r}; write "all", or the number of the only rank that gets values'
        )
    since = arguments.since
    if since is not None and not isinstance(since, WeightsToken):
        raise ZeroEngineError(
            f"{call}: since is {since!r:.100}; write the token of an earlier stream, which is stream.token at its end, "
            "or zeroengine.WeightsToken() for all tensors"
        )
    if not isinstance(arguments.buffers, bool):
        raise ZeroEngineError(f"{call}: buffers is {arguments.buffers!r:.100}; write True or False")
    if arguments.layout not in ("model", "files"):
        raise ZeroEngineError(f'{call}: layout is {arguments.layout!r}; write "model" or "files"')
    device = engine_device if arguments.device is None else arguments.device
    # torch raises errors of its own for what is no device.
    if str(device).partition(":")[0] not in ("cpu", engine_device.type):
        raise ZeroEngineError(f'{call}: device is {device!r}; write "cpu", or leave it out for that of the engine')
    options = SelectionOptions(
        patterns,
        buffers=arguments.buffers,
        merge=arguments.merge,
        as_files=arguments.layout == "files",
        dtype=parse_dtype(arguments.dtype),
    )
    return options, nbytes, None if ranks == "all" else ranks, torch.device(device)


def _bucket(device: torch.device, engine_device: torch.device, nbytes: int) -> torch.Tensor:
    # Pinned memory is filled while the host goes on.
    pinned = device.type == "cpu" and engine_device.type == "cuda"
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    ops.advise_huge_pages(memory)
    return memory
