// Rectifier, one thread for each element.
//
//   relu           y = x <= 0 ? 0 : x   (written so that NaN stays NaN: a diverged run must show)
//   relu_backward  dx = y > 0 ? dy : 0  (y is the *output* of relu, so the input need not be kept)
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    relu(const float* __restrict__ x, float* __restrict__ y, u64 len) {
    const u64 i = global_thread();
    if (i >= len) return;
    const float value = x[i];
    y[i] = value <= 0.0f ? 0.0f : value;
}

extern "C" __global__ void __launch_bounds__(256)
    relu_backward(const float* __restrict__ y, const float* __restrict__ dy, float* __restrict__ dx, u64 len) {
    const u64 i = global_thread();
    if (i >= len) return;
    dx[i] = y[i] > 0.0f ? dy[i] : 0.0f;
}
