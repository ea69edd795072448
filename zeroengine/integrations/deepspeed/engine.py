"""``DeepSpeedEngine``: zeroengine's engine under the names of DeepSpeed's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from zeroengine.engine.engine import Engine
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.deepspeed.engine_checkpoints import EngineCheckpointMethods
from zeroengine.integrations.deepspeed.optimizer import DeepSpeedOptimizer
from zeroengine.integrations.deepspeed.parameters import annotate_parameters, remove_attributes
from zeroengine.integrations.deepspeed.settings import DeepSpeedConfig
from zeroengine.integrations.deepspeed.ulysses_sp import UlyssesSPAttentionHF
from zeroengine.migration.messages import engine_attribute

log = logging.getLogger("zeroengine")


class UnusedParameterError(ZeroEngineError, AssertionError):
    """A parameter got no gradient in a step. DeepSpeed asserts this, and scripts catch its class of error."""


class DeepSpeedEngine(EngineCheckpointMethods):
    """Trains a partitioned model. ``initialize`` makes one.

    Attributes:
        module: The model.
        engine: The engine of zeroengine.
        optimizer: The optimizer under DeepSpeed's names; None if the model is not trained.
        lr_scheduler: The LR schedule, or None.
        training_dataloader: The loader of ``training_data``, or None.
        device: The device that the model computes on.
        global_steps: The number of steps, skipped ones included, as DeepSpeed counts.
        skipped_steps: The number of steps that were skipped because the gradient was not finite.
        micro_steps: The number of calls of ``step``.
        global_samples: The samples of all steps.
        mpu: What was passed, or the ranks that share each sample, or None.

    Args:
        engine: The engine.
        optimizer: The optimizer, or None.
        config: The configuration under DeepSpeed's names.
        training_data: A data set, or None.
        collate_fn: As of ``torch.utils.data.DataLoader``.
    """

    module: nn.Module

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer | None,
        config: DeepSpeedConfig,
        training_data: Any = None,
        collate_fn: Any = None,
    ) -> None:
        super().__init__(engine, config)
        self.module, self.optimizer, self.collate_fn = engine.module, optimizer, collate_fn
        self.config = config._param_dict
        # The last argument of set_gradient_accumulation_boundary, under the name of DeepSpeed's attribute.
        self._is_gradient_accumulation_boundary: bool | None = None
        # The call whose context keeps gradients on this rank, while it lasts.
        self._local_context: str | None = None
        self._step_applied = False
        self._is_destroyed = False
        self.is_compiled = False
        self.device = engine.device
        self.global_rank, self.local_rank = engine.rank, engine.device.index or 0
        self.world_size, self.dp_world_size = engine.world_size, engine.num_sample_groups
        self.mpu: Any = UlyssesSPAttentionHF(size) if (size := engine.sequence_group.size) > 1 else None
        self._data_iterator: Iterator[Any] | None = None
        self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)
        # Gradients are reduced dense.
        self.sparse_tensor_module_names: set[str] = set()
        for param in self.module.parameters():
            # What zero.Init said of the parameter no longer holds.
            remove_attributes(param)
        if self.zero_optimization_stage() == 3:
            annotate_parameters(engine, config.enable_sanity_checks)

    # These are hidden from type checkers, which then report unknown attributes.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the model. If there is none, say which name to use instead."""
            modules = self.__dict__.get("_modules", {})
            if name in modules:
                return modules[name]
            module = modules.get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise AttributeError(engine_attribute(name, self))

    def __len__(self) -> int:
        if self.training_dataloader is None:
            raise TypeError("the engine has no training_data, and so no length")
        return len(self.training_dataloader)

    # -- training ---------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model."""
        self._apply_boundary()
        is_whole = getattr(self.mpu, "disable_in_eval", False) and not self.module.training
        with self.engine.sequence_group.whole_sequences() if is_whole else contextlib.nullcontext():
            return self.engine(*inputs, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **options: Any
    ) -> torch.Tensor:
        """Compute gradients of the mean over ``gradient_accumulation_steps`` micro-steps.

        Args:
            loss: A scalar that depends on the parameters.
            retain_graph: As of ``Tensor.backward``.
            scale_wrt_gas: Whether the gradient is divided by ``gradient_accumulation_steps``.
            options: Others of ``Tensor.backward``.

        Returns:
            The loss, divided likewise.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ZeroEngineError(
                "backward() takes a scalar loss. For a tensor of several elements write "
                "engine.engine.scale(tensor).backward(gradient)"
            )
        self._apply_boundary()
        steps = self.gradient_accumulation_steps()
        # The update divides by the number of micro-steps, so a loss that is not to be divided is multiplied here.
        factor = 1 if scale_wrt_gas else steps
        options = {name: value for name, value in options.items() if name in ("create_graph", "inputs")}
        self.engine.backward(loss if factor == 1 else loss * factor, retain_graph=retain_graph, **options)
        return loss if factor != 1 or steps == 1 else loss / steps

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scalar loss times the loss scale, for a ``backward`` of its own."""
        # DeepSpeed asserts this, and scripts catch its class of error.
        assert isinstance(loss, torch.Tensor) and loss.numel() == 1, (
            f"scale() takes a scalar tensor, found {loss!r:.100}"
        )
        return self.engine.scale(loss)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-step; at the accumulation boundary update the parameters and step the schedule."""
        if lr_kwargs:
            raise ZeroEngineError("step(lr_kwargs=...): a schedule is stepped without arguments; leave it out")
        # DeepSpeed asserts this, and scripts catch its class of error.
        assert self._local_context != "coalesce_grad_reduction()", (
            "step() inside of coalesce_grad_reduction() or no_sync(): leave the `with` first, and the step reduces"
        )
        self._apply_boundary()
        if not self.managed_gradient_accumulation():
            self.engine.set_gradient_accumulation_boundary(True, override=True)
            self._unmanaged_samples += self._samples_of_backwards()
        is_boundary = self.engine.is_gradient_accumulation_boundary()
        # DeepSpeed has this check at stages 1 and 2.
        if is_boundary and not self._config.ignore_unused_parameters and self.zero_optimization_stage() in (1, 2):
            _check_parameters_used(self.engine)
        updated = self.engine.step()
        self._step_applied = is_boundary and bool(updated)
        if is_boundary and self.engine.config.scales_loss:
            self._norm.read()
        if is_boundary and isinstance(self.optimizer, DeepSpeedOptimizer):
            self.optimizer.note_step()

    def _apply_boundary(self) -> None:
        """Tell the engine of the boundary that the script has set, which an update ends there and not here."""
        # Where the script alone decides, no backward is known to be the last one before ``step``.
        boundary = self._is_gradient_accumulation_boundary if self.managed_gradient_accumulation() else False
        if boundary is not None:
            self.engine.set_gradient_accumulation_boundary(boundary, override=True)

    def _samples_of_backwards(self) -> int:
        """Return the samples of all ranks in the backwards since the last update."""
        return self.engine.backwards_in_step * self.train_micro_batch_size_per_gpu() * self.engine.num_sample_groups

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the micro-step in progress ends with an update."""
        if not self.managed_gradient_accumulation():
            return False
        boundary = self._is_gradient_accumulation_boundary
        return self.engine.is_gradient_accumulation_boundary() if boundary is None else boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide whether the next ``step`` updates, from now on, instead of the count of micro-steps."""
        self._check_managed("set_gradient_accumulation_boundary()")
        self._is_gradient_accumulation_boundary = bool(is_boundary)
        self._apply_boundary()

    def _check_managed(self, call: str) -> None:
        # DeepSpeed asserts this, and scripts catch its class of error.
        assert self.managed_gradient_accumulation(), (
            f'{call} needs "managed_gradient_accumulation": true; with false every step() updates, and nothing else '
            "decides when"
        )

    def was_step_applied(self) -> bool:
        """Return whether the last ``step`` updated the parameters."""
        return self._step_applied

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Keep the gradients of backwards inside on this rank, at any stage."""
        return self._keep_gradients_local("no_sync()")

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Keep the gradients of backwards inside on this rank. The ``step`` that follows reduces their sum once."""
        self._check_managed("coalesce_grad_reduction()")
        if self.zero_optimization_stage() == 0:
            raise NotImplementedError("coalesce_grad_reduction() needs stage 1, 2 or 3; write no_sync() at stage 0")
        boundary = self._is_gradient_accumulation_boundary
        try:
            with self._keep_gradients_local("coalesce_grad_reduction()"):
                yield
        finally:
            self._is_gradient_accumulation_boundary = boundary
            self.engine.set_gradient_accumulation_boundary(boundary, override=True)

    @contextlib.contextmanager
    def _keep_gradients_local(self, call: str) -> Iterator[None]:
        """Run the context of ``call``, in which backwards reduce nothing."""
        # DeepSpeed asserts this, and scripts catch its class of error.
        assert self._local_context is None, f"{call} is nested inside of {self._local_context}; write one of the two"
        self._local_context = call
        try:
            with self.engine.no_sync():
                yield
        finally:
            self._local_context = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the step so far, or set them to zero."""
        self.engine.zero_grad(set_to_none)

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: gradients are reduced in backward, or in ``step``."""

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Run one whole step, and return the mean loss of its micro-steps.

        Args:
            data_iter: Gives the micro-batches. None: ``training_data``, over and over.

        Raises:
            StopIteration: ``data_iter`` has ended.
            ZeroEngineError: It ended within a step, or there are no data.
        """
        batches = data_iter if data_iter is not None else self._batches()
        total: torch.Tensor | None = None
        for number in range(self.gradient_accumulation_steps()):
            try:
                batch = next(batches)
            except StopIteration:
                if not number:
                    raise
                raise ZeroEngineError(
                    f"train_batch(): data_iter ended after {number} of the {self.gradient_accumulation_steps()} "
                    "micro-batches of a step"
                ) from None
            loss = self(**batch) if isinstance(batch, dict) else self(*batch)
            self.backward(loss)
            if self.managed_gradient_accumulation():
                self.step()
            total = loss.detach() if total is None else total + loss.detach()
        if not self.managed_gradient_accumulation():
            self.step()
        assert total is not None
        return total / self.gradient_accumulation_steps()

    def set_dataloader(self, loader: Any) -> None:
        """Let ``train_batch`` read from ``loader``."""
        self.training_dataloader, self._data_iterator = loader, None

    def _batches(self) -> Iterator[Any]:
        if self.training_dataloader is None:
            raise ZeroEngineError("train_batch() without data: pass training_data to initialize(), or data_iter here")
        if self._data_iterator is None:
            self._data_iterator = _epochs(self.training_dataloader)
        return self._data_iterator

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Return a loader of this rank's share of a data set, in one order for another ``route`` than "train".

        Args:
            dataset: A data set with a length and an index.
            batch_size: The samples of a batch. None: ``train_micro_batch_size_per_gpu``.
            route: "train", "eval" or "predict".
            pin_memory: Not used.
            data_sampler: What this rank takes. None: the ranks take turns. See ``Engine.dataloader``.
            collate_fn: As of ``torch.utils.data.DataLoader``; None: that of ``initialize``.
            num_local_io_workers: The number of processes that load. None: 0.
        """
        options = {
            "batch_size": self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size,
            "collate_fn": self.collate_fn if collate_fn is None else collate_fn,
            "num_workers": num_local_io_workers or 0,
            "drop_last": self._config.dataloader_drop_last,
        }
        if data_sampler is not None:
            return DataLoader(dataset, sampler=data_sampler, **options)
        return self.engine.dataloader(dataset, shuffle=route == "train", repeat_samples=True, **options)

    # -- parameters and the end ------------------------------------------------------------------

    def empty_partition_cache(self) -> None:
        """Do nothing: gathered parameters are released as they are used."""

    def get_sequence_parallel_group(self) -> Any:
        """Return torch's process group of the ranks that share each sample, or None."""
        return getattr(self.mpu, "get_sequence_parallel_group", lambda: None)()

    def module_state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the model's ``state_dict()``; at stage 3 write ``_zero3_consolidated_16bit_state_dict()``."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def compile(self, backend: Any = None, compile_kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        """Compile the model in place with torch.compile."""
        kwargs = {**(compile_kwargs or {}), **({"backend": backend} if backend is not None else {})}
        self.module.compile(**kwargs)
        self.is_compiled = True

    def destroy(self) -> None:
        """End the engine, and leave an ordinary model. A second call does nothing."""
        if not self._is_destroyed:
            self._is_destroyed = True
            self.engine.close()


def _epochs(loader: Any) -> Iterator[Any]:
    """Yield the batches of a loader, again and again.

    Raises:
        ZeroEngineError: It has none.
    """
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise ZeroEngineError("train_batch(): the data loader has no batch: give it more samples")


def _check_parameters_used(engine: Engine) -> None:
    """Raise ``UnusedParameterError`` if a trained parameter got no gradient on this rank since the last update.

    Call it after ``Engine.is_gradient_accumulation_boundary``, which also ends a plain backward.
    """
    unused = [
        slot.name
        for shard in engine.optimizer.shards
        for slot, has_grad in zip(shard.unit.layout.slots, shard.unit_grads.has_grad, strict=True)
        if not has_grad
    ]
    if unused:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        raise UnusedParameterError(
            f"step(): these parameters got no gradient: {', '.join(unused[:5])}{more}. Use them in the loss, freeze "
            'them with requires_grad_(False), or write "ignore_unused_parameters": true in "zero_optimization"'
        )
