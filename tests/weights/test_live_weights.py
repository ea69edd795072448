"""Weights into a live engine from every kind of file and from state dicts."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zeroengine
from tests.checkpoint.models import Model, engine_at
from tests.distributed.models import batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.emulated import a_real_gpu, cpu_alone
from zeroengine.errors import CheckpointError, ZeroEngineError
from zeroengine.partition.boxes import Box
from zeroengine.weights import huggingface_format, sources

State = dict[str, torch.Tensor]


def expected_model() -> nn.Module:
    """Another model's values than any engine here starts with."""
    model = build(Model, seed=11)
    model.seen += 5
    return model


def state_dict() -> State:
    return {name: value.clone() for name, value in expected_model().state_dict().items()}


def once(state: State) -> State:
    """Tied weights under one name, as safetensors wants them."""
    return {name: value for name, value in state.items() if name != "head.weight"}


def in_parts(folder: Path, state: State, save: Callable[[State, Path], None], name: str) -> None:
    """Two files and an index, as Hugging Face writes them."""
    folder.mkdir()
    stem, _, suffix = name.partition(".")
    names = sorted(state)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = f"{stem}-{i:05}-of-00002.{suffix}"
        save({key: state[key] for key in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_all(root: Path) -> dict[str, Path]:
    """The same weights in every format, by what they are."""
    state = state_dict()
    save_file(once(state), root / "weights.safetensors")
    save_file({"transformer.h.0": torch.zeros(1)}, root / "other.safetensors")
    torch.save(state, root / "weights.pt")
    torch.save({"model": state, "epoch": 3, "optimizer": {"state": {0: torch.ones(2)}}}, root / "among.ckpt")
    torch.save({f"module.{name}": value for name, value in state.items()}, root / "wrapped.pth")
    in_parts(root / "parts", once(state), lambda s, p: save_file(s, p), "model.safetensors")
    in_parts(root / "bins", state, lambda s, p: torch.save(s, p), "pytorch_model.bin")
    folder = root / "folder"
    folder.mkdir()
    save_file(once(state), folder / "model.safetensors")
    torch.save({"never": torch.zeros(1)}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text("{}")
    single = root / "single"
    single.mkdir()
    torch.save(state, single / "epoch3.pt")
    return {
        "a safetensors file": root / "weights.safetensors",
        "a .pt file": root / "weights.pt",
        "among other things": root / "among.ckpt",
        "of a wrapped model": root / "wrapped.pth",
        "an index's folder": root / "parts",
        "an index": root / "parts" / "model.safetensors.index.json",
        "an index of .bin": root / "bins",
        "a folder": folder,
        "a folder with one file": single,
    }


def values(engine: zeroengine.Engine) -> State:
    """Masters, frozen parameters and buffers."""
    found = {name: zeroengine.full_master(param) for name, param in engine.module.named_parameters()}
    return found | {"seen": engine.module.seen.clone()}


def moments(engine: zeroengine.Engine) -> State:
    params = {name: param for name, param in engine.module.named_parameters() if param.requires_grad}
    keys = ("exp_avg", "exp_avg_sq", "step")
    return {f"{n} {k}": zeroengine.full_optimizer_state(p, k) for n, p in params.items() for k in keys}


def equal(first: State, second: State) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def step(engine: zeroengine.Engine) -> float:
    loss = engine(*batch(0, 0))
    engine.backward(loss)
    engine.step()
    return loss.item()


def check_loaded(engine: zeroengine.Engine, what: Any) -> None:
    """The engine has and computes with the weights that plain ``load_state_dict`` would have given it."""
    plain = expected_model()
    low = engine.config.low_precision or torch.float32
    for name, value in values(engine).items():
        wanted = plain.state_dict()[name]
        if name.startswith("blocks.1"):  # frozen: kept as it is computed with
            wanted = wanted.to(low).float()
        assert torch.equal(value, wanted.to(value.dtype)), (what, name)
    for name, value in engine.full_state_dict().items():
        wanted = plain.state_dict()[name]
        assert torch.equal(value, wanted.to(value.dtype)), (what, name)
    engine.eval()
    with torch.no_grad():
        loss = engine(*batch(0, 0)).item()
        assert loss == pytest.approx(
            plain.to(low).eval()(*batch(0, 0)).item(), rel=1e-5 if low is torch.float32 else 1e-2
        )
    engine.train()


def loads_everything(paths: dict[str, Path], stage: int, more: dict[str, Any], every: int) -> None:
    engine = engine_at(stage, seed=7, **more)
    for what, path in list(paths.items())[::every]:
        step(engine)
        before, counters = moments(engine), (engine.global_steps, engine.lr_scheduler.last_epoch)
        loaded = engine.load_weights(str(path))
        assert loaded == ([], []) and loaded.missing_keys == []
        check_loaded(engine, what)
        assert equal(moments(engine), before), "the optimizer's state stays"
        assert counters == (engine.global_steps, engine.lr_scheduler.last_epoch)
    for given in (state_dict(), state_dict() if engine.rank == 0 else None, state_dict() if engine.rank == 0 else {}):
        step(engine)
        engine.load_weights(given)
        check_loaded(engine, "a state dict")
    given = {name: torch.zeros(3) if engine.rank else value for name, value in state_dict().items()}
    step(engine)
    engine.load_weights(given)
    check_loaded(engine, "rank 0's is what counts")
    engine.save_weights(paths["a folder"].parent / f"out{stage}", shard_size="20KB")
    step(engine)
    engine.load_weights(paths["a folder"].parent / f"out{stage}")
    check_loaded(engine, "its own")
    engine.close()


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("stage", "more", "every"),
    [
        *(pytest.param(stage, {}, 1, id=f"{stage}-fp32", marks=pytest.mark.slow) for stage in range(4)),
        *(pytest.param(stage, BF16, 1, id=f"{stage}-bf16", marks=pytest.mark.slow) for stage in (1, 3)),
        pytest.param(3, BF16, 2, id="3-bf16, every other format"),
    ],
)
def test_every_format_at_every_stage_is_a_plain_load(
    stage: int, more: dict[str, Any], every: int, tmp_path: Path
) -> None:
    run_ranks(2, loads_everything, write_all(tmp_path), stage, more, every)


def trains_on(path: Path) -> list[float]:
    start()
    losses = []
    for stage in (0, 3):
        engine = engine_at(stage, seed=7)
        engine.load_weights(path)
        losses += [step(engine) for _ in range(3)]
    fresh = engine_at(2, seed=11)
    return losses + [step(fresh) for _ in range(3)]


def test_training_goes_on_from_loaded_weights_as_from_the_models_own(tmp_path: Path) -> None:
    losses = run_ranks(2, trains_on, write_all(tmp_path)["a safetensors file"])[0]
    assert losses[:3] == losses[3:6] == losses[6:]


def casts(root: Path, stage: int) -> None:
    state = once(state_dict())
    low = {name: value.to(torch.bfloat16) for name, value in state.items()}
    if start() == 0:
        save_file(low, root / "low.safetensors")
        torch.save({name: value.double() for name, value in state.items()}, root / "wide.pt")
    torch.distributed.barrier()
    engine = engine_at(stage, seed=7)
    engine.load_weights(root / "low.safetensors")
    assert all(torch.equal(value, low[name].float()) for name, value in values(engine).items())
    engine.load_weights(root / "wide.pt")
    check_loaded(engine, "from float64")


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_values_are_cast_to_the_engines_dtypes(stage: int, tmp_path: Path) -> None:
    run_ranks(2, casts, tmp_path, stage)


# -- what does not fit ----------------------------------------------------------------------------


def refuses(folder: Path, stage: int) -> list[str]:
    """Loads every file in ``folder``; gives the message of each on this rank."""
    engine = engine_at(stage, seed=7)
    step(engine)
    before = values(engine) | moments(engine)
    messages = []
    for path in sorted(folder.iterdir()):
        with pytest.raises(CheckpointError) as caught:
            engine.load_weights(path)
        messages.append(str(caught.value).replace(f"{folder}/", ""))
        assert equal(values(engine) | moments(engine), before), "as it was"
    loss = step(engine)
    other = engine_at(stage, seed=7)
    step(other)
    assert loss == step(other), "and trains on as if nothing had been"
    return messages


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing(stage: int, tmp_path: Path) -> None:
    state = once(state_dict())
    folder = tmp_path / "bad"
    folder.mkdir()
    expected = {}

    def bad(name: str, message: str, write: Callable[[Path], Any]) -> None:
        write(folder / name)
        expected[name] = message

    def other(**more: Any) -> State:
        changed = state | more
        return {name: value for name, value in changed.items() if value is not None}

    bad(
        "a.safetensors",
        "a.safetensors is another model's: norm.bias is not there; more is not in the model. Pass strict=False to load "
        "what fits.",
        lambda path: save_file(other(**{"norm.bias": None, "more": torch.ones(1)}), path),
    )
    bad(
        "b.safetensors",
        "b.safetensors is another model's: norm.bias has shape (25,) there and (24,) here.",
        lambda path: save_file(other(**{"norm.bias": torch.ones(25)}), path),
    )
    many = {f"extra.{i:02}": torch.ones(1) for i in range(14)}
    shown = "; ".join(f"{name} is not in the model" for name in list(many)[:10])
    bad(
        "c.safetensors",
        f"c.safetensors is another model's: {shown}; and 4 more. Pass strict=False to load what fits.",
        lambda path: save_file(state | many, path),
    )
    bad("d.safetensors", "d.safetensors is another model's: it has none of the", lambda path: save_file(many, path))
    bad("e.safetensors", "e.safetensors cannot be read, or is damaged", lambda path: path.write_bytes(b"x" * 100))
    whole = tmp_path / "whole.safetensors"
    save_file(state, whole)
    cut = whole.read_bytes()[:-8]
    bad("f.safetensors", "f.safetensors cannot be read, or is damaged", lambda path: path.write_bytes(cut))
    bomb = {"norm.bias": torch.ones(24), "x": Bomb(tmp_path / "ran")}
    bad("g.pt", "g.pt holds posix.mkdir, which is no tensor: loading it could run", lambda path: torch.save(bomb, path))
    bad("h.bin", "h.bin is not what torch.save has written", lambda path: path.write_bytes(pickle.dumps(bomb)))
    torch.save(state, tmp_path / "whole.pt")
    half = (tmp_path / "whole.pt").read_bytes()
    bad("i.pt", "i.pt cannot be read, or is damaged", lambda path: path.write_bytes(half[: len(half) // 2]))
    bad("j.pt", "j.pt holds no state dict, but list", lambda path: torch.save([torch.ones(1)], path))
    bad(
        "k.pt",
        "k.pt holds int under 'epoch': a state dict has names and tensors alone",
        lambda path: torch.save(state | {"epoch": 3}, path),
    )
    bad("l.txt", "l.txt: weights are read from .safetensors, .pt, .bin", lambda path: path.write_text("x"))
    bad("m", "m holds no weights: no .safetensors, .bin or .pt file is in it", lambda path: path.mkdir())
    bad("n.json", "n.json is no index of weights: KeyError", lambda path: path.write_text("{}"))
    for rank in run_ranks(2, refuses, folder, stage):
        for name, found in zip(sorted(expected), rank, strict=True):
            assert expected[name] in found, name
    assert not (tmp_path / "ran").exists(), "no code ran"


def other_refusals(root: Path) -> list[str]:
    engine = engine_at(2, seed=7)
    rank, before = engine.rank, values(engine)
    own = root / f"disk of rank {rank}"
    own.mkdir()
    save_file({f"only.{rank}": torch.ones(1)}, own / "w.safetensors")
    os.chdir(own)  # /proc/self/cwd is one path, and another folder on each rank, as on disks of their own
    (root / "runs").mkdir(exist_ok=True)
    engine.save_checkpoint(root / "runs")
    given: list[Any] = [
        root / "nowhere.safetensors",
        root / "runs",
        None,
        {} if rank == 0 else state_dict(),
        state_dict() if rank == 0 else root / "weights.safetensors",
        root / "weights.safetensors" if rank == 0 else None,
        Path("/proc/self/cwd/w.safetensors"),
        7,
        {"tok.weight": torch.ones(2, 2).to_sparse()},
        state_dict() | {"norm.weight": torch.ones(24, device="meta")},
        state_dict() | {"norm.weight": torch.quantize_per_tensor(torch.ones(24), 0.1, 0, torch.qint8)},
        state_dict() | {"norm.bias": torch.ones(3)},
        root / "weights.safetensors" if rank == 0 else root / "nowhere.safetensors",
    ]
    messages = []
    for weights in given:
        with pytest.raises(ZeroEngineError) as caught:
            engine.load_weights(weights)
        messages.append(str(caught.value).replace(str(root), "."))
        assert equal(values(engine), before)
    with zeroengine.gathered(engine.module), pytest.raises(ZeroEngineError, match="leave the `with` first"):
        engine.load_weights(root / "weights.safetensors")
    return messages


@a_real_gpu("sparse tensors")
def test_ranks_that_do_not_agree_are_told(tmp_path: Path) -> None:
    write_all(tmp_path)
    mine, other = run_ranks(2, other_refusals, tmp_path)
    expected = [
        "there is no ./nowhere.safetensors",
        "./runs holds checkpoints: engine.load_checkpoint('./runs', weights_only=True) loads the weights of one",
        "rank 0 has no weights. It is the one whose state dict is loaded",
        "rank 0 has no weights. It is the one whose state dict is loaded",
        "weights is 'a state dict' on rank 0 and './weights.safetensors' on rank 1. Every rank must pass the same.",
        "weights is './weights.safetensors' on rank 0 and 'a state dict' on rank 1. Every rank must pass the same.",
        "rank 1 finds other tensors in its files than rank 0",
        "load_weights() takes a file, a folder or a state dict, found int",
        "the state dict holds a tensor of layout torch.sparse_coo: weights are dense, as tensor.to_dense() gives",
        "the state dict holds a tensor without values, on the meta device: load values into it first",
        "the state dict holds a tensor that is quantized: weights are plain numbers, as tensor.dequantize() gives",
        "the state dict is another model's: norm.bias has shape (3,) there and (24,) here",
        "there is no ./nowhere.safetensors",
    ]
    for found in (mine, other):
        for wanted, message in zip(expected, found, strict=True):
            assert wanted in message


def loads_what_fits(root: Path, stage: int) -> None:
    engine = engine_at(stage, seed=7)
    before, state = values(engine), once(state_dict())
    del state["norm.bias"]
    state["more"] = torch.ones(1)
    if engine.rank == 0:
        save_file(state, root / "fits.safetensors")
    torch.distributed.barrier()
    for given in (root / "fits.safetensors", state):
        loaded = engine.load_weights(given, strict=False)
        assert loaded.missing_keys == ["norm.bias"] and loaded.unexpected_keys == ["more"]
        found = values(engine)
        assert torch.equal(found["norm.bias"], before["norm.bias"])
        assert torch.equal(found["norm.weight"], state["norm.weight"])
    with pytest.raises(CheckpointError, match=r"norm.weight has shape"):
        engine.load_weights({"norm.weight": torch.ones(2)}, strict=False)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_without_strict_what_both_have_is_loaded(stage: int, tmp_path: Path) -> None:
    run_ranks(2, loads_what_fits, tmp_path, stage)


def test_folders_that_leave_open_what_to_load_are_refused(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            sources.of_path(tmp_path)

    save_file({"a": torch.ones(1)}, tmp_path / "first.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "second.safetensors")
    refused(r"holds 2 files that could be weights \(first.safetensors, second.safetensors\): name one of them")
    for name in ("first", "second"):
        (tmp_path / f"{name}.safetensors").rename(
            tmp_path / f"model-0000{1 if name == 'first' else 2}-of-00002.safetensors"
        )
    refused("holds model-00001-of-00002.safetensors, one file of several, and no index of them")
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    refused("is incomplete: its index says that b is in model-00001-of-00002.safetensors, and it is not")
    index.write_text(json.dumps({"weight_map": weight_map | {"b": "model-00003-of-00003.safetensors"}}))
    refused("names files that are not there: model-00003-of-00003.safetensors")


# -- saving that fails ----------------------------------------------------------------------------


def fails_to_save(root: Path) -> list[str]:
    engine = engine_at(3)
    engine.save_weights(root / "out")
    before = (root / "out" / "model.safetensors").read_bytes()
    step(engine)
    (root / "file").write_text("")
    messages = []
    for folder, more in (("file", {}), ("out", {"dtype": "int8"}), ("out", {"shard_size": "many"})):
        with pytest.raises(CheckpointError) as caught:
            engine.save_weights(root / folder, **more)
        messages.append(str(caught.value).replace(str(root), "."))
    writes = huggingface_format._write_all

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    huggingface_format._write_all = full if engine.rank == 1 else writes
    with pytest.raises(CheckpointError) as caught:
        engine.save_weights(root / "out")
    messages.append(str(caught.value).replace(str(root), "."))
    huggingface_format._write_all = writes
    torch.distributed.barrier()
    assert (root / "out" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in root.iterdir()) == ["file", "out"]
    engine.save_weights(root / "out")
    assert (root / "out" / "model.safetensors").read_bytes() != before
    return messages


def test_a_failed_save_is_told_on_every_rank_and_leaves_what_was_there(tmp_path: Path) -> None:
    expected = [
        "./file is a file: weights are written to a folder",
        "dtype int8: write fp32, bf16, fp16",
        "shard size many: write a size such as 5GB",
        "./out was not written: the disk is full",
    ]
    for messages in run_ranks(2, fails_to_save, tmp_path):
        for wanted, message in zip(expected, messages, strict=True):
            assert wanted in message


def read_cut_files(root: Path) -> list[str]:
    """What reading says after the file has lost its end, which under a mapped file is what a failing disk is."""
    save_file({"a": torch.ones(100_000), "b": torch.ones(100_000)}, root / "w.safetensors")
    torch.save({"a": torch.ones(100_000), "b": torch.ones(100_000)}, root / "w.pt")
    said = []
    for name in ("w.safetensors", "w.pt"):
        source = sources.of_path(root / name)
        os.truncate(root / name, 4096)
        with pytest.raises(CheckpointError) as caught:
            source.read("b", Box((50_000,), (50_000,), 50_000)).clone()
        said.append(str(caught.value))
    return said


def test_a_disk_that_fails_under_a_mapped_file_of_weights_is_an_error_and_no_signal(tmp_path: Path) -> None:
    assert run_ranks(1, read_cut_files, tmp_path)[0] == [
        f"{tmp_path / 'w.safetensors'} is cut short",
        f"{tmp_path / 'w.pt'} cannot be read: Input/output error",
    ]


# -- memory ---------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def resident(what: str) -> float:
    """MiB: now (``VmRSS``), or at most since ``forget_peak`` (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def grows_by(root: Path, what: str) -> float:
    """MiB that this process grew by at most, while it loaded or saved the 96 MiB of ``Wide``."""
    rank = start()
    settings = {"zero_optimization": {"stage": 3}, "comm": {"transport": "gloo"}}
    engine = zeroengine.initialize(Wide(), lambda params: torch.optim.SGD(params, lr=0.1), settings)
    state = {f"layers.{i}.weight": torch.randn(1024, 1024) for i in range(24)} if rank == 0 else None
    engine.save_weights(root / "out")
    engine.load_weights(root / "out")  # what is made or imported once is there
    forget_peak()
    before = resident("VmRSS")
    if what == "state dict":
        engine.load_weights(state)
    else:
        engine.save_weights(root / "out") if what == "save" else engine.load_weights(root / "out")
    return resident("VmHWM") - before


@cpu_alone("it looks at the process")
@pytest.mark.parametrize(("what", "limit"), [("state dict", 40), ("save", 40), ("load", 48 + 40)])
def test_no_rank_ever_holds_the_model(what: str, limit: float, tmp_path: Path) -> None:
    """Pages of files that are read count too, though they are the system's to take back: this rank's half."""
    assert run_ranks(2, grows_by, tmp_path, what)[1] < limit
