"""Recordings of PyTorch's allocator, each a file in the format of PyTorch's snapshots.

[`Recording`] is this package's recorder: it writes each event immediately, so that a program of any length is recorded
completely. [`History`] is PyTorch's: a ring buffer of the newest events, used when the recorder cannot be built.
Neither records the frames of frees: gathering them while an exception is unwound through C++ can lose the exception,
and the program ends with a SystemError (PyTorch's `context="all"`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import io
import json
import os
import pickle
import struct
import sys
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

# The capacity of PyTorch's ring. With frames an event takes about 1 kB of host memory.
EVENTS = 500_000
# The events with stack frames: allocations, or none. "all" is a deprecated synonym of "alloc".
FRAMES = ("alloc", "none")
# Selects the recorder: "own" or "pytorch".
CHOICE = "VRAMLAB_RECORDER"


def check_frames(frames: str) -> str:
    """The value of `frames`; raises an error that lists the known values if it is unknown."""
    if frames == "all":
        return "alloc"
    if frames not in FRAMES:
        raise ValueError(f"frames={frames!r}: write one of {', '.join(FRAMES)}")
    return frames


class History:
    """PyTorch's own history: a ring of `events` events; a snapshot is a copy of it."""

    def __init__(self, events: int = EVENTS, frames: str = "alloc") -> None:
        """Turns the history on if it is off. CUDA must be initialised, or be about to be."""
        import torch

        self.was_on = history_is_on()
        if self.was_on:
            return
        context = "alloc" if frames == "alloc" else None
        begin = torch.cuda.memory._record_memory_history
        # Pinned host memory, from PyTorch 2.14 on.
        host = "record_pinned_host_memory"
        more = {host: True} if host in inspect.signature(begin).parameters else {}
        begin("all", context=context, stacks="python", max_entries=events, **more)

    def write(self, path: Path, *, last: bool) -> list[Path]:
        """Writes the segments and events; after the last write the history is off again if it was off before."""
        import torch

        try:
            write_snapshot(path)
        finally:
            if last and not self.was_on:
                torch.cuda.memory._record_memory_history(None)
        return [path]


def history_is_on() -> bool:
    """True if PyTorch records; False if this PyTorch does not report it."""
    import torch

    told = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(told()) if told is not None else False


class _File(NamedTuple):
    """The recorder's description of a file: `mark` is the position of its events at the newest copy of the segments."""

    device: int
    events: int
    mark: int
    error: int
    named: int

    def of(self, path: Path) -> Path:
        """The path of this GPU's file, next to the file of the first GPU."""
        return path.with_name(f"{path.stem}.gpu{self.device}{path.suffix}") if self.named else path


class _Recorder:
    """The C++ library, loaded once, and whether it reads frames here."""

    _loaded: _Recorder | None = None
    busy = False

    def __init__(self) -> None:
        from vramlab import _build, _frames

        file = _build.recorder(_build.Torch.installed())
        self.functions = ctypes.CDLL(str(file))
        for name in ("error", "stack", "files"):
            getattr(self.functions, f"vramlab_recorder_{name}").restype = ctypes.c_char_p
        self.functions.vramlab_recorder_tail.restype = ctypes.c_void_p
        begin = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint64]
        self.functions.vramlab_recorder_begin.argtypes = begin
        self.functions.vramlab_recorder_pinned.restype = ctypes.c_uint64
        self.functions.vramlab_recorder_pinned_listener.restype = ctypes.c_void_p
        log = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint64]
        self.functions.vramlab_recorder_log_pinned.argtypes = log
        layout = _frames.measure()
        self.reads_frames = False
        if layout is not None:
            numbers = (ctypes.c_int64 * len(layout))(*layout)
            known = self.functions.vramlab_recorder_layout(numbers, ctypes.c_size_t(len(layout))) == 0
            self.reads_frames = known and _frames.check(self.functions.vramlab_recorder_stack)

    @classmethod
    def load(cls) -> _Recorder:
        """The library; raises an error if it cannot be built or loaded."""
        if cls._loaded is None:
            cls._loaded = cls()
        return cls._loaded

    def files(self) -> list[_File]:
        """The files of the current or the last recording."""
        lines = self.functions.vramlab_recorder_files().decode().splitlines()
        return [_File(*map(int, line.split())) for line in lines]

    def tail(self, device: int) -> bytes:
        """The end of a device's event list, up to the remaining keys of PyTorch's snapshot."""
        size = ctypes.c_size_t()
        address = self.functions.vramlab_recorder_tail(device, ctypes.byref(size))
        return ctypes.string_at(address, size.value)


