"""How a configuration of Muon divides a model, with the keys and marks of DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from zeroengine.config import load
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.muon import Muon
from zeroengine.optim.muon_groups import build_muon


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.o_proj = (nn.Linear(8, rows, bias=False) for rows in (8, 4, 8))


class Model(nn.Module):
    """Four heads of two rows, which share two heads of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=8)
        self.embed = nn.Embedding(5, 8)
        self.attention, self.norm, self.head = Attention(), nn.LayerNorm(8), nn.Linear(8, 3)


def divided(model: nn.Module, params: list[Any] | None = None, **keys: Any) -> list[dict[str, Any]]:
    """The groups, with names in the place of parameters."""
    section: Any = load({"optimizer": {"type": "muon", "params": keys}}).optimizer
    names = {param: name for name, param in model.named_parameters()}
    optimizer = build_muon(model, list(model.parameters()) if params is None else params, section.params)
    return [{**group, "params": [names[param] for param in group["params"]]} for group in optimizer.param_groups]


def test_rates_and_defaults_are_those_of_deepspeed() -> None:
    muon, adam = divided(Model())
    assert muon["params"] == [f"attention.{name}_proj.weight" for name in "qko"] and len(adam["params"]) == 5
    assert (muon["lr"], muon["momentum"], muon["weight_decay"], muon["ns_method"]) == (0.02, 0.95, 0, "standard")
    assert (adam["lr"], adam["betas"], adam["eps"], adam["weight_decay"]) == (3e-4, (0.9, 0.95), 1e-10, 0)
    for keys, rates in (
        ({"lr": 0.1}, [0.1, 0.1]),
        ({"lr": 0.1, "muon_lr": 0.0}, [0, 0.1]),
        ({"lr": "auto", "adam_lr": 0.1}, [0.02, 0.1]),
    ):
        assert [group["lr"] for group in divided(Model(), **keys)] == rates
    assert [g["algorithm"] for g in divided(Model(), adam_w_mode=False, torch_adam=True)] == ["Muon", "Adam"]


def test_groups_have_hyperparameters_of_their_own_in_both_halves() -> None:
    model = Model()
    first, second = {"params": list(model.attention.parameters())}, {"params": list(model.norm.parameters())}
    first |= {"lr": 0.5, "eps": 1e-3}
    second |= {"lr": 0.25, "eps": 1e-3}
    muon, adam = divided(model, [first, second])
    # The key eps is that of Adam.
    assert (muon["lr"], muon["eps"], adam["lr"], adam["eps"]) == (0.5, 1e-7, 0.25, 1e-3)


def test_an_attribute_use_muon_decides_before_the_rule() -> None:
    model = Model()
    model.attention.q_proj.weight.use_muon = False
    model.head.weight.use_muon = True
    muon, _ = divided(model)
    assert muon["params"] == ["attention.k_proj.weight", "attention.o_proj.weight", "head.weight"]
    model.head.bias.use_muon = True
    with pytest.raises(ZeroEngineError, match=r"Muon: found a parameter of shape \(3,\), which is no matrix"):
        divided(model)
    with pytest.raises(ZeroEngineError, match=r"Muon: found a parameter of shape \(3,\), which is no matrix"):
        Muon([model.head.weight]).add_param_group({"params": [model.head.bias]})


def test_heads_are_matrices_as_the_models_configuration_says() -> None:
    def counts(model: nn.Module, **keys: Any) -> dict[str, int]:
        groups = divided(model, per_head_muon=True, **keys)
        return {name.split(".")[1]: g["num_matrices"] for g in groups if "num_matrices" in g for name in g["params"]}

    assert counts(Model()) == {"q_proj": 4, "k_proj": 2, "o_proj": 1}
    assert counts(Model(), matrices={"*.k_proj.weight": 1}) == {"q_proj": 4, "k_proj": 1, "o_proj": 1}
    model = Model()
    # The rows are not the heads that the configuration has.
    model.config.num_key_value_heads = 3
    assert counts(model) == {"q_proj": 4, "k_proj": 1, "o_proj": 1}
    model.config = None  # type: ignore[assignment]
    with pytest.raises(ZeroEngineError, match=r"per_head_muon: model\.config and the names"):
        counts(model)
