// architecture: compute_90
// Training steps in tf32, for GPUs whose blocks can meet as a cluster; see persistent.cuh.
#include "persistent.cuh"

PERSISTENT_KERNEL(tf32, PrecisionTf32)
