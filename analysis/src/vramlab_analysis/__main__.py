"""The command line: `vramlab-analysis COMMAND`, or `python -m vramlab_analysis COMMAND`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

from vramlab_analysis.errors import AnalysisError


def parser() -> argparse.ArgumentParser:
    """Commands and their options."""
    top = argparse.ArgumentParser(prog="vramlab-analysis", description="Figures and tables of recorded runs.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    steps = commands.add_parser(
        "steps",
        help="one table of step times by width, type and launch, with PyTorch's best",
        description="Prints the median time of a training step of each kind of run, with the ratio to PyTorch's "
        "fastest mode at the same width, type and weights; below 1 is faster than PyTorch.",
    )
    losses = commands.add_parser(
        "losses",
        help="one table of losses by type, with f32 and the other program",
        description="Prints the final loss of each run (mean of the last tenth of its steps), and its difference to "
        "f32 and to the other program's run of the same type; early: the largest difference in the first 100 steps.",
    )
    for command in (steps, losses):
        command.add_argument("runs", nargs="+", metavar="RUN", help="directory of an experiment, or of a run record")
        command.add_argument("--json", action="store_true", help="print one JSON array with an object for each row")
    figures = commands.add_parser("readme-figures", help="draw analysis/figures from the recorded results")
    figures.add_argument("-o", "--out", type=Path, default=None, metavar="DIR", help="output directory")
    readme = commands.add_parser(
        "readme",
        help="compare the documents with the records, and the README's samples with the programs that are built",
    )
    readme.add_argument("--write", action="store_true", help="update the documents")
    readme.add_argument(
        "--values", metavar="GROUP", help="print the values of a group by their names, and do nothing else"
    )
    notebooks = commands.add_parser("notebooks", help="execute the notebooks, and compare their output with the files")
    notebooks.add_argument("--write", action="store_true", help="update the files")
    notebooks.add_argument("files", nargs="*", type=Path, metavar="FILE", help="[all in analysis/notebooks]")
    return top


def run(args: argparse.Namespace) -> str:
    """Runs one command. Returns its output, which is empty for `notebooks`: it prints each result immediately."""
    if args.command == "readme":
        from vramlab_analysis import documents
        from vramlab_analysis.pages import lookup

        if args.values:
            return "\n".join(f"{args.values}.{name} = {value}" for name, value in lookup.group(args.values).items())
        return documents.readme(args.write)
    if args.command == "steps":
        from vramlab_analysis import steps

        return steps.show(args.runs, as_json=args.json)
    if args.command == "losses":
        from vramlab_analysis import losses

        return losses.show(args.runs, as_json=args.json)
    if args.command == "readme-figures":
        from vramlab_analysis import readme_figure

        return "\n".join(f"wrote {path}" for path in readme_figure.draw(args.out))
    from vramlab_analysis import execute

    execute.execute(args.files, write=args.write)
    return ""


def write(text: str) -> int:
    """Prints the output. Returns the exit code, 1 if it cannot be written."""
    if sys.stdout is None:
        return 0  # the caller closed it
    try:
        if text:
            print(text)
        sys.stdout.flush()
    except OSError as error:
        # Python writes the remainder when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"error: cannot write to stdout: {error.strerror}", file=sys.stderr)
            return 1
    return 0


def main() -> int:
    """Exit code 0, 2 for bad input with one line that names the fault, or 1 if the output cannot be written."""
    args = parser().parse_args()
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of the libraries, about values in a record
    try:
        return write(run(args))
    except AnalysisError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(
            f"error: the package {error.name} is not installed; `pip install './analysis[notebooks]'` installs it.",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:  # of notebooks
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
