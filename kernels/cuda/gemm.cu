// GEMM: C[m,n] = op(A) * op(B) in f32 (not tf32). There are no atomics, so the same inputs always give the same bits.
//
//   nn: A[m,k], B[k,n]   dX = dY * W
//   nt: A[m,k], B[n,k]   Y  = X * W^T
//   tn: A[k,m], B[k,n]   dW = dY^T * X
//
// Kernels, for each of the three layouts:
//   tiled   a block computes a 64x64 tile of C; for shapes with enough tiles to fill a GPU
//   sliced  a block computes a 16x32 tile of C; its eight warps divide k and add their sums at the end. For thin
//           shapes, where 64x64 tiles would leave most of the GPU idle (64x784: 13 tiles of 64x64, but 100 of 16x32)
//
// Both kernels have the same two components. `Panel` copies a strip of an operand from global memory through registers
// to shared memory, where each step of k is one row, whatever the operand's layout. With `multiply_panels` one warp
// accumulates a 16x32 patch of C, 4x4 elements in each lane: two 16-byte loads from shared memory feed sixteen fused
// multiply-adds.
#include "common.cuh"

// ---- components of both kernels ----

enum : u32 {
    DEPTH = 16,       // steps of k in a panel
    PATCH_ROWS = 16,  // patch of C that one warp accumulates
    PATCH_COLS = 32,
    MICRO = 4,  // each lane holds MICRO x MICRO elements of the patch
    LANES_ACROSS = PATCH_COLS / MICRO,
};

// Reads `*from` if `inside`, otherwise returns zero without a memory access. It is PTX with a predicate, because the
// compiler would generate a branch; with a predicate the loads of a panel are issued back to back. `volatile` keeps the
// loads before the multiplications that hide their latency; otherwise the compiler moves them down to the uses of the
// values.
__device__ __forceinline__ float read_if(bool inside, const float* from) {
    float value;
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.u32 p, %2, 0;\n\t"
        "mov.f32 %0, 0f00000000;\n\t"
        "@p ld.global.nc.f32 %0, [%1];\n\t"
        "}"
        : "=f"(value)
        : "l"(from), "r"(static_cast<u32>(inside)));
    return value;
}

// A strip of EXTENT lines and DEPTH steps of k, copied by THREADS threads. A "line" is a row of op(A) or a column of
// op(B). Elements outside the matrix are stored as zeros, so the inner loops need no bounds checks.
template <u32 EXTENT, u32 THREADS, bool K_CONTIGUOUS>
struct Panel {
    enum : u32 {
        COUNT = EXTENT * DEPTH / THREADS,
        // The padding of four floats keeps 16-byte alignment, and halves the bank conflicts of the transposing store.
        PITCH = EXTENT + 4,
        SIZE = DEPTH * PITCH,
        // Neighbouring threads read neighbouring addresses. Therefore the operand's layout determines which line and
        // step a thread starts at, and whether its further elements are on other lines or at other steps.
        LINE_STRIDE = K_CONTIGUOUS ? THREADS / DEPTH : 0,
        STEP_STRIDE = K_CONTIGUOUS ? 0 : THREADS / EXTENT,
    };
    static_assert(THREADS % DEPTH == 0 && THREADS % EXTENT == 0, "a thread's elements lie on one line or one step");

    float staged[COUNT];

    static __device__ __forceinline__ u32 line_of(u32 thread) { return K_CONTIGUOUS ? thread / DEPTH : thread % EXTENT; }
    static __device__ __forceinline__ u32 step_of(u32 thread) { return K_CONTIGUOUS ? thread % DEPTH : thread / EXTENT; }

    __device__ __forceinline__ void fetch(const float* __restrict__ operand, u32 lines, u32 steps, u32 first_line,
                                          u32 first_step, u32 thread) {
        const u32 line = first_line + line_of(thread);
        const u32 step = first_step + step_of(thread);
        const u64 pitch = K_CONTIGUOUS ? steps : lines;
        const u64 stride = pitch * (K_CONTIGUOUS ? LINE_STRIDE : STEP_STRIDE);
        const float* from = operand + (K_CONTIGUOUS ? line * pitch + step : step * pitch + line);
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            staged[i] = read_if(line + i * LINE_STRIDE < lines && step + i * STEP_STRIDE < steps, from);
            from += stride;
        }
    }

    __device__ __forceinline__ void store(float* panel, u32 thread) const {
        float* to = panel + step_of(thread) * PITCH + line_of(thread);
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) to[i * (STEP_STRIDE * PITCH + LINE_STRIDE)] = staged[i];
    }
};

