"""DeepSpeed's names: what scripts import, and what they read of the objects."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
import zeroengine.integrations.deepspeed as deepspeed
from zeroengine.errors import ConfigError, ZeroEngineError
from zeroengine.integrations.deepspeed import module_paths, settings

PACKAGE = "zeroengine.integrations.deepspeed"


@pytest.mark.parametrize("path", [*module_paths.MODULES, *module_paths.ALIASES])
def test_every_module_path_can_be_imported_and_reached_by_attributes(path: str) -> None:
    module = importlib.import_module(f"{PACKAGE}.{path}")
    reached = deepspeed
    for name in path.split("."):
        reached = getattr(reached, name)
    # One name of deepspeed.utils is a function and a module, and attributes reach the function.
    assert reached is module or path == "utils.z3_leaf_module"
    for name, value in module_paths.MODULES.get(path, {}).items():
        assert getattr(module, name) is value


def test_a_name_that_is_not_served_says_what_is() -> None:
    module = importlib.import_module(f"{PACKAGE}.runtime.zero.stage3")
    with pytest.raises(
        AttributeError, match=r"deepspeed\.runtime\.zero\.stage3\.partition.*DeepSpeedZeroOptimizer_Stage3"
    ):
        _ = module.partition
    with pytest.raises(AttributeError, match=r"docs/integrations/deepspeed\.md"):
        _ = deepspeed.replace_transformer_layer


def test_classes_that_are_not_served_can_be_subclassed_and_not_made() -> None:
    class Pipeline(deepspeed.PipelineModule):
        pass

    with pytest.raises(ZeroEngineError, match="PipelineModule is not served by zeroengine: layers and experts are"):
        Pipeline(layers=[])


def test_an_initialize_that_fails_leaves_an_ordinary_model() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    with pytest.raises(ZeroEngineError, match="length"):
        deepspeed.initialize(model=model, config=config, training_data=iter([]))
    assert torch.equal(model.weight, before) and zeroengine.engine_of(model) is None
    deepspeed.initialize(model=model, config=config)[0].destroy()


def test_settings_have_deepspeeds_default_clipping_and_old_offload_keys() -> None:
    config = settings.load_settings({"train_batch_size": 2, "zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert config.gradient_clipping == 1.0
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    assert settings.load_settings({"train_batch_size": 2, "gradient_clipping": 0.0}).gradient_clipping == 0.0
    for name in ("bf16", "bfloat16"):
        section = {"enabled": True, "bf16_optimizer_states": True}
        assert settings.load_settings({"train_batch_size": 2, name: section}).optimizer_state_dtype == "bf16"


def test_sections_of_other_types_are_errors_that_say_what_to_write() -> None:
    for stage in (2, 3):
        with pytest.raises(ZeroEngineError, match=r"zero_optimization.offload_param"):
            settings.load_settings(
                {"train_batch_size": 2, "zero_optimization": {"stage": stage, "offload_param": True}}
            )
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=r'stage: found "auto"; write 0, 1, 2 or 3'):
        deepspeed.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": "auto"}})


def test_train_batch_takes_the_data_again_and_again_and_ends_between_steps() -> None:
    data = [(torch.full((2,), float(number)), torch.tensor(float(number))) for number in range(3)]
    seen: list[float] = []

    class Seen(nn.Linear):
        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            seen.extend(targets.tolist())
            return (super().forward(inputs)[:, 0] - targets).square().mean()

    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "optimizer": {"type": "Adam"}}
    engine, *_ = deepspeed.initialize(model=Seen(2, 1), training_data=data, config=config)
    for _ in range(3):
        engine.train_batch()
    assert sorted(seen[:3]) == sorted(seen[3:]) == [0.0, 1.0, 2.0]
    batches = iter([(torch.ones(1, 2), torch.ones(1))] * 3)
    engine.train_batch(batches)
    with pytest.raises(ZeroEngineError, match="data_iter ended after 1 of the 2 micro-batches of a step"):
        engine.train_batch(batches)
    with pytest.raises(StopIteration):
        engine.train_batch(batches)
    engine.destroy()


def test_what_frameworks_write_for_auto_is_taken_as_deepspeed_does(caplog: pytest.LogCaptureFixture) -> None:
    zero: dict[str, Any] = {"stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    zero["zero_hpz_partition_size"] = 2
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 0, "warmup_type": "linear"}}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "scheduler": schedule}
    config["gradient_clipping"] = "auto"
    model = nn.Linear(2, 2)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    placed = engine.engine.config.zero_optimization
    assert (placed.offload_param.device, placed.offload_optimizer.device) == ("none", "cpu")
    assert placed.degrees is None and engine.gradient_clipping() == 1.0
    without_effect = [text for text in caplog.messages if "has no effect below stage 3" in text]
    assert len(without_effect) == 2
    rates = []
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        rates += engine.get_lr()
    # A warm-up of 0 steps takes 2.
    assert rates == pytest.approx([0.0, 0.05, 0.1])
    engine.destroy()


def test_schedules_keep_what_deepspeeds_keep_and_what_is_written_counts() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.2)]
    schedules = deepspeed.runtime.lr_schedules
    warmup = schedules.WarmupLR(torch.optim.Adam(groups), warmup_num_steps=2, warmup_type="linear")
    assert (warmup.min_lrs, warmup.max_lrs) == ([0.0, 0.0], [0.1, 0.2])
    warmup.max_lrs = [0.3, 0.5]
    warmup.step(5)
    assert warmup.get_last_lr() == [0.3, 0.5]
    optimizer = torch.optim.Adam(groups)
    cycle = schedules.OneCycle(optimizer, [0.0, 1.0], 2.0, cycle_first_step_size=1, cycle_second_step_size=3)
    assert (cycle.min_lrs, cycle.max_lrs, cycle.step_ratio) == ([0.0, 1.0], [2.0, 2.0], 0.25)
    # DeepSpeed's own differ before the first step.
    assert (optimizer.param_groups[0]["betas"][0], cycle.get_mom()[0][0]) == (0.8, 0.9)
    cycle.step()
    assert optimizer.param_groups[0]["betas"] == cycle.get_mom()[0] and cycle.get_lr() == [2.0, 2.0]
    with pytest.raises(ValueError, match="warmup_num_steps is a number of at least 1; found None"):
        schedules.WarmupLR(optimizer, warmup_num_steps=None)


def test_batch_sizes_that_contradict_one_another_are_an_error() -> None:
    with pytest.raises(ConfigError, match="train_batch_size"):
        deepspeed.DeepSpeedConfig(
            {"train_batch_size": 33, "train_micro_batch_size_per_gpu": 17, "gradient_accumulation_steps": 2}
        )


def test_an_unknown_tag_validation_is_an_error() -> None:
    with pytest.raises(settings.DeepSpeedConfigError, match=r"checkpoint\.tag_validation: write one of .*'FOO'"):
        deepspeed.DeepSpeedConfig({"train_batch_size": 2, "checkpoint": {"tag_validation": "foo"}})


def test_without_a_configuration_the_error_says_how_to_pass_one() -> None:
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=r"initialize\(config=\.\.\.\)"):
        deepspeed.initialize(model=torch.nn.Linear(2, 2))


def test_leaf_modules_are_marked_by_class_name_and_suffix() -> None:
    class Base(nn.Module):
        pass

    class Block(Base):
        pass

    model = nn.Sequential()
    model.add_module("block", Block())
    model.add_module("other_block", nn.Linear(2, 2))
    utils = importlib.import_module(f"{PACKAGE}.utils")
    # A subclass counts as its base, under the class itself and under its names.
    for kind in (Base, "Base", f"{Base.__module__}.{Base.__qualname__}"):
        assert utils.set_z3_leaf_modules(model, [kind]) == [model.block] == utils.get_z3_leaf_modules(model)
        assert utils.unset_z3_leaf_modules(model, [kind]) == [model.block] and not utils.get_z3_leaf_modules(model)
    assert utils.set_z3_leaf_modules_by_name(model, ["block"]) == ([model.block], [])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["block", "x"], raise_if_not_found=False) == (
        [model.block, model.other_block],
        ["x"],
    )
    for mark in (utils.set_z3_leaf_modules, utils.set_z3_leaf_modules_by_name, utils.set_z3_leaf_modules_by_suffix):
        with pytest.raises(ZeroEngineError, match="no module of the model is one of absent"):
            mark(model, ["absent"])


def test_a_zero_section_can_be_made_and_read() -> None:
    section = settings.DeepSpeedZeroConfig(stage=2, leaf_module={"classes": "Block"})
    assert (section.stage, section.leaf_module.classes, section.leaf_module.names) == (2, ["Block"], [])
    with pytest.raises(ConfigError, match="no_such_key"):
        settings.DeepSpeedZeroConfig(no_such_key=1)


def test_every_handle_is_waited_for() -> None:
    waits: list[dict[str, bool]] = []

    class Handle:
        def wait(self, **options: bool) -> None:
            waits.append(options)

    deepspeed.zero.MultipleAllGatherHandles([Handle(), Handle()]).wait(handle_dependency=False)
    assert waits == [{"handle_dependency": False}] * 2


def test_an_untested_optimizer_is_refused_where_the_configuration_says_so() -> None:
    model = nn.Linear(2, 2)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": False}
    with pytest.raises(AssertionError, match=r"refuses SGD.*Write true"):
        deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)


def test_keys_that_deepspeed_ignores_are_ignored() -> None:
    section = {"type": "Adam", "torch_adam": True}
    assert settings.load_settings({"train_batch_size": 2, "optimizer": section}).optimizer.type == "AdamW"
    assert section["torch_adam"]


def _sum_of(self: nn.Linear, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (self(x) * scale).square().sum()


def test_tiles_compute_what_the_function_computes() -> None:
    """With more tiles than tokens, with an input besides the first one that requires a gradient, and as a sum."""
    module = module_paths.MODULES["runtime.sequence_parallel.ulysses_sp"]
    torch.manual_seed(0)
    mlp, x, scale = nn.Linear(4, 4), torch.randn(2, 5, 4, requires_grad=True), torch.randn(2, 5, 1, requires_grad=True)

    def forward(self: nn.Linear, x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        return torch.tanh(self(x)) * scale

    tiled = module["sequence_tiled_compute"]
    sharded = {"x": x, "scale": scale}
    outputs = [
        (module["TiledMLP"].apply(forward, mlp, x, 8, [mlp.weight]), forward(mlp, x)),
        (
            tiled(forward, 5, 3, sharded, {"self": mlp}, "x", [mlp.weight], output_reduction=None),
            forward(mlp, x, scale),
        ),
        # The sum over tiles is divided afterwards, and the gradients with it.
        (
            module["TiledFusedLogitsLoss"].apply(_sum_of, mlp, x, scale, None, 3, [], "sum") / 7,
            _sum_of(mlp, x, scale) / 7,
        ),
        (tiled(lambda x: x.square().sum(), 5, 2, {"x": x}, {}, "x", [], 0, "sum"), x.square().sum()),
    ]
    for found, expected in outputs:
        assert torch.allclose(found, expected)
        inputs = [mlp.weight, x, scale]
        grads = (torch.autograd.grad(value.sum(), inputs, allow_unused=True) for value in (found, expected))
        for one, other in zip(*grads, strict=True):
            assert (one is None) == (other is None) and (one is None or torch.allclose(one, other, atol=1e-6))
