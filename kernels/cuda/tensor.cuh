// Building blocks of the linear layers' kernels: element types, asynchronous copies, and one warp's GEMM by
// multiply-adds or on tensor cores. Needs compute capability 8.0.
//
// Instructions are written in PTX, because NVRTC compiles without the toolkit's headers. Fragment layouts: PTX ISA,
// "Warp-level matrix instructions", mma.m16n8k16 and mma.m16n8k8; g = lane / 4, t = lane % 4.
#pragma once

#include "element.cuh"

using u16 = unsigned short;

// ---- elements ----

// Converts 16 bytes to f32: four elements of 32 bits, or eight of 16 bits.
__device__ __forceinline__ void group_values(float, uint4 bits, float (&v)[4]) {
    v[0] = __int_as_float(static_cast<int>(bits.x));
    v[1] = __int_as_float(static_cast<int>(bits.y));
    v[2] = __int_as_float(static_cast<int>(bits.z));
    v[3] = __int_as_float(static_cast<int>(bits.w));
}
template <class T>
__device__ __forceinline__ void group_values(T, uint4 bits, float (&v)[8]) {
    const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        v[2 * i] = load_float(T{static_cast<u16>(words[i])});
        v[2 * i + 1] = load_float(T{static_cast<u16>(words[i] >> 16)});
    }
}

// Writes N neighbouring elements with 16-byte stores to an aligned address (`WHOLE`), or the first `count` one by one.
template <bool WHOLE, u32 N>
__device__ __forceinline__ void write_floats(float* to, u32 count, const float (&v)[N]) {
    if (WHOLE) {
#pragma unroll
        for (u32 i = 0; i < N; i += 4) *reinterpret_cast<float4*>(to + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
    } else {
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            if (i < count) to[i] = v[i];
        }
    }
}
template <bool WHOLE, class T>
__device__ __forceinline__ void write_halves(T* to, u32 count, const float (&v)[8]) {
    u16 bits[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) bits[i] = Stored<T>::of(v[i]).bits;
    if (WHOLE) {
        u32 words[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) words[i] = bits[2 * i] | static_cast<u32>(bits[2 * i + 1]) << 16;
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            if (i < count) to[i] = T{bits[i]};
        }
    }
}
// Writes a group: 16 bytes of the storage type.
template <bool WHOLE>
__device__ __forceinline__ void write_group(float* to, u32 count, const float (&v)[4]) {
    write_floats<WHOLE>(to, count, v);
}
template <bool WHOLE>
__device__ __forceinline__ void write_group(bf16* to, u32 count, const float (&v)[8]) {
    write_halves<WHOLE>(to, count, v);
}
template <bool WHOLE>
__device__ __forceinline__ void write_group(f16* to, u32 count, const float (&v)[8]) {
    write_halves<WHOLE>(to, count, v);
}

// Loads 16 bytes if `inside`, otherwise returns zeros. A predicate replaces the compiler's branch, so consecutive loads
// are issued back to back; `volatile` keeps the loads before the work that hides their latency.
__device__ __forceinline__ uint4 read_16_if(bool inside, const void* from) {
    uint4 v = make_uint4(0, 0, 0, 0);
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.u32 p, %5, 0;\n\t"
        "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t"
        "}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(from), "r"(static_cast<u32>(inside)));
    return v;
}
// Loads from the L2 cache, because another block has written the values in this launch.
__device__ __forceinline__ void load_four_fresh(const float* from, float (&v)[4]) {
    const float4 four = __ldcg(reinterpret_cast<const float4*>(from));
    v[0] = four.x;
    v[1] = four.y;
    v[2] = four.z;
    v[3] = four.w;
}

// ---- shared memory ----

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void read_shared(const float* from, float (&to)[4]) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "r"(shared_address(from))
                 : "memory");
}
__device__ __forceinline__ void read_shared(const float* from, float (&to)[2]) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(shared_address(from)) : "memory");
}

