"""Values and tables that the pages quote, computed from the recorded results.

A page is written by people. `documents` finds its markers and asks this package for the values and tables that they
name. A value's name is its group and a path in the group, joined with dots: `compare.naive.epoch_s`.
"""

from __future__ import annotations

from functools import cache

from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.pages import (  # noqa: F401
    acceptance_list,
    any_program,
    buckets,
    field,
    inside_pytorch,
    offload,
    ranks,
    ranks_four,
    registration,
    replays,
    sharded,
    training,
)
from vramlab_analysis.pages.registry import GROUPS, TABLES, Scalar, flat


@cache
def group(name: str) -> dict[str, Scalar]:
    """The values of a group by their names without the group's.

    Raises AnalysisError for an unknown group.
    """
    if name not in GROUPS:
        raise AnalysisError(f"{name}: unknown group of values; the groups are {', '.join(sorted(GROUPS))}.")
    return flat(GROUPS[name]())


def value(name: str) -> Scalar:
    """The value of a name such as `compare.naive.epoch_s`.

    Raises AnalysisError for an unknown name.
    """
    of, _, key = name.partition(".")
    values = group(of)
    if key not in values:
        raise AnalysisError(f"{name}: unknown value; `vramlab-analysis readme --values {of}` lists those of the group.")
    return values[key]


@cache
def table(name: str) -> str:
    """A table in Markdown that ends in a line break.

    Raises AnalysisError for an unknown name.
    """
    if name not in TABLES:
        raise AnalysisError(f"{name}: unknown table; the tables are {', '.join(sorted(TABLES))}.")
    return TABLES[name]().rstrip("\n") + "\n"
