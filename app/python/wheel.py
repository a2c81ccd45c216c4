"""Builds the Cargo parts of the wheel: the program `vramlab`, libvramlab and, on Linux, libvramlab_inject.

They fit every Python. VRAMLAB_CARGO replaces the arguments of `cargo build`, which optimise. Tests name those of their
own build.
VRAMLAB_GLIBC=2.28 links against that glibc instead of the machine's, with Zig, so that the wheel runs on older systems.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Libraries that every Linux of the tag has (PEP 600), and those that PyTorch has loaded before its shim is.
EVERYWHERE = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s)\.so|ld-linux.*\.so")
BY_TORCH = re.compile(r"lib(c10|c10_cuda|torch_cpu|stdc\+\+)\.so")
# Of the oldest system with the glibc of PyTorch's own wheels, whose compiler is GCC 8.
NEWEST_CXX = {"GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}


class CargoHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the program and the library, and names the platform that they run on."""

    def dependencies(self) -> list[str]:
        """What this build needs beside what every one needs."""
        return ["cargo-zigbuild>=0.20", "ziglang>=0.15,<0.16"] if os.environ.get("VRAMLAB_GLIBC") else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Is called before the files of the wheel are gathered."""
        root = Path(self.root)
        workspace = root / "rust"
        if not workspace.is_dir():
            # Not a source distribution, but a checkout.
            workspace = root.parents[1]
        program, libraries = built(workspace)
        shims = sorted((root / "src" / "vramlab" / "prebuilt").glob("*.so"))
        build_data["shared_scripts"] = {str(program): program.name}
        build_data["force_include"] |= {str(library): f"vramlab/{library.name}" for library in libraries}
        header = workspace / "allocators" / "capi" / "include" / "vramlab.h"
        build_data["force_include"][str(header)] = "vramlab/include/vramlab.h"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_of([program, *libraries], shims)}"


def built(workspace: Path) -> tuple[Path, list[Path]]:
    """The program and the libraries, from Cargo's messages."""
    if shutil.which("cargo") is None:
        sys.exit("vramlab is built with Rust, and there is no cargo here: https://rustup.rs")
    crates = ["vramlab-cli", "vramlab-capi", *(["vramlab-inject"] if sys.platform == "linux" else [])]
    what = os.environ.get("VRAMLAB_CARGO", f"--release -p {' -p '.join(crates)}").split()
    build = ["build"]
    oldest = os.environ.get("VRAMLAB_GLIBC")
    if oldest:
        build = ["zigbuild", "--target", f"{platform.machine()}-unknown-linux-gnu.{oldest}"]
    command = ["cargo", *build, "--locked", "--message-format", "json-render-diagnostics", *what]
    done = subprocess.run(command, cwd=workspace, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit("cargo build failed; its messages stand above")
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    artifacts = [message for message in messages if message.get("reason") == "compiler-artifact"]
    program = next(one["executable"] for one in artifacts if one["target"]["name"] == "vramlab" and one["executable"])
    files = [file for one in artifacts if "cdylib" in one["target"]["kind"] for file in one["filenames"]]
    libraries = [Path(file) for file in files if file.endswith((".so", ".dylib", ".dll"))]
    return Path(program), [file for file in libraries if sys.platform == "linux" or "inject" not in file.name]


def platform_of(files: list[Path], shims: list[Path]) -> str:
    """The platform's tag: on Linux the oldest glibc on which all files run."""
    plain = re.sub(r"[-.]", "_", sysconfig.get_platform())
    if not plain.startswith("linux"):
        return plain
    needed = max([*(glibc(file) for file in files), *(glibc(file, BY_TORCH) for file in shims)])
    arch = plain[len("linux_") :]
    return plain if needed == (0, 0) else f"manylinux_{needed[0]}_{needed[1]}_{arch}"


def glibc(file: Path, more: re.Pattern[str] | None = None) -> tuple[int, int]:
    """The newest version of glibc of which a file takes something; 0.0 where it is linked with another C library.

    `more` are libraries that it may need beside those of every Linux. Of C++'s it may take what the oldest system has.
    """
    from elftools.elf.elffile import ELFFile

    newest = (0, 0)
    with file.open("rb") as opened:
        elf = ELFFile(opened)
        for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED"):
            if not EVERYWHERE.match(tag.needed) and not (more and more.match(tag.needed)):
                sys.exit(f"{file} needs {tag.needed}, which not every Linux has")
        for _, names in elf.get_section_by_name(".gnu.version_r").iter_versions():
            for name in names:
                kind, _, number = name.name.partition("_")
                if not re.fullmatch(r"\d+(\.\d+)+", number):
                    continue
                version = tuple(map(int, number.split(".")))
                if kind == "GLIBC":
                    newest = max(newest, version[:2])
                elif kind in NEWEST_CXX and version > NEWEST_CXX[kind]:
                    sys.exit(f"{file} needs {name.name}, which the C++ library of GCC 8 does not have")
    allowed = os.environ.get("VRAMLAB_GLIBC")
    if allowed and newest > tuple(map(int, allowed.split("."))):
        sys.exit(f"{file} needs glibc {newest[0]}.{newest[1]}, and VRAMLAB_GLIBC allows {allowed}")
    return newest
