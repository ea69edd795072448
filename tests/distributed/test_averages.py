"""The moving average of the weights (`ema`): its values wherever it lives, evaluation, checkpoints and exports."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeroengine
from tests.distributed.models import ADAMW, TinyLM, batch, build, config
from tests.distributed.pretended import ApartMode, LateCopies
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from zeroengine import ZeroEngineError
from zeroengine.engine.initialize import make_engine
from zeroengine.weights.export import export

DECAY = 0.8
EMA = {"ema": {"decay": DECAY}}
LOW = {"ema": {"decay": DECAY, "dtype": "bf16"}, "bf16": {"enabled": True}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}
AMSGRAD = {"optimizer": {"type": "torch.optim.AdamW", "params": {"lr": 1e-2, "amsgrad": True}}}
ADAFACTOR = {"optimizer": {"type": "torch.optim.Adafactor", "params": {"lr": 1e-2}}}
Values = dict[str, torch.Tensor]


class Branching(TinyLM):
    """A parameter that only some forwards use, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes, self.frozen = nn.Parameter(torch.ones(1300)), nn.Parameter(torch.ones(3), requires_grad=False)
        self.use = True

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = super().forward(ids, labels)
        return loss + self.sometimes.square().mean() * self.frozen.mean() if self.use else loss


BASE: dict[str, Any] = {"gradient_clipping": 0.0, "optimizer": {"type": "AdamW", "params": {**ADAMW, "lr": 1e-2}}}


def make(stage: int, disk: str | None = None, **more: Any) -> zeroengine.Engine:
    zero: dict[str, Any] = {}
    if disk is not None:
        place = {"device": "nvme", "nvme_path": disk}
        zero = {"offload_optimizer": place | {"buffer_size": 4096}, "offload_param": place if stage == 3 else {}}
    return zeroengine.initialize(build(Branching), config=config(stage, zero_optimization=zero, **(BASE | more)))


def train(engine: zeroengine.Engine, steps: range, after: Callable[[], None] = lambda: None) -> None:
    """Every rank has the same gradients. Step 2 is skipped, and a parameter has no gradient in odd steps."""
    for step in steps:
        engine.module.use = step % 2 == 0
        loss = engine(*batch(step, 0))
        engine.backward(loss * float("nan") if step == 2 else loss)
        if engine.step():
            after()


def values(engine: zeroengine.Engine, *, ema: bool) -> Values:
    with zeroengine.gathered(engine.module, ema=ema):
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def assert_equal(one: Values, other: Values, note: object = None) -> None:
    assert not (different := [name for name in one if not torch.equal(one[name], other[name])]), (note, different)


def trained(cases: list[tuple[int, dict[str, Any]]], disk: str) -> list[Values]:
    start()
    results = []
    for stage, more in cases:
        engine = make(stage, **{key: disk if key == "disk" else value for key, value in more.items()})
        train(engine, range(4))
        results.append(values(engine, ema=True))
        engine.close()
    return results


FAMILIES: list[list[tuple[int, dict[str, Any]]]] = [
    [(0, EMA), (2, EMA | {"disk": ""}), (3, EMA | {"disk": ""})],
    [(0, LOW), (3, LOW | {"disk": ""})],
    [(0, EMA | MUON), (3, EMA | MUON | {"disk": ""})],
    [(0, EMA | AMSGRAD), (3, EMA | AMSGRAD)],
    [(0, LOW | ADAFACTOR), (3, LOW | ADAFACTOR)],
]


