// architecture: compute_90
// Training steps in f16acc, for GPUs whose blocks can meet as a cluster; see persistent.cuh.
#include "persistent.cuh"

PERSISTENT_KERNEL(f16acc, PrecisionF16Accumulate)
