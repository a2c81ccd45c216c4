"""The command line: `vramlab COMMAND`, or `python -m vramlab COMMAND`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

from vramlab.errors import AnalysisError


def parser() -> argparse.ArgumentParser:
    """Commands and their options."""
    top = argparse.ArgumentParser(prog="vramlab", description="Figures and tables of recorded runs.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    report = commands.add_parser(
        "report",
        help="one page of HTML about run records, that works offline",
        description="Writes one self-contained page: table, host's time, sync account, memory with the block map, "
        "latency, losses. For the block map run the trainer with --trace, for its segments with --export perfetto.",
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run record, or of an experiment")
    report.add_argument("-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="[report.html]")
    steps = commands.add_parser(
        "steps",
        help="one table of step times by width, type and launch, beside PyTorch's best",
        description="Prints the median time of a training step of each kind of run, with the ratio to PyTorch's "
        "fastest mode at the same width, type and weights; below 1 is faster than PyTorch.",
    )
    losses = commands.add_parser(
        "losses",
        help="one table of losses by type, beside f32 and the other program",
        description="Prints the loss that each run came to (mean of the last tenth of its steps), and how far that is "
        "from f32 and from the other program's run of the same type; early: the largest difference in the first 100.",
    )
    for command in (steps, losses):
        command.add_argument("runs", nargs="+", metavar="RUN", help="directory of an experiment, or of a run record")
        command.add_argument("--json", action="store_true", help="print one JSON array with an object for each row")
    commands.add_parser("nsight", help="which call waited for which kernel, from a capture of Nsight Systems")
    figures = commands.add_parser("readme-figures", help="draw analysis/figures from the recorded results")
    figures.add_argument("-o", "--out", type=Path, default=None, metavar="DIR", help="another folder to draw into")
    readme = commands.add_parser("readme", help="compare the README's computed sentences with the recorded results")
    readme.add_argument("--write", action="store_true", help="put the figures of the records there")
    notebooks = commands.add_parser("notebooks", help="execute the notebooks; without --write they stay as they are")
    notebooks.add_argument("--write", action="store_true", help="keep the outputs in the files")
    notebooks.add_argument("files", nargs="*", type=Path, metavar="FILE", help="[all in analysis/notebooks]")
    return top


def run(args: argparse.Namespace) -> None:
    """Runs one command."""
    if args.command == "report":
        from vramlab import report

        report.write(args.runs, args.out)
        print(f"wrote {args.out}")
    elif args.command == "readme":
        from vramlab import quoted

        print(quoted.readme(args.write))
    elif args.command == "steps":
        from vramlab import steps

        print(steps.show(args.runs, as_json=args.json))
    elif args.command == "losses":
        from vramlab import losses

        print(losses.show(args.runs, as_json=args.json))
    elif args.command == "readme-figures":
        from vramlab import readme_figure

        for path in readme_figure.draw(args.out):
            print(f"wrote {path}")
    else:
        from vramlab import execute

        execute.execute(args.files, write=args.write)


def main() -> int:
    """Exit code 0, 2 for bad input with one line that says what is wrong."""
    if sys.argv[1:2] == ["nsight"]:  # a command line of its own
        from vramlab.nsight.__main__ import main as nsight

        return nsight(sys.argv[2:])
    args = parser().parse_args()
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of the libraries, on what a record says
    try:
        run(args)
        sys.stdout.flush()
    except AnalysisError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(
            f"error: the Python package {error.name} is not there; `pip install './analysis[notebooks]'` brings it.",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
