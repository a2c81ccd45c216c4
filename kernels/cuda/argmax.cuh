// The first class with the greatest logit of a row, by one warp; every lane ends with it. NaN is never the greatest; a row
// of nothing but NaN and -infinity is class 0.
#pragma once

#include "common.cuh"

__device__ __forceinline__ u32 first_greatest(const float* __restrict__ x, u32 classes, u32 lane) {
    float best = minus_infinity();
    u32 best_class = 0;
    for (u64 c = lane; c < classes; c += WARP) {
        const float value = x[c];
        if (value > best) {
            best = value;
            best_class = static_cast<u32>(c);
        }
    }
#pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, best, distance);
        const u32 other_class = __shfl_xor_sync(ALL_LANES, best_class, distance);
        if (other > best || (other == best && other_class < best_class)) {
            best = other;
            best_class = other_class;
        }
    }
    return best_class;
}
