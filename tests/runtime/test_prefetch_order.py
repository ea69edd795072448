"""How far units are gathered ahead of use."""

from __future__ import annotations

from dataclasses import dataclass

from zeroengine.runtime.prefetch_order import PrefetchLimits, PrefetchOrder


@dataclass(eq=False)
class Block:
    name: str
    numel: int = 856_000_000  # of a Llama of 70 B parameters
    is_released: bool = True


def prefetched(order: PrefetchOrder[Block], blocks: list[Block], limits: PrefetchLimits) -> list[list[str]]:
    """What is gathered ahead at each use of a pass that releases each block after its use."""
    order.start_pass()
    ahead: list[list[str]] = []
    for block in blocks:
        block.is_released = False
        order.note_use(block, in_backward=False)
        ahead.append([])
        for following in order.to_prefetch(limits, sum(other.numel for other in blocks if not other.is_released)):
            following.is_released = False
            ahead[-1].append(following.name)
        block.is_released = True
    order.end_pass()
    return ahead


def test_the_next_unit_is_prefetched_however_large_it_is() -> None:
    order: PrefetchOrder[Block] = PrefetchOrder()
    blocks = [Block(name) for name in "abcd"]
    for numel in (50_000_000, 2_000_000_000):
        limits = PrefetchLimits(numel, 1_000_000_000)
        assert prefetched(order, blocks, limits)[-1] == [], "nothing follows the last"
        assert prefetched(order, blocks, limits) == [["b"], ["c"], ["d"], []]
        # Only where the other limit would have allowed more is this one to blame.
        assert order.live_numel_refused == (3 * blocks[0].numel if numel > 10**9 else 0)


def test_no_limit_of_prefetching_means_none() -> None:
    order: PrefetchOrder[Block] = PrefetchOrder()
    blocks = [Block(name) for name in "abcd"]
    for _ in range(2):
        assert prefetched(order, blocks, PrefetchLimits(0, 10**12)) == [[], [], [], []]
