"""Find a machine by name: a preset, a file of measurements, or the machine that this runs on."""

from __future__ import annotations

import dataclasses
import difflib
import os
import shutil
from functools import partial
from pathlib import Path

import torch

from zeroengine.config import FLOATS
from zeroengine.errors import ZeroEngineError
from zeroengine.memory.free_memory import free_device_bytes
from zeroengine.offload.host_memory import available_memory
from zeroengine.plan.seconds.machine import Machine, Rates, default_machine_file, read_machine
from zeroengine.plan.seconds.machine_presets import PRESETS
from zeroengine.plan.seconds.timing import median_seconds
from zeroengine.utils.gpu_data_sheets import data_sheets_of_gpu

THIS = "this"
# The side of the square matrices, and the bytes of the copy, of a quick estimate.
QUICK_SIDE, QUICK_BYTES = 512, 64 << 20
# Assumed of a CPU machine that was not measured: bytes per second of links and disks, and seconds.
QUICK_LINK, QUICK_NODE_LINK, QUICK_DISK, QUICK_LATENCY, QUICK_DISPATCH = 5e9, 1.25e9, 1e9, 100e-6, 10e-6


def load_machine(name_or_file: str | Path) -> Machine:
    """Return a preset, ``this`` machine, or the machine of a file that ``zero-plan --measure`` wrote.

    Raises:
        ZeroEngineError: There is no such preset or file, or the file is not a machine's.
    """
    name = str(name_or_file)
    if name == THIS:
        return this_machine()
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    if Path(name).is_file():
        return read_machine(name)
    nearest = difflib.get_close_matches(name.lower(), PRESETS, n=1)
    meant = f" Did you mean {nearest[0]}?" if nearest else ""
    raise ZeroEngineError(
        f"machine {name!r} is no preset and no file.{meant} Presets: {', '.join(PRESETS)}; or write {THIS}, or a file "
        "that `zero-plan --measure FILE` wrote"
    )


def this_machine() -> Machine:
    """Return the machine that this runs on, with the memory that is free now.

    Its rates are those that were measured before, if any. Otherwise they are the preset's of this GPU, or quick
    estimates; ``sources`` says which.
    """
    file = default_machine_file()
    if file.is_file():
        machine = read_machine(file)
    elif torch.cuda.is_available():
        machine = _preset_of_gpu()
    else:
        machine = _quick_estimate()
    host_bytes = int(available_memory())
    free = {"host_bytes": "free now, by Linux and the container's limit", "disk_bytes": "free in the current folder"}
    has_gpu = machine.device == "cuda" and torch.cuda.is_available()
    device_bytes = free_device_bytes(torch.device("cuda" if has_gpu else "cpu"))
    free["device_bytes"] = "a rank's share of host_bytes" if device_bytes is None else "free now, by CUDA"
    if device_bytes is None:
        device_bytes = host_bytes // machine.ranks_per_node
    return dataclasses.replace(
        machine,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        disk_bytes=shutil.disk_usage(os.getcwd()).free,
        sources={**machine.sources, **free},
    )


def _preset_of_gpu() -> Machine:
    """Return the preset with the name of this GPU, or else the one with the nearest memory."""
    properties = torch.cuda.get_device_properties(0)
    candidates = data_sheets_of_gpu(properties.name) or list(PRESETS)
    name = min(candidates, key=lambda name: abs(PRESETS[name].device_bytes - properties.total_memory))
    preset = PRESETS[name]
    note = f"preset {preset.name} for {properties.name}; `zero-plan --measure` measures it"
    rates = {field.name: note for field in dataclasses.fields(Rates)}
    return dataclasses.replace(preset, ranks_per_node=torch.cuda.device_count(), sources=rates | {"preset": note})


def _quick_estimate() -> Machine:
    """Return a CPU machine of one rank, with products and copies timed for some milliseconds."""
    cpu, matmul = torch.device("cpu"), {}
    for name, dtype in FLOATS.items():
        square = torch.ones(QUICK_SIDE, QUICK_SIDE, dtype=dtype)
        matmul[name] = 2 * QUICK_SIDE**3 / median_seconds(partial(torch.matmul, square, square), cpu, repeats=3)
    source = torch.zeros(QUICK_BYTES // 4)
    target = torch.zeros_like(source)
    memory = 2 * source.nbytes / median_seconds(partial(target.copy_, source), cpu, repeats=3)
    quick, assumed = "a quick estimate; `zero-plan --measure` measures it", "assumed; `zero-plan --measure` measures it"
    return Machine(
        name=THIS,
        device="cpu",
        nodes=1,
        ranks_per_node=1,
        device_bytes=1,
        host_bytes=1,
        disk_bytes=0,
        rates=Rates(
            matmul=matmul,
            memory=memory,
            elementwise=dict.fromkeys(matmul, memory / 2),
            host_memory=memory,
            link=QUICK_LINK,
            reduce_link=QUICK_LINK,
            node_link=QUICK_NODE_LINK,
            latency=QUICK_LATENCY,
            host_link=0.0,
            disk_read=QUICK_DISK,
            disk_write=QUICK_DISK,
            dispatch=QUICK_DISPATCH,
        ),
        sources={
            "matmul memory elementwise host_memory": quick,
            "link reduce_link node_link latency disk_read disk_write dispatch": assumed,
        },
    )
