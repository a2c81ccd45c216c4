// ReLU, one thread for 16 bytes.
//
//   relu           y = x <= 0 ? 0 : x   (NaN stays NaN, so that a diverged run is visible)
//   relu_backward  dx = y > 0 ? dy : 0  (y is the *output* of relu, so the input need not be stored)
#include "element.cuh"

template <typename T>
__device__ __forceinline__ void rectify(const T* __restrict__ x, T* __restrict__ y, u64 len) {
    constexpr u32 COUNT = per_thread<T>();
    const Share share = share_of<COUNT>(len);
    if (share.valid == 0) return;
    float values[COUNT];
    read_elements(x + share.col, share.valid, values);
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) values[i] = values[i] <= 0.0f ? 0.0f : values[i];
    write_elements(y + share.col, share.valid, values);
}

template <typename T>
__device__ __forceinline__ void rectify_backward(const T* __restrict__ y, const T* __restrict__ dy, T* __restrict__ dx,
                                                 u64 len) {
    constexpr u32 COUNT = per_thread<T>();
    const Share share = share_of<COUNT>(len);
    if (share.valid == 0) return;
    float outputs[COUNT];
    float values[COUNT];
    read_elements(y + share.col, share.valid, outputs);
    read_elements(dy + share.col, share.valid, values);
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) values[i] = outputs[i] > 0.0f ? values[i] : 0.0f;
    write_elements(dx + share.col, share.valid, values);
}

#define RELU(NAME, T)                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) NAME(const T* __restrict__ x, T* __restrict__ y, u64 len) {    \
        rectify(x, y, len);                                                                                          \
    }                                                                                                                \

#define RELU_BACKWARD(NAME, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        NAME(const T* __restrict__ y, const T* __restrict__ dy, T* __restrict__ dx, u64 len) {                       \
        rectify_backward(y, dy, dx, len);                                                                            \
    }

RELU(relu, float)
RELU(relu_bf16, bf16)
RELU(relu_f16, f16)

RELU_BACKWARD(relu_backward, float)
RELU_BACKWARD(relu_backward_bf16, bf16)
RELU_BACKWARD(relu_backward_f16, f16)
