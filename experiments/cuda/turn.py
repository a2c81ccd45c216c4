"""One program of a round uses the GPU at a time; the next ones import their packages meanwhile."""

import fcntl
import os


def turn():
    """Waits until no other program of the round measures. The turn ends with the process."""
    global _file
    # The lock lasts as long as the process.
    _file = open(os.environ["TURN"], "w") if "TURN" in os.environ else None  # noqa: SIM115
    if _file:
        fcntl.flock(_file, fcntl.LOCK_EX)
