"""Command lines of the programs here, with the standard library only: bad input is one line and exit code 2."""

import argparse
import sys


class BadInput(Exception):
    """The fault in the input and its fix, in one line."""


class Failed(Exception):
    """The reason why a program ended early, in one line."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are `BadInput`."""

    def error(self, message):
        raise BadInput(f"{message}; see --help")


def positive(word):
    """A whole number of at least 1."""
    if not word.isdigit() or int(word) == 0:
        raise argparse.ArgumentTypeError(f"'{word}': must be a whole number of at least 1")
    return int(word)


def record_code(arguments, run):
    """Records according to the options; returns the exit code, and prints the reason for a bad one in one line."""
    try:
        options = arguments()
        options.output.mkdir(parents=True, exist_ok=True)
        return run(options)
    except BadInput as error:
        code, reason = 2, error
    except OSError as error:
        code, reason = 2, f"cannot write to {options.output}: {error.strerror}; choose another folder with -o"
    except KeyboardInterrupt:
        code, reason = 130, "interrupted"
    except (Failed, ImportError, RuntimeError) as error:
        code, reason = 1, str(error).splitlines()[0]
    print(f"error: {reason}", file=sys.stderr)
    return code
