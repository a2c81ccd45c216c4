// architecture: compute_80
// Linear layers in f16; see linear.cuh.
#include "linear_entry.cuh"

LINEAR_KERNELS(f16, PrecisionF16)
