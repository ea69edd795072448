"""The classes, methods and attributes of Lightning that ``zeroengine.integrations.lightning`` relies on."""

from __future__ import annotations

import inspect
from typing import Any

from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.types import _Stateful
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import Strategy, _ForwardRedirection

# Each function, and the names of its first parameters after self.
FUNCTIONS: list[tuple[Any, str]] = [
    (Strategy.backward, "closure_loss optimizer"),
    (Strategy.optimizer_step, "optimizer closure model"),
    (Strategy.training_step, ""),
    (Strategy.validation_step, ""),
    (Strategy.test_step, ""),
    (Strategy.predict_step, ""),
    (Strategy.setup_optimizers, "trainer"),
    (Strategy.setup_precision_plugin, ""),
    (Strategy.lightning_module_state_dict, ""),
    (Strategy.optimizer_state, "optimizer"),
    (Strategy.save_checkpoint, "checkpoint filepath storage_options"),
    (Strategy.load_checkpoint, "checkpoint_path weights_only"),
    (Strategy.load_model_state_dict, "checkpoint strict"),
    (Strategy.remove_checkpoint, "filepath"),
    (DDPStrategy.setup, "trainer"),
    (DDPStrategy.model_to_device, ""),
    (DDPStrategy.block_backward_sync, ""),
    (DDPStrategy.teardown, ""),
    (_ForwardRedirection.__call__, "wrapper_module original_module method_name"),
    (Precision.backward, "tensor model optimizer"),
    (Precision.optimizer_step, "optimizer model closure"),
    (Precision._after_closure, "model optimizer"),
    (Precision.clip_grad_by_norm, "optimizer clip_val"),
    (Precision.clip_grad_by_value, "optimizer clip_val"),
    (Precision.forward_context, ""),
    (FabricDDPStrategy.setup_module, "module"),
    (FabricStrategy.setup_optimizer, "optimizer"),
    (FabricStrategy.setup_module_and_optimizers, "module optimizers scheduler"),
    (FabricStrategy.module_init_context, "empty_init"),
    (FabricDDPStrategy.module_to_device, "module"),
    (FabricStrategy.optimizer_step, "optimizer"),
    (FabricStrategy.clip_gradients_norm, "module optimizer max_norm norm_type error_if_nonfinite"),
    (FabricStrategy.clip_gradients_value, "module optimizer clip_val"),
    (FabricStrategy.save_checkpoint, "path state storage_options filter"),
    (FabricStrategy.load_checkpoint, "path state strict weights_only"),
    (FabricStrategy._convert_stateful_objects_in_state, "state filter"),
    (FabricPrecision.backward, "tensor model"),
    (_BackwardSyncControl.no_backward_sync, "module enabled"),
]


def check_functions() -> None:
    for function, expected in FUNCTIONS:
        parameters = [name for name in inspect.signature(function).parameters if name != "self"]
        found = " ".join(parameters[: len(expected.split())])
        assert found == expected, f"{function.__qualname__}({', '.join(parameters)}), expected ({expected})"
    assert list(inspect.signature(_update_properties).parameters)[:2] == ["root", "device"]
    assert list(inspect.signature(_validate_keys_for_strict_loading).parameters)[1:] == ["checkpoint_keys", "strict"]


def check_attributes() -> None:
    for owner in (Strategy, FabricStrategy):
        source = inspect.getsource(owner)
        for name in ("_checkpoint_io", "_precision_plugin" if owner is Strategy else "_precision"):
            assert f"self.{name}" in source, f"{owner.__qualname__} has no {name}"
    for cls in (DDPStrategy, FabricDDPStrategy):
        assert "self._ddp_kwargs = kwargs" in inspect.getsource(cls.__init__)
    assert isinstance(Strategy.precision_plugin, property) and Strategy.precision_plugin.fset is not None
    assert isinstance(FabricStrategy.precision, property) and FabricStrategy.precision.fset is not None
    for name in ("restore_checkpoint_after_setup", "lightning_restore_optimizer"):
        assert isinstance(getattr(Strategy, name), property), name
    # Both wrappers keep the optimizer inside as ``optimizer``, and the module's wrapper the strategy's module.
    for wrapper in (LightningOptimizer, _FabricOptimizer):
        assert isinstance(wrapper.optimizer, property), wrapper
    assert "self._forward_module = forward_module" in inspect.getsource(_FabricModule.__init__)
    assert callable(_MockOptimizer) and isinstance(_Stateful, type)
    for registry in (StrategyRegistry, STRATEGY_REGISTRY):
        assert {"name", "strategy", "description", "override"} <= set(inspect.signature(registry.register).parameters)


if __name__ == "__main__":
    check_functions()
    check_attributes()
