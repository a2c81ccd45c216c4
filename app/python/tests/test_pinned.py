"""An allocator of pinned host memory under PyTorch: runs `pinned_programs.py` on a GPU, or without one over a stand-in.

Needs PyTorch with CUDA and a C++ compiler; skipped if one is missing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import vramlab
from with_torch import HERE, SOURCE, compile_beside_torch, python, skip_without_torch

skip_without_torch()
try:
    vramlab.library_path()
except ImportError as missing:
    pytest.skip(str(missing), allow_module_level=True)

_TEXT = (HERE / "pinned_programs.py").read_text()
NAMES, ON_GPU = (re.findall(rf"^@{mark}\ndef (\w+)", _TEXT, re.MULTILINE) for mark in ("program", "needs_gpu"))
ALLOCATORS = ["host-exact", "host-pytorch"]


@pytest.fixture(scope="session")
def variables(torch_variables: dict[str, str]) -> dict[str, str]:
    """The environment of a process with PyTorch and the library."""
    return torch_variables | {"VRAMLAB_LIBRARY": str(vramlab.library_path())}


_OUTPUT: dict[str, dict[str, Any]] = {}


@pytest.mark.parametrize("name", NAMES + ON_GPU)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_program(allocator: str, name: str, variables: dict[str, str]) -> None:
    if name in ON_GPU and "VRAMLAB_SHIM_DEVICE" in variables:
        pytest.skip("needs a GPU")
    # All programs of an allocator run in one process, because importing PyTorch takes longer than they do.
    if allocator not in _OUTPUT:
        done = python(variables, "pinned_programs.py", allocator)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        _OUTPUT[allocator] = {line["name"]: line["failed"] for line in lines}
        assert done.returncode == 0, done.stderr
        assert set(NAMES) <= set(_OUTPUT[allocator])
        # It ends with live blocks.
        assert "vramlab:" not in done.stderr
    failed = _OUTPUT[allocator][name]
    assert failed is None, failed


REFUSED = """
import sys, torch, vramlab, vramlab.torch
try:
    vramlab.torch.use(**dict(part.split("=", 1) for part in sys.argv[1:]))
except vramlab.Error as error:
    print(error)
assert vramlab.torch.host_allocator() is None and vramlab.torch.allocator() is None
try:
    vramlab.torch.host_stats()
except vramlab.Error as error:
    assert "watch_host()" in str(error)
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["host=host-exac"], "did you mean 'host-exact'"),
        (["host=caching"], "caching"),
        (["host=host-exact:keep=1"], "keep_idle"),
        (["host=host-exact", "memory_limit=1G"], "name its allocator"),
    ],
)
def test_a_wrong_name_is_reported_before_anything_is_built(
    arguments: list[str], words: str, variables: dict[str, str]
) -> None:
    done = python(variables, "-c", REFUSED, *arguments, XDG_CACHE_HOME="/no/such/folder")
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


BOTH = """
import torch, vramlab.torch
vramlab.torch.use("caching", host="host-exact", memory_limit="1G")
block = torch.empty(3 << 20, dtype=torch.uint8, pin_memory=True)
torch.empty(1000, device="cuda").copy_(block[:1000].float(), non_blocking=True)
print(vramlab.torch.allocator(), vramlab.torch.host_allocator())
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    torch.empty(1000, device="cuda")
    torch.empty(1000, dtype=torch.uint8, pin_memory=True)
"""


def test_it_serves_beside_an_allocator_of_the_gpu(variables: dict[str, str]) -> None:
    done = python(variables, "-c", BOTH)
    assert (done.returncode, done.stdout) == (0, "caching:memory_limit=1G host-exact\n"), done.stderr


TWICE = """
import ctypes, sys, torch, vramlab.torch
vramlab.torch.use(host="host-exact")
ctypes.CDLL(sys.argv[1]).free_twice(ctypes.c_size_t(3 << 20))
blocks = [torch.empty(3 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
print(len({block.data_ptr() for block in blocks}))
"""


