"""Files travel between hosts, into the directory that is being written and nowhere else."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.processes import wait_for
from zeroengine.checkpoint.directory import CheckpointFolder
from zeroengine.checkpoint.manifest import FORMAT, FileRecord, Manifest
from zeroengine.recovery.server import PeerConnection, RemoteFile, SnapshotServer

TAG = "step-1.1-00000000"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SnapshotServer]:
    folder = CheckpointFolder(tmp_path / "host")
    folder.open()
    server = SnapshotServer("127.0.0.1", folder, "secret")
    server.writing[TAG] = folder.begin(TAG, 0)
    yield server
    server.end()
    # Those of torch come and go, and a request that has been answered takes a moment to end.
    own = ("zeroengine-snapshots", "process_request_thread")
    wait_for(lambda: not [t for t in threading.enumerate() if any(name in t.name for name in own)], 10)
    assert server.socket.fileno() == -1
    folder.close()


def connect(server: SnapshotServer, token: str = "secret") -> PeerConnection:
    return PeerConnection(server.server_address[:2], token)  # type: ignore[arg-type]


def commit(server: SnapshotServer) -> None:
    writing = server.writing.pop(TAG)
    files = {path.name: FileRecord(bytes=path.stat().st_size, xxh3="0" * 16) for path in writing.iterdir()}
    facts = {"step": 1, "stage": 0, "world_size": 1, "precision": "", "optimizer": "", "saved_at": "", "versions": {}}
    empty = {"counters": {}, "param_groups": [], "loss_scaler": {}, "config": {}}
    server.folder.commit(writing, Manifest(format=FORMAT, tag=TAG, files=files, **facts, **empty), None)


@pytest.mark.parametrize("nbytes", [0, 1, (3 << 20) + 5])
def test_a_file_arrives_as_it_was_sent_and_any_range_is_read(
    server: SnapshotServer, tmp_path: Path, nbytes: int
) -> None:
    content = os.urandom(nbytes)
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(content)
    with connect(server) as connection:
        connection.put(TAG, tmp_path / "first")
        connection.put(TAG, tmp_path / "second")
    assert (server.writing[TAG] / "second").read_bytes() == content
    commit(server)
    with io.BufferedReader(RemoteFile(connect(server), TAG, "first", nbytes), 1 << 16) as file:
        assert file.read() == content
        for start, length in ((0, 1), (nbytes // 2, 100), (nbytes - 3, 9), (nbytes, 1)):
            file.seek(max(start, 0))
            assert file.read(length) == content[max(start, 0) :][:length]


@pytest.mark.parametrize("name", ["..", "sub/x", "/tmp/x"])
def test_nothing_outside_of_the_directory_is_written_or_read(server: SnapshotServer, tmp_path: Path, name: str) -> None:
    with connect(server) as connection, pytest.raises(OSError, match="no name of a file"):
        connection._request(do="put", tag=TAG, name=name, nbytes=1)
    with connect(server) as connection, pytest.raises(OSError, match="no name of a file"):
        connection.read_into(memoryview(bytearray(1)), TAG, name, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["host"] and not list(server.writing[TAG].iterdir())


def test_what_is_not_being_written_takes_no_file_and_gives_none(server: SnapshotServer, tmp_path: Path) -> None:
    (tmp_path / "first").write_bytes(b"abc")
    with connect(server) as connection, pytest.raises(OSError, match="is not being written"):
        connection.put("step-1.2-00000000", tmp_path / "first")
    with connect(server) as connection, pytest.raises(OSError, match="does not exist"):
        connection.read_into(memoryview(bytearray(1)), "step-9", "first", 0)


@pytest.mark.parametrize("nbytes", [0, 3, 5000, 20000])
def test_a_file_is_written_over_an_earlier_one_of_any_size(server: SnapshotServer, tmp_path: Path, nbytes: int) -> None:
    (server.writing[TAG] / "first").write_bytes(b"x" * 10000)
    (tmp_path / "first").write_bytes(content := os.urandom(nbytes))
    with connect(server) as connection:
        connection.put(TAG, tmp_path / "first")
    assert (server.writing[TAG] / "first").read_bytes() == content


def test_who_does_not_know_the_token_gets_nothing(server: SnapshotServer, tmp_path: Path) -> None:
    (tmp_path / "first").write_bytes(b"abc")
    with connect(server, "guess") as connection, pytest.raises(OSError):
        connection.put(TAG, tmp_path / "first")
    assert not list(server.writing[TAG].iterdir())


def test_a_client_that_stops_in_the_midst_does_not_hold_up_the_end(server: SnapshotServer) -> None:
    connection = connect(server)
    connection._request(do="put", tag=TAG, name="first", nbytes=100)
    connection._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection._socket.sendall(b"half")
    # The server ends while this client still owes its bytes.
    began = time.monotonic()
    server.end()
    assert time.monotonic() - began < 10 and not server.connections


def test_a_silent_peer_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    code = "import socket, sys\nfrom zeroengine.checkpoint.directory import CheckpointFolder\n"
    code += "from zeroengine.recovery.server import SnapshotServer\n"
    code += "server = SnapshotServer('127.0.0.1', CheckpointFolder(sys.argv[1]), 'secret')\n"
    code += "peer = socket.create_connection(server.server_address)\n"
    code += "while not server.connections: pass\n"
    assert subprocess.run([sys.executable, "-c", code, tmp_path], timeout=20).returncode == 0
