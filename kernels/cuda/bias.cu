// Bias of a layer.
//
//   add_bias       y[r,c] = x[r,c] + bias[c]; one thread for each element
//   bias_gradient  db[c] = sum over r of dy[r,c]; a block takes 32 columns, its eight warps share out the rows, and the
//                  eight partial sums are added in the order of the warps: no atomics, always the same bits
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    add_bias(const float* __restrict__ x, const float* __restrict__ bias, float* __restrict__ y, u32 rows, u32 cols) {
    const u64 element = global_thread();
    if (element >= static_cast<u64>(rows) * cols) return;
    y[element] = x[element] + bias[element % cols];
}

enum : u32 { PARTITIONS = 8 };

extern "C" __global__ void __launch_bounds__(WARP * PARTITIONS)
    bias_gradient(const float* __restrict__ dy, float* __restrict__ db, u32 rows, u32 cols) {
    __shared__ float partial[PARTITIONS][WARP];
    const u32 lane = threadIdx.x % WARP;
    const u32 partition = threadIdx.x / WARP;
    // Neighbouring lanes read neighbouring columns of one row.
    const u64 col = static_cast<u64>(blockIdx.x) * WARP + lane;
    float sum = 0.0f;
    if (col < cols) {
        for (u64 row = partition; row < rows; row += PARTITIONS) sum += dy[row * cols + col];
    }
    partial[partition][lane] = sum;
    __syncthreads();
    if (partition == 0 && col < cols) {
        float total = partial[0][lane];
#pragma unroll
        for (u32 i = 1; i < PARTITIONS; ++i) total += partial[i][lane];
        db[col] = total;
    }
}
