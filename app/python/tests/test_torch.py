"""The allocators under PyTorch: runs `programs.py` on a GPU, or without one over a stand-in for CUDA's runtime.

Needs PyTorch with CUDA and a C++ compiler; skipped if one is missing. Without a GPU the shim opens the library's
simulated devices.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import vramlab
from with_torch import HERE, python, skip_without_torch

skip_without_torch()
try:
    vramlab.library_path()
except ImportError as missing:
    pytest.skip(str(missing), allow_module_level=True)

_FILES = ["programs.py", "programs_history.py", "programs_pools.py"]
_TEXT = "".join((HERE / file).read_text() for file in _FILES)
NAMES = re.findall(r"^@program\ndef (\w+)", _TEXT, re.MULTILINE)
# Allocators with pools and snapshots.
ALLOCATORS = ["caching", "pytorch", "pytorch-expandable", "remap", "rmm-pool", "tlsf"]
# Those with snapshots and without private pools, and the programs that need such pools.
WITHOUT_POOLS = ["gmlake"]
POOLS = {
    "mempool",
    "mempool_of_last_resort",
    "mempool_that_does_not_split",
    "mempool_of_another_allocator",
    "graphs",
    "checkpoints",
}


@pytest.fixture(scope="session")
def variables(torch_variables: dict[str, str]) -> dict[str, str]:
    """The environment of a process with PyTorch and the library."""
    return torch_variables | {"VRAMLAB_LIBRARY": str(vramlab.library_path())}


_RAN: dict[str, dict[str, Any]] = {}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("allocator", [*ALLOCATORS, *WITHOUT_POOLS])
def test_program(allocator: str, name: str, variables: dict[str, str]) -> None:
    # All programs of an allocator run in one process, because importing PyTorch takes longer than they do.
    if allocator not in _RAN:
        done = python(variables, "programs.py", allocator)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        _RAN[allocator] = {line["name"]: line["failed"] for line in lines}
        assert done.returncode == 0, done.stderr
        assert set(_RAN[allocator]) == set(NAMES)
    failed = _RAN[allocator][name]
    if allocator in WITHOUT_POOLS and name in POOLS:
        assert failed is not None
        assert failed.rstrip().endswith(f"'{allocator}' has no private pools"), failed
        return
    assert failed is None, failed


REFUSED = """
import torch, vramlab, vramlab.torch
torch.cuda.init()
try:
    vramlab.torch.use("caching")
except vramlab.Error as error:
    print(error)
assert torch.cuda.get_allocator_backend() == "native" and vramlab.torch.allocator() is None
for late in (vramlab.torch.stats, lambda: vramlab.torch.set_limit(1), vramlab.torch.MemPool):
    try:
        late()
    except vramlab.Error as error:
        assert "use()" in str(error)
    else:
        raise SystemExit(late)
"""


def test_after_cuda_is_in_use_it_is_too_late(variables: dict[str, str]) -> None:
    done = python(variables, "-c", REFUSED)
    assert done.returncode == 0, done.stderr
    assert "before the first use of CUDA" in done.stdout
    assert done.stdout.count("\n") == 1


UNKNOWN = """
import sys, torch, vramlab, vramlab.torch
try:
    vramlab.torch.use(sys.argv[1])
except vramlab.Error as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("asked", "words"),
    [("cachin", "did you mean 'caching'"), ("caching:max_split=1", "did you mean 'max_split_size'")],
)
def test_an_unknown_name_is_said_before_anything_is_built(asked: str, words: str, variables: dict[str, str]) -> None:
    done = python(variables, "-c", UNKNOWN, asked, XDG_CACHE_HOME="/no/such/folder")
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert done.stderr == ""


CONF = """
import sys, torch, vramlab.torch
vramlab.torch.use(*sys.argv[1:2], **({"limit": int(sys.argv[2])} if len(sys.argv) > 2 else {}))
torch.empty(1, device="cuda")
told = vramlab.torch.stats(0)["settings"]
print(told.get("max_split_size"), told.get("garbage_collection_threshold"))
"""


