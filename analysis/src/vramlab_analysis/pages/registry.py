"""Registration of the values and tables that the pages quote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Scalar = float | str
# Functions that compute the values of a group, by the group's name: the part of a value's name before the first dot.
GROUPS: dict[str, Callable[[], Mapping[str, Any]]] = {}
# Functions that compute a table in Markdown, by the table's name.
TABLES: dict[str, Callable[[], str]] = {}


def group(name: str) -> Callable[[Callable[[], Mapping[str, Any]]], Callable[[], Mapping[str, Any]]]:
    """Registers a function that returns the values of a group, nested or flat."""

    def register(compute: Callable[[], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
        GROUPS[name] = compute
        return compute

    return register


def table(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Registers a function that returns a table in Markdown."""

    def register(compute: Callable[[], str]) -> Callable[[], str]:
        TABLES[name] = compute
        return compute

    return register


def flat(document: Any, prefix: str = "") -> dict[str, Scalar]:
    """The numbers and texts of nested mappings and lists, by their keys and indices joined with dots."""
    if isinstance(document, Mapping):
        items: Iterable[tuple[Any, Any]] = document.items()
    elif isinstance(document, list | tuple):
        items = enumerate(document)
    else:
        return {} if document is None else {prefix: document}
    return {key: value for name, one in items for key, value in flat(one, f"{prefix}.{name}".lstrip(".")).items()}


def markdown(head: Iterable[str], body: Iterable[Iterable[str]], left: int = 1) -> str:
    """A table in Markdown, all columns but the first `left` aligned right."""
    head = list(head)
    lines = [head, ["---"] * left + ["--:"] * (len(head) - left), *body]
    first, rule, *rest = lines
    return "\n".join([f"| {' | '.join(first)} |", f"|{'|'.join(rule)}|", *(f"| {' | '.join(row)} |" for row in rest)])
