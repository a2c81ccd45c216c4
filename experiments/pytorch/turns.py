"""Makes processes that are ready take turns, so that other load on the machine affects all of them equally."""

import contextlib
import random
import socket
import time

# Number of floats in a tensor.
WORDS = (1000, 1_000_000)
ROUNDS = 20
# Seconds until all processes must have connected.
PATIENCE = 120


class Turns:
    """A socket at which processes wait for their turns."""

    def __init__(self, path):
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen(64)
        self.server.settimeout(0.2)
        self.files = {}

    def gather(self, runs, ended):
        """Waits until each run, by its number, has connected and is ready, or has `ended`."""
        waiting, until = dict(runs), time.monotonic() + PATIENCE
        while waiting and time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                connection, _ = self.server.accept()
                connection.settimeout(PATIENCE)
                file = connection.makefile("rw", encoding="ascii")
                # A process that has died since sends nothing.
                if number := file.readline():
                    self.files[int(number)] = file
                    waiting.pop(int(number), None)
            waiting = {number: run for number, run in waiting.items() if not ended(run)}

    def take(self, key):
        """Gives each process its turns: rounds with one turn per process and size, in a new random order."""
        drawn = random.Random(key)
        for _ in range(ROUNDS):
            for words in WORDS:
                order = sorted(self.files)
                drawn.shuffle(order)
                for number in order:
                    if not self._turn(self.files[number], words):
                        del self.files[number]

    @staticmethod
    def _turn(file, words):
        """True if a process had its turn, False if it died."""
        with contextlib.suppress(OSError):
            file.write(f"{words}\n")
            file.flush()
            return file.readline() != ""
        return False

    def close(self):
        """Ends the turns; the processes write their measurements."""
        for file in self.files.values():
            with contextlib.suppress(OSError):
                file.close()
        self.server.close()


def answered(path, number):
    """In a process: yields the number of floats at each turn, which lasts until the next one is requested."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw", encoding="ascii") as file:
            file.write(f"{number}\n")
            file.flush()
            for line in file:
                yield int(line)
                file.write("done\n")
                file.flush()
