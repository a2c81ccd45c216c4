// architecture: compute_90a
// Linear layers in f32x3 on compute capability 9.0; see linear_hopper_f32.cuh.
#include "linear_hopper_f32_entry.cuh"

LINEAR_HOPPER_F32_KERNELS(f32x3, 3)
