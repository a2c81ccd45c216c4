#!/usr/bin/env python3
"""Tests RMM over VramLab's allocators, with CuPy too if it is installed, and measures the time of a call.

    python3 experiments/pytorch/programs/rmm_costs.py [--allocators caching,remap]

Needs RMM and a GPU. Prints a line of JSON: for each resource the nanoseconds of allocating and freeing a device buffer (a
kilobyte and a megabyte, in rounds), and the passed checks. `callback` is RMM's pool behind a callback in Python, as VramLab's
allocators are: the difference from RMM's pool is the callback's time. Exit code 1 if a check failed.
"""

import argparse
import json
import sys
import time

import rmm
import vramlab.rmm
from rmm.pylibrmm.stream import Stream

ROUNDS, CALLS = 5, 20_000


def resource(name):
    """RMM's resource of that name, or the one over VramLab's allocator."""
    if name == "rmm-pool-native":
        return rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=1 << 30)
    if name == "rmm-async":
        return rmm.mr.CudaAsyncMemoryResource()
    if name == "callback":
        pool = resource("rmm-pool-native")
        return rmm.mr.CallbackMemoryResource(
            lambda size, stream: pool.allocate(size, stream), lambda ptr, size, stream: pool.deallocate(ptr, size, stream)
        )
    return vramlab.rmm.resource(name)


def costs(size):
    """Nanoseconds of allocating and freeing a buffer of that many bytes, in each round."""
    for _ in range(CALLS // 5):
        rmm.DeviceBuffer(size=size)
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            rmm.DeviceBuffer(size=size)
        found.append(round((time.perf_counter() - began) / CALLS * 1e9, 1))
    return found


def buffers():
    """Checks that contents survive, on the default stream and on others, during allocations and frees."""
    streams = [Stream() for _ in range(3)]
    kept = []
    for turn in range(200):
        stream = streams[turn % 3]
        content = bytes([turn % 251]) * (1000 + 77 * turn)
        kept.append((content, rmm.DeviceBuffer.to_device(content, stream), stream))
        if turn % 4 == 3:
            content, buffer, stream = kept.pop(turn % len(kept))
            if buffer.tobytes(stream) != content:
                return False
    return all(buffer.tobytes(stream) == content for content, buffer, stream in kept)


def arrays(cupy):
    """Sums of products, in temporary arrays on two streams."""
    sums = []
    for seed, stream in ((1, cupy.cuda.Stream()), (2, cupy.cuda.Stream())):
        with stream:
            for size in (100, 3_000, 70_000):
                one = cupy.arange(size, dtype=cupy.float64) * seed
                sums.append(float((one * one + 1).sum()))
                del one
        stream.synchronize()
    return sums


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocators", default="caching,pytorch-expandable,remap,rmm-pool", metavar="A,B")
    options = parser.parse_args()
    try:
        import cupy
        from rmm.allocators.cupy import rmm_cupy_allocator
    except ImportError as error:
        cupy, missing = None, str(error)
    found = {"program": "rmm", "rmm": rmm.__version__, "cupy": cupy.__version__ if cupy else f"not there: {missing}"}
    expected = arrays(cupy) if cupy else None
    failed = []
    for name in ["rmm-pool-native", "rmm-async", "callback", *filter(None, options.allocators.split(","))]:
        own = resource(name)
        rmm.mr.set_current_device_resource(own)
        one = {"ns": costs(1 << 10), "ns_large": costs(1 << 20), "buffers": buffers()}
        if cupy:
            cupy.cuda.set_allocator(rmm_cupy_allocator)
            one["arrays"] = arrays(cupy) == expected
            cupy.cuda.set_allocator(None)
        if (inside := getattr(own, "vramlab", None)) is not None:
            stats = inside.stats()
            one |= {
                key: stats.get(key)
                for key in ("reserved_bytes.all.peak", "allocated_bytes.all.peak", "allocated_bytes.all.current")
            }
            # Each block was freed.
            one["all_freed"] = one["allocated_bytes.all.current"] == 0
        failed += [f"{name}: {key}" for key, value in one.items() if value is False]
        found[name] = one
    rmm.mr.set_current_device_resource(rmm.mr.CudaMemoryResource())
    print(json.dumps(found | {"failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
