// Bias of a layer.
//
//   add_bias       y[r,c] = x[r,c] + bias[c]; one thread for 16 bytes of a row
//   bias_gradient  db[c] = sum over r of dy[r,c]. A block processes 32 columns. Its eight warps divide the rows, and
//                  their partial sums are added in warp order without atomics, so the result always has the same bits
#include "element.cuh"

template <typename T>
__device__ __forceinline__ void add(const T* __restrict__ x, const float* __restrict__ bias, T* __restrict__ y,
                                    u32 rows, u32 cols, u32 pitch) {
    constexpr u32 COUNT = per_thread<T>();
    const Share share = share_of_row<COUNT>(place_of_share(global_thread(), shares_in_row<COUNT>(cols)), rows, cols);
    if (share.valid == 0) return;
    const u64 first = share.row * pitch + share.col;
    float values[COUNT];
    float biases[COUNT];
    read_elements(x + first, share.valid, values);
    read_elements(bias + share.col, share.valid, biases);
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) values[i] += biases[i];
    write_elements(y + first, share.valid, values);
}

#define ADD_BIAS(NAME, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        NAME(const T* __restrict__ x, const float* __restrict__ bias, T* __restrict__ y, u32 rows, u32 cols,         \
             u32 pitch) {                                                                                            \
        add(x, bias, y, rows, cols, pitch);                                                                          \
    }

ADD_BIAS(add_bias, float)
ADD_BIAS(add_bias_bf16, bf16)
ADD_BIAS(add_bias_f16, f16)

enum : u32 { PARTITIONS = 8 };

template <typename T>
__device__ __forceinline__ void sum_columns(const T* __restrict__ dy, float* __restrict__ db, u32 rows, u32 cols,
                                            u32 pitch) {
    __shared__ float partial[PARTITIONS][WARP];
    const u32 lane = threadIdx.x % WARP;
    const u32 partition = threadIdx.x / WARP;
    // Neighbouring lanes read neighbouring columns of one row (coalesced).
    const u64 col = static_cast<u64>(blockIdx.x) * WARP + lane;
    float sum = 0.0f;
    if (col < cols) {
        for (u64 row = partition; row < rows; row += PARTITIONS) sum += load_float(dy[row * pitch + col]);
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

#define BIAS_GRADIENT(NAME, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(WARP* PARTITIONS)                                                   \
        NAME(const T* __restrict__ dy, float* __restrict__ db, u32 rows, u32 cols, u32 pitch) {                      \
        sum_columns(dy, db, rows, cols, pitch);                                                                      \
    }

BIAS_GRADIENT(bias_gradient, float)
BIAS_GRADIENT(bias_gradient_bf16, bf16)
BIAS_GRADIENT(bias_gradient_f16, f16)