@pytest.mark.parametrize(
    ("conf", "arguments", "settings", "named"),
    [
        ("max_split_size_mb:64", ["caching"], "67108864 0.0", []),
        ("max_split_size_mb:64", ["caching:max_split_size=32M"], "33554432 0.0", []),
        ("max_split_size_mb:64,garbage_collection_threshold:0.8", ["caching", "1000000000"], "67108864 0.8", []),
        ("garbage_collection_threshold:0.8", ["caching"], "None 0.0", ["garbage_collection_threshold (needs a limit)"]),
        ("expandable_segments:True", ["caching"], "None 0.0", ["expandable_segments (use pytorch-expandable)"]),
        ("expandable_segments:True,graph_capture_record_stream_reuse:True", ["pytorch-expandable"], "None 0.0", []),
        ("expandable_segments:True,pinned_num_register_threads:2", ["pytorch-expandable"], "None 0.0", []),
        ("max_split_size_mb:64,release_lock_on_cudamalloc:True", ["bfc"], "None None",
         ["max_split_size_mb, release_lock_on_cudamalloc"]),
    ],
)  # fmt: skip
def test_pytorchs_settings(
    conf: str, arguments: list[str], settings: str, named: list[str], variables: dict[str, str]
) -> None:
    done = python(variables, "-c", CONF, *arguments, PYTORCH_CUDA_ALLOC_CONF=conf)
    assert done.stdout == settings + "\n", done.stderr
    assert [words for words in named if words in done.stderr] == named
    assert done.stderr.count("UserWarning") == len(named)


CHANGED = """
import torch, vramlab.torch
vramlab.torch.use("caching:max_split_size=32M")
torch._C._accelerator_setAllocatorSettings("max_split_size_mb:64,graph_capture_record_stream_reuse:True")
torch.empty(1, device="cuda")
print(vramlab.torch.stats(0)["settings"]["max_split_size"])
settings = torch.cuda.memory._snapshot()["allocator_settings"]
print(settings["graph_capture_record_stream_reuse"], settings["max_split_size"])
"""


def test_settings_that_change_too_late_are_named(variables: dict[str, str]) -> None:
    done = python(variables, "-c", CHANGED)
    assert done.stdout == "33554432\nTrue 33554432\n", done.stderr
    assert (
        "caching:max_split_size=32M keeps the settings that it began with; max_split_size_mb did not change"
        in done.stderr
    )
    assert done.stderr.count("UserWarning") == 1


LIMITED = """
import torch, vramlab.torch
vramlab.torch.use("caching", memory_limit="64M")
try:
    torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError:
    print("out of memory")
vramlab.torch.set_limit(200 << 20)
torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
"""


def test_a_limit_among_the_settings_holds_until_another_is_set(variables: dict[str, str]) -> None:
    done = python(variables, "-c", LIMITED)
    assert (done.returncode, done.stdout) == (0, "out of memory\n"), done.stderr


@pytest.mark.parametrize("limit", ["-5", "1.5", "'24GiB'", "2**64"])
def test_what_is_no_number_of_bytes_is_no_limit(limit: str, variables: dict[str, str]) -> None:
    script = f"import torch, vramlab.torch\nvramlab.torch.use('caching', limit={limit})"
    done = python(variables, "-c", script, XDG_CACHE_HOME="/no/such/folder")
    assert done.returncode == 1
    assert "write a number of bytes" in done.stderr.splitlines()[-1]


