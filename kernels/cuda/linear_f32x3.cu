// architecture: compute_80
// Linear layers in f32, their products made of three of tf32; see linear.cuh.
#include "linear_entry.cuh"

LINEAR_KERNELS(f32x3, PrecisionF32x3)
