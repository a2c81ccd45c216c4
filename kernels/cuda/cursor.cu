// Step counter in device memory: cursor[0] += 1. Kernels in a CUDA graph read it, because their arguments are fixed at
// capture.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(1) advance_cursor(u32* __restrict__ cursor) { cursor[0] += 1; }
