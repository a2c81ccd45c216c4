#!/usr/bin/env python3
"""Imports PyTorch once and forks a process for each run of a spec with `fork = true`, which saves the time of the imports.

    python3 fork_server.py SOCKET

Listens at SOCKET once the imports are complete. A connection is a run. It carries one line of JSON: `arguments` (a Python
program and its words), `variables`, `folder` (its working directory), `output` and `log` (the files for its output and its
errors); then, from here, the wait status of the ended process. When the other side ends its input, the process and all that it
has started are killed.

PyTorch must not have used the GPU before the fork, and reads its settings when it is imported: so there is one such process for
each environment, and `variables` has only those that are read later.
"""

import contextlib
import ctypes
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback

# Otherwise checking for a GPU would initialise CUDA here, and a forked process could not use it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# Runs may be concurrent; PyTorch reads this, too, when it is imported.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")

import torch
import torch._dynamo  # Loaded by the first optimizer otherwise.

with contextlib.suppress(ImportError):
    import torchvision.models

PR_SET_PDEATHSIG = 1


def run(request):
    """The main function of a forked process; it never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        if sys.platform == "linux":
            # Ends with the process that it was forked from.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
        os.environ.update(request["variables"])
        os.chdir(request["folder"])
        for number, name in ((1, "output"), (2, "log")):
            os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
        if os.environ.get("VRAMLAB_ALLOC"):
            # The start hook: a fresh process calls it when torch is imported.
            import vramlab._start
        sys.argv = request["arguments"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def kill(process):
    """Kills a run's process and all that it has started, as far as they are still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def collect(running, selector):
    """Reports the runs that have ended."""
    while running:
        # The process keeps its number, which is also its group's, until it is waited for.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return
        kill(ended.si_pid)
        _, status = os.waitpid(ended.si_pid, 0)
        with running.pop(ended.si_pid) as connection:
            if connection in selector.get_map():
                selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(f"{status}\n".encode())


def main():
    """Forks a process for each connection, until this process is ended."""
    running = {}
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(sys.argv[1])
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(0.01):
                if key.data is not None:
                    # No more input: the run shall end.
                    selector.unregister(key.fileobj)
                    kill(key.data)
                    continue
                connection, _ = listener.accept()
                line = connection.makefile("r", encoding="utf-8").readline()
                if not line:
                    connection.close()
                    continue
                process = os.fork()
                if process == 0:
                    selector.close()
                    for other in (listener, connection, *running.values()):
                        other.close()
                    run(json.loads(line))
                with contextlib.suppress(OSError):
                    os.setpgid(process, process)
                running[process] = connection
                selector.register(connection, selectors.EVENT_READ, process)
            collect(running, selector)


if __name__ == "__main__":
    main()
