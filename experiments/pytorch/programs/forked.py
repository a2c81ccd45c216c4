#!/usr/bin/env python3
"""Imports PyTorch once and forks a process for each run of campaign.py, which saves the ten seconds of the imports.

Reads one request per line (JSON) and writes {"id", "code"} when the run has ended. PyTorch must not have used the GPU before
the fork, and reads its settings when it is imported: so there is one such process for each PYTORCH_CUDA_ALLOC_CONF.
"""

import contextlib
import json
import os
import selectors
import signal
import sys
import time
import traceback

# Otherwise checking for a GPU would initialise CUDA here, and a forked process could not use it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import measure
import programs
import torch
import torch._dynamo  # Loaded by the first optimizer otherwise.

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import turns

with contextlib.suppress(ImportError):
    import torchvision.models


def run(request):
    """Runs one program in this forked process; returns its exit code."""
    began = time.monotonic()
    if request["alloc"]:
        import vramlab.torch

        vramlab.torch.use(request["alloc"], latency=request["latency"])
    on_gpu = "--device" not in request["options"]
    if on_gpu:
        torch.cuda.init()
        torch.cuda.synchronize()
    prepared = time.monotonic()
    while not request["turns"] and not os.path.exists(request["go"]):
        time.sleep(0.001)
    signal.alarm(request["timeout"])
    extra = {"prepared_s": [round(began, 4), round(prepared, 4)], "went_s": round(time.monotonic(), 4)}
    if request["program"] == "empty":
        at_turns = turns.answered(request["turns"], request["id"])
        measure.write(measure.empty(torch, on_gpu, at_turns) | extra, request["record"])
        return 0
    words = [request["program"], *request["options"]] + (["--limit", str(request["limit"])] if request["limit"] else [])
    options = programs.parser().parse_args(words)
    code = 0
    for record in programs.measured(options.program, options):
        measure.write(record | extra, request["record"])
        code = 3 if record["oom"] else 0
    return code


def child(request):
    """The main function of a forked process; it never returns."""
    code = 1
    try:
        os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        code = run(request)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    """Forks until the input ends; then exits immediately."""
    alive, rest = {}, b""
    os.set_blocking(0, False)
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while True:
            if selector.select(0.01):
                got = os.read(0, 1 << 16)
                if not got:
                    break
                *lines, rest = (rest + got).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    pid = os.fork()
                    if pid == 0:
                        child(request)
                    alive[pid] = request["id"]
            while alive:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in alive:
                    done = {"id": alive.pop(pid), "code": os.waitstatus_to_exitcode(status)}
                    os.write(1, (json.dumps(done) + "\n").encode())
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
