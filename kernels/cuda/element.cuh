// Element types of stored matrices. Arithmetic is in f32; a store rounds to nearest, ties to even.
//
// <cuda_fp16.h> is not available here. PTX instructions convert f16 (sm_53 and newer). f32 is converted to bf16 by a
// PTX instruction on sm_80 and newer, and by integer arithmetic on older GPUs.
#pragma once

#include "common.cuh"

struct bf16 {
    unsigned short bits;
};

struct f16 {
    unsigned short bits;
};

__device__ __forceinline__ float load_float(float value) { return value; }

__device__ __forceinline__ float load_float(bf16 value) {
    return __uint_as_float(static_cast<u32>(value.bits) << 16);
}

__device__ __forceinline__ float load_float(f16 value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}

template <typename T>
struct Stored;

template <>
struct Stored<float> {
    static __device__ __forceinline__ float of(float value) { return value; }
};

template <>
struct Stored<bf16> {
    static __device__ __forceinline__ bf16 of(float value) {
#if __CUDA_ARCH__ >= 800
        bf16 narrow;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
        return narrow;
#else
        const u32 bits = __float_as_uint(value);
        // Rounds to nearest, ties to even: adds half a unit in bf16's last place, or one less if bf16's last bit is
        // zero. A carry into the exponent gives the correct result, too.
        const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        return {static_cast<unsigned short>(nan ? (bits >> 16) | 0x40u : rounded)};
#endif
    }
};

template <>
struct Stored<f16> {
    static __device__ __forceinline__ f16 of(float value) {
        f16 narrow;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
        return narrow;
    }
};

// The elements of one 16-byte load or store.
template <typename T>
struct alignas(16) Pack {
    T at[16 / sizeof(T)];
};

// Elements per thread in the elementwise kernels: 16 bytes.
template <typename T>
constexpr __device__ __forceinline__ u32 per_thread() {
    return 16 / sizeof(T);
}

template <typename T>
__device__ __forceinline__ bool aligned(const T* address, u32 bytes) {
    return reinterpret_cast<u64>(address) % bytes == 0;
}

// Reads the first `valid` of `COUNT` neighbouring elements as f32, and sets the others to zero. Uses 16-byte loads if
// all are valid and the address is aligned.
template <u32 COUNT, typename T>
__device__ __forceinline__ void read_elements(const T* __restrict__ from, u32 valid, float (&to)[COUNT]) {
    constexpr u32 PACKED = 16 / sizeof(T);
    if (COUNT % PACKED == 0 && valid >= COUNT && aligned(from, 16)) {
#pragma unroll
        for (u32 start = 0; start + PACKED <= COUNT; start += PACKED) {
            const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(from + start);
#pragma unroll
            for (u32 i = 0; i < PACKED; ++i) to[start + i] = load_float(pack.at[i]);
        }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) to[i] = i < valid ? load_float(from[i]) : 0.0f;
}

// Stores 16 bytes of neighbouring elements at an aligned address.
template <typename T>
__device__ __forceinline__ void write_pack(T* __restrict__ to, const float* from) {
    constexpr u32 PACKED = 16 / sizeof(T);
    Pack<T> pack;
#pragma unroll
    for (u32 i = 0; i < PACKED; ++i) pack.at[i] = Stored<T>::of(from[i]);
    *reinterpret_cast<Pack<T>*>(to) = pack;
}

// Stores the first `valid` of `COUNT` values in neighbouring elements. Uses 16-byte stores if all are valid and the
// address is aligned.
template <u32 COUNT, typename T>
__device__ __forceinline__ void write_elements(T* __restrict__ to, u32 valid, const float (&from)[COUNT]) {
    constexpr u32 PACKED = 16 / sizeof(T);
    if (COUNT % PACKED == 0 && valid >= COUNT && aligned(to, 16)) {
#pragma unroll
        for (u32 start = 0; start + PACKED <= COUNT; start += PACKED) write_pack(to + start, from + start);
        return;
    }
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        if (i < valid) to[i] = Stored<T>::of(from[i]);
    }
}

// A share is the part of a row that one thread processes. This is a share's row, and its number in that row.
struct PlaceOfShare {
    u64 row;
    u32 number;
};

// Locates share `number` of a matrix with `shares` shares in each row. Divides in 32 bits where they suffice,
// because a 64-bit division takes several times as long.
__device__ __forceinline__ PlaceOfShare place_of_share(u64 number, u32 shares) {
    if (number <= 0xffffffffu) {
        const u32 low = static_cast<u32>(number);
        const u32 row = low / shares;
        return {row, low - row * shares};
    }
    const u64 row = number / shares;
    return {row, static_cast<u32>(number - row * shares)};
}

// Number of shares of `COUNT` elements in a row of `cols` elements.
template <u32 COUNT>
__device__ __forceinline__ u32 shares_in_row(u32 cols) {
    return cols / COUNT + (cols % COUNT != 0 ? 1 : 0);
}

// The elements that one thread processes: the position of the first, and the number of elements.
struct Share {
    u64 row;
    u64 col;
    u32 valid;  // zero: the thread has no elements
};

// The share at `place` of a matrix of `rows` x `cols` elements.
template <u32 COUNT>
__device__ __forceinline__ Share share_of_row(PlaceOfShare place, u32 rows, u32 cols) {
    if (place.row >= rows) return {0, 0, 0};
    const u64 col = static_cast<u64>(place.number) * COUNT;
    const u64 left = cols - col;
    return {place.row, col, left < COUNT ? static_cast<u32>(left) : COUNT};
}

// The share of this thread in a buffer of `len` elements.
template <u32 COUNT>
__device__ __forceinline__ Share share_of(u64 len) {
    const u64 col = global_thread() * COUNT;
    if (col >= len) return {0, 0, 0};
    const u64 left = len - col;
    return {0, col, left < COUNT ? static_cast<u32>(left) : COUNT};
}
