"""Adds to the source distribution what Cargo builds the program and the library from.

They are the crates of `allocators` and `app` as Git has them, in a workspace of their own in the folder `rust`. It has
the manifest of the checkout without its other members, and the lock file with the same versions. Cargo shortens that
file, so Cargo is needed here, too.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = ("allocators", "app/build", "app/cli", "app/inject", "app/nsight", "app/terminal")
# Workspaces of their own.
LEFT_OUT = ("allocators/fuzz/",)


class RustSources(BuildHookInterface):  # type: ignore[type-arg]
    """Gathers the sources in a folder that lasts as long as the build."""

    folder: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Is called before the files of the source distribution are gathered."""
        self.folder = tempfile.mkdtemp(prefix="vramlab-sdist-")
        gather(Path(self.root).parents[1], Path(self.folder))
        build_data["force_include"][self.folder] = "rust"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Is called when the file is written."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def gather(checkout: Path, to: Path) -> None:
    """Copies the sources, and writes the manifest, the lock file and the commit that they are of."""
    names = [name for name in git(checkout, "ls-files", "-z", *FOLDERS).split("\0") if name]
    for name in names:
        # A file that was deleted and not committed yet is not there.
        if not name.startswith(LEFT_OUT) and (checkout / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, to / name)
    manifest = (checkout / "Cargo.toml").read_text()
    (to / "Cargo.toml").write_text(with_members(manifest, lambda member: (to / member / "Cargo.toml").is_file()))
    shutil.copy2(checkout / "Cargo.lock", to / "Cargo.lock")
    command = ["cargo", "metadata", "--format-version", "1"]
    done = subprocess.run(command, cwd=to, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit("cargo cannot read the gathered sources; its message stands above")
    # Where Cargo notes it in packages, and where the build script looks for it.
    commit = git(checkout, "rev-parse", "HEAD").strip()
    dirty = bool(git(checkout, "status", "--porcelain", "--untracked-files=no", "--", *FOLDERS).strip())
    note = {"git": {"sha1": commit, "dirty": dirty}, "path_in_vcs": "app/cli"}
    (to / "app" / "cli" / ".cargo_vcs_info.json").write_text(json.dumps(note, indent=2))


def with_members(manifest: str, stays: Any) -> str:
    """A workspace's manifest with some of its members, which is all of a checkout that a source distribution has."""
    listed = re.search(r"^members = \[\n(.*?)^\]\n", manifest, re.MULTILINE | re.DOTALL)
    if listed is None:
        sys.exit("Cargo.toml lists no members, one a line")
    members = [line for line in listed[1].splitlines(keepends=True) if stays(line.strip(' ",\n'))]
    text = manifest[: listed.start(1)] + "".join(members) + manifest[listed.end(1) :]
    return re.sub(r"^(#.*\n)?exclude = .*\n", "", text, flags=re.MULTILINE)


def git(checkout: Path, *arguments: str) -> str:
    """What git prints."""
    done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"a source distribution is made in a checkout with git: {done.stderr.strip()}")
    return done.stdout