@pytest.mark.parametrize(
    "families",
    [[FAMILIES[1], FAMILIES[2]], pytest.param(FAMILIES, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_averages_have_the_same_bits_at_every_stage_with_offload_and_on_one_rank(
    families: list[list[tuple[int, dict[str, Any]]]], tmp_path: Path
) -> None:
    cases = [case for family in families for case in family]
    by_rank = run_ranks(2, trained, cases, str(tmp_path))
    # One rank has the average of torch, whose gradients it has, too.
    of_torch = [family[-1] for family in families if family in FAMILIES[:2]]
    alone = run_ranks(1, trained, of_torch, str(tmp_path))[0]
    results = iter(by_rank[0])
    for number, family in enumerate(families):
        first = next(results)
        for case in family[1:]:
            assert_equal(first, next(results), case)
        if number < len(alone):
            assert_equal(first, alone[number], family)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(*by_rank, strict=True) for name in a)


def evaluate(stage: int, more: dict[str, Any], disk: str) -> None:
    engine = make(stage, **more, **({"disk": disk} if stage == 3 else {}))
    with zeroengine.gathered(engine.module):
        average_model = AveragedModel(engine.module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        # The first call copies.
        average_model.update_parameters(engine.module)

    def update() -> None:
        with zeroengine.gathered(engine.module):
            average_model.update_parameters(engine.module)

    train(engine, range(4), update)
    weights, averages = values(engine, ema=False), values(engine, ema=True)
    assert not torch.equal(weights["tok.weight"], averages["tok.weight"])
    assert torch.equal(weights["frozen"], averages["frozen"])
    if "bf16" not in more:
        torch.testing.assert_close(averages, dict(average_model.module.named_parameters()))
    plain = build(Branching).to(averages["tok.weight"].dtype)
    plain.load_state_dict(averages, strict=False)
    plain.use = engine.module.use
    with pytest.raises(KeyError), engine.average_weights(), torch.no_grad():
        torch.testing.assert_close(engine(*batch(9, 0)), plain(*batch(9, 0)))
        assert torch.equal(engine.full_state_dict()["tok.weight"], averages["tok.weight"])
        for name, call in {
            "a backward": lambda: engine(*batch(0, 0)).backward(),
            "backward": lambda: engine.backward(engine(*batch(0, 0))),
            "step": engine.step,
            "save_checkpoint": lambda: engine.save_checkpoint(disk),
            "load_checkpoint": lambda: engine.load_checkpoint(disk),
            "save_weights": lambda: engine.save_weights(disk, ema=True),
            "full_master": lambda: zeroengine.full_master(engine.module.norm.weight),
            "set_full_master": lambda: zeroengine.set_full_master(engine.module.norm.weight, torch.ones(24)),
            "average_weights": lambda: engine.average_weights().__enter__(),
            "offload_states": engine.offload_states,
            "close": engine.close,
        }.items():
            with pytest.raises(ZeroEngineError, match=f"{name}.*inside `with engine.average_weights"):
                with torch.enable_grad():
                    call()
        with pytest.raises(ZeroEngineError, match="a moving average of the weights was written"):
            with zeroengine.gathered(engine.module.norm):
                engine.module.norm.weight.fill_(7.0)
        raise KeyError
    if stage == 0:
        with pytest.raises(ZeroEngineError, match="1 parameter changed inside"), torch.no_grad():
            with engine.average_weights():
                engine.module.norm.weight.add_(1.0)
    assert_equal(weights, values(engine, ema=False))
    assert_equal(averages, values(engine, ema=True))
    # Training goes on as if there had been no evaluation.
    other = make(stage, **more)
    train(other, range(5))
    train(engine, range(4, 5))
    assert_equal(values(engine, ema=False), values(other, ema=False))
    assert_equal(values(engine, ema=True), values(other, ema=True))


def losses_of_a_slow_rank() -> list[float]:
    rank = start()
    engine = make(3, **EMA)
    train(engine, range(3))
    delays = [0.0]
    for module in engine.module.modules():
        if not list(module.children()):
            module.register_forward_pre_hook(lambda *_: time.sleep(delays[-1] * rank))
    losses = []
    for delay in (0.0, 0.05):
        delays.append(delay)
        with torch.no_grad(), engine.average_weights():
            losses.append(engine(*batch(9, rank)).item())
    return losses


def test_a_rank_that_evaluates_slowly_computes_with_averages_to_the_end() -> None:
    for quick, slow in run_ranks(2, losses_of_a_slow_rank):
        assert quick == slow


def check_evaluation(more: dict[str, Any], disk: str) -> None:
    start()
    for stage in (0, 3):
        evaluate(stage, more, disk)


@pytest.mark.parametrize("more", [EMA, pytest.param(LOW, marks=pytest.mark.slow)])
def test_the_model_computes_with_averages_for_a_while_and_then_with_its_weights(
    more: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(2, check_evaluation, more, str(tmp_path))


def apart(disk: str) -> None:
    """The states of a pretended GPU are in CPU memory or on a disk."""
    start()
    for more in (EMA, LOW):
        waiting, issued = (
            make_engine(build(Branching), None, config(1, **(BASE | more)), async_step=a) for a in (False, True)
        )
        train(waiting, range(2))
        train(issued, range(2))
        assert issued.optimizer.backend.is_async
        assert_equal(values(issued, ema=True), values(waiting, ema=True), "issued without waiting")
    host = {"device": "cpu", "buffer_count": 2}
    optimizer = {"device": "cpu", "buffer_size": 4096}
    for more in (EMA, LOW, EMA | MUON):
        whole = make(3, **more)
        train(whole, range(3))
        places = [{"offload_optimizer": optimizer | {"device": "nvme", "nvme_path": disk}, "offload_param": host}]
        places += [] if "optimizer" in more else [{"offload_param": host}]
        for place in places:
            settings = config(3, zero_optimization=place, **(BASE | more))
            copies = LateCopies()
            engine = make_engine(build(Branching), None, settings, copies=copies)
            with ApartMode(copies):
                train(engine, range(3))
            with engine.average_weights(), torch.no_grad():
                loss = engine(*batch(9, 0))
            with whole.average_weights(), torch.no_grad():
                assert torch.equal(whole(*batch(9, 0)), loss)
            for ema in (False, True):
                assert_equal(values(engine, ema=ema), values(whole, ema=ema), (more, place))
            engine.close()


def test_averages_of_a_device_are_those_of_states_elsewhere(tmp_path: Path) -> None:
    run_ranks(1, apart, str(tmp_path))


def resume(folder: str) -> None:
    rank = start()
    engine = make(0, **LOW)
    train(engine, range(4))
    engine.save_checkpoint(folder)
    engine.save_weights(f"{folder}/weights", ema=True)
    saved, weights = values(engine, ema=True), values(engine, ema=False)
    train(engine, range(4, 7))
    other = make(3, disk=folder, **LOW)
    other.load_checkpoint(folder)
    assert_equal(saved, values(other, ema=True))
    train(other, range(4, 7))
    assert_equal(values(engine, ema=True), values(other, ema=True))
    # Weights alone are a new start, and so are those of a file.
    other.load_checkpoint(folder, weights_only=True)
    assert_equal(weights, values(other, ema=True))
    train(other, range(7, 8))
    other.load_weights(f"{folder}/weights")
    assert_equal(saved, values(other, ema=True))
    if rank == 0:
        export(folder, f"{folder}/exported", ema=True)
        exported = load_file(f"{folder}/exported/model.safetensors")
        written = load_file(f"{folder}/weights/model.safetensors")
        assert exported.keys() == written.keys() >= {"tok.weight", "frozen"}
        assert_equal(exported, written)
        assert torch.equal(written["tok.weight"].to(saved["tok.weight"]), saved["tok.weight"])


def test_a_run_that_is_resumed_goes_on_with_its_averages_and_exports_them(tmp_path: Path) -> None:
    run_ranks(2, resume, str(tmp_path))


def test_averages_that_a_checkpoint_lacks_restart_and_others_are_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, averaged = make(0), make(0, **EMA)
    for engine, name in ((plain, "plain"), (averaged, "averaged")):
        train(engine, range(2))
        engine.save_checkpoint(tmp_path / name)
    averaged.load_checkpoint(tmp_path / "plain")
    assert "has no moving average (ema) of " in caplog.text and "restarts from the loaded weights" in caplog.text
    assert_equal(values(averaged, ema=True), values(averaged, ema=False))
    caplog.clear()
    plain.load_checkpoint(tmp_path / "averaged")
    assert "states that this run does not use and its checkpoints will not hold: ema.blocks.0" in caplog.text
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        averaged.load_checkpoint(tmp_path / "averaged")
        assert "ema" not in caplog.text
    for call in (
        lambda: plain.average_weights().__enter__(),
        lambda: zeroengine.gathered(plain.module, ema=True).__enter__(),
        lambda: plain.save_weights(tmp_path / "weights", ema=True),
    ):
        with pytest.raises(ZeroEngineError, match=r'no moving average of the weights is kept; write "ema": \{"decay"'):
            call()
    with pytest.raises(ZeroEngineError, match="holds no moving averages"):
        export(tmp_path / "plain", tmp_path / "exported", ema=True)
    with (
        zeroengine.gathered(averaged.module),
        pytest.raises(ZeroEngineError, match=r"average_weights\(\) inside `with"),
    ):
        averaged.average_weights().__enter__()


def test_an_average_that_a_checkpoint_lacks_restarts_alone(tmp_path: Path) -> None:
    model: Any = build(Branching)
    model.blocks[1].up.requires_grad_(False)
    saved = zeroengine.initialize(model, config=config(0, **(BASE | EMA)))
    train(saved, range(2))
    saved.save_checkpoint(tmp_path)
    # Here it has an average, and shares a unit with parameters whose averages were saved.
    loaded = make(0, **EMA)
    loaded.load_checkpoint(tmp_path)
    assert_equal(values(saved, ema=True), values(loaded, ema=True))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"ema": {"decay": 1.0}}, r"ema\.decay: found 1\.0 .*; it should be less than 1"),
        ({"ema": {"decay": 0}}, r"ema\.decay: found 0 .*; it should be greater than 0"),
        ({"ema": {"decay": 0.9, "dtype": "fp16"}}, r"ema\.dtype"),
        ({"ema": {}}, r"ema\.decay"),
        (EMA | {"local_steps": 4}, "local_steps and ema do not go together"),
    ],
)
def test_a_wrong_section_says_what_to_write(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ZeroEngineError, match=message):
        make(0, **more)


def test_averages_of_other_dtypes_are_refused() -> None:
    with pytest.raises(ZeroEngineError, match=r"ema: averages are of parameters in fp32, bf16 and fp16, and this"):
        zeroengine.initialize(build(Branching).double(), config=config(0, **EMA))
