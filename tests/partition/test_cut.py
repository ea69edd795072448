"""How a model is cut into units."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zeroengine import ZeroEngineError
from zeroengine.partition.cut import LARGE_PARAM, REST_UNIT, UnitPlan, cut_units


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)


class Model(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.tok = nn.Embedding(7, 4)
        self.blocks = blocks
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)


def named(plans: list[UnitPlan]) -> dict[str, list[str]]:
    return {plan.name: [name for name, _ in plan.params] for plan in plans}


def block(name: str) -> list[str]:
    return [f"{name}.{layer}.{kind}" for layer in ("norm", "up", "down") for kind in ("weight", "bias")]


REST = ["tok.weight", "norm.weight", "norm.bias", "head.weight"]


@pytest.mark.parametrize(
    ("container", "names"),
    [
        (nn.ModuleList([Block(), Block()]), ["0", "1"]),
        (nn.Sequential(Block(), nn.ReLU(), Block()), ["0", "2"]),
        (nn.ModuleDict({"low": Block(), "high": Block()}), ["low", "high"]),
    ],
)
def test_each_block_of_a_repeated_container_is_a_unit_and_the_rest_is_grouped(
    container: nn.Module, names: list[str]
) -> None:
    plans = cut_units(Model(container))
    assert named(plans) == {"rest": REST} | {f"blocks.{name}": block(f"blocks.{name}") for name in names}
    assert [plan.name for plan in plans] == ["rest", *(f"blocks.{name}" for name in names)]  # order of registration


def test_blocks_inside_blocks_belong_to_the_outermost() -> None:
    stages = nn.ModuleList([nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())])
    assert [plan.name for plan in cut_units(Model(stages))] == ["rest", "blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    "container",
    [nn.ModuleList([Block()]), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.ModuleList([Block(), nn.ReLU()])],
    ids=["one block", "bare layers", "a block and an activation"],
)
def test_single_blocks_and_bare_layers_go_with_the_rest(container: nn.Module) -> None:
    assert [plan.name for plan in cut_units(Model(container))] == ["rest"]


def test_a_block_that_is_used_several_times_is_cut_once() -> None:
    shared = Block()
    plans = cut_units(Model(nn.ModuleList([shared, shared, Block()])))
    assert [name for names in named(plans).values() for name in names] == [
        *REST, *block("blocks.0"), *block("blocks.2")
    ]  # fmt: skip


class Sized(nn.Module):
    """Parameters of given sizes that take no memory."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        for name, numel in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(numel, device="meta")))


def test_large_parameters_are_units_of_their_own_and_small_ones_are_grouped_up_to_a_size() -> None:
    half = REST_UNIT // 2
    small = {f"small{i}": LARGE_PARAM - 1 for i in range(4)}
    plans = cut_units(Sized(a=LARGE_PARAM, **small, b=half, c=4))
    assert named(plans) == {
        "a": ["a"],
        "rest": [*small, "c"],
        "b": ["b"],
    }
    many = cut_units(Sized(**{f"p{i}": LARGE_PARAM - 1 for i in range(9)}))
    assert [len(plan.params) for plan in many] == [4, 4, 1]
    assert len({plan.name for plan in many}) == 3
    assert all(plan.numel <= REST_UNIT for plan in many)


def test_a_tied_parameter_is_in_one_unit_that_serves_both_modules() -> None:
    model = Model(nn.ModuleList([Block(), Block()]))
    model.head.weight = model.tok.weight
    (rest,) = (plan for plan in cut_units(model) if plan.name == "rest")
    assert [name for name, _ in rest.params] == ["tok.weight", "norm.weight", "norm.bias"]
    assert {model.tok, model.head, model.norm} == set(rest.modules)


def test_a_parameter_tied_to_one_inside_a_block_serves_the_block_and_its_other_module() -> None:
    model = Model(nn.ModuleList([Block(), Block()]))
    model.tie = nn.Linear(4, 4)
    model.tie.weight = model.blocks[1].up.weight
    (plan,) = (p for p in cut_units(model) if p.name == "blocks.1")
    assert plan.modules == (model.blocks[1], model.tie)
    assert Counter(name for p in cut_units(model) for name, _ in p.params)["tie.weight"] == 0


def test_a_parameter_that_two_blocks_share_is_in_the_unit_of_the_first_and_serves_both() -> None:
    model = Model(nn.ModuleList([Block(), Block()]))
    model.blocks[1].up.weight = model.blocks[0].up.weight
    _, first, second = cut_units(model)
    assert [name for name, _ in first.params] == block("blocks.0")
    assert [name for name, _ in second.params] == [n for n in block("blocks.1") if n != "blocks.1.up.weight"]
    assert model.blocks[1].up in first.modules


def test_frozen_and_trainable_parameters_of_a_block_are_two_units_of_one_module() -> None:
    model = Model(nn.ModuleList([Block(), Block()]))
    model.blocks[0].up.requires_grad_(False)
    first, second = (plan for plan in cut_units(model) if plan.name.startswith("blocks.0"))
    assert (first.name, first.trainable) == ("blocks.0", True)
    assert (second.name, second.trainable) == ("blocks.0 (frozen, float32)", False)
    assert [name for name, _ in second.params] == ["blocks.0.up.weight", "blocks.0.up.bias"]
    assert first.modules == second.modules == (model.blocks[0],)


