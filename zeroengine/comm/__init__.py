"""Process groups, the transports between ranks, and the watchdog that reports ranks that diverge.

- ``group``: finds or starts the process group, and exchanges facts and errors between the ranks.
- ``launched_ranks``: joins the ranks that mpirun or srun started.
- ``interfaces``: the contract of a transport, and how to add one.
- ``transports``: one file for each way of moving bytes, and ``choose``, which opens the fastest one.
- ``rank_order_sum``: sums that have the same bits on every transport.
- ``watchdog``: notices operations that stall, and turns failures into errors that name units and ranks.
- ``alarm_board``: asks every rank for its position, through the process group's store.
- ``launch_board``: tells a rank that cannot run its micro-step what the others launch.
"""

from typing import TYPE_CHECKING, NoReturn

from zeroengine.migration.messages import comm_attribute

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(comm_attribute(name))
