"""Name this node's folder of snapshots, which outlives the ranks and not the launcher's process on the node."""

from __future__ import annotations

import subprocess
import uuid

from zeroengine.utils.launcher import SNAPSHOT_FOLDER

# The ranks of a process that was killed live on for a moment, and may make the folder anew. So it is removed for three
# seconds, unless a line tells that no rank is left: the guard takes one to end them.
REMOVE = """
trap "" HUP INT QUIT TERM USR1 USR2
read -r line && turns=10 || turns=30
[ -e "$0" ] || exit 0
while [ $turns -gt 0 ]; do
    rm -rf -- "$0"
    [ -n "$line" ] && [ ! -e "$0" ] && exit 0
    turns=$((turns - 1))
    sleep 0.1
done
"""


class SnapshotFolder:
    """The name of one folder in memory for all rounds of a run. The ranks make it where they take snapshots.

    A small process waits until this one has ended, in whatever way, and removes the folder. The guard of a round could
    not do so: between two rounds there is none.

    Attributes:
        environment: What the ranks need of it.
    """

    def __init__(self) -> None:
        # The name says nothing of the node, because several nodes of a test may share one machine.
        path = f"/dev/shm/zeroengine-snapshots-{uuid.uuid4().hex}"
        self.environment = {SNAPSHOT_FOLDER: path}
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", REMOVE, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Neither Ctrl-C nor a closing terminal may reach it.
            start_new_session=True,
        )

    def remove(self) -> None:
        """Remove the folder, when all ranks have ended."""
        self._remover.communicate(b"ended\n")
