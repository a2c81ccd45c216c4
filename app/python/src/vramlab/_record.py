"""Recordings of PyTorch's allocator, each a file in the form of PyTorch's snapshots.

[`Recording`] is this package's own: it writes each event as it happens, so that a program of any length is recorded
whole. [`History`] is PyTorch's: a ring of the newest events in memory. It takes the place of the other where that
cannot be built. Neither records the frames of frees: gathering them while an exception is unwound through C++ can lose
it, and the program ends with a SystemError (PyTorch's `context="all"`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import io
import os
import pickle
import struct
import sys
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

# Events that PyTorch's ring keeps. With frames an event takes about 1 kB of the host's memory.
EVENTS = 500_000
# What has stack frames: events that allocate, or none. "all" is an older word for the first.
FRAMES = ("alloc", "none")
# Names the recording that is wanted: "own" or "pytorch".
CHOICE = "VRAMLAB_RECORDER"


def check_frames(frames: str) -> str:
    """The word for frames, or an error that lists those that are known."""
    if frames == "all":
        return "alloc"
    if frames not in FRAMES:
        raise ValueError(f"frames={frames!r}: write one of {', '.join(FRAMES)}")
    return frames


class History:
    """PyTorch's own history: a ring of so many events, of which a snapshot is a copy."""

    def __init__(self, events: int = EVENTS, frames: str = "alloc") -> None:
        """Turns it on, where it is not on already. CUDA must be initialised, or be about to be."""
        import torch

        self.was_on = history_is_on()
        if self.was_on:
            return
        context = "alloc" if frames == "alloc" else None
        begin = torch.cuda.memory._record_memory_history
        # Pinned memory of the host, from PyTorch 2.14 on.
        host = "record_pinned_host_memory"
        more = {host: True} if host in inspect.signature(begin).parameters else {}
        begin("all", context=context, stacks="python", max_entries=events, **more)

    def write(self, path: Path, *, last: bool) -> list[Path]:
        """Writes what is held and recorded; after the last time nothing is recorded where nothing was before."""
        import torch

        try:
            write_snapshot(path)
        finally:
            if last and not self.was_on:
                torch.cuda.memory._record_memory_history(None)
        return [path]


def history_is_on() -> bool:
    """Whether PyTorch records; false where this PyTorch does not tell."""
    import torch

    told = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(told()) if told is not None else False


class _File(NamedTuple):
    """What the recorder says of a file: `mark` is where its events stand at the newest copy of the segments."""

    device: int
    events: int
    mark: int
    error: int
    named: int

    def of(self, path: Path) -> Path:
        """The path of this GPU's file, next to the file of the first GPU."""
        return path.with_name(f"{path.stem}.gpu{self.device}{path.suffix}") if self.named else path


class _Recorder:
    """The library of C++, loaded once, and whether it reads frames here."""

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
        layout = _frames.measure()
        self.reads_frames = False
        if layout is not None:
            numbers = (ctypes.c_int64 * len(layout))(*layout)
            known = self.functions.vramlab_recorder_layout(numbers, ctypes.c_size_t(len(layout))) == 0
            self.reads_frames = known and _frames.check(self.functions.vramlab_recorder_stack)

    @classmethod
    def load(cls) -> _Recorder:
        """The library; an error where it cannot be built or does not load."""
        if cls._loaded is None:
            cls._loaded = cls()
        return cls._loaded

    def files(self) -> list[_File]:
        """Those of the recording that is under way, or was last."""
        lines = self.functions.vramlab_recorder_files().decode().splitlines()
        return [_File(*map(int, line.split())) for line in lines]

    def tail(self, device: int) -> bytes:
        """What follows a device's events, up to the keys that PyTorch's snapshot has beside them."""
        size = ctypes.c_size_t()
        address = self.functions.vramlab_recorder_tail(device, ctypes.byref(size))
        return ctypes.string_at(address, size.value)


