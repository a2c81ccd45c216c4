"""Elementwise operations of CuPy after a product: cupy_loop.py driver|pool|both

`driver` asks the driver for every array and `pool` uses CuPy's pool; `both` takes them in turn in one process, and
prints the ratio of each pair of turns.
"""

import statistics
import sys
import time

import cupy


def steps(weights, count):
    """Microseconds a step, and the sum of the last result."""
    device = cupy.cuda.Device()
    device.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        hidden = cupy.maximum(weights @ weights - 128, 0)
        half = hidden * 0.5
        result = half + weights
    device.synchronize()
    return (time.perf_counter() - start) / count * 1e6, float(result.sum())


def spread(values):
    """Median and range."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


way, pool = sys.argv[1], cupy.cuda.MemoryPool()
allocators = {"driver": None, "pool": pool.malloc}
cupy.cuda.set_allocator(allocators["pool" if way == "both" else way])
weights = cupy.arange(512 * 512, dtype=cupy.float32).reshape(512, 512) % 7
steps(weights, 200)
if way != "both":
    us, total = steps(weights, 2000)
    print(f"{us:.1f} us a step, total {total:.6e}")
    sys.exit()
times, totals = {name: [] for name in allocators}, set()
for turn in range(40):
    for name in list(allocators)[:: 1 if turn % 2 else -1]:
        cupy.cuda.set_allocator(allocators[name])
        us, total = steps(weights, 500)
        times[name].append(us)
        totals.add(total)
ratios = sorted(driver / own for driver, own in zip(times["driver"], times["pool"], strict=True))
print(
    f"own pool {spread(times['pool'])}, driver {spread(times['driver'])} us a step, "
    f"ratio {statistics.median(ratios):.3f} "
    f"(middle half {ratios[10]:.3f} to {ratios[29]:.3f}), {len(ratios)} pairs, {len(totals)} totals"
)
