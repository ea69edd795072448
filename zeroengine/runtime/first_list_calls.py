"""Ranks agree on where a module calls the elements of a list, while no forward has shown it.

[Note: First calls of a list]
A rank that calls no element of a list must know where the others gather the elements. Its earlier forwards have shown
it, but for the first one. So in the first forward of the module that holds the list, the ranks exchange what they come
to, wherever all of them come: at units that belong to no list, at the first element, and at the end of the forward.

    rank 0   router: exchange   expert 2: exchange   gathers experts 0, 1, 2
    rank 1   router: exchange   shared: exchange     gathers experts 0, 1, 2 for rank 0, and goes on to ``shared``

If some ranks come to elements, all of them take part in the gathers up to the lowest of these. From then on the rules
of ``unit_lists.py`` hold, and the ranks have seen the same modules before the elements. A forward of a dense model has
two exchanges, one before its layers and one at the first.

A list that no rank calls in the first forwards may be called later, by some ranks alone, such as the encoder of a rare
kind of input. Its elements are gathered in every forward from then on, after the modules that are registered before
them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from zeroengine.comm.interfaces import Transport
from zeroengine.errors import DivergenceError
from zeroengine.utils.compiler_disable import outside_torch_func

# A packet has this many integers of four bytes. Users whose forwards surround more than 13 others are left out.
_NUM_INTEGERS = 16


class Arrival(NamedTuple):
    """Where a rank is in the first forwards of modules that hold lists."""

    users: list[int]  # ``ListUser.number`` of those whose forwards are in progress and that are not settled
    element: tuple[int, int] | None  # the number of a user and the index of an element; None: no element of their lists


class ArrivalExchange:
    """Exchanges arrivals as if they were a unit, so that ranks that are elsewhere are noticed as with units.

    Args:
        transport: Gathers.

    Attributes:
        nbytes: The length of a rank's packet.
    """

    nbytes = 4 * _NUM_INTEGERS

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        # Ranks may read a packet until the next step. There are so few that none is used again.
        self._packets: list[torch.Tensor] = []

    def __call__(self, arrival: Arrival) -> list[Arrival]:
        """Return the arrivals of all ranks, in rank order. Wait for them."""
        world_size = self._transport.world_size
        # Without peers this rank's arrival stands for those of all ranks.
        if not self._transport.has_peers:
            return [arrival] * world_size
        users = arrival.users[3 - _NUM_INTEGERS :]
        integers = [len(users), *(arrival.element or (-1, -1)), *users]
        integers += [0] * (_NUM_INTEGERS - len(integers))
        with outside_torch_func():
            packet = self._transport.empty(self.nbytes, torch.uint8, "gather")
            packet.copy_(torch.tensor(integers, dtype=torch.int32).view(torch.uint8))
            self._packets.append(packet)
            arrived = packet.new_empty(world_size * self.nbytes)
            self._transport.gather.all_gather(arrived, packet, "the first call of a list").wait_stream()
            return [_read(row) for row in arrived.cpu().view(torch.int32).view(world_size, -1).tolist()]


def _read(integers: list[int]) -> Arrival:
    num_users, number, index, *users = integers
    return Arrival(users[:num_users], None if number < 0 else (number, index))


def first_element(arrivals: list[Arrival]) -> tuple[int, int] | None:
    """Return the element that all ranks gather next: its user's number and its index. None: no rank is at one.

    Args:
        arrivals: Those of all ranks, in rank order.

    Raises:
        DivergenceError: Some ranks are not in the forward of the module that holds the list.
    """
    element = min((arrival.element for arrival in arrivals if arrival.element is not None), default=None)
    if element is None:
        return None
    absent = next((rank for rank, arrival in enumerate(arrivals) if element[0] not in arrival.users), None)
    if absent is not None:
        present = next(rank for rank, arrival in enumerate(arrivals) if arrival.element == element)
        raise DivergenceError(
            f"rank {present} has called an element of a ModuleList or ModuleDict, and rank {absent} does not call the "
            "module that holds the list. A rank may call no element, but it must call that module."
        )
    return element
