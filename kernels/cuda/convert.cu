// Conversion between element types: y = x, one thread for eight elements. A conversion to bf16 or f16 rounds to
// nearest, ties to even.
#include "element.cuh"

enum : u32 { COUNT = 8 };

#define CONVERT(NAME, FROM, TO)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256) NAME(const FROM* __restrict__ x, TO* __restrict__ y, u64 len) { \
        const Share share = share_of<COUNT>(len);                                                                    \
        if (share.valid == 0) return;                                                                                \
        float values[COUNT];                                                                                         \
        read_elements(x + share.col, share.valid, values);                                                           \
        write_elements(y + share.col, share.valid, values);                                                          \
    }

CONVERT(convert_f32_bf16, float, bf16)
CONVERT(convert_f32_f16, float, f16)
CONVERT(convert_bf16_f32, bf16, float)
CONVERT(convert_f16_f32, f16, float)
