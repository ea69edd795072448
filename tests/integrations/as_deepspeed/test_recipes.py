"""Programs built on transformers and accelerate, as their users write them, train on zeroengine as under DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.environments import python_of, run_program

HERE = Path(__file__).parent
# What the frameworks fill: the sizes of batches, the optimizer's values and the schedule's.
AUTO: dict[str, Any] = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}
SCHEDULE = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}


def run(folder: Path, script: str, *arguments: object, launcher: tuple[str, ...] = ("--nproc", "2")) -> dict[str, Any]:
    """Run a recipe on two ranks, and return what rank 0 reports."""
    path = folder / "report"
    command = [str(python_of("transformers")), "-m", "zeroengine.cli.zero_launch", "--cpu", "--as-deepspeed"]
    done = run_program([*command, *launcher, str(HERE / script), *map(str, arguments)], {"REPORT": str(path)})
    assert done.returncode == 0, done.stdout[-6000:]
    values: dict[str, Any] = json.loads(Path(f"{path}.0").read_text())
    return values


def write_model(folder: Path) -> Path:
    """Write weights and a tokenizer, and return the folder."""
    done = run_program([str(python_of("transformers")), str(HERE / "recipe_models.py"), str(folder)])
    assert done.returncode == 0, done.stdout[-3000:]
    return folder


def check(trained: dict[str, Any], ddp: dict[str, Any]) -> None:
    """Check that a run on zeroengine has the losses and the saved weights of one under DistributedDataParallel."""
    assert trained["engine"] == "zeroengine.integrations.deepspeed.engine"
    assert "deepspeed" not in ddp["engine"]
    assert trained["losses"] == pytest.approx(ddp["losses"], abs=1e-6)
    assert trained["saved"] == pytest.approx(ddp["saved"], rel=1e-5)


@pytest.mark.slow
def test_accelerate_trains_with_a_plugin_and_with_a_file_of_its_launcher(tmp_path: Path) -> None:
    settings = tmp_path / "ds.json"
    settings.write_text(json.dumps({**AUTO, "scheduler": {"type": "WarmupLR", "params": SCHEDULE}}))
    launched = tmp_path / "accelerate.yaml"
    # accelerate reads YAML, of which JSON is a part.
    deepspeed = {"deepspeed_config_file": str(settings), "zero3_init_flag": True}
    facts = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "machine_rank": 0, "num_processes": 2}
    launched.write_text(json.dumps({**facts, "distributed_type": "DEEPSPEED", "deepspeed_config": deepspeed}))
    ddp = run(tmp_path, "recipe_accelerate.py", tmp_path / "ddp", "ddp")
    plugin = run(tmp_path, "recipe_accelerate.py", tmp_path / "plugin", "plugin")
    accelerate = ("--nproc", "1", "-m", "accelerate.commands.launch", "--config_file", str(launched))
    file = run(tmp_path, "recipe_accelerate.py", tmp_path / "file", "file", launcher=accelerate)
    for trained in (plugin, file):
        check(trained, ddp)
        # load_state brings back the state that save_state wrote.
        assert trained["again"] == trained["later"]


@pytest.mark.slow
def test_an_adapter_is_trained_as_a_yaml_file_says(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    settings = tmp_path / "ds.json"
    settings.write_text(json.dumps({**AUTO, "zero_optimization": {"stage": 2}}))
    recipe: dict[str, Any] = {
        "base_model": str(model),
        "adapter": "lora",
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "v_proj"],
        "sample_packing": True,
        "flash_attention": False,
        "sequence_len": 24,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "max_grad_norm": 0.5,
        "max_steps": 6,
        "save_steps": 3,
        "learning_rate": 5e-3,
        "lr_scheduler": "cosine",
        "warmup_steps": 1,
        "weight_decay": 0.0,
        "seed": 7,
    }
    results = {}
    for name, deepspeed in (("ddp", None), ("deepspeed", str(settings))):
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps({**recipe, "deepspeed": deepspeed, "output_dir": str(tmp_path / name)}))
        results[name] = run(tmp_path, "recipe_yaml.py", file)
    check(results["deepspeed"], results["ddp"])
    assert results["deepspeed"]["resumed"] == results["deepspeed"]["losses"]
    assert results["deepspeed"]["names"] == results["ddp"]["names"] and len(results["ddp"]["names"]) == 12


@pytest.mark.slow
def test_arguments_of_a_command_line_fine_tune_and_generate_at_stage_3(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    settings = tmp_path / "ds.json"
    settings.write_text(json.dumps(AUTO))
    arguments = {
        "model_name_or_path": model,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "save_steps": 3,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "report_to": "none",
    }
    options = [text for name, value in arguments.items() for text in (f"--{name}", value)]
    options += ["--predict_with_generate", "--use_cpu"]
    ddp = run(tmp_path, "recipe_arguments.py", "--output_dir", tmp_path / "ddp", *options)
    options += ["--deepspeed", settings]
    trained = run(tmp_path, "recipe_arguments.py", "--output_dir", tmp_path / "deepspeed", *options)
    check(trained, ddp)
    assert trained["resumed"] == trained["losses"]
    assert trained["predicted"] == ddp["predicted"] and any("=" in text for text in ddp["predicted"])
