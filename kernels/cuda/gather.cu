// A batch picked out of a data set that lies on the device.
//
//   gather_rows_u8   out[r,c] = source[indices[r],c] * scale + shift, from bytes (images)
//   gather_rows_f32  the same from f32
//   gather_labels    out[r] = source[indices[r]], bytes widened to u32
//
// One thread for 16 bytes of a row of the output, or in a large launch for four such groups (`each`), all of which it asks
// for before it needs the first. The multiply-add is fused, as in the CPU reference. An index outside the source reads
// nothing: it gives a row of NaN, or the label 2^32-1, which is no class.
//
// With a cursor, which may be null, `indices` is the order of the whole data set, and the batch of step number cursor[0]
// begins at batch * cursor[0].
#include "gather.cuh"

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
