"""A node's end of the connection to the launcher: do what the launcher says, and end everything when it is gone.

The launcher is gone if stdin ends, or if nothing has come over it for `--node-timeout` seconds. Then the ranks are
ended as after SIGTERM. If this process is stuck, it ends itself, and the guard ends the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import select
import signal
import socket
import sys
import threading
import time

from torch.distributed.elastic.multiprocessing import SignalException

from zeroengine.errors import LaunchError, ZeroEngineError
from zeroengine.launch.cluster import protocol
from zeroengine.launch.cluster.protocol import Message
from zeroengine.launch.cluster.versions import installed_versions
from zeroengine.launch.local import job, network
from zeroengine.launch.local.agent import POLL_INTERVAL_S, Coordinator, run_ranks
from zeroengine.launch.local.core_binding import cores_by_rank
from zeroengine.launch.local.pipes import Pipes
from zeroengine.launch.local.rank import SIGKILL_TIMEOUT_S
from zeroengine.launch.local.rendezvous import NodeAssignment, Rendezvous
from zeroengine.launch.local.signals import FORWARDED_SIGNALS, STOP_SIGNALS, ignore_signals
from zeroengine.launch.local.snapshot_folder import SnapshotFolder
from zeroengine.launch.local.worker import BIND_VARIABLE
from zeroengine.utils.launcher import own_address

# The seconds in which the main thread must end everything once the launcher is gone.
ORDERLY_END_TIMEOUT_S = 2 * SIGKILL_TIMEOUT_S + 2.0


class LauncherConnection(Coordinator):
    """The messages between this node and the launcher.

    One thread reads the messages, another sends heartbeats. The main thread takes the next task with `next_task`.

    Args:
        fd: The file descriptor that leads to the launcher.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._lock, self._timeout_s = fd, threading.Lock(), protocol.NODE_TIMEOUT_S
        self._tasks: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._stop_signal: signal.Signals | None = None
        self._released = threading.Event()
        self._launcher_is_gone = False
        # Both threads are daemons: the process must be able to end while they wait.
        threading.Thread(target=self._read_messages, name="zero-launch orders", daemon=True).start()
        threading.Thread(target=self._send_heartbeats, name="zero-launch beat", daemon=True).start()

    def send(self, message: Message) -> None:
        """Write a message. If nobody reads any more it is dropped: the reading thread notices that as well."""
        rest = memoryview(protocol.MESSAGE_PREFIX + protocol.encode(message))
        # Several threads send messages, and each message must stay whole.
        with contextlib.suppress(OSError), self._lock:
            while rest:
                rest = rest[os.write(self._fd, rest) :]

    def next_task(self) -> Message | None:
        """Wait for the next task and return it; None when the launcher is gone."""
        return self._tasks.get()

    def check_stop(self) -> None:
        """Return if the ranks may go on.

        Raises:
            SignalException: The launcher has said that the ranks must end, or is gone.
        """
        # The order is only noted by the reading thread. The main thread raises here, where it can end its ranks.
        if self._stop_signal is not None:
            raise SignalException("the launcher said so", self._stop_signal)

    def report_step(self) -> None:
        """Tell the launcher that a rank of this node has taken a step."""
        self.send({"is": "stepped"})

    def wait_for_other_nodes(self) -> None:
        """Tell the launcher that all ranks here have succeeded, and wait until it releases this node."""
        self.send({"is": "finished"})
        # The node may still be told to stop while it waits, because ranks of another node may fail.
        while not self._released.wait(POLL_INTERVAL_S):
            self.check_stop()

    def _take(self, message: Message) -> None:
        if message["do"] == "stop":
            self._stop_signal = signal.Signals(message["signal"])
        elif message["do"] == "signal":
            # The main thread handles the signal as if it had come from outside, and forwards it to the ranks.
            os.kill(os.getpid(), message["signal"])
        elif message["do"] == "release":
            self._released.set()
        elif message["do"] != "beat":
            self._timeout_s = message.get("silence", self._timeout_s)
            if message["do"] == "run":
                # What the launcher said about the round before is over.
                self._stop_signal = None
                self._released.clear()
            self._tasks.put(message)

    def _read_messages(self) -> None:
        lines = protocol.LineSplitter()
        try:
            # Silence for longer than the timeout means that the launcher or the network is gone.
            while select.select([0], [], [], self._timeout_s)[0]:
                data = os.read(0, 1 << 16)
                if not data:
                    break
                for line in lines.feed(data):
                    self._take(protocol.decode(line, "do"))
        finally:
            self._launcher_is_gone, self._stop_signal = True, signal.SIGTERM
            # None tells the main thread, if it waits for a task, that no task will follow.
            self._tasks.put(None)
            # The main thread ends the ranks and this process. Should it be stuck, the guard ends the ranks.
            time.sleep(ORDERLY_END_TIMEOUT_S)
            os._exit(1)

    def _send_heartbeats(self) -> None:
        # The clock travels with each heartbeat, so that the launcher can compare times of different nodes.
        while not self._launcher_is_gone:
            self.send({"is": "beat", "clock": time.monotonic()})
            time.sleep(protocol.HEARTBEAT_INTERVAL_S)


