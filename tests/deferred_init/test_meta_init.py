"""Models built under meta_init are the bits of ordinary ones, and take no memory until initialize."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import os
import pickle
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.models import test_transformers
from zeroengine import ConfigError, ZeroEngineError
from zeroengine.deferred_init import meta_init
from zeroengine.deferred_init.parameter import trace_of

SEED = 3


class GPT(TinyLM):
    """Initialised as such models are: by ``apply``, and residual projections by their own scale."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(1, 700) * 0.02)
        self.apply(self._init)
        for name, param in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.normal_(param, std=0.02 / (2 * len(self.blocks)) ** 0.5)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)
            if module.bias is not None:
                module.bias.data.zero_()


class Initialised(nn.Module):
    """Initialisers that look at what they draw, that compute with matrices, and that write in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.tall, self.wide = nn.Linear(12, 40), nn.Linear(40, 12)
        nn.init.orthogonal_(self.tall.weight, gain=2.0)
        nn.init.orthogonal_(self.wide.weight)
        nn.init.trunc_normal_(self.tall.bias, std=1.0)
        nn.init.trunc_normal_(self.wide.bias, mean=1.5, std=0.3, a=0.0, b=1.0)
        self.many = nn.Parameter(torch.empty(300, 100))
        nn.init.trunc_normal_(self.many, std=0.02, a=-0.04, b=0.04)
        nn.init.sparse_(self.wide.weight, 0.5)
        self.rows = nn.Parameter(torch.zeros(40, 8))
        with torch.no_grad():
            for row in self.rows[::2]:
                row.copy_(torch.randn(8))
            self.rows[1].fill_(2.0)
        self.padded = nn.Embedding(20, 8, padding_idx=3)
        self.of_another = nn.Parameter(self.rows.detach() * 2 + 1)
        self.turned = nn.Parameter(torch.randn(30, 20).t())
        self.part = nn.Parameter(torch.randn(60)[10:50].view(5, 8))
        self.scale = nn.Parameter(torch.tensor(2.6592))
        self.old = nn.Parameter(torch.Tensor(20, 30).uniform_(-1, 1))
        self.own = nn.Parameter(torch.empty(70).normal_(generator=torch.Generator().manual_seed(7)))
        self.complex = nn.Parameter(torch.randn(40, dtype=torch.complex64))
        self.whole = nn.Parameter(torch.randint(0, 9, (40,)), requires_grad=False)
        self.register_buffer("order", torch.randperm(17))
        nn.init.kaiming_normal_(self.tall.weight)
        self.tall.weight.data.clamp_(-0.3, 0.3)


def convolutions() -> nn.Module:
    body = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 3), nn.GroupNorm(2, 4), nn.PReLU()]
    return nn.Sequential(*body).to(memory_format=torch.channels_last)


def derived() -> nn.Module:
    return nn.ModuleList(
        [
            parametrizations.weight_norm(nn.Linear(20, 30)),
            parametrizations.spectral_norm(nn.Linear(20, 30)),
            parametrizations.orthogonal(nn.Linear(20, 20)),
            nn.utils.weight_norm(nn.Linear(20, 30)),
        ]
    )


def tied_in_many_ways() -> nn.Module:
    model = TinyLM(tied=True)
    model.again = model.tok
    model.same_memory = nn.Parameter(model.head.weight.data)
    return model


def layers() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    rest = [nn.TransformerEncoder(layer, 3), nn.Transformer(16, 2, 1, 1, 32), nn.LSTM(4, 5, 2), nn.Bilinear(3, 4, 5)]
    return nn.ModuleList(rest)


def in_other_dtypes() -> nn.Module:
    """Cast after, built in a default dtype, and copied within."""
    model = nn.ModuleList([nn.Identity(), nn.Linear(30, 40).to(torch.bfloat16)])
    torch.set_default_dtype(torch.float64)
    model.append(nn.Linear(30, 40))
    torch.set_default_dtype(torch.float32)
    model.append(copy.deepcopy(model[1]).half())
    return model


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "TinyLM": TinyLM,
    "GPT": GPT,
    "initialisers": Initialised,
    "convolutions": convolutions,
    "derived weights": derived,
    "tied": tied_in_many_ways,
    "layers of torch": layers,
    "dtypes": in_other_dtypes,
    **test_transformers.FACTORIES,
}


@pytest.fixture(params=[0, 1 << 14, 1 << 26], ids=["no cache", "small cache", "large cache"])
def cache_size(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_init, "CACHE_BYTES", request.param)


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_init, "CACHE_BYTES", 0)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Nothing of a build is left behind."""
    hooks = nn.modules.module._global_parameter_registration_hooks
    before = len(hooks), torch.get_default_dtype()
    yield
    assert (len(hooks), torch.get_default_dtype()) == before
    assert not meta_init.is_recording()


