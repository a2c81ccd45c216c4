// What a launch of a linear layer's kernels is given, and what it does with its sums; linear.cuh says what is computed.
#pragma once

#include "tensor.cuh"

// What a launch is given; the Rust struct of the same name matches it.
struct LinearArguments {
    const void* a;
    const void* b;
    void* out;          // y, dx, dweight, or the weights
    const void* mask;   // input: the layer's input, with dx's pitch; may be null
    float* master;      // gradient: f32 weights beside the half ones; may be null
    float* bias;        // forward: added; gradient: receives the sum of dY's rows, or is stepped; may be null
    float* workspace;   // splits > 1: SPLIT_SIZE floats for each split of each tile
    u32* tickets;       // splits > 1: one for each tile; zero, and zero again at the end
    u32 m;
    u32 n;
    u32 k;
    u32 a_pitch;
    u32 b_pitch;
    u32 out_pitch;
    u32 splits;
    u32 flags;
    float scale;  // gradient: factor of what is written, or the rate of the step
};

enum LinearFlags : u32 {
    RELU = 1,       // forward: negative sums become zero
    OUT_F32 = 2,    // forward: y is f32 whatever the precision
    STEP = 4,       // gradient: steps weights and bias instead of writing the gradient
};

// Whether the group of GROUP columns from `col` on lies inside of what is written, with all rows aligned.
template <u32 GROUP>
__device__ __forceinline__ bool group_is_whole(const LinearArguments& p, u32 col) {
    return col + GROUP <= p.n && p.out_pitch % GROUP == 0;
}

// ---- epilogues ----

// Each takes a group of a row's columns at a time: 16 bytes of the storage type. `WHOLE` says that the group lies inside of
// the matrix and is aligned; otherwise `count` says how many columns do.
// ReLU is not fmaxf, which would make zero of NaN.
template <class T>
struct ForwardEpilogue {
    enum : u32 { GROUP = 16 / sizeof(T) };
    enum : bool { SUMS_ROWS = false };
    struct Held {};
    static __device__ __forceinline__ bool holds(const LinearArguments&) { return false; }
    static __device__ __forceinline__ void fetch(const LinearArguments&, bool, u64, Held&) {}

    template <bool WHOLE>
    static __device__ __forceinline__ void apply(const LinearArguments& p, u32, u32 col, u64 at, u32 count,
                                                 float (&v)[GROUP], const Held&, bool) {
        if (p.bias != nullptr) {
#pragma unroll
            for (u32 i = 0; i < GROUP; ++i) v[i] += WHOLE || i < count ? p.bias[col + i] : 0.0f;
        }
        if (p.flags & RELU) {
#pragma unroll
            for (u32 i = 0; i < GROUP; ++i) v[i] = v[i] < 0.0f ? 0.0f : v[i];
        }
        if (p.flags & OUT_F32) {
            write_floats<WHOLE>(static_cast<float*>(p.out) + at, count, v);
        } else {
            write_group<WHOLE>(static_cast<T*>(p.out) + at, count, v);
        }
    }
    static __device__ __forceinline__ void sum(const LinearArguments&, u32, float) {}
};

template <class T>
struct InputEpilogue {
    enum : u32 { GROUP = 16 / sizeof(T) };
    enum : bool { SUMS_ROWS = false };
    struct Held {};
    static __device__ __forceinline__ bool holds(const LinearArguments&) { return false; }
    static __device__ __forceinline__ void fetch(const LinearArguments&, bool, u64, Held&) {}

    template <bool WHOLE>
    static __device__ __forceinline__ void apply(const LinearArguments& p, u32, u32, u64 at, u32 count,
                                                 float (&v)[GROUP], const Held&, bool) {
        if (p.mask != nullptr) {
            float x[GROUP];
            group_values(T{}, read_16_if(true, static_cast<const T*>(p.mask) + at), x);
#pragma unroll
            for (u32 i = 0; i < GROUP; ++i) v[i] = x[i] > 0.0f ? v[i] : 0.0f;
        }
        write_group<WHOLE>(static_cast<T*>(p.out) + at, count, v);
    }
    static __device__ __forceinline__ void sum(const LinearArguments&, u32, float) {}
};

template <class T>
struct GradientEpilogue {
    enum : u32 { GROUP = 16 / sizeof(T) };
    enum : bool { SUMS_ROWS = true };
    // Weights as they lie in memory, asked for before the product began, so that their way is hidden behind it.
    struct Held {
        uint4 bits[GROUP / 4];
    };
    static __device__ __forceinline__ bool holds(const LinearArguments& p) { return (p.flags & STEP) != 0 && p.splits == 1; }

    static __device__ __forceinline__ void fetch(const LinearArguments& p, bool inside, u64 at, Held& held) {
        if (p.master != nullptr) {
#pragma unroll
            for (u32 i = 0; i < GROUP / 4; ++i) held.bits[i] = read_16_if(inside, p.master + at + 4 * i);
        } else {
            held.bits[0] = read_16_if(inside, static_cast<const T*>(p.out) + at);
        }
    }

    template <bool WHOLE>
    static __device__ __forceinline__ void apply(const LinearArguments& p, u32, u32, u64 at, u32 count, float (&v)[GROUP],
                                                 Held& held, bool is_held) {
        if (p.flags & STEP) {
            if (!is_held) fetch(p, true, at, held);
            float w[GROUP];
            if (p.master != nullptr) {
#pragma unroll
                for (u32 i = 0; i < GROUP / 4; ++i) {
                    float some[4];
                    group_values(float{}, held.bits[i], some);
#pragma unroll
                    for (u32 j = 0; j < 4; ++j) w[4 * i + j] = some[j];
                }
            } else {
                group_values(T{}, held.bits[0], w);
            }
#pragma unroll
            for (u32 i = 0; i < GROUP; ++i) w[i] = __fmaf_rn(-p.scale, v[i], w[i]);
            if (p.master != nullptr) write_floats<WHOLE>(p.master + at, count, w);
            write_group<WHOLE>(static_cast<T*>(p.out) + at, count, w);
        } else {
#pragma unroll
            for (u32 i = 0; i < GROUP; ++i) v[i] *= p.scale;
            write_floats<WHOLE>(static_cast<float*>(p.out) + at, count, v);
        }
    }

    // The sum over the examples of dY's column `row`.
    static __device__ __forceinline__ void sum(const LinearArguments& p, u32 row, float total) {
        if (p.bias == nullptr) return;
        p.bias[row] = p.flags & STEP ? __fmaf_rn(-p.scale, total, p.bias[row]) : total * p.scale;
    }
};


// The epilogues above in two halves, for f32: what one needs of memory is read for several groups before any
// is written, where sums come from registers.
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
