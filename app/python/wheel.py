"""Builds what the wheel has from Cargo: the program `vramlab` and libvramlab. Neither is for one Python alone.

VRAMLAB_CARGO has other arguments for `cargo build` than those that optimise the two. Tests name what they have built.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Libraries that every Linux of the tag has (PEP 600).
EVERYWHERE = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s)\.so|ld-linux.*\.so")


class CargoHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the program and the library, and names the platform that they run on."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Is called before the files of the wheel are gathered."""
        program, library = built(Path(self.root).parents[1])
        build_data["shared_scripts"] = {str(program): program.name}
        build_data["force_include"][str(library)] = f"vramlab/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_of(program, library)}"


def built(root: Path) -> tuple[Path, Path]:
    """The program and the library, as Cargo says where they are."""
    if shutil.which("cargo") is None:
        sys.exit("vramlab is built with Rust, and there is no cargo here: https://rustup.rs")
    what = os.environ.get("VRAMLAB_CARGO", "--release -p vramlab-cli -p vramlab-capi")
    command = ["cargo", "build", "--locked", "--message-format", "json-render-diagnostics", *what.split()]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit("cargo build failed; its messages stand above")
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    artifacts = [message for message in messages if message.get("reason") == "compiler-artifact"]
    program = next(one["executable"] for one in artifacts if one["target"]["name"] == "vramlab" and one["executable"])
    libraries = [one["filenames"] for one in artifacts if "cdylib" in one["target"]["kind"]]
    library = next(file for files in libraries for file in files if file.endswith((".so", ".dylib", ".dll")))
    return Path(program), Path(library)


def platform_of(*files: Path) -> str:
    """The platform's tag: on Linux the oldest glibc on which all files run."""
    plain = re.sub(r"[-.]", "_", sysconfig.get_platform())
    if not plain.startswith("linux"):
        return plain
    needed = max(glibc(file) for file in files)
    arch = plain[len("linux_") :]
    return plain if needed == (0, 0) else f"manylinux_{needed[0]}_{needed[1]}_{arch}"


def glibc(file: Path) -> tuple[int, int]:
    """The newest version of glibc of which a file takes something; 0.0 where it is linked with another C library."""
    from elftools.elf.elffile import ELFFile

    newest = (0, 0)
    with file.open("rb") as opened:
        elf = ELFFile(opened)
        for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED"):
            if not EVERYWHERE.match(tag.needed):
                sys.exit(f"{file} needs {tag.needed}, which not every Linux has")
        for _, names in elf.get_section_by_name(".gnu.version_r").iter_versions():
            for name in names:
                found = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", name.name)
                if found:
                    newest = max(newest, (int(found[1]), int(found[2])))
    return newest