def values_of(param: nn.Parameter) -> torch.Tensor:
    trace = trace_of(param)
    if trace is None:
        return param.detach()
    out = torch.full(param.shape, 77, dtype=param.dtype)
    trace.write(out)
    return out


def born(factory: Callable[[], nn.Module] = TinyLM, **options: Any) -> nn.Module:
    torch.manual_seed(SEED)
    with zeroengine.meta_init(**options):
        return factory()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.usefixtures("cache_size")
def test_values_and_generator_are_those_of_an_ordinary_build(name: str) -> None:
    plain = build(FACTORIES[name], SEED)
    state = torch.get_rng_state()
    model = born(FACTORIES[name])
    assert torch.equal(torch.get_rng_state(), state)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for (key, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert type(param) is type(other) and param.requires_grad == other.requires_grad
        assert (param.shape, param.stride(), param.dtype) == (other.shape, other.stride(), other.dtype)
        assert param.is_meta or key.startswith("3.weight_"), f"{key} keeps its memory"
        assert same(values_of(param), other), key
    for (key, buffer), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert same(buffer, other), key
    assert torch.equal(torch.get_rng_state(), state)


def refused_initialisation() -> nn.Module:
    """Its values are read after an operation that would have overwritten them, but raised."""
    model = nn.Linear(30, 40)
    with pytest.raises(RuntimeError, match="std"):
        model.weight.data.normal_(std=-1.0)
    model.register_buffer("total", model.weight.detach().sum())
    return model


@pytest.mark.usefixtures("no_cache")
def test_an_operation_that_raises_leaves_the_values_from_before_it() -> None:
    plain, model = build(refused_initialisation, SEED), born(refused_initialisation)
    assert same(model.total, plain.total)
    assert model.weight.is_meta and same(values_of(model.weight), plain.weight)


def train(factory: Callable[[], nn.Module], under_meta_init: bool, settings: dict[str, Any]) -> Any:
    """In one process, with an optimizer over the parameters from before ``initialize``."""
    model = born(factory, config=settings) if under_meta_init else build(factory, SEED)
    before = list(model.parameters())
    assert all(param.is_meta == under_meta_init for param in before)
    optimizer = torch.optim.AdamW(before, lr=1e-2)
    state = torch.get_rng_state()
    engine = zeroengine.initialize(model, optimizer, settings | {"optimizer": None})
    assert torch.equal(torch.get_rng_state(), state)
    assert all(param is other for param, other in zip(model.parameters(), before, strict=True))
    losses = []
    for step in range(3):
        loss = engine(*batch(step, 0))
        engine.backward(loss)
        assert engine.step()
        losses.append(loss.item())
    state = engine.full_state_dict()
    engine.close()
    return losses, state


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.usefixtures("no_cache")
def test_training_gives_the_bits_of_an_ordinary_build(precision: dict[str, Any], tmp_path: Path) -> None:
    for stage in (0, 3):
        settings = config(stage, **precision)
        losses, state = train(TinyLM, False, settings)
        found, state_found = train(TinyLM, True, settings)
        assert found == losses
        assert state.keys() == state_found.keys()
        assert all(same(state[name], state_found[name]) for name in state)


def test_parameters_take_no_memory_and_say_so() -> None:
    model = born()
    assert all(param.is_meta for param in model.parameters())
    with pytest.raises(RuntimeError, match="meta"):
        model.head.weight.sum().item()
    with pytest.raises(ZeroEngineError, match="has no values to save yet"):
        pickle.dumps(model)


def test_a_trace_is_freed_with_its_parameter() -> None:
    model = born()
    trace = weakref.ref(trace_of(model.head.weight))
    assert trace() is not None
    del model
    gc.collect()
    assert trace() is None


def test_a_deep_copy_has_the_same_values() -> None:
    model = copy.deepcopy(born())
    for param, other in zip(model.parameters(), build(TinyLM, SEED).parameters(), strict=True):
        assert param.is_meta and same(values_of(param), other)
    engine = zeroengine.initialize(model, config=config(0))
    assert same(engine.full_state_dict()["head.weight"], build(TinyLM, SEED).head.weight)


def test_hooks_and_weak_references_survive_meta_init_and_initialize() -> None:
    model = born(functools.partial(TinyLM, tied=False))
    weak, calls = weakref.ref(model.head.weight), []
    model.head.weight.register_hook(lambda grad: calls.append("hook"))
    model.tok.weight.register_post_accumulate_grad_hook(lambda param: calls.append("after"))
    engine = zeroengine.initialize(model, config=config(0))
    assert weak() is model.head.weight
    engine.backward(engine(*batch(0, 0)))
    assert sorted(calls) == ["after", "hook"]


# -- what keeps memory ---------------------------------------------------------------------------------


def from_numpy() -> nn.Module:
    model = nn.Linear(300, 300)
    model.weight.data.numpy()[:] = numpy.arange(90000).reshape(300, 300)
    return model


def of_large_constants() -> nn.Module:
    model = nn.Linear(300, 300)
    model.weight.data.copy_(torch.from_numpy(numpy.ones((300, 300), numpy.float32)))
    return model


def from_numpy_and_initialised() -> nn.Module:
    model = nn.Linear(300, 300)
    view = model.weight.data.numpy()
    nn.init.normal_(model.weight)
    view[0] = 7
    return model


def in_many_steps() -> nn.Module:
    model = nn.Linear(300, 300)
    with torch.no_grad():
        for row in model.weight:
            row.copy_(torch.randn(300))
    return model


def with_a_gradient() -> nn.Module:
    model = nn.Linear(300, 300)
    model(torch.ones(300)).sum().backward()
    model.bias.grad = None
    return model


def conjugated() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(torch.randn(300, dtype=torch.complex64).conj().resolve_conj())
    return model


WEIGHT = torch.full((300, 300), 3.0)


def given_from_outside() -> nn.Module:
    model = nn.Linear(300, 300)
    model.weight = nn.Parameter(WEIGHT)
    return model


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        (from_numpy, "numpy.. gave its memory away"),
        (from_numpy_and_initialised, "numpy.. gave its memory away"),
        (of_large_constants, "a tensor of shape .300, 300. from outside of the `with`"),
        (in_many_steps, "it takes many steps"),
        (with_a_gradient, "autograd has a graph or a gradient"),
        (conjugated, "not plain memory"),
        (given_from_outside, "not made by torch inside of the `with`"),
    ],
)
@pytest.mark.usefixtures("no_cache")
def test_values_that_cannot_be_replayed_keep_their_memory_and_are_named(
    factory: Callable[[], nn.Module], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = build(factory, SEED)
    with caplog.at_level(logging.WARNING, "zeroengine"):
        model = born(factory)
    assert not model.weight.is_meta and model.bias.is_meta
    assert same(model.weight, plain.weight) and same(values_of(model.bias), plain.bias)
    (record,) = caplog.records
    assert "Linear.weight" in record.message
    assert re.search(why, record.message), record.message


def test_ordinary_models_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    born(GPT)
    born(Initialised)
    assert not caplog.records


@pytest.mark.usefixtures("no_cache")
def test_tensors_that_share_a_parameters_memory_keep_their_values() -> None:
    kept: list[torch.Tensor] = []

    def factory() -> nn.Module:
        model = TinyLM()
        kept.extend([model.head.weight.data, model.norm.weight.detach()[3:7]])
        return model

    model = born(factory)
    assert same(kept[0], build(TinyLM, SEED).head.weight) and same(kept[1], torch.ones(4))
    # The parameter keeps the memory that it shares, so that `initialize` sees whether a buffer shares it.
    assert model.head.weight.data_ptr() == kept[0].data_ptr() and model.blocks[0].up.weight.is_meta


@pytest.mark.usefixtures("no_cache")
def test_values_can_be_read_inside_meta_init() -> None:
    seen: list[Any] = []

    def factory() -> nn.Module:
        model = TinyLM()
        seen.append(model.tok.weight.tolist())
        seen.append(repr(model.blocks[0].up.bias))
        seen.append(copy.deepcopy(model.blocks[1].up.weight.data))
        seen.append(model(*batch(0, 0)).item())
        return model

    build(factory, SEED)
    born(factory)
    assert seen[0] == seen[4] and seen[1] == seen[5] and same(seen[2], seen[6]) and seen[3] == seen[7]


@pytest.mark.usefixtures("no_cache")
def test_an_operation_that_fails_changes_nothing() -> None:
    seen: list[torch.Tensor] = []

    def factory() -> nn.Module:
        model = TinyLM()
        with pytest.raises(RuntimeError):
            model.tok.weight.data.copy_(torch.ones(5, 5))
        seen.append(model.tok.weight.detach().clone())
        return model

    plain, model = build(factory, SEED), born(factory)
    assert same(seen[0], seen[1]) and same(values_of(model.tok.weight), plain.tok.weight)


def test_a_parameter_can_be_replaced_inside_meta_init() -> None:
    def factory() -> nn.Module:
        model = TinyLM()
        model.norm.weight = nn.Parameter(torch.randn(24))
        model.blocks[1].up = nn.Linear(24, 72)
        model.blocks[0].up.weight.data = torch.randn(72, 24)
        del model.blocks[2].down.bias
        return model

    plain, model = build(factory, SEED), born(factory)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.is_meta and same(values_of(param), other)


# -- built on the meta device otherwise ----------------------------------------------------------------


def test_reset_parameters_gives_values_to_plain_meta_modules() -> None:
    def factory() -> nn.Module:
        return nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2))

    plain = build(factory, SEED)
    with torch.device("meta"):
        model = factory()
    torch.manual_seed(SEED)
    engine = zeroengine.initialize(model, config=config(0))
    for (name, value), other in zip(engine.full_state_dict().items(), plain.state_dict().values(), strict=True):
        assert same(value, other), name


