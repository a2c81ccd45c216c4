"""Makes traces of pinned memory: PyTorch's own host allocator over a stand-in for CUDA.

    python make_host.py FOLDER

needs PyTorch with CUDA, a C++ compiler and xz; no GPU. Each trace has what was requested, when copies had completed,
and which requests PyTorch served from which block of its cache. allocators/histories/tests/fixtures/host keeps them.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parents[1]
# Name, seed, steps, and the share of completions that are out of order, in percent.
TRACES = [("in_order", 1, 1500, 0), ("stuck", 2, 1500, 60)]


def make(folder: Path) -> None:
    import torch

    library = ctypes.CDLL(str(folder / "libtwin.so"))
    version = ".".join(torch.__version__.split(".")[:2])
    name, seed, steps, late = TRACES[int(os.environ["TRACE"])]
    path = folder / f"{name}.torch{version}.jsonl"
    if library.twin_run(ctypes.c_uint(seed), steps, late, str(path).encode()) != 0:
        raise SystemExit(f"{path}: the trace was not made")
    subprocess.run(["xz", "-9e", "-f", str(path)], check=True)


def main(folder: Path) -> None:
    sys.path[:0] = [str(PYTHON / "tests"), str(PYTHON / "src")]
    from vramlab import _build
    from with_torch import environment, installed  # type: ignore[import-not-found]

    folder.mkdir(parents=True, exist_ok=True)
    variables = environment(folder)
    compiler = _build.find_compiler() or "c++"
    events, root = folder / "libevents.so", installed().root
    subprocess.run([compiler, "-O1", "-fPIC", "-shared", str(HERE / "events.cpp"), "-o", str(events)], check=True)
    includes = [root / "include", *_build.cuda_includes(installed(), [])]
    command = [
        compiler,
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        str(HERE / "twin.cpp"),
        "-o",
        str(folder / "libtwin.so"),
    ]
    command += [part for include in includes for part in ("-isystem", str(include))]
    subprocess.run([*command, f"-L{root / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu"], check=True)
    preload = f"{events}:{variables['LD_PRELOAD']}"
    for number in range(len(TRACES)):
        # Blocks and events of one trace must not be in another.
        more = {"LD_PRELOAD": preload, "TRACE": str(number)}
        subprocess.run([sys.executable, __file__, "--one", str(folder)], env=variables | more, check=True)


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        make(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]).resolve())
