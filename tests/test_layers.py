"""The structure of the sources: layers import downwards, no files import each other in a circle, names are unique.

No file outside of the transports compares the name of a transport.

Imports count wherever they stand: at the top, inside functions, and for type checkers alone.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

# From the lowest to the highest. A package imports packages of lower tiers alone, so those of one tier are independent.
TIERS = [
    {"errors", "schedule"},
    {"utils"},
    {"ops"},
    {"config", "partition"},
    {"migration", "monitor"},
    {"comm", "disk"},
    {"offload", "deferred_init"},
    {"runtime"},
    {"optim", "sequence"},
    {"memory"},
    {"checkpoint"},
    {"weights"},
    {"engine"},
    {"plan", "view", "recovery", "integrations"},
    {"launch"},
    {"cli"},
]
# Everything up to the engine is the core, which trains without what is above it. A configuration may ask for two of the
# packages there. The engine imports these in one file, inside functions, with an error that says what to write instead.
AROUND_THE_CORE = set().union(*TIERS[TIERS.index({"engine"}) + 1 :])
SEAM = "zeroengine.engine.optional_packages"
SEAM_TARGETS = {"zeroengine.plan.search.automatic", "zeroengine.recovery.snapshots", "zeroengine.integrations.own_plan"}
TIER_OF = {package: number for number, tier in enumerate(TIERS) for package in tier}
# Packages whose __init__ re-exports names for users; elsewhere a name is imported from the module that defines it.
FRAMEWORKS = ("accelerate", "deepspeed", "fsdp", "lightning", "transformers")
PUBLIC_PACKAGES = {"zeroengine", "zeroengine.config", "zeroengine.ops"} | {
    f"zeroengine.integrations.{framework}" for framework in FRAMEWORKS
}


def module_name(path: Path) -> str:
    """Return the dotted name of the module at ``path``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted((ROOT / "zeroengine").rglob("*.py"))}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each module, which takes a second: every process that shares the tests imports this."""
    return {module: ast.parse(path.read_text()) for module, path in SOURCES.items()}


def imports_of(module: str) -> Iterator[tuple[str, str]]:
    """Yield the modules of zeroengine that ``module`` imports, each with the name that it takes from there."""
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "zeroengine")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "zeroengine":
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield (submodule, "") if submodule in SOURCES else (node.module, alias.name)


def package_of(module: str) -> str:
    """Return the part of ``module`` that has a tier."""
    return module.split(".")[1]


@pytest.mark.parametrize("package", sorted(TIER_OF))
def test_a_package_imports_lower_tiers_alone(package: str) -> None:
    upward = [
        f"{module} imports {target}"
        for module in SOURCES
        if module.count(".") and package_of(module) == package
        for target, _ in imports_of(module)
        if target != "zeroengine" and package_of(target) != package and TIER_OF[package_of(target)] >= TIER_OF[package]
        if not (module == SEAM and target in SEAM_TARGETS)
    ]
    assert not upward


def test_the_core_imports_what_is_around_it_in_one_file_inside_functions() -> None:
    assert {target for target, _ in imports_of(SEAM) if package_of(target) in AROUND_THE_CORE} == SEAM_TARGETS
    at_the_top = [node for node in trees()[SEAM].body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [ast.unparse(node) for node in at_the_top if any(name in ast.unparse(node) for name in SEAM_TARGETS)]


def test_the_folders_of_the_planner_import_those_before_them_alone() -> None:
    folders = ("trace", "seconds", "search", "report")
    number_of = {f"zeroengine.plan.{folder}": number for number, folder in enumerate(folders)}
    upward = [
        f"{module} imports {target}"
        for module in SOURCES
        for target, _ in imports_of(module)
        if number_of.get(target.rpartition(".")[0], -1) > number_of.get(module.rpartition(".")[0], len(number_of))
    ]
    assert not upward


def test_the_schedule_imports_nothing_but_itself_and_python() -> None:
    for module in SOURCES:
        if module.startswith("zeroengine.schedule"):
            nodes = [node for node in ast.walk(trees()[module]) if isinstance(node, ast.Import | ast.ImportFrom)]
            names = [
                name
                for node in nodes
                for name in (
                    [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                )
            ]
            others = [name for name in names if name and not name.startswith("zeroengine.schedule")]
            assert {name.split(".")[0] for name in others} <= sys.stdlib_module_names, module


def test_every_package_has_a_tier() -> None:
    packages = {package_of(module) for module in SOURCES if module.count(".")}
    assert packages == set(TIER_OF)


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {module: {target for target, _ in imports_of(module)} - {module} for module in SOURCES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circle of imports: {' -> '.join(error.args[1])}")


def test_imports_are_absolute_and_name_the_defining_module() -> None:
    for module, tree in trees().items():
        relative = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
        assert not relative, f"{module}: relative imports in lines {relative}"
        for target, name in imports_of(module):
            is_package = SOURCES[target].name == "__init__.py"
            assert not name or not is_package or target in PUBLIC_PACKAGES, f"{module}: {name} from package {target}"


def test_integrations_use_the_public_members_of_an_engine_alone() -> None:
    (engine,) = (
        node for node in ast.walk(trees()["zeroengine.engine.engine"]) if getattr(node, "name", "") == "Engine"
    )
    members = {node.attr if isinstance(node, ast.Attribute) else getattr(node, "name", "") for node in ast.walk(engine)}
    # A parameter's owner has the engine's parts under this name.
    hidden = {name for name in members if name.startswith("_") and not name.startswith("__")} | {"parts"}
    assert "_parts" in hidden
    for module, tree in trees().items():
        if module.startswith("zeroengine.integrations."):
            accesses = [
                f"{SOURCES[module]}:{node.lineno}: {ast.unparse(node)}"
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and node.attr in hidden and ast.unparse(node.value) != "self"
            ]
            assert not accesses


def test_no_two_classes_share_a_name() -> None:
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(module)
    shared = {name: places for name, places in modules.items() if len(places) > 1}
    assert not shared


def test_nothing_outside_of_the_transports_compares_the_name_of_a_transport() -> None:
    """``comm.transport_traits`` has what to ask instead, so that another transport needs no change elsewhere."""
    found = [
        f"{module}: {ast.unparse(node)}"
        for module, tree in trees().items()
        if not module.startswith("zeroengine.comm.transports.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if re.search(r"transport(\.name)?$", ast.unparse(side), re.IGNORECASE)
    ]
    assert not found


def test_every_exchange_of_objects_says_what_for() -> None:
    """Users need no purpose, where they exchange objects by ``engine.group``."""
    calls = [
        (module, node.lineno)
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("all_gather_object", "gather_object")
        if len(node.args) < 2 or getattr(getattr(node.func, "value", None), "id", "") == "dist"
    ]
    # The threads of the monitor and of saves have process groups of their own. With GPUs the group of exchanges is made
    # by one over NCCL.
    own = {"zeroengine.monitor.collector", "zeroengine.checkpoint.dcp_save", "zeroengine.comm.group"}
    assert {module for module, _ in calls} <= own, calls
    assert len(calls) == 3
