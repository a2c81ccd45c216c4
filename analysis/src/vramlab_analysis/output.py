"""Files that users name: each appears under its name when it is whole, or not at all.

The same rules as the programs' (`vramlab::output` in Rust): what is written goes to a new file beside the target, under
a name that is drawn, and takes the target's name at the end. Only regular files are replaced. Folders, device nodes,
pipes, sockets, streams such as `/dev/stdout` and symbolic links are refused.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from vramlab_analysis.errors import AnalysisError

_SPECIAL = (
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def check(path: Path) -> int:
    """The permission bits that a file written to `path` will have.

    Raises AnalysisError when no file can be written there: it is no regular file, or its folder is not there.
    """
    given = str(path)
    if given in ("-", "/dev/stdout", "/dev/stderr", "/dev/stdin") or given.startswith(("/dev/fd/", "/proc/self/fd/")):
        raise AnalysisError(f"{path}: is a stream, and this output appears when it is whole; name a file.")
    if not path.name:
        raise AnalysisError(f"{path}: is a directory; name a file in it.")
    try:
        there = path.lstat()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise AnalysisError(
                f"{path}: cannot be written, for there is no folder {path.parent}; make it first."
            ) from None
        return 0o666 & ~_umask()
    except (OSError, ValueError) as error:
        raise AnalysisError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error}).") from error
    if stat.S_ISLNK(there.st_mode):
        raise AnalysisError(f"{path}: is a symbolic link to {os.readlink(path)}; name the file itself.")
    if stat.S_ISDIR(there.st_mode):
        raise AnalysisError(f"{path}: is a directory; name a file in it.")
    for is_one, words in _SPECIAL:
        if is_one(there.st_mode):
            raise AnalysisError(f"{path}: is {words}, and the output would take its place; name a file.")
    if not os.access(path, os.W_OK):
        raise AnalysisError(f"{path}: cannot be written (its permissions do not allow it); name another file.")
    return stat.S_IMODE(there.st_mode)


def folder(path: Path) -> None:
    """Makes a folder and those above it.

    Raises AnalysisError when it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AnalysisError(f"{path}: no folder can be made there ({reason}).") from error


def write(path: Path, data: bytes | str) -> None:
    """Writes a whole file, in place of a regular file of that name.

    Raises AnalysisError when it cannot be written; then what was there is as it was, and nothing else is left.
    """
    mode = check(path)
    try:
        descriptor, part = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise AnalysisError(f"{path}: cannot be written ({error.strerror}).") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), mode)
        check(path)  # it may have taken long to come here
        os.replace(part, path)
    except BaseException as error:
        os.unlink(part)
        if isinstance(error, OSError):
            raise AnalysisError(f"{path}: cannot be written ({error.strerror}).") from error
        raise
