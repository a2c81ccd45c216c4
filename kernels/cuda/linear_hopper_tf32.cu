// Linear layers in tf32 on compute capability 9.0; see linear_hopper_tf32.cuh.
//
// module linear_hopper_tf32: compute_90a, LINEAR_HOPPER_TF32_KERNELS
//
// The entry points, with tiles of 128 x 128. The gradient of the input has none, because no recorded experiment
// launched it.
#include "linear_hopper_tf32.cuh"

extern __shared__ __align__(1024) unsigned char hopper_shared[];

#define WARPGROUP_TF32_KERNEL(name, ...)                                                                            \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__::THREADS, 1)                                          \
        name(const __grid_constant__ LinearArguments p, const __grid_constant__ TensorMap a,                        \
             const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap) {                              \
        __VA_ARGS__::run(p, a, b, hopper_shared);                                                                   \
    }

#define LINEAR_HOPPER_TF32_KERNELS                                                                                  \
    WARPGROUP_TF32_KERNEL(linear_forward_tf32_warpgroup, WarpgroupTileTf32<ForwardEpilogue<float>, false>)          \
    WARPGROUP_TF32_KERNEL(linear_gradient_tf32_warpgroup, WarpgroupTileTf32<GradientEpilogue<float>, true>)

KERNELS
