// Linear layers with f32 in memory on compute capability 9.0, a module a precision; see linear_hopper_f32.cuh.
//
// module linear_hopper_tf32: compute_90a, LINEAR_HOPPER_F32_KERNELS(tf32)
//
// The entry points of one precision with f32 in memory on compute capability 9.0: `LINEAR_HOPPER_F32_KERNELS(name)`.
//
//   warpgroup  128 x 128
#include "linear_hopper_f32.cuh"

extern __shared__ __align__(1024) unsigned char hopper_shared[];

#define WARPGROUP_F32_KERNEL(name, ...)                                                                             \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__::THREADS, 1)                                          \
        name(const __grid_constant__ LinearArguments p, const __grid_constant__ TensorMap a,                        \
             const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap) {                              \
        __VA_ARGS__::run(p, a, b, hopper_shared);                                                                   \
    }

#define LINEAR_HOPPER_F32_KERNELS(name)                                                                             \
    WARPGROUP_F32_KERNEL(linear_forward_##name##_warpgroup, WarpgroupTileF32<ForwardEpilogue<float>, false, false>) \
    WARPGROUP_F32_KERNEL(linear_input_##name##_warpgroup, WarpgroupTileF32<InputEpilogue<float>, true, false>) \
    WARPGROUP_F32_KERNEL(linear_gradient_##name##_warpgroup, WarpgroupTileF32<GradientEpilogue<float>, true, true>)

KERNELS
