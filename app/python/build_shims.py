"""Builds shims and recorders for versions of PyTorch into the package, for machines without a C++ compiler, before a wheel is built.

    python app/python/build_shims.py 2.11.0 2.15.0

Each downloads PyTorch's wheel from the index that pip is set to, half a GB or more, and CUDA's headers; neither is
installed. They are for those versions and what they were built for (2.11.0+cu130), and for this kind of machine.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from zipfile import ZipFile

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from vramlab import _build
from vramlab._library import Error

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


def build(version: str, folder: Path) -> list[Path]:
    """Builds shim and recorder for one version, and says where they are."""
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
    to = _build.PACKAGE / "prebuilt"
    to.mkdir(exist_ok=True)
    cuda = sorted(folder.glob("nvidia/**/include"))
    parts = (_build.SHIM, _build.RECORDER)
    return [_build.compile_part(part, torch, to / _build.file_name(torch, part), compiler, cuda) for part in parts]


def main(versions: list[str]) -> int:
    """Builds for each version that is named."""
    if not versions or any(not re.fullmatch(r"\d+\.\d+\.\d+(\+\w+)?", version) for version in versions):
        print(f"usage: {sys.argv[0]} VERSION… (of PyTorch, such as 2.11.0)", file=sys.stderr)
        return 2
    for version in versions:
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(*build(version, Path(folder)), sep="\n")
            except Error as error:
                print(f"error: torch {version}: {error}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
