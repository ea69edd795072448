from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import ROOT
from tests.test_layers import SOURCES, trees
from zeroengine.runtime.running_calls import function_node_number
from zeroengine.utils import torch_internals

INTERNALS = "zeroengine.utils.torch_internals"
# Private names of Python's own library, and of libraries that their own modules check.
OTHER_NAMES = {
    *("_DummyThread", "_actions", "_asdict", "_current_frames", "_exit", "_getframe"),
    # transformers, peft and Ray
    *("_adjust_missing_and_unexpected_keys", "_attn_implementation", "_base_exc", "_check_merge_allowed"),
    *("_global_mapping", "_is_hf_initialized", "_loss_function", "_model_mapping", "_weight_conversions"),
    # bitsandbytes
    "_quantize",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield the line of each private name that is imported or read of an object, the name, and where it is read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = (*str(node.module).split("."), *(alias.name for alias in node.names))
            yield from ((node.lineno, name, str(node.module)) for name in names if is_private(name))
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".") if alias.name.startswith("torch.")]
            yield from ((node.lineno, name, "import") for name in names if is_private(name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, node.attr, ast.unparse(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            names = [str(arg.value) for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, name, ast.unparse(node.args[0])) for name in names if is_private(name))


def names_of_zeroengine() -> set[str]:
    """Return the private names that zeroengine's own classes and modules define."""
    defined: set[str] = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                defined.update([node.attr] if ast.unparse(node.value) in ("self", "cls") else [])
    return defined


def test_one_file_reads_the_private_names_of_torch() -> None:
    strings = (node.value for node in ast.walk(trees()[INTERNALS]) if isinstance(node, ast.Constant))
    of_torch = {part for text in strings if isinstance(text, str) for part in text.split(".") if is_private(part)}
    assert {"_C", "_cdata", "_backward_hooks", "_sequence_nr"} <= of_torch
    allowed = OTHER_NAMES | (names_of_zeroengine() - of_torch)
    violations = [
        f"{SOURCES[module].relative_to(ROOT)}:{line}: {owner}.{name}"
        for module, tree in trees().items()
        # Integrations check the versions of the frameworks whose names they read.
        if module != INTERNALS and not module.startswith("zeroengine.integrations.")
        for line, name, owner in private_names(tree)
        if name not in allowed and not owner.startswith("super()") and owner not in ("self", "cls")
    ]
    assert not violations, "\n".join(violations)


LACKING = """
import torch
del torch._C._storage_Use_Count, torch._C._will_engine_execute_node
import zeroengine
from zeroengine.utils import torch_internals
try:
    zeroengine.initialize(torch.nn.Linear(2, 2), None, {"optimizer": {"type": "Adam"}})
except zeroengine.ZeroEngineError as error:
    print(error)
"""


def test_a_torch_that_lacks_names_is_an_error_with_a_version_that_works() -> None:
    printed = subprocess.run([sys.executable, "-c", LACKING], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert f"torch {torch.__version__} lacks what zeroengine reads of it: torch." in printed.stdout, printed
    names = ("_C._storage_Use_Count", "_C._will_engine_execute_node")
    assert all(name in printed.stdout for name in names)
    assert f"pip install torch=={torch_internals.NEWEST_TORCH}" in printed.stdout


class _Older(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function):  # type: ignore[no-untyped-def]
        function()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None


class _WithSetup(_Older):
    @staticmethod
    def forward(x, function):  # type: ignore[no-untyped-def]
        function()
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        pass


class _InAutocast(_Older):
    forward = staticmethod(torch.amp.custom_fwd(device_type="cpu")(_Older.forward))


@pytest.mark.parametrize("function", [_Older, _WithSetup, _InAutocast])
def test_the_node_of_the_function_in_whose_forward_code_runs(function: type[torch.autograd.Function]) -> None:
    numbers: list[int | None] = []
    x = torch.ones(2, requires_grad=True)
    out = function.apply(x, lambda: numbers.append(function_node_number()))
    assert numbers == [torch_internals.node_number(out.grad_fn)]
    assert function_node_number() is None


def test_the_node_of_a_reentrant_checkpoint_around_others() -> None:
    numbers: list[int | None] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        numbers.append(function_node_number())
        return nn.functional.relu(x)

    x = torch.ones(2, requires_grad=True)
    out = checkpoint(lambda x: checkpoint(inner, x, use_reentrant=True), x, use_reentrant=True)
    assert numbers == [torch_internals.node_number(out.grad_fn)]
