"""What belongs to the process, and not to an engine, is in a table that says why two engines are right."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from tests.conftest import ROOT
from tests.test_layers import SOURCES, trees

SECTION = "## Two engines in one process"
# What changes an object that a name of a module refers to.
MUTATORS = set("add append appendleft clear discard extend insert pop popitem remove setdefault update".split())
# Objects whose use is to be changed, wherever that is done.
REGISTRIES = {"ContextVar", "WeakKeyDictionary", "WeakSet", "WeakTensorKeyDictionary", "WeakValueDictionary", "local"}
CACHES = {"cache", "lru_cache"}
# Code outside of the processes that train.
OTHER_PROCESSES = ("zeroengine.launch.", "zeroengine.cli.", "zeroengine.view.")


def last_name(node: ast.AST) -> str:
    """Return ``c`` of ``a.b.c``, ``a.b.c(...)`` and ``a.b.c[...]``."""
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def changed_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield each ``name`` in ``name[...] = ...``, ``name.add(...)``, ``global name`` and ``name.attribute = ...``."""
    for node in nodes:
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield getattr(node.value, "id", "")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            yield getattr(node.func.value, "id", "")


def registries_of(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module that hold what changes while the process runs."""
    nodes = list(ast.walk(tree))
    changed = set(changed_names(nodes))
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and any(last_name(item) in CACHES for item in node.decorator_list):
            yield node.name
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                value = node.value.func if isinstance(node.value, ast.Call) else node.value
                kind = last_name(value) if value is not None else ""
                is_cache = isinstance(node.value, ast.Call) and kind in CACHES
                if isinstance(target, ast.Name) and (target.id in changed or kind in REGISTRIES or is_cache):
                    yield target.id
        # A class is changed by its name, or by ``type(self)`` and ``cls``, in any function.
        elif isinstance(node, ast.ClassDef) and node.name in changed:
            yield node.name
        elif isinstance(node, ast.ClassDef) and any(last_name(base) in REGISTRIES for base in node.bases):
            yield node.name


def test_the_design_names_every_registry_of_the_process_and_no_other() -> None:
    section = (ROOT / "docs/design.md").read_text().split(SECTION)[1].split("\n## ")[0]
    documented = set(re.findall(r"`([\w/]+\.py):(\w+)`", section))
    found = {
        (str(SOURCES[module].relative_to(ROOT / "zeroengine")), name)
        for module, tree in trees().items()
        if not module.startswith(OTHER_PROCESSES)
        for name in registries_of(tree)
    }
    assert not found - documented, f"say in docs/design.md, {SECTION!r}, why two engines are right"
    assert not documented - found


def test_a_new_registry_is_found() -> None:
    code = """
TABLE = {"a": 1}
_groups: dict[int, object] = {}
_open = weakref.WeakSet[Engine]()
_count = 0
class Listener:
    current = None
def use():
    global _count
    _groups[0] = _open
    Listener.current = TABLE
@functools.lru_cache(maxsize=4)
def answer(x): ...
_groups_of = functools.cache(answer)
"""
    assert set(registries_of(ast.parse(code))) == {"_groups", "_open", "_count", "Listener", "answer", "_groups_of"}