def test_meta_parameters_without_reset_parameters_are_named_in_an_error() -> None:
    with torch.device("meta"):
        model = GPT()
        model.register_buffer("mask", torch.ones(3))
    with pytest.raises(ZeroEngineError, match=r"without values: pos, mask.*inside `with zeroengine.meta_init"):
        zeroengine.initialize(model, config=config(0))
    assert model.pos.is_meta and model.mask.is_meta and trace_of(model.pos) is None


def test_a_graph_of_meta_parameters_is_an_error() -> None:
    model = born()
    loss = model(*(each.to("meta") for each in batch(0, 0)))
    with pytest.raises(ZeroEngineError, match=r"graph or a gradient of .*: tok.weight, .* Drop"):
        zeroengine.initialize(model, config=config(0))
    del loss
    zeroengine.initialize(model, config=config(0))


def test_lazy_modules_stay_lazy() -> None:
    model = born(lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)))
    assert nn.parameter.is_lazy(model[0].weight) and model[1].weight.is_meta


# -- values=False --------------------------------------------------------------------------------------


def unset_engine(stage: int = 0) -> zeroengine.Engine:
    model = born(values=False)
    assert all(param.is_meta for param in model.parameters())
    return zeroengine.initialize(model, config=config(stage))


def test_weights_that_were_not_loaded_are_named() -> None:
    engine = unset_engine()
    assert not any(value.any() for value in engine.full_state_dict().values())
    with pytest.raises(ZeroEngineError, match=r"no values yet: tok.weight, .* and 16 more. Load them"):
        engine(*batch(0, 0))
    weights = build(TinyLM, SEED).state_dict()
    part = {name: value for name, value in weights.items() if not name.startswith("norm")}
    engine.load_weights(part, strict=False)
    with pytest.raises(ZeroEngineError, match=r"no values yet: norm.weight, norm.bias. Load"):
        engine.module(*batch(0, 0))
    engine.load_weights(weights)
    assert engine(*batch(0, 0)).item() == build(TinyLM, SEED)(*batch(0, 0)).item()


