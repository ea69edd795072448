"""What computes, is kept, and travels in which dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zeroengine
from tests.distributed.models import TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.test_mixed_precision import BF16, Slope
from tests.distributed.training import (
    STAGES,
    Task,
    Trained,
    adamw,
    assert_close,
    assert_same_bits,
    make_engine,
    ordinary_loop,
    start,
    train_at,
    train_plainly,
)
from tests.emulated import cpu_alone
from tests.parametrization import TRANSPORTS

EVERY_STAGE = (0, 1, 2, 3)  # of which two each have the same bits with several micro-steps
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 10}}
PRECISIONS = {torch.bfloat16: BF16, torch.float16: FP16}


# -- the master ---------------------------------------------------------------------------------------


def masters() -> list[str]:
    rank = start()
    wrong = []
    for low, precision in PRECISIONS.items():
        for stage in STAGES:
            model = build(partly_frozen, seed=rank)  # rank 0's counts
            plain = dict(build(partly_frozen).named_parameters())
            engine = zeroengine.initialize(model, adamw(model), make_settings(stage, **precision))
            for name, param in model.named_parameters():
                rounded = plain[name].to(low)
                expected = rounded.float() if not param.requires_grad else plain[name]
                if param.dtype is not low or not torch.equal(zeroengine.full_master(param), expected):
                    wrong.append(f"{low}, stage {stage}: master of {name}")
                with zeroengine.gathered(param):
                    if not torch.equal(param, rounded):
                        wrong.append(f"{low}, stage {stage}: {name}")
            engine.close()
    return wrong


def partly_frozen() -> nn.Module:
    model = TinyLM()
    model.blocks[1].requires_grad_(False)
    return model


def make_settings(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}} | more


def test_the_master_starts_from_the_models_own_values() -> None:
    assert run_ranks(2, masters) == [[], []]


# -- modules that keep fp32 ---------------------------------------------------------------------------


class Seen:
    """Which dtypes a module takes and gives, and its parameters and their gradients have."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        self.dtypes: dict[str, set[torch.dtype]] = {}
        for name in names:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda m, args, n=name: self.see(f"{n} takes", *args))
            module.register_forward_hook(lambda m, args, output, n=name: self.see(f"{n} computes", output))
            for key, param in module.named_parameters():
                param.register_hook(lambda grad, n=f"{name}.{key}", p=param: self.see(n, grad, p))

    def see(self, what: str, *tensors: torch.Tensor) -> None:
        self.dtypes.setdefault(what, set()).update(t.dtype for t in tensors)


def watched(patterns: list[str] | None, stage: int, model: nn.Module) -> tuple[Seen, Trained]:
    """Three steps in bf16."""
    seen = Seen(model, ("tok", "norm", "blocks.0.norm", "blocks.0.up", "blocks.0.down", "head"))
    engine = zeroengine.initialize(
        model, adamw(model), make_settings(stage, keep_fp32_modules=patterns, gradient_clipping=1.0, **BF16)
    )
    losses, norms = ordinary_loop(Task(steps=3), engine)
    return seen, Trained(losses, norms, engine.full_state_dict())


BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
KEPT: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "class": (["LayerNorm"], ("norm", *(f"{block}.norm" for block in BLOCKS))),
    "name": (["*.norm", "*.down"], tuple(f"{block}.{name}" for block in BLOCKS for name in ("norm", "down"))),
    "container": (["blocks"], BLOCKS),
    "tied": (["head"], ("head", "tok")),
}


def by_hand(kept: tuple[str, ...]) -> nn.Module:
    """The model in bf16, and ``kept`` in fp32 with casts around them."""
    model = build().bfloat16()
    for name in kept:
        module = model.get_submodule(name).float()
        module.load_state_dict(build().get_submodule(name).state_dict())

        def casting(x: torch.Tensor, forward: Any = module.forward) -> torch.Tensor:
            return forward(x.float() if x.is_floating_point() else x).bfloat16()

        module.forward = casting  # type: ignore[method-assign]
    return model


def keeping() -> list[tuple[str, int, dict[str, set[torch.dtype]], Trained]]:
    start()
    found = []
    for case, (patterns, _) in KEPT.items():
        for stage in STAGES:
            seen, trained = watched(patterns, stage, build())
            found.append((case, stage, seen.dtypes, trained))
    return found


