"""Starts the runs of campaign.py: as fresh processes, or forked from one that has imported PyTorch (programs/forked.py)."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The directory of the package `vramlab` and its start hook.
PACKAGE = HERE.parents[1] / "app" / "python"
# Settings of PyTorch's own allocators.
NATIVE = {
    "native": "",
    "expandable": "expandable_segments:True",
    "cudaMallocAsync": "backend:cudaMallocAsync",
}


def environment(arm, hook=None):
    """The environment of an arm's process; with `hook`, a directory, its start hook installs VramLab's allocator."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTORCH_", "VRAMLAB_ALLOC"))}
    paths = [str(PACKAGE / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    if conf := NATIVE.get(arm):
        clean["PYTORCH_CUDA_ALLOC_CONF"] = conf
    if arm not in NATIVE and hook is not None:
        clean["VRAMLAB_ALLOC"] = arm
        paths.insert(0, str(hook))
    clean["PYTHONPATH"] = os.pathsep.join(paths)
    clean["PYTHONUNBUFFERED"] = "1"
    # Many processes compile simultaneously.
    clean.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    return clean


def start_hook(folder):
    """Creates a directory for PYTHONPATH that acts like an installed wheel's vramlab.pth."""
    hook = Path(folder) / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(PACKAGE)!r})\n")
    return hook


class Running:
    """A run in progress."""

    def __init__(self, task, request, process=None):
        self.task, self.request, self.process = task, request, process
        self.log, self.record = Path(request["log"]), Path(request["record"])
        self.began = time.monotonic()
        self.code = None


class Starter:
    """Starts runs and reports their ends."""

    def __init__(self, folder, always_fresh):
        self.folder, self.always_fresh = Path(folder), always_fresh
        self.hook = start_hook(folder)
        self.zygotes, self.forked, self.count = {}, {}, 0

    def start(self, task, limit, go=True, turns=None):
        """Starts a run; without `go`, a forked one creates its CUDA context and waits for `release`, or at `turns`."""
        self.count += 1
        base = str(self.folder / f"{self.count:05}")
        request = {
            "id": self.count, "program": task.program, "options": task.options, "limit": limit, "record": base + ".json",
            "log": base + ".log", "alloc": None if task.arm in NATIVE else task.arm, "latency": task.latency,
            "timeout": task.timeout, "go": base + ".go",
            "turns": turns and str(turns),
        }  # fmt: skip
        # Runs that only forked.py supports are always forked.
        fresh = task.fresh or (self.always_fresh and task.program != "empty" and not task.latency)
        if fresh:
            running = Running(task, request, self._fresh(task, request))
        else:
            running = self.forked[self.count] = Running(task, request)
            zygote = self._zygote(task.arm)
            zygote.stdin.write((json.dumps(request) + "\n").encode())
            zygote.stdin.flush()
        if go:
            self.release(running)
        return running

    def release(self, running):
        """Lets a waiting run start."""
        Path(running.request["go"]).touch()
        running.began = time.monotonic()

    def _fresh(self, task, request):
        programs = HERE / "programs"
        command = [str(programs / "programs.py"), task.program, *task.options, "--output", request["record"]]
        if request["limit"]:
            command += ["--limit", str(request["limit"])]
        if task.program == "usual":
            command = [str(programs / "usual.py"), *task.options]
        elif task.program == "checks":
            command = task.options
        with open(request["log"], "wb") as log:
            return subprocess.Popen(
                ["timeout", "-k", "5", str(task.timeout), sys.executable, *command],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment(task.arm, self.hook),
            )  # fmt: skip

    def _zygote(self, arm):
        """The process from which an arm's runs are forked: PyTorch reads its settings when it is imported."""
        conf = NATIVE.get(arm, "")
        if conf not in self.zygotes:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "programs" / "forked.py")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(arm),
            )  # fmt: skip
            os.set_blocking(process.stdout.fileno(), False)
            self.zygotes[conf] = process
        return self.zygotes[conf]

    def code(self, running):
        """A run's exit code, or None while it runs."""
        if running.process is not None:
            return running.process.poll()
        for conf, zygote in self.zygotes.items():
            for line in iter(zygote.stdout.readline, b""):
                done = json.loads(line)
                self.forked.pop(done["id"]).code = done["code"]
            if zygote.poll() is not None:
                raise SystemExit(
                    f"error: the process that runs under '{conf}' are forked from ended with code {zygote.returncode}"
                )
        return running.code

    def wait(self):
        """Sleeps until a run may have ended."""
        with selectors.DefaultSelector() as selector:
            for zygote in self.zygotes.values():
                selector.register(zygote.stdout, selectors.EVENT_READ)
            selector.select(0.02)

    def close(self):
        """Ends the started processes."""
        for zygote in self.zygotes.values():
            zygote.stdin.close()
        for zygote in self.zygotes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                zygote.wait(5)
            zygote.kill()