class NodeServer:
    """Carry out the launcher's tasks on this node: open the store's port, reach the first node, run the ranks.

    Attributes:
        snapshot_folder: The folder in memory for the snapshots of all rounds.
    """

    def __init__(self, launcher: LauncherConnection) -> None:
        self._launcher = launcher
        self._listener: socket.socket | None = None
        self._interface: str | None = None
        self.snapshot_folder = SnapshotFolder()

    def carry_out(self, message: Message) -> None:
        """Carry out one task.

        Raises:
            LaunchError: The task cannot be done; the launcher shows the message.
            OSError: The system does not allow it.
        """
        if message["do"] == "facts":
            self._launcher.send(node_facts(message))
        else:
            {"listen": self._listen, "reach": self._reach, "run": self._run}[message["do"]](message)

    def _listen(self, message: Message) -> None:
        """Open the port of the store on the first node, and answer with address and port."""
        # A listener of an earlier round would keep its port from the new one.
        if self._listener is not None:
            self._listener.close()
        address = message["address"] or own_address(message["reached_at"], message["others"])
        host = ""
        if not message["others"] and not message["address"]:
            # This is the only node, and nobody else should reach the store.
            host = address = job.LOOPBACK
        self._listener = network.open_listener(message["port"], host)
        port: int = self._listener.getsockname()[1]
        if message["address"]:
            try:
                # The ranks of this node look for the store at the given address as well.
                network.try_connection(address, port)
            except OSError as error:
                reason = error.strerror or error
                raise LaunchError(
                    f"--master-addr {address} does not lead to this node ({reason}). Leave it out"
                ) from None
        self._interface = network.interface_of(address)
        self._launcher.send({"is": "answer", "address": address, "port": port})

    def _reach(self, message: Message) -> None:
        """Check that this node reaches the first one, and remember the interface on the way there."""
        address, port = message["address"], message["port"]
        try:
            own = network.try_connection(address, port)
        except OSError as error:
            reason = error.strerror or error
            raise OSError(f"{address} port {port} on the first node cannot be reached ({reason})") from None
        self._interface = network.interface_of(own)
        self._launcher.send({"is": "answer"})

    def _run(self, message: Message) -> None:
        """Run the ranks of this node to their end, and report how they ended."""
        assignment, nproc = NodeAssignment(**message["place"]), message["nproc"]
        environment: dict[str, str] = dict(message["environment"])
        # The number of threads depends on this node's cores, so that the launcher cannot choose it.
        environment |= {"ZEROENGINE_HOST": message["host"], "OMP_NUM_THREADS": job.omp_threads(nproc)}
        environment |= self.snapshot_folder.environment
        # Gloo would otherwise choose the interface of the host name, which is often loopback.
        if assignment.nodes > 1 and self._interface is not None:
            environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", self._interface)
        if message["bind"]:
            environment[BIND_VARIABLE] = cores_by_rank(message["bind"], nproc)
        # The store takes the socket over, so it must not be closed here any more.
        listener, self._listener = self._listener if assignment.node == 0 else None, None
        if listener is not None:
            # The other nodes' test connections would look like ranks to the store.
            network.drop_pending_connections(listener)
        rendezvous = Rendezvous(assignment, listener)
        with Pipes(nproc, self._send_output) as pipes:
            local_job = job.Job(nproc, job.worker_command(message["words"]), environment)
            outcome = run_ranks(local_job, pipes, rendezvous, self._launcher)
        # The failures have their times by this node's clock.
        failures = [dataclasses.asdict(failure) for failure in outcome.failures]
        ended = {"failures": failures, "interrupted": outcome.stop_signal, "clock": time.monotonic()}
        self._launcher.send({"is": "ended", **ended})

    def _send_output(self, rank: int, target: int, data: bytes) -> None:
        # JSON carries text alone, and latin-1 has a character for every byte.
        self._launcher.send({"is": "output", "rank": rank, "target": target, "data": data.decode("latin-1")})


def node_facts(message: Message) -> Message:
    """Return what the launcher compares between nodes: versions, GPUs, the script and the configuration."""
    missing, config_error = [], None
    config, overrides = message["config"], message["overrides"]
    if config is not None and not os.access(config, os.R_OK):
        missing.append(f"{config}: cannot be read")
    elif overrides is not None:
        # Only the first node is asked to check the configuration.
        try:
            job.check_config(config, overrides)
        except ZeroEngineError as error:
            config_error = str(error)
    try:
        job.check_target(message["words"])
    except LaunchError as error:
        missing.append(str(error))
    gpus = 0 if message["cpu"] else job.count_gpus()
    facts = {"versions": installed_versions(), "gpus": gpus, "missing": missing, "config_error": config_error}
    return {"is": "facts", **facts}


def main() -> None:
    """Serve the launcher on stdin and stdout until it is gone."""
    # Messages go to a copy of stdout. Whatever else prints to stdout, such as a library, prints to stderr.
    fd = os.dup(1)
    os.dup2(2, 1)
    # While no ranks run, a signal ends this process at once.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: os._exit(128 + number))
    # Slurm may send these before any rank runs, and they must not end the node.
    ignore_signals(FORWARDED_SIGNALS)
    launcher = LauncherConnection(fd)
    server = NodeServer(launcher)
    while (message := launcher.next_task()) is not None:
        try:
            server.carry_out(message)
        except (OSError, LaunchError) as error:
            launcher.send({"is": "problem", "text": str(error)})
    server.snapshot_folder.remove()
    sys.stdout.flush()
    # An ordinary exit would wait for the threads.
    os._exit(0)
