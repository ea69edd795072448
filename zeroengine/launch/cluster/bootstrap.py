"""The first program that runs on a node. Its text is sent there, so the node needs nothing but a Python.

It reads the node's folder and environment from stdin, reports what kind of Python and host this is, and becomes
node_server.py. Whatever prevents that is reported in a message, which the launcher puts into its table. Any Python 3
can run this file.
"""

import json
import os
import socket
import sys

# Without the empty entry of sys.path, a file of the working folder cannot stand in for a module.
NODE = """\
import json, os, sys
sys.path[:] = [path for path in sys.path if path]
try:
    from zeroengine.launch.cluster import node_server
except ImportError as error:
    line = json.dumps({"is": "problem", "text": "zeroengine cannot be imported: %s" % error})
    os.write(1, b"\\x01zero-launch " + line.encode() + b"\\n")
    sys.exit(3)
node_server.main()
"""


def send(**message: object) -> None:
    """Write a message to the launcher. The form is that of protocol.py, which cannot be imported here."""
    os.write(1, b"\x01zero-launch " + json.dumps(message).encode() + b"\n")


def main() -> None:
    """Introduce the node to the launcher, and become node_server.py in the folder and environment that it asks for."""
    # stdin is unbuffered, because everything after the first line belongs to node_server.py.
    with os.fdopen(0, "rb", 0, closefd=False) as stdin:
        introduction = json.loads(stdin.readline())
    # sshd puts both ends of the connection into this variable: the launcher's address and port, then this node's.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    send(
        **{"is": "hello"},
        python=".".join(map(str, sys.version_info[:3])),
        name=socket.gethostname(),
        address=connection[2] if len(connection) == 4 else None,
    )
    try:
        os.chdir(introduction["folder"])
    except OSError as error:
        send(**{"is": "problem"}, text=f"the working folder {introduction['folder']}: {error.strerror}")
        sys.exit(3)
    # Programs of the virtual environment, such as ninja, are found as on the launcher's machine.
    environment = dict(os.environ)
    path = environment.get("PATH", os.defpath)
    environment["PATH"] = os.path.dirname(sys.executable) + os.pathsep + path
    environment.update(introduction["environment"])
    os.execve(sys.executable, [sys.executable, "-u", "-c", NODE], environment)


if __name__ == "__main__":
    main()
