// The epilogues of linear_epilogues.cuh in two halves, for f32: what one needs of memory is read for several groups before any
// is written, where sums come from registers.
#pragma once

#include "linear_epilogues.cuh"

// What an epilogue needs of memory for a group, read some time before.
template <class Epilogue>
struct Early;

template <>
struct Early<ForwardEpilogue<float>> {
    float bias[4];
    __device__ __forceinline__ void read(const LinearArguments& p, bool, u32 col, u64) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) bias[i] = p.bias != nullptr && col + i < p.n ? __ldg(p.bias + col + i) : 0.0f;
    }
    template <bool WHOLE>
    __device__ __forceinline__ void apply(const LinearArguments& p, u32, u32, u64 at, u32 count, float (&v)[4]) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            v[i] += bias[i];
            if (p.flags & RELU) v[i] = v[i] < 0.0f ? 0.0f : v[i];
        }
        write_floats<WHOLE>(static_cast<float*>(p.out) + at, count, v);
    }
};

template <>
struct Early<InputEpilogue<float>> {
    uint4 mask;
    __device__ __forceinline__ void read(const LinearArguments& p, bool inside, u32 col, u64 at) {
        mask = read_16_if(inside && p.mask != nullptr && col < p.n, static_cast<const float*>(p.mask) + at);
    }
    template <bool WHOLE>
    __device__ __forceinline__ void apply(const LinearArguments& p, u32, u32, u64 at, u32 count, float (&v)[4]) {
        if (p.mask != nullptr) {
            float x[4];
            group_values(0.0f, mask, x);
#pragma unroll
            for (u32 i = 0; i < 4; ++i) v[i] = x[i] > 0.0f ? v[i] : 0.0f;
        }
        write_floats<WHOLE>(static_cast<float*>(p.out) + at, count, v);
    }
};

template <>
struct Early<GradientEpilogue<float>> {
    GradientEpilogue<float>::Held held;
    __device__ __forceinline__ void read(const LinearArguments& p, bool inside, u32 col, u64 at) {
        GradientEpilogue<float>::fetch(p, inside && (p.flags & STEP) != 0 && col < p.n, at, held);
    }
    template <bool WHOLE>
    __device__ __forceinline__ void apply(const LinearArguments& p, u32 row, u32 col, u64 at, u32 count, float (&v)[4]) {
        GradientEpilogue<float>::template apply<WHOLE>(p, row, col, at, count, v, held, true);
    }
};