@cpu_alone("it compares bits of the CPU's matrix products")
def test_modules_that_keep_fp32_compute_in_it_and_give_low_precision_back() -> None:
    first, second = run_ranks(2, keeping)
    by_stage: dict[str, Trained] = {}
    for rank, found in enumerate((first, second)):
        by_stage.clear()
        for case, stage, dtypes, trained in found:
            assert_same_bits(by_stage.setdefault(case, trained), trained, (case, stage))
            _, names = KEPT[case]
            for what, seen in dtypes.items():
                name = what.removesuffix(" takes").removesuffix(" computes")
                wide = any(name == kept or name.startswith(f"{kept}.") for kept in names)
                if not what.startswith("tok takes"):  # token numbers
                    assert seen == {torch.float32 if wide else torch.bfloat16}, (case, stage, what, seen)
            assert trained.losses[0] == by_hand(names)(*batch(0, rank)).item(), "as if cast by hand"


# -- buffers and BatchNorm ----------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("angles", torch.linspace(0, 1, 6) + 1e-4)
        self.register_buffer("counts", torch.arange(6))
        self.dtypes: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x + self.angles.to(x.dtype))
        normed = self.norm(hidden)
        self.dtypes = {"x": x.dtype, "hidden": hidden.dtype, "normed": normed.dtype}
        return self.last(normed).float().square().mean()


def rows(step: int, rank: int) -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randn(16, 6, generator=generator),)


NORMED = Task(factory=Normed, data=rows, steps=3)


def buffers() -> list[tuple[list[Trained], dict[str, torch.dtype], dict[str, Any]]]:
    start()
    found = []
    for more in (BF16, FP16, BF16 | {"data_types": {"buffer_dtype": "bf16"}}):
        trained, dtypes = [], {}
        for stage in STAGES:
            engine = make_engine(NORMED, stage, **more)
            kept = dict(engine.module.named_buffers())
            assert torch.equal(kept["counts"], torch.arange(6))
            assert torch.equal(kept["angles"], (torch.linspace(0, 1, 6) + 1e-4).to(kept["angles"].dtype))
            losses, norms = ordinary_loop(NORMED, engine)
            state = engine.full_state_dict()
            trained.append(Trained(losses, norms, state))
            dtypes = {name: tensor.dtype for name, tensor in state.items()}
            engine.eval()
            assert engine(*rows(9, 0)).isfinite()
        found.append((trained, dtypes, engine.module.dtypes))
    return found


def test_buffers_keep_their_dtype_and_batch_norm_fp32_unless_told_otherwise() -> None:
    """Over ranks a BatchNorm's statistics differ, as under DDP."""
    ranks = run_ranks(2, buffers)
    plain = train_plainly(NORMED)
    for found in ranks:
        for (trained, dtypes, seen), low, buffer in zip(
            found, (torch.bfloat16, torch.float16, torch.bfloat16), (torch.float32, torch.float32, torch.bfloat16),
            strict=True,
        ):  # fmt: skip
            for other, stage in zip(trained, STAGES, strict=True):
                assert_same_bits(trained[0], other, (low, stage))
            assert seen == {"x": low, "hidden": low, "normed": low}
            assert dtypes["angles"] == dtypes["norm.running_var"] == dtypes["norm.weight"] == buffer
            assert (
                dtypes["first.weight"] == low and dtypes["counts"] == dtypes["norm.num_batches_tracked"] == torch.int64
            )
            assert trained[0].norms == pytest.approx(plain.norms, rel=0.05)
    fed = build(Normed).first.bfloat16()(rows(0, 0)[0].bfloat16() + build(Normed).angles.bfloat16()).float()
    one_step = run_ranks(1, statistics)[0]
    assert torch.equal(one_step, 0.1 * fed.mean(0)), "of the values that came in, in fp32"


def statistics() -> torch.Tensor:
    engine = make_engine(NORMED, 3, **BF16)
    engine(*rows(0, 0))
    return engine.full_state_dict()["norm.running_mean"]


# -- inputs -------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Takes all kinds of things."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, *, more: dict[str, Any], mask: torch.Tensor) -> Any:
        dtypes = {"x": x.dtype, "ids": ids.dtype, "double": more["double"].dtype, "mask": mask.dtype}
        dtypes["complex"] = more["list"][0].dtype
        return self.linear(x)[ids].sum(), dtypes, more["name"]


def inputs() -> dict[str, Any]:
    start()
    found = {}
    given = {"double": torch.ones(2, dtype=torch.float64), "list": [torch.ones(1, dtype=torch.complex64)], "name": "a"}
    for name, more in {
        "fp32": {},
        "bf16": BF16,
        "fp16": FP16,
        "autocast": {"torch_autocast": {"enabled": True}},
    }.items():
        engine = make_engine(Task(factory=Mixture, optimizer=adamw), 3, **more)
        loss, dtypes, kept = engine(torch.ones(3, 4), torch.tensor([0, 2]), more=given, mask=torch.tensor([True]))
        assert kept == "a" and given["double"].dtype is torch.float64, "the caller's own are left alone"
        found[name] = {key: str(dtype)[6:] for key, dtype in dtypes.items()}
        engine.backward(loss)
        assert engine.step()
    return found