ENDS = """
import torch, vramlab.torch
vramlab.torch.use("caching")
kept = torch.empty(1000, device="cuda")
import os
child = os.fork()
if child == 0:
    del kept
    raise SystemExit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_program_and_its_forked_child_end_without_a_word(variables: dict[str, str]) -> None:
    done = python(variables, "-c", ENDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")


SHARED = [
    ("remap", "remap", "spawn"),
    ("pytorch-expandable", "remap", "spawn"),
    ("remap", "caching", "fork"),
    ("remap:handle=32M", "pytorch-expandable", "fork", "refuse"),
]


@pytest.mark.parametrize("arguments", SHARED, ids="-".join)
def test_tensors_go_to_another_process(arguments: tuple[str, ...], variables: dict[str, str]) -> None:
    done = python(variables, "shares.py", *arguments)
    assert (done.returncode, done.stdout) == (0, "shared True\n"), done.stderr


GONE = """
import os, struct, subprocess, sys, torch, vramlab.torch
vramlab.torch.use("remap")
tensor = torch.empty(1000, device="cuda")
storage = tensor.untyped_storage()
told = list(storage._share_cuda_())
told[-1] = False  # CUDA refuses to open an event in the process that made it, before memory is looked at.
done = subprocess.Popen([sys.executable, "-c", ""])
done.wait()
waits = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
for process in (done.pid, waits.pid):
    told[1] = told[1][:2] + struct.pack("<i", process) + told[1][6:]
    try:
        torch.UntypedStorage._new_shared_cuda(*told)
    except RuntimeError as error:
        print(str(error).splitlines()[0])
waits.communicate(b"\\n")
"""


def test_why_a_tensor_cannot_be_opened_is_said(variables: dict[str, str]) -> None:
    done = python(variables, "-c", GONE)
    assert done.returncode == 0, done.stderr
    gone, freed = done.stdout.splitlines()
    assert "is gone" in gone
    # A container may refuse all access to another process.
    assert "has freed the tensor" in freed or "pidfd_getfd is refused: " in freed
    assert all("'caching'" in line for line in (gone, freed))


HOOK = """
import ctypes, sys, vramlab.torch
vramlab.torch.use(sys.argv[1])
get = ctypes.CDLL(None).getenv
get.restype = ctypes.c_char_p
print(get(b"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK").decode())
"""


@pytest.mark.parametrize(("allocator", "left"), [("caching", "1"), ("remap", "0"), ("pytorch-expandable", "0")])
def test_nccl_registers_no_segment_that_memory_moves_in(allocator: str, left: str, variables: dict[str, str]) -> None:
    done = python(variables, "-c", HOOK, allocator, TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK="1")
    assert done.stdout == left + "\n", done.stderr
    assert ("is switched off" in done.stderr) == (left == "0")


REGISTERED = """
import sys, torch, torch.distributed as dist, vramlab.torch
vramlab.torch.use(sys.argv[1])
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
backend = dist.group.WORLD._get_backend(device)
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    tensors = [torch.ones(size << 20, device=device) for size in (1, 8, 3)]
backend.register_mem_pool(pool)
for tensor in tensors:
    dist.all_reduce(tensor)
torch.cuda.synchronize()
backend.deregister_mem_pool(pool)
print(sum(int(tensor.sum()) for tensor in tensors) >> 20)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("allocator", ["caching", "remap", "pytorch-expandable"])
def test_nccl_registers_a_pool(allocator: str, variables: dict[str, str]) -> None:
    if "VRAMLAB_SHIM_DEVICE" in variables:
        pytest.skip("needs a GPU")
    done = python(variables, "-c", REGISTERED, allocator)
    assert (done.returncode, done.stdout) == (0, "12\n"), done.stderr


DESCRIPTORS = """
import resource, sys, torch, vramlab.torch
vramlab.torch.use("remap")
tensor = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
resource.setrlimit(resource.RLIMIT_NOFILE, (200, int(sys.argv[1])))
try:
    tensor.untyped_storage()._share_cuda_()
    print("shared")
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""


@pytest.mark.parametrize(("most", "words"), [("2000", "shared"), ("200", "200 may be open (ulimit -n)")])
def test_a_page_takes_a_descriptor_and_more_are_allowed_where_they_may_be(
    most: str, words: str, variables: dict[str, str]
) -> None:
    done = python(variables, "-c", DESCRIPTORS, most)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
