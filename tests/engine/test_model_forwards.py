"""What the engine does for a forward it does once, whoever calls the model and however the call ends."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.distributed.models import WIDTH, TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from zeroengine import ZeroEngineError
from zeroengine.monitor.flops import ForwardFlops

STEPS = 4
# The samples and the tokens of one forward on ``batch``.
SAMPLES, TOKENS = 2, 16

Call = Callable[..., Any]
Loop = Callable[[zeroengine.Engine, Call, int], torch.Tensor]


class Fault(Exception):
    pass


class SelfCalling(TinyLM):
    """A model whose forward calls the model once more, as a self-conditioned diffusion model does."""

    calls_itself = True

    def forward(self, *args: Any) -> Any:
        if self.calls_itself and torch.is_grad_enabled():
            self.calls_itself = False
            try:
                self(*args)
            finally:
                self.calls_itself = True
        return super().forward(*args)


def plain(engine: zeroengine.Engine, call: Call, number: int) -> torch.Tensor:
    return call(*batch(number, 0))


def with_failures(engine: zeroengine.Engine, call: Call, number: int) -> torch.Tensor:
    """A forward that raises, one that Ctrl-C ends, and one of a submodule alone come before the one that counts."""
    for error in (Fault, KeyboardInterrupt):

        def fail(*_: Any, error: type[BaseException] = error) -> None:
            raise error

        handle = engine.module.norm.register_forward_hook(fail)
        with pytest.raises(error):
            call(*batch(number, 0))
        handle.remove()
    if engine.config.zero_optimization.stage == 0:
        engine.module.blocks[0](torch.ones(2, WIDTH))
    try:
        raise Fault
    except Fault:
        # An error that is being handled outside is not this forward's.
        return call(*batch(number, 0))


def with_evaluation(engine: zeroengine.Engine, call: Call, number: int) -> torch.Tensor:
    with torch.no_grad():
        call(*batch(number, 0))
    engine.eval()
    call(*batch(number, 0))
    engine.train()
    return call(*batch(number, 0))


def checkpointed(engine: zeroengine.Engine, call: Call, number: int) -> torch.Tensor:
    ids, labels = batch(number, 0)
    return checkpoint(call, ids, labels, use_reentrant=False)


def checkpointed_reentrantly(engine: zeroengine.Engine, call: Call, number: int) -> torch.Tensor:
    ids, labels = batch(number, 0)
    # A reentrant checkpoint computes gradients only if an input requires them.
    needs_grad = torch.ones((), requires_grad=True)
    return checkpoint(lambda scale: call(ids, labels) * scale, needs_grad, use_reentrant=True)


LOOPS: list[tuple[Loop, type[TinyLM]]] = [
    (plain, TinyLM),
    (plain, SelfCalling),
    (with_failures, TinyLM),
    (with_evaluation, TinyLM),
    (checkpointed, TinyLM),
    (checkpointed_reentrantly, TinyLM),
]


def train(folder: Path, stage: int) -> None:
    start()
    for number, (loop, factory) in enumerate(LOOPS):
        for way in ("engine", "model"):
            path = folder / f"{number}-{way}"
            settings = config(stage, monitor={"folder": str(path)}, gradient_accumulation_steps=2)
            engine = zeroengine.initialize(build(factory), None, settings)
            call = engine if way == "engine" else engine.module
            for micro_step in range(2 * STEPS):
                engine.backward(loop(engine, call, micro_step))
                engine.step()
            engine.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_each_forward_of_training_counts_once_whoever_calls_the_model(tmp_path: Path, stage: int) -> None:
    run_ranks(1, train, tmp_path, stage)
    flops = {}
    for number, (loop, factory) in enumerate(LOOPS):
        for way in ("engine", "model"):
            lines = (tmp_path / f"{number}-{way}" / "steps.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines]
            what = f"{loop.__name__}, {factory.__name__}, {way}"
            assert [(r["samples"], r["tokens"]) for r in records] == [(2 * SAMPLES, 2 * TOKENS)] * STEPS, what
            assert all(r["split"]["forward"] > 0 for r in records) or loop is checkpointed_reentrantly, what
            flops[number, way] = records[-1]["flops"]
    expected = flops[0, "engine"]
    for (number, way), count in flops.items():
        assert count == expected * (2 if LOOPS[number][1] is SelfCalling else 1), (number, way)


def errors(stage: int) -> list[tuple[str, str, list[str]]]:
    """Return the type, the text and the notes of what forwards raise, by engine and by model."""
    start()
    engine = zeroengine.initialize(build(), None, config(stage, bf16={"enabled": True}))
    raised = []
    for error in (
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("expected m1 and m2 to have the same dtype"),
        Fault("mine"),
    ):
        for call in (engine, engine.module):
            own = copy.copy(error)

            def fail(*_: Any, error: BaseException = own) -> None:
                raise error

            handle = engine.module.norm.register_forward_hook(fail)
            with pytest.raises(type(own)) as info:
                call(*batch(0, 0))
            handle.remove()
            assert info.value is own
            raised.append((type(own).__name__, str(own), getattr(own, "__notes__", [])))
    engine.backward(engine(*batch(0, 0)))
    assert engine.step()
    return raised


def test_an_error_keeps_its_type_and_has_the_same_advice_once() -> None:
    for stage in (0, 3):
        (raised,) = run_ranks(1, errors, stage)
        assert [first[:1] for first in raised[::2]] == [second[:1] for second in raised[1::2]]
        memory, other, own = raised[::2]
        assert raised[1][1].count("What takes less") == memory[1].count("What takes less") == 1
        assert (other, own) == (raised[3], raised[5]) and own[1:] == ("mine", [])


def compiled(folder: Path) -> list[int]:
    start()
    engine = zeroengine.initialize(build(), None, config(0, monitor={"folder": str(folder)}))
    call = torch.compile(engine.module, backend="eager")
    for number in range(STEPS):
        engine.backward(call(*batch(number, 0)))
        engine.step()
    engine.close()
    return [len(engine.module._forward_hooks), len(engine.module._forward_pre_hooks)]


def test_a_compiled_call_counts_once_and_the_hooks_end_with_the_engine(tmp_path: Path) -> None:
    assert run_ranks(1, compiled, tmp_path) == [[0, 0]]
    records = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(r["samples"], r["tokens"]) for r in records] == [(SAMPLES, TOKENS)] * STEPS
    assert all(r["flops"] for r in records[1:])


def interrupted() -> list[bool]:
    """Return the dispatch modes that count operations after Ctrl-C has ended a forward of the model."""
    start()
    engine = zeroengine.initialize(build(), None, config(0, monitor={"enabled": True}))
    engine.backward(engine(*batch(0, 0)))
    engine.step()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = engine.module.norm.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.module(*batch(1, 0))
    handle.remove()
    engine.backward(engine.module(*batch(1, 0)))
    engine.step()
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    engine.close()
    return [isinstance(mode, ForwardFlops) for mode in modes]


def test_operations_are_not_counted_for_ever_after_ctrl_c() -> None:
    assert run_ranks(1, interrupted) == [[]]


def offloaded(folder: Path) -> None:
    start()
    engine = zeroengine.initialize(build(), None, config(3))
    engine.offload_states(["parameters"], device="nvme", nvme_path=folder)
    for call in (engine, engine.module):
        with pytest.raises(ZeroEngineError, match="reload_states"):
            call(*batch(0, 0))
    engine.reload_states()
    engine.module(*batch(0, 0))
    engine.close()


def test_a_forward_while_parameters_are_offloaded_says_so(tmp_path: Path) -> None:
    run_ranks(1, offloaded, tmp_path)
