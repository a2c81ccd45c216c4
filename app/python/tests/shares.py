"""Sends tensors to another process. usage: shares.py SENDER RECEIVER START [refuse]

SENDER and RECEIVER are allocators. START is the start method of the receiver: `spawn`, or `fork` for two children of a
process that does not use CUDA. With `refuse` the receiver may not copy descriptors, as in most containers.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import torch
import torch.multiprocessing as mp
import vramlab.torch

# True if there is a GPU with readable memory and kernels.
REAL = "VRAMLAB_SHIM_DEVICE" not in os.environ
KIB = 1 << 10
MIB = 1 << 20
# Several in one page, one in several pages, and one that starts in the middle of a page.
SIZES = [4 * KIB, 8 * KIB, 3 * MIB, 64 * KIB, 50 * MIB]
PATIENCE = 120


def refuse_pidfd_getfd() -> None:
    """Makes the call fail with EPERM from now on (seccomp)."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Load the call's number; 438: return the error; others: allow.
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 438), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    code = b"".join(step[0].to_bytes(2, "little") + bytes(step[1:3]) + step[3].to_bytes(4, "little") for step in steps)
    kept = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]

    program = Program(len(steps), ctypes.addressof(kept))
    for arguments in ((38, 1, 0, 0, 0), (22, 2, ctypes.byref(program), 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def receive(allocator: str, refuses: bool, inbox: Any, outbox: Any) -> None:
    """Returns each tensor's offset from the first one, and keeps all tensors until the sender stops."""
    if refuses:
        refuse_pidfd_getfd()
    vramlab.torch.use(allocator)
    torch.cuda.init()
    try:
        tensors = list(iter(lambda: inbox.get(timeout=PATIENCE), None))
        outbox.put([(tensor.data_ptr(), tensor.numel(), first_and_last(tensor)) for tensor in tensors])
        assert inbox.get(timeout=PATIENCE) == "written"
        assert not REAL or all(first_and_last(tensor) == (200, 200) for tensor in tensors)
        addresses = [tensor.data_ptr() for tensor in tensors]
        del tensors
        assert_closed(addresses)
        outbox.put("closed")
    except BaseException as error:
        outbox.put(str(error))
        raise


def first_and_last(tensor: torch.Tensor) -> tuple[int, int] | None:
    return (int(tensor[0]), int(tensor[-1])) if REAL else None


def assert_closed(addresses: list[int]) -> None:
    """Asserts that the memory is unmapped with its last tensor: no page before a tensor is the start of a mapping."""
    close = ctypes.CDLL(os.environ["VRAMLAB_LIBRARY"]).vramlab_import_close
    close.argtypes = [ctypes.c_uint64]
    foreign = 5
    for address in addresses:
        page = address - address % (2 * MIB)
        assert all(close(page - back * 2 * MIB) == foreign for back in range(16))


def send(allocator: str, inbox: Any, outbox: Any) -> None:
    """Sends tensors of all sizes, each twice."""
    vramlab.torch.use(allocator)
    tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in SIZES]
    for number, tensor in enumerate(tensors):
        if REAL:
            tensor.fill_(number)
        inbox.put(tensor)
        inbox.put(tensor[1024:])
    inbox.put(None)
    got = outbox.get(timeout=PATIENCE)
    if isinstance(got, str):
        raise SystemExit(got)
    for number, tensor in enumerate(tensors):
        whole, part = got[2 * number : 2 * number + 2]
        assert whole[1] == tensor.numel()
        assert part[:2] == (whole[0] + 1024, tensor.numel() - 1024), "one mapping for both"
        assert not REAL or whole[2] == part[2] == (number, number)
        if REAL:
            tensor.fill_(200)
    # Tensors in one page keep their distance.
    assert got[2][0] - got[0][0] == tensors[1].data_ptr() - tensors[0].data_ptr()
    torch.cuda.synchronize()
    inbox.put("written")
    answer = outbox.get(timeout=PATIENCE)
    assert answer == "closed", answer


def main() -> None:
    sender, receiver, start = sys.argv[1:4]
    refuses = "refuse" in sys.argv
    context = mp.get_context(start)
    inbox, outbox = context.Queue(), context.Queue()
    other = context.Process(target=receive, args=(receiver, refuses, inbox, outbox))
    other.start()
    try:
        if start == "spawn":
            send(sender, inbox, outbox)
        else:
            first = context.Process(target=send, args=(sender, inbox, outbox))
            first.start()
            first.join(2 * PATIENCE)
            assert first.exitcode == 0, first.exitcode
        other.join(PATIENCE)
        assert other.exitcode == 0, other.exitcode
    finally:
        if other.is_alive():
            other.kill()
    print("shared", os.getpid() > 0)


if __name__ == "__main__":
    main()
