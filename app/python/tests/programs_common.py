"""What the programs of `programs.py` have in common."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

ALLOCATOR = sys.argv[1]
MIB = 1 << 20
PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(run: Callable[[], Any]) -> Callable[[], Any]:
    """Registers a program for the command line."""
    PROGRAMS[run.__name__] = run
    return run


def held(size: int) -> torch.Tensor:
    return torch.empty(size, device="cuda", dtype=torch.uint8)


def allocate_on_threads() -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.device(number % torch.cuda.device_count()), torch.cuda.stream(torch.cuda.Stream()):
                kept: list[torch.Tensor] = []
                for step in range(300):
                    kept.append(held(step * 7919 % 300_000 + 1))
                    if len(kept) > 20:
                        kept.pop(step * 31 % 20)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
