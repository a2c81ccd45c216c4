// Instructions of compute capability 9.0 for GEMMs: mbarriers, which count arrivals and copied bytes; the Tensor Memory
// Accelerator (TMA), which copies tiles of a matrix; and wgmma, the matrix multiplication of a warpgroup (four warps)
// with operands in shared memory. wgmma and setmaxnreg need the target sm_90a.
//
// PTX ISA: "mbarrier", "cp.async.bulk.tensor", "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include "tensor.cuh"

// TMA descriptor of a matrix, written by the driver (cuTensorMapEncodeTiled).
struct alignas(64) TensorMap {
    u64 words[16];
};

// ---- mbarriers ----

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes the initialised mbarriers visible to TMA.
__device__ __forceinline__ void barriers_are_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and makes the current phase wait for `bytes` bytes of TMA copies as well.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase with this parity has completed.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n\t"
        ".reg .pred done;\n\t"
        "again:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@done bra out;\n\t"
        "bra again;\n\t"
        "out:\n\t"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// Returns whether the phase with this parity has completed.
__device__ __forceinline__ bool barrier_passed(u32 barrier, u32 parity) {
    u32 passed;
    asm volatile(
        "{\n\t"
        ".reg .pred done;\n\t"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, done;\n\t"
        "}"
        : "=r"(passed)
        : "r"(barrier), "r"(parity)
        : "memory");
    return passed != 0;
}
// Named barrier: waits until `threads` threads have called this with the same `number`. Number 0 is the barrier of
// __syncthreads(), so callers use others.
__device__ __forceinline__ void meet(u32 number, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- Tensor Memory Accelerator (TMA) ----

// Copies the map's box at (x, y) to shared memory; the mbarrier counts its bytes. Elements outside the matrix are
// filled with zeros, and their bytes are counted, too.
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap& map, u32 x, u32 y, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(&map), "r"(x), "r"(y), "r"(barrier)
                 : "memory");
}
// Copies a box from shared memory to (x, y) of the map's matrix. Elements outside the matrix are not written.
__device__ __forceinline__ void store_tile(const TensorMap& map, u32 x, u32 y, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x), "r"(y), "r"(from)
                 : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the last GROUPS of this thread's store groups have been read from shared memory.
template <u32 GROUPS>
__device__ __forceinline__ void wait_until_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(GROUPS) : "memory");
}
// Makes this thread's writes to shared memory visible to TMA and wgmma (the async proxy).
__device__ __forceinline__ void show_to_engines() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- tiles in shared memory ----

// TMA writes tiles with the 128-byte swizzle: rows of 128 bytes follow each other, and 16-byte chunk c of row r is
// stored as chunk c ^ (r % 8). Then reads along rows and reads across rows have no bank conflicts. A tile is aligned to
// 1,024 bytes.
enum : u32 { SWIZZLED_ROW = 128, SWIZZLED_ROWS = 8 * SWIZZLED_ROW };

__device__ __forceinline__ u32 align_to_swizzle(u32 address) { return (address + SWIZZLED_ROWS - 1) & ~(SWIZZLED_ROWS - 1); }

__device__ __forceinline__ u32 swizzled(u32 row, u32 byte) { return row * SWIZZLED_ROW + (byte ^ (row % 8 * 16)); }

// Shared memory descriptor of a wgmma operand with the 128-byte swizzle; `stride` and `leading` are in bytes. If k is
// contiguous (K-major), `stride` is the distance between groups of 8 lines. If lines are contiguous (MN-major),
// `stride` is the distance between groups of 8 steps of k, and `leading` the distance between groups of 64 lines.
__device__ __forceinline__ u64 operand_at(u32 address, u32 leading, u32 stride) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading >> 4) << 16 |
           static_cast<u64>(stride >> 4) << 32 | static_cast<u64>(1) << 62;
}

