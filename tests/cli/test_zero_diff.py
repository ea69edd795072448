"""`zero-diff`: what it says of runs that are equal, that differ in each of the ways that occur, and of wrong input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.view.generated_digests import UNITS, header, write_digests, write_lines
from zeroengine.cli.zero_diff import main
from zeroengine.view.digest_comparison import DigestComparison
from zeroengine.view.digest_table import KINDS, DigestTable

Diff = Callable[..., tuple[int, str]]


@pytest.fixture
def diff(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Diff:
    """Runs the command in the folder of the runs; its exit code and what it printed, in one line."""
    monkeypatch.chdir(tmp_path)
    write_digests(Path("a"))

    def run(*arguments: Any) -> tuple[int, str]:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert (err != "") is (code == 2), err
        return code, " ".join((out or err).split())

    return run


def test_equal_runs_are_equal(diff: Diff) -> None:
    b = write_digests(Path("b"))
    expected = "a and b are equal. Compared: gradients, moments, parameters of 10 units at 100 steps (1 to 100)."
    assert diff("a", b) == (0, expected)


def test_another_learning_rate_is_said_since_its_first_step(diff: Diff) -> None:
    params = {"lr": 2e-3, "betas": [0.9, 0.95]}
    b = write_digests(Path("b"), lr={1: 0.001, 50: 0.002}, config={"optimizer": {"type": "AdamW", "params": params}})
    code, text = diff("a", b)
    assert code == 1
    assert "a and b differ first at step 50, in the parameters of embedding, layers.0, layers.1 and 7 more." in text
    assert "At that step gradients are equal, moments are equal, parameters differ in all 10 units." in text
    assert "Of 50 compared steps after it, 50 differ." in text
    assert "Since the gradients and moments of step 50 are equal, look at the update" in text
    assert "The learning rate differs from step 50 on: 0.001 and 0.002 at first." in text
    assert "The loss differs from step 51 on" in text
    assert "Settings that differ a b optimizer.params.lr 0.0003 0.002" in text
    assert "Equal bits are not to be expected" not in text and "flipped" not in text


def test_a_learning_rate_that_differs_for_some_steps_is_said_so(diff: Diff) -> None:
    b = write_digests(Path("b"), lr={1: 0.001, 50: 0.002, 60: 0.001})
    assert "The learning rate differs from step 50 to 59, in 10 steps: 0.001 and 0.002 at first." in diff("a", b)[1]


@pytest.mark.parametrize("kind", ["parameters", "moments"])
def test_a_flipped_bit_is_named_by_step_unit_and_state(diff: Diff, kind: str) -> None:
    code, text = diff("a", write_digests(Path("b"), changes=[(37, kind, [3])]))
    assert code == 1 and f"a and b differ first at step 37, in the {kind} of layers.2. At that step gradients" in text
    assert f"{kind} differ in 1 of 10 units" in text and "a bit that flipped in memory is more likely" in text


def test_a_difference_that_begins_in_backward_is_traced_to_its_unit(diff: Diff) -> None:
    text = diff("a", write_digests(Path("b"), changes=[(37, "gradients", range(5))]))[1]
    assert "gradients differ in 5 of 10 units" in text and "Look at the data" in text
    assert "The losses of step 37 are equal, so the difference begins in backward" in text
    assert "The units after layers.3, to which backward comes earlier, are equal: look at layers.3 first." in text


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"ranks": 4}, "2 and 4 ranks add up gradients in another order"),
        ({"config": {"bf16": {"enabled": True}}}, "one computes in fp32 and the other in bf16"),
        ({"versions": {"torch": "2.12.0"}}, "other devices and versions have other kernels"),
    ],
)
def test_where_equal_bits_are_not_to_be_expected_the_reason_is_said(
    diff: Diff, other: dict[str, Any], reason: str
) -> None:
    code, text = diff("a", write_digests(Path("b"), changes=[(1, "gradients", range(10))], **other))
    assert code == 1 and f"Equal bits are not to be expected between these two: {reason}" in text
    assert "What is equal all the same: the parameters before the first step" in text


def test_other_inputs_are_blamed_and_neither_kernels_nor_hardware(diff: Diff) -> None:
    b = write_digests(Path("b"), seed=1)
    for folder, words in ((Path("a"), "0" * 32), (b, "0" * 16 + "1" * 16)):
        first, *rows = [json.loads(line) for line in (folder / "digests.jsonl").read_text().splitlines()]
        write_lines(folder / "digests.jsonl", [first, *(row | {"inputs": words} for row in rows)])
    text = diff("a", b)[1]
    assert "The inputs of the model of step 1 differ on rank 1. That changes gradients" in text
    assert "look at the data loader" in text and "kernel" not in text and "hardware" not in text


@pytest.mark.parametrize("left", [("b",), ("a", "b")])
def test_runs_without_digests_are_compared_by_losses_and_settings(diff: Diff, left: tuple[str, ...]) -> None:
    write_digests(Path("b"), lr={1: 0.001, 50: 0.002}, config={"zero_optimization": {"stage": 1}})
    for folder in left:
        Path(folder, "digests.jsonl").unlink()
    code, text = diff("a", "b")
    assert code == 1 and text.count("0.001 and 0.002") == 1
    assert "The learning rate differs from step 50 on" in text and "The loss differs from step 51 on" in text
    assert "Compared: losses and learning rates of 100 steps, and settings. No states:" in text
    assert "zero_optimization.stage 3 1" in text


def test_bf16_with_another_order_of_reduction_is_rounding(diff: Diff) -> None:
    bf16, quantized = {"bf16": {"enabled": True}}, {"stage": 3, "zero_quantized_gradients": True}
    write_digests(Path("a"), config=bf16 | {"comm": {"transport": "shared"}})
    b = write_digests(Path("b"), changes=[(5, "gradients", range(10))], config=bf16 | {"comm": {"transport": "gloo"}})
    text = diff("a", b)[1]
    assert "bf16 rounds sums coarsely, so another order of them gives other bits" in text
    assert "comm.transport shared gloo" in text and "quantized" not in text
    write_digests(b, changes=[(5, "gradients", range(10))], config=bf16 | {"zero_optimization": quantized})
    assert "quantized communication is inexact" in diff("a", b)[1]


def test_of_other_intervals_the_common_steps_are_compared(diff: Diff) -> None:
    b = write_digests(Path("b"), every=10, changes=[(37, "gradients", [1])])
    code, text = diff("a", b)
    assert code == 1 and "differ first at step 40, in the gradients of" in text
    assert "It began in one of the steps 31 to 40. To find out in which, and in what, repeat both" in text
    assert "at 10 steps (10 to 100, every 10). a alone has digests of 90 other steps." in text
    code, text = diff(write_digests(Path("c"), steps=9, every=4), write_digests(Path("d"), steps=9, every=3))
    assert code == 0 and "Compared: losses and learning rates of 9 steps, and settings. No states: no step has" in text
    assert "digests in both: c has 2 steps (4 to 8, every 4) and d has 3 steps (3 to 9, every 3)" in text
    assert 'write "digests": {"every": 100}' in text


def test_of_other_units_the_common_ones_are_compared(diff: Diff) -> None:
    # The rules of the generated numbers depend on the number of units, and not on their names.
    b = write_digests(Path("b"), units=[*UNITS[:8], "tail", "end"])
    code, text = diff("a", b)
    assert code == 0 and "of 8 units at 100 steps" in text
    assert "Only a has the units layers.7, head. Only b has the units tail, end." in text
    text = diff("a", write_digests(Path("c"), units=["x", "y", "z"]))[1]
    assert "The loss differs from step" in text and "No states: no unit is in both" in text
    assert 'Write the same "units"' in text


def test_a_resumed_run_counts_as_it_went_the_last_time(diff: Diff) -> None:
    """The first attempt at steps 61 to 80 had a flipped bit. Units come in another order after the restart."""
    b = write_digests(Path("b"), steps=80, changes=[(61, "parameters", [0])])
    right = [json.loads(line) for line in Path("a/digests.jsonl").read_text().splitlines()]
    for row in right[61:]:
        row |= {kind: "".join(re.findall(".{16}", row[kind])[::-1]) for kind in KINDS}
    write_lines(b / "digests.jsonl", [header(UNITS[::-1], 2), *right[61:]], mode="a")
    Path("b/steps.jsonl").write_text(Path("a/steps.jsonl").read_text())
    assert diff("a", b)[0] == 0


def test_a_last_line_that_was_cut_and_damaged_lines_are_left_out(diff: Diff) -> None:
    b = write_digests(Path("b"))
    lines = (b / "digests.jsonl").read_text().splitlines(keepends=True)
    odd = [lines[1][:-30] + '"}\n', '{"step": 1e400}\n', '{"step": [], "parameters": 3}\n', "[]\n"]
    (b / "digests.jsonl").write_text("".join([odd[0], *lines[:50], *odd, *lines[50:]])[:-10])
    code, text = diff("a", b)
    assert code == 0 and "at 99 steps (1 to 99)" in text
    assert "b/digests.jsonl: lines 1, 52, 53, ... are damaged and left out (5 of" in text
    assert "b/digests.jsonl: the last line is not whole yet and is left out." in text


def test_wrong_input_says_what_to_write(diff: Diff) -> None:
    b = write_digests(Path("b"))
    (b / "digests.jsonl").unlink()
    (b / "steps.jsonl").unlink()
    no_steps = (2, "zero-diff: b has recorded no step yet, so there is nothing to compare")
    assert diff("a", b) == no_steps
    write_lines(b / "digests.jsonl", [header(UNITS, 2)])
    assert diff("a", b) == no_steps
    write_lines(b / "digests.jsonl", [header(UNITS, 2, format=2)])
    assert "b/digests.jsonl has digests of format 2, and this zeroengine knows format 1" in diff("a", b)[1]
    code, text = diff("a", "a/run.json")
    assert code == 2 and "a/run.json is a file" in text
    Path("empty").mkdir()
    for path in ("empty", "nowhere"):
        code, text = diff("a", path)
        assert code == 2 and f'{path}\') writes one. For a run, write its folder, as in "monitor"' in text
    bare = write_digests(Path("bare"))
    for name in ("run.json", "digests.jsonl"):
        (bare / name).unlink()
    assert "No settings: bare has no whole run.json." in diff("a", "bare")[1]
    (b / "digests.jsonl").unlink()
    (b / "digests.jsonl").mkdir()
    assert diff("a", b) == (2, "zero-diff: b/digests.jsonl: Is a directory"), "1 would mean that they differ"


def test_no_secret_and_no_setting_of_what_is_written_is_shown(diff: Diff) -> None:
    wandb, service = {"enabled": False, "api_key": "other-key"}, {"url": "http://me:my-key@proxy", "token": "a-key"}
    b = write_digests(Path("b"), seed=1, config={"wandb": wandb, "service": service})
    text = diff("a", b)[1]
    assert "service.url - http://me:***@proxy" in text and "service.token - ***" in text
    assert "-key" not in text and "monitor" not in text and "wandb" not in text


Histories = st.integers(1, 40).flatmap(
    lambda steps: st.tuples(
        st.just(steps),
        st.integers(1, 5),
        st.lists(st.tuples(st.integers(0, steps - 1), st.integers(0, 2), st.integers(0, 4))),
    )
)


@given(Histories, st.integers(1, 3), st.integers(1, 3))
def test_the_first_difference_is_that_of_a_search_step_by_step(
    drawn: tuple[int, int, list[tuple[int, int, int]]], every_a: int, every_b: int
) -> None:
    steps, num_units, changes = drawn
    left = np.arange(steps * 3 * num_units, dtype=np.uint64).reshape(steps, 3, num_units)
    right = left.copy()
    for step, kind, unit in changes:
        right[step, kind, unit % num_units] ^= np.uint64(1 << 63)
    units = [f"u{i}" for i in range(num_units)]

    def table(values: np.ndarray, every: int, order: list[int]) -> DigestTable:
        ranks = np.full(len(values[::every]), 2)
        names = [units[unit] for unit in order]
        return DigestTable(names, KINDS, np.arange(steps)[::every], ranks, values[::every][:, :, order])

    ids = list(range(num_units))
    comparison = DigestComparison([table(left, every_a, ids), table(right, every_b, ids[::-1])], ["a", "b"])
    common = [step for step in range(steps) if step % every_a == 0 and step % every_b == 0]
    different = {
        step: {
            kind: [units[unit] for unit in ids if left[step, index, unit] != right[step, index, unit]]
            for index, kind in enumerate(KINDS)
            if (left[step, index] != right[step, index]).any()
        }
        for step in common
    }
    expected = next(((step, units) for step, units in different.items() if units), None)
    first = comparison.first()
    assert (first and (first.step, first.units)) == expected
    assert comparison.different_steps.tolist() == [step for step, units in different.items() if units]


def test_the_picture_of_a_long_run_stays_small_and_keeps_a_single_difference() -> None:
    steps, num_units = 2_000, 500
    values = np.zeros((steps, 3, num_units), np.uint64)
    other = values.copy()
    other[1_777, 1, 450] = 1
    units = [f"u{i}" for i in range(num_units)]
    tables = [DigestTable(units, KINDS, np.arange(steps), np.ones(steps, int), v) for v in (values, other)]
    heat = DigestComparison(tables, ["a", "b"]).heat()
    assert len(heat["first"]) == len(heat["rows"][0]) == 400 and len(heat["rows"]) == len(heat["units"]) == 400
    (row,) = (row for row in heat["rows"] if row.strip("0"))
    column = row.index("2")
    assert heat["units"][heat["rows"].index(row)] == "u450"
    assert heat["first"][column] <= 1_777 <= heat["last"][column]
