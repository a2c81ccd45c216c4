"""Output files that users name: each is written atomically.

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

    Raises AnalysisError when `path` cannot be written: it is not a regular file, or its directory does not exist.
    """
    given = str(path)
    if given in ("-", "/dev/stdout", "/dev/stderr", "/dev/stdin") or given.startswith(("/dev/fd/", "/proc/self/fd/")):
        raise AnalysisError(f"{path}: is a stream, and this output is written atomically; name a file.")
    if not path.name:
        raise AnalysisError(f"{path}: is a directory; name a file in it.")
    try:
        status = path.lstat()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise AnalysisError(
                f"{path}: cannot be written, because the directory {path.parent} does not exist; make it first."
            ) from None
        return 0o666 & ~_umask()
    except (OSError, ValueError) as error:
        raise AnalysisError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error}).") from error
    if stat.S_ISLNK(status.st_mode):
        raise AnalysisError(f"{path}: is a symbolic link to {os.readlink(path)}; name the file itself.")
    if stat.S_ISDIR(status.st_mode):
        raise AnalysisError(f"{path}: is a directory; name a file in it.")
    for is_one, words in _SPECIAL:
        if is_one(status.st_mode):
            raise AnalysisError(f"{path}: is {words}, and the output would replace it; name a file.")
    if not os.access(path, os.W_OK):
        raise AnalysisError(f"{path}: cannot be written (its permissions do not allow it); name another file.")
    return stat.S_IMODE(status.st_mode)


def folder(path: Path) -> None:
    """Makes a directory and its parents.

    Raises AnalysisError when it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AnalysisError(f"{path}: the directory cannot be made ({reason}).") from error


def write(path: Path, data: bytes | str) -> None:
    """Writes a file atomically, replacing a regular file of that name.

    Raises AnalysisError when it cannot be written; then the old file is unchanged, and no other file remains.
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
        check(path)  # the target may have changed since the first check
        os.replace(part, path)
    except BaseException as error:
        os.unlink(part)
        if isinstance(error, OSError):
            raise AnalysisError(f"{path}: cannot be written ({error.strerror}).") from error
        raise
