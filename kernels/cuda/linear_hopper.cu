// Linear layers in bf16 and f16 on compute capability 9.0, one module for each type; see linear_hopper.cuh.
//
// module linear_hopper_bf16: compute_90a, LINEAR_HOPPER_KERNELS(bf16, bf16)
// module linear_hopper_f16: compute_90a, LINEAR_HOPPER_KERNELS(f16, f16)
//
// `LINEAR_HOPPER_KERNELS(name, type)` defines the entry points of one type:
//
//   warpgroup       tiles of 128 x 128
//   warpgroup_thin  tiles of 32 examples x 64
//   streamed        SGD update in tiles of 128 x 128 weights, for up to 64 examples
#include "linear_hopper.cuh"

extern __shared__ __align__(1024) unsigned char hopper_shared[];

#define WARPGROUP_KERNEL(name, at_once, ...)                                                                        \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__::THREADS, at_once)                                    \
        name(const __grid_constant__ LinearArguments p, const __grid_constant__ TensorMap a,                        \
             const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap) {                              \
        __VA_ARGS__::run(p, a, b, hopper_shared);                                                                   \
    }

#define LINEAR_HOPPER_KERNELS(name, T)                                                                        \
    WARPGROUP_KERNEL(linear_forward_##name##_warpgroup, 2,                                                          \
                     WarpgroupTile<T, ForwardEpilogue<T>, true, true, 2, 128, false, 3>)                         \
    WARPGROUP_KERNEL(linear_forward_##name##_warpgroup_thin, 1,                                                     \
                     WarpgroupTile<T, ForwardEpilogue<T>, true, true, 1, 32, true, 14>)                           \
    WARPGROUP_KERNEL(linear_input_##name##_warpgroup, 2,                                                            \
                     WarpgroupTile<T, InputEpilogue<T>, true, false, 2, 128, false, 3>)                          \
    WARPGROUP_KERNEL(linear_input_##name##_warpgroup_thin, 1,                                                       \
                     WarpgroupTile<T, InputEpilogue<T>, true, false, 1, 32, true, 14>)                            \
    WARPGROUP_KERNEL(linear_gradient_##name##_warpgroup, 2,                                                         \
                     WarpgroupTile<T, GradientEpilogue<T>, false, false, 2, 128, false, 3>)                      \
    extern "C" __global__ void __launch_bounds__(StreamedUpdate<T>::THREADS, 1)                              \
        linear_update_##name##_streamed(const __grid_constant__ LinearArguments p, const __grid_constant__ TensorMap a, \
                                        const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap out) { \
        if (p.k <= 32) {                                                                                            \
            StreamedUpdate<T>::run<32, 4>(p, a, b, out, hopper_shared);                                       \
        } else {                                                                                                    \
            StreamedUpdate<T>::run<64, 3>(p, a, b, out, hopper_shared);                                       \
        }                                                                                                           \
    }

KERNELS