def test_initialization_outside_of_nn_init_computes_nothing() -> None:
    generator = torch.get_rng_state()
    with zeroengine.meta_init(values=False):
        model = nn.Linear(4, 4)
        with torch.no_grad():
            model.weight.normal_()
        model.bias.data.uniform_()
    assert model.weight.is_meta
    assert model.bias.is_meta
    assert torch.equal(torch.get_rng_state(), generator)


def test_checkpoints_and_surgery_set_values_too(tmp_path: Path) -> None:
    saved = zeroengine.initialize(build(TinyLM, SEED), config=config(0))
    saved.save_checkpoint(tmp_path)
    engine = unset_engine()
    engine.load_checkpoint(tmp_path)
    expected = saved(*batch(0, 0)).item()
    assert engine(*batch(0, 0)).item() == expected
    engine = unset_engine()
    with zeroengine.gathered(engine.module):
        engine.module.load_state_dict(build(TinyLM, SEED).state_dict())
    assert engine(*batch(0, 0)).item() == expected
    engine = unset_engine()
    for name, param in list(engine.module.named_parameters()):
        with pytest.raises(ZeroEngineError, match=name):
            engine(*batch(0, 0))
        zeroengine.set_full_master(param, build(TinyLM, SEED).get_parameter(name).detach())
    assert engine(*batch(0, 0)).item() == expected


# -- what is wrong -------------------------------------------------------------------------------------