def test_floating_inputs_take_the_low_precision_and_others_stay() -> None:
    rest = {"ids": "int64", "mask": "bool", "complex": "complex64"}
    assert run_ranks(2, inputs)[0] == {
        "fp32": rest | {"x": "float32", "double": "float64"},
        "autocast": rest | {"x": "float32", "double": "float64"},
        "bf16": rest | {"x": "bfloat16", "double": "bfloat16"},
        "fp16": rest | {"x": "float16", "double": "float16"},
    }


# -- torch.autocast -----------------------------------------------------------------------------------


def plainly_autocast(dtype: torch.dtype, steps: int = 4) -> Trained:
    model = build()
    optimizer = adamw(model)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        seen = []
        for rank in range(2):
            with torch.autocast("cpu", dtype):
                loss = model(*batch(step, rank))
            (loss * 512).backward()  # / 2 ranks / 1024
            seen.append(loss.item())
        for param in model.parameters():
            param.grad.div_(1024)
        losses.append(sum(seen) / 2)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return Trained(losses, norms, {name: value.clone() for name, value in model.state_dict().items()})


def autocast() -> list[list[Trained]]:
    start()
    found = []
    for dtype in ("bfloat16", "float16"):
        more = {"torch_autocast": {"enabled": True, "dtype": dtype}, "fp16": {"initial_scale_power": 10}}
        found.append(train_at(STAGES, Task(), ordinary_loop, more))
        engine = make_engine(Task(), 3, **more)
        with pytest.raises(TypeError):
            engine("too", "many", "arguments")
        assert not torch.is_autocast_enabled("cpu"), "left, whatever happened inside"
        assert engine.loss_scale == (1024 if dtype == "float16" else 1)
    return found


def test_torch_autocast_is_plain_autocast() -> None:
    ranks = run_ranks(2, autocast)
    for i, dtype in enumerate((torch.bfloat16, torch.float16)):
        for found in ranks:
            for other, stage in zip(found[i], STAGES, strict=True):
                assert_same_bits(found[i][0], other, (dtype, stage))
        assert {value.dtype for value in ranks[0][i][0].state.values()} == {torch.float32}
        # Adam's first steps magnify differences in gradients near 0.
        assert_close([found[i][0] for found in ranks], plainly_autocast(dtype), tolerance=1e-4)


# -- gradients ----------------------------------------------------------------------------------------