// Reads 16 aligned bytes of shared memory with one load. It is PTX, because NVRTC splits a plain float4 read
// differently from one compilation to the next (its choice depends on addresses of its own data structures), and the
// PTX must be reproducible.
__device__ __forceinline__ void read_shared(const float* from, float (&to)[MICRO]) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(from));
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "r"(address)
                 : "memory");
}

// `a` and `b` point at this lane's first row and column within the panels.
template <u32 A_PITCH, u32 B_PITCH>
__device__ __forceinline__ void multiply_panels(const float* a, const float* b, float (&sums)[MICRO][MICRO]) {
#pragma unroll
    for (u32 p = 0; p < DEPTH; ++p) {
        float x[MICRO];
        float y[MICRO];
        read_shared(a + p * A_PITCH, x);
        read_shared(b + p * B_PITCH, y);
#pragma unroll
        for (u32 i = 0; i < MICRO; ++i) {
#pragma unroll
            for (u32 j = 0; j < MICRO; ++j) sums[i][j] = __fmaf_rn(x[i], y[j], sums[i][j]);
        }
    }
}

// ---- tiled ----

enum : u32 {
    TILE = 64,
    TILED_THREADS = 256,
    PATCHES_ACROSS = TILE / PATCH_COLS,
};

template <bool A_K_CONTIGUOUS, bool B_K_CONTIGUOUS>
__device__ __forceinline__ void gemm_tiled(const float* __restrict__ a, const float* __restrict__ b,
                                           float* __restrict__ c, u32 m, u32 n, u32 k) {
    using PanelA = Panel<TILE, TILED_THREADS, A_K_CONTIGUOUS>;
    using PanelB = Panel<TILE, TILED_THREADS, B_K_CONTIGUOUS>;
    // Double buffering: while one pair of panels is multiplied, the next pair is stored, so an iteration needs only one
    // barrier.
    __shared__ __align__(16) float a_panels[2][PanelA::SIZE];
    __shared__ __align__(16) float b_panels[2][PanelB::SIZE];

    const u32 tiles_across = (n + TILE - 1) / TILE;
    const u32 first_row = blockIdx.x / tiles_across * TILE;
    const u32 first_col = blockIdx.x % tiles_across * TILE;
    const u32 thread = threadIdx.x;
    const u32 warp = thread / WARP;
    const u32 lane = thread % WARP;
    const u32 lane_row = warp / PATCHES_ACROSS * PATCH_ROWS + lane / LANES_ACROSS * MICRO;
    const u32 lane_col = warp % PATCHES_ACROSS * PATCH_COLS + lane % LANES_ACROSS * MICRO;

    PanelA panel_a;
    PanelB panel_b;
    float sums[MICRO][MICRO] = {};

    panel_a.fetch(a, m, k, first_row, 0, thread);
    panel_b.fetch(b, n, k, first_col, 0, thread);
    panel_a.store(a_panels[0], thread);
    panel_b.store(b_panels[0], thread);
    __syncthreads();
    u32 current = 0;
    for (u32 step = 0; step < k; step += DEPTH) {
        // The next panels' loads are in flight while these are multiplied. The last iteration fetches and stores zeros,
        // which is cheaper than a branch in every iteration.
        panel_a.fetch(a, m, k, first_row, step + DEPTH, thread);
        panel_b.fetch(b, n, k, first_col, step + DEPTH, thread);
        multiply_panels<PanelA::PITCH, PanelB::PITCH>(a_panels[current] + lane_row, b_panels[current] + lane_col, sums);
        current ^= 1;
        panel_a.store(a_panels[current], thread);
        panel_b.store(b_panels[current], thread);
        __syncthreads();
    }

    const u32 col = first_col + lane_col;
    const bool wide_stores = n % 4 == 0 && reinterpret_cast<u64>(c) % 16 == 0;
#pragma unroll
    for (u32 i = 0; i < MICRO; ++i) {
        const u32 row = first_row + lane_row + i;
        if (row >= m) break;
        float* out = c + static_cast<u64>(row) * n + col;
        if (wide_stores) {
            // n is a multiple of four, so a group of four columns is completely inside the matrix or completely
            // outside.
            if (col < n) {
                *reinterpret_cast<float4*>(out) = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
            }
        } else {
#pragma unroll
            for (u32 j = 0; j < MICRO; ++j) {
                if (col + j < n) out[j] = sums[i][j];
            }
        }
    }
}

