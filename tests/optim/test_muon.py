"""Muon's rule: its iteration, its agreement with torch's, and how it divides a model."""

from __future__ import annotations

import pytest
import torch

import zeroengine
from tests.distributed.models import TinyLM
from zeroengine.config.optimizers import MuonParams
from zeroengine.optim.muon import Muon, orthogonalize
from zeroengine.optim.muon_groups import build_muon

GROUP = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5, "eps": 1e-7, "ns_method": "standard"}
SHAPES = [(5, 5), (3, 40), (40, 3), (1, 7), (7, 1), (64, 48)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_becomes_nearly_orthogonal_whatever_else_is_in_its_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in SHAPES:
        batch = torch.randn(4, *shape, dtype=dtype) * torch.tensor([1e-6, 1.0, 1e6, 1.0], dtype=dtype).view(4, 1, 1)
        results = orthogonalize(batch.clone(), GROUP)
        for matrix, result in zip(batch, results, strict=True):
            assert torch.equal(orthogonalize(matrix[None].clone(), GROUP)[0], result)
            # The coefficients move singular values between 0.1 and 1 of the norm into this range.
            values = torch.linalg.svdvals(result.float())
            assert values.max() < 1.3 and values[0] > 0.6
    assert not orthogonalize(torch.zeros(1, 3, 3), GROUP).any()


def test_the_method_gram_computes_the_same_polynomial() -> None:
    torch.manual_seed(0)
    for shape in [*SHAPES, (24, 37), (128, 32)]:
        for ns_steps in (1, 2, 5, 9):
            batch = torch.randn(2, *shape)
            # A column far longer than the others makes all other singular values small.
            batch[1, :, 0] *= 100
            group = GROUP | {"ns_steps": ns_steps}
            found = orthogonalize(batch.clone(), group | {"ns_method": "gram"})
            torch.testing.assert_close(found, orthogonalize(batch.clone(), group), rtol=0, atol=1e-4)
            is_long = 2 * max(shape) > 3 * min(shape)
            assert torch.equal(found, orthogonalize(batch.clone(), group)) is not is_long


def torchs_own(params: list[torch.nn.Parameter], lr: float, adjust: str | None, nesterov: bool) -> torch.optim.Muon:
    """Torch's optimizer. Before 2.15 it has no "spectral_unclamped", and each matrix has a rate that amounts to it."""
    try:
        return torch.optim.Muon(params, lr=lr, adjust_lr_fn=adjust, nesterov=nesterov)
    except ValueError:
        assert adjust == "spectral_unclamped"
    ratios = [param.shape[0] / param.shape[1] for param in params]
    factors = [(ratio / max(1, ratio)) ** 0.5 for ratio in ratios]
    groups = [
        {"params": [param], "lr": lr * factor, "weight_decay": 0.1 / factor}
        for param, factor in zip(params, factors, strict=True)
    ]
    return torch.optim.Muon(groups, nesterov=nesterov)


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_takes_the_steps_of_torchs_own(adjust: str | None, nesterov: bool) -> None:
    torch.manual_seed(0)
    start = [torch.randn(24, 16), torch.randn(16, 24)]
    gradients = [[torch.randn_like(value) for value in start] for _ in range(3)]
    found = []
    for make in (lambda *given: Muon(given[0], given[1], adjust_lr_fn=given[2], nesterov=given[3]), torchs_own):
        params = [torch.nn.Parameter(value.clone()) for value in start]
        optimizer = make(params, 0.02, adjust, nesterov)
        for step in gradients:
            for param, gradient in zip(params, step, strict=True):
                param.grad = gradient.clone()
            optimizer.step()
        found.append(params)
    # Both iterate in bf16, from directions that may be rounded to neighbors.
    scale = 24**0.5 if adjust == "match_rms_adamw" else 1
    for own, theirs in zip(*found, strict=True):
        torch.testing.assert_close(own, theirs, rtol=0, atol=3 * 0.02 * 0.02 * scale)


def divided(model: torch.nn.Module, **settings: object) -> dict[str, list[str]]:
    """The names of the parameters that each algorithm updates."""
    optimizer = build_muon(model, list(model.parameters()), MuonParams(**settings).model_dump())
    names = {param: name for name, param in model.named_parameters()}
    found: dict[str, list[str]] = {}
    for group in optimizer.param_groups:
        found.setdefault(group["algorithm"], []).extend(names[param] for param in group["params"])
    return found


def test_a_model_is_divided_alike_with_and_without_memory() -> None:
    """Matrices inside of blocks; neither the embedding nor a head of its shape, tied or not, nor vectors."""
    for tied in (True, False):
        found = divided(TinyLM(tied, blocks=1))
        assert found["Muon"] == ["blocks.0.up.weight", "blocks.0.down.weight"]
        assert {"tok.weight", "norm.weight", "blocks.0.up.bias"} < set(found["AdamW"])
        with torch.device("meta"):
            assert divided(TinyLM(tied, blocks=1)) == found
        with zeroengine.meta_init():
            assert divided(TinyLM(tied, blocks=1)) == found
    assert divided(TinyLM(blocks=2), muon_params=["*.up.weight"])["Muon"] == [
        "blocks.0.up.weight",
        "blocks.1.up.weight",
    ]
