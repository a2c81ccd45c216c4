"""Records as an attacker would write them: every string hostile, every field mutated. All deterministic."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

# Ends whatever it may stand in: a script, an attribute, a cell, a style sheet, a comment, SVG; and a formula of
# matplotlib, a template's expression, what moves a terminal's cursor or turns the text around, half a character.
HOSTILE = (
    "</script><script>window.hacked=1</script>"
    "<img src=x onerror=window.hacked=2>"
    "'\"><svg onload=window.hacked=3></svg></style></td></title>-->]]>"
    "&lt;b&gt;{{ 7 * 191 }}{% raw %}$\\frac{$%s\x1b]0;x\x07\x1b[2J\u202e\x00\ud800"
)
Path = tuple[str | int, ...]


def places(value: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value of a document with its place; of lists the first two elements, since all are read alike."""
    yield at, value
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*at, key))
    elif isinstance(value, list):
        for index, one in enumerate(value[:2]):
            yield from places(one, (*at, index))


def replaced(document: Any, at: Path, value: Any) -> Any:
    """A copy with another value at a place."""
    if not at:
        return value
    out = copy.deepcopy(document)
    inside = out
    for part in at[:-1]:
        inside = inside[part]
    inside[at[-1]] = value
    return out


def without(document: Any, at: Path) -> Any:
    """A copy that lacks the value at a place."""
    out = copy.deepcopy(document)
    inside = out
    for part in at[:-1]:
        inside = inside[part]
    del inside[at[-1]]
    return out


def deep(levels: int) -> Any:
    """Arrays in one another, as JSON can be written but no record is."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


WRONG: dict[str, Any] = {
    "null": None,
    "array": [1],
    "object": {"x": 1},
    "text": "x",
    "number": 1.5,
    "truth": True,
    "negative": -1,
    "zero": 0,
    "huge": 10**40,
    "64 bits": 2**64 - 1,
    "huge float": 1e308,
    "empty": "",
    "long": "x" * 100_000,
    "deep": deep(60),
    "path": "../../x",
    "hostile": HOSTILE,
}


def mutations(document: Any) -> Iterator[tuple[str, str]]:
    """A change and the JSON with it: each value missing, and of each wrong kind."""
    for at, value in places(document):
        name = ".".join(map(str, at)) or "all"
        if at:
            yield f"{name} missing", json.dumps(without(document, at))
        for kind, wrong in WRONG.items():
            if type(wrong) is type(value) and wrong == value:
                continue
            yield f"{name} {kind}", json.dumps(replaced(document, at, wrong))


def poisoned(value: Any, keep: frozenset[str] = frozenset()) -> Any:
    """The document with every string hostile, those under the keys of `keep` excepted."""
    if isinstance(value, dict):
        return {key: one if key in keep else poisoned(one, keep) for key, one in value.items()}
    if isinstance(value, list):
        return [poisoned(one, keep) for one in value]
    return value + HOSTILE if isinstance(value, str) else value
