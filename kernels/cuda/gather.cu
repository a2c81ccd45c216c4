// Gathers a batch from a data set in device memory.
//
//   gather_rows_u8   out[r,c] = source[indices[r],c] * scale + shift, from bytes (images)
//   gather_rows_f32  the same from f32
//   gather_labels    out[r] = source[indices[r]], bytes widened to u32
//
// A thread computes 16 bytes of an output row, or in a large launch four such groups (`each`). If the groups are
// aligned, it issues all its loads before it uses the first value. The multiply-add is fused, as in the CPU reference.
// For an index outside the source nothing is read, and the output is a row of NaN, or the label 2^32-1, which is not a
// class.
//
// `cursor` may be null. With a cursor, `indices` holds the order of the whole data set, and the batch of step cursor[0]
// starts at indices[batch * cursor[0]].
#include "element.cuh"

__device__ __forceinline__ const u32* batch_indices(const u32* __restrict__ indices, const u32* __restrict__ cursor,
                                                    u32 batch) {
    return cursor == nullptr ? indices : indices + static_cast<u64>(batch) * cursor[0];
}

__device__ __forceinline__ float load_float(u8 value) { return static_cast<float>(value); }

// `COUNT` neighbouring elements of the source, aligned so that loads are as wide as possible: up to 16 bytes.
template <typename S, u32 COUNT>
struct alignas(COUNT * sizeof(S) < 16 ? COUNT * sizeof(S) : 16) SourceGroup {
    u32 words[COUNT * sizeof(S) / 4];
};

__device__ __forceinline__ float element_of(const u32* words, u32 i, u8) {
    return static_cast<float>(words[i / 4] >> i % 4 * 8 & 0xffu);
}
__device__ __forceinline__ float element_of(const u32* words, u32 i, float) { return __uint_as_float(words[i]); }

// These load if `inside`, and otherwise give zeros. A predicate replaces the branch, so consecutive loads are issued
// without waiting for each other. `volatile` keeps the compiler from moving a load down to the use of its value.
__device__ __forceinline__ u32 read_word_if(bool inside, const void* from) {
    u32 word = 0;
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.u32 p, %2, 0;\n\t"
        "@p ld.global.u32 %0, [%1];\n\t"
        "}"
        : "+r"(word)
        : "l"(from), "r"(static_cast<u32>(inside)));
    return word;
}
__device__ __forceinline__ void read_if(bool inside, const void* from, u32 (&words)[1]) {
    words[0] = read_word_if(inside, from);
}
__device__ __forceinline__ void read_if(bool inside, const void* from, u32 (&words)[2]) {
    words[0] = 0;
    words[1] = 0;
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.u32 p, %3, 0;\n\t"
        "@p ld.global.v2.u32 {%0, %1}, [%2];\n\t"
        "}"
        : "+r"(words[0]), "+r"(words[1])
        : "l"(from), "r"(static_cast<u32>(inside)));
}
__device__ __forceinline__ void read_four_if(bool inside, const u32* from, u32* words) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) words[i] = 0;
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.u32 p, %5, 0;\n\t"
        "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t"
        "}"
        : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
        : "l"(from), "r"(static_cast<u32>(inside)));
}
template <u32 WORDS>
__device__ __forceinline__ void read_if(bool inside, const void* from, u32 (&words)[WORDS]) {
#pragma unroll
    for (u32 i = 0; i < WORDS; i += 4) read_four_if(inside, static_cast<const u32*>(from) + i, words + i);
}

// Reads all bytes with one load if the address is aligned; rows of a data set need not be aligned.
template <u32 COUNT>
__device__ __forceinline__ void read_source(const u8* __restrict__ from, u32 valid, float (&to)[COUNT]) {
    using Bytes = SourceGroup<u8, COUNT>;
    if (valid == COUNT && aligned(from, sizeof(Bytes))) {
        const Bytes bytes = *reinterpret_cast<const Bytes*>(from);
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) to[i] = element_of(bytes.words, i, u8{});
        return;
    }
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) to[i] = i < valid ? load_float(from[i]) : 0.0f;
}

template <u32 COUNT>
__device__ __forceinline__ void read_source(const float* __restrict__ from, u32 valid, float (&to)[COUNT]) {
    read_elements(from, valid, to);
}

template <u32 COUNT>
__device__ __forceinline__ void scale_or_nan(bool inside, float scale, float shift, float (&values)[COUNT]) {
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) values[i] = inside ? __fmaf_rn(values[i], scale, shift) : not_a_number();
}

enum : u32 { GATHER_THREADS = 256, MOST_GROUPS = 4 };

