#!/usr/bin/env python3
"""Measures other projects' allocators with the workloads of `experiments bench` and prints the same rows as JSON.

Compiles a C++ program for each installed project (nvcc on the PATH, or CUDA_HOME) and reports the missing ones.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASES = [
    *(f"mixed/{live}" for live in (64, 1024, 16384)),
    *(f"alternate/{one}/{other}" for one, other in ((4 << 10, 64 << 10), (64 << 10, 4 << 20), (4 << 20, 32 << 20))),
    *(f"pair/{size}" for size in (512, 64 << 10, 1 << 20, 32 << 20)),
    *(f"threads/{threads}" for threads in (1, 2, 4, 8, 16)),
    *(f"shared/{threads}" for threads in (2, 4, 8, 16)),
]
# The forms of a case; the name of a history is that of a file given with --history.
FORMS = (r"(pair|mixed|threads|shared)/[1-9]\d{0,18}", r"alternate/[1-9]\d{0,18}/[1-9]\d{0,18}", r"history/[\w-]+")
RATES = ("threads", "shared")


class Missing(Exception):
    """The reason why a baseline cannot run, and its fix."""

    def __init__(self, reason, remedy):
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def package(name, remedy):
    """The directory of an installed package, found without importing it."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise Missing(f"the Python package {name} is not installed for {sys.executable}", remedy)
    return Path(next(iter(found.submodule_search_locations)))


def c10():
    torch = package("torch", "pip install torch (with CUDA)")
    if not (torch / "lib" / "libc10_cuda.so").is_file():
        raise Missing("this PyTorch is built without CUDA", "pip install torch with CUDA (pytorch.org)")
    return [torch / "include"], [torch / "lib"], ["c10", "c10_cuda"]


def rmm():
    remedy = "pip install librmm-cu13"
    librmm, logger = package("librmm", remedy), package("rapids_logger", remedy)
    include = librmm / "include"
    return (
        [include, include / "rapids", logger / "include"],
        [librmm / "lib64", logger / "lib64"],
        ["rmm", "rapids_logger"],
    )


def driver_pool():
    return [], [], []


PROGRAMS = {"c10": c10, "rmm": rmm, "driver_pool": driver_pool}
ALLOCATORS = {
    "c10": "pytorch-c10",
    "rmm": "rmm-pool, rmm-arena, rmm-cuda-async",
    "driver_pool": "cuda-malloc-async",
}


def nvcc():
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc") or (home and shutil.which("nvcc", path=f"{home}/bin"))
    if not found:
        found = shutil.which("nvcc", path="/usr/local/cuda/bin")
    if not found:
        raise Missing("there is no nvcc", "install the CUDA toolkit, or set CUDA_HOME")
    return found


def build(name, folder):
    """Compiles a program, unless the same sources were compiled before with the same libraries."""
    includes, libraries, names = PROGRAMS[name]()
    command = [nvcc(), "-O3", "-std=c++20", "-cudart", "shared", "-DLIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE"]
    command += [f"-I{path}" for path in includes]
    command += [f"-L{path}" for path in libraries]
    command += [f"-l{library}" for library in names]
    for path in libraries:
        command += ["-Xlinker", f"-rpath={path}"]
    source = HERE / f"{name}.cpp"
    stamp = hashlib.sha256(" ".join(command).encode())
    for file in (source, HERE / "workload.hpp"):
        stamp.update(file.read_bytes())
    binary = folder / f"{name}-{stamp.hexdigest()[:16]}"
    if not binary.is_file():
        print(f"compiling {source.name}", file=sys.stderr)
        fresh = binary.with_suffix(".new")
        result = subprocess.run([*command, source, "-o", fresh], capture_output=True, text=True)
        if result.returncode:
            errors = [line for line in (result.stderr + result.stdout).splitlines() if "error" in line]
            raise Missing(
                f"{source.name} does not compile: {errors[0] if errors else 'nvcc failed'}",
                "it is written for PyTorch 2.11, RMM 26.10 and CUDA 13.0",
            )
        fresh.rename(binary)
    return binary


def measure(name, binary, cases, repeats, histories):
    print(f"running {name}", file=sys.stderr)
    command = [binary, ",".join(cases), str(repeats), *(f"{name}={file}" for name, file in histories.items())]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        last = result.stderr.strip().splitlines()
        raise Missing(f"{name} ended with {result.returncode}: {last[-1] if last else 'no message'}", "see its message")
    rows = {}
    for line in result.stdout.splitlines():
        allocator, case, operations, figure = line.split()
        row = rows.setdefault((allocator, case), {"operations": 0, "samples": []})
        row["operations"] = int(operations)
        row["samples"].append(float(figure))
    for (allocator, case), row in rows.items():
        is_rate = case.split("/")[0] in RATES
        threads = int(case.split("/")[1]) if is_rate else 1
        samples = row["samples"]
        yield {
            "case": case,
            "allocator": allocator,
            "program": name,
            "device": "cuda",
            "threads": threads,
            "unit": "million operations/s" if is_rate else "ns/operation",
            "median": statistics.median(samples),
            "min": min(samples),
            "max": max(samples),
            **row,
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="cases separated by commas (default: all)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=PROGRAMS, action="append", help="one program instead of all")
    parser.add_argument("--build-dir", type=Path, default=Path(tempfile.gettempdir()) / f"allocator-baselines-{os.getuid()}")
    parser.add_argument("--history", type=Path, action="append", default=[], metavar="FILE",
                        help="calls that `experiments bench` wrote, NAME.calls for a case history/NAME")  # fmt: skip
    arguments = parser.parse_args()
    cases = arguments.cases.split(",")
    histories = {file.stem: file for file in arguments.history}
    wrong = [case for case in cases if not any(re.fullmatch(form, case) for form in FORMS)]
    wrong += [case for case in cases if case.startswith("history/") and case.removeprefix("history/") not in histories]
    if wrong or arguments.repeats < 1:
        parser.error(f"no such case: {wrong[0]}" if wrong else "--repeats takes a number from 1 on")
    arguments.build_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    rows, missing = [], []
    for name in arguments.only or PROGRAMS:
        try:
            rows += measure(name, build(name, arguments.build_dir), cases, arguments.repeats, histories)
        except Missing as problem:
            missing.append({"allocator": ALLOCATORS[name], "reason": problem.reason, "remedy": problem.remedy})
    json.dump({"rows": rows, "missing": missing}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
