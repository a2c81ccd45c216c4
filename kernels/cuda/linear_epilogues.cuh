// Arguments of the linear layers' kernels, and the epilogues that process their sums. linear.cuh describes the
// computation.
#pragma once

#include "tensor.cuh"

// Kernel arguments; the Rust struct of the same name has the same layout.
struct LinearArguments {
    const void* a;
    const void* b;
    void* out;          // y, dx, dweight, or the weights
    const void* mask;   // input: the layer's input, with the pitch of dx; may be null
    float* master;      // gradient: f32 master weights of 16-bit weights; may be null
    float* bias;        // forward: added; gradient: set to the sum of dY's rows, or updated; may be null
    float* workspace;   // splits > 1: SPLIT_SIZE floats for each split of each tile
    u32* tickets;       // splits > 1: counters of arrived blocks; zero before and after a launch
    u32 m;
    u32 n;
    u32 k;
    u32 a_pitch;
    u32 b_pitch;
    u32 out_pitch;
    u32 splits;
    u32 flags;
    float scale;  // gradient: factor of the written gradient, or the learning rate
};

enum LinearFlags : u32 {
    RELU = 1,       // forward: negative sums become zero
    OUT_F32 = 2,    // forward: y is f32, whatever the precision
    STEP = 4,       // gradient: updates weights and bias instead of writing gradients
};

// Whether the group of GROUP columns from `col` is completely inside the output, and the output's rows are aligned.
template <u32 GROUP>
__device__ __forceinline__ bool group_is_whole(const LinearArguments& p, u32 col) {
    return col + GROUP <= p.n && p.out_pitch % GROUP == 0;
}

// ---- epilogues ----

// An epilogue processes one group at a time: neighbouring columns of a row, 16 bytes of the storage type. `WHOLE`: the
// group is completely inside the matrix and aligned; otherwise only its first `count` columns are processed. ReLU does
// not use fmaxf, which would turn NaN into zero.
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
    // Weights as stored, loaded before the GEMM starts so that the GEMM hides their latency.
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

    // `total` is the sum over the examples of dY's column `row`: writes the bias gradient, or updates the bias.
    static __device__ __forceinline__ void sum(const LinearArguments& p, u32 row, float total) {
        if (p.bias == nullptr) return;
        p.bias[row] = p.flags & STEP ? __fmaf_rn(-p.scale, total, p.bias[row]) : total * p.scale;
    }
};


// The f32 epilogues above in two steps, for sums that come from registers. First `read` loads an epilogue's operands of
// several groups from global memory; then `apply` computes and writes the groups.
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
