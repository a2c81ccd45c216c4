"""The command line: `vramlab-analysis nsight CAPTURE`, or `python -m vramlab_analysis.nsight CAPTURE`."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
from pathlib import Path

from vramlab_analysis import output
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.nsight import attribution, capture, extracted, own_trace, summary

USAGE = """vramlab-analysis nsight CAPTURE [--record DIR] [--json | --csv DIR] [--top N]
       vramlab-analysis nsight extract EXPORT.sqlite [--record DIR] [--no-ranges] -o FOLDER
       vramlab-analysis nsight draw CAPTURE... [--steps A..B] [--title TEXT]... -o FILE.png|FILE.svg"""


def _parser(command: str) -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="vramlab-analysis nsight" + (f" {command}" if command else ""),
        usage=USAGE,
        description="Report the calls that waited, from a capture by Nsight Systems: an SQLite export "
        "(`nsys export --type sqlite`), or a folder that `extract` wrote.",
    )
    if command == "draw":
        top.add_argument(
            "captures", type=Path, nargs="+", metavar="CAPTURE", help="drawn below each other, on one scale"
        )
    else:
        top.add_argument(
            "capture", type=Path, metavar="CAPTURE", help="an SQLite export, or a directory of extracted tables"
        )
    if command != "draw":
        top.add_argument(
            "--record", type=Path, metavar="DIR",
            help="run record of the same process (trainer --out with --export perfetto), to compare with",
        )  # fmt: skip
    if command == "":
        how = top.add_mutually_exclusive_group()
        how.add_argument("--json", action="store_true", help="print all tables as one JSON document")
        how.add_argument("--csv", type=Path, metavar="DIR", help="write one CSV file for each table")
        top.add_argument("--top", type=int, default=12, metavar="N", help="printed rows of the long tables [12]")
    else:
        top.add_argument("-o", "--out", type=Path, required=True, metavar="PATH", help="output path")
    if command == "extract":
        top.add_argument("--no-ranges", action="store_true", help="leave out NVTX ranges and marks")
    if command == "draw":
        top.add_argument(
            "--steps", metavar="A..B", help="steps to draw, counted from 1 in the capture [one in the middle]"
        )
        top.add_argument("--title", action="append", metavar="TEXT", help="title of a capture, in their order")
    return top


def _own(args: argparse.Namespace) -> own_trace.OwnTrace | None:
    if args.record is not None:
        return own_trace.read(args.record)
    if args.capture.is_dir() and "own" in extracted.describe(args.capture):
        return own_trace.read(args.capture)
    return None


def _report(args: argparse.Namespace) -> None:
    result = attribution.attribute(capture.load(args.capture))
    own = _own(args)
    agreement = own_trace.agree(result, own) if own is not None else None
    if args.json:
        span = result.capture.span
        document = {
            "schema_version": 1,
            **result.capture.source,
            "span_ns": span[1] - span[0],
            "steps": result.capture.step_count,
            "notes": result.capture.notes,
            "tables": {table.name: table.rows for table in summary.tables(result, agreement)},
        }
        print(json.dumps(document, indent=1))
        return
    for note in result.capture.notes:
        print(f"note: {note}", file=sys.stderr)
    if args.csv is not None:
        output.folder(args.csv)
        for table in summary.tables(result, agreement):
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, list(table.rows[0]) if table.rows else ["empty"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(table.rows)
            output.write(args.csv / f"{table.name}.csv", text.getvalue())
            print(f"wrote    {args.csv / table.name}.csv")
        return
    print("\n".join(summary.render(table) for table in summary.tables(result, agreement, args.top)), end="")


def _extract(args: argparse.Namespace) -> None:
    found = capture.load(args.capture)
    own = own_trace.read(args.record) if args.record is not None else None
    if own is not None:
        own_trace.pair(found, own)  # rejects a record of another run
    for path in extracted.write(found, args.out, own, ranges=not args.no_ranges):
        print(f"wrote    {path} ({path.stat().st_size} bytes)")


def _draw(args: argparse.Namespace) -> None:
    from vramlab_analysis.nsight import timeline

    if args.title and len(args.title) != len(args.captures):
        raise AnalysisError(f"--title: {len(args.title)} titles for {len(args.captures)} captures; give one for each.")
    steps = timeline.parse_steps(args.steps)
    windows = [timeline.window(attribution.attribute(capture.load(path)), steps) for path in args.captures]
    titles = [f"{path.stem}, {timeline.caption(shown)}" for path, shown in zip(args.captures, windows, strict=True)]
    timeline.save(timeline.draw_windows(windows, args.title or titles), args.out)
    print(f"wrote    {args.out}")


COMMANDS = {"": _report, "extract": _extract, "draw": _draw}


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0; 2 for bad input, with one line that names the fault; 1 when output cannot be written."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = arguments.pop(0) if arguments and arguments[0] in ("extract", "draw") else ""
    try:
        COMMANDS[command](_parser(command).parse_args(arguments))
        sys.stdout.flush()
    except AnalysisError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(
            f"error: the Python package {error.name} is not installed; `pip install ./analysis` installs it.",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"error: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
