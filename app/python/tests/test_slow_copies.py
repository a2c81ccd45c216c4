"""Pinned memory is not used again while copies from it run: the library over a driver whose copies read late.

The driver is the stand-in of the tests of `app/inject`: a copy reads when its work is done, and those that find other
bytes than there were when they were queued are counted. PyTorch is not needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import vramlab
from with_torch import SOURCE

try:
    vramlab.library_path()
except ImportError as missing:
    pytest.skip(str(missing), allow_module_level=True)
COMPILER = os.environ.get("CC") or shutil.which("cc")
if COMPILER is None:
    pytest.skip("no C compiler", allow_module_level=True)

DRIVER = Path(__file__).resolve().parents[2] / "inject" / "tests" / "c" / "driver.c"

COPIES = """
import ctypes, sys, vramlab
name, records = sys.argv[1], sys.argv[2] == "recorded"
driver = ctypes.CDLL("libcuda.so.1")
driver.driver_count.restype = ctypes.c_long
allocator = vramlab.Allocator(name, device="host:cuda:0")
context, streams = ctypes.c_size_t(), []
for gpu in (0, 1):
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu) == 0
    assert driver.cuCtxSetCurrent(context) == 0
    stream = ctypes.c_size_t()
    assert driver.cuStreamCreate(ctypes.byref(stream), 1) == 0
    streams.append((gpu, stream.value))
sizes = [3 << 20, 1000, 5 << 20, 70_000]
addresses = set()
for number in range(200):
    size = sizes[number * 7 % len(sizes)]
    block = allocator.alloc(size)
    addresses.add(block)
    ctypes.memset(block, number % 251, size)
    gpu, stream = streams[number % 2]
    target, source = ctypes.c_uint64(0x700000000000), ctypes.c_void_p(block)
    assert driver.cuMemcpyHtoDAsync_v2(target, source, ctypes.c_size_t(size), ctypes.c_size_t(stream)) == 0
    if records:
        allocator.record_stream(block, stream, gpu)
    allocator.free(block)
    # PyTorch's policy waits for nothing, also when no more can be pinned.
    if number % 20 == 19:
        assert driver.cuCtxSynchronize() == 0
stats = allocator.stats()
allocator.trim()
assert driver.cuCtxSynchronize() == 0
print(driver.driver_count(b"early"), len(addresses), stats["allocation.all.current"])
allocator.close()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in for CUDA's driver."""
    folder = tmp_path_factory.mktemp("driver")
    command = [*str(COMPILER).split(), "-O1", "-w", "-fPIC", "-shared", "-pthread", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, str(DRIVER), "-o", str(folder / "libcuda.so.1"), "-ldl"], check=True)
    # Both names are of one driver.
    (folder / "libcuda.so").symlink_to("libcuda.so.1")
    return folder


def copies(folder: Path, allocator: str, records: str, work: int) -> tuple[int, int]:
    """Copies that found other bytes, and the number of addresses that blocks had."""
    variables = os.environ | {
        "PYTHONPATH": str(SOURCE),
        "VRAMLAB_LIBRARY": str(vramlab.library_path()),
        "LD_LIBRARY_PATH": str(folder),
        "DRIVER_WORK": str(work),
        "DRIVER_HOST": "512",
    }
    command = [sys.executable, "-c", COPIES, allocator, records]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    early, addresses, live = map(int, done.stdout.split())
    assert live == 0
    return early, addresses


@pytest.mark.parametrize("work", [1, 7, 40])
@pytest.mark.parametrize("allocator", ["host-exact", "host-pytorch", "host-cupy", "host-rmm-pool:initial_pool_size=1M"])
def test_a_block_is_not_used_again_before_its_copies_have_read_it(folder: Path, allocator: str, work: int) -> None:
    early, addresses = copies(folder, allocator, "recorded", work)
    assert early == 0
    # And it is used again.
    assert addresses < 200


def test_copies_that_nobody_announced_read_other_bytes(folder: Path) -> None:
    early, _ = copies(folder, "host-exact", "silent", 7)
    assert early > 0