def test_nested_meta_init_is_an_error() -> None:
    with zeroengine.meta_init():
        with pytest.raises(ZeroEngineError, match="inside of meta_init"), zeroengine.meta_init():
            pass
        model = TinyLM()
    assert model.head.weight.is_meta


def test_initialize_inside_meta_init_is_an_error() -> None:
    with zeroengine.meta_init():
        model = TinyLM()
        with pytest.raises(ZeroEngineError, match="Leave the `with` first"):
            zeroengine.initialize(model, config=config(0))
    zeroengine.initialize(model, config=config(0))


def test_meta_init_checks_the_configuration() -> None:
    with pytest.raises(ConfigError, match="zero_optimisation"), zeroengine.meta_init({"zero_optimisation": {}}):
        raise AssertionError


def test_an_exception_inside_meta_init_leaves_no_recorder_behind() -> None:
    made = []
    with pytest.raises(KeyError), zeroengine.meta_init():
        made.append(nn.Linear(3, 4))
        raise KeyError
    assert made[0].weight.is_meta
    assert not nn.Linear(3, 4).weight.is_meta  # and `restored`


def test_an_optimizer_with_state_of_meta_parameters_is_an_error() -> None:
    model = born()
    with pytest.raises(ZeroEngineError, match=r"Adagrad keeps state .* Build the model without meta_init"):
        zeroengine.initialize(model, torch.optim.Adagrad(model.parameters()), config(0, optimizer=None))


def in_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_other_threads_build_ordinary_parameters() -> None:
    with zeroengine.meta_init():
        inside, beside = TinyLM(), in_thread(TinyLM)
        other = in_thread(born)
    assert inside.head.weight.is_meta and other.head.weight.is_meta
    assert not beside.head.weight.is_meta
    for param, plain in zip(other.parameters(), build(TinyLM, SEED).parameters(), strict=True):
        assert same(values_of(param), plain)
    model = in_thread(born)  # and what one thread built, another trains
    assert (
        zeroengine.initialize(model, config=config(0))(*batch(0, 0)).item() == build(TinyLM, SEED)(*batch(0, 0)).item()
    )


def test_a_write_by_another_thread_is_an_error() -> None:
    with pytest.raises(ZeroEngineError, match=r"Linear.weight, .* cannot see it, such as in another thread"):
        with zeroengine.meta_init():
            model = nn.Linear(3, 4)
            in_thread(functools.partial(nn.init.ones_, model.weight))


# -- memory --------------------------------------------------------------------------------------------

BIG, BLOCKS = 1024, 24  # 4 MiB a matrix, 100 million parameters


class Big(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(BIG, 2 * BIG), nn.Linear(2 * BIG, BIG)) for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Peak(threading.Thread):
    """The most memory that this process has had, above what it has now."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = self._now()
        self.done = threading.Event()

    def _now(self) -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def run(self) -> None:
        while not self.done.wait(0.002):
            self.most = max(self.most, self._now())

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.done.set()
        self.join()
        self.growth = max(self.most, self._now()) - self.before


def build_big(path: str, precision: dict[str, Any], under_meta_init: bool) -> tuple[int, int, float]:
    """Growth, bytes of parameters, and a loss."""
    there = {"device": "nvme", "nvme_path": path}
    zero = {
        "offload_param": there,
        "offload_optimizer": there | {"buffer_size": 1 << 16, "buffer_count": 3},
        "param_persistence_threshold": 0,
    }
    settings = config(3, zero_optimization=zero, **precision)
    torch.manual_seed(SEED)
    with Peak() as peak:
        if under_meta_init:
            with zeroengine.meta_init(settings):
                model = Big()
        else:
            model = Big()
        engine = zeroengine.initialize(model, config=settings)
    with torch.no_grad():
        loss = engine(torch.ones(2, BIG)).item()
    engine.close()
    return peak.growth, 4 * sum(param.numel() for param in model.parameters()), loss


BF16 = pytest.param({"bf16": {"enabled": True}}, marks=pytest.mark.slow, id="bf16")


@pytest.mark.parametrize("precision", [pytest.param({}, id="fp32"), BF16])
def test_no_rank_ever_holds_the_whole_model(tmp_path: Path, precision: dict[str, Any]) -> None:
    ((growth, nbytes, loss),) = run_ranks(1, build_big, str(tmp_path), precision, True)
    assert nbytes > 4e8
    assert growth < 0.35 * nbytes
    if precision:
        ((ordinary, _, expected),) = run_ranks(1, build_big, str(tmp_path), precision, False)
        assert ordinary > nbytes and loss == expected
