"""Buffers of RMM that are filled and read, from the driver or from RMM's pool: rmm_loop.py driver|pool"""

import sys
import time

import rmm
from rmm.mr import CudaMemoryResource, PoolMemoryResource, set_current_device_resource


def steps(host, count):
    """Microseconds a step, and a sum of what was read."""
    total, start = 0, time.perf_counter()
    for step in range(count):
        filled = rmm.DeviceBuffer.to_device(host)
        other = rmm.DeviceBuffer(size=len(host) + 4096 * (step % 7))
        other.copy_from_host(host)
        total += other.copy_to_host()[step % 1000]
        del filled, other
    return (time.perf_counter() - start) / count * 1e6, total


driver = CudaMemoryResource()
set_current_device_resource(PoolMemoryResource(driver, initial_pool_size=1 << 28) if sys.argv[1] == "pool" else driver)
host = bytes(range(256)) * 4096
steps(host, 50)
us, total = steps(host, 300)
print(f"{us:.1f} us a step, total {total}")
