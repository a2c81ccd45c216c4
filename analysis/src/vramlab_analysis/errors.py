"""The exception whose text is for users, and reading of files that may be truncated, huge or hostile."""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zlib
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
# Files of runs are much smaller; larger files, or decompression bombs, are not read into memory.
MOST_BYTES = 2**30
# Depth of nested arrays and objects. Records have six levels.
MOST_DEEP = 32
# Characters that move the cursor, hide or reorder text, or are half of a character.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


class AnalysisError(Exception):
    """An input cannot be read or drawn. The text is one sentence: what, where, and how to fix it.

    It may quote what a file says and how it is named, so it is made `printable`.
    """

    def __init__(self, text: str) -> None:
        """An error with this text."""
        super().__init__(printable(text))

    def _render_traceback_(self) -> list[str]:
        """The text alone, which IPython then shows in place of a traceback."""
        return [f"error: {self}"]


def printable(text: str) -> str:
    """Text that terminals, figures and pages show literally: control characters as `\\x1b`, `\\u202e`."""
    return _UNPRINTABLE.sub(lambda one: one[0].encode("unicode_escape").decode(), text)


def found(path: Path) -> Path | None:
    """`path`, or its compressed form, or None if neither exists."""
    for candidate in (path, path.with_name(path.name + ".gz"), path.with_name(path.name + ".xz")):
        try:
            if candidate.is_file():
                return candidate
        except (OSError, ValueError):  # a name that no file can have
            return None
    return None


def _opened(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path)
    return lzma.open(path) if path.suffix == ".xz" else path.open("rb")


def read_bytes(path: Path) -> bytes:
    """Contents of a file that may be compressed with gzip or xz.

    Raises AnalysisError when it cannot be read, or has more than `MOST_BYTES`.
    """
    try:
        with _opened(path) as file:
            data: bytes = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AnalysisError(f"{path}: cannot be read ({reason}).") from error
    if len(data) > MOST_BYTES:
        raise AnalysisError(f"{path}: larger than {MOST_BYTES >> 30} GiB, which no file of a run is.")
    return data


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not a number of JSON")


def read_json(path: Path) -> Any:
    """A JSON document that may be gzipped. Its strings are `printable`, its numbers fit in 64 bits.

    Raises AnalysisError when it cannot be read or is no such JSON.
    """
    return parse_json(read_bytes(path), str(path))


def parse_json(data: bytes, where: str) -> Any:
    """As `read_json`, from bytes; `where` is the source in errors."""
    try:
        return _plain(json.loads(data, parse_constant=_no_number), MOST_DEEP)
    except RecursionError as error:
        raise AnalysisError(f"{where}: nested too deeply; no file of a run is.") from error
    except ValueError as error:
        raise AnalysisError(f"{where}: not JSON ({printable(str(error))}); is the file truncated?") from error


def read_json_lines(path: Path) -> list[Any]:
    """The documents of a file that has one on each line; as `read_json`. An error names the line."""
    return [parse_json(line, f"{path}: line {number}") for number, line in enumerate(read_bytes(path).splitlines(), 1)]


def _plain(value: Any, deep: int) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, (dict, list)):
        if not deep:
            raise ValueError(f"more than {MOST_DEEP} levels")
        if isinstance(value, list):
            return [_plain(one, deep - 1) for one in value]
        return {printable(key): _plain(one, deep - 1) for key, one in value.items()}
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError("a number beyond 64 bits")
    if isinstance(value, float) and not -1e300 < value < 1e300:
        raise ValueError("a number beyond 1e300")
    return value


def check_version(path: Path, document: Any, what: str) -> dict[str, Any]:
    """The document, if it is an object of the supported schema version."""
    if not isinstance(document, dict) or "schema_version" not in document:
        raise AnalysisError(f"{path}: not {what}, because it has no schema_version.")
    version = document["schema_version"]
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise AnalysisError(
            f"{path}: {what} of schema version {str(version)[:40]}, and this package reads version {SCHEMA_VERSION}; "
            "record it again or use the package of that version."
        )
    return document
