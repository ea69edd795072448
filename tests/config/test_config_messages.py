"""Each wrong value says where it is, what was found and what to write."""

from __future__ import annotations

from typing import Any

import pytest

from zeroengine.config import keys, load
from zeroengine.config.optimizers import OPTIMIZER_TYPES
from zeroengine.config.schedulers import SCHEDULER_TYPES
from zeroengine.errors import ConfigError


def complaint(tree: dict[Any, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tree)
    return str(caught.value).removeprefix("the config dict: ")


@pytest.mark.parametrize(
    ("tree", "nearest"),
    [
        ({"stage": 3}, "zero_optimization.stage"),
        ({"zero_optimization": {"stge": 3}}, "zero_optimization.stage"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimization"),
        ({"train_batch_sise": 3}, "train_batch_size"),
        ({"zero_optimization": {"gradient_clipping": 1}}, "gradient_clipping"),
        ({"zero_optimization": {"enabled": True, "stage3_prefetch_buckets": 1}}, "stage3_prefetch_bucket_size"),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, "optimizer.params.lr"),
        ({"optimizer": {"type": "AdamW", "params": {"weight_decy": 1}}}, "optimizer.params.weight_decay"),
        ({"optimizer": {"type": "AdamW", "param": {}}}, "optimizer.params"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}}, "scheduler.params.warmup_num_steps"),
        ({"lr": 0.1}, "optimizer.params.lr"),
        ({"max_grad_norm": 1}, "gradient_clipping"),
        ({"comm": {"time_out_seconds": 1}}, "comm.timeout_seconds"),
        ({"bf16": {"enable": True}}, "bf16.enabled"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(tree: dict[str, Any], nearest: str) -> None:
    message = complaint(tree)
    assert "unknown key" in message
    assert f"{nearest}?" in message


def every_key_of_another_type() -> list[tuple[str, str, str, Any]]:
    """Section, type, key and the key's value in a type that has it."""
    cases = []
    for section, types in (("optimizer", OPTIMIZER_TYPES), ("scheduler", SCHEDULER_TYPES)):
        params = keys.siblings_by_type((section, "params", "x"))
        for kind in filter(params.get, types):  # types of one model have one set of parameters
            others = {key for other in params for key in params[other]} - set(params[kind])
            cases += [(section, kind, key, others) for key in sorted(others)]
    return cases


@pytest.mark.parametrize("section, kind, key, others", every_key_of_another_type())
def test_a_key_of_another_type_names_the_types_that_take_it(section: str, kind: str, key: str, others: Any) -> None:
    message = complaint({section: {"type": kind, "params": {key: 1}}})
    if "is refused" in message or key == "adam_w_mode":
        return
    line = next(line for line in message.splitlines() if f"{section}.params.{key}" in line)
    assert f"{kind} does not take it; " in line
    assert f"mean {section}.params.{key}" not in line


def test_a_misspelt_type_key_is_named() -> None:
    assert complaint({"optimizer": {"typ": "AdamW"}}) == "optimizer.typ: unknown key. Did you mean optimizer.type?"
    assert "Did you mean AdamW?" in complaint({"optimizer": {"type": "AdmW", "params": {"lr": -1, "momentum": 0.9}}})


def test_contradictions_are_listed_beside_wrong_values_of_other_sections() -> None:
    message = complaint(
        {
            "gradient_clipping": -1,
            "aio": {"block_size": 5000},
            "checkpoint": {"keep": 0},
            "zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}},
        }
    )
    for part in (
        "4 problems",
        "gradient_clipping: found -1",
        "block_size 5000 is not a multiple",
        "checkpoint.keep: found 0",
        "offload_param needs parameters that are released between uses, and stage 1 keeps them whole",
    ):
        assert part in message, message


@pytest.mark.parametrize(
    "tree",
    [
        {"optimizer": {"type": "FooBar", "params": {"lr": 1}}},
        {"scheduler": {"type": "FooBar"}},
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": 5}}},
        {"zero_optimization": {"stage": "3", "offload_param": {"device": "cpu"}}},
    ],
)
def test_one_mistake_is_one_problem(tree: dict[str, Any]) -> None:
    assert "problems" not in complaint(tree), complaint(tree)


def test_an_unknown_key_near_nothing_lists_what_there_is() -> None:
    known = "timeout_seconds, transport, register_buffers"
    assert complaint({"comm": {"xyz": 1}}) == f"comm.xyz: unknown key. In comm there are {known}."
    assert "At the top level there are" in complaint({"xyz": 1})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"zero_optimization": {"stage": 5}},
            'zero_optimization.stage: found 5 (an integer); write 0, 1, 2, 3 or "auto".',
        ),
        (
            {"zero_optimization": {"stage": "3"}},
            'zero_optimization.stage: found "3" (a string); write 0, 1, 2, 3 or "auto".',
        ),
        ({"train_batch_size": True}, "train_batch_size: found true (a boolean); it should be a valid integer."),
        ({"train_batch_size": 2.5}, "train_batch_size: found 2.5 (a number); it should be a valid integer."),
        ({"train_batch_size": 0}, "train_batch_size: found 0 (an integer); it should be greater than or equal to 1."),
        ({"train_batch_size": "large"}, 'train_batch_size: found "large" (a string); it should be a valid integer.'),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            'zero_optimization.offload_optimizer: device "nvme" needs a folder on a disk; write "nvme_path": '
            '"/local_nvme".',
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "zero_optimization: offload_param needs parameters that are released between uses, and stage 2 keeps them "
            'whole; write "stage": 3, or offload the optimizer alone.',
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/d", "buffer_count": 2}}},
            "zero_optimization.offload_optimizer.buffer_count: found 2 (an integer); it should be greater than or "
            "equal to 3.",
        ),
        ({"aio": {"block_size": 5000}}, "aio: block_size 5000 is not a multiple of 4096 bytes; write 4096."),
        ({"dump_state": "true"}, 'dump_state: found "true" (a string); it should be true or false, without quotes.'),
        ({"dump_state": 1}, "dump_state: found 1 (an integer); it should be true or false."),
        (
            {"gradient_clipping": -1},
            "gradient_clipping: found -1 (an integer); it should be greater than or equal to 0.",
        ),
        ({"gradient_clipping": float("nan")}, "gradient_clipping: found NaN (a number); it should be a finite number."),
        ({"bf16": True}, 'bf16: found true (a boolean); write an object, {...}, such as {"enabled": true}.'),
        ({"optimizer": "SGD"}, 'optimizer: found "SGD" (a string); write an object, {...}, such as {"type": "SGD"}.'),
        (
            {"comm": {"transport": "tcp"}},
            'comm.transport: found "tcp" (a string); it should be "auto", "shm" or "gloo".',
        ),
        ({"comm": {"timeout_seconds": 0}}, "comm.timeout_seconds: found 0 (an integer); it should be greater than 0."),
        ({"units": "layers"}, 'units: found "layers" (a string); it should be a valid list.'),
        ({"units": [3]}, "units.0: found 3 (an integer); it should be a valid string."),
        ({"checkpoint": 3}, "checkpoint: found 3 (an integer); write an object, {...}."),
        ({1: 2}, "1: keys are strings; put it in double quotes."),
    ],
)
def test_a_wrong_value_says_what_was_found_and_what_to_write(tree: dict[Any, Any], message: str) -> None:
    assert complaint(tree) == message


def test_two_spellings_of_one_setting_that_differ() -> None:
    message = complaint({"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}})
    assert "are one setting; keep one" in message
    load({"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}})


def test_a_message_uses_the_spelling_of_the_user() -> None:
    assert complaint({"zero_optimization": {"stage3_max_live_parameters": -1}}).startswith(
        "zero_optimization.stage3_max_live_parameters: found -1"
    )
