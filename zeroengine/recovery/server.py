"""Move files of snapshots between hosts, over TCP.

[Note: Requests]
A client sends a line with the token of the run, then requests: a line of JSON each. The answer is a line of JSON:
`{"error": null}`, or with a reason. Then bytes follow: those of a `put` to the server, which answers once more when it
has them, and those of a `read` to the client. `put` writes a file into the directory that the host is writing under a
tag, and nowhere else. `read` reads part of a file of a whole snapshot.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import json
import os
import socket
import socketserver
import threading
from pathlib import Path
from typing import Any

from zeroengine.checkpoint.directory import CheckpointFolder
from zeroengine.utils.files import is_file_name

# A peer that neither takes nor sends a byte for so long is gone.
TIMEOUT_S = 60.0
BUFFER_BYTES = 1 << 20
# A line of a request is shorter.
MAX_LINE = 4096
# The server looks so often whether it is to end.
POLL_INTERVAL_S = 0.1

Endpoint = tuple[str, int]


class SnapshotServer(socketserver.ThreadingTCPServer):
    """Serves the files of one host's snapshots, in threads of its own.

    Args:
        address: The address to listen on.
        folder: The host's snapshots.
        token: What a client sends first.

    Attributes:
        writing: The directories that files may be put into, by tag.
        connections: The open connections, each with its thread.
    """

    # The interpreter's exit would wait for a peer that is silent.
    daemon_threads = True
    # All ranks of a host connect at the same moment.
    request_queue_size = 128

    def __init__(self, address: str, folder: CheckpointFolder, token: str) -> None:
        self.folder, self.token = folder, token
        self.writing: dict[str, Path] = {}
        self.connections: dict[socket.socket, threading.Thread] = {}
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), _ClientConnection)
        self._thread = threading.Thread(target=self.serve_forever, args=(POLL_INTERVAL_S,), name="zeroengine-snapshots")
        self._thread.daemon = True
        self._thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the client reports what it could not send or read."""

    def end(self) -> None:
        """End the threads and close the sockets."""
        self.shutdown()
        self._thread.join()
        for connection, thread in list(self.connections.items()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
        self.server_close()


class _ClientConnection(socketserver.StreamRequestHandler):
    server: SnapshotServer
    timeout = TIMEOUT_S
    # An answer must not wait for the acknowledgement of the bytes before it.
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.server.connections[self.connection] = threading.current_thread()

    def finish(self) -> None:
        self.server.connections.pop(self.connection)
        super().finish()

    def handle(self) -> None:
        if not hmac.compare_digest(self.rfile.readline(MAX_LINE).rstrip(), self.server.token.encode()):
            return
        while line := self.rfile.readline(MAX_LINE):
            request = json.loads(line)
            try:
                # The name must not lead out of the folder, whoever sent it.
                if not is_file_name(request["name"]):
                    raise ValueError(f"{request['name']!r} is no name of a file")
                action = self._put if request.pop("do") == "put" else self._read
                action(**request)
            # The client reports it. A client that is gone reads no answer.
            except Exception as error:
                self._answer(str(error))
                return

    def _answer(self, error: str | None = None) -> None:
        self.wfile.write(json.dumps({"error": error}).encode() + b"\n")

    def _put(self, tag: str, name: str, nbytes: int) -> None:
        # A client that comes late finds that nothing is written under its tag any more.
        if (folder := self.server.writing.get(tag)) is None:
            raise FileNotFoundError(f"{tag} is not being written")
        with open(folder / name, "wb", buffering=0, opener=_open_without_truncating) as file:
            # The memory is taken before the client sends, which cannot read an answer in the midst of that.
            os.truncate(file.fileno(), nbytes)
            if nbytes:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            self._answer()
            buffer, missing = memoryview(bytearray(BUFFER_BYTES)), nbytes
            while missing:
                count = self.rfile.readinto(buffer[:missing])
                if not count:
                    raise ConnectionError("the connection ended")
                file.write(buffer[:count])
                missing -= count
        self._answer()

    def _read(self, tag: str, name: str, offset: int, nbytes: int) -> None:
        with open(self.server.folder.checkpoint(tag) / name, "rb") as file:
            self._answer()
            self.connection.sendfile(file, offset, nbytes)


def _open_without_truncating(name: str, flags: int) -> int:
    """Open a file that may exist, whose memory is written over."""
    return os.open(name, flags & ~os.O_TRUNC, 0o600)


class PeerConnection:
    """A connection to the server of another host.

    Args:
        endpoint: The server's address and port.
        token: The token of the run.

    Raises:
        OSError: The server cannot be reached.
    """

    def __init__(self, endpoint: Endpoint, token: str) -> None:
        self._socket = socket.create_connection(endpoint, TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")
        self._socket.sendall(token.encode() + b"\n")

    def __enter__(self) -> PeerConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, tag: str, path: Path) -> None:
        """Send a file.

        Args:
            tag: The snapshot that is being written.
            path: The file.

        Raises:
            OSError: The other host does not take it.
        """
        self._request(do="put", tag=tag, name=path.name, nbytes=path.stat().st_size)
        with open(path, "rb") as file:
            self._socket.sendfile(file)
        self._check_answer()

    def read_into(self, buffer: memoryview, tag: str, name: str, offset: int) -> None:
        """Fill `buffer` from a file of a whole snapshot.

        Raises:
            OSError: The other host does not give the bytes.
        """
        self._request(do="read", tag=tag, name=name, offset=offset, nbytes=len(buffer))
        while buffer:
            count = self._file.readinto(buffer)
            if not count:
                raise OSError("the connection to the host that has the file ended")
            buffer = buffer[count:]

    def _request(self, **request: object) -> None:
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        self._check_answer()

    def _check_answer(self) -> None:
        line = self._file.readline(MAX_LINE)
        error = json.loads(line)["error"] if line else "the connection ended"
        if error is not None:
            raise OSError(error)

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()


class RemoteFile(io.RawIOBase):
    """A file of a snapshot on another host, of which only what is asked for travels.

    Args:
        connection: A connection of this file alone.
        tag: The snapshot.
        name: The file.
        nbytes: Its size.
    """

    def __init__(self, connection: PeerConnection, tag: str, name: str, nbytes: int) -> None:
        self._connection, self._tag, self._name, self._nbytes, self._position = connection, tag, name, nbytes, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position."""
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` as far as the file goes, and return the number of bytes."""
        view = memoryview(buffer).cast("B")
        view = view[: max(self._nbytes - self._position, 0)]
        if view:
            self._connection.read_into(view, self._tag, self._name, self._position)
        self._position += len(view)
        return len(view)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
        super().close()
