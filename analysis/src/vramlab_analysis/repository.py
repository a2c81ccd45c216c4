"""The location of the repository: the installed package has no recorded results, notebooks and figures."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from functools import cache
from pathlib import Path

from vramlab_analysis.errors import AnalysisError

# The file with the SHA-256 of the archive that a directory was unpacked from.
STAMP = ".unpacked"


def _is_root(folder: Path) -> bool:
    return (folder / "analysis" / "pyproject.toml").is_file() and (folder / "experiments" / "specs").is_dir()


def root() -> Path:
    """The repository around the current directory, else around this file (in an editable install).

    Raises AnalysisError when neither is in one.
    """
    here = Path.cwd()
    for folder in (here, *here.parents, *Path(__file__).resolve().parents):
        if _is_root(folder):
            return folder
    raise AnalysisError(
        f"{here}: not inside the repository, whose recorded results are needed; change to its directory."
    )


def results() -> Path:
    """The directory of recorded results: RESULTS, or the repository's, whose archives are unpacked first.

    Raises AnalysisError when one of its directories differs from its archive.
    """
    given = os.environ.get("RESULTS")
    if given:
        return Path(given)
    folder = root() / "experiments" / "results"
    for archive in sorted(folder.glob("*.tar.xz")):
        unpack(archive)
    return folder


@cache
def unpack(archive: Path) -> None:
    """Unpacks LABEL.tar.xz to the directory LABEL next to it, unless that was done before.

    Raises AnalysisError when the directory has other contents, which may be new records.
    """
    folder = archive.with_name(archive.name.removesuffix(".tar.xz"))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if not folder.exists():
        partial = Path(tempfile.mkdtemp(suffix=".partial", dir=archive.parent))
        try:
            with tarfile.open(archive) as tar:
                for member in tar:
                    # The stamp is not written through a link that the archive has.
                    if not (member.isreg() or member.isdir()):
                        raise AnalysisError(
                            f"{archive}: its member {member.name} is not a regular file; pack it again."
                        )
                tar.extractall(partial, filter="data")
            (partial / folder.name / STAMP).write_text(digest)
            (partial / folder.name).rename(folder)
        except tarfile.TarError as error:
            raise AnalysisError(f"{archive}: not an archive of results ({error}).") from error
        except OSError:
            # Another process was first.
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(partial)
    stamp = folder / STAMP
    if not stamp.is_file() or stamp.read_text() != digest:
        raise AnalysisError(f"{folder}: differs from {archive.name}; pack it (CONTRIBUTING.md) or remove it.")


def resolve(path: str) -> Path:
    """A path relative to the current directory, or to the repository's root if it exists only there.

    Jupyter starts a notebook in the notebook's own directory, and users type `RUN=runs/mine` at the root.
    """
    if (given := Path(path)).is_absolute() or given.exists():
        return given
    try:
        in_root = root() / given
    except AnalysisError:
        return given
    return in_root if in_root.exists() else given
