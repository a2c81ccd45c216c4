// architecture: compute_80
// Linear layers in tf32; see linear.cuh.
#include "linear_entry.cuh"

LINEAR_KERNELS(tf32, PrecisionTf32)
