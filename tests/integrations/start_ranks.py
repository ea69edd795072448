"""Starts the ranks of a script as torchrun does, each a copy of this process, which has imported what takes longest.

`python start_ranks.py NUMBER MODULES SCRIPT ARGUMENTS...` imports the modules, which commas separate. It ends with the
first exit code that is not 0, and then stops the other ranks.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import time


def main(world_size: int, modules: list[str], script: str) -> int:
    """Run `script` on `world_size` ranks of this machine, and return the exit code; on a rank, that of the script."""
    del sys.path[0]  # this folder, whose packages have the names of frameworks
    for module in modules:
        importlib.import_module(module)
    # A collection in a rank would copy every page of these modules.
    gc.collect()
    gc.freeze()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    common |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "TORCHELASTIC_RUN_ID": "tests"}
    codes: dict[int, int | None] = {}
    for rank in range(world_size):
        process = os.fork()
        if process == 0:
            variables = common | {"RANK": rank, "LOCAL_RANK": rank}
            os.environ |= {name: str(value) for name, value in variables.items()}
            sys.path.insert(0, os.path.dirname(script))
            runpy.run_path(script, run_name="__main__")
            return 0
        codes[process] = None
    while None in codes.values() and not any(codes.values()):
        time.sleep(0.02)
        for process in [process for process, code in codes.items() if code is None]:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                codes[process] = os.waitstatus_to_exitcode(status)
    for process in [process for process, code in codes.items() if code is None]:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return abs(next((code for code in codes.values() if code), 0))


if __name__ == "__main__":
    number, modules, *sys.argv = sys.argv[1:]
    sys.exit(main(int(number), modules.split(","), sys.argv[0]))
