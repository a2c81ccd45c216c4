// architecture: compute_80
// Linear layers in bf16; see linear.cuh.
#include "linear_entry.cuh"

LINEAR_KERNELS(bf16, PrecisionBf16)
