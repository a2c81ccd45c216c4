// Linear layers, one module for each precision; see linear.cuh.
//
// module linear_bf16: compute_80, LINEAR_KERNELS(bf16, PrecisionBf16)
// module linear_f16: compute_80, LINEAR_KERNELS(f16, PrecisionF16)
// module linear_f32: compute_80, LINEAR_KERNELS(f32, PrecisionF32)
// module linear_tf32: compute_80, LINEAR_KERNELS(tf32, PrecisionTf32)
//
// `LINEAR_KERNELS(name, precision)` defines all entry points of one precision. The tile shapes of each GEMM:
//
//   thin16, thin32, thin64   32 examples x 16, 32 or 64 columns; eight warps divide k
//   thin128                  32 x 128, which reads the examples less often; two warps divide the columns, and four
//                            divide k
//   wide                     128 x 128; eight warps tile it
//   fine, flat               gradient of few examples, 32 x 64 and 64 x 128; eight warps tile it
//   slim                     gradient of few outputs, 16 x 128, over many examples; two warps divide the columns, four
//                            divide k
#include "linear.cuh"

// Steps of k per warp and stage: 32 bytes where eight warps divide k, so a stage is 256 bytes of a row.
template <class P>
constexpr u32 thin_depth = 32 / sizeof(typename P::T);
// 64 bytes where each warp processes all of k.
template <class P>
constexpr u32 wide_depth = 64 / sizeof(typename P::T);

template <class P, class Epilogue, bool B_K, u32 FN>
using Thin = LinearTile<P, Epilogue, true, B_K, 32, FN, 1, 1, 8, thin_depth<P>, 4>;

template <class P, class Epilogue, bool B_K>
using Thin128 = LinearTile<P, Epilogue, true, B_K, 32, 64, 1, 2, 4, 2 * thin_depth<P>, 4>;
template <class P, class Epilogue, bool B_K>
using Wide = LinearTile<P, Epilogue, true, B_K, 32, 64, 4, 2, 1, wide_depth<P>, 4>;

template <class P, u32 FM, u32 FN, u32 WM, u32 WN, u32 WK, u32 DEPTH, u32 STAGES>
using Gradient = LinearTile<P, GradientEpilogue<typename P::T>, false, false, FM, FN, WM, WN, WK, DEPTH, STAGES>;
template <class P>
using GradientFine = Gradient<P, 16, 16, 2, 4, 1, 32, 2>;
template <class P>
using GradientFlat = Gradient<P, 32, 32, 2, 4, 1, 32, 2>;
template <class P>
using GradientSlim = Gradient<P, 16, 64, 1, 2, 4, 16, 4>;
template <class P>
using GradientWide = Gradient<P, 32, 64, 4, 2, 1, wide_depth<P>, 4>;

extern __shared__ __align__(16) unsigned char linear_shared[];

// `at_once`: minimum number of resident blocks per multiprocessor, which limits the registers per thread.
#define LINEAR_KERNEL(name, at_once, ...)                                                                    \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__::THREADS, at_once)                              \
        name(const __grid_constant__ LinearArguments p) {                                                    \
        __VA_ARGS__::run(p, blockIdx.x, linear_shared);                                                      \
    }

#define LINEAR_PRODUCT(product, name, precision, epilogue, b_k)                                              \
    LINEAR_KERNEL(linear_##product##_##name##_thin16, 1, Thin<precision, epilogue, b_k, 16>)                 \
    LINEAR_KERNEL(linear_##product##_##name##_thin32, 1, Thin<precision, epilogue, b_k, 32>)                 \
    LINEAR_KERNEL(linear_##product##_##name##_thin64, 1, Thin<precision, epilogue, b_k, 64>)                 \
    LINEAR_KERNEL(linear_##product##_##name##_thin128, 1, Thin128<precision, epilogue, b_k>)                 \
    LINEAR_KERNEL(linear_##product##_##name##_wide, precision::WIDE_AT_ONCE, Wide<precision, epilogue, b_k>)

#define LINEAR_KERNELS(name, precision)                                                                      \
    LINEAR_PRODUCT(forward, name, precision, ForwardEpilogue<precision::T>, true)                            \
    LINEAR_PRODUCT(input, name, precision, InputEpilogue<precision::T>, false)                               \
    LINEAR_KERNEL(linear_gradient_##name##_fine, 2, GradientFine<precision>)                                 \
    LINEAR_KERNEL(linear_gradient_##name##_flat, precision::FLAT_AT_ONCE, GradientFlat<precision>)           \
    LINEAR_KERNEL(linear_gradient_##name##_slim, 1, GradientSlim<precision>)                                 \
    LINEAR_KERNEL(linear_gradient_##name##_wide, 1, GradientWide<precision>)

KERNELS
