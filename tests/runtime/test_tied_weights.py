"""What the weight of an embedding that is also the head's takes in a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.fake_group import init_fake_group
from tests.distributed.models import VOCAB, WIDTH, TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from zeroengine.runtime.tied_gradients import add_in_place

Gradients = dict[str, torch.Tensor]


def gradients_of(prepare: Callable[[nn.Module], object]) -> tuple[list[str], Gradients]:
    """The additions of gradients of the tied weight in a backward, and all gradients."""
    model = build()
    prepare(model)
    loss = model(*batch(0, 0))
    # A dispatch mode would hold the gradients, so that nothing could be added to them.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        loss.backward()
    additions = [
        event.name
        for event in profile.events()
        if event.name in ("aten::add", "aten::add_") and event.input_shapes[:1] == [[VOCAB, WIDTH]]
    ]
    return additions, {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def test_the_gradients_of_a_tied_weight_are_added_in_place_with_the_same_bits() -> None:
    (plain_sums, plain), (sums, gradients) = gradients_of(lambda _: None), gradients_of(add_in_place)
    # If torch adds in place by itself one day, ``tied_gradients`` can go.
    assert (plain_sums, sums) == (["aten::add"], ["aten::add_"])
    assert plain.keys() == gradients.keys()
    assert all(torch.equal(gradient, plain[name]) for name, gradient in gradients.items())


def test_what_a_hook_of_the_user_keeps_of_a_tied_weight_is_not_added_to() -> None:
    kept: list[torch.Tensor] = []

    def keep(head: nn.Module, args: Any, output: torch.Tensor) -> None:
        assert output.grad_fn is not None
        transpose = output.grad_fn.next_functions[0][0].next_functions[1][0]  # type: ignore[union-attr]
        assert transpose is not None and transpose.name() == "TBackward0"
        transpose.register_hook(lambda gradients, _: kept.append(gradients[0]))

    def prepare(model: nn.Module) -> None:
        add_in_place(model)
        model.head.register_forward_hook(keep)

    sums, gradients = gradients_of(prepare)
    assert sums == ["aten::add"]
    # The embedding has added something to what the head gave.
    assert not torch.equal(kept[0], gradients["tok.weight"])


def test_second_derivatives_of_a_tied_weight_are_those_of_plain_torch() -> None:
    def second(prepare: Callable[[nn.Module], object]) -> torch.Tensor:
        model = build()
        prepare(model)
        (first,) = torch.autograd.grad(model(*batch(0, 0)), [model.tok.weight], create_graph=True)  # type: ignore[list-item]
        return torch.autograd.grad(first.square().sum(), [model.tok.weight])[0]  # type: ignore[list-item]

    assert torch.equal(second(lambda _: None), second(add_in_place))


def gathered_in_backward(tied: bool) -> tuple[list[int], int]:
    """The gathered bytes after the backward of each block, and the bytes of a block and of the embedding."""
    init_fake_group(64)
    model = build(lambda: TinyLM(tied))
    needed = sum(param.nbytes for layer in (model.blocks[0], model.tok) for param in layer.parameters())
    engine = zeroengine.initialize(model, config=config(3, zero_optimization={"prefetch_bucket_size": 0}))
    gathered: list[int] = []
    for block in model.blocks:
        block.register_full_backward_hook(lambda *_: gathered.append(engine.memory().gathered))
    engine.backward(engine(*batch(0, 0)))
    return gathered, needed


@pytest.mark.parametrize("tied", [True, False])
def test_the_unit_of_head_and_embedding_is_released_after_the_backward_of_the_head(tied: bool) -> None:
    ((gathered, of_both),) = run_ranks(1, gathered_in_backward, tied)
    assert len(gathered) == 3 and max(gathered) < of_both
