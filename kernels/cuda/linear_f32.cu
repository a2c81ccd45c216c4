// architecture: compute_80
// Linear layers in f32; see linear.cuh.
#include "linear_entry.cuh"

LINEAR_KERNELS(f32, PrecisionF32)
