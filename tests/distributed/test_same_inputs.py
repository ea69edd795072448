"""Ranks that train on the same samples are told so, once; nobody else is."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zeroengine
from tests.distributed.models import WIDTH, Block, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from zeroengine.runtime.input_digest import digest_inputs, sample_digest
from zeroengine.sequence.agreement import MICRO_STEPS, RankComparison, ranks_with_same_inputs

CPU = torch.device("cpu")


class Net(nn.Module):
    """A model that takes its data in whatever form."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Any, **more: Any) -> torch.Tensor:
        while isinstance(x, (list, tuple)):
            x = x[0]
        if isinstance(x, dict):
            x = x["x"]
        if not isinstance(x, torch.Tensor):
            x = torch.ones(2)
        return self.block(x.float().mean() + torch.zeros(2, WIDTH)).square().mean()


def warnings_of(train: Callable[[zeroengine.Engine], None], stage: int, more: dict[str, Any]) -> list[str]:
    """What rank 0 and the others log while ``train`` runs."""
    start()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    engine = zeroengine.initialize(build(Net), config=config(stage, **more))
    logging.getLogger("zeroengine").addHandler(handler)
    train(engine)
    logging.getLogger("zeroengine").removeHandler(handler)
    engine.close()
    return records


def take(engine: zeroengine.Engine, *inputs: Any, **more: Any) -> None:
    engine.backward(engine(*inputs, **more))
    engine.step()


def sample(number: int, rank: int = 0) -> torch.Tensor:
    return batch(number, rank)[0]


def unshared(engine: zeroengine.Engine) -> None:
    """The habit: every rank reads everything, in the same order."""
    dataset = TensorDataset(torch.arange(40.0).view(20, 2))
    generator = torch.Generator(device="cpu").manual_seed(0)
    for inputs in itertools.chain(*[DataLoader(dataset, batch_size=2, shuffle=True, generator=generator)] * 2):
        take(engine, *inputs)


def past_the_engine(engine: zeroengine.Engine) -> None:
    """One rank calls its model, as frameworks do, and the other its engine."""
    for number in range(6):
        engine.backward((engine if engine.rank else engine.module)(sample(number)))
        engine.step()


def same_habits() -> list[list[str]]:
    settings = [(0, 1), (3, 1), (2, 2), (1, 4)]  # stage, accumulation
    warnings = [warnings_of(unshared, stage, {"gradient_accumulation_steps": steps}) for stage, steps in settings]
    replicas = {"local_steps": {"steps": 5, "replica_ranks": 1}}
    return [*warnings, warnings_of(past_the_engine, 3, {}), warnings_of(unshared, 0, replicas)]


def test_ranks_that_read_the_same_samples_are_told_once_and_what_to_write() -> None:
    first, second = run_ranks(2, same_habits)
    for warnings in first:
        (warning,) = warnings
        assert warning.startswith("the inputs are the same on all ranks in the first 3 micro-steps")
        assert "engine.dataloader(dataset)" in warning and "DistributedSampler(dataset" in warning
    assert second == [[]] * len(first), "rank 0 alone says so"


def own_share(engine: zeroengine.Engine) -> None:
    for inputs in engine.dataloader(TensorDataset(torch.arange(40.0).view(20, 2))):
        take(engine, *inputs)


def last_differs(engine: zeroengine.Engine) -> None:
    for number in range(6):
        take(engine, sample(number, engine.rank if number == MICRO_STEPS - 1 else 0))


def one_batch_on_purpose(engine: zeroengine.Engine) -> None:
    for _ in range(6):
        take(engine, sample(0))


def numbers_alone(engine: zeroengine.Engine) -> None:
    """The model makes its data itself, from the number of the step."""
    for number in range(6):
        take(engine, torch.tensor(float(number)))


def no_tensors(engine: zeroengine.Engine) -> None:
    for number in range(6):
        take(engine, f"text {number}")


def unseen_data(engine: zeroengine.Engine) -> None:
    """A graph library's batch, say: nobody knows what is in it."""
    for number in range(6):
        take(engine, sample(number), graph=SimpleNamespace(nodes=sample(number, engine.rank)))


def differs_in_a_text(engine: zeroengine.Engine) -> None:
    for number in range(6):
        take(engine, sample(number), prompt=f"of rank {engine.rank}")