def test_a_second_free_is_reported_and_changes_nothing(variables: dict[str, str], tmp_path: Path) -> None:
    compile_beside_torch(HERE / "twice.cpp", tmp_path / "twice.so", "-ltorch_cpu")
    done = python(variables, "-c", TWICE, str(tmp_path / "twice.so"))
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert re.fullmatch(r"vramlab: no pinned block begins at 0x[0-9a-f]+; it was freed before\n", done.stderr)


WATCHED = """
import json, torch, vramlab.torch
torch.cuda.init()
before = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
vramlab.torch.watch_host()
vramlab.torch.watch_host()
blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in (3 << 20, (5 << 20) + 1)]
for block in [before, *blocks]:
    torch.empty(block.shape, dtype=torch.uint8, device="cuda").copy_(block, non_blocking=True)
addresses = {block.data_ptr() for block in blocks}
del block, blocks, before
torch.cuda.synchronize()
again = torch.empty(3 << 20, dtype=torch.uint8, pin_memory=True)
assert again.data_ptr() in addresses
empty = torch.empty(0, pin_memory=True)
print(json.dumps(vramlab.torch.host_stats()))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    torch.empty(1000, dtype=torch.uint8, pin_memory=True)
graph.reset()
import os
child = os.fork()
if child == 0:
    del again
    raise SystemExit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_requests_of_pytorchs_own_allocator_are_counted(variables: dict[str, str]) -> None:
    done = python(variables, "-c", WATCHED)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    counted, code = done.stdout.splitlines()
    stats = json.loads(counted)
    mib = 1 << 20
    assert stats["allocator"] == "pytorch"
    assert code == "5"
    assert stats["requested_bytes"] == {"current": 3 * mib, "peak": 8 * mib + 1}
    assert stats["requests"] == 3
    # One block of 1 MiB from before.
    assert stats["reserved_bytes"]["current"] == 1 * mib + 4 * mib + 8 * mib


FOLLOWS = """
import json, torch, vramlab.torch
vramlab.torch.use(host="host-pytorch")
torch.empty(1000, dtype=torch.uint8, pin_memory=True)
torch.cuda.init()
stats = vramlab.torch.host_stats()
print(json.dumps([torch.__version__, stats["settings"], stats["reserved_bytes"]["current"]]))
"""


def test_pytorchs_policy_has_the_release_and_the_settings_of_the_program(variables: dict[str, str]) -> None:
    done = python(variables, "-c", FOLLOWS, PYTORCH_CUDA_ALLOC_CONF="pinned_use_background_threads:True")
    assert done.returncode == 0, done.stderr
    version, settings, reserved = json.loads(done.stdout)
    major, minor, _ = version.split(".", 2)
    assert settings["release"] == f"R{major}_{minor}"
    assert settings["pinned_use_background_threads"] is True
    assert reserved == 1024


STARTED = """
import torch
block = torch.empty(3 << 20, dtype=torch.uint8, pin_memory=True)
import sys
print(sys.modules["vramlab.torch"].host_allocator())
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"VRAMLAB_HOST_ALLOC": "host-exact"}, "host-exact"),
        # As `vramlab run --host-alloc` and `--pool pinned` start a program.
        ({"VRAMLAB_INJECT_HOST": "host-exact:keep_idle=on"}, "host-exact:keep_idle=on"),
        ({"VRAMLAB_INJECT_POOL": "managed,pinned"}, "host-exact"),
    ],
)
def test_a_variable_puts_it_under_a_program(given: dict[str, str], expected: str, variables: dict[str, str]) -> None:
    # The hook of `vramlab run`, or of the installed package.
    more = {"PYTHONPATH": f"{SOURCE}/vramlab/_site:{SOURCE}", "VRAMLAB_LIMIT": str(1 << 40)} | given
    done = python(variables, "-c", STARTED, **more)
    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr


def test_a_program_does_not_start_under_another_allocator_than_named(variables: dict[str, str]) -> None:
    more = {"PYTHONPATH": f"{SOURCE}/vramlab/_site:{SOURCE}", "VRAMLAB_HOST_ALLOC": "host-exac"}
    done = python(variables, "-c", STARTED, **more)
    assert (done.returncode, done.stdout) == (2, "")
    assert "host-exac cannot serve PyTorch's pinned memory: " in done.stderr
    assert done.stderr.count("\n") == 1
