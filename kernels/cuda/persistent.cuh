// Many training steps in one launch, for nets so small that a step is mostly the time between its launches.
//
// The steps' operations are phases; each is cut into the same items that are the blocks of its launch by itself, and the
// blocks of this grid take them in turn. An item is computed by the same code as there, so the bits are the same whatever
// the grid. Phases that need nothing of each other follow without a stop; between others the whole grid meets. All blocks
// therefore have to be on the device at the same time: a cooperative launch, or one cluster.
//
// The loss is cut in two, so that the rest of a step need not wait for its mean: a warp of softmax_loss.cu's block takes
// its rows and leaves their sum in `sums`; later the sums are added in the order in which that kernel adds them.
#pragma once

#include "gather.cuh"
#include "linear_entry.cuh"
#include "softmax_loss.cuh"

enum PhaseKind : u32 {
    GATHER_U8,
    GATHER_F32,
    GATHER_LABELS,
    LOSS_ROWS,
    LOSS_MEAN,
    FORWARD_THIN16,
    FORWARD_THIN32,
    INPUT_THIN16,
    INPUT_THIN32,
    GRADIENT_FINE,
    GRADIENT_FLAT,
    GRADIENT_SLIM,
};

enum : u32 { PERSISTENT_THREADS = 256, MOST_PHASES = 32, WARPS_OF_ITEM = PERSISTENT_THREADS / WARP };

struct GatherArguments {
    const void* source;
    const u32* indices;
    const u32* cursor;
    void* out;
    u32 rows;
    u32 cols;
    u32 pitch;
    u32 batch;
    u32 source_rows;
    float scale;
    float shift;
};

struct LossArguments {
    const float* logits;
    const u32* labels;
    void* dlogits;
    float* sums;  // one for each of the WARPS warps of each BLOCK_ROWS rows
    float* loss;
    u32* cursor;  // may be null, if it is not advanced
    u32 rows;
    u32 classes;
    u32 dlogits_pitch;
    u32 advance;
    float scale;
};

// The Rust structs of the same names match these.
struct Phase {
    u32 kind;
    u32 items;
    u32 first;  // the block that takes item 0
    u32 meets;  // whether the grid meets behind it
    union {
        LinearArguments linear;
        GatherArguments gather;
        LossArguments loss;
    };
};

// Parameters of a kernel may have 4096 bytes, and lie where every block reads them fast.
struct PersistentArguments {
    Phase phases[MOST_PHASES];
    u32* meeting;  // of a grid that is no cluster: one word whose 31 low bits are zero, and zero again at the end
    u32 count;
    u32 steps;
};
static_assert(PERSISTENT_THREADS == GATHER_THREADS, "an item is a block");
static_assert(sizeof(Phase) == 120 && sizeof(PersistentArguments) == 3856, "as in cuda/persistent.rs");

// Behind it, each block sees what all blocks wrote before it. The first block adds what is missing to 2^31, so the word's
// highest bit turns when the last one has come, and the others are zero for the next time.
__device__ __forceinline__ void meet(u32* meeting) {
#if __CUDA_ARCH__ >= 900
    if (meeting == nullptr) {
        __syncwarp();
        asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
        return;
    }
#endif
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 own = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
        u32 before;
        asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(meeting), "r"(own) : "memory");
        u32 now;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(meeting) : "memory");
        } while (((before ^ now) & 0x80000000u) == 0);
    }
    __syncthreads();
}

// Eight warps of softmax_loss.cu's block number item / 4.
template <typename T>
__device__ __forceinline__ void loss_rows(const LossArguments& p, u32 item) {
    const u32 lane = threadIdx.x % WARP;
    const u32 block = item / (WARPS / WARPS_OF_ITEM);
    const u32 warp = item % (WARPS / WARPS_OF_ITEM) * WARPS_OF_ITEM + threadIdx.x / WARP;
    const u64 first = static_cast<u64>(block) * BLOCK_ROWS;
    const u64 end = first + BLOCK_ROWS < p.rows ? first + BLOCK_ROWS : p.rows;
    const RowsOfWarp own = rows_of_warp(p.logits, p.labels, static_cast<T*>(p.dlogits), first + warp, end, p.classes,
                                        p.dlogits_pitch, p.scale, false, lane);
    if (lane == 0) p.sums[block * WARPS + warp] = own.sum;
}

