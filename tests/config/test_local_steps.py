"""`local_steps`: what may be written, and what is said where replicas are impossible."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zeroengine.config import load
from zeroengine.config.batch import FULL_VARIABLE
from zeroengine.errors import ConfigError

DEGREES = {"zero_optimization": {"degrees": {"optimizer": 4}}}


def resolved(local_steps: Any, world_size: int = 8, ranks_per_node: int | None = 4, **more: Any) -> Any:
    return load({"local_steps": local_steps, **more}).resolve(world_size=world_size, ranks_per_node=ranks_per_node)


def test_a_number_stands_for_the_steps_of_a_round_of_averages() -> None:
    config = load({"local_steps": 16})
    assert config.local_steps == load({"local_steps": {"steps": 16, "outer": "average"}}).local_steps
    assert load(config.to_dict()).to_dict() == config.to_dict()
    assert load({"local_steps": None}).local_steps is None
    assert load({}).replica_ranks(8) == 8


@pytest.mark.parametrize(
    ("section", "more", "ranks"),
    [
        (16, {}, 4),
        ({"steps": 16, "replica_ranks": "node"}, {}, 4),
        ({"steps": 16, "replica_ranks": 2}, {}, 2),
        ({"steps": 16, "replica_ranks": 1}, {}, 1),
        (16, {"zero_optimization": {"degrees": {"optimizer": 2}}}, 2),
        (16, {"zero_optimization": {"degrees": {"parameters": 2, "optimizer": "all"}}}, 4),
        (16, {"zero_optimization": {"stage": 3}}, 4),
    ],
)
def test_a_replica_is_a_machine_unless_degrees_or_a_number_say_otherwise(section: Any, more: Any, ranks: int) -> None:
    config = resolved(section, **more)
    assert config.replica_ranks(8) == ranks
    # The batch is that of all ranks, and "all" in degrees means those of a replica.
    assert config.train_batch_size == 8
    if config.zero_optimization.degrees is not None:
        assert config.zero_optimization.degrees.optimizer == ranks


def test_the_outer_step_of_diloco_has_its_hyperparameters() -> None:
    assert resolved({"steps": 4, "outer": "nesterov"}).local_steps.nesterov == (0.7, 0.9)
    given = {"steps": 4, "outer": "nesterov", "learning_rate": 1.0, "momentum": 0.0}
    assert resolved(given).local_steps.nesterov == (1.0, 0.0)
    assert resolved(4).local_steps.nesterov is None


@pytest.mark.parametrize(
    ("section", "arguments", "message"),
    [
        (16, {"ranks_per_node": 8}, r"all 8 ranks of the run, so there is nothing to average.* with 1 or 2 or 4,"),
        (16, {"world_size": 1, "ranks_per_node": 1}, "this run has 1 rank; start more ranks"),
        (16, {"ranks_per_node": 0}, "needs equally many ranks on every machine.*write 1 or 2 or 4"),
        ({"steps": 4, "replica_ranks": 3}, {}, "is 3, and must divide the 8 ranks; write 1 or 2 or 4"),
        ({"steps": 4, "replica_ranks": 8}, {}, "a replica has all 8 ranks"),
        (
            {"steps": 4, "replica_ranks": 2},
            DEGREES,
            r"degrees.optimizer is 4, and must divide the 2 ranks of a replica",
        ),
        ({"steps": 4, "replica_ranks": "all"}, {}, 'found "all".*write a number of ranks, or "node"'),
        (0, {}, "found 0 .*greater than or equal to 1"),
        (True, {}, "found true .*write a number of steps, such as 16"),
        ("4", {}, 'found "4" .*write a number of steps, such as 16'),
        ({"steps": 4, "outer": "sgd"}, {}, 'should be "average" or "nesterov"'),
        ({"steps": 4, "momentum": 0.5}, {}, 'momentum, which only.*write "outer": "nesterov"'),
        ({"step": 4}, {}, "Did you mean local_steps.steps"),
        (4, {"fp16": {"enabled": True}}, "loss scales of the replicas would differ.*bf16"),
        (4, {"torch_autocast": {"enabled": True, "dtype": "fp16"}}, "loss scales of the replicas would differ.*bf16"),
    ],
)
def test_what_cannot_be_says_what_to_write(section: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        resolved(section, **arguments)


def test_a_model_of_fp16_enables_no_loss_scale_of_replicas() -> None:
    config = load({"local_steps": 4, "fp16": {"enabled": "auto"}})
    assert config.resolve(world_size=8, ranks_per_node=4, model_dtype=torch.float32).replica_ranks(8) == 4
    with pytest.raises(ConfigError, match="loss scales of the replicas"):
        config.resolve(world_size=8, ranks_per_node=4, model_dtype=torch.float16)


def test_a_machine_that_is_not_known_yet_is_left_open() -> None:
    assert resolved(4, ranks_per_node=None).local_steps.replica_ranks is None


def test_an_elastic_run_may_go_on_with_a_single_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FULL_VARIABLE, "8")
    assert resolved(4, world_size=4).replica_ranks(4) == 4
