"""The one exception whose text is meant for people."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1


class AnalysisError(Exception):
    """Something that was given cannot be read or drawn. The text is one sentence: what, where, and how to mend it."""


def found(path: Path) -> Path | None:
    """`path`, or its gzipped form beside it, or None if neither is there."""
    for candidate in (path, path.with_name(path.name + ".gz")):
        if candidate.is_file():
            return candidate
    return None


def read_bytes(path: Path) -> bytes:
    """Contents of a file that may be gzipped.

    Raises AnalysisError when it cannot be read.
    """
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        reason = getattr(error, "strerror", None) or error
        raise AnalysisError(f"{path}: cannot be read ({reason}).") from error


def read_json(path: Path) -> Any:
    """A JSON document that may be gzipped.

    Raises AnalysisError when it cannot be read or is no JSON.
    """
    try:
        return json.loads(read_bytes(path))
    except ValueError as error:
        raise AnalysisError(f"{path}: not JSON ({error}); was the file cut off?") from error


def check_version(path: Path, document: Any, what: str) -> dict[str, Any]:
    """The document, if it is an object of the schema version that is understood here."""
    if not isinstance(document, dict) or "schema_version" not in document:
        raise AnalysisError(f"{path}: no {what}, for it has no schema_version.")
    version = document["schema_version"]
    if version != SCHEMA_VERSION:
        raise AnalysisError(
            f"{path}: {what} of schema version {version}, and this package reads version {SCHEMA_VERSION}; "
            "record it again or take the package that came with it."
        )
    return document