// Adds as softmax_loss.cu does: the warps of a block, then the blocks if there are several.
__device__ __forceinline__ void loss_mean(const LossArguments& p) {
    if (threadIdx.x >= WARP) return;
    const u32 lane = threadIdx.x;
    const u32 blocks = (p.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    float sum = 0.0f;
    for (u32 block = 0; block < blocks; ++block) {
        const float of_block = warp_sum(p.sums[block * WARPS + lane]);
        if (block % WARP == lane) sum += of_block;
    }
    sum = blocks == 1 ? __shfl_sync(ALL_LANES, sum, 0) : warp_sum(sum);
    if (lane == 0) {
        const u32 step = p.cursor == nullptr ? 0 : p.cursor[0];
        p.loss[step] = sum / static_cast<float>(p.rows);
        if (p.advance != 0) p.cursor[0] = step + 1;
    }
}

template <typename S, typename T>
__device__ __forceinline__ void gather_item(const GatherArguments& p, u32 item) {
    gather_rows<1>(item, static_cast<const S*>(p.source), p.indices, p.cursor, static_cast<T*>(p.out), p.rows, p.cols,
                   p.pitch, p.batch, p.source_rows, p.scale, p.shift);
}

template <class P>
__device__ __forceinline__ void run_item(const Phase& phase, u32 item) {
    using T = typename P::T;
    using Forward = ForwardEpilogue<T>;
    using Input = InputEpilogue<T>;
    switch (phase.kind) {
        case GATHER_U8:
            gather_item<u8, T>(phase.gather, item);
            break;
        case GATHER_F32:
            gather_item<float, T>(phase.gather, item);
            break;
        case GATHER_LABELS: {
            const GatherArguments& p = phase.gather;
            const u64 thread = static_cast<u64>(item) * PERSISTENT_THREADS + threadIdx.x;
            gather_label(thread, static_cast<const u8*>(p.source), p.indices, p.cursor, static_cast<u32*>(p.out), p.rows,
                         p.batch, p.source_rows);
            break;
        }
        case LOSS_ROWS:
            loss_rows<T>(phase.loss, item);
            break;
        case LOSS_MEAN:
            loss_mean(phase.loss);
            break;
        case FORWARD_THIN16:
            Thin<P, Forward, true, 16>::run(phase.linear, item, linear_shared);
            break;
        case FORWARD_THIN32:
            Thin<P, Forward, true, 32>::run(phase.linear, item, linear_shared);
            break;
        case INPUT_THIN16:
            Thin<P, Input, false, 16>::run(phase.linear, item, linear_shared);
            break;
        case INPUT_THIN32:
            Thin<P, Input, false, 32>::run(phase.linear, item, linear_shared);
            break;
        case GRADIENT_FINE:
            GradientFine<P>::run(phase.linear, item, linear_shared);
            break;
        case GRADIENT_FLAT:
            GradientFlat<P>::run(phase.linear, item, linear_shared);
            break;
        case GRADIENT_SLIM:
            GradientSlim<P>::run(phase.linear, item, linear_shared);
            break;
    }
}

template <class P>
__device__ __forceinline__ void run_steps(const PersistentArguments& p) {
    for (u32 step = 0; step < p.steps; ++step) {
        for (u32 number = 0; number < p.count; ++number) {
            const Phase& phase = p.phases[number];
            const u32 items = phase.items;
            const u32 first = phase.first;
            for (u32 item = blockIdx.x - first + (blockIdx.x < first ? gridDim.x : 0); item < items; item += gridDim.x) {
                run_item<P>(phase, item);
                // The next item takes the same shared memory.
                __syncthreads();
            }
            if (phase.meets != 0) meet(p.meeting);
        }
    }
}

#define PERSISTENT_KERNEL(name, precision)                                                                     \
    extern "C" __global__ void __launch_bounds__(PERSISTENT_THREADS, 1)                                        \
        persistent_steps_##name(const __grid_constant__ PersistentArguments p) {                               \
        run_steps<precision>(p);                                                                               \
    }
