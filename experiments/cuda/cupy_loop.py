"""Elementwise operations of CuPy after a product, from the driver or from CuPy's pool: cupy_loop.py driver|pool"""

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


if sys.argv[1] == "driver":
    cupy.cuda.set_allocator(None)
weights = cupy.arange(512 * 512, dtype=cupy.float32).reshape(512, 512) % 7
steps(weights, 200)
us, total = steps(weights, 2000)
print(f"{us:.1f} us a step, total {total:.6e}")
