// architecture: compute_80
// Training steps in f16acc; see persistent.cuh.
#include "persistent.cuh"

PERSISTENT_KERNEL(f16acc, PrecisionF16Accumulate)
