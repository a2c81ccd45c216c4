// architecture: compute_90a
// Linear layers in f16 on compute capability 9.0; see linear_hopper.cuh.
#include "linear_hopper_entry.cuh"

LINEAR_HOPPER_KERNELS(f16, f16)
