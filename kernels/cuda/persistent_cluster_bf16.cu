// architecture: compute_90
// Training steps in bf16, for GPUs whose blocks can meet as a cluster; see persistent.cuh.
#include "persistent.cuh"

PERSISTENT_KERNEL(bf16, PrecisionBf16)
