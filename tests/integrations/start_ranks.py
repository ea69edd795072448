"""Starts the ranks of scripts as torchrun does, each a copy of this process, which has imported what takes longest.

`python start_ranks.py MODULES` imports the modules, which commas separate. Each line that it reads is JSON: the number
of ranks, a file for their output, their environment variables, a script, and its arguments. When the ranks have ended
it writes the first exit code that is not 0, or 0. The first failure stops the other ranks.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time


def serve(modules: list[str]) -> None:
    """Run a script for each line of the standard input."""
    del sys.path[0]  # this folder, whose packages have the names of frameworks
    # What modules print is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in modules:
        importlib.import_module(module)
    # A collection in a rank would copy every page of these modules.
    gc.collect()
    gc.freeze()
    # No buffer: ranks are copies of it.
    while line := os.fdopen(0, "rb", 0, closefd=False).readline():
        code = run(*json.loads(line))
        print(code, file=answers, flush=True)


def run(world_size: int, output: str, variables: dict[str, str], script: str, *arguments: str) -> int:
    """Run `script` on `world_size` ranks of this machine, and return the exit code. A rank ends here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    common |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "TORCHELASTIC_RUN_ID": "tests"}
    codes: dict[int, int | None] = {}
    for rank in range(world_size):
        process = os.fork()
        if process == 0:
            for path, mode, descriptors in (
                (os.devnull, os.O_RDONLY, [0]),
                (output, os.O_WRONLY | os.O_APPEND, [1, 2]),
            ):
                opened = os.open(path, mode)
                for descriptor in descriptors:
                    os.dup2(opened, descriptor)
            numbers = common | {"RANK": rank, "LOCAL_RANK": rank}
            os.environ.clear()
            os.environ |= variables | {name: str(value) for name, value in numbers.items()}
            sys.argv = [script, *arguments]
            sys.path.insert(0, os.path.dirname(script))
            runpy.run_path(script, run_name="__main__")
            sys.exit()
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
    serve(sys.argv[1].split(","))
