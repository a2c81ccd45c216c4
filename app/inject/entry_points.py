"""Writes src/entry_points.rs: every function that a release of CUDA's driver exports, and which argument is its stream.

usage: python3 entry_points.py INCLUDE_DIR... > src/entry_points.rs

Each INCLUDE_DIR is the include directory of one CUDA release, as the wheels nvidia-cuda-runtime-cu11, -cu12 and
nvidia-cuda-runtime hold it. The C preprocessor expands the names, so a C compiler is needed.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

HEADERS = ["cuda.h", "cudaGL.h", "cudaEGL.h", "cudaVDPAU.h"]
MODES = [[], ["-DCUDA_API_PER_THREAD_DEFAULT_STREAM"], ["-D__CUDA_API_VERSION_INTERNAL"]]
# In no header of the wheels.
EXTRA = {"cuProfilerInitialize": "", "cuProfilerStart": "", "cuProfilerStop": ""}
# Written by hand in src/entries.
WRITTEN = """
    cuInit cuGetProcAddress cuGetProcAddress_v2
    cuMemAlloc_v2 cuMemAllocPitch_v2 cuMemFree_v2 cuMemAllocManaged
    cuMemAllocAsync cuMemAllocAsync_ptsz cuMemAllocFromPoolAsync cuMemAllocFromPoolAsync_ptsz
    cuMemFreeAsync cuMemFreeAsync_ptsz
    cuMemHostAlloc cuMemAllocHost_v2 cuMemFreeHost cuMemHostRegister_v2 cuMemHostUnregister
    cuMemHostGetDevicePointer_v2 cuMemHostGetFlags
    cuMemCreate cuMemRelease cuMemMap cuMemUnmap cuArrayCreate_v2 cuArray3DCreate_v2 cuArrayDestroy
    cuMipmappedArrayCreate cuMipmappedArrayDestroy cuGraphAddMemAllocNode cuGraphAddMemFreeNode
    cuMemAddressReserve cuMemAddressFree cuMemPoolCreate cuMemPoolDestroy cuMemPoolTrimTo
    cuMemAdvise cuMemAdvise_v2 cuStreamAttachMemAsync cuStreamAttachMemAsync_ptsz
    cuMemGetAddressRange_v2 cuMemGetInfo_v2 cuPointerGetAttribute cuPointerGetAttributes
    cuIpcGetMemHandle cuMemGetHandleForAddressRange
    cuStreamCreate cuStreamCreateWithPriority cuGreenCtxStreamCreate cuStreamDestroy cuStreamDestroy_v2
    cuStreamBeginCapture cuStreamBeginCapture_ptsz cuStreamBeginCapture_v2 cuStreamBeginCapture_v2_ptsz
    cuStreamBeginCaptureToGraph cuStreamBeginCaptureToGraph_ptsz cuStreamEndCapture cuStreamEndCapture_ptsz
    cuLaunchCooperativeKernelMultiDevice cuModuleUnload cuLibraryUnload cuModuleGetFunction cuLibraryGetKernel cuKernelGetFunction
    cuDevicePrimaryCtxReset cuDevicePrimaryCtxReset_v2 cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2
    cuDevicePrimaryCtxRetain cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy cuCtxDestroy_v2
"""
OWN = set(WRITTEN.split())
# They launch a kernel, which is their first argument, or the second of those whose stream is in a structure.
KERNEL = re.compile(r"cuLaunch(Cooperative)?Kernel(Ex)?(_ptsz)?$")
# They take no stream and put work on the legacy one.
LEGACY = re.compile(r"cuMem(cpy|set)|cuLaunch(Grid)?$")
# They take a stream and put no work on it.
IDLE = re.compile(
    r"cuStream(Destroy|Query|Synchronize|Get|SetAttribute|CopyAttributes|IsCapturing|UpdateCapture|EndCapture|BeginCapture)"
)


def declarations(include: str, header: str, flags: list[str], stubs: str) -> str:
    """The text of a header, expanded."""
    command = ["cc", "-E", "-P", "-x", "c", *flags, "-I", include, "-I", stubs, f"{include}/{header}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def functions(text: str) -> dict[str, str]:
    """Arguments by function."""
    found = re.findall(r"CUresult\s+(cu[A-Z]\w*)\s*\(([^;{]*)\)\s*;", text)
    return {name: " ".join(arguments.split()) for name, arguments in found}


def kind(name: str, arguments: str) -> str:
    """What a function's trampoline does: see src/forward.rs."""
    if name in OWN:
        return "own"
    if KERNEL.match(name):
        if name.endswith("_ptsz"):
            return f"per_thread kernel {int('Ex' in name)}"
        return "config" if "Ex" in name else "kernel 8"
    if name.endswith(("_ptsz", "_ptds")):
        return "plain" if IDLE.match(name) else "per_thread"
    if IDLE.match(name):
        return "plain"
    for position, argument in enumerate(arguments.split(",")):
        if re.match(r"^\s*(struct CUstream_st\s*\*|CUstream)\s+\w+\s*$", argument):
            return f"stream {position}"
    return "legacy" if LEGACY.match(name) else "plain"


def main() -> None:
    """Prints the list for the releases of the command line."""
    every: dict[str, str] = dict(EXTRA)
    with tempfile.TemporaryDirectory() as stubs:
        for path in ["GL/gl.h", "vdpau/vdpau.h", "EGL/egl.h", "EGL/eglext.h"]:
            file = pathlib.Path(stubs) / path
            file.parent.mkdir(exist_ok=True)
            file.write_text("")
        for include in sys.argv[1:]:
            for header in HEADERS:
                for flags in MODES:
                    if (pathlib.Path(include) / header).is_file():
                        every.update(functions(declarations(include, header, flags, stubs)))
    missing = OWN - set(every)
    if missing:
        sys.exit(f"no release has {', '.join(sorted(missing))}")
    print("// Written by entry_points.py. A name, and which of its arguments is a stream.")
    print("entry_points! {")
    for number, name in enumerate(sorted(every)):
        print(f"    {number} {name} [{kind(name, every[name])}];")
    print("}")


main()
