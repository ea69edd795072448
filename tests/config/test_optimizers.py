"""`optimizer` comes out ready for torch, with DeepSpeed's meaning of its type and parameters."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from zeroengine.config import load
from zeroengine.errors import ConfigError, ZeroEngineError
from zeroengine.optim.factory import build_optimizer
from zeroengine.optim.lion import Lion


def optimizer(kind: str, **params: Any) -> Any:
    return load({"optimizer": {"type": kind, "params": params}}).optimizer


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "adamw", "adagrad", "Lion"])
def test_the_result_makes_an_optimizer(kind: str) -> None:
    config = optimizer(kind, lr=0.5)
    cls = Lion if config.type == "Lion" else getattr(torch.optim, config.type)
    made = cls([torch.zeros(1, requires_grad=True)], **config.params)
    assert made.param_groups[0]["lr"] == 0.5


def test_defaults_are_those_of_the_class_but_for_weight_decay() -> None:
    for cls in (torch.optim.SGD, torch.optim.Adagrad, Lion):
        given = inspect.signature(cls).parameters
        for name, value in optimizer(cls.__name__).params.items():
            assert value == given[name].default, (cls, name)


def test_an_import_path_takes_whatever_its_class_takes() -> None:
    config = optimizer("torch.optim.Rprop", etas=[0.5, 1.2], lr="auto", step_sizes=None)
    assert (config.type, config.params) == ("torch.optim.Rprop", {"etas": [0.5, 1.2], "step_sizes": None})


def test_adam_decays_weights_decoupled_unless_told_otherwise() -> None:
    assert optimizer("Adam", weight_decay=0.1).type == "AdamW"
    assert optimizer("Adam", weight_decay=0.1, adam_w_mode=False).type == "Adam"
    assert load({"optimizer": {"type": "Adam"}}).optimizer.type == "AdamW"  # type: ignore[union-attr]


def test_auto_is_the_default_and_a_notice_says_so() -> None:
    autos = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    config = load({"optimizer": {"type": "AdamW", "params": autos}})
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert any("optimizer.params.lr = 0.001" in notice for notice in config.notices)


def test_a_weight_decay_that_is_not_given_is_pointed_out() -> None:
    assert any("weight_decay is not given" in notice for notice in load({"optimizer": {"type": "AdamW"}}).notices)
    assert not load({"optimizer": {"type": "AdamW", "params": {"weight_decay": 0}}}).notices


@pytest.mark.parametrize(
    ("kind", "params", "decay"),
    [
        ("AdamW", {}, 0.01),
        ("Adam", {"weight_decay": "auto"}, 0.01),
        ("Adam", {"adam_w_mode": False}, 0.0),
        ("AdamW", {"weight_decay": 0.0}, 0.0),
    ],
)
def test_torch_adam_decays_as_torchs_own_class(kind: str, params: dict[str, Any], decay: float) -> None:
    config = load({"optimizer": {"type": kind, "params": {"torch_adam": True, **params}}})
    assert load(config.to_dict()).optimizer.params["weight_decay"] == decay  # type: ignore[union-attr]
    assert not any("is 0.0, as in DeepSpeed" in notice for notice in config.notices)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "Lamb"}, 'type: found "Lamb" .*; write one of Adam, .* pass your own to .* by its import path'),
        (
            {"type": "Radam"},
            "write one of Adam, Adam8bit, AdamW, AdamW8bit, SGD, .*, Muon, the import path .* such as torch.optim.RAd",
        ),
        ({"type": "OneBitAdam"}, "It is not available: it compresses its communication, which changes results"),
        ({"type": 3}, r"optimizer.type: found 3 \(an integer\); write one of"),
        ({"type": "SGD8bit"}, 'type: found "SGD8bit" .*; write one of Adam, Adam8bit'),
        ({"type": "my-package.Adam"}, "the import path of a class such as torch.optim.RAdam"),
        ({"type": "torch.optim.RAdam", "parms": {}}, "Did you mean optimizer.params"),
        ({"type": "torch.optim.RAdam", "params": [1]}, r"optimizer.params: found \[1\] \(a list\); write an object"),
        ({"type": "a.B", "params": {"x": torch.float32}}, r"optimizer.params: not JSON .* initialize\(optimizer="),
        ({"type": "Adamm"}, "Did you mean Adam"),
        ({"params": {}}, "optimizer.type: missing; write one of Adam, Adam8bit, AdamW"),
        ({"type": "AdamW", "params": {"betas": [0.9]}}, "optimizer.params.betas.1: missing"),
        ({"type": "AdamW", "params": {"betas": [0.9, 0.9, 0.9]}}, "at most 2 items"),
        ({"type": "AdamW", "params": {"betas": [0.9, 1]}}, "optimizer.params.betas.1: found 1 .* less than 1"),
        ({"type": "AdamW", "params": {"lr": "2e-5"}}, "a valid number, without quotes"),
        ({"type": "AdamW", "params": {"max_grad_norm": 1}}, 'refused; write "gradient_clipping" at the top level'),
        ({"type": "AdamW", "params": {"amsgrad": True}}, "AMSGrad is not available"),
        (
            {"type": "SGD", "params": {"betas": [0.9, 0.9]}},
            "optimizer.params.betas: SGD does not take it; Adam and AdamW and Lion and Muon do",
        ),
        ({"type": "SGD", "params": {"nesterov": True}}, 'write for example "momentum": 0.9'),
    ],
)
def test_a_wrong_optimizer(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({"optimizer": section})


def test_a_class_of_another_package_is_not_taken_for_the_types_of_eight_bits() -> None:
    assert load({"optimizer": {"type": "somewhere.AdamW8bit"}}).state_dtype is torch.float32
    with pytest.raises(ZeroEngineError, match=r'"torch\.optim\.AdamW8bit" cannot be imported'):
        build_optimizer("torch.optim.AdamW8bit", [torch.nn.Parameter(torch.zeros(1))], {})
