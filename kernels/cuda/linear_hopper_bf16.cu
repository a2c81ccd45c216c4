// architecture: compute_90a
// Linear layers in bf16 on compute capability 9.0; see linear_hopper.cuh.
#include "linear_hopper_entry.cuh"

LINEAR_HOPPER_KERNELS(bf16, bf16)