def some_local(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """The middle one of three micro-steps stays on the rank."""
    losses, norms = [], []
    for micro_step in range(task.steps * task.micro_steps):
        loss = engine(*task.data(micro_step, engine.rank))
        if micro_step % 3 == 1:
            with engine.no_sync():
                engine.backward(loss)
        else:
            engine.backward(loss)
        if engine.step():
            norms.append(engine.grad_norm)
        losses.append(loss.item())
    return losses, norms


GRADIENTS: dict[str, tuple[dict[str, Any], float]] = {
    "fp32, sent in bf16": ({"communication_data_type": "bf16"}, 2e-3),
    "fp32, sent in fp16": ({"communication_data_type": "fp16"}, 5e-4),
    "fp32, accumulated in bf16": ({"data_types": {"grad_accum_dtype": "bf16"}}, 4e-3),
    "fp32, accumulated in bf16, sent in fp32": (
        {"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "fp32"},
        4e-3,
    ),
    "bf16": (BF16, 1e-2),
    "bf16, sent in fp32": (BF16 | {"communication_data_type": "fp32"}, 1e-2),
    "bf16, sent in bf16": (BF16 | {"communication_data_type": "bf16"}, 1e-2),
    "bf16, accumulated in bf16": (BF16 | {"data_types": {"grad_accum_dtype": "bf16"}}, 1e-2),
    "fp16, accumulated and sent in fp32": (
        FP16 | {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
        2e-3,
    ),
}


# The others differ from these in one of the dtypes.
SOME_GRADIENTS = (
    "fp32, accumulated in bf16, sent in fp32",
    "bf16",
    "bf16, accumulated in bf16",
    "fp16, accumulated and sent in fp32",
)


def with_gradients_in(transport: str, names: Sequence[str]) -> dict[str, list[Trained]]:
    task = Task(micro_steps=3, steps=2)
    more = {"comm": {"transport": transport}}
    found = {name: train_at(stages_of(name, transport), task, some_local, more | GRADIENTS[name][0]) for name in names}
    found["one micro-step"] = train_at(
        STAGES, Task(steps=3), ordinary_loop, more | BF16 | {"communication_data_type": "fp32"}
    )
    return found


def stages_of(name: str, transport: str) -> Sequence[int]:
    """All stages in the slow form, and with the dtype whose bits are compared; else two of them in turn."""
    return EVERY_STAGE if transport == "gloo" or name == "bf16" else ((0, 3), (1, 2))[list(GRADIENTS).index(name) % 2]


@pytest.mark.parametrize(
    ("transport", "names"),
    [
        pytest.param("shm", SOME_GRADIENTS, id="shm-some"),
        *(pytest.param(name, tuple(GRADIENTS), id=f"{name}-all", marks=pytest.mark.slow) for name in TRANSPORTS),
    ],
)
def test_gradients_may_accumulate_and_travel_in_another_dtype(transport: str, names: Sequence[str]) -> None:
    ranks = run_ranks(2, with_gradients_in, transport, names)
    plain = train_plainly(Task(micro_steps=3, steps=2))
    for name in names:
        tolerance = GRADIENTS[name][1]
        for number, stage in enumerate(stages_of(name, transport)):
            means = [sum(both) / 2 for both in zip(*(found[name][number].losses for found in ranks), strict=True)]
            assert means == pytest.approx(plain.losses, rel=tolerance), (name, stage)
            for found in ranks:
                ours, others = found[name][number], ranks[0][name][number]
                assert ours.norms == pytest.approx(plain.norms, rel=2 * tolerance), (name, stage)
                assert_same_bits(Trained([], ours.norms, ours.state), Trained([], others.norms, others.state), name)
    for found in ranks:
        for first, second in ((0, 1), (2, 3)):
            assert_same_bits(found["bf16"][first], found["bf16"][second])
    norms = train_plainly(Task(steps=3)).norms
    for trained in ranks[0]["one micro-step"]:
        assert trained.norms == pytest.approx(norms, rel=2e-2)


def sloped(micro_step: int) -> torch.Tensor:
    return torch.full((700,), 256.0 if micro_step % 8 == 0 else 0.5)


def accumulated(local: bool) -> dict[tuple[str, int], float]:
    start()
    found = {}
    task = Task(factory=Slope, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), micro_steps=8)
    for name, dtypes in {"usual": {}, "low": {"grad_accum_dtype": "bf16"}}.items():
        for stage in STAGES:
            engine = make_engine(task, stage, data_types=dtypes, gradient_clipping=0, **BF16)
            for micro_step in range(16):
                loss = engine(sloped(micro_step))
                if local and not engine.is_gradient_accumulation_boundary():
                    with engine.no_sync():
                        engine.backward(loss)
                else:
                    engine.backward(loss)
                engine.step()
            assert engine.grad_norm is not None
            found[name, stage] = engine.grad_norm / 700**0.5 * 8
    return found


@pytest.mark.parametrize("local", [False, True], ids=["synced", "no_sync"])
def test_small_gradients_of_later_micro_steps_are_not_lost(local: bool) -> None:
    """In bf16 256 + 0.5 is 256. Where shards are sent the sum travels in bf16 and is 260."""
    for found in run_ranks(2, accumulated, local):
        for (name, stage), total in found.items():
            expected = 256.0 if name == "low" else 260.0 if local and stage >= 2 else 259.5
            assert total == pytest.approx(expected, rel=1e-6), (name, stage)


# -- a last look at plain modules ---------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
        self.norm = nn.GroupNorm(2, 24)
        self.out = nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.attention(x, x, x)
        return F.softplus(self.out(self.norm(hidden.transpose(1, 2)).transpose(1, 2))).mean()


def sequences(step: int, rank: int) -> tuple[torch.Tensor]:
    return (torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(10 * step + rank)),)


@pytest.mark.slow  # test_parameters has such modules
def test_the_stages_agree_where_modules_read_parameters_of_their_children() -> None:
    task = Task(factory=Attention, data=sequences, steps=3)
    for keep in (None, ["attention", "GroupNorm"]):
        for found in run_ranks(2, train_at, STAGES, task, ordinary_loop, BF16 | {"keep_fp32_modules": keep}):
            for other, stage in zip(found, STAGES, strict=True):
                assert_same_bits(found[0], other, (keep, stage))
            assert found[0].norms == pytest.approx(train_plainly(task).norms, rel=0.05)
