"""What ranks that share samples must have alike is an error by name, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zeroengine
from tests.distributed.models import build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.sequence.models import CausalLM, sample
from zeroengine.config import load
from zeroengine.sequence.batches import IGNORE_INDEX

Engine = zeroengine.Engine


class Scores(CausalLM):
    """Returns scores, from which the caller computes the loss."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **others: Any) -> torch.Tensor:
        return self.scores(input_ids, position_ids)


class OwnMean(Scores):
    """Takes the mean over the labels of this rank's part."""

    def forward(self, *args: Any, shift_labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return F.cross_entropy(super().forward(*args, **kwargs).flatten(0, 1), shift_labels.flatten())


def batch_of(step: int, group: int, length: int = 24) -> dict[str, torch.Tensor]:
    ids, labels = sample(step, group, length)
    return {"input_ids": ids, "labels": labels}


def ordinary(engine: Engine, step: int) -> None:
    engine.backward(engine(**zeroengine.shard_sequence(batch_of(step, 0))))


def evaluates_between(engine: Engine, step: int) -> None:
    with torch.no_grad():
        engine(**zeroengine.shard_sequence(batch_of(step + 9, 0)))
    ordinary(engine, step)


def different_samples(engine: Engine, step: int) -> None:
    engine.backward(engine(**zeroengine.shard_sequence(batch_of(step, engine.rank))))


def not_cut(engine: Engine, step: int) -> None:
    """Each rank computes with the whole sequence, as if it were its part."""
    engine.backward(engine(**batch_of(step, 0)))


def short(engine: Engine, step: int) -> None:
    engine.backward(engine(**zeroengine.shard_sequence(batch_of(step, 0, 1))))


def without_tokens(engine: Engine, step: int) -> None:
    zeroengine.shard_sequence({"scores": torch.ones(3)})


def mean_outside(engine: Engine, step: int) -> None:
    """The loss of the model is a sum over the tokens of this part, and the caller divides it."""
    batch = zeroengine.shard_sequence(batch_of(step, 0))
    count = (batch["shift_labels"] != IGNORE_INDEX).sum()
    loss = engine(**batch)
    engine.backward(loss * (1 + 0.1 * engine.rank) + 0 * count)


def bidirectional(engine: Engine, step: int) -> None:
    part = zeroengine.shard_sequence(torch.ones(2, 23, 8))
    heads = part.unflatten(-1, (2, 4)).transpose(1, 2)
    zeroengine.sequence_parallel.attention(heads, heads, heads)


def few_heads(engine: Engine, step: int) -> None:
    heads = torch.ones(1, 3, 4, 8)
    zeroengine.sequence_parallel.attention(heads, heads, heads, name="blocks.0")


def key_heads_that_divide_no_heads(engine: Engine, step: int) -> None:
    query, key = torch.ones(1, 4, 4, 8), torch.ones(1, 3, 4, 8)
    zeroengine.sequence_parallel.attention(query, key, key)


LOOPS: dict[Callable[[Engine, int], None], str] = {
    ordinary: "",
    evaluates_between: "",
    different_samples: "DistributedSampler(dataset, engine.num_sample_groups, engine.sample_group)",
    not_cut: "as zeroengine.shard_sequence does",
    short: "a sequence of 1 tokens has less than one for each of the 2 ranks",
    without_tokens: "Pass the batch as the model takes it",
    mean_outside: "Write zeroengine.mean_loss(total, count)",
    bidirectional: "pass attn_mask, of all tokens",
    few_heads: "blocks.0 has 3 heads, and sequence_parallel_size is 2",
    key_heads_that_divide_no_heads: "4 heads of queries, which 3 of keys do not divide",
}


def message_of(factory: Callable[[], nn.Module], loop: Callable[[Engine, int], None]) -> str:
    engine = zeroengine.initialize(build(factory), config=config(3, sequence_parallel_size=2))
    try:
        for step in range(4):
            loop(engine, step)
            engine.step()
        return ""
    except zeroengine.ZeroEngineError as error:
        return str(error)
    finally:
        engine.close()


def mean_of_part(engine: Engine, step: int) -> None:
    batch = zeroengine.shard_sequence(batch_of(step, 0))
    loss = F.cross_entropy(engine(**batch).flatten(0, 1), batch["shift_labels"].flatten())
    if step:
        loss.backward()
    else:
        engine.backward(0 * zeroengine.mean_loss(loss, 1))


def messages() -> list[str]:
    start()
    others = [message_of(OwnMean, ordinary), message_of(Scores, mean_of_part)]
    return [*(message_of(CausalLM, loop) for loop in LOOPS), *others]


def two_engines() -> None:
    """Train two models, such as actor and critic, whose attention names no engine."""
    start()
    engines = [zeroengine.initialize(build(CausalLM), config=config(n, sequence_parallel_size=2)) for n in (3, 1)]
    for step in range(2):
        losses = [engine(**zeroengine.shard_sequence(batch_of(step, 0), engine=engine)) for engine in engines]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        for engine, loss in zip(engines, losses, strict=True):
            loss.backward()
            engine.step()
    with pytest.raises(zeroengine.ZeroEngineError, match=r"sequence_parallel_size is 2 and 2: .* engine=engine"):
        zeroengine.shard_sequence(batch_of(0, 0))
    with zeroengine.sequence_parallel.whole_sequences(engine=engines[0]):
        assert [engine.sequence_group.exchanges for engine in engines] == [False, True]
    with zeroengine.sequence_parallel.whole_sequences():
        with zeroengine.sequence_parallel.whole_sequences():
            pass
        assert not any(engine.sequence_group.exchanges for engine in engines)
    for engine in engines:
        assert engine.sequence_group.exchanges
        state = engine.full_state_dict()
        with engine.stream_weights() as stream:
            assert all(torch.equal(values, state.pop(name)) for name, values in stream) and not state
        engine.close()
    student, teacher = (
        zeroengine.initialize(build(CausalLM), config=config(1, sequence_parallel_size=n)) for n in (2, 1)
    )
    with pytest.raises(zeroengine.ZeroEngineError, match=r"sequence_parallel_size is 2 and 1: .* engine=engine"):
        zeroengine.shard_sequence(batch_of(0, 0))
    assert zeroengine.shard_sequence(batch_of(0, 0), engine=student)["input_ids"].shape[1] == 12
    assert zeroengine.shard_sequence(batch_of(0, 0), engine=teacher)["input_ids"].shape[1] == 24
    # Neither an engine that was closed is taken, nor one that nothing refers to.
    teacher.close()
    assert zeroengine.shard_sequence(batch_of(0, 0))["input_ids"].shape[1] == 12
    del student
    other = zeroengine.initialize(build(CausalLM), config=config(1))
    assert zeroengine.shard_sequence(batch_of(0, 0))["input_ids"].shape[1] == 24
    other.close()


def samples_of_the_newer_engine() -> str:
    """The older engine is given the right samples, and the newer one's differ. Batches are cut for either."""
    start()
    older, newer = (zeroengine.initialize(build(CausalLM), config=config(1, sequence_parallel_size=2)) for _ in "ab")
    try:
        for step in range(2):
            for engine, group in ((older, 0), (newer, newer.rank)):
                part = zeroengine.shard_sequence(batch_of(step, group), engine=(older, newer)[step])
                engine.backward(engine(**part))
                engine.step()
        return ""
    except zeroengine.DivergenceError as error:
        return str(error)
    finally:
        newer.close()
        older.close()


def test_two_engines_of_one_size_train_side_by_side() -> None:
    run_ranks(2, two_engines)


def test_different_samples_of_the_newer_engine_are_an_error() -> None:
    for message in run_ranks(2, samples_of_the_newer_engine):
        assert "they were given different samples" in message


def test_bad_input_is_an_error_on_all_ranks_that_says_what_to_write() -> None:
    for found in run_ranks(2, messages):
        *of_loops, inside, outside = found
        for (loop, expected), message in zip(LOOPS.items(), of_loops, strict=True):
            assert expected in message, (loop.__name__, message)
            assert bool(message) == bool(expected), (loop.__name__, message)
        assert "take means with zeroengine.mean_loss" in inside
        assert "different numbers of labels" in outside


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sequence_parallel_size": 3}, "must divide the 4 ranks; write 1 or 2 or 4"),
        ({"sequence_parallel_size": 0}, "sequence_parallel_size"),
        ({"sequence_parallel_size": 2, "local_steps": {"steps": 5}}, 'write "local_steps": null'),
    ],
)
def test_a_degree_that_fits_nothing_is_refused_by_the_configuration(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(zeroengine.ConfigError, match=message):
        load(config(1, **keys)).resolve(world_size=4)