class Recording:
    """Writes the events of PyTorch's allocator to a file as they happen, whichever allocator that is.

    The file of the first GPU on which memory is asked for has the name that is given, those of others `.gpuN` in it. A
    process has one recording at a time. The host's memory that it takes grows with the number of different stacks,
    up to a million, and not with that of events.
    """

    def __init__(self, path: Path, frames: str = "alloc", frames_from: int = 0) -> None:
        """Records from now on: CUDA is initialised. `frames_from` is the least size of a block that gets frames.

        Raises where the recorder cannot be built, cannot read this Python's frames, or records already.
        """
        if _Recorder.busy:
            raise RuntimeError("this process is recorded already")
        recorder = _Recorder.load()
        if frames == "alloc" and not recorder.reads_frames:
            raise RuntimeError(f"frames of Python {sys.version.split()[0]} cannot be read")
        self.recorder = recorder
        # The program may change its folder.
        self.path = path.absolute()
        stem, ending = (os.fsencode(part) for part in (self.path.with_suffix(""), self.path.suffix))
        functions = recorder.functions
        if functions.vramlab_recorder_begin(stem, ending, frames == "alloc", frames_from) != 0:
            raise RuntimeError(functions.vramlab_recorder_error().decode(errors="replace"))
        _Recorder.busy = True

    def write(self, path: Path, *, last: bool) -> list[Path]:
        """Writes what was recorded so far, whole: `last` completes the file itself, else a copy goes to `path`.

        Returns the files. A copy takes as long as the disk takes for it. Raises OSError where a file could not be
        written, now or before; what could be is there.
        """
        import torch

        functions = self.recorder.functions
        functions.vramlab_recorder_expect_snapshot(int(last))
        try:
            # The recorder takes note of where its files stand when the segments are copied.
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
            # No memory was asked for: an empty snapshot says so.
            write_whole(path, lambda opened: pickle.dump(snapshot, opened, protocol=4))
            out.append(path)
        return out


def _rest(snapshot: dict[str, Any], device: int) -> bytes:
    """The keys of a snapshot that follow on its events, of one device, and its end."""
    out = io.BytesIO()
    for key, value in snapshot.items():
        if key in ("device_traces", "external_annotations"):
            continue
        kept = [segment for segment in value if segment.get("device") == device] if key == "segments" else value
        name = key.encode()
        out.write(b"X" + struct.pack("<I", len(name)) + name)
        piece = io.BytesIO()
        pickler = pickle.Pickler(piece, protocol=2)
        # Without references: numbers of the part that the recorder wrote would be meant.
        pickler.fast = True
        pickler.dump(kept)
        # Neither the word for the protocol nor the end.
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
    """Begins a recording: this package's own, or PyTorch's history where that cannot be had, which a warning says."""
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
    """Writes what PyTorch's allocator holds and recorded; a process that is killed meanwhile leaves no such file."""
    import torch

    snapshot = torch.cuda.memory._snapshot()
    write_whole(Path(path), lambda file: pickle.dump(snapshot, file, protocol=4))


def write_whole(path: Path, fill: Any) -> None:
    """Writes a file beside its place and moves it there when it is complete. Only the user may read it.

    The partial's name ends with the word of the run, by which `vramlab run` knows those that it may remove. It is a new
    file, so no link is followed.
    """
    word = os.environ.get("VRAMLAB_RUN") or os.urandom(8).hex()
    partial = path.with_name(f".{path.name}.{os.getpid()}.{word}.partial")
    try:
        # One of this process from before, where removing it failed.
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
    """Records PyTorch's allocator for a block, in a file that is whole when it ends, also where it ends with an error.

    `frames` says which events have stack frames of Python: "alloc", those that allocate, or "none". `frames_from` is
    the least size of a block that gets them. Where PyTorch's history has to take the recorder's place, `events` is the
    most that are kept. A block in which CUDA is not used leaves no file, and a warning.
    """

    def __init__(self, path: str | Path, *, events: int = EVENTS, frames: str = "alloc", frames_from: int = 0) -> None:
        """Says where the recording goes; nothing is recorded before the block begins."""
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
        # Waits in PyTorch's queue where CUDA was not used yet, and the block may be over by then.
        if not self._over:
            self._process = os.getpid()
            self._recording = begin(self.path, events=self.events, frames=self.frames, frames_from=self.frames_from)

    def __enter__(self) -> record:
        """Begins the recording, or has it begun when CUDA is first used, which it does not do by itself."""
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
        """Completes the file. An error of the block goes on; one of writing does not hide it."""
        self._over = True
        if self._recording is None:
            warnings.warn(f"{self.path} is not written: CUDA was not used", stacklevel=2)
            return
        if self._process != os.getpid():
            # A child after fork() leaves the block, too. The file is its parent's.
            return
        try:
            self._recording.write(self.path, last=True)
        except Exception as failed:
            if error is None:
                raise
            print(f"vramlab: {self.path} is not written: {failed}", file=sys.stderr)