// Computes one thread's `EACH` groups of 16 bytes of the output. Neighbouring threads compute neighbouring groups.
template <u32 EACH, typename S, typename T>
__device__ __forceinline__ void gather_rows(u32 block, const S* __restrict__ source, const u32* __restrict__ indices,
                                            const u32* __restrict__ cursor, T* __restrict__ out, u32 rows, u32 cols,
                                            u32 pitch, u32 batch, u32 source_rows, float scale, float shift) {
    constexpr u32 COUNT = per_thread<T>();
    using Group = SourceGroup<S, COUNT>;
    const u32 shares = shares_in_row<COUNT>(cols);
    const PlaceOfShare first = place_of_share(static_cast<u64>(block) * (GATHER_THREADS * EACH) + threadIdx.x, shares);
    if (first.row >= rows) return;
    const u32* order = batch_indices(indices, cursor, batch);

    // Distance between two successive groups of a thread, in rows and in shares.
    const u32 rows_apart = EACH == 1 ? 0 : GATHER_THREADS / shares;
    const u32 shares_apart = EACH == 1 ? 0 : GATHER_THREADS - rows_apart * shares;
    const auto next = [&](PlaceOfShare place) -> PlaceOfShare {
        const u32 number = place.number + shares_apart;
        const bool wraps = number >= shares;
        return {place.row + rows_apart + (wraps ? 1 : 0), wraps ? number - shares : number};
    };

    // If all groups are complete and aligned, the loads of all of them are in flight simultaneously.
    if (cols % COUNT == 0 && pitch % COUNT == 0 && aligned(source, sizeof(Group) < 16 ? sizeof(Group) : 16) &&
        aligned(out, 16)) {
        PlaceOfShare places[EACH] = {first};
#pragma unroll
        for (u32 i = 1; i < EACH; ++i) places[i] = next(places[i - 1]);
        u32 index[EACH];
        Group groups[EACH];
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) index[i] = read_word_if(places[i].row < rows, order + places[i].row);
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            const S* from = source + static_cast<u64>(index[i]) * cols + places[i].number * COUNT;
            read_if(places[i].row < rows && index[i] < source_rows, from, groups[i].words);
        }
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            if (places[i].row >= rows) return;
            float values[COUNT];
#pragma unroll
            for (u32 e = 0; e < COUNT; ++e) values[e] = element_of(groups[i].words, e, S{});
            scale_or_nan(index[i] < source_rows, scale, shift, values);
            write_pack(out + places[i].row * pitch + places[i].number * COUNT, values);
        }
        return;
    }
    PlaceOfShare place = first;
#pragma unroll 1
    for (u32 i = 0; i < EACH; ++i, place = next(place)) {
        const Share share = share_of_row<COUNT>(place, rows, cols);
        if (share.valid == 0) return;
        const u64 index = order[share.row];
        float values[COUNT] = {};
        if (index < source_rows) read_source(source + index * cols + share.col, share.valid, values);
        scale_or_nan(index < source_rows, scale, shift, values);
        write_elements(out + share.row * pitch + share.col, share.valid, values);
    }
}

__device__ __forceinline__ void gather_label(u64 row, const u8* __restrict__ source, const u32* __restrict__ indices,
                                             const u32* __restrict__ cursor, u32* __restrict__ out, u32 rows, u32 batch,
                                             u32 source_rows) {
    if (row >= rows) return;
    const u32 index = batch_indices(indices, cursor, batch)[row];
    out[row] = index < source_rows ? source[index] : NO_LABEL;
}

#define GATHER_ROWS(NAME, S, T)                                                                                      \
    extern "C" __global__ void __launch_bounds__(GATHER_THREADS)                                                     \
        NAME(const S* __restrict__ source, const u32* __restrict__ indices, const u32* __restrict__ cursor,          \
             T* __restrict__ out, u32 rows, u32 cols, u32 pitch, u32 batch, u32 source_rows, float scale,            \
             float shift, u32 each) {                                                                                \
        if (each == 1) {                                                                                             \
            gather_rows<1>(blockIdx.x, source, indices, cursor, out, rows, cols, pitch, batch, source_rows, scale,   \
                           shift);                                                                                   \
        } else {                                                                                                     \
            gather_rows<MOST_GROUPS>(blockIdx.x, source, indices, cursor, out, rows, cols, pitch, batch, source_rows, \
                                     scale, shift);                                                                  \
        }                                                                                                            \
    }

GATHER_ROWS(gather_rows_u8, u8, float)
GATHER_ROWS(gather_rows_u8_bf16, u8, bf16)
GATHER_ROWS(gather_rows_u8_f16, u8, f16)
GATHER_ROWS(gather_rows_f32, float, float)
GATHER_ROWS(gather_rows_f32_bf16, float, bf16)
GATHER_ROWS(gather_rows_f32_f16, float, f16)

extern "C" __global__ void __launch_bounds__(256)
    gather_labels(const u8* __restrict__ source, const u32* __restrict__ indices, const u32* __restrict__ cursor,
                  u32* __restrict__ out, u32 rows, u32 batch, u32 source_rows) {
    gather_label(global_thread(), source, indices, cursor, out, rows, batch, source_rows);
}
