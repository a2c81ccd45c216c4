// architecture: compute_80
// Training steps in tf32; see persistent.cuh.
#include "persistent.cuh"

PERSISTENT_KERNEL(tf32, PrecisionTf32)