// ---- sliced ----

enum : u32 {
    SLICED_THREADS = 256,
    SLICES = SLICED_THREADS / WARP,
    PATCH = PATCH_ROWS * PATCH_COLS,
};

template <bool A_K_CONTIGUOUS, bool B_K_CONTIGUOUS>
__device__ __forceinline__ void gemm_sliced(const float* __restrict__ a, const float* __restrict__ b,
                                            float* __restrict__ c, u32 m, u32 n, u32 k) {
    using PanelA = Panel<PATCH_ROWS, WARP, A_K_CONTIGUOUS>;
    using PanelB = Panel<PATCH_COLS, WARP, B_K_CONTIGUOUS>;
    enum : u32 { WARP_SHARE = PanelA::SIZE + PanelB::SIZE };
    static_assert(WARP_SHARE >= PATCH, "the partial sums reuse the panels' memory");
    __shared__ __align__(16) float shared[SLICES * WARP_SHARE];

    const u32 tiles_across = (n + PATCH_COLS - 1) / PATCH_COLS;
    const u32 first_row = blockIdx.x / tiles_across * PATCH_ROWS;
    const u32 first_col = blockIdx.x % tiles_across * PATCH_COLS;
    const u32 warp = threadIdx.x / WARP;
    const u32 lane = threadIdx.x % WARP;
    const u32 lane_row = lane / LANES_ACROSS * MICRO;
    const u32 lane_col = lane % LANES_ACROSS * MICRO;

    PanelA panel_a;
    PanelB panel_b;
    float sums[MICRO][MICRO] = {};

    // Warp w processes panels w, w + SLICES, ... of k. Each warp has its own panels in shared memory, so it does not
    // wait for other warps before the end.
    float* a_panel = shared + warp * WARP_SHARE;
    float* b_panel = a_panel + PanelA::SIZE;
    panel_a.fetch(a, m, k, first_row, warp * DEPTH, lane);
    panel_b.fetch(b, n, k, first_col, warp * DEPTH, lane);
    for (u32 step = warp * DEPTH; step < k; step += SLICES * DEPTH) {
        panel_a.store(a_panel, lane);
        panel_b.store(b_panel, lane);
        __syncwarp();
        panel_a.fetch(a, m, k, first_row, step + SLICES * DEPTH, lane);
        panel_b.fetch(b, n, k, first_col, step + SLICES * DEPTH, lane);
        multiply_panels<PanelA::PITCH, PanelB::PITCH>(a_panel + lane_row, b_panel + lane_col, sums);
        __syncwarp();
    }

    // The warps' sums are written to shared memory, and added in warp order.
    __syncthreads();
    float* partial = shared + warp * PATCH;
#pragma unroll
    for (u32 i = 0; i < MICRO; ++i) {
        *reinterpret_cast<float4*>(partial + (lane_row + i) * PATCH_COLS + lane_col) =
            make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
    }
    __syncthreads();
#pragma unroll
    for (u32 element = threadIdx.x; element < PATCH; element += SLICED_THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (u32 slice = 0; slice < SLICES; ++slice) sum += shared[slice * PATCH + element];
        const u32 row = first_row + element / PATCH_COLS;
        const u32 col = first_col + element % PATCH_COLS;
        if (row < m && col < n) c[static_cast<u64>(row) * n + col] = sum;
    }
}

// ---- entry points ----

// With a launch bound of two blocks per multiprocessor, ptxas does not spill registers to fit more blocks.
#define GEMM(layout, algorithm, threads, a_k_contiguous, b_k_contiguous)                                     \
    extern "C" __global__ void __launch_bounds__(threads, 2)                                                 \
        gemm_##layout##_##algorithm(const float* __restrict__ a, const float* __restrict__ b,                \
                                    float* __restrict__ c, u32 m, u32 n, u32 k) {                            \
        gemm_##algorithm<a_k_contiguous, b_k_contiguous>(a, b, c, m, n, k);                                  \
    }

GEMM(nn, tiled, TILED_THREADS, true, false)
GEMM(nt, tiled, TILED_THREADS, true, true)
GEMM(tn, tiled, TILED_THREADS, false, false)
GEMM(nn, sliced, SLICED_THREADS, true, false)
GEMM(nt, sliced, SLICED_THREADS, true, true)
GEMM(tn, sliced, SLICED_THREADS, false, false)
