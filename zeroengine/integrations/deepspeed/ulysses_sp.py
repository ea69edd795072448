"""DeepSpeed's names for long sequences (ALST): ``deepspeed.runtime.sequence_parallel.ulysses_sp``.

Scripts take the mean of the loss over the parts of a sequence themselves, by gathering the losses and the numbers of
labels of all parts. So the loss function of a model stays its own, the mean over the part of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from zeroengine.comm.group import Group, default_device
from zeroengine.integrations.deepspeed import comm
from zeroengine.sequence.batches import shard_sequence
from zeroengine.sequence.group import groups_of
from zeroengine.sequence.tiled_mlp import tiled_mlp

# Groups of consecutive ranks, by their size and the group of all ranks. They last as long as that one.
_subgroups = functools.lru_cache(maxsize=4)(dist.new_subgroups)


class UlyssesSPAttentionHF:
    """Sequence parallelism for models of transformers: what ``initialize(mpu=...)`` takes.

    Args:
        size: The number of consecutive ranks that share each sample.
        disable_in_eval: Whether a model that is not in training mode is given whole sequences.

    Attributes:
        get_sequence_parallel_group: Returns torch's process group of these ranks, with this one.
        get_sequence_parallel_world_size: Returns their number.
        get_sequence_parallel_rank: Returns the place of this rank among them.
    """

    def __init__(self, size: int, disable_in_eval: bool = False) -> None:
        self.size, self.disable_in_eval = size, disable_in_eval
        group, _ = _subgroups(size, dist.group.WORLD)
        self.get_sequence_parallel_group: Callable[[], Any] = lambda: group
        self.get_sequence_parallel_world_size = functools.partial(dist.get_world_size, group)
        self.get_sequence_parallel_rank = functools.partial(dist.get_rank, group)

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int = 1,
        disable_in_eval: bool = False,
        **sizes: object,
    ) -> UlyssesSPAttentionHF | None:
        """Return the ``mpu`` for ``initialize(mpu=mpu)``, which connects the model. A collective.

        Args:
            model_name_or_path: Not used: ``initialize`` has the model.
            core_attn_implementation: Not used: the model has its kernel, and each one works.
            sequence_parallel_size: The number of consecutive ranks that share each sample.
            micro_batch_size: Not used: a micro-batch may have any size.
            disable_in_eval: Whether a model that is not in training mode is given whole sequences.
            sizes: ``seq_length`` and others. Not used: a sequence may have any length.

        Returns:
            None for a size of 1.

        Raises:
            ValueError: The size does not divide the number of ranks.
        """
        comm.init_distributed()
        return cls(sequence_parallel_size, disable_in_eval) if sequence_parallel_size > 1 else None


def present_unit() -> UlyssesSPAttentionHF:
    """Return the ranks that share each sample in the engines of this process."""
    # Like DeepSpeed's, they are those of the process. Engines that share no samples have none.
    return UlyssesSPAttentionHF(max((group.size for group in groups_of(None) if group.exchanges), default=1))


class UlyssesSPDataLoaderAdapter:
    """Gives the ranks that share a sample the same batches, and each rank its parts.

    Each rank loads batches of its own. They are exchanged, and yielded one after another: the part of the first rank's
    batch, of the second one's, and so on. Lengths and batch sizes may differ. ``zeroengine.shard_sequence`` cuts them,
    and adds what is missing.

    Args:
        dl: Yields a dict of tensors: ``input_ids``, ``labels``, which become ``shift_labels``, and others.
        sp_rank: Not used.
        sp_group: torch's process group of the ranks.
        sp_world_size: Their number.
        device: Not used: batches stay where they are.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: object = None) -> None:
        self.dl, self._size = dl, sp_world_size
        self._group = Group(sp_group, default_device(), range(sp_world_size))

    def __len__(self) -> int:
        return len(self.dl) * self._size

    def __iter__(self) -> Iterator[Any]:
        for batch in self.dl:
            for part in map(shard_sequence, self._group.all_gather_object(batch, "of batches")):
                # With labels a model would compute a loss, and shift them once more.
                yield {name: value for name, value in part.items() if name != "labels"}


def sequence_tiled_compute(
    fn: Any, seqlen: int, shards: int, kwargs_to_shard: Any, kwargs_to_pass: Any, *rest: Any, **options: Any
) -> Any:
    """Return ``fn(**kwargs_to_shard, **kwargs_to_pass)``, computed on tiles of the tokens, and again in backward.

    Args:
        fn: Computes each token by itself.
        seqlen: Not used.
        shards: The number of tiles.
        kwargs_to_shard: Tensors of [batch, tokens, ...]. Each may require gradients.
        kwargs_to_pass: What each tile is given.
        rest: ``options`` in this order. The first two are not used.
        options: ``grad_requiring_tensor_key``, ``compute_params``, ``output_unshard_dimension`` (1), along which the
            outputs of tiles are joined, and ``output_reduction`` ("mean"; "sum", or None to join them).
    """
    options |= dict(zip(("", "", "output_unshard_dimension", "output_reduction"), rest, strict=False))
    dim, reduction = options.get("output_unshard_dimension", 1), options.get("output_reduction", "mean")
    tiles = zip(*(tensor.chunk(shards, min(dim, 1)) for tensor in kwargs_to_shard.values()), strict=True)
    named = (dict(zip(kwargs_to_shard, tile, strict=True)) for tile in tiles)
    outputs: list[torch.Tensor] = [checkpoint(fn, use_reentrant=False, **tile, **kwargs_to_pass) for tile in named]
    if reduction is None:
        return torch.cat(outputs, dim) if outputs[0].dim() else torch.stack(outputs)
    return torch.stack(outputs).mean() if reduction == "mean" else torch.stack(outputs).sum()


class TiledMLP:
    """``zeroengine.tiled_mlp`` under DeepSpeed's name: ``TiledMLP.apply(fn, self, x, shards, compute_params)``."""

    @staticmethod
    def apply(fn: Any, self: Any, x: torch.Tensor, shards: int, compute_params: object = None) -> torch.Tensor:
        """Return ``fn(self, x)``, computed in ``shards`` parts of the tokens."""
        return tiled_mlp(functools.partial(fn, self), x, num_tiles=shards)


class TiledFusedLogitsLoss:
    """A loss of hidden states in tiles: ``TiledFusedLogitsLoss.apply``. See ``zeroengine.tiled_loss``."""

    @staticmethod
    def apply(fn: Any, self: Any, x: Any, y: Any, mask: Any, shards: int, compute_params: Any, reduction: str) -> Any:
        """Return the sum or the mean over tiles of ``fn(self, x, y)``, or ``fn(self, x, y, mask)``."""
        tiles = {str(number): tensor.flatten(0, 1) for number, tensor in enumerate((x, y, mask)) if tensor is not None}
        run: Any = lambda **tile: fn(self, *tile.values())  # noqa: E731
        return sequence_tiled_compute(run, 0, shards, tiles, {}, None, None, 0, reduction)
