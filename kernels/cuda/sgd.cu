// Stochastic gradient descent, in place: weights -= learning_rate * gradient; one thread for each weight.
// The multiply-add is fused here and in the CPU reference, so the two agree to the last bit.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    sgd(const float* __restrict__ gradient, float* __restrict__ weights, u64 len, float learning_rate) {
    const u64 i = global_thread();
    if (i >= len) return;
    weights[i] = __fmaf_rn(-learning_rate, gradient[i], weights[i]);
}
