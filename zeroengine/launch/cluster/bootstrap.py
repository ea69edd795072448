"""The first thing that runs on a node: this file's text, sent there, so nothing but a Python has to be there.

It reads what the node is to be (folder, environment) from stdin, says what it found, and becomes node.py. Whatever
would keep that from happening is said in a message that the launcher puts into its table. Any Python 3 can run it.
"""

import json
import os
import socket
import sys
import time

NODE = """\
import json, os, sys
sys.path[:] = [path for path in sys.path if path]
try:
    from zeroengine.launch.cluster import node
except ImportError as error:
    line = json.dumps({"is": "problem", "text": "zeroengine cannot be imported: %s" % error})
    os.write(1, b"\\x01zero-launch " + line.encode() + b"\\n")
    sys.exit(3)
node.main()
"""


def say(**message: object) -> None:
    os.write(1, b"\x01zero-launch " + json.dumps(message).encode() + b"\n")


def main() -> None:
    with os.fdopen(0, "rb", 0, closefd=False) as stdin:  # unbuffered: the rest of it belongs to node.py
        wanted = json.loads(stdin.readline())
    connection = os.environ.get("SSH_CONNECTION", "").split()
    say(
        **{"is": "hello"},
        time=time.time(),
        python=".".join(map(str, sys.version_info[:3])),
        name=socket.gethostname(),
        address=connection[2] if len(connection) == 4 else None,
    )
    try:
        os.chdir(wanted["folder"])
    except OSError as error:
        say(**{"is": "problem"}, text=f"the working folder {wanted['folder']}: {error.strerror}")
        sys.exit(3)
    environment = dict(os.environ)
    path = environment.get("PATH", os.defpath)
    environment["PATH"] = os.path.dirname(sys.executable) + os.pathsep + path
    environment.update(wanted["environment"])
    os.execve(sys.executable, [sys.executable, "-u", "-c", NODE], environment)


if __name__ == "__main__":
    main()