// Issues an asynchronous copy of SIZE (16 or 4) bytes to shared memory, of which it reads the first `bytes`; the
// remainder becomes zero. 16-byte copies bypass the L1 cache, because no value is read twice.
template <u32 SIZE>
__device__ __forceinline__ void copy_async(u32 to, const void* from, u32 bytes) {
    if (SIZE == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    }
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <u32 GROUPS_LEFT>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS_LEFT) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements (or 8x4 of 32-bit): lane l passes the address of row l % 8 of matrix l /
// 8.
__device__ __forceinline__ void load_matrices(u32 address, u32 (&to)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 address, u32 (&to)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// ---- f32: multiply-adds ----

// A warp's FM x FN patch: lanes form 4 rows and 8 columns, and each lane has FM/4 x FN/8 sums. The operands' layout
// determines which rows and columns these are, so that loads from shared memory are 8 or 16 bytes wide and have no bank
// conflicts.
struct PrecisionF32 {
    using T = float;
    // Resident blocks per multiprocessor with the tile `wide`, and with the gradient's tile `flat`; they limit the
    // registers per thread.
    enum : u32 { WIDE_AT_ONCE = 2, FLAT_AT_ONCE = 2 };
    static constexpr __device__ u32 pad_bytes(bool, bool) { return 16; }

    template <u32 FM, u32 FN, bool A_K, bool B_K, u32 A_STRIDE, u32 B_STRIDE, bool DIRECT>
    struct Product {
        enum : u32 { DOWN = 4, ACROSS = 8, RM = FM / DOWN, RN = FN / ACROSS, STEP = 2 };
        float sums[RM][RN] = {};

        // The i-th of the LINES lines of a lane, which is number `place` of the LANES lanes that divide the patch's
        // lines.
        template <bool K_CONTIGUOUS, u32 LINES, u32 LANES>
        static __device__ __forceinline__ u32 line_of(u32 place, u32 i) {
            enum : u32 { WIDTH = LINES < 4 ? LINES : 4 };
            return K_CONTIGUOUS ? place + LANES * i : (i / WIDTH * LANES + place) * WIDTH + i % WIDTH;
        }

        // Number of a lane's groups of four neighbouring columns, if neither operand is k-contiguous.
        enum : u32 { GROUPS = RM * (RN / 4) };
        static __device__ __forceinline__ u32 row_of(u32 lane, u32 i) {
            return line_of<false, RM, DOWN>(lane / ACROSS, i / (RN / 4));
        }
        static __device__ __forceinline__ u32 col_of(u32 lane, u32 i) { return (i % (RN / 4) * ACROSS + lane % ACROSS) * 4; }
        __device__ __forceinline__ void group(u32 i, float (&v)[4]) const {
#pragma unroll
            for (u32 e = 0; e < 4; ++e) v[e] = sums[i / (RN / 4)][i % (RN / 4) * 4 + e];
        }

        // Reads STEP steps of k of a lane's lines.
        template <bool K_CONTIGUOUS, u32 LINES, u32 LANES, u32 STRIDE>
        static __device__ __forceinline__ void read(const float* from, u32 k, u32 place, float (&to)[LINES][STEP]) {
            enum : u32 { WIDTH = LINES < 4 ? LINES : 4 };
            if (K_CONTIGUOUS) {
#pragma unroll
                for (u32 i = 0; i < LINES; ++i) read_shared(from + (place + LANES * i) * STRIDE + k, to[i]);
            } else {
#pragma unroll
                for (u32 s = 0; s < STEP; ++s) {
#pragma unroll
                    for (u32 i = 0; i < LINES; i += WIDTH) {
                        float some[WIDTH];
                        read_shared(from + (k + s) * STRIDE + (i / WIDTH * LANES + place) * WIDTH, some);
#pragma unroll
                        for (u32 j = 0; j < WIDTH; ++j) to[i + j][s] = some[j];
                    }
                }
            }
        }

        // The next step's loads are in flight while the current step is multiplied.
        template <u32 DEPTH>
        __device__ __forceinline__ void accumulate(const float* a, const float* b, u32 lane) {
            const u32 down = lane / ACROSS;
            const u32 across = lane % ACROSS;
            float x[2][RM][STEP];
            float y[2][RN][STEP];
            read<A_K, RM, DOWN, A_STRIDE>(a, 0, down, x[0]);
            read<B_K, RN, ACROSS, B_STRIDE>(b, 0, across, y[0]);
#pragma unroll
            for (u32 k = 0; k < DEPTH; k += STEP) {
                const u32 now = k / STEP % 2;
                if (k + STEP < DEPTH) {
                    read<A_K, RM, DOWN, A_STRIDE>(a, k + STEP, down, x[1 - now]);
                    read<B_K, RN, ACROSS, B_STRIDE>(b, k + STEP, across, y[1 - now]);
                }
#pragma unroll
                for (u32 s = 0; s < STEP; ++s) {
#pragma unroll
                    for (u32 i = 0; i < RM; ++i) {
#pragma unroll
                        for (u32 j = 0; j < RN; ++j) sums[i][j] = __fmaf_rn(x[now][i][s], y[now][j][s], sums[i][j]);
                    }
                }
            }
        }

        __device__ __forceinline__ void store(float* to, u32 pitch, u32 lane) const {
            const u32 down = lane / ACROSS;
            const u32 across = lane % ACROSS;
#pragma unroll
            for (u32 i = 0; i < RM; ++i) {
#pragma unroll
                for (u32 j = 0; j < RN; ++j) {
                    to[line_of<A_K, RM, DOWN>(down, i) * pitch + line_of<B_K, RN, ACROSS>(across, j)] = sums[i][j];
                }
            }
        }
    };
};

// ---- tensor cores ----

// Positions of a lane's sums in an FM x FN patch of 16x8 pieces, which have the layout of mma accumulators. If columns
// are interleaved (DEALT of `Strip`), the lane with t = lane % 4 has columns 32q + 8t to 32q + 8t + 7 in pieces 4q to
// 4q+3: one group of eight, or two groups of four.
template <u32 FM, u32 FN, u32 GROUP, bool DEALT>
struct Patch {
    enum : u32 { MT = FM / 16, NT = FN / 8, PER_GROUP = GROUP / 2, GROUPS = MT * 2 * (NT / PER_GROUP) };

    // First of a lane's two columns in piece j.
    static __device__ __forceinline__ u32 col_of_piece(u32 t, u32 j) {
        return DEALT ? 32 * (j / 4) + 8 * t + 2 * (j % 4) : 8 * j + 2 * t;
    }
    static __device__ __forceinline__ u32 row_of(u32 lane, u32 i) {
        const u32 half = i / (NT / PER_GROUP);
        return 8 * half + lane / 4;
    }
    static __device__ __forceinline__ u32 col_of(u32 lane, u32 i) {
        return col_of_piece(lane % 4, i % (NT / PER_GROUP) * PER_GROUP);
    }
};

// Accumulators in f32.
template <u32 FM, u32 FN, u32 GROUP, bool DEALT>
struct PatchF32 : Patch<FM, FN, GROUP, DEALT> {
    using Base = Patch<FM, FN, GROUP, DEALT>;
    enum : u32 { MT = FM / 16, NT = FN / 8 };
    float sums[MT][NT][4] = {};

    __device__ __forceinline__ void group(u32 i, float (&v)[GROUP]) const {
        const u32 half = i / (NT / Base::PER_GROUP);
        const u32 first = i % (NT / Base::PER_GROUP) * Base::PER_GROUP;
#pragma unroll
        for (u32 j = 0; j < Base::PER_GROUP; ++j) {
            v[2 * j] = sums[half / 2][first + j][half % 2 * 2];
            v[2 * j + 1] = sums[half / 2][first + j][half % 2 * 2 + 1];
        }
    }

    __device__ __forceinline__ void store(float* to, u32 pitch, u32 lane) const {
        const u32 g = lane / 4;
        const u32 t = lane % 4;
#pragma unroll
        for (u32 i = 0; i < MT; ++i) {
#pragma unroll
            for (u32 j = 0; j < NT; ++j) {
                float* at = to + (16 * i + g) * pitch + Base::col_of_piece(t, j);
                *reinterpret_cast<float2*>(at) = make_float2(sums[i][j][0], sums[i][j][1]);
                *reinterpret_cast<float2*>(at + 8 * pitch) = make_float2(sums[i][j][2], sums[i][j][3]);
            }
        }
    }
};

__device__ __forceinline__ void multiply(f16, const u32 (&a)[4], u32 b0, u32 b1, float (&c)[4]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(bf16, const u32 (&a)[4], u32 b0, u32 b1, float (&c)[4]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(float, const u32 (&a)[4], u32 b0, u32 b1, float (&c)[4]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16-bit operands: an mma has 16 steps of k, and ldmatrix transposes operands that are not k-contiguous.
template <class Element>
struct PrecisionHalf {
    using T = Element;
    enum : u32 { WIDE_AT_ONCE = 1, FLAT_AT_ONCE = 2 };
    static constexpr __device__ u32 pad_bytes(bool, bool) { return 16; }

    template <u32 FM, u32 FN, bool A_K, bool B_K, u32 A_STRIDE, u32 B_STRIDE, bool DIRECT>
    struct Product : PatchF32<FM, FN, 8, DIRECT> {
        using PatchF32<FM, FN, 8, DIRECT>::sums;
        enum : u32 { MT = FM / 16, NT = FN / 8, STEP = 16 };
        static_assert(NT % 2 == 0, "B comes in pairs of pieces");

        template <u32 DEPTH>
        __device__ __forceinline__ void accumulate(const T* a, const T* b, u32 lane) {
            // ldmatrix: offset of the row whose address this lane passes. Each of the four matrices has 8 lines and 8
            // steps of k. Order for A: lines 0-7, lines 8-15 (both k 0-7), then the same for k 8-15. Order for B: k
            // 0-7, k 8-15 (both lines 0-7), then the same for lines 8-15.
            const u32 row = lane % 8;
            const u32 second = lane / 8 % 2 * 8;
            const u32 fourth = lane / 16 * 8;
            const u32 a_at = shared_address(a) + (A_K ? (row + second) * A_STRIDE + fourth : (row + fourth) * A_STRIDE + second) * 2;
            const u32 b_at = shared_address(b) + (B_K ? (row + fourth) * B_STRIDE + second : (row + second) * B_STRIDE + fourth) * 2;
#pragma unroll
            for (u32 k = 0; k < DEPTH; k += STEP) {
                u32 x[MT][4];
                u32 y[NT / 2][4];
#pragma unroll
                for (u32 i = 0; i < MT; ++i) {
                    if (A_K) {
                        load_matrices(a_at + (16 * i * A_STRIDE + k) * 2, x[i]);
                    } else {
                        load_matrices_transposed(a_at + (k * A_STRIDE + 16 * i) * 2, x[i]);
                    }
                }
#pragma unroll
                for (u32 j = 0; j < NT / 2; ++j) {
                    if (B_K) {
                        load_matrices(b_at + (16 * j * B_STRIDE + k) * 2, y[j]);
                    } else {
                        load_matrices_transposed(b_at + (k * B_STRIDE + 16 * j) * 2, y[j]);
                    }
                }
#pragma unroll
                for (u32 i = 0; i < MT; ++i) {
#pragma unroll
                    for (u32 j = 0; j < NT; ++j) {
                        multiply(T{}, x[i], y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1], sums[i][j]);
                    }
                }
            }
        }
    };
};

using PrecisionBf16 = PrecisionHalf<bf16>;
using PrecisionF16 = PrecisionHalf<f16>;

// ---- f32 in memory, rounded to tf32 for the tensor cores ----

// Rounds to 11 bits of significand: to nearest, ties away from zero. Infinity and NaN stay as they are.
__device__ __forceinline__ u32 rounded_to_tf32(u32 bits) {
    u32 out;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(__int_as_float(static_cast<int>(bits))));
    return out;
}

// Operands are rounded to tf32. An mma has 8 steps of k.
struct PrecisionTf32 {
    using T = float;
    enum : u32 { WIDE_AT_ONCE = 1, FLAT_AT_ONCE = 2 };
    // An operand that is not k-contiguous is read element by element, lane t from row t of k. With a padding of 8 words
    // these reads have no bank conflicts. Interleaved columns have the fewest conflicts with a padding of 4 words.
    static constexpr __device__ u32 pad_bytes(bool k_contiguous, bool dealt) { return k_contiguous || dealt ? 16 : 32; }

    static __device__ __forceinline__ u32 bits_of(float value) { return static_cast<u32>(__float_as_int(value)); }

    template <u32 FM, u32 FN, bool A_K, bool B_K, u32 A_STRIDE, u32 B_STRIDE, bool DIRECT>
    struct Product : PatchF32<FM, FN, 4, DIRECT> {
        using PatchF32<FM, FN, 4, DIRECT>::sums;
        enum : u32 { MT = FM / 16, NT = FN / 8, STEP = 8 };
        static_assert(NT % 2 == 0, "B comes in pairs of pieces");

        static __device__ __forceinline__ void prepare(u32 (&bits)[4]) {
#pragma unroll
            for (u32 r = 0; r < 4; ++r) bits[r] = rounded_to_tf32(bits[r]);
        }

        template <u32 DEPTH>
        __device__ __forceinline__ void accumulate(const float* a, const float* b, u32 lane) {
            const u32 row = lane % 8;
            const u32 second = lane / 8 % 2;
            const u32 fourth = lane / 16;
            const u32 g = lane / 4;
            const u32 t = lane % 4;
            const u32 a_at = shared_address(a) + ((row + second * 8) * A_STRIDE + fourth * 4) * 4;
            const u32 b_at = shared_address(b) + ((row + fourth * 8) * B_STRIDE + second * 4) * 4;
#pragma unroll
            for (u32 k = 0; k < DEPTH; k += STEP) {
                u32 x[MT][4];
                u32 y[NT / 2][4];
#pragma unroll
                for (u32 i = 0; i < MT; ++i) {
                    if (A_K) {
                        load_matrices(a_at + (16 * i * A_STRIDE + k) * 4, x[i]);
                    } else {
                        const float* at = a + (k + t) * A_STRIDE + 16 * i + g;
                        x[i][0] = bits_of(at[0]);
                        x[i][1] = bits_of(at[8]);
                        x[i][2] = bits_of(at[4 * A_STRIDE]);
                        x[i][3] = bits_of(at[4 * A_STRIDE + 8]);
                    }
                    prepare(x[i]);
                }
#pragma unroll
                for (u32 j = 0; j < NT / 2; ++j) {
                    if (B_K) {
                        load_matrices(b_at + (16 * j * B_STRIDE + k) * 4, y[j]);
                    } else {
                        // Columns are interleaved here if DIRECT, because they are read one by one anyway.
                        enum : u32 { NEXT = DIRECT ? 2 : 8 };
                        const u32 col = DIRECT ? 32 * (j / 2) + 8 * (g / 2) + 4 * (j % 2) + g % 2 : 16 * j + g;
                        const float* at = b + (k + t) * B_STRIDE + col;
                        y[j][0] = bits_of(at[0]);
                        y[j][1] = bits_of(at[4 * B_STRIDE]);
                        y[j][2] = bits_of(at[NEXT]);
                        y[j][3] = bits_of(at[4 * B_STRIDE + NEXT]);
                    }
                    prepare(y[j]);
                }
#pragma unroll
                for (u32 i = 0; i < MT; ++i) {
#pragma unroll
                    for (u32 j = 0; j < NT; ++j) {
                        multiply(0.0f, x[i], y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1], sums[i][j]);
                    }
                }
            }
        }
    };
};
