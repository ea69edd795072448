"""Inputs of activation checkpoints in CPU memory, on a device that is pretended or emulated.

See ``tests.distributed.pretended``: a copy is as late as it may be, and until then its target holds garbage.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import zeroengine
from tests.distributed.models import build, config
from tests.distributed.pretended import LateCopies
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.training import start
from tests.emulated import wanted
from tests.ops.cuda import no_waiting
from zeroengine.engine.initialize import make_engine
from zeroengine.offload.host_memory import HOST_LIMIT_VARIABLE
from zeroengine.sequence import host_activations

ON_HOST = {"activation_checkpointing": {"cpu_checkpointing": True}}
TOKENS, WIDTH, BLOCKS = 64, 32, 6
HIDDEN_BYTES = TOKENS * WIDTH * 4
pretended = pytest.mark.skipif(wanted() != "cpu", reason="on the CPU alone: the device is pretended")


class Block(nn.Module):
    """Takes what a block of a decoder takes: hidden states, those of an encoder, a mask, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, shared: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        return x + self.down(torch.tanh(torch.where(mask[:, None] > 0, self.up(x), shared))) * scale


def transposed(block: nn.Module, x: torch.Tensor, *args: Any) -> torch.Tensor:
    return checkpoint(lambda turned, *args: block(turned.t(), *args), x.t(), *args, use_reentrant=False)


def halves(block: nn.Module, x: torch.Tensor, *args: Any) -> torch.Tensor:
    def joined(left: torch.Tensor, right: torch.Tensor, *args: Any) -> torch.Tensor:
        return block(torch.cat([left, right], 1), *args)

    return checkpoint(joined, *x.chunk(2, 1), *args, use_reentrant=False)


def nested(block: nn.Module, x: torch.Tensor, *args: Any) -> torch.Tensor:
    return checkpoint(KINDS["other"], block, x, *args, use_reentrant=False)


def selective(block: nn.Module, x: torch.Tensor, *args: Any) -> torch.Tensor:
    saved = [torch.ops.aten.addmm.default, torch.ops.aten.copy_.default]
    return checkpoint(
        block, x, *args, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(saved)
    )


def returned(block: nn.Module, x: torch.Tensor, shared: torch.Tensor, *args: Any) -> torch.Tensor:
    """As in T5, whose blocks return the table of positions that they were given."""
    if not hasattr(x, "shared"):
        x.shared = shared  # type: ignore[attr-defined]
    y, shared = checkpoint(lambda x, s: (block(x, s, *args), s), x, x.shared, use_reentrant=True)
    y.shared = shared
    return y


KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "none": lambda block, *args: block(*args),
    "reentrant": lambda block, *args: checkpoint(block, *args, use_reentrant=True),
    "other": lambda block, *args: checkpoint(block, *args, use_reentrant=False),
    "nested": nested,
    "selective": selective,
    "transposed": transposed,
    "halves": halves,
    "returned": returned,
}