def test_a_unit_has_one_dtype_and_the_compute_dtype_covers_floating_parameters_alone() -> None:
    model = Model(nn.ModuleList([Block(), Block()]))
    model.blocks[0].down.to(torch.float64)
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    kinds = {plan.name: plan.dtype for plan in cut_units(model)}
    assert kinds["blocks.0 (float64)"] is torch.float64
    assert kinds["rest (frozen, int8)"] is torch.int8
    low = {plan.name: plan.dtype for plan in cut_units(model, compute_dtype=torch.bfloat16)}
    assert low["blocks.0"] is low["rest"] is torch.bfloat16 and "blocks.0 (float64)" not in low
    assert low["rest (frozen, int8)"] is torch.int8


def test_patterns_replace_the_rule_and_the_outermost_match_is_the_unit() -> None:
    model = Model(nn.ModuleList([Block(), Block()]))
    assert [plan.name for plan in cut_units(model, patterns=["blocks.?.up", "head"])] == [
        "rest", "blocks.0.up", "blocks.1.up", "head"
    ]  # fmt: skip
    assert [plan.name for plan in cut_units(model, patterns=["blocks.*"])] == ["rest", "blocks.0", "blocks.1"]
    assert [plan.name for plan in cut_units(model, patterns=[])] == ["rest"]


def test_what_another_pattern_matches_inside_of_a_unit_is_its_own_unit_and_the_outer_one_is_the_rest() -> None:
    model = Model(nn.ModuleList([Block(), Block()]))
    patterns = ["blocks.*", "blocks.*.up"]
    inner = {f"blocks.{i}.up": [f"blocks.{i}.up.weight", f"blocks.{i}.up.bias"] for i in (0, 1)}
    outer = {f"blocks.{i}": [name for name in block(f"blocks.{i}") if ".up." not in name] for i in (0, 1)}
    for written in (patterns, patterns[::-1], [*patterns, "blocks.1.up"]):
        plans = cut_units(model, patterns=written)
        assert named(plans) == {"rest": REST} | outer | inner
        assert [plan.modules for plan in plans if plan.name in ("blocks.1", "blocks.1.up")] == [
            (model.blocks[1],), (model.blocks[1].up,)
        ]  # fmt: skip
    # A unit of which nothing is left is none, and one may nest in another that is nested.
    assert named(cut_units(model, patterns=["blocks", *patterns])) == {"rest": REST} | outer | inner
    # What they share is registered in the outer unit first.
    model.blocks[0].up.weight = model.blocks[0].norm.weight
    units = named(cut_units(model, patterns=patterns))
    assert "blocks.0.norm.weight" in units["blocks.0"] and units["blocks.0.up"] == ["blocks.0.up.bias"]


def test_a_pattern_that_matches_nothing_is_an_error_that_shows_how_modules_are_named() -> None:
    model = Model(nn.ModuleList([Block(), Block()]))
    message = (
        "'layers.*' matches no module with parameters. Modules are named like: tok, blocks, blocks.0, blocks.0.norm"
    )
    with pytest.raises(ZeroEngineError, match=re.escape(message)):
        cut_units(model, patterns=["blocks.*", "layers.*"])


def test_a_model_without_parameters_is_an_error_that_names_its_class() -> None:
    with pytest.raises(ZeroEngineError, match=r"the model \(Sequential\) has no parameters"):
        cut_units(nn.Sequential(nn.ReLU(), nn.Flatten()))


# -- any model ----------------------------------------------------------------------------------------

LAYERS = st.sampled_from([lambda: nn.Linear(2, 2), lambda: nn.LayerNorm(2), nn.ReLU, lambda: nn.Embedding(3, 2)])


def trees(depth: int) -> st.SearchStrategy[nn.Module]:
    if not depth:
        return LAYERS.map(lambda make: make())
    children = st.lists(trees(depth - 1), min_size=1, max_size=3)
    return st.one_of(
        trees(0), children.map(nn.ModuleList), children.map(lambda found: nn.Sequential(*found)), children.map(Parent)
    )


class Parent(nn.Module):
    """Children, and a parameter of its own."""

    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        for i, child in enumerate(children):
            self.add_module(f"child{i}", child)
        self.own = nn.Parameter(torch.zeros(2))


@given(trees(3).map(lambda tree: Parent([tree])), st.data())
@settings(max_examples=60, deadline=None)
def test_any_model_is_cut_so_that_each_parameter_has_one_unit_and_each_user_of_it_holds_that_unit(
    model: nn.Module, data: st.DataObject
) -> None:
    owners = [module for module in model.modules() if module._parameters]
    if len(owners) > 1 and data.draw(st.booleans(), "tie"):
        first, second = owners[0], owners[-1]
        name = next(iter(second._parameters))
        setattr(second, name, next(iter(first._parameters.values())))
    for param in model.parameters():
        param.requires_grad_(data.draw(st.booleans()))
    names = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    patterns = data.draw(st.none() | st.lists(st.sampled_from(names), max_size=4), "units") if names else None
    plans = cut_units(model, patterns=patterns)
    assert sorted(name for plan in plans for name, _ in plan.params) == sorted(n for n, _ in model.named_parameters())
    assert len({plan.name for plan in plans}) == len(plans)
    unit_of = {param: plan for plan in plans for _, param in plan.params}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            plan = unit_of[param]
            assert any(module in holder.modules() for holder in plan.modules)
            assert (plan.trainable, plan.dtype) == (param.requires_grad, param.dtype)
    for plan in plans:  # and nobody else gathers it
        for holder in plan.modules:
            assert any(param is p for p in holder.parameters() for _, param in plan.params)
