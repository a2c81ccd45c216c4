// architecture: compute_90
// Training steps in f32, for GPUs whose blocks can meet as a cluster; see persistent.cuh.
#include "persistent.cuh"

PERSISTENT_KERNEL(f32, PrecisionF32)
