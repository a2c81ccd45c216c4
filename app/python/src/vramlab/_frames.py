"""The memory layout of CPython's frames, measured in the running interpreter.

The recorder (`recorder/frames.h`) reads frames without calling Python. The layout differs between versions, so no
offset is written down: each is found by searching for a value that Python itself reports, such as the address of the
running frame's code object. `measure` returns None unless every value is found exactly once, and `check` compares the
recorder's result with Python's own.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple

# The size of an object's head: reference count and type. The next fields are common to all strings or frames.
_AFTER_HEAD = 16
# The number of words to search in a frame and in a thread's state; both are longer in every version.
_FRAME_WORDS = 9
_STATE_WORDS = 24
# Candidate positions of the kind and flags in a string's state.
_SHIFTS = (2, 16)


class Layout(NamedTuple):
    """Offsets in bytes, in the recorder's order.

    `entry_code` is an address: the code that Python 3.12 gives to frames that represent calls from C; else 0.
    """

    thread_frame: int
    holder_frame: int
    frame_code: int
    frame_previous: int
    frame_instruction: int
    entry_code: int
    code_filename: int
    code_name: int
    code_first_line: int
    code_instructions: int
    text_length: int
    text_state: int
    text_ascii_bit: int
    text_kind_shift: int
    text_ascii_data: int
    text_other_data: int


class _UnknownError(Exception):
    """This interpreter stores a value at an unexpected offset."""


def measure() -> Layout | None:
    """The layout of this interpreter; None unless it is a standard CPython 3.11 or newer with the GIL."""
    plain = sys.implementation.name == "cpython" and sys.maxsize > 1 << 32 and sys.byteorder == "little"
    if not plain or sys.version_info < (3, 11) or hasattr(sys, "gettotalrefcount"):
        return None
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    try:
        return Layout(*_frames(), *_code(), *_texts())
    except _UnknownError:
        return None


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def _only(places: list[int]) -> int:
    if len(places) != 1:
        raise _UnknownError
    return places[0]


def _inner(frame: FrameType) -> int:
    """The address of the interpreter's frame of a frame object: it follows the head and the caller."""
    return _words(id(frame), 4)[3]


def _frames() -> tuple[int, int, int, int, int, int]:
    """Offsets in the thread's state and in a frame."""

    def called() -> tuple[int, int, int, int, int, int]:
        frame = sys._getframe()
        assert frame.f_back is not None
        inner, outer = _inner(frame), _inner(frame.f_back)
        code, size = id(frame.f_code), sys.getsizeof(frame.f_code)
        words = _words(inner, _FRAME_WORDS)
        state: Any = ctypes.pythonapi.PyGILState_GetThisThreadState
        state.restype = ctypes.c_void_p
        of_code = _only([at for at, word in enumerate(words) if word & ~7 == code])
        of_caller = _only([at for at, word in enumerate(words) if word == outer])
        # The only other address inside the code object.
        of_instruction = _only([at for at, word in enumerate(words) if code < word < code + size and at != of_code])
        # Read here, because a Python helper function would itself be the current frame.
        of_thread = list((ctypes.c_uint64 * _STATE_WORDS).from_address(state()))
        if sys.version_info < (3, 13):
            # prev, next, interp and eight numbers precede the address of the current frame's holder.
            at = 7
            holder = list((ctypes.c_uint64 * 2).from_address(of_thread[at]))
            held = 8 * _only([at for at, word in enumerate(holder) if word == inner])
        else:
            at, held = _only([at for at, word in enumerate(of_thread) if word == inner]), -1
        # The chain ends with such a frame if C made the first call to Python.
        outermost = inner
        while caller := _words(outermost, of_caller + 1)[of_caller]:
            outermost = caller
        entry = _words(outermost, of_code + 1)[of_code] if sys.version_info[:2] == (3, 12) else 0
        return 8 * at, held, 8 * of_code, 8 * of_caller, 8 * of_instruction, entry

    return called()


def _code() -> tuple[int, int, int, int]:
    """Offsets in a code object."""

    class Scope:
        def method(self) -> CodeType:
            # Its qualified name is a different object from its name.
            return sys._getframe().f_code

    line = 0x5EED1234
    code = Scope().method().replace(co_firstlineno=line)
    raw = ctypes.string_at(id(code), sys.getsizeof(code))
    words = struct.unpack(f"<{len(raw) // 8}Q", raw[: len(raw) // 8 * 8])
    adaptive = getattr(code, "_co_code_adaptive", None)
    if adaptive is None:
        raise _UnknownError
    return (
        8 * _only([at for at, word in enumerate(words) if word == id(code.co_filename)]),
        8 * _only([at for at, word in enumerate(words) if word == id(code.co_name)]),
        _find(raw, struct.pack("<i", line)),
        _find(raw, adaptive),
    )


def _find(raw: bytes, wanted: bytes) -> int:
    at = raw.find(wanted)
    if at < 0 or raw.find(wanted, at + 1) >= 0:
        raise _UnknownError
    return at


def _texts() -> tuple[int, int, int, int, int, int]:
    """Offsets in a string; the strings are made here, because the interpreter shares some strings."""
    count = 29
    ascii_, latin, wider = ("".join([letter] * count) for letter in ("a", "\xe9", "\u0416"))

    def raw(text: str) -> bytes:
        return ctypes.string_at(id(text), sys.getsizeof(text))

    state = _AFTER_HEAD + 16
    states = [struct.unpack_from("<I", raw(text), state)[0] for text in (ascii_, latin, wider)]
    if struct.unpack_from("<q", raw(ascii_), _AFTER_HEAD)[0] != count:
        raise _UnknownError
    # Bytes per character, the compact flag, the ASCII flag; the flags for shared strings precede them.
    bits = [[number >> shift & 31 for number in states] for shift in _SHIFTS]
    shift = _SHIFTS[_only([at for at, each in enumerate(bits) if each == [0b11001, 0b01001, 0b01010]])]
    data = raw(ascii_).find(ascii_.encode())
    other = raw(latin).find(latin.encode("latin-1"))
    if min(data, other) < 0 or raw(wider).find(wider.encode("utf-16-le")) != other:
        raise _UnknownError
    return _AFTER_HEAD, state, 16 << shift, shift, data, other


def check(stack: Any) -> bool:
    """True if the recorder, called by `stack`, reads the same frames of this thread as Python."""
    names: dict[str, Any] = {}
    # A non-ASCII function and file name, in a generator, below a call from C.
    source = "def été(stack):\n    yield stack(), sys._getframe()\n"
    exec(compile(source, "\u0416/\U0001f4be.py", "exec"), {"sys": sys}, names)
    text, frame = next(map(next, [names["été"](stack)]))
    seen = [tuple(line.split("\t", 2)) for line in text.decode().splitlines()]
    expected: list[tuple[str, str, str]] = []
    while frame is not None:
        line = "2" if not expected else str(frame.f_lineno)
        expected.append((line, frame.f_code.co_name, frame.f_code.co_filename))
        frame = frame.f_back
    # The intermediate frames have moved to other lines: compare their functions and files only.
    return len(seen) >= 3 and seen[0] == expected[0] and _outer(seen) == _outer(_now())


def _outer(frames: list[Any]) -> list[Any]:
    """The callers of `check`, whose lines have not changed."""
    return frames[[name for _, name, _ in frames].index("check") + 1 :]


def _now() -> list[tuple[str, str, str]]:
    out = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        out.append((str(frame.f_lineno), frame.f_code.co_name, frame.f_code.co_filename))
        frame = frame.f_back
    return out
