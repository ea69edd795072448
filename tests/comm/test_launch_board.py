"""What ranks launch, followed by a rank that cannot run its own micro-step."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from zeroengine.comm.launch_board import LaunchBoard
from zeroengine.errors import DivergenceError
from zeroengine.schedule.actions import Gather, Reduce

LAUNCHES = [Gather(0), Gather(1, exact=True), Reduce(1), Reduce(0)]


def boards_of(num_ranks: int, timeout_s: float = 10.0) -> list[LaunchBoard]:
    store = dist.HashStore()
    return [LaunchBoard(store, rank, num_ranks, timeout_s) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [2, 128])
def test_a_rank_follows_what_the_others_launch(num_ranks: int) -> None:
    """Of 128 ranks half tell, and ranks 0 and 1 fail: 0 in a launch that it has told, and 1 before that."""
    boards = boards_of(num_ranks)
    for number, launches in enumerate((LAUNCHES, LAUNCHES[:3])):
        for board in boards:
            board.begin(number)
        for launch in launches[:2]:
            boards[0].tell(launch)
        boards[1].tell(launches[0])
        for board in boards[2:]:
            for launch in launches:
                board.tell(launch)
            board.end()
        # Two ranks alone come to what one of them has told, and no further.
        expected = launches if num_ranks > 2 else launches[:2]
        first, second = boards[0].follow(launches[:1]), boards[1].follow(launches[:1])
        # Each waits until the other has ended as well.
        assert next(first) == next(second) == expected[1]
        assert [*expected[:2], *first] == [*expected[:2], *second] == expected


def test_a_rank_that_neither_launches_nor_ends_is_an_error() -> None:
    boards = boards_of(2, timeout_s=0.05)
    for board in boards:
        board.begin(0)
    boards[1].begin(1)
    with pytest.raises(DivergenceError, match=r"rank 1 has launched no collective for 0\.05 s"):
        list(boards[0].follow([]))


def test_a_rank_that_knows_of_an_obstacle_says_so() -> None:
    boards = boards_of(2)
    for board in boards:
        board.begin(3)
    boards[1].end("it is another loop")
    with pytest.raises(DivergenceError, match="it is another loop"):
        list(boards[0].follow([]))
