// architecture: compute_80
// Training steps in bf16; see persistent.cuh.
#include "persistent.cuh"

PERSISTENT_KERNEL(bf16, PrecisionBf16)
