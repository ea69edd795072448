"""A model that another library distributes, or ranks in a form that is none, is refused with what to pass instead."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import zeroengine
from tests.distributed.models import TinyLM, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.emulated import cpu_alone
from zeroengine import ZeroEngineError


def message(model: Any, **more: Any) -> str:
    try:
        zeroengine.initialize(model, None, config(2), **more)
    except ZeroEngineError as error:
        return str(error)
    return "no error"


def sharded(mesh: dist.DeviceMesh) -> nn.Module:
    """By FSDP2, a block at a time: the root itself is not."""
    model = build(lambda: TinyLM(tied=False))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return model


def with_a_wrapped_teacher() -> nn.Module:
    model = build()
    model.teacher = DistributedDataParallel(nn.Linear(2, 2))
    return model


def buffered(mesh: dist.DeviceMesh) -> nn.Module:
    model = build()
    model.register_buffer("table", distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    return model


def refused() -> dict[str, str]:
    warnings.simplefilter("ignore")
    rank = start()
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    square = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    nameless = dist.init_device_mesh("cpu", (1, 2))
    alone = dist.new_group([0])
    engine = zeroengine.initialize(build(), None, config(2))
    found = {
        "DDP": message(DistributedDataParallel(build())),
        "replicate": message(replicate(build())),
        "DataParallel": message(nn.DataParallel(build())),
        "FSDP": message(FullyShardedDataParallel(build(), device_id=torch.device("cpu"))),
        "FSDP2": message(sharded(mesh)),
        "a submodule": message(with_a_wrapped_teacher()),
        "DTensor buffer": message(buffered(mesh)),
        "Engine": message(engine),
        "mesh": message(build(), process_group=square),
        "mesh without names": message(build(), process_group=nameless),
        "list": message(build(), process_group=[0, 1]),
        "no member": message(build(), process_group=alone) if rank == 1 else "",
    }
    assert message(torch.compile(build())) == "no error", "compiled is not distributed"
    assert message(build(), process_group=square["dp"]) == "no error"
    return found


def wrapped_by(call: str, where: str = "the model") -> str:
    call = re.escape(call)
    return rf"{where} was passed through {call}, .* leave {call} out, and write zeroengine.initialize\(model, ...\)"


MESSAGES = {
    "DDP": wrapped_by("DistributedDataParallel(...)"),
    "replicate": wrapped_by("replicate(...)"),
    "DataParallel": wrapped_by("DataParallel(...)"),
    "FSDP": wrapped_by("FullyShardedDataParallel(...)"),
    "FSDP2": wrapped_by("fully_shard(...)", "the module blocks.0"),
    "a submodule": wrapped_by("DistributedDataParallel(...)", "the module teacher"),
    "DTensor buffer": r"buffer table is a DTensor",
    "Engine": "found an Engine",
    "mesh": r"DeviceMesh of 2 dimensions, \{'dp': 2, 'tp': 1\}. Pass .* such as process_group=mesh\['dp'\]",
    "mesh without names": r"of 2 dimensions, \(1, 2\). .* such as process_group=mesh.get_group\(0\)",
    "list": r"process_group: found \[0, 1\]. Pass a process group, such as torch.distributed.new_group\(\[0, 1\]\)",
    "no member": r"process_group: this rank is not one of its ranks. Call initialize\(\) on those alone",
}


@cpu_alone("the wrappers compute on the CPU")
def test_an_already_distributed_model_is_refused_with_what_to_pass() -> None:
    for rank, found in enumerate(run_ranks(2, refused)):
        for name, wanted in MESSAGES.items():
            assert re.search(wanted, found[name]) or (rank, name) == (0, "no member"), (name, found[name])
