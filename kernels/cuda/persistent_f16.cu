// architecture: compute_80
// Training steps in f16; see persistent.cuh.
#include "persistent.cuh"

PERSISTENT_KERNEL(f16, PrecisionF16)
