// How one thread gathers its part of a batch; gather.cu has the entry points and says what they compute.
#pragma once

#include "element.cuh"

__device__ __forceinline__ const u32* batch_indices(const u32* __restrict__ indices, const u32* __restrict__ cursor,
                                                    u32 batch) {
    return cursor == nullptr ? indices : indices + static_cast<u64>(batch) * cursor[0];
}

__device__ __forceinline__ float load_float(u8 value) { return static_cast<float>(value); }

struct alignas(8) Bytes {
    u8 at[8];
};

// Eight bytes at once where the address allows it: rows of a data set need not be aligned.
template <u32 COUNT>
__device__ __forceinline__ void read_source(const u8* __restrict__ from, u32 valid, float (&to)[COUNT]) {
    if (COUNT == 8 && valid == 8 && aligned(from, 8)) {
        const Bytes bytes = *reinterpret_cast<const Bytes*>(from);
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) to[i] = load_float(bytes.at[i]);
        return;
    }
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) to[i] = i < valid ? load_float(from[i]) : 0.0f;
}

template <u32 COUNT>
__device__ __forceinline__ void read_source(const float* __restrict__ from, u32 valid, float (&to)[COUNT]) {
    read_elements(from, valid, to);
}

template <typename S, typename T>
__device__ __forceinline__ void gather_rows(u64 thread, const S* __restrict__ source, const u32* __restrict__ indices,
                                            const u32* __restrict__ cursor, T* __restrict__ out, u32 rows, u32 cols,
                                            u32 pitch, u32 batch, u32 source_rows, float scale, float shift) {
    constexpr u32 COUNT = per_thread<T>();
    const Share share = share_of_row<COUNT>(thread, rows, cols);
    if (share.valid == 0) return;
    const u64 index = batch_indices(indices, cursor, batch)[share.row];
    float values[COUNT];
    if (index < source_rows) {
        read_source(source + index * cols + share.col, share.valid, values);
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) values[i] = __fmaf_rn(values[i], scale, shift);
    } else {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) values[i] = not_a_number();
    }
    write_elements(out + share.row * pitch + share.col, share.valid, values);
}

__device__ __forceinline__ void gather_label(u64 row, const u8* __restrict__ source, const u32* __restrict__ indices,
                                             const u32* __restrict__ cursor, u32* __restrict__ out, u32 rows, u32 batch,
                                             u32 source_rows) {
    if (row >= rows) return;
    const u32 index = batch_indices(indices, cursor, batch)[row];
    out[row] = index < source_rows ? source[index] : NO_LABEL;
}
