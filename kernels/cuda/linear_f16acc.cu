// architecture: compute_80
// Linear layers in f16acc; see linear.cuh.
#include "linear_entry.cuh"

LINEAR_KERNELS(f16acc, PrecisionF16Accumulate)
