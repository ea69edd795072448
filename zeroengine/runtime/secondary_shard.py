"""A second copy of a unit's parameters, partitioned over fewer ranks, from which the next gathers take them.

It is that of hpZ (ZeRO++, arXiv:2306.10209, section 3.2): the ranks of one host gather again without the network.
"""

from __future__ import annotations

import torch

from zeroengine.comm.interfaces import Transport


class SecondaryShard:
    """This rank's shard of the second copy. A gather from the parameter shards fills it.

    Args:
        numel: Elements of the full buffer.
        dtype: The dtype of the parameters.
        ranks: The ranks that hold the second copy of which this rank has a part, in order.
        transport: Allocates the memory.

    Attributes:
        ranks: See above.
        tensor: 1-D.
        is_current: Whether it holds the present values.
    """

    def __init__(self, numel: int, dtype: torch.dtype, ranks: tuple[int, ...], transport: Transport) -> None:
        self.ranks, self._first = ranks, transport.rank % len(ranks) * (numel // len(ranks))
        self.tensor = transport.empty(numel // len(ranks), dtype)
        self.is_current = False

    def fill(self, full_buffer: torch.Tensor) -> None:
        """Take this rank's part of the gathered values."""
        self.tensor.copy_(full_buffer[self._first : self._first + self.tensor.numel()])
        self.is_current = True

    def free(self) -> None:
        """Free the memory, if it can be given back. Call it on every rank."""
        self.is_current = False
        if self.tensor.untyped_storage().resizable():
            self.tensor.untyped_storage().resize_(0)

    def refill(self) -> None:
        """Give it memory again after ``free``. The next gather fills it."""
        if not self.tensor.untyped_storage().nbytes():
            self.tensor.untyped_storage().resize_(self.tensor.nbytes)
