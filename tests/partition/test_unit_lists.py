"""Where units of lists, such as experts, stand in the order of units, and which modules need the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zeroengine.partition.cut import UnitPlan, cut_units
from zeroengine.partition.unit_lists import find_unit_lists


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))


class Mixture(nn.Module):
    """Registers what it needs besides the experts before and after them."""

    def __init__(self, experts: nn.Module | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(2, 3)
        self.experts = experts or nn.ModuleList(Expert() for _ in range(3))
        self.shared = Expert()


class Model(nn.Module):
    def __init__(self, mixtures: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Linear(2, 2)
        self.layers = nn.ModuleList(mixtures)
        self.norm = nn.LayerNorm(2)


EXPERTS, SHARED, ROUTERS = "layers.*.experts.*", "layers.*.shared", "layers.*.router"


def names(units: Sequence[UnitPlan]) -> list[str]:
    return [unit.name for unit in units]


def test_other_units_of_a_mixture_stand_before_its_experts_and_are_needed_by_the_mixture() -> None:
    model = Model([Mixture(), Mixture()])
    units = cut_units(model, patterns=[EXPERTS, SHARED, ROUTERS])
    assert names(units) == ["rest"] + [
        f"layers.{layer}.{name}"
        for layer in range(2)
        for name in ("router", "shared", "experts.0", "experts.1", "experts.2")
    ]
    needed_by = {unit.name: unit.modules for unit in units}
    assert needed_by["layers.1.shared"] == (model.layers[1].shared, model.layers[1])
    assert needed_by["layers.1.experts.0"] == (model.layers[1].experts[0],)
    assert all(len(unit.positions) == len(unit.modules) for unit in units)
    # The mixture keeps them gathered, so that what is inside of it needs no gather of its own.
    assert {unit.num_uses for unit in units if unit.name != "rest"} == {1}


def test_a_module_that_is_inside_no_block_needs_nothing_more_and_keeps_the_order_of_registration() -> None:
    model = Model([Mixture() for _ in range(3)])
    units = cut_units(model, patterns=["layers.*"])
    assert names(units) == ["rest", "layers.0", "layers.1", "layers.2"]
    (of_layers,) = find_unit_lists(model, set(model.layers))
    assert of_layers.holder is model and not of_layers.is_inside_block
    assert model not in units[0].modules
    assert of_layers.followers() == {model.norm}


def test_units_outside_of_blocks_with_a_part_inside_are_needed_as_a_whole() -> None:
    model = Model([Mixture(), Mixture()])
    rest = next(unit for unit in cut_units(model, patterns=[EXPERTS]) if unit.name == "rest")
    assert {model.layers[0], model.layers[1]} <= set(rest.modules)
    assert rest.num_uses == 4  # the embedding, two mixtures and the norm


def test_lists_of_one_module_are_one_list_and_shared_lists_belong_to_each_module() -> None:
    shared = nn.ModuleDict({"a": Expert(), "b": nn.ModuleDict({"c": Expert()})})
    model = Model([Mixture(shared), Mixture(shared)])
    model.layers[1].more = nn.ModuleList([nn.ModuleList([Expert(), Expert()])])
    roots = {module for module in model.modules() if isinstance(module, Expert)}
    found = {unit_list.holder: unit_list.items for unit_list in find_unit_lists(model, roots)}
    more = tuple(model.layers[1].more[0])
    assert found == {
        model.layers[0]: (shared["a"], shared["b"]["c"]),
        model.layers[1]: (shared["a"], shared["b"]["c"], *more),
    }


def test_a_list_of_one_item_and_one_that_holds_a_module_twice_have_no_order() -> None:
    expert = Expert()
    model = Model([Mixture(nn.ModuleList([expert])), Mixture(nn.ModuleList([expert, expert]))])
    assert not find_unit_lists(model, {expert})


def test_the_order_of_units_holds_every_parameter_once() -> None:
    model = Model([Mixture(), Mixture()])
    units = cut_units(model, patterns=[EXPERTS, SHARED], compute_dtype=torch.bfloat16)
    assert sorted(name for unit in units for name, _ in unit.params) == sorted(dict(model.named_parameters()))
