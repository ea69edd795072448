"""Write a small checkpoint of each kind that zeroengine reads, with what was in it, for `test_fixtures.py`.

`python -m tests.checkpoint.make_fixtures NAME [KIND...]` writes those of `KINDS`, or all, to `fixtures/NAME.tar.xz` and
`fixtures/NAME.json`. These files are never written anew, because they show that checkpoints of earlier versions load: a
change of the format adds files. Those of `format-1` are of the code before format 2. DeepSpeed's checkpoints are in
`deepspeed/data/`.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zeroengine
from tests.checkpoint.deepspeed.deepspeed_runs import (
    BF16,
    DATA,
    FP16,
    MOMENTS,
    SHARED,
    WIDTH,
    Small,
    adamw,
    batch,
    digests,
    train,
    without_owner,
)
from tests.checkpoint.test_engine_checkpoints import counting, draw_from_all_generators
from tests.checkpoint.test_matrix import whole_state
from tests.distributed.ranks import run_ranks
from tests.distributed.test_local_steps import outer_momentum
from tests.distributed.training import start
from zeroengine.cli import checkpoint_commands

FIXTURES = Path(__file__).parent / "fixtures"
State = dict[str, torch.Tensor]
ADAM_STATE = (*MOMENTS, "step")
CLIENT_STATE = {"epoch": 2, "best": torch.tensor([0.5]), "names": ("a", None)}
# The stage at which a checkpoint is loaded, by that at which it was saved.
OTHER_STAGE = {0: 3, 1: 2, 2: 0, 3: 1}


class Hooked(Small):
    """A state dict with extra state and a computed tensor, and without a parameter; and one of no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.gain = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.register_state_dict_post_hook(self._double)
        self.register_load_state_dict_pre_hook(self._halve)

    @staticmethod
    def _double(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}doubled"] = 2 * state.pop(f"{prefix}shift")

    @staticmethod
    def _halve(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}doubled" in state:
            state[f"{prefix}shift"] = state.pop(f"{prefix}doubled") / 2

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "sizes": torch.arange(3)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["sizes"], torch.arange(3))
        self.calls = state["calls"]

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(ids, labels) * self.gain + self.shift.square().mean()


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint.

    Attributes:
        stage: The stage at which it is saved.
        factory: Makes the model.
        optimizer: Makes the optimizer; None takes that of the settings.
        state: The optimizer's state of each parameter that it trains.
        settings: Those that a run which loads it has as well.
        saved_with: Further keys of ``zero_optimization`` of the run that saves it.
        write: Writes it in place of ``save_checkpoint``, and returns the values in it.
        load: Loads it, and returns the client state.
        frozen: Whether frozen parameters are saved.
        tolerance: How far losses after a load may lie from those of the run that saved it.
    """

    stage: int = 2
    factory: Callable[[], nn.Module] = Small
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = adamw
    state: tuple[str, ...] = ADAM_STATE
    settings: Mapping[str, Any] = field(default_factory=dict)
    saved_with: Mapping[str, Any] = field(default_factory=dict)
    write: Callable[[zeroengine.Engine, Path], State] | None = None
    load: Callable[[zeroengine.Engine, Path], Any] = zeroengine.Engine.load_checkpoint
    frozen: bool = True
    tolerance: float = 1e-5


def configured(name: str, state: tuple[str, ...], **params: Any) -> Kind:
    """Return a kind whose optimizer is that of a configuration."""
    return Kind(optimizer=None, state=state, settings={"optimizer": {"type": name, "params": {"lr": 3e-3, **params}}})


def load_weights(engine: zeroengine.Engine, folder: Path) -> None:
    engine.load_weights(folder)


def load_model(engine: zeroengine.Engine, folder: Path) -> None:
    engine.load_checkpoint(folder, weights_only=True)


def write_fsdp2(engine: zeroengine.Engine, folder: Path) -> State:
    """Train under FSDP2, and save as plain PyTorch does."""
    torch.manual_seed(0)
    model = Small()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    optimizer = adamw(fully_shard(model, mesh=mesh))
    for step in range(3):
        model(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": state, "optim": optimizer_state}}, checkpoint_id=folder)
    values = {"seen": model.seen} | {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        values |= {f"{name} {key}": optimizer.state[param][key].full_tensor() for key in MOMENTS if param.requires_grad}
    return values


def write_imported(engine: zeroengine.Engine, folder: Path) -> State:
    """Import a checkpoint of DeepSpeed."""
    if engine.rank == 0:
        with tempfile.TemporaryDirectory() as root, tarfile.open(DATA / "deepspeed.tar.xz") as archive:
            archive.extractall(root, filter="data")
            assert checkpoint_commands.import_deepspeed([f"{root}/fp32-2", str(folder), "--force"]) == 0
    dist.barrier()
    engine.load_checkpoint(folder)
    return whole_state(engine, ADAM_STATE)


def write_ddp(engine: zeroengine.Engine, folder: Path) -> State:
    """Save whole tensors, with the names that DDP gives them, by plain PyTorch."""
    state = engine.full_state_dict()
    dcp.save({"model": {f"module.{name}": value for name, value in state.items()}}, checkpoint_id=folder)
    return state


def write_bf16(engine: zeroengine.Engine, folder: Path) -> State:
    engine.save_weights(folder, dtype="bf16")
    return {name: value.bfloat16() for name, value in engine.full_state_dict().items()}


def write_shards(engine: zeroengine.Engine, folder: Path) -> State:
    engine.save_weights(folder, shard_size=300)
    return engine.full_state_dict()


def write_pickles(engine: zeroengine.Engine, folder: Path) -> State:
    """Write two files of `torch.save` with an index, as older models have them."""
    state = engine.full_state_dict()
    if engine.rank == 0:
        files = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(sorted(state))}
        for file in set(files.values()):
            torch.save({name: value for name, value in state.items() if files[name] == file}, folder / file)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return state


def write_wrapped(engine: zeroengine.Engine, folder: Path) -> State:
    """Write a file as scripts do: the state dict of a model under DDP among other things."""
    state = engine.full_state_dict()
    if engine.rank == 0:
        wrapped = {f"module.{name}": value for name, value in state.items()}
        torch.save({"state_dict": wrapped, "epoch": 3}, folder / "last.pt")
    return state


NVME = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
KINDS = {
    "stage-0": Kind(stage=0),
    "stage-1-accumulated": Kind(stage=1, settings={"gradient_accumulation_steps": 2}),
    "stage-3": Kind(stage=3),
    "bf16": Kind(settings=BF16, tolerance=1e-2),
    "bf16-moments": Kind(stage=3, settings=BF16 | {"optimizer_state_dtype": "bf16"}, tolerance=1e-2),
    "fp16": Kind(settings=FP16, tolerance=1e-2),
    "offloaded-to-cpu": Kind(saved_with={"offload_optimizer": {"device": "cpu"}}),
    "offloaded-to-nvme": Kind(stage=3, saved_with={"offload_optimizer": NVME, "offload_param": NVME}),
    "local-steps": Kind(settings={"local_steps": {"steps": 2, "outer": "nesterov", "replica_ranks": 1}}),
    "quantized": Kind(
        stage=3,
        saved_with={"zero_quantized_weights": True, "zero_quantized_gradients": True, "zeropp_loco_param": {}},
        tolerance=5e-2,
    ),
    "adam": configured("Adam", ADAM_STATE, adam_w_mode=False),
    "sgd": configured("SGD", ("momentum_buffer",), momentum=0.9),
    "adagrad": configured("Adagrad", ("sum", "step")),
    "lion": configured("Lion", ("exp_avg",)),
    "radam": configured("torch.optim.RAdam", ADAM_STATE),
    "own-optimizer": Kind(optimizer=counting, state=("count",)),
    "without-frozen": Kind(settings=BF16, frozen=False, tolerance=math.inf),  # the frozen layer is another one
    "hooked": Kind(stage=3, factory=Hooked),
    "imported-from-deepspeed": Kind(write=write_imported),
    "fsdp2": Kind(write=write_fsdp2),
    "ddp": Kind(write=write_ddp, state=(), load=load_model),
    "weights-bf16": Kind(write=write_bf16, state=(), load=load_weights),
    "weights-in-shards": Kind(write=write_shards, state=(), load=load_weights),
    "weights-in-pickles": Kind(write=write_pickles, state=(), load=load_weights),
    "weights-in-a-wrapper": Kind(write=write_wrapped, state=(), load=load_weights),
}


class Noted:
    """An object of the user with a state on each rank."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "tensor": torch.full((2,), self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["tensor"].tolist() == [state["value"]] * 2
        self.value = state["value"]


