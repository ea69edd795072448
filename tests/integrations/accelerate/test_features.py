"""What accelerate offers beside the plain loop: several models, precision, weights, checkpoints, errors, launchers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.environments import python_of, run_program, run_script

HERE = Path(__file__).parent
# What one script of half a minute reports. test_training compares losses with DDP and resumes.
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    """Return what the script reports on each rank."""
    return run_script("accelerate", HERE / "features_script.py", [folder])


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """Return what the script of settings reports."""
    reported: dict[str, Any] = run_script("accelerate", HERE / "settings_script.py", ranks=1)[0]
    return reported


@SLOW
@pytest.mark.parametrize("name", ["gan", "distillation"])
def test_several_models_train_as_under_ddp(results: list[dict[str, Any]], name: str) -> None:
    for of_rank in results:
        ddp, *of_stages = of_rank[name]
        for losses in of_stages:
            assert losses == pytest.approx(ddp, abs=1e-6, rel=0)


@SLOW
def test_autocast_computes_as_under_ddp_and_gives_outputs_in_fp32(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        (losses, dtype), *others = of_rank["autocast"].values()
        for other, other_dtype in others:
            assert other == pytest.approx(losses, abs=1e-5, rel=0)
            assert other_dtype == dtype == "torch.float32"


@SLOW
def test_mixed_precision_of_bf16_trains_parameters_in_bf16(results: list[dict[str, Any]]) -> None:
    dtype, precision, first, last = results[0]["bf16"]
    assert (dtype, precision) == ("torch.bfloat16", "bf16")
    assert first > 0 and last < 2.8


@SLOW
def test_fp16_of_the_arguments_trains_like_fp32_after_its_scale_has_fallen(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        expected, *found = of_rank["fp16"]
        assert len(expected) == 8 and expected[-1] < expected[0] - 0.1
        for dtype, num_skipped, scale, losses in found:
            assert dtype == "torch.float16" and num_skipped > 0 and scale < 2.0**24
            assert losses == pytest.approx(expected, abs=0.02)


@SLOW
def test_a_model_that_was_evaluated_trains_from_its_exact_values(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        exact, difference, is_finite = of_rank["evaluated"]
        assert exact and is_finite
        # One is computed under autocast, and the other in bf16.
        assert difference < 0.02


@SLOW
def test_unwrapped_models_state_dicts_and_saved_weights_are_whole(results: list[dict[str, Any]]) -> None:
    assert [of_rank["weights"] for of_rank in results] == [[True] * 3] * 2


@SLOW
def test_gradients_under_no_sync_and_of_a_plain_backward_add_up(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        for difference in of_rank["no_sync"]:
            assert difference[0] < 1e-6


@SLOW
def test_dummies_stand_for_the_optimizer_and_schedule_of_the_configuration(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        values, expected = of_rank["configured"]
        assert values == expected


@SLOW
def test_the_schedule_waits_where_a_step_is_skipped(results: list[dict[str, Any]]) -> None:
    skipped, rates = results[0]["skipped"][::2], results[0]["skipped"][1::2]
    assert skipped == [False, True, False]
    assert rates[0] == rates[1] > rates[2]


@SLOW
def test_named_checkpoints_keep_the_newest_and_objects_and_call_hooks(results: list[dict[str, Any]]) -> None:
    names, count, same, calls, _ = results[0]["named"]
    assert names == ["checkpoint_1", "checkpoint_2"]
    assert count == 3 and same
    # The engines save their models themselves, so hooks get no weights and load no model.
    assert calls == [[1, 0]] * 3 + [0, [1, 0]]


@pytest.mark.slow
def test_a_run_goes_on_on_another_number_of_ranks(results: list[dict[str, Any]], folder: Path) -> None:
    reported = run_script("accelerate", HERE / "resumed_script.py", [folder], ranks=1)[0]
    assert reported["loss"] == pytest.approx(results[0]["named"][-1], abs=1e-6)
    assert reported["count"] == 3
    assert reported["last"] < 3


ERRORS = {
    "backward before the optimizer": "model, optimizer = accelerator.prepare(model, optimizer)",
    "an optimizer of another model": "the optimizer has parameters of none of the prepared models (Small)",
    "a schedule of another optimizer": "StepLR is over another SGD than those that were prepared",
    "a wrapped model": "leave DistributedDataParallel(...) out",
    "a second optimizer": "Small is trained by another optimizer already",
    "clipping too early": "Write `if accelerator.sync_gradients:` above",
    "saving too early": "save_checkpoint() between the micro-steps of a step would lose their gradients",
    "another norm": "Leave norm_type out",
    "a part": "accelerator.clip_grad_norm_(model.parameters(), max_norm)",
    "clipping values": "accelerator.clip_grad_norm_(model.parameters(), max_norm)",
    "a closure": "accelerator.backward(loss) and then optimizer.step()",
    "no such folder": "there is no such folder",
    "a folder of accelerate": "zeroengine.engine_of(model).load_weights(",
    "uneven inputs": "Leave even_batches out",
    "an optimizer of two models": "make an optimizer for each",
    "another batch size": '"train_micro_batch_size_per_gpu": "auto"',
    "two optimizers": "accelerate.utils.deepspeed.DummyOptim(model.parameters())",
}


@SLOW
@pytest.mark.parametrize("name", ERRORS)
def test_mistakes_in_the_loop_say_what_to_write(results: list[dict[str, Any]], name: str) -> None:
    for of_rank in results:
        assert ERRORS[name] in of_rank["errors"][name]


CONTRADICTIONS = {
    "bf16 against fp16": 'mixed_precision="bf16", and the configuration has "fp16": {"enabled": true}',
    "no against bf16": 'or mixed_precision="bf16"',
    "bf16 switched off": 'the configuration has "bf16": {"enabled": false}',
    "fp8": "zeroengine has no, fp16, bf16",
    "launched with fp16": 'ACCELERATE_MIXED_PRECISION=fp16, and the configuration has "bf16": {"enabled": true}',
    "launched with nothing": "no error",
    "deepspeed": 'ZeroAccelerator(zero_config="zero3.json")',
    "fsdp": '"zero_optimization": {"stage": 3} in the configuration',
    "launched with fsdp": "Leave --use_fsdp out of accelerate launch",
    "hook": '"communication_data_type": "bf16"',
    "accumulation": "accelerate has gradient_accumulation_steps=2",
    "scale": "GradScalerKwargs(growth_factor=3.0)",
    "trainer": "no error",
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradicting_settings_say_what_to_write(settings: dict[str, Any], name: str) -> None:
    assert CONTRADICTIONS[name] in settings["errors"][name]


def test_open_keys_take_what_accelerate_knows(settings: dict[str, Any]) -> None:
    assert settings["filled"] == {"fp16": [True, 10, 50, "fp16"], "steps": 4}


def test_a_model_that_accelerate_compiles_trains(settings: dict[str, Any]) -> None:
    assert settings["compiled"] == [True, True, True]


@pytest.mark.slow  # the versions are pinned; training, which goes through the seams, is not slow
def test_the_seams_of_accelerate_are_as_they_were() -> None:
    assert run_script("accelerate", HERE / "seams.py", ranks=1) == [[]]


@pytest.mark.slow
def test_the_docs_page_runs(tmp_path: Path) -> None:
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    assert run_script("accelerate", HERE / "run_docs_page.py", [tmp_path]) == [3, 3]


LAUNCHERS = {
    "accelerate launch": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--num_processes=2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "zero-launch": ["-m", "zeroengine.cli.zero_launch", "--nproc=2", "--cpu"],
}


@pytest.mark.slow
def test_all_launchers_start_the_same_training(tmp_path: Path) -> None:
    config = tmp_path / "zero3.json"
    config.write_text('{"zero_optimization": {"stage": 3}}')
    losses = []
    for name, words in LAUNCHERS.items():
        of_zero = ["--config", str(config)] if name == "zero-launch" else []
        of_others = [] if name == "zero-launch" else [str(config)]
        path = tmp_path / name.replace(" ", "_")
        command = [str(python_of("accelerate")), *words, *of_zero, str(HERE / "launched_script.py"), *of_others]
        done = run_program(command, {"REPORT": str(path)})
        assert done.returncode == 0, f"{name}:\n{done.stdout[-4000:]}"
        of_ranks = [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(2)]
        assert [(of_rank["ranks"], of_rank["stage"]) for of_rank in of_ranks] == [(2, 3)] * 2
        losses.append([of_rank["losses"] for of_rank in of_ranks])
    assert losses[0] == losses[1] == losses[2]
