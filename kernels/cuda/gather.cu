// A batch picked out of a data set that lies on the device.
//
//   gather_rows_u8   out[r,c] = source[indices[r],c] * scale + shift, from bytes (images)
//   gather_rows_f32  the same from f32
//   gather_labels    out[r] = source[indices[r]], bytes widened to u32
//
// One thread for each element of the output. The multiply-add is fused, as in the CPU reference. An index outside the
// source reads nothing: it gives a row of NaN, or the label 2^32-1, which is no class.
#include "common.cuh"

template <typename T>
__device__ __forceinline__ void gather_rows(const T* __restrict__ source, const u32* __restrict__ indices,
                                            float* __restrict__ out, u32 rows, u32 cols, u32 source_rows, float scale,
                                            float shift) {
    const u64 element = global_thread();
    if (element >= static_cast<u64>(rows) * cols) return;
    const u64 row = element / cols;
    const u64 col = element - row * cols;
    const u64 index = indices[row];
    out[element] = index < source_rows ? __fmaf_rn(static_cast<float>(source[index * cols + col]), scale, shift)
                                       : not_a_number();
}

extern "C" __global__ void __launch_bounds__(256)
    gather_rows_u8(const u8* __restrict__ source, const u32* __restrict__ indices, float* __restrict__ out, u32 rows,
                   u32 cols, u32 source_rows, float scale, float shift) {
    gather_rows(source, indices, out, rows, cols, source_rows, scale, shift);
}

extern "C" __global__ void __launch_bounds__(256)
    gather_rows_f32(const float* __restrict__ source, const u32* __restrict__ indices, float* __restrict__ out,
                    u32 rows, u32 cols, u32 source_rows, float scale, float shift) {
    gather_rows(source, indices, out, rows, cols, source_rows, scale, shift);
}

extern "C" __global__ void __launch_bounds__(256)
    gather_labels(const u8* __restrict__ source, const u32* __restrict__ indices, u32* __restrict__ out, u32 rows,
                  u32 source_rows) {
    const u64 row = global_thread();
    if (row >= rows) return;
    const u32 index = indices[row];
    out[row] = index < source_rows ? source[index] : NO_LABEL;
}
