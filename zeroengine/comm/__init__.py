"""Process groups, the transports between ranks, and the watchdog that tells when ranks diverge.

- ``group``: finds or starts the process group, compares what the ranks bring, and chooses a transport.
- ``launched_ranks``: joins the ranks that mpirun or srun started.
- ``interfaces``: the contract of a transport, and how to add one.
- ``transports``: one file for each way of moving bytes.
- ``rank_order_sum``: sums that have the same bits on every transport.
- ``watchdog``: notices operations that stall, and turns failures into errors that name units and ranks.
- ``alarm_board``: asks every rank where it is, through the process group's store.
"""

from typing import TYPE_CHECKING, NoReturn

from zeroengine.migration.messages import comm_attribute

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(comm_attribute(name))
