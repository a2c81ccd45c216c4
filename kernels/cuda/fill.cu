// Sets every element of a buffer to one value; one thread for each element.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) fill(float* __restrict__ out, u64 len, float value) {
    const u64 i = global_thread();
    if (i >= len) return;
    out[i] = value;
}