class Recording:
    """Writes the events of PyTorch's allocator, whichever it is, to a file as they happen.

    The file of the first GPU on which memory is requested has the given name; other GPUs' file names contain
    `.gpuN`. A process has one recording at a time. The recorder's host memory grows with the number of different
    stacks, up to a million, but not with the number of events.
    """

    def __init__(self, path: Path, frames: str = "alloc", frames_from: int = 0) -> None:
        """Starts recording and initialises CUDA. `frames_from` is the minimum size of a block with frames.

        Raises if the recorder cannot be built, cannot read this Python's frames, or is already recording.
        """
        if _Recorder.busy:
            raise RuntimeError("this process is recorded already")
        recorder = _Recorder.load()
        if frames == "alloc" and not recorder.reads_frames:
            raise RuntimeError(f"frames of Python {sys.version.split()[0]} cannot be read")
        self.recorder = recorder
        # The program may change its working directory.
        self.path = path.absolute()
        stem, ending = (os.fsencode(part) for part in (self.path.with_suffix(""), self.path.suffix))
        functions = recorder.functions
        if functions.vramlab_recorder_begin(stem, ending, frames == "alloc", frames_from) != 0:
            raise RuntimeError(functions.vramlab_recorder_error().decode(errors="replace"))
        self.frames, self.frames_from = frames == "alloc", frames_from
        _Recorder.busy = True

    def _check(self, failed: int) -> None:
        if failed != 0:
            raise RuntimeError(self.recorder.functions.vramlab_recorder_error().decode(errors="replace"))

    def watch_pinned(self, path: Path, *, served: bool) -> None:
        """Writes the requests of pinned host memory to a file from now on, and counts them.

        The file is made at the first request. `served`: VramLab's allocator serves them, and not PyTorch's own.
        """
        from vramlab import _pinned

        functions = self.recorder.functions
        settings, has_segments = _pinned.recorded_settings()
        text = json.dumps(settings).encode()
        name = os.fsencode(path.absolute())
        self._check(
            functions.vramlab_recorder_log_pinned(name, text, int(has_segments), int(self.frames), self.frames_from)
        )
        if served:
            _pinned.listen(functions.vramlab_recorder_pinned_listener())
        else:
            self._check(functions.vramlab_recorder_watch_pinned())

    def has_pinned(self) -> bool:
        """Whether there was a request of pinned memory."""
        return bool(self.recorder.functions.vramlab_recorder_has_pinned_log())

    def pinned(self) -> int:
        """The most bytes of it that the program held at once, before rounding."""
        return int(self.recorder.functions.vramlab_recorder_pinned())

    def write(self, path: Path, *, last: bool) -> list[Path]:
        """Writes a complete recording so far: `last` completes the file itself, else a copy is written to `path`.

        Returns the files. The time of a copy is the disk's. Raises OSError if a file could not be written, now or
        before; the other files exist.
        """
        import torch

        functions = self.recorder.functions
        functions.vramlab_recorder_expect_snapshot(int(last))
        try:
            # The recorder marks the position in its files when the segments are copied.
            snapshot = torch.cuda.memory._snapshot()
        finally:
            if last:
                functions.vramlab_recorder_end()
                _Recorder.busy = False
        out = []
        files = self.recorder.files()
        for file in files:
            source, to = file.of(self.path), file.of(path)
            if file.error:
                raise OSError(file.error, os.strerror(file.error), str(source))
            rest = self.recorder.tail(file.device) + _rest(snapshot, file.device)
            if last:
                _complete(source, file.mark, rest)
                out.append(source)
            else:
                write_whole(to, functools.partial(_copy, source, file.mark, rest))
                out.append(to)
        if not files:
            # No memory was requested: write an empty snapshot.
            write_whole(path, lambda opened: pickle.dump(snapshot, opened, protocol=4))
            out.append(path)
        return out


