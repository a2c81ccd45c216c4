"""Compiles the C++ code that uses PyTorch's classes: the shims between PyTorch and libvramlab, and the recorder.

Each library fits only the version of PyTorch that it was compiled for, so it is compiled once per version and stored in
the user's cache, $XDG_CACHE_HOME/vramlab (~/.cache/vramlab). Compiling needs a C++ compiler but not nvcc.
`build_shims.py` adds compiled libraries to the package, for machines without a compiler.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vramlab._library import Error

# The oldest supported version of PyTorch.
OLDEST = (2, 9)
NEWEST = (2, 15)
# Set it to try an unsupported version.
ANYWAY = "VRAMLAB_TORCH_ANYWAY"

PACKAGE = Path(__file__).resolve().parent
# The parts share headers.
SOURCES = (PACKAGE / "shim", PACKAGE / "recorder", PACKAGE / "host")
COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden")
# PyTorch's libraries load the CUDA runtime, whichever file it is. PyTorch links libstdc++ dynamically: a second copy in
# the shim would not know its locales.
LIBRARIES = ("-lc10", "-lc10_cuda", "-l:libstdc++.so.6")


@dataclass(frozen=True)
class Part:
    """A library that is compiled to its own file."""

    name: str
    """The file name and the source directory name."""
    libraries: tuple[str, ...] = LIBRARIES


SHIM = Part("shim")
# The program's named ranges (ATen/record_function.h) are in libtorch_cpu.
RECORDER = Part("recorder", ("-ltorch_cpu", *LIBRARIES))
# Pinned host memory; its interface (ATen/core/CachingHostAllocator.h) is in libtorch_cpu.
HOST = Part("host", ("-ltorch_cpu", *LIBRARIES))
PARTS = (SHIM, RECORDER, HOST)


class BuildError(Error):
    """No built library fits this PyTorch, and none can be compiled; the text contains the fix."""


@dataclass(frozen=True)
class Torch:
    """An installed or unpacked PyTorch."""

    root: Path
    """The directory that contains `include` and `lib`."""
    version: str
    """`torch.__version__`, with the CUDA suffix: 2.11.0+cu130."""
    cuda: str | None
    """The CUDA version that PyTorch was built for."""
    new_abi: bool = True
    """True if PyTorch uses the C++11 ABI for strings."""

    @classmethod
    def installed(cls) -> Torch:
        """The PyTorch that this process imports or has imported."""
        import torch

        abi = bool(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True))
        return cls(Path(torch.__file__).parent, str(torch.__version__), torch.version.cuda, abi)

    @property
    def minor(self) -> tuple[int, int]:
        """The major and minor version."""
        found = re.match(r"(\d+)\.(\d+)", self.version)
        if found is None:
            raise BuildError(f"PyTorch calls its version {self.version!r}, which has no number")
        return int(found[1]), int(found[2])

    def check(self) -> None:
        """Raises BuildError if the shim's source does not support this version."""
        if self.cuda is None:
            raise BuildError(f"torch {self.version} was built without CUDA; install one with it (https://pytorch.org)")
        if OLDEST <= self.minor <= NEWEST or os.environ.get(ANYWAY):
            return
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
        if self.minor < OLDEST:
            mend = f"older than {oldest}, the oldest that vramlab knows: pip install 'torch>={oldest}'"
        else:
            mend = f"newer than {newest}, the newest that vramlab knows: pip install -U vramlab"
        raise BuildError(f"torch {self.version} is {mend}, or set {ANYWAY}=1 to compile against it and see")


def shim(torch: Torch) -> Path:
    """The shim's file for a PyTorch: from the package, the cache, or compiled now, which takes some seconds."""
    return built(SHIM, torch)


def recorder(torch: Torch) -> Path:
    """The recorder's file for a PyTorch, see [`shim`]."""
    return built(RECORDER, torch)


def host(torch: Torch) -> Path:
    """The file of the shim for pinned host memory for a PyTorch, see [`shim`]."""
    return built(HOST, torch)