class Model(nn.Module):
    """Blocks in checkpoints of a kind. ``between`` is called with the hidden states after each block."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.shares = kind, True
        self.between: Callable[[torch.Tensor], object] = lambda x: None
        self.stem, self.encoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        # torch.func refuses to run inside hooks of saved tensors.
        mask = torch.vmap(lambda row: row % 3)(mask)
        x, shared = self.stem(x), self.encoder(x)
        shared = shared if self.shares else shared.detach()
        for block in self.blocks:
            x = KINDS[self.kind](block, x, shared, mask, 0.5)
            self.between(x)
        return x.square().mean()


def data(step: int, rank: int = 0, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7 * step + rank)
    return torch.randn(tokens, WIDTH, generator=generator), torch.arange(tokens)


def engine_of(kind: str, stage: int = 0, copies: LateCopies | None = None, **more: Any) -> zeroengine.Engine:
    start()
    host_activations.MIN_BYTES = HIDDEN_BYTES // 2
    more |= {} if copies is None else ON_HOST
    return make_engine(build(lambda: Model(kind)), None, config(stage, **more), copies=copies)


@contextmanager
def warnings() -> Iterator[list[str]]:
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zeroengine")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


# -- the bits of training ------------------------------------------------------------------------------


def train(kind: str, stage: int, copies: LateCopies | None) -> list[float]:
    engine = engine_of(kind, stage, copies)
    losses = []
    for step in range(2):
        loss = engine(*data(step, engine.rank))
        engine.backward(loss)
        engine.step()
        losses += [loss.item(), engine.grad_norm or 0.0]
    engine.close()
    return losses


def compared(stage: int, kinds: list[str]) -> dict[str, tuple[bool, float]]:
    plain, found = train("none", stage, None), {}
    for kind in kinds:
        copies = LateCopies()
        losses = train(kind, stage, copies)
        found[kind] = (losses == plain, copies.copied["out"] / HIDDEN_BYTES)
    return found


@pretended
@pytest.mark.parametrize(("world_size", "stage", "kinds"), [(1, 0, list(KINDS)[1:]), (2, 3, ["reentrant", "other"])])
def test_bits_are_those_without_checkpoints_and_each_input_is_saved_once(
    world_size: int, stage: int, kinds: list[str]
) -> None:
    for found in run_ranks(world_size, compared, stage, kinds):
        # Six hidden states, and those of the encoder, in two steps. Halves of a row have gaps, and stay.
        assert found == {kind: (True, 2.0 if kind == "halves" else 14.0) for kind in kinds}


def train_transformers(family: str, is_reentrant: bool, copies: LateCopies | None) -> tuple[list[float], float]:
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    start()
    host_activations.MIN_BYTES = 1 << 12
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    torch.manual_seed(0)
    if family == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=6))
    else:
        t5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "decoder_start_token_id": 0}
        model = T5ForConditionalGeneration(T5Config(**t5, num_layers=4))
    model.train().gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    engine = make_engine(model, None, config(3, **({} if copies is None else ON_HOST)), copies=copies)
    losses = []
    for step in range(2):
        torch.manual_seed(step + 10 * engine.rank)
        ids = torch.randint(0, 64, (2, 64))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses += [loss.item(), engine.grad_norm or 0.0]
    engine.close()
    return losses, 0 if copies is None else copies.copied["out"] / (2 * 64 * 32 * 4)


def compare_transformers(family: str) -> list[tuple[bool, float]]:
    found = []
    for is_reentrant in (False, True):
        plain, _ = train_transformers(family, is_reentrant, None)
        losses, num_saved = train_transformers(family, is_reentrant, LateCopies())
        found.append((losses == plain, num_saved))
    return found


@pretended
@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_saved"), [("llama", 12.0), ("t5", 42.0)])
def test_checkpoints_of_transformers(family: str, num_saved: float) -> None:
    """T5 has, in two steps, nine hidden states and three tables of positions, each as large as four of these."""
    pytest.importorskip("transformers")
    for found in run_ranks(2, compare_transformers, family):
        assert found == [(True, num_saved)] * 2


# -- graphs ----------------------------------------------------------------------------------------------


def gradient(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def graphs(kind: str) -> dict[str, Any]:
    """Graphs on an engine, compared with those of the same model in plain PyTorch."""
    copies = LateCopies()
    engine, plain = engine_of(kind, copies=copies, gradient_accumulation_steps="manual"), build(lambda: Model("none"))
    activations = engine._parts.passes.host_activations
    assert activations is not None
    found: dict[str, Any] = {}

    def compare(name: str, run: Callable[[Any, Callable[..., Any]], Any]) -> None:
        # The engine takes gradients in the backward, so losses are compared by gradients of what comes in.
        found[name] = all(torch.equal(a, b) for a, b in zip(run(engine), run(plain), strict=True))  # type: ignore[call-arg]

    def inputs(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = data(step)
        return x.requires_grad_(), mask

    def twice(model: Any) -> list[torch.Tensor]:
        x, mask = inputs(0)
        loss = model(x, mask)
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad]  # type: ignore[list-item]

    def two_forwards(model: Any) -> list[torch.Tensor]:
        (x, mask), (y, _) = inputs(1), inputs(2)
        first, second = model(x, mask), model(y, mask)
        first.backward()
        second.backward()
        return [x.grad, y.grad]  # type: ignore[list-item]

    def fetched_ahead(model: Any) -> list[torch.Tensor]:
        inner = model.module if model is engine else model
        # A backward that computes a block's gradient, while an input is on the way.
        inner.between = lambda x: x.register_hook(lambda _: ahead.append(bool(copies._lanes["in"].waiting))) and None
        inner.shares = False
        x, mask = inputs(8)
        model(x, mask).backward()
        inner.between, inner.shares = lambda x: None, True
        return [x.grad]  # type: ignore[list-item]

    def other_order(model: Any) -> list[torch.Tensor]:
        hidden: list[torch.Tensor] = []
        inner = model.module if model is engine else model
        inner.between = hidden.append
        x, mask = inputs(3)
        model(x, mask)
        inner.between = lambda x: None
        # A backward of a part in the middle, where nothing was fetched ahead.
        hidden[3].sum().backward(retain_graph=True)
        hidden[1].sum().backward()
        return [x.grad]  # type: ignore[list-item]

    def of_second_order(model: Any) -> list[torch.Tensor]:
        x, mask = inputs(4)
        (grad,) = torch.autograd.grad(model(x, mask), x, create_graph=True)
        grad.square().sum().backward()
        return [x.grad]  # type: ignore[list-item]

    def changed_later(model: Any) -> list[torch.Tensor]:
        hidden: list[torch.Tensor] = []
        inner = model.module if model is engine else model
        inner.between = hidden.append
        x, mask = inputs(5)
        loss = model(x, mask)
        inner.between = lambda x: None
        # In plain PyTorch this is an error. Here the values have been copied by then.
        if model is engine:
            hidden[1].data.zero_()
        loss.backward()
        return [x.grad]  # type: ignore[list-item]

    compare("twice", twice)
    compare("two forwards", two_forwards)
    ahead: list[bool] = []
    compare("fetched ahead", fetched_ahead)
    found["under way"] = sum(ahead) >= BLOCKS - 3
    compare("another order", other_order)
    compare("changed after the copy", changed_later)
    if kind != "reentrant":
        compare("second order", of_second_order)
    gc.collect()
    in_use = activations.nbytes - sum(map(len, activations._unused.values())) * HIDDEN_BYTES
    loss = engine(*inputs(6))
    del loss
    gc.collect()
    num_buffers = sum(map(len, activations._unused.values()))
    found["dropped graphs leave nothing"] = in_use == 0 and activations.nbytes == num_buffers * HIDDEN_BYTES
    found["counted"] = engine.memory().staging == activations.nbytes > 0
    x, mask = inputs(7)
    loss = engine(x, mask)
    engine.close()
    held = activations.nbytes // HIDDEN_BYTES
    loss.backward()
    del loss
    gc.collect()
    found["closed"] = held == BLOCKS + 1 and activations.nbytes == 0 and x.grad is not None
    return found


@pretended
@pytest.mark.parametrize("kind", ["reentrant", "other"])
def test_graphs_are_those_of_plain_pytorch(kind: str) -> None:
    found = run_ranks(1, graphs, kind)[0]
    assert all(found.values()), found


def changed_in_place() -> None:
    engine = engine_of("other", copies=LateCopies())
    # The last input is still being copied when it is changed.
    hidden: list[torch.Tensor] = []
    engine.module.between = hidden.append
    loss = engine(*data(0))
    with torch.no_grad():
        hidden[-2].add_(1.0)
    loss.backward()


@pretended
def test_a_change_in_place_while_an_input_is_copied_is_an_error() -> None:
    with pytest.raises(RankFailed, match="the input of a checkpoint was changed in place"):
        run_ranks(1, changed_in_place)


# -- memory ------------------------------------------------------------------------------------------------


def bounded(patched: dict[str, str]) -> dict[str, Any]:
    plain = train("none", 0, None)
    with pytest.MonkeyPatch.context() as patch, warnings() as records:
        for name, value in patched.items():
            patch.setenv(name, value)
        # The size of the model is checked against the same limit.
        engine = engine_of("other", copies=LateCopies(), memory_check="off")
        activations = engine._parts.passes.host_activations
        assert activations is not None
        losses, sizes = [], []
        for step in range(2):
            loss = engine(*data(step))
            engine.backward(loss)
            engine.step()
            losses += [loss.item(), engine.grad_norm or 0.0]
            sizes.append(activations.nbytes)
        # Other lengths take the place of buffers that are not in use.
        for tokens in (2 * TOKENS, TOKENS // 2 + 1, TOKENS):
            engine.backward(engine(*data(9, tokens=tokens)))
            engine.step()
            sizes.append(activations.nbytes)
    return {"same": losses == plain, "sizes": sizes, "limit": activations.max_bytes, "warnings": records}


@pretended
def test_host_memory_is_bounded_and_what_is_more_stays_on_the_device() -> None:
    limit = 4 * HIDDEN_BYTES
    found = run_ranks(1, bounded, {HOST_LIMIT_VARIABLE: str(2 * limit)})[0]
    assert found["same"] and found["limit"] == limit and found["sizes"][0] == found["sizes"][-1] == limit
    assert max(found["sizes"]) <= limit and all(found["sizes"])
    assert [text for text in found["warnings"] if text == host_activations.FULL] == [host_activations.FULL]


def without_effect() -> list[list[str]]:
    found = []
    for kind, copies in (("none", LateCopies()), ("other", None)):
        with warnings() as records:
            engine = engine_of(kind, copies=copies, **ON_HOST)
            for step in range(2):
                engine.backward(engine(*data(step)))
                engine.step()
            engine.close()
        found.append([text for text in records if "cpu_checkpointing" in text])
    return found


@pretended
def test_a_key_without_effect_says_why_once() -> None:
    no_checkpoint, on_cpu = run_ranks(1, without_effect)[0]
    assert no_checkpoint == [host_activations.NOTHING_MOVED]
    assert on_cpu == ["activation_checkpointing.cpu_checkpointing has no effect: activations are in CPU memory"]


def peak(stage: int, kind: str, more: dict[str, Any]) -> tuple[list[float], int]:
    start()
    host_activations.MIN_BYTES = HIDDEN_BYTES
    with torch.device("cuda"):
        model = build(lambda: Model(kind))
    engine, losses = zeroengine.initialize(model, config=config(stage, **more)), []
    tokens = 8 * TOKENS
    batches = [tuple(tensor.cuda() for tensor in data(step, engine.rank, tokens)) for step in range(3)]
    for step, batch in enumerate(batches):
        if step == 2:
            gc.collect()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        with no_waiting():
            loss = engine(*batch)
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    bytes_of_peak = torch.cuda.max_memory_allocated() - before
    staging = engine.memory().cpu["staging"]
    engine.close()
    return losses, bytes_of_peak, staging // (tokens * WIDTH * 4)


def peaks(stages: tuple[int, ...]) -> list[Any]:
    kinds = ("reentrant", "other")
    return [[peak(stage, kind, more) for more in ({}, ON_HOST)] for stage in stages for kind in kinds]


@pytest.mark.gpu
@pytest.mark.skipif(wanted() == "cpu", reason="no GPU")
def test_peak_on_the_device_is_lower_by_the_inputs_and_nothing_waits() -> None:
    for plain, on_host in run_ranks(1, peaks, (0, 3))[0]:
        assert plain[0] == on_host[0]
        # What a backward begins with stays, what it needs next is fetched ahead, and the encoder's states are in use.
        assert plain[1] - on_host[1] >= (BLOCKS - 3) * 8 * HIDDEN_BYTES
        assert (plain[2], on_host[2]) == (0, BLOCKS + 1)
