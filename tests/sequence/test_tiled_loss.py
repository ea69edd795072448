"""``tiled_loss`` has the values and gradients of ``F.linear`` and ``F.cross_entropy``, wherever it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.distributed.models import TinyLM
from tests.distributed.training import STAGES, Task, check_every_stage, ordinary_loop, train_plainly
from zeroengine.errors import ReleasedParameterError, ZeroEngineError
from zeroengine.sequence import tiled_loss as module

VOCABULARY, WIDTH, TOKENS = 61, 24, (2, 19)
Loss = Callable[..., torch.Tensor]


def plain_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    **options: Any,
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def tiled(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    """In tiles that divide neither the tokens nor one another, of several blocks each."""
    return zeroengine.tiled_loss(*inputs, **options, tile_tokens=7)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_BYTES", (module.CPU_BYTES[0], 2 * VOCABULARY * 4))


def inputs(dtype: torch.dtype = torch.float32, ignored: int = -100) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    labels = torch.randint(0, VOCABULARY, TOKENS)
    labels[0, :9] = ignored
    return torch.randn(*TOKENS, WIDTH, dtype=dtype), torch.randn(VOCABULARY, WIDTH, dtype=dtype) / 3, labels


def losses_and_gradients(loss_of: Loss, *tensors: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Return the loss, and the gradients of three times the loss."""
    hidden, weight, labels = tensors
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    if "bias" in options:
        options["bias"] = options["bias"].clone().requires_grad_()
    # A leaf's gradient is taken over from the backward as it is; another tensor's is used again.
    loss = loss_of(leaves[0] * 1, leaves[1], labels, **options)
    (3 * loss).backward()
    return [loss.detach(), *(leaf.grad for leaf in (*leaves, options.get("bias")) if leaf is not None)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-6) -> None:
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"softcap": 3.0},
        {"scale": 0.3},
        {"reduction": "sum", "ignore_index": 5, "softcap": 2.0, "scale": 1.7, "label_smoothing": 0.2},
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_torch(options: dict[str, Any]) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        tensors = inputs(dtype, options.get("ignore_index", -100))
        for more in ({}, {"bias": torch.linspace(-1, 1, VOCABULARY, dtype=dtype)}):
            expected = losses_and_gradients(plain_loss, *tensors, **options, **more)
            assert_same(losses_and_gradients(tiled, *tensors, **options, **more), expected, tolerance)


@pytest.mark.parametrize("with_bias", [False, True])
def test_in_bf16_the_error_is_that_of_torch(with_bias: bool) -> None:
    options = {"reduction": "sum", "ignore_index": 5, "softcap": 2.0, "scale": 1.7, "label_smoothing": 0.2}
    tensors = [*inputs(torch.bfloat16, 5), *[torch.linspace(-1, 1, VOCABULARY, dtype=torch.bfloat16)] * with_bias]
    results = []
    for loss_of, exact in ((plain_loss, True), (plain_loss, False), (tiled, False)):
        hidden, weight, labels, *bias = (t.double() if exact and t.is_floating_point() else t for t in tensors)
        more = {"bias": bias[0]} if bias else {}
        results.append(losses_and_gradients(loss_of, hidden, weight, labels, **options, **more))
    (exact_loss, *exact), (_, *plain), (loss, *found) = results
    assert loss.dtype == torch.float32 and loss == pytest.approx(exact_loss.item(), rel=1e-3)
    for one, of_torch, right in zip(found, plain, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - right).norm() <= 1.5 * (of_torch - right).norm()


def test_a_transform_of_the_logits_is_differentiated() -> None:
    tensors = inputs()
    found = losses_and_gradients(tiled, *tensors, transform=lambda logits: 3 * torch.tanh(logits / 3))
    assert_same(found, losses_and_gradients(plain_loss, *tensors, softcap=3.0))


def test_sums_in_16_bits_keep_small_gradients_and_do_not_overflow() -> None:
    """The sum over the labels is beyond fp16, and its mean is not; each tile adds less than bf16 resolves."""
    hidden, weight, labels = torch.full((1, 4000, 4), 30.0), torch.zeros(3, 4), torch.zeros(1, 4000, dtype=torch.int64)
    expected = losses_and_gradients(plain_loss, hidden, weight, labels)[2]
    for dtype in (torch.float16, torch.bfloat16):
        tensors = hidden.to(dtype), weight.to(dtype), labels
        found = losses_and_gradients(zeroengine.tiled_loss, *tensors, tile_tokens=100)[2]
        torch.testing.assert_close(found.float(), expected, rtol=4e-3, atol=0)


