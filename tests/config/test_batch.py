"""The batch triad: what is given is kept, what is missing is filled in, and an error names numbers that work."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroengine.config import load
from zeroengine.errors import ConfigError

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
TRAIN, MICRO, STEPS = KEYS
sizes = st.integers(1, 64)


def resolve(world_size: int, **given: object) -> tuple[int, int, int]:
    config = load(given).resolve(world_size=world_size)
    return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps


@settings(deadline=None)
@given(micro=sizes, steps=sizes, world_size=sizes, missing=st.sampled_from([None, *KEYS]), auto=st.booleans())
def test_any_two_of_three_give_the_third(
    micro: int, steps: int, world_size: int, missing: str | None, auto: bool
) -> None:
    values: dict[str, object] = {TRAIN: micro * steps * world_size, MICRO: micro, STEPS: steps}
    if missing and auto:
        values[missing] = "auto"
    elif missing:
        del values[missing]
    assert resolve(world_size, **values) == (micro * steps * world_size, micro, steps)


@settings(deadline=None)
@given(size=sizes, world_size=sizes)
def test_one_of_three_is_enough(size: int, world_size: int) -> None:
    assert resolve(world_size, **{TRAIN: size * world_size}) == (size * world_size, size, 1)
    assert resolve(world_size, **{MICRO: size}) == (size * world_size, size, 1)
    assert resolve(world_size, **{STEPS: size}) == (size * world_size, 1, size)


def test_none_of_three_is_one_sample_per_rank() -> None:
    assert resolve(4) == (4, 1, 1)


def test_manual_accumulation_has_no_train_batch_size() -> None:
    assert resolve(4, **{STEPS: "manual", MICRO: 8}) == (None, 8, "manual")
    config = load({STEPS: "manual", TRAIN: "auto"}).resolve(world_size=2)
    assert (config.manual_accumulation, config.micro_steps_in_mean) == (True, 1)
    assert load(config.to_dict()).resolve(world_size=2).to_dict() == config.to_dict()
    with pytest.raises(ConfigError, match=f'{TRAIN} is 64, but {STEPS} is "manual".*Remove {TRAIN} and write {MICRO}'):
        resolve(4, **{STEPS: "manual", TRAIN: 64})
    with pytest.raises(ConfigError, match=STEPS):
        load({STEPS: "by hand"})


given_sizes = st.fixed_dictionaries({}, optional={key: st.integers(1, 200) for key in KEYS})


@settings(deadline=None)
@given(values=given_sizes, world_size=st.integers(1, 16))
def test_resolved_sizes_agree_and_keep_what_was_given_and_every_advice_works(
    values: dict[str, int], world_size: int
) -> None:
    try:
        train, micro, steps = resolve(world_size, **values)
    except ConfigError as error:
        advice = re.findall(r"(\w+) to (\d+)(?: or (\d+))?", str(error))
        assert advice
        for key, first, second in advice:
            for number in (first, second):
                if number:
                    resolve(world_size, **{**values, key: int(number)})
    else:
        assert train == micro * steps * world_size
        assert {**values, TRAIN: train, MICRO: micro, STEPS: steps}.items() >= values.items()


def test_a_contradiction_says_which_to_change_and_to_what() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(4, **{TRAIN: 64, MICRO: 4, STEPS: 2})
    message = str(caught.value)
    assert "train_batch_size is 64, but" in message
    assert "(4) x gradient_accumulation_steps (2) x 4 ranks = 32" in message
    assert "Change train_batch_size to 32, or remove one of the three." in message


def test_sizes_that_do_not_divide_name_the_nearest_that_do() -> None:
    with pytest.raises(ConfigError, match="to 24 or 32, or train_micro_batch_size_per_gpu to a divisor of 15"):
        resolve(2, **{TRAIN: 30, MICRO: 4})
    with pytest.raises(ConfigError, match=r"is not a multiple of .* 8 ranks = 8. Change train_batch_size to 8\."):
        resolve(8, **{TRAIN: 3})


@given(st.integers(1, 4), sizes, st.integers(1, 8), st.integers(1, 8), st.data())
def test_an_elastic_run_keeps_its_train_batch_size(
    micro: int, steps: int, full: int, world_size: int, data: st.DataObject
) -> None:
    """Whatever of the three is given, with fewer ranks or more; the micro-batch shrinks no more than needed."""
    train = micro * steps * full
    whole = {TRAIN: train, MICRO: micro, STEPS: steps}
    given = {
        key: whole[key] for key in data.draw(st.sampled_from([KEYS, (TRAIN, MICRO), (MICRO, STEPS), (TRAIN, STEPS)]))
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROENGINE_FULL_WORLD_SIZE", str(full))
        if train % world_size:
            with pytest.raises(ConfigError, match=f"train_batch_size is {train}, which .* cannot share equally"):
                resolve(world_size, **given)
            return
        found = resolve(world_size, **given)
        assert found[0] == train == found[1] * found[2] * world_size
        share = train // world_size
        assert found[1] == max(size for size in range(1, micro + 1) if share % size == 0)
        assert found == resolve(world_size, **dict(zip(KEYS, found, strict=True)))
        assert world_size != full or found == (train, micro, steps)


def test_an_elastic_run_says_what_it_changed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("ZEROENGINE_FULL_WORLD_SIZE", "3")
    assert resolve(2, **{TRAIN: 12, MICRO: 2}) == (12, 2, 3)
    told = "2 of 3 ranks: gradient_accumulation_steps is 3 instead of 2, so that train_batch_size stays 12."
    assert caplog.messages == [told]


def test_resolving_again_for_the_same_ranks_changes_nothing() -> None:
    once = load({TRAIN: 32}).resolve(world_size=4)
    assert once.resolve(world_size=4) == once
