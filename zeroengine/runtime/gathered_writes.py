"""Hold what user code writes into gathered parameters, until the shards of the next step take it.

[Note: Writes to gathered parameters]
Data-dependent initialization, ``clamp_`` and ``nn.Embedding(max_norm=...)`` write a parameter inside a forward. Where
the full buffer is released, the write would end with it. So a release holds the whole value of each parameter that was
written, and every later gather puts it over the gathered one. The shards take it in the next step, and before whatever
else reads or replaces them, such as a save (``OutsideWrites.move_to_shards``).

- The shard is not written at the release. Another rank may still compute with the full buffer that it gathered, which
  on shared memory shows this rank's shard, and it has perhaps not come to its own write yet.
- No rank gathers more or less than before, whatever it wrote, so the order of collectives stays the same. Digests
  travel with the sum of the step, and show ranks that wrote differently. See ``outside_writes.py``.
- Autograd's version counters show a write. One through ``.data`` leaves no trace there. So while a parameter is
  gathered, its class notices that ``data`` is taken, and the digests of before and after are compared. Other ways to
  write unseen, such as NumPy, are found with ``check_parameter_writes``, which compares all digests.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter, methodcaller

import torch
from torch import nn

from zeroengine.ops import digests
from zeroengine.partition.storages import WRAPPER_ATTRIBUTE
from zeroengine.runtime.dtensors import local_tensor
from zeroengine.runtime.released_parameter import DATA_OBSERVER_ATTRIBUTE
from zeroengine.utils.compiler_disable import hidden_from_activation_checkpoint, outside_torch_func
from zeroengine.utils.torch_internals import DisableTorchFunctionSubclass

log = logging.getLogger("zeroengine")

# With ``map``, an ``attrgetter`` reads thousands of versions at each step without a Python frame for each.
_version_of = attrgetter("_version")
_address_of = methodcaller("data_ptr")


def versions_of(params: Iterable[nn.Parameter]) -> list[int]:
    """Return autograd's count of in-place changes of each parameter."""
    # Reading a version reads no value, so it must not wait for a gather in progress.
    with DisableTorchFunctionSubclass():
        return list(map(_version_of, params))


class GatheredWrites:
    """The values that user code wrote into the gathered parameters of one unit.

    Args:
        params: The parameters of the unit.
        names: Their names, for a warning.
        checks_writes: Whether writes are also searched for by digests, with a warning for each parameter.
        observes_data: Whether parameters notice that user code takes ``data``.

    Attributes:
        values: The whole value of each parameter that was written, by its index.
        reshaped: The indices of parameters whose ``data`` was replaced by a tensor of another shape, which is lost.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], names: Sequence[str], checks_writes: bool, observes_data: bool
    ) -> None:
        self._params, self._names, self._checks_writes = params, names, checks_writes
        for index, param in enumerate(params if observes_data else ()):
            if WRAPPER_ATTRIBUTE not in param.__dict__:
                param.__dict__[DATA_OBSERVER_ATTRIBUTE] = partial(self._note_data_taken, index)
        self.values: dict[int, torch.Tensor] = {}
        self.reshaped: set[int] = set()
        # The versions and digests of the parameters when they were gathered, or last looked at.
        self._versions = versions_of(params)
        # By index. Of those in ``_data_taken`` ``data`` was taken since.
        self._digests: dict[int, int] = {}
        self._data_taken: set[int] = set()
        self._warned_of: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of the values that are held."""
        return sum(value.nbytes for value in self.values.values())

    def begin(self, views: Sequence[torch.Tensor]) -> None:
        """Put the held values over the gathered ones, and look for writes from now on.

        Args:
            views: The gathered values of the parameters, as views of the full buffer.
        """
        if self.values:
            with outside_torch_func(), torch.no_grad():
                for index, value in self.values.items():
                    views[index].copy_(value)
        self.restart()
        if self._checks_writes:
            self._digests = dict(enumerate(digests(views)))

    def _note_data_taken(self, index: int) -> None:
        self._data_taken.add(index)
        if index not in self._digests:
            with outside_torch_func(), hidden_from_activation_checkpoint():
                (self._digests[index],) = digests([local_tensor(self._params[index]).detach()])

    def restart(self) -> None:
        """Look for writes from now on: earlier ones were made by the engine, or by all ranks together."""
        self._versions, self._digests = versions_of(self._params), {}
        self._data_taken.clear()

    def collect(self, views: Sequence[torch.Tensor]) -> None:
        """Hold what was written into ``views`` since the last look, before their memory is freed or filled again."""
        versions = versions_of(self._params)
        # This runs at each gather and release, and nearly always finds nothing.
        if versions == self._versions and not self._digests:
            return
        written = [i for i, (now, then) in enumerate(zip(versions, self._versions, strict=True)) if now != then]
        if self._digests:
            now = dict(zip(self._digests, digests([views[index] for index in self._digests]), strict=True))
            hidden = {index for index, digest in now.items() if digest != self._digests[index]}
            self._warn_of_hidden(sorted(hidden - self._data_taken - set(written)))
            written = sorted({*written, *hidden})
            # Who has taken ``data`` may still write.
            self._digests = {index: now[index] for index in self._data_taken}
        self._hold({index: views[index] for index in written})
        self._versions = versions

    def collect_replaced(self, views: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Hold the values of gathered parameters whose ``data`` was replaced by a tensor of the same shape.

        Args:
            views: Their views of the full buffer.
            targets: What shows them: ``FullBuffer.targets``.
        """
        if all(map(operator.eq, map(_address_of, targets), map(_address_of, views))):
            return
        replaced = {
            index: target.detach()
            for index, (target, view) in enumerate(zip(targets, views, strict=True))
            if target.data_ptr() != view.data_ptr()
        }
        self.reshaped.update(index for index, value in replaced.items() if value.shape != views[index].shape)
        self._hold({index: value for index, value in replaced.items() if index not in self.reshaped})

    def _hold(self, values: Mapping[int, torch.Tensor]) -> None:
        if values:
            with outside_torch_func():
                contiguous = torch.contiguous_format
                self.values |= {i: value.detach().clone(memory_format=contiguous) for i, value in values.items()}

    def _warn_of_hidden(self, indices: Sequence[int]) -> None:
        for index in indices:
            if index not in self._warned_of:
                self._warned_of.add(index)
                log.warning(
                    "check_parameter_writes: parameter %s was written while it was gathered, by NumPy for example, "
                    "which leaves no trace. This write is kept. Without check_parameter_writes it would be lost: write "
                    "under torch.no_grad(), such as `with torch.no_grad(): weight.clamp_(0)`.",
                    self._names[index],
                )
