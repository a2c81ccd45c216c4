"""Builds shims and recorders for versions of PyTorch into the package, before a wheel is built.

They are for machines without a C++ compiler.

    python app/python/build_shims.py               the releases below
    python app/python/build_shims.py 2.11.0 2.15.0

Each downloads PyTorch's wheel from the index that pip is set to, half a GB or more, and CUDA's headers; neither is
installed. They are for those versions and what they were built for (2.11.0+cu130), and for this kind of machine.
VRAMLAB_GLIBC=2.28 compiles them with Zig for that glibc, as it does the wheel's program; it needs the package
`ziglang`, and GCC for its library of C++.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from zipfile import ZipFile

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from vramlab import _build
from vramlab._library import Error

# The newest release of each of PyTorch's newest four versions.
RELEASES = ("2.12.1", "2.13.0", "2.14.1", "2.15.0")
# What compiling and linking need.
_OF_TORCH = re.compile(r"torch/(include/|lib/lib(c10(_cuda)?|torch_cpu)\.so$|version\.py$)")
_HEADERS = re.compile(r"nvidia/.*include/")


def unpack(requirement: str, to: Path, wanted: re.Pattern[str], more: Iterable[str] = ()) -> None:
    """Downloads a wheel and takes what is wanted out of it."""
    wheels = to / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    done = subprocess.run([*command, *more, requirement], check=False)
    if done.returncode != 0:
        raise Error(f"pip cannot download {requirement}; its message stands above")
    for wheel in wheels.iterdir():
        with ZipFile(wheel) as opened:
            opened.extractall(to, [name for name in opened.namelist() if wanted.match(name)])
        wheel.unlink()


def for_glibc(version: str, compiler: str, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Zig's compiler for a version of glibc, and the libraries of C++ to link with.

    PyTorch's classes are those of GCC's library for C++, while Zig has Clang's, so the headers and libraries are those
    of `compiler`.
    """

    def printed(*arguments: str) -> str:
        command = [*compiler.split(), *arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Error(f"{shlex.join(command)} failed: {done.stderr.strip()}")
        return done.stdout + done.stderr

    searched = printed("-x", "c++", "-E", "-v", "-").partition("#include <...>")[2].splitlines()
    headers = [line.strip() for line in searched if "/c++" in line]
    libraries = tuple(printed(f"-print-file-name={name}").strip() for name in ("libstdc++.so.6", "libgcc_s.so.1"))
    # GCC's headers ask for this one, which came with glibc 2.32.
    (folder / "glibc" / "sys").mkdir(parents=True, exist_ok=True)
    (folder / "glibc" / "sys" / "single_threaded.h").write_text("static const char __libc_single_threaded = 0;\n")
    target = f"{platform.machine()}-linux-gnu.{version}"
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", target, "-s", "-nostdinc++", "-nostdlib++"]
    # Before the headers of C, which they include after their own.
    return " ".join([*zig, *(f"-I{place}" for place in (folder / "glibc", *headers))]), libraries


def build(version: str, folder: Path) -> list[Path]:
    """Builds shims and recorder for one version, and says where they are."""
    # Any Python's wheel has the same headers and libraries of C++.
    unpack(f"torch=={version}", folder, _OF_TORCH, ["--only-binary=:all:"])
    told = (folder / "torch" / "version.py").read_text()
    values = dict(re.findall(r"^(\w+)(?:: Optional\[str\])? = '([^']*)'", told, re.MULTILINE))
    torch = _build.Torch(folder / "torch", values["__version__"], values.get("cuda"))
    torch.check()
    major, minor = str(torch.cuda).split(".")[:2]
    if int(major) >= 13:
        wheels = [f"nvidia-cuda-runtime=={major}.{minor}.*", f"nvidia-cuda-crt=={major}.{minor}.*"]
    else:
        wheels = [f"nvidia-cuda-{part}-cu{major}=={major}.{minor}.*" for part in ("runtime", "nvcc")]
    for wheel in wheels:
        unpack(wheel, folder, _HEADERS)
    compiler = _build.find_compiler()
    if compiler is None:
        raise Error(f"there is no C++ compiler ({', '.join(_build.COMPILERS)}); install one or name it in CXX")
    parts = list(_build.PARTS)
    oldest = os.environ.get("VRAMLAB_GLIBC")
    if oldest:
        compiler, of_cxx = for_glibc(oldest, compiler, folder)
        # Zig knows no `-l:` for a file.
        own = [tuple(name for name in part.libraries if not name.startswith("-l:")) for part in parts]
        parts = [dataclasses.replace(part, libraries=own[at] + of_cxx) for at, part in enumerate(parts)]
    to = _build.PACKAGE / "prebuilt"
    to.mkdir(exist_ok=True)
    cuda = sorted(folder.glob("nvidia/**/include"))
    return [_build.compile_part(part, torch, to / _build.file_name(torch, part), compiler, cuda) for part in parts]


def main(versions: list[str]) -> int:
    """Builds for each version that is named, or for the newest."""
    if any(not re.fullmatch(r"\d+\.\d+\.\d+(\+\w+)?", version) for version in versions):
        print(f"usage: {sys.argv[0]} [VERSION…] (of PyTorch, such as 2.11.0)", file=sys.stderr)
        return 2
    for version in versions or RELEASES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(*build(version, Path(folder)), sep="\n")
            except Error as error:
                print(f"error: torch {version}: {error}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