// Loads and stores of one, two and four 32-bit words of shared memory.
__device__ __forceinline__ u32 read_one(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}
__device__ __forceinline__ void read_two(u32 address, u32& low, u32& high) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(address) : "memory");
}
__device__ __forceinline__ void read_four(u32 address, u32 (&to)[4]) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void write_one(u32 address, u32 word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
__device__ __forceinline__ void write_four(u32 address, const u32 (&from)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

// ---- warpgroups ----

// setmaxnreg: changes the number of registers per thread. All threads of a warpgroup execute it. `registers_up` waits
// until other warps have released enough registers.
template <u32 REGISTERS>
__device__ __forceinline__ void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <u32 REGISTERS>
__device__ __forceinline__ void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- wgmma ----

enum : u32 { GROUP_THREADS = 4 * WARP };

// The next stage of a pipeline's ring buffer, and the parity of its mbarrier phase.
template <u32 STAGES>
struct Ring {
    u32 stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Before the first wgmma of a group: orders earlier register accesses before it.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <u32 BATCHES>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(BATCHES) : "memory");
}

// Accumulators of a warpgroup's 64 x N patch. Warp w of the four has rows 16w to 16w+15; each eight columns have the
// fragment layout of mma.m16n8. `multiply` accumulates 16 steps of k. LINES_A and LINES_B: the operand's lines are
// contiguous in shared memory (MN-major), instead of k.
template <class T, u32 N>
struct SumsF32 {
    float sums[N / 2];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 i = 0; i < N / 2; ++i) sums[i] = 0.0f;
    }
    // The lane's two neighbouring columns in columns 8 * piece to 8 * piece + 7; in row lane / 4, or 8 rows below it
    // (`below` = 1).
    __device__ __forceinline__ float2 pair(u32 piece, u32 below) const {
        return make_float2(sums[4 * piece + 2 * below], sums[4 * piece + 2 * below + 1]);
    }
};

#define SUMS_4(kind, c, i) kind(c[i]), kind(c[i + 1]), kind(c[i + 2]), kind(c[i + 3])
#define SUMS_8(kind, c, i) SUMS_4(kind, c, i), SUMS_4(kind, c, i + 4)
#define SUMS_16(kind, c, i) SUMS_8(kind, c, i), SUMS_8(kind, c, i + 8)
#define SUMS_32(kind, c, i) SUMS_16(kind, c, i), SUMS_16(kind, c, i + 16)
#define SUMS_64(kind, c, i) SUMS_32(kind, c, i), SUMS_32(kind, c, i + 32)
#define NAMES_16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, adds, 1, 1, %18, %19;"
#define NAMES_32                                                                                                      \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, adds, 1, 1, %34, %35;"
#define LIST_64                                                                                                       \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "  \
    "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
#define NAMES_64 LIST_64 "%64, %65, adds, 1, 1, %66, %67;"
#define MULTIPLY(sums_type, T, N, types, count, kind)                                                              \
    template <bool LINES_A, bool LINES_B>                                                                          \
    __device__ __forceinline__ void multiply(sums_type<T, N>& c, u64 a, u64 b) {                                   \
        asm volatile("{\n\t.reg .pred adds;\n\tsetp.eq.u32 adds, 0, 0;\n\t"                                        \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16." types " " NAMES_##count "\n\t}"               \
                     : SUMS_##count(kind, c.sums, 0)                                                               \
                     : "l"(a), "l"(b), "n"(static_cast<int>(LINES_A)), "n"(static_cast<int>(LINES_B)));            \
    }
MULTIPLY(SumsF32, f16, 32, "f32.f16.f16", 16, "+f")
MULTIPLY(SumsF32, f16, 64, "f32.f16.f16", 32, "+f")
MULTIPLY(SumsF32, f16, 128, "f32.f16.f16", 64, "+f")
MULTIPLY(SumsF32, bf16, 32, "f32.bf16.bf16", 16, "+f")
MULTIPLY(SumsF32, bf16, 64, "f32.bf16.bf16", 32, "+f")
MULTIPLY(SumsF32, bf16, 128, "f32.bf16.bf16", 64, "+f")

// Accumulates 8 steps of k in tf32. A is in registers: each warp's 16 rows in the fragment layout of mma.m16n8k8. B is
// K-major. The registers of A and of the accumulators must not be accessed before `products_wait`; `keep` ensures this
// for A.
__device__ __forceinline__ void multiply(SumsF32<float, 128>& c, const u32 (&a)[4], u64 b) {
    asm volatile("{\n\t.reg .pred adds;\n\tsetp.eq.u32 adds, 0, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 " LIST_64 "{%64, %65, %66, %67}, %68, adds, 1, 1;\n\t}"
                 : SUMS_64("+f", c.sums, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// Keeps the compiler from reusing these registers before this point.
template <u32 STEPS>
__device__ __forceinline__ void keep(u32 (&a)[STEPS][4]) {
#pragma unroll
    for (u32 step = 0; step < STEPS; ++step) {
        asm volatile("" : "+r"(a[step][0]), "+r"(a[step][1]), "+r"(a[step][2]), "+r"(a[step][3])::"memory");
    }
}
