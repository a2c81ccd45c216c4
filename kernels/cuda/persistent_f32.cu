// architecture: compute_80
// Training steps in f32; see persistent.cuh.
#include "persistent.cuh"

PERSISTENT_KERNEL(f32, PrecisionF32)
