#!/usr/bin/env python3
"""Starts a job of several processes on this machine, like torchrun, without torchrun's import time.

    python3 experiments/pytorch/programs/acceptance/launch.py RANKS PORT NAME [OPTION…]

Each process gets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. If one fails, the others get SIGTERM, and SIGKILL
ten seconds later. The exit code is that of the first failed process, else 0.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

# Seconds from SIGTERM to SIGKILL after another process has failed.
PATIENCE = 10


def main(ranks, port, words):
    """Starts the processes and waits for all of them."""
    command = [sys.executable, str(Path(__file__).resolve().with_name("run.py")), *words]
    job = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(command, env=os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
    ]
    failed, until = 0, None
    while any(process.poll() is None for process in processes):
        codes = [process.returncode for process in processes]
        if until is None and (bad := next((code for code in codes if code), 0)):
            failed, until = bad, time.monotonic() + PATIENCE
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
        if until is not None and time.monotonic() > until:
            for process in processes:
                process.kill()
        time.sleep(0.05)
    failed = failed or next((process.returncode for process in processes if process.returncode), 0)
    # The shells' exit code for a signal.
    return failed if failed >= 0 else 128 - failed


if __name__ == "__main__":
    if len(sys.argv) < 4 or not (sys.argv[1].isdigit() and sys.argv[2].isdigit()):
        print(f"usage: {sys.argv[0]} RANKS PORT NAME [OPTION…]", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
