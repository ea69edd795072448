"""A node's end of a launcher's connection: does what it is told, and ends everything when the launcher is gone.

The launcher is gone when stdin ends or nothing came over it for SILENCE seconds. Then the ranks are ended as after
SIGTERM; should this process be stuck, it ends itself and the guard does the rest.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing import SignalException

from zeroengine.errors import LaunchError, ZeroEngineError
from zeroengine.launch.cluster import versions
from zeroengine.launch.cluster.protocol import BEAT, MARK, SILENCE, Lines, Message, Writer, decode, to_text
from zeroengine.launch.local import agent, core_binding, job, network, signals, worker
from zeroengine.launch.local.pipes import Pipes
from zeroengine.launch.local.rank import GRACE, Outcome
from zeroengine.launch.local.rendezvous import Place, Rendezvous

LAST_WORDS = 2 * GRACE + 2.0  # seconds for an orderly end once the launcher is gone


class Told:
    """What the launcher has said so far. See `agent.Orders`."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self._silence = writer, SILENCE
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._stop: signal.Signals | None = None
        self._released = threading.Event()
        self._gone = False
        threading.Thread(target=self._listen, name="zero-launch orders", daemon=True).start()
        threading.Thread(target=self._beat, name="zero-launch beat", daemon=True).start()

    def next(self) -> Message | None:
        """The next thing to do; None when the launcher is gone."""
        return self._messages.get()

    def check(self) -> None:
        if self._stop is not None:
            raise SignalException("the launcher said so", self._stop)

    def stepped(self) -> None:
        self._writer.send({"is": "stepped"})

    def finished(self) -> None:
        self._writer.send({"is": "finished"})
        while not self._released.wait(agent.POLL):
            self.check()

    def _take(self, message: Message) -> None:
        if message["do"] == "stop":
            self._stop = signal.Signals(message["signal"])
        elif message["do"] == "signal":
            os.kill(os.getpid(), message["signal"])  # the main thread passes it on
        elif message["do"] == "release":
            self._released.set()
        elif message["do"] != "beat":
            self._silence = message.get("silence", self._silence)
            if message["do"] == "run":  # what was said about the last one is over
                self._stop = None
                self._released.clear()
            self._messages.put(message)

    def _listen(self) -> None:
        lines = Lines()
        try:
            while select.select([0], [], [], self._silence)[0]:
                data = os.read(0, 1 << 16)
                if not data:
                    break
                for line in lines.feed(data):
                    self._take(decode(line, "do"))
        finally:
            self._gone, self._stop = True, signal.SIGTERM
            self._messages.put(None)
            time.sleep(LAST_WORDS)
            os._exit(1)

    def _beat(self) -> None:
        while not self._gone:
            self._writer.send({"is": "beat", "clock": time.monotonic()})
            time.sleep(BEAT)


class Node:
    """Listens for others, reaches the first of them, runs the ranks: each when it is told to."""

    def __init__(self, told: Told, writer: Writer) -> None:
        self._told, self._writer = told, writer
        self._listener: socket.socket | None = None
        self._interface: str | None = None

    def listen(self, message: Message) -> None:
        if self._listener is not None:
            self._listener.close()
        connection = os.environ.get("SSH_CONNECTION", "").split()
        reached_at = connection[2] if len(connection) == 4 else None
        address = message["address"] or network.own_address(reached_at, message["others"])
        host = ""
        if not message["others"] and not message["address"]:  # then nobody else is to reach it
            host = address = job.HOST
        self._listener = network.listen(message["port"], host)
        port: int = self._listener.getsockname()[1]
        if message["address"]:
            try:
                network.reach(address, port)  # its own ranks, too, look for the store there
            except OSError as error:
                why = error.strerror or error
                raise LaunchError(f"--master-addr {address} does not lead to this node ({why}). Leave it out") from None
        self._interface = network.interface_of(address)
        self._writer.send({"is": "answer", "address": address, "port": port})

    def reach(self, message: Message) -> None:
        address, port = message["address"], message["port"]
        try:
            own = network.reach(address, port)
        except OSError as error:
            why = error.strerror or error
            raise OSError(f"{address} port {port} on the first node cannot be reached ({why})") from None
        self._interface = network.interface_of(own)
        self._writer.send({"is": "answer"})

    def run(self, message: Message) -> None:
        place, nproc = Place(**message["place"]), message["nproc"]
        environment: dict[str, str] = dict(message["environment"])
        environment |= {"ZEROENGINE_HOST": message["host"], "OMP_NUM_THREADS": job.threads(nproc)}
        if place.nodes > 1 and self._interface is not None:
            environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", self._interface)
        if message["bind"]:
            environment[worker.BIND] = core_binding.shares(message["bind"], nproc)
        command = job.command(message["target"], message["arguments"], message["module"])
        listener, self._listener = self._listener, None
        if listener is not None and place.node == 0:
            network.forget_callers(listener)
        rendezvous = Rendezvous(place, listener if place.node == 0 else None)
        with Pipes(nproc, self._output) as pipes:
            outcome = agent.run(job.Job(nproc, command, environment), pipes, rendezvous, self._told)
        ended = {"failures": describe(outcome), "interrupted": outcome.interrupted, "clock": time.monotonic()}
        self._writer.send({"is": "ended", **ended})

    def _output(self, rank: int, target: int, data: bytes) -> None:
        self._writer.send({"is": "output", "rank": rank, "target": target, "data": to_text(data)})


def describe(outcome: Outcome) -> list[dict[str, Any]]:
    """Failures with their times by this node's clock."""
    return [
        {"rank": f.rank, "time": f.time, "code": f.code, "summary": f.summary, "text": f.text} for f in outcome.failures
    ]


def facts(message: Message) -> Message:
    """What the launcher compares between nodes."""
    missing, config_error = [], None
    config, overrides = message["config"], message["overrides"]
    if config is not None and not os.access(config, os.R_OK):
        missing.append(f"{config}: cannot be read")
    elif overrides is not None:
        try:
            job.check_config(config, overrides)
        except ZeroEngineError as error:
            config_error = str(error)
    try:
        (job.find_module if message["module"] else job.find_script)(message["target"])
    except LaunchError as error:
        missing.append(str(error))
    gpus = 0 if message["cpu"] else job.count_gpus()
    found = {"versions": versions.installed(), "gpus": gpus, "missing": missing, "config_error": config_error}
    return {"is": "facts", **found}


def main() -> None:
    fd = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no message
    writer = Writer(fd, MARK)
    for number in agent.SIGNALS:
        signal.signal(number, interrupted)
    signals.ignore()
    told = Told(writer)
    node = Node(told, writer)
    while (message := told.next()) is not None:
        try:
            if message["do"] == "facts":
                writer.send(facts(message))
            else:
                {"listen": node.listen, "reach": node.reach, "run": node.run}[message["do"]](message)
        except (OSError, LaunchError) as error:
            writer.send({"is": "problem", "text": str(error)})
    sys.stdout.flush()
    os._exit(0)  # not waiting for the threads


def interrupted(number: int, _: FrameType | None) -> NoReturn:
    os._exit(128 + number)
