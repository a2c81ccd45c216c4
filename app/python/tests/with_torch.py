"""Separate processes with the real PyTorch: on a GPU, or over a stand-in for CUDA (`fake_cuda.cpp`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
sys.path.insert(0, str(SOURCE))

from vramlab import _build  # noqa: E402


def skip_without_torch() -> None:
    """Skips a module if PyTorch or a C++ compiler is missing."""
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed", allow_module_level=True)
    if _build.find_compiler() is None:
        pytest.skip("no C++ compiler", allow_module_level=True)


@cache
def installed() -> _build.Torch:
    torch = _build.Torch.installed()
    if torch.cuda is None:
        pytest.skip("PyTorch was built without CUDA")
    return torch


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process with PyTorch: on the GPU, or with the stand-in, which is built in a directory."""
    out = {key: value for key, value in os.environ.items() if not key.startswith(("VRAMLAB_", "PYTORCH_"))}
    out["PYTHONPATH"] = str(SOURCE)
    import torch

    if torch.cuda.is_available():
        return out
    stand_in = folder / "libcuda.so.1"
    header = (installed().root / "include" / "c10" / "cuda" / "driver_api.h").read_text()
    names = {*re.findall(r"_\((cu[A-Z]\w+)", header)} - {"cuDeviceGet", "cuDevicePrimaryCtxGetState"}
    listed = " ".join(f"X({name})" for name in sorted(names))
    command = [_build.find_compiler() or "", "-O1", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"]
    command += [f"-DDRIVER_FUNCTIONS(X)={listed}"]
    command += [part for include in _build.cuda_includes(installed(), []) for part in ("-isystem", str(include))]
    subprocess.run([*command, str(HERE / "fake_cuda.cpp"), "-o", str(stand_in)], check=True)
    # Preloaded, it also replaces the driver library, by name.
    return out | {"LD_PRELOAD": str(stand_in), "VRAMLAB_SHIM_DEVICE": "sim"}


def python(
    variables: dict[str, str], *arguments: str, cwd: Path = HERE, **more: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python to its end."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=variables | more, capture_output=True, text=True, timeout=300, check=False, cwd=cwd
    )


def compile_beside_torch(source: Path, to: Path, *libraries: str) -> None:
    """Compiles a library that calls PyTorch's allocators."""
    root = installed().root
    command = [_build.find_compiler() or "", "-std=c++17", "-O1", "-fPIC", "-shared", str(source), "-o", str(to)]
    includes = [root / "include", *_build.cuda_includes(installed(), [])]
    command += [part for include in includes for part in ("-isystem", str(include))]
    subprocess.run([*command, f"-L{root / 'lib'}", "-lc10", "-lc10_cuda", *libraries], check=True)