def built(part: Part, torch: Torch) -> Path:
    """The file of a part for a PyTorch."""
    torch.check()
    digest = source_digest()
    shipped = PACKAGE / "prebuilt" / file_name(torch, part)
    if _is_of(shipped, digest):
        return shipped
    compiler = find_compiler()
    name = f"{part.name}-{torch.version}-{_key(torch, digest)}.so"
    why = "there is no home folder"
    folder = cache_folder()
    if folder is not None:
        kept = folder / name
        if kept.is_file():
            return kept
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(kept.with_suffix(".lock")):
                return kept if kept.is_file() else compile_part(part, torch, kept, _need(part, compiler, torch))
        except OSError as error:
            why = f"{folder} cannot be written ({error.strerror})"
    text = (
        f"so vramlab's {part.name} is compiled for this process only; "
        "set XDG_CACHE_HOME to a folder that can be written"
    )
    warnings.warn(f"vramlab: {why}, {text}", stacklevel=3)
    own = Path(tempfile.mkdtemp(prefix="vramlab-shim-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return compile_part(part, torch, own / name, _need(part, compiler, torch))


def _need(part: Part, compiler: str | None, torch: Torch) -> str:
    if compiler is None:
        named = ", ".join(COMPILERS)
        raise BuildError(
            f"vramlab's {part.name} for torch {torch.version} has to be compiled; no C++ compiler is here ({named}): "
            "install one (apt install g++, or conda install gxx), name it in CXX, or install a wheel of vramlab that "
            "holds it"
        )
    return compiler


def file_name(torch: Torch, part: Part = SHIM) -> str:
    """The name of a built file in the package."""
    return f"{part.name}-{torch.version}.so"


def cache_folder() -> Path | None:
    """The directory of built shims; None for a user without a home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(named) if Path(named).is_absolute() else Path(os.path.expanduser("~")) / ".cache"
    return cache / "vramlab" if cache.is_absolute() else None


def find_compiler() -> str | None:
    """The C++ compiler that CXX names, or the first usual compiler that is installed."""
    named = os.environ.get("CXX")
    if named:
        if shutil.which(named.split()[0]) is None:
            raise BuildError(f"CXX={named}: there is no such compiler")
        return named
    return next((name for name in COMPILERS if shutil.which(name)), None)


def header_folder() -> Path:
    """The directory of vramlab.h, in the package or in a checkout."""
    places = [PACKAGE / "include"]
    if PACKAGE.parts[-4:-1] == ("app", "python", "src"):
        places.append(PACKAGE.parents[3] / "allocators" / "capi" / "include")
    for place in places:
        if (place / "vramlab.h").is_file():
            return place
    raise BuildError(f"vramlab.h is not in {', '.join(map(str, places))}; reinstall vramlab")


def source_digest() -> str:
    """A digest of the sources and flags of the shim and the recorder; it is embedded in the built libraries."""
    digest = hashlib.sha256(" ".join(FLAGS + RECORDER.libraries).encode())
    sources = [file for folder in SOURCES for file in sorted(folder.iterdir())]
    for file in [*sources, header_folder() / "vramlab.h"]:
        if file.suffix in (".h", ".cpp"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _key(torch: Torch, digest: str) -> str:
    machine = os.uname().machine
    return hashlib.sha256(f"{digest} {torch.version} {torch.new_abi} {machine}".encode()).hexdigest()[:16]


def _is_of(file: Path, digest: str) -> bool:
    """True if a library was built from these sources: a checkout may contain an outdated build."""
    try:
        return digest.encode() in file.read_bytes()
    except OSError:
        return False


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Holds a file lock, if the file system supports locks: the ranks of a job start simultaneously."""
    import fcntl

    with open(lock, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_part(part: Part, torch: Torch, to: Path, compiler: str, cuda: Iterable[Path] = ()) -> Path:
    """Compiles a part for a PyTorch to a file that is either complete or absent.

    `cuda` lists directories of CUDA headers to search before the detected ones.
    """
    partial = to.with_name(f".{to.name}.{os.getpid()}.partial")
    includes = [torch.root / "include", torch.root / "include" / "torch" / "csrc" / "api" / "include"]
    includes += cuda_includes(torch, [*cuda])
    command = [
        *compiler.split(),
        # The C++ standard of PyTorch's headers.
        f"-std=c++{20 if torch.minor >= (2, 13) else 17}",
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.new_abi)}",
        f'-DVRAMLAB_SHIM_SOURCE="{source_digest()}"',
        f"-I{header_folder()}",
        *(part for include in includes for part in ("-isystem", str(include))),
        str(SOURCES[0].parent / part.name / f"{part.name}.cpp"),
        *("-o", str(partial)),
        f"-L{torch.root / 'lib'}",
        *part.libraries,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        said = [line for line in done.stderr.splitlines() if " error:" in line] or done.stderr.splitlines()[-1:]
        why = said[0] if said else f"exit code {done.returncode}"
        log = Path(tempfile.gettempdir()) / f"vramlab-{part.name}-{os.getpid()}.log"
        log.write_text(f"{' '.join(command)}\n\n{done.stdout}{done.stderr}")
        raise BuildError(f"the {part.name} for torch {torch.version} does not compile: {why} (all of it: {log})")
    os.replace(partial, to)
    return to


def cuda_includes(torch: Torch, first: list[Path]) -> list[Path]:
    """Directories with the headers of the CUDA runtime, of the major version that PyTorch was built for.

    A CUDA installation has all headers in one directory; PyTorch's wheels lack `crt`, which Triton's wheel contains.
    """
    places = [*first, *_places_of_cuda()]
    major = int((torch.cuda or "0").split(".")[0])
    runtime = next((place for place in places if _cuda_version(place) == major), None)
    crt = next((place for place in places if (place / "crt" / "host_config.h").is_file()), None)
    if runtime is None or crt is None:
        which = f"cuda_runtime_api.h of CUDA {major}" if runtime is None else "crt/host_config.h"
        wheels = f"nvidia-cuda-runtime=={major}.* nvidia-cuda-crt=={major}.*"
        if major < 13:
            wheels = f"nvidia-cuda-runtime-cu{major} nvidia-cuda-nvcc-cu{major}"
        raise BuildError(
            f"vramlab's C++ for torch {torch.version} needs CUDA's header {which}: pip install {wheels}, or name an "
            f"installation of CUDA {major} in CUDA_HOME"
        )
    complete = (runtime / "crt" / "host_config.h").is_file()
    return [runtime] if complete else [runtime, crt]


def _places_of_cuda() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "include"
    for package, inside in (("nvidia", "*/include"), ("triton", "backends/nvidia/include")):
        found: Any = find_spec(package)
        for folder in (found.submodule_search_locations or []) if found else []:
            yield from sorted(Path(folder).glob(inside))
    nvcc = shutil.which("nvcc")
    if nvcc:
        yield Path(nvcc).resolve().parents[1] / "include"
    yield Path("/usr/local/cuda/include")
    yield from sorted(Path("/usr/local").glob("cuda-*/include"), reverse=True)


def _cuda_version(include: Path) -> int | None:
    """The major version of the CUDA runtime headers in a directory."""
    try:
        text = (include / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return int(found[1]) // 1000 if found else None
