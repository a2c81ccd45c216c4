// Definitions shared by all kernel files. NVRTC compiles these sources without the CUDA toolkit's headers, so this file
// defines the constants that <math.h> or <limits> would provide.
//
// Conventions: matrices are row-major f32 without padding, or of an element type with a pitch (element.cuh); grids and
// blocks are one-dimensional; an entry point is `extern "C"` and has the name of its operation; parameter types match
// the fields of the Rust struct that launches it (u32 -> unsigned int, u64 -> unsigned long long, f32 -> float).
// Buffers never overlap, hence `__restrict__`.
#pragma once

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

// Constants are enumerators, because NVRTC emits a variable in device memory for each `constexpr` variable.
enum : u32 {
    WARP = 32,
    ALL_LANES = 0xffffffffu,
    NO_LABEL = 0xffffffffu,
};

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float minus_infinity() { return __int_as_float(static_cast<int>(0xff800000u)); }

// Index of this thread in the grid. It has 64 bits, because a buffer may have more than 2^32 elements.
__device__ __forceinline__ u64 global_thread() {
    return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// Butterfly reductions: every lane gets the same result, and the order of the additions is fixed. If `LANES` is less
// than WARP, each group of `LANES` neighbouring lanes is reduced separately.
template <u32 LANES = WARP>
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (u32 distance = LANES / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, distance);
    }
    return value;
}

template <u32 LANES = WARP>
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (u32 distance = LANES / 2; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
    }
    return value;
}