def checkpointed(use_reentrant: bool) -> Loss:
    def loss_of(*tensors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(tiled, *tensors, use_reentrant=use_reentrant)
        return result

    return loss_of


def twice(*tensors: torch.Tensor) -> torch.Tensor:
    return (tiled(*tensors) + tiled(*tensors)) / 2


def saved_on_cpu(*tensors: torch.Tensor) -> torch.Tensor:
    with save_on_cpu():
        return tiled(*tensors)


CALLS: dict[str, Loss] = {
    "reentrant checkpoint": checkpointed(True),
    "checkpoint": checkpointed(False),
    "nested checkpoints": lambda *tensors: checkpoint(checkpointed(False), *tensors, use_reentrant=False),
    "two uses": twice,
    "hooks on saved tensors": saved_on_cpu,
}


@pytest.mark.parametrize("call", [*CALLS, pytest.param("compiled", marks=pytest.mark.slow)])
def test_gradients_are_right_wherever_it_is_called(call: str) -> None:
    tensors = inputs()
    loss_of = CALLS[call] if call in CALLS else torch.compile(lambda *tensors: tiled(*tensors) * 1, backend="eager")
    assert_same(losses_and_gradients(loss_of, *tensors), losses_and_gradients(plain_loss, *tensors))


def test_a_graph_that_is_kept_gives_its_gradients_again() -> None:
    hidden, weight, labels = inputs()
    weight.requires_grad_()
    loss = tiled(hidden, weight, labels)
    first, second = (torch.autograd.grad(loss, weight, retain_graph=kept)[0] for kept in (True, False))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_autocast_computes_the_logits_in_its_dtype() -> None:
    tensors = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(losses_and_gradients(tiled, *tensors), losses_and_gradients(plain_loss, *tensors), 1e-2)


def test_only_what_is_needed_is_computed() -> None:
    hidden, weight, labels = inputs()
    assert not tiled(hidden, weight, labels).requires_grad
    hidden.requires_grad_()
    loss = tiled(hidden, weight, labels)
    assert [tensor is None for tensor in loss.grad_fn.next_functions[0][0].saved_tensors] == [False, True, True]
    with torch.no_grad():
        assert torch.equal(tiled(hidden, weight.requires_grad_(), labels), loss)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_labels_loss_and_gradients_are_zero(reduction: str) -> None:
    hidden, weight, labels = inputs()
    for tensors in ((hidden, weight, labels * 0 - 100), (hidden[:, :0], weight, labels[:, :0])):
        assert not any(tensor.any() for tensor in losses_and_gradients(tiled, *tensors, reduction=reduction))


def test_bad_input_is_an_error() -> None:
    hidden, weight, labels = inputs()
    for wrong in (
        (hidden, weight.t(), labels),
        (hidden, weight, labels[:, 1:]),
        (hidden, weight.double(), labels),
        (hidden, weight, labels.float()),
    ):
        with pytest.raises(ZeroEngineError, match=r"tiled_loss\(\) takes hidden .* found "):
            zeroengine.tiled_loss(*wrong)
    for options in (
        {"bias": weight[0]},
        {"softcap": 0},
        {"tile_tokens": 0},
        {"label_smoothing": 2},
        {"reduction": "no"},
    ):
        with pytest.raises(ZeroEngineError, match=r"tiled_loss\(\) takes hidden"):
            zeroengine.tiled_loss(hidden, weight, labels, **options)
    with pytest.raises(ZeroEngineError, match="label 61 is outside of the vocabulary of 61"):
        zeroengine.tiled_loss(hidden, weight, labels.clamp(min=VOCABULARY))


class TiledLM(TinyLM):
    """The weight of the head is read, and the head is never called."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.tok(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return zeroengine.tiled_loss(self.norm(hidden), self.head.weight, labels, tile_tokens=5)


def untied() -> TiledLM:
    return TiledLM(tied=False)


def untied_plain() -> TinyLM:
    return TinyLM(tied=False)


def losses_after_a_read(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    if engine.config.zero_optimization.stage == 3:
        head: Any = engine.module.head
        with pytest.raises(ReleasedParameterError, match=r"partitioned and released"):
            zeroengine.tiled_loss(torch.ones(1, WIDTH), head.weight, torch.ones(1, dtype=torch.int64))
    return ordinary_loop(task, engine)


@pytest.mark.parametrize(
    ("tiled_model", "plain", "micro_steps", "stages"),
    [(TiledLM, TinyLM, 1, STAGES), (untied, untied_plain, 2, (3,))],
    ids=["tied", "untied with accumulation"],
)
def test_training_is_that_of_the_plain_loss_at_every_stage(
    tiled_model: Any, plain: Any, micro_steps: int, stages: tuple[int, ...]
) -> None:
    expected = train_plainly(Task(plain, micro_steps=micro_steps))
    task = Task(tiled_model, micro_steps=micro_steps)
    check_every_stage(task, loop=losses_after_a_read, plain=expected, stages=stages)
