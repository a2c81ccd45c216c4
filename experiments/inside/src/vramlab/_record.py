"""Recording PyTorch's allocator: the history is turned on, and snapshots are written whole or not at all."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import sys
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

# Events that a ring keeps. With frames an event takes about 1 kB of the host's memory.
EVENTS = 500_000
# What has stack frames: all events, those that allocate, none.
FRAMES = ("all", "alloc", "none")


def start_history(events: int = EVENTS, frames: str = "all") -> None:
    """Turns PyTorch's history on, as a ring of so many events. CUDA must be initialised, or be about to be.

    A frame of Python costs some ten nanoseconds an event, frames of C++ far more, so these are left out.
    """
    import torch

    if frames not in FRAMES:
        raise ValueError(f"frames={frames!r}: write one of {', '.join(FRAMES)}")
    context = None if frames == "none" else frames
    begin = torch.cuda.memory._record_memory_history
    # Pinned memory of the host, from PyTorch 2.14 on.
    host = "record_pinned_host_memory"
    more = {host: True} if host in inspect.signature(begin).parameters else {}
    begin("all", context=context, stacks="python", max_entries=events, **more)


def history_is_on() -> bool:
    """Whether PyTorch records; false where this PyTorch does not tell."""
    import torch

    told = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(told()) if told is not None else False


def write_snapshot(path: str | Path) -> None:
    """Writes what PyTorch's allocator holds and recorded; a process that is killed meanwhile leaves no such file."""
    import torch

    snapshot = torch.cuda.memory._snapshot()
    write_whole(Path(path), lambda file: pickle.dump(snapshot, file, protocol=4))


def write_whole(path: Path, fill: Any) -> None:
    """Writes a file beside its place and moves it there when it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            fill(file)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


class record:
    """Records PyTorch's allocator for a block, and writes a snapshot when it ends, also where it ends with an error.

    `events` is the most that are kept: older ones are dropped. `frames` says which events have stack frames: "all",
    "alloc" or "none". A history that was on before goes on after the block; one that the block turned on ends with it.
    A block in which CUDA is not used leaves no file, and a warning.
    """

    def __init__(self, path: str | Path, *, events: int = EVENTS, frames: str = "all") -> None:
        """Says where the snapshot goes; nothing is recorded before the block begins."""
        if frames not in FRAMES:
            raise ValueError(f"frames={frames!r}: write one of {', '.join(FRAMES)}")
        if events < 1:
            raise ValueError(f"events={events}: write 1 or more")
        self.path = Path(path)
        self.events = events
        self.frames = frames
        self._mine = False
        self._over = False

    def _begin(self) -> None:
        # Waits in PyTorch's queue where CUDA was not used yet, and the block may be over by then.
        if not self._over and not history_is_on():
            start_history(self.events, self.frames)
            self._mine = True

    def __enter__(self) -> record:
        """Turns the history on, or has it turned on when CUDA is first used, which it does not do by itself."""
        import torch

        # What cannot be written is said before the work, not after it.
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"{self.path}: there is no folder {self.path.parent}")
        if torch.cuda.is_initialized():
            self._begin()
        else:
            torch.cuda._lazy_call(self._begin)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Writes the snapshot. An error of the block goes on; one of writing does not hide it."""
        import torch

        self._over = True
        if not torch.cuda.is_initialized():
            warnings.warn(f"{self.path} is not written: CUDA was not used", stacklevel=2)
            return
        try:
            write_snapshot(self.path)
        except Exception as failed:
            if error is None:
                raise
            print(f"vramlab: {self.path} is not written: {failed}", file=sys.stderr)
        finally:
            if self._mine:
                torch.cuda.memory._record_memory_history(None)
