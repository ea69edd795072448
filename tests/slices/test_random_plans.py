"""Random models, split by random plans, train at every stage as one process does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.emulated import cpu_alone

pytestmark = [cpu_alone("the ranks of a model group talk over Gloo"), pytest.mark.slow]

WIDTH, WORDS, STEPS = 8, 13, 3
# By kind of block: how its layers may be split. The first is how they are whole.
PLANS: dict[str, Sequence[dict[str, str]]] = {
    "mlp": ({}, {"up": "colwise", "down": "rowwise"}, {"up": "colwise_gathered"}, {"down": "rowwise_whole_input"}),
    "attention": ({}, {"q": "colwise", "k": "colwise", "v": "colwise", "out": "rowwise"}, {"q": "colwise_gathered"}),
    "nested": ({}, {"inner.up": "colwise", "inner.down": "rowwise", "gate": "colwise_gathered"}),
}


class MLP(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias), nn.Linear(4 * WIDTH, WIDTH, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Heads of two elements, of which a rank may have some."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Nested(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.inner, self.gate = MLP(bias), nn.Linear(WIDTH, WIDTH, bias)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.gate(x).sigmoid() * self.scale


KINDS: dict[str, Any] = {"mlp": MLP, "attention": Attention, "nested": Nested}


@dataclass(frozen=True)
class Recipe:
    """A model, its plan and its training."""

    seed: int
    kinds: tuple[str, ...]
    plans: tuple[dict[str, str], ...]
    bias: bool
    splits_words: bool
    frozen: tuple[str, ...]
    checkpoints: str
    size: int
    stage: int
    micro_steps: int
    clip: float
    optimizer: str
    evaluates: bool
    transport: str


def random_recipe(seed: int) -> Recipe:
    rng = random.Random(seed)
    kinds = tuple(rng.choice(list(KINDS)) for _ in range(rng.randint(1, 4)))
    return Recipe(
        seed,
        kinds,
        tuple(rng.choice(PLANS[kind][rng.random() < 0.8 :]) for kind in kinds),
        rng.random() < 0.7,
        rng.random() < 0.5,
        tuple(rng.sample(("tok", "blocks.0", "norm", "blocks.0.norm"), rng.choice((0, 0, 1)))),
        rng.choice(("", "", "reentrant", "non-reentrant")),
        rng.choice((2, 2, 4)),
        rng.randrange(4),
        rng.choice((1, 1, 2)),
        rng.choice((0.0, 0.3)),
        rng.choice(("adamw", "momentum", "adagrad")),
        rng.random() < 0.3,
        rng.choice(("auto", "gloo")),
    )


class Model(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.checkpoints = recipe.checkpoints
        self.tok, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(KINDS[kind](recipe.bias) for kind in recipe.kinds)
        for name, param in self.named_parameters():
            param.requires_grad_(not any(name.startswith(f"{frozen}.") for frozen in recipe.frozen))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            if self.checkpoints and self.training:
                x = x if x.requires_grad else x.detach().requires_grad_()
                x = checkpoint(block, x, use_reentrant=self.checkpoints == "reentrant")
            else:
                x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3, weight_decay=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, eps=1e-3),
}


def batch(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    ids = torch.randint(0, WORDS, (2, 5), generator=generator)
    return ids, (3 * ids + 1) % WORDS


def build(recipe: Recipe) -> Model:
    torch.manual_seed(recipe.seed)
    return Model(recipe)


Found = tuple[list[float], list[float], dict[str, torch.Tensor]]


def train_plainly(recipe: Recipe, num_ranks: int) -> Found:
    model = build(recipe)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer, losses, norms = OPTIMIZERS[recipe.optimizer](params), [], []
    for number in range(STEPS * recipe.micro_steps):
        loss = torch.stack([model(*batch(number, rank)) for rank in range(num_ranks)]).mean()
        (loss / recipe.micro_steps).backward()
        losses.append(loss.item())
        if (number + 1) % recipe.micro_steps == 0:
            norms.append(nn.utils.clip_grad_norm_(params, recipe.clip or torch.inf).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, {name: value.detach() for name, value in model.state_dict().items()}


def train_split(recipes: Sequence[Recipe]) -> list[Found]:
    start()
    found = []
    for recipe in recipes:
        model = build(recipe)
        plan = {
            f"blocks.{index}.{name}": style for index, own in enumerate(recipe.plans) for name, style in own.items()
        }
        if recipe.splits_words or not plan:
            plan |= {"tok": "rowwise_whole_input", "head": "colwise_gathered"}
        zeroengine.parallelize(model, plan, size=recipe.size)
        params = [param for param in model.parameters() if param.requires_grad]
        zero = {"stage": recipe.stage, "param_persistence_threshold": 0}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": recipe.micro_steps,
            "gradient_clipping": recipe.clip,
            "zero_optimization": zero,
            "comm": {"transport": recipe.transport, "timeout_seconds": 20},
        }
        engine = zeroengine.initialize(model, OPTIMIZERS[recipe.optimizer](params), config)
        losses, norms = [], []
        for number in range(STEPS * recipe.micro_steps):
            if recipe.evaluates:
                engine.eval()
                with torch.no_grad():
                    engine(*batch(99, engine.sample_group))
                engine.train()
            loss = engine(*batch(number, engine.sample_group))
            engine.backward(loss)
            if engine.step():
                assert engine.grad_norm is not None
                norms.append(engine.grad_norm)
            losses.append(loss.item())
        assert engine.memory().gathered == 0
        found.append((losses, norms, engine.full_state_dict()))
        engine.close()
    return found


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_plans_train_as_one_process(first: int) -> None:
    recipes = [random_recipe(seed) for seed in range(first, first + 20)]
    ranks = run_ranks(4, train_split, recipes, timeout=400)
    wrong = []
    for index, recipe in enumerate(recipes):
        losses, norms, state = train_plainly(recipe, 4 // recipe.size)
        means = [sum(values) / 4 for values in zip(*(found[index][0] for found in ranks), strict=True)]
        own_state = ranks[0][index][2]
        is_right = (
            means == pytest.approx(losses, rel=1e-5)
            and ranks[3][index][1] == pytest.approx(norms, rel=1e-5)
            and all(torch.allclose(own_state[name], value, rtol=1e-5, atol=2e-6) for name, value in state.items())
        )
        if not is_right:
            wrong.append((recipe, means, losses, ranks[3][index][1], norms))
    assert not wrong, wrong