def _rest(snapshot: dict[str, Any], device: int) -> bytes:
    """The keys of a device's snapshot that follow its events, and the end of the pickle."""
    out = io.BytesIO()
    for key, value in snapshot.items():
        if key in ("device_traces", "external_annotations"):
            continue
        kept = [segment for segment in value if segment.get("device") == device] if key == "segments" else value
        name = key.encode()
        out.write(b"X" + struct.pack("<I", len(name)) + name)
        piece = io.BytesIO()
        pickler = pickle.Pickler(piece, protocol=2)
        # Without references: their numbers would refer to the part that the recorder wrote.
        pickler.fast = True
        pickler.dump(kept)
        # Without the protocol header and the end.
        out.write(piece.getvalue()[2:-1])
    return out.getvalue() + b"u."


def _complete(path: Path, mark: int, rest: bytes) -> None:
    with open(path, "r+b") as opened:
        opened.truncate(mark)
        opened.seek(mark)
        opened.write(rest)


def _copy(path: Path, mark: int, rest: bytes, to: Any) -> None:
    with open(path, "rb") as opened:
        left = mark
        while left > 0 and (piece := opened.read(min(left, 1 << 22))):
            to.write(piece)
            left -= len(piece)
    to.write(rest)


def begin(path: Path, *, events: int = EVENTS, frames: str = "alloc", frames_from: int = 0) -> Recording | History:
    """Starts a recording: this package's recorder or, with a warning, PyTorch's history if that is unavailable."""
    from vramlab._library import Error

    choice = os.environ.get(CHOICE, "")
    if choice != "pytorch":
        try:
            return Recording(path, frames, frames_from)
        except (Error, OSError, RuntimeError, AttributeError) as error:
            if choice == "own":
                raise
            why = str(error).splitlines()[0]
            text = f"vramlab: PyTorch's history of the newest {events} events takes the place of the recorder: {why}"
            print(text, file=sys.stderr, flush=True)
    return History(events, frames)


def write_snapshot(path: str | Path) -> None:
    """Writes the allocator's segments and events; a process that is killed meanwhile leaves no such file."""
    import torch

    snapshot = torch.cuda.memory._snapshot()
    write_whole(Path(path), lambda file: pickle.dump(snapshot, file, protocol=4))


def write_whole(path: Path, fill: Any) -> None:
    """Writes a temporary file next to the target and moves it there when complete. Only the user may read it.

    The temporary name ends with the run's word, by which `vramlab run` identifies the files that it may remove. The
    file is new, so links are not followed.
    """
    word = os.environ.get("VRAMLAB_RUN") or os.urandom(8).hex()
    partial = path.with_name(f".{path.name}.{os.getpid()}.{word}.partial")
    try:
        # An earlier temporary file of this process that could not be removed.
        partial.unlink(missing_ok=True)
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        with open(file, "wb") as opened:
            fill(opened)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


class record:
    """Records PyTorch's allocator for a block, in a file that is complete when the block ends, even with an error.

    `frames` selects the events with Python stack frames: "alloc", the allocations, or "none". `frames_from` is the
    minimum size of a block with frames. `events` is the maximum number of events when PyTorch's history replaces the
    recorder. A block that does not use CUDA leaves a warning and no file.
    """

    def __init__(self, path: str | Path, *, events: int = EVENTS, frames: str = "alloc", frames_from: int = 0) -> None:
        """Sets the file of the recording, which starts with the block."""
        if events < 1:
            raise ValueError(f"events={events}: write 1 or more")
        self.path = Path(path)
        self.events = events
        self.frames = check_frames(frames)
        self.frames_from = frames_from
        self._recording: Recording | History | None = None
        self._process = 0
        self._over = False

    def _begin(self) -> None:
        # PyTorch queues this call until CUDA is first used; the block may have ended by then.
        if not self._over:
            self._process = os.getpid()
            self._recording = begin(self.path, events=self.events, frames=self.frames, frames_from=self.frames_from)

    def __enter__(self) -> record:
        """Starts the recording, or schedules it for the first use of CUDA, without initialising CUDA."""
        import torch

        # Report an unwritable path before the work, not after it.
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
        """Completes the file. An error of the block propagates; a write error does not hide it."""
        self._over = True
        if self._recording is None:
            warnings.warn(f"{self.path} is not written: CUDA was not used", stacklevel=2)
            return
        if self._process != os.getpid():
            # A child after fork() leaves the block too; the file is its parent's.
            return
        try:
            self._recording.write(self.path, last=True)
        except Exception as failed:
            if error is None:
                raise
            print(f"vramlab: {self.path} is not written: {failed}", file=sys.stderr)
