"""The environment of PyTorch's processes under an allocator, and facts of the machine. For the programs of this directory."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The directory of the package `vramlab` and its start hook.
PACKAGE = HERE.parents[1] / "app" / "python"
# Settings of PyTorch's own allocators, as the runner has them (`NATIVE` in programs.rs).
NATIVE = {
    "native": "",
    "expandable": "expandable_segments:True",
    "cudaMallocAsync": "backend:cudaMallocAsync",
}

sys.path.insert(0, str(HERE / "baselines"))
from run_record import provenance


def environment(arm, hook=True):
    """The environment of an arm's process; with `hook` its start hook installs VramLab's allocator."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTORCH_", "VRAMLAB_ALLOC"))}
    paths = [str(PACKAGE / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    if conf := NATIVE.get(arm):
        clean["PYTORCH_CUDA_ALLOC_CONF"] = conf
    if arm not in NATIVE and hook:
        clean["VRAMLAB_ALLOC"] = arm
        paths.insert(0, str(PACKAGE / "src" / "vramlab" / "_site"))
    clean["PYTHONPATH"] = os.pathsep.join(paths)
    clean["PYTHONUNBUFFERED"] = "1"
    # Many processes compile simultaneously.
    clean.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    return clean


def last_line(text):
    """The last line of a program's output."""
    return (text.strip().splitlines() or ["no reason given"])[-1]


def compile_shim():
    """Compiles the shim once, before concurrent runs need it; returns the seconds."""
    began = time.monotonic()
    code = "from vramlab import _build; print(_build.shim(_build.Torch.installed()))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment("native"))
    if output.returncode:
        raise SystemExit(f"error: no shim: {last_line(output.stderr)}")
    return round(time.monotonic() - began, 1)


def machine(build):
    """The machine and its software."""
    code = (
        "import json, torch; p = torch.cuda.get_device_properties(0); "
        "print(json.dumps({'gpu': p.name, 'memory': p.total_memory, 'torch': torch.__version__, 'cuda': torch.version.cuda}))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if output.returncode:
        raise SystemExit(f"error: PyTorch finds no GPU: {last_line(output.stderr)}")
    facts = json.loads(output.stdout.splitlines()[-1])
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        # One line per GPU.
        facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0].strip()
    with contextlib.suppress(OSError):
        commit = subprocess.run(["git", "-C", str(HERE), "rev-parse", "HEAD"], capture_output=True, text=True)
        build = build or commit.stdout.strip()
    return {"kind": "machine", "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "build": build, "cores": os.cpu_count(),
            "python": sys.version.split()[0], "kernel": os.uname().release,
            "provenance": provenance(whole=True, build=build), **facts}  # fmt: skip


def choice(words, known, kind):
    """The names in a list; raises an error for unknown ones."""
    names = [name for name in words.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no {kind} is called '{unknown[0]}'; there are {', '.join(known)}")
    return names
