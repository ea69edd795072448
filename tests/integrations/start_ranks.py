"""Starts the ranks of a script as torchrun does, without importing torch for longer than a short script runs.

`python start_ranks.py NUMBER PROGRAM ARGUMENTS...` ends with the first exit code that is not 0, and then stops the
other ranks.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time


def main(world_size: int, command: list[str]) -> int:
    """Run `command` on `world_size` ranks of this machine, and return the exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    common |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "TORCHELASTIC_RUN_ID": "tests"}
    processes = []
    for rank in range(world_size):
        variables = common | {"RANK": rank, "LOCAL_RANK": rank}
        settings = {name: str(value) for name, value in variables.items()}
        processes.append(subprocess.Popen(command, env=os.environ | settings))
    codes = [process.poll() for process in processes]
    while None in codes and not any(codes):
        time.sleep(0.02)
        codes = [process.poll() for process in processes]
    for process in processes:
        process.kill()
        process.wait()
    return abs(next((code for code in codes if code), 0))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
