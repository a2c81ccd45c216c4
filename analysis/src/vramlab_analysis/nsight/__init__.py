"""Calls of the host that waited, from a capture by Nsight Systems.

`vramlab-analysis nsight EXPORT.sqlite` prints the tables. In Python:

    from vramlab_analysis.nsight import attribute, load
    capture = load("capture.sqlite")            # an export, or a directory that `extract` wrote
    result = attribute(capture)                 # result.blocked: one row for each call that waited

Everything but the drawing in `timeline` needs Python alone. `names`, `capture`, `export`, `attribution` and `allocator`
keep to Python 3.8, because `nsys stats` brings that and runs them for the report in `experiments/nsight/reports`.
"""

from __future__ import annotations

from vramlab_analysis.nsight.attribution import Attribution, Blocked, attribute
from vramlab_analysis.nsight.capture import Call, Capture, Range, Work, load

__all__ = ["Attribution", "Blocked", "Call", "Capture", "Range", "Work", "attribute", "load"]
