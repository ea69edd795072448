"""What ranks pass to the calls that save and load: a wrong path, or one that differs, is an error on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.models import engine_at
from tests.distributed.ranks import run_ranks
from tests.distributed.training import take_steps
from zeroengine.cli.checkpoint_commands import export, import_deepspeed, inspect
from zeroengine.config import load as load_config
from zeroengine.errors import ZeroEngineError

Refused = dict[str, tuple[str, str]]  # by case: the class and the text of its error


def refused(cases: dict[str, Callable[[], Any]]) -> Refused:
    errors = {}
    for name, call in cases.items():
        try:
            call()
            errors[name] = ("no error", "")
        except Exception as error:
            errors[name] = (type(error).__name__, str(error))
    return errors


def different_on_each_rank(root: Path) -> Refused:
    engine = engine_at(2)
    take_steps(engine, range(1))
    for name in ("a", "b"):
        engine.save_checkpoint(root / name, "first")
        engine.save_checkpoint(root / name, "second")
        engine.save_weights(root / f"weights {name}")
    rank, before = engine.rank, sorted(root.rglob("*"))
    name, tag = "ab"[rank], ("first", "second")[rank]
    errors = refused(
        {
            "save folder": lambda: engine.save_checkpoint(root / name / "new"),
            "save tag": lambda: engine.save_checkpoint(root, ("new", "other")[rank]),
            "save tag on one": lambda: engine.save_checkpoint(root, (None, "other")[rank]),
            "load folder": lambda: engine.load_checkpoint(root / name, "first"),
            "load tag": lambda: engine.load_checkpoint(root / "a", tag),
            "load tag on one": lambda: engine.load_checkpoint(root / "a", (None, "second")[rank]),
            "load how": lambda: engine.load_checkpoint(root / "a", weights_only=rank == 1),
            "save weights": lambda: engine.save_weights(root / f"new {name}"),
            "save weights as": lambda: engine.save_weights(root / "new", dtype=("fp32", "bf16")[rank]),
            "load weights": lambda: engine.load_weights(root / f"weights {name}"),
            "load weights how": lambda: engine.load_weights(root / "weights a", strict=rank == 1),
            "offload": lambda: engine.offload_states([("optimizer", "gradients")[rank]]),
        }
    )
    assert sorted(root.rglob("*")) == before
    take_steps(engine, range(1))  # the ranks are still together
    os.chdir(root / "a" if rank == 0 else root / "b")  # one folder by two names
    engine.load_checkpoint((root / "a", "../a")[rank], "first")
    os.environ["HOME"] = str(root)
    engine.load_checkpoint("~/a", "first")
    engine.load_weights("~/weights a")
    engine.save_weights("~/home")
    assert (root / "home" / "model.safetensors").is_file()
    nobody = refused({"home": lambda: engine.save_checkpoint("~nobody-has-this-name/a")})["home"][1]
    assert nobody.startswith("save_checkpoint(directory): ~nobody-has-this-name/a begins with ~")
    folder = load_config({"checkpoint": {"directory": "~/a"}}).checkpoint.directory
    assert folder == str(root / "a")
    engine.close()
    return errors


DIFFERENT = {
    "save folder": "save_checkpoint(): the ranks pass different arguments. directory is 'ROOT/a/new' on rank 0 and "
    "'ROOT/b/new' on rank 1. Every rank must pass the same.",
    "save tag": "save_checkpoint(): the ranks pass different arguments. tag is 'new' on rank 0 and 'other' on rank 1",
    "save tag on one": "tag is 'step-1' on rank 0 and 'other' on rank 1",
    "load folder": "load_checkpoint(): the ranks pass different arguments. directory is 'ROOT/a' on rank 0 and",
    "load tag": "tag is 'first' on rank 0 and 'second' on rank 1",
    "load tag on one": "tag is None on rank 0 and 'second' on rank 1",
    "load how": "weights_only is False on rank 0 and True on rank 1",
    "save weights": "save_weights(): the ranks pass different arguments. directory is 'ROOT/new a' on rank 0 and",
    "save weights as": "dtype is 'float32' on rank 0 and 'bfloat16' on rank 1",
    "load weights": "weights is 'ROOT/weights a' on rank 0 and 'ROOT/weights b' on rank 1",
    "load weights how": "strict is False on rank 0 and True on rank 1",
    "offload": "offload_states(): the ranks pass different arguments. include is ['optimizer'] on rank 0 and",
}


def test_ranks_that_pass_different_arguments_are_told_so(tmp_path: Path) -> None:
    for errors in run_ranks(2, different_on_each_rank, tmp_path):
        for name, message in DIFFERENT.items():
            kind, text = errors[name]
            assert kind == "DivergenceError", (name, kind, text)
            assert message.replace("ROOT", str(tmp_path)) in text, (name, text)


def without_a_path(folder: Path) -> Refused:
    os.chdir(folder)
    engine = engine_at(0)
    take_steps(engine, range(1))
    calls: dict[str, Callable[[Any], Any]] = {
        "save_checkpoint(directory)": engine.save_checkpoint,
        "load_checkpoint(directory)": engine.load_checkpoint,
        "save_weights(directory)": engine.save_weights,
        "load_weights(weights)": engine.load_weights,
        "offload_states(nvme_path)": lambda path: engine.offload_states(device="nvme", nvme_path=path),
    }
    paths = {"empty": "", "blank": " ", "bytes": b"runs", "number": 5}
    errors = refused(
        {
            f"{name} {kind}": (lambda c=call, p=path: c(p))
            for name, call in calls.items()
            for kind, path in paths.items()
        }
    )
    nothing = {name: call for name, call in calls.items() if "nvme_path" not in name and "weights" not in name}
    errors |= refused({f"{name} None": (lambda c=call: c(None)) for name, call in nothing.items()})
    errors |= refused(
        {
            "tag save": lambda: engine.save_checkpoint("runs", ""),
            "tag load": lambda: engine.load_checkpoint("runs", ""),
            "tag number": lambda: engine.load_checkpoint("runs", 5),
            "disk and cpu": lambda: engine.offload_states(nvme_path=folder),
        }
    )
    assert not list(folder.iterdir())
    engine.close()
    return errors


def test_no_path_and_no_tag_are_errors_that_write_nothing(tmp_path: Path) -> None:
    (errors,) = run_ranks(1, without_a_path, tmp_path)
    for name, (kind, text) in errors.items():
        assert kind in ("CheckpointError", "ZeroEngineError"), (name, kind, text)
        if "(" in name:
            assert name.split("(")[0] in text, (name, text)
    assert "is empty here. For the working folder write '.'" in errors["save_checkpoint(directory) empty"][1]
    assert "a tag is a folder's name" in errors["tag save"][1] and "a tag is a folder's name" in errors["tag load"][1]
    assert 'write device="nvme"' in errors["disk and cpu"][1]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [(export, ["", "out"]), (export, ["runs", ""]), (import_deepspeed, ["", "out"]), (inspect, [""])],
)
def test_an_empty_path_is_no_folder_to_a_command(
    command: Callable[[list[str]], int],
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id="runs", no_dist=True)
    assert command(arguments) == 2
    assert "is empty here" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs"]


def takes_apart(root: Path) -> list[str]:
    engine = engine_at(1)
    take_steps(engine, range(1))
    states = {"two": {"epoch": 3, "best": 0.5}, "pair": (1, 2), "none": None, "empty": {}}
    messages = []
    for name, state in states.items():
        engine.save_checkpoint(root, name, state)
        client_state = engine.load_checkpoint(root, name)
        assert client_state == state and type(client_state) is type(state)
        try:
            path, client_state = engine.load_checkpoint(root, name)
            messages.append(f"{path!r} and {client_state!r}")
        except ZeroEngineError as error:
            messages.append(str(error))
    engine.close()
    return messages


def test_a_client_state_taken_apart_as_deepspeeds_is_an_error(tmp_path: Path) -> None:
    """A dict of two keys would be unpacked into them."""
    for two, pair, none, empty in run_ranks(2, takes_apart, tmp_path):
        assert two == none == empty and two.endswith("Write: client_state = engine.load_checkpoint(directory)")
        assert pair == "1 and 2", "a pair that was saved is one's own"
