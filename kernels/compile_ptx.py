"""Compiles CUDA C++ sources to PTX with NVRTC. Called by ptx.sh; needs no GPU, driver or CUDA toolkit.

usage: compile_ptx.py TOOLCHAIN SOURCES STORED [--check]
  TOOLCHAIN  directory of the unpacked NVRTC wheel
  SOURCES    directory with *.cu and the headers they include (*.cuh)
  STORED     directory with one *.ptx.xz for each module, which is rewritten if its text differs
  --check    rewrite nothing, and fail if a text differs
"""

import ctypes
import lzma
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

# No fast math: results are compared with a CPU reference.
OPTIONS = ["--std=c++17", "--fmad=true"]
# Architecture of a source without module lines.
BASELINE = "compute_75"
MODULE = re.compile(r"^// module (\w+): (compute_[0-9]+a?), (.*)$", re.MULTILINE)


class Module(NamedTuple):
    """A module of a source, which is compiled with the macro KERNELS defined as `kernels`."""

    source: Path
    name: str
    architecture: str
    kernels: str


def modules(source: Path) -> list[Module]:
    """The modules in a source's lines `// module NAME: compute_80, KERNELS`, or one module with the source's name."""
    lines = [Module(source, *fields) for fields in MODULE.findall(source.read_text(encoding="utf-8"))]
    return lines or [Module(source, source.stem, BASELINE, "")]


def load_nvrtc(toolchain: Path) -> ctypes.CDLL:
    """Load the NVRTC library of the unpacked wheel."""
    directory = toolchain / "nvidia" / "cuda_nvrtc" / "lib"
    # libnvrtc loads its built-ins by name. If they are already loaded, the library search path does not matter.
    ctypes.CDLL(str(next(directory.glob("libnvrtc-builtins.so.*"))), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(directory / "libnvrtc.so.12"))


def compile_module(nvrtc: ctypes.CDLL, module: Module) -> str:
    """Compile a module and return its PTX; prints the compiler's log."""
    source = module.source

    def check(result: int, call: str) -> None:
        if result != 0:
            nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"{module.name}: {call}: {nvrtc.nvrtcGetErrorString(result).decode()}")

    program = ctypes.c_void_p()
    # NVRTC gets the module's name but no path, so that the output is the same on every machine.
    check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.read_bytes(), f"{module.name}.cu".encode(), 0, None, None
        ),
        "nvrtcCreateProgram",
    )
    module_options = [f"--gpu-architecture={module.architecture}", f"--include-path={source.parent}"]
    if module.kernels:
        module_options.append(f"--define-macro=KERNELS={module.kernels}")
    options = [option.encode() for option in [*OPTIONS, *module_options]]
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
        raise RuntimeError(f"{module.name}: the PTX contains a path of this machine")
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


def text_of(toolchain: Path, module: Module) -> tuple[str, bytes]:
    """Return a module's name and its PTX."""
    return module.name, compile_module(load_nvrtc(toolchain), module).encode("ascii")


# The dictionary is large enough for the largest module; a reader allocates as much.
PACKING = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 4 << 20}]


def pack(text: bytes) -> bytes:
    """Compress a text as one .xz stream."""
    return lzma.compress(text, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, filters=PACKING)


def stored_text(packed: Path) -> bytes | None:
    """The text of a stored module, or None if it is missing or damaged."""
    try:
        return lzma.decompress(packed.read_bytes(), format=lzma.FORMAT_XZ)
    except (FileNotFoundError, lzma.LZMAError):
        return None


def main() -> int:
    """Compile all modules, and rewrite or check the stored ones."""
    arguments = sys.argv[1:]
    check = arguments[3:] == ["--check"]
    if len(arguments) != 3 + check:
        print(__doc__, file=sys.stderr)
        return 2
    toolchain, sources, stored = (Path(argument).resolve() for argument in arguments[:3])
    # One process for each compilation, because NVRTC is not used from several threads.
    try:
        with ProcessPoolExecutor() as pool:
            all_modules = [module for source in sorted(sources.glob("*.cu")) for module in modules(source)]
            texts = dict(pool.map(partial(text_of, toolchain), all_modules))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    stored.mkdir(exist_ok=True)
    paths = {stem: stored / f"{stem}.ptx.xz" for stem in texts}
    # Texts are compared, not compressed bytes, because versions of xz may compress differently.
    changed = [stem for stem, text in texts.items() if stored_text(paths[stem]) != text]
    extra = sorted(path for path in stored.iterdir() if path not in paths.values())
    names = ", ".join(changed + [path.name for path in extra]) or "none"
    if check:
        if changed or extra:
            print(
                f"error: PTX differs from its source: {names}; run kernels/ptx.sh and commit kernels/ptx",
                file=sys.stderr,
            )
            return 1
        print("PTX is up to date")
        return 0
    for path in extra:
        path.unlink()
    for stem in changed:
        paths[stem].write_bytes(pack(texts[stem]))
    size = sum(path.stat().st_size for path in paths.values())
    print(f"{len(paths)} modules, {sum(map(len, texts.values()))} bytes of text in {size}; changed: {names}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