def evaluation(engine: zeroengine.Engine) -> None:
    """Forwards without an update, on what is the same everywhere, between steps on what is not."""
    for number in range(6):
        engine.eval()
        engine(sample(number))
        engine.train()
        with torch.no_grad():
            engine(sample(number))
        with zeroengine.gathered(engine.module):
            engine(sample(number))
        take(engine, sample(number, engine.rank))


QUIET = [
    own_share,
    last_differs,
    one_batch_on_purpose,
    numbers_alone,
    no_tensors,
    unseen_data,
    differs_in_a_text,
    evaluation,
]


def quiet() -> dict[str, list[str]]:
    return {train.__name__: warnings_of(train, 3, {}) for train in QUIET}


def test_ranks_with_a_reason_to_read_the_same_inputs_are_not_warned() -> None:
    for warnings in run_ranks(2, quiet):
        assert warnings == {train.__name__: [] for train in QUIET}


def by_pairs() -> list[str]:
    """The sampler was given the rank within a node."""

    def train(engine: zeroengine.Engine) -> None:
        for number in range(4):
            take(engine, {"x": sample(number, engine.rank % 2)})

    return warnings_of(train, 2, {})


def test_the_ranks_that_share_samples_are_named() -> None:
    assert "the same on ranks 0, 2 in the first" in run_ranks(3, by_pairs)[0][0]


class CountingTransport:
    """Two ranks, the other of which has sent nothing."""

    rank, world_size, has_peers = 0, 2, True

    def __init__(self) -> None:
        self.exchanges = 0

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        self.exchanges += 1
        return values


def test_inputs_are_exchanged_once_and_in_an_update() -> None:
    """Gradients of other micro-steps may be under way."""
    transport = CountingTransport()
    comparison = RankComparison(transport, CPU)  # type: ignore[arg-type]
    exchanges = []
    for updates in (False, False, False, False, True, False, True):
        comparison.forward_began(torch.ones(2), {})
        comparison.micro_step_ended(updates)
        exchanges.append(transport.exchanges)
    assert exchanges == [0, 0, 0, 0, 1, 1, 1]


def alone() -> list[str]:
    return warnings_of(unshared, 2, {})


def test_a_single_rank_has_no_duplicate_inputs() -> None:
    assert run_ranks(1, alone) == [[]]


def test_groups_are_those_of_equal_inputs_that_vary() -> None:
    a, b, c = (1.0, 2.0, 3.0), (4.0, 2.0, 3.0), (5.0, 5.0, 5.0)
    assert ranks_with_same_inputs([a, b, a, c, c, b, a]) == [[0, 2, 6], [1, 5]]
    assert ranks_with_same_inputs([a, b, c]) == []
    assert ranks_with_same_inputs([(0.0, 2.0, 3.0), (0.0, 2.0, 3.0)]) == [], "what nobody has seen is not the same"


DTYPES = [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.int32, torch.float64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_sees_every_element_and_their_order(dtype: torch.dtype) -> None:
    values = (torch.arange(24) % 3 == 0).to(dtype)
    seen = {int(sample_digest(values))}
    for place in range(24):
        other = values.clone()
        other[place] = (~other[place].bool()).to(dtype)
        seen.add(int(sample_digest(other)))
    seen.add(int(sample_digest(values.roll(1))))
    assert len(seen) == 26


def test_a_digest_is_of_values_and_not_of_memory() -> None:
    x = torch.randn(6, 8)
    same = torch.stack([x, x], dim=-1)[..., 0]  # with gaps
    assert int(sample_digest(x)) == int(sample_digest(same))
    z = torch.randn(4, dtype=torch.complex64)
    assert int(sample_digest(z.conj())) == int(sample_digest(z.conj().resolve_conj()))
    assert digest_inputs((x, "a", 1), CPU) == digest_inputs((same, "a", 1), CPU)
    assert digest_inputs((x, x + 1), CPU) != digest_inputs((x + 1, x), CPU)
    for other in ((x, "b", 1), (x, "a", 2), (x.flatten(), "a", 1), (x.double(), "a", 1), (x, x), ("a", x, 1)):
        assert digest_inputs(other, CPU) != digest_inputs((x, "a", 1), CPU), other


def test_data_that_cannot_be_seen_has_no_digest() -> None:
    x = torch.ones(3)
    unseen = [x.to_sparse(), torch.ones(3, device="meta"), object(), torch.nested.nested_tensor([x])]
    for inputs in [(), (1, "text"), (torch.tensor(3),), *((x, other) for other in unseen)]:
        assert digest_inputs(inputs, CPU) is None, inputs
    assert digest_inputs({"x": [x]}, CPU) is not None
