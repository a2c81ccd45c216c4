// Stochastic gradient descent, in place: weights -= learning_rate * gradient; one thread for 16 bytes of weights. The
// multiply-add is fused here and in the CPU reference, so the two agree to the last bit.
//
// 16-bit weights are updated in f32, and rounded. With f32 master weights, the step updates these, and the weights are
// set to their rounded values.
#include "element.cuh"

template <typename T>
__device__ __forceinline__ void step(const float* __restrict__ gradient, T* __restrict__ weights,
                                     float* __restrict__ master, u64 len, float learning_rate) {
    constexpr u32 COUNT = per_thread<T>();
    const Share share = share_of<COUNT>(len);
    if (share.valid == 0) return;
    float slopes[COUNT];
    float values[COUNT];
    read_elements(gradient + share.col, share.valid, slopes);
    if (master != nullptr) {
        read_elements(static_cast<const float*>(master + share.col), share.valid, values);
    } else {
        read_elements(static_cast<const T*>(weights + share.col), share.valid, values);
    }
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) values[i] = __fmaf_rn(-learning_rate, slopes[i], values[i]);
    if (master != nullptr) write_elements(master + share.col, share.valid, values);
    write_elements(weights + share.col, share.valid, values);
}

extern "C" __global__ void __launch_bounds__(256)
    sgd(const float* __restrict__ gradient, float* __restrict__ weights, u64 len, float learning_rate) {
    step(gradient, weights, nullptr, len, learning_rate);
}

#define SGD(NAME, T)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        NAME(const float* __restrict__ gradient, T* __restrict__ weights, float* __restrict__ master, u64 len,       \
             float learning_rate) {                                                                                  \
        step(gradient, weights, master, len, learning_rate);                                                         \
    }

SGD(sgd_bf16, bf16)
SGD(sgd_f16, f16)
