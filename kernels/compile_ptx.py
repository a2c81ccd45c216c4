"""Compiles CUDA C++ sources to PTX with NVRTC. Called by ptx.sh; needs no GPU, driver or CUDA toolkit.

usage: compile_ptx.py TOOLCHAIN SOURCES OUTPUT
  TOOLCHAIN  folder that holds the unpacked NVRTC wheel
  SOURCES    folder with *.cu and the headers they include (*.cuh)
  OUTPUT     folder for one *.ptx for each *.cu
"""

import ctypes
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

# No fast math: results are compared with a CPU reference.
OPTIONS = ["--std=c++17", "--fmad=true"]
# What a source is compiled for unless its first line says something else.
BASELINE = "compute_75"
ARCHITECTURE = re.compile(r"// architecture: (compute_[0-9]+a?)")


def architecture(source: Path) -> str:
    """The virtual architecture that a source's first line states (`// architecture: compute_80`), or the baseline."""
    with source.open(encoding="utf-8") as lines:
        stated = ARCHITECTURE.fullmatch(lines.readline().strip())
    return stated[1] if stated else BASELINE


def load_nvrtc(toolchain: Path) -> ctypes.CDLL:
    folder = toolchain / "nvidia" / "cuda_nvrtc" / "lib"
    # libnvrtc looks its built-ins up by name only: loading them first makes the search path irrelevant.
    ctypes.CDLL(str(next(folder.glob("libnvrtc-builtins.so.*"))), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(folder / "libnvrtc.so.12"))


def compile_source(nvrtc: ctypes.CDLL, source: Path) -> str:
    def check(result: int, call: str) -> None:
        if result != 0:
            nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"{source.name}: {call}: {nvrtc.nvrtcGetErrorString(result).decode()}")

    program = ctypes.c_void_p()
    # Only the file's name goes in, never its path, so that the output is the same on every machine.
    check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None
        ),
        "nvrtcCreateProgram",
    )
    stated = [f"--gpu-architecture={architecture(source)}", f"--include-path={source.parent}"]
    options = [option.encode() for option in [*OPTIONS, *stated]]
    result = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))

    size = ctypes.c_size_t()
    check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
    log = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
    if text := log.value.decode().strip():
        print(text, file=sys.stderr)
    check(result, "nvrtcCompileProgram")

    check(nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)), "nvrtcGetPTXSize")
    ptx = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetPTX(program, ptx), "nvrtcGetPTX")
    check(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)), "nvrtcDestroyProgram")

    text = ptx.value.decode("ascii")
    if str(source.parent) in text:
        raise RuntimeError(f"{source.name}: the PTX names a folder of this machine")
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


def compile_to(toolchain: Path, source: Path, output: Path) -> None:
    (output / source.with_suffix(".ptx").name).write_text(compile_source(load_nvrtc(toolchain), source))


def main() -> int:
    if len(sys.argv) != 4:
        print(__doc__, file=sys.stderr)
        return 2
    toolchain, sources, output = (Path(argument).resolve() for argument in sys.argv[1:])
    # One compiler a process, because its library is not used from several threads.
    try:
        with ProcessPoolExecutor() as pool:
            compiling = [pool.submit(compile_to, toolchain, source, output) for source in sorted(sources.glob("*.cu"))]
            for result in compiling:
                result.result()
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