class Run:
    """An engine with all that a checkpoint of it holds.

    Args:
        kind: The kind of checkpoint.
        stage: The engine's stage.
        seed: The seed of the model.
        transport: The transport of the engine's collectives.
        zero: Further keys of ``zero_optimization``.
    """

    def __init__(self, kind: Kind, stage: int, seed: int, transport: str, **zero: Any) -> None:
        start()
        torch.manual_seed(seed)
        model = kind.factory()
        zero |= {"stage": stage, "stage3_param_persistence_threshold": 0}
        settings = SHARED | kind.settings | {"zero_optimization": zero, "comm": {"transport": transport}}
        optimizer = kind.optimizer and kind.optimizer(model)
        self.kind, self.engine = kind, zeroengine.initialize(model, optimizer, settings)
        self.loader = self.engine.dataloader(list(range(64)), seed=seed)
        self.noted = Noted(10 * seed + self.engine.rank)
        self.engine.register_stateful("noted", self.noted)

    def train(self, steps: int) -> list[float]:
        """Take steps, and return the losses of their micro-steps."""
        engine, losses = self.engine, []
        last = engine.global_steps + steps
        while engine.global_steps < last:
            losses.append(train(engine, engine.micro_steps))
        return losses

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint holds, and how training goes on. Tensors are in it by the digest of their bits."""
        engine = self.engine
        rank = {"draws": draw_from_all_generators(), "noted": self.noted.value, "data": self.loader.state_dict()}
        state = whole_state(engine, self.kind.state)
        if "local_steps" in self.kind.settings:
            state |= {f"{name} outer momentum": value for name, value in outer_momentum(engine).items()}
        trained = {name for name, param in engine.module.named_parameters() if param.requires_grad}
        found = {
            "counters": [engine.global_steps, engine.micro_steps, engine.skipped_steps],
            "loss_scale": engine.loss_scale,
            "rates": self._rates(),
            "calls": getattr(engine.module, "calls", None),
            "state": digests({k: v for k, v in state.items() if self.kind.frozen or k.split()[0] in trained}),
            "losses": self.train(3),
            "rates_after": self._rates(),
            "rank": rank,
        }
        return dict(json.loads(json.dumps(found)))

    def _rates(self) -> list[float]:
        return [group["lr"] for group in self.engine.optimizer.param_groups]


def write_kinds(root: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Write a checkpoint of each kind, and return what is in it as this rank sees it."""
    found = {}
    for name in names:
        kind, folder = KINDS[name], root / name
        folder.mkdir(exist_ok=True)
        # Gloo's shards need no alignment, so that parameters of this size are cut between the ranks.
        run = Run(kind, kind.stage, 0, "gloo", **kind.saved_with)
        next(iter(run.loader))
        run.train(4)
        # Generators of equal seeds differ in few bytes after a few draws, so that an archive holds their state once.
        set_seeds(5)
        for _ in range(run.engine.rank):
            draw_from_all_generators()
        if kind.write is not None:
            values = kind.write(run.engine, folder)
            # The names of `whole_state`. The head's weight is tied to another name.
            values = {"buffer seen" if key == "seen" else key: v for key, v in values.items() if key != "head.weight"}
            found[name] = {"state": digests(values)}
        else:
            run.engine.save_checkpoint(folder, client_state=CLIENT_STATE, frozen=kind.frozen)
            found[name] = run.record()
        run.engine.close()
    return found


def set_seeds(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy.random.seed(seed)


def pack(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out who wrote a file, and the lock of a folder."""
    return None if info.name.endswith("/.lock") else without_owner(info)


def main(name: str, *kinds: str) -> None:
    archive_path, expected_path = FIXTURES / f"{name}.tar.xz", FIXTURES / f"{name}.json"
    if archive_path.exists():
        sys.exit(f"{archive_path} is there already, and stays as it is: choose another name")
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(2, write_kinds, Path(folder), kinds or list(KINDS))
        expected = ranks[0]
        for kind, found in expected.items():
            if "rank" in found:
                found["rank"] = [on_rank[kind].pop("rank") for on_rank in ranks]
        expected_path.write_text(json.dumps(expected, indent=1) + "\n")
        with tarfile.open(archive_path, "w:xz", preset=9) as archive:
            archive.add(folder, "", filter=pack)


if __name__ == "__main__":
    main(*sys.argv[1:])
