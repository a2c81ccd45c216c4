"""Makes a long history of a short one: python3 -m tests.repeated SNAPSHOT.pickle[.xz] EVENTS OUT.pickle"""

from __future__ import annotations

import lzma
import pickle
import sys
from pathlib import Path
from typing import Any


def repeated(snapshot: dict[str, Any], events: int) -> dict[str, Any]:
    """The snapshot with its events over and over, until there are at least so many.

    What a round leaves live is freed before the next, and the segments of the first round stay, so the whole is a
    history that an allocator could have had.
    """
    first = snapshot["device_traces"][0]
    live: dict[int, dict[str, Any]] = {}
    for event in first:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    out = list(first)
    span = first[-1]["time_us"] - first[0]["time_us"] + 1
    client = [event for event in first if not event["action"].startswith("segment")]
    shift = 0
    while len(out) < events:
        for event in live.values():
            out += [{**event, "action": action, "time_us": first[-1]["time_us"] + shift} for action in FREE]
        shift += span
        out += [{**event, "time_us": event["time_us"] + shift} for event in client]
    return {**snapshot, "device_traces": [out]}


FREE = ("free_requested", "free_completed")


def main(source: str, events: str, out: str) -> None:
    """Reads, repeats, writes."""
    path = Path(source)
    data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    Path(out).write_bytes(pickle.dumps(repeated(pickle.loads(data), int(events)), protocol=4))


if __name__ == "__main__":
    main(*sys.argv[1:])
