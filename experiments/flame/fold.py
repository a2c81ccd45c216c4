#!/usr/bin/env python3
"""Folds what `perf script` prints into one line a stack: `outermost;…;innermost count`.

    perf script --no-inline -F comm,tid,ip,sym,dso -i perf.data | python3 experiments/flame/fold.py [--under TEXT] [--top N]

That is the format of FlameGraph, inferno and speedscope. `--under` keeps stacks with a frame that contains TEXT, from that
frame on. The N most frequent stacks are kept; the rest of each thread is one line, `thread;[others]`, so counts still add
up. A frame without a symbol is its library, `[libcuda.so.1]`; frames of the kernel end in `_[k]`. Nothing else of the
machine is in the output: no addresses, paths or environment.

`--facts FILE` writes how many samples were read and kept, as JSON. Exit code 2 when the input holds no sample.
"""

import argparse
import collections
import json
import re
import sys
from pathlib import Path

SAMPLE = re.compile(r"^(\S.*?)\s+(\d+)\s*$")
FRAME = re.compile(r"^\s+[0-9a-f]+ (.*) \((.*)\)$")
# What the compiler appends to tell versions of a function apart.
HASH = re.compile(r"::h[0-9a-f]{16}(?=$|[.+])")
UNKNOWN = "[unknown]"


def stacks(lines):
    """Thread name and frames, innermost first, of each sample."""
    thread, frames = None, []
    for line in lines:
        # A library that was replaced while the program ran is the same library.
        line = line.rstrip("\n").replace(" (deleted))", ")")
        frame = FRAME.match(line)
        if frame and thread is not None:
            frames.append((frame[1], frame[2]))
            continue
        sample = SAMPLE.match(line)
        if sample:
            if thread is not None:
                yield thread, frames
            thread, frames = sample[1].strip(), []
    if thread is not None:
        yield thread, frames


def label(symbol, library):
    """How a frame is shown; `None` for one of which nothing is known."""
    if symbol == UNKNOWN:
        name = Path(library).name
        return None if library == UNKNOWN else f"[{name}]" if not name.startswith("[") else name
    text = HASH.sub("", symbol).replace(";", ":")
    return f"{text}_[k]" if library.startswith("[kernel") or library.endswith(".ko") else text


def folded(thread, frames, under):
    """The stack as a tuple from the outside in; `None` when it is not wanted."""
    names = [label(*frame) for frame in reversed(frames)]
    names = [name for name in names if name is not None]
    # A library without symbols is one frame, however deep the stack is in it.
    names = [name for at, name in enumerate(names) if at == 0 or name != names[at - 1] or not name.startswith("[")]
    if under:
        at = next((at for at, name in enumerate(names) if under in name), None)
        return None if at is None else (thread, *names[at:])
    return (thread, *names)


def fold(lines, under=None, top=400):
    """Folded stacks with their counts, most frequent first, and what was read and kept."""
    counts, read, kept = collections.Counter(), 0, 0
    for thread, frames in stacks(lines):
        read += 1
        stack = folded(thread, frames, under)
        if stack is not None:
            kept += 1
            counts[stack] += 1
    # By count, then by name, so that the same samples give the same file.
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    others = collections.Counter()
    for stack, count in ordered[top:]:
        others[(stack[0], "[others]")] += count
    out = ordered[:top] + sorted(others.items())
    return out, {"samples": read, "kept": kept, "stacks": len(ordered), "in_others": sum(others.values())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--under", metavar="TEXT", help="keep stacks with a frame that contains this, from there on")
    parser.add_argument("--top", type=int, default=400, metavar="N", help="stacks to keep (default: 400)")
    parser.add_argument("--facts", type=Path, metavar="FILE", help="write the number of samples here, as JSON")
    options = parser.parse_args()
    out, facts = fold(sys.stdin, options.under, options.top)
    if not facts["kept"]:
        where = f" under a frame with '{options.under}'" if options.under and facts["samples"] else ""
        print(f"error: no samples{where}; feed it: perf script --no-inline -F comm,tid,ip,sym,dso -i perf.data", file=sys.stderr)
        return 2
    if options.facts:
        options.facts.write_text(json.dumps(facts, indent=1) + "\n")
    for stack, count in out:
        print(f"{';'.join(stack)} {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
