"""What ``param.grad`` is between a backward and the step: the engine has the values.

[Note: Every way to drop a gradient]
``nn.Module.zero_grad``, ``Optimizer.zero_grad`` and loops of users read ``param.grad``, and do nothing where it is
None. So a read returns an ``EngineGradient``. Then all of them go on, and assign None or set it to zero, which the
engine notices. Without a gradient the optimizer leaves the parameter alone, whereas one of zero decays moments and
weights, as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.utils.compiler_disable import disable_compile
from zeroengine.utils.tensors import tensors_in
from zeroengine.utils.torch_internals import DisableTorchFunctionSubclass, foreach_zero, unscale_and_check

_T: Any = torch.Tensor
_PROPERTIES = "shape dtype device layout requires_grad grad is_leaf grad_fn ndim itemsize nbytes is_cuda is_cpu is_meta"
_METHODS = "size dim numel nelement element_size is_floating_point is_complex is_signed get_device __hash__ __len__"
# What reads no value.
_METADATA = {
    *(getattr(_T, name).__get__ for name in (*_PROPERTIES.split(), "is_sparse", "is_quantized", "is_nested")),
    *(getattr(_T, name) for name in _METHODS.split()),
    *(torch.numel, torch.is_floating_point, torch.is_complex),
}
# The steps before ``zero_`` of code that drops gradients. Each returns the same gradient.
_SAME = {_T.detach, _T.detach_, _T.requires_grad_, _T.data.__get__, _T.requires_grad.__set__, torch.detach}
_ZEROS = {_T.zero_, torch.zero_, foreach_zero}
# With the argument 0 they set to zero as well.
_FILLS = {_T.fill_, torch.fill_, _T.mul_, _T.__imul__}
GRAD_SCALER_REFUSAL = (
    "GradScaler.step(optimizer): the scaler cannot see the gradients, which are reduced and partitioned, and the "
    'engine scales the loss itself where fp16 needs it. Write "fp16": {"enabled": true} (or "torch_autocast": '
    '{"enabled": true, "dtype": "fp16"}) in the configuration, and make the scaler with enabled=False or remove it.'
)


class EngineGradient(torch.Tensor):
    """The gradient of one parameter in the step so far, without its values.

    It can be set to zero, and tells its shape, dtype and device. Any other use raises.
    """

    param_name: str
    _set_to_zero: Callable[[], None]

    @classmethod
    def of_parameter(cls, param: torch.Tensor, name: str, set_to_zero: Callable[[], None]) -> EngineGradient:
        """Return what ``param.grad`` is.

        Args:
            param: The parameter. It may be released.
            name: Its name, for errors.
            set_to_zero: Sets the gradient to zero.
        """
        with DisableTorchFunctionSubclass():
            # One element, which is never read, serves all.
            gradient = torch.empty((), dtype=param.dtype, device=param.device).expand(param.shape).as_subclass(cls)
        gradient.param_name, gradient._set_to_zero = name, set_to_zero
        return gradient

    @classmethod
    @disable_compile
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function that reads no value of a gradient, or sets gradients to zero.

        Raises:
            ZeroEngineError: The function reads values.
        """
        kwargs = kwargs or {}
        if func in _METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        gradients = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
        if all(isinstance(gradient, cls) for gradient in gradients):
            if func in _SAME:
                return args[0]
            if func in _ZEROS or (func in _FILLS and args[1:] == (0,)):
                for gradient in gradients:
                    gradient._set_to_zero()
                return args[0]
        if func is unscale_and_check:
            raise ZeroEngineError(GRAD_SCALER_REFUSAL)
        held = next(tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, cls))
        held.refuse(getattr(func, "__name__", str(func)))

    def refuse(self, use: str) -> NoReturn:
        """Raise an error that says what to write in place of ``use``, which needs values.

        Raises:
            ZeroEngineError: Always.
        """
        raise ZeroEngineError(
            f"{use} of {self.param_name}.grad between backward() and step(): gradients are reduced into buffers of the "
            "engine, and this tensor has no values. To clip, call engine.clip_grad_norm_(max_norm), or write "
            "gradient_clipping in the configuration. zeroengine.full_gradient(param) gives the gradient, "
            "zeroengine.set_full_gradient(param, value) replaces it, and zero_grad() drops it."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Gradient held by zeroengine: shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.refuse("pickle")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.refuse("deepcopy")
