// The GEMMs of linear.cuh in bf16 and f16 on compute capability 9.0. TMA loads tiles several pipeline stages ahead, and
// warpgroups multiply them (wgmma) directly from shared memory.
//
//   WarpgroupTile   128 x 128 for many examples. For few examples, 64 outputs (or inputs) x 32 examples, computed
//                   transposed: wgmma has 64 rows, which the weights fill and the examples would not
//   StreamedUpdate  SGD update for few examples, whose duration is that of reading and writing the weights: persistent
//                   blocks load the next tiles of weights while they update one
//
// One producer warp issues the TMA copies; one or two consumer warpgroups multiply. Each stage has two mbarriers:
// `full` (its copies have completed) and `free` (the consumers have read it).
#pragma once

#include "hopper.cuh"
#include "tile_sums.cuh"

// Tiles of a GEMM operand. LINES_FIRST: lines are contiguous (MN-major); otherwise k is contiguous (K-major).
template <u32 LINES, bool LINES_FIRST>
struct TiledOperand {
    enum : u32 {
        // Steps of k in a stage: 128 bytes of elements.
        DEPTH = 64,
        // A TMA box has 64 steps of k, and all lines; with LINES_FIRST it has 64 lines, and a tile has several boxes.
        BOXES = LINES_FIRST ? LINES / 64 : 1,
        BOX_BYTES = (LINES_FIRST ? 64 : LINES) * SWIZZLED_ROW,
        BYTES = LINES * DEPTH * 2,
        // Byte offset of the next 16 steps of k.
        STEP_BYTES = LINES_FIRST ? 2 * SWIZZLED_ROWS : 32,
        // Byte offset of the next 64 lines.
        LINES_BYTES = LINES_FIRST ? BOX_BYTES : 64 * SWIZZLED_ROW,
    };
    static_assert(!LINES_FIRST || LINES % 64 == 0, "boxes of 64 lines");

    static __device__ __forceinline__ void load(u32 to, const TensorMap& map, u32 line, u32 k, u32 barrier) {
#pragma unroll
        for (u32 box = 0; box < BOXES; ++box) {
            copy_tile(to + box * BOX_BYTES, map, LINES_FIRST ? line + 64 * box : k, LINES_FIRST ? k : line, barrier);
        }
    }
    static __device__ __forceinline__ u64 at(u32 address) { return operand_at(address, BOX_BYTES, SWIZZLED_ROWS); }
};

// Initialises the mbarriers; all threads of the block call this. A phase of `full` completes when the producer has
// arrived and its copies have completed, a phase of `free` when `consumers` consumers have arrived.
template <u32 STAGES>
__device__ __forceinline__ void prepare_barriers(u32 full, u32 free, u32 consumers) {
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(free + 8 * stage, consumers);
        }
        barriers_are_ready();
    }
    __syncthreads();
}

// Each of GROUPS warpgroups multiplies 64 lines of the left operand with ACROSS lines of the right one. TRANSPOSED: the
// left operand is B, and its lines are columns of C; otherwise it is A, and its lines are rows of C.
template <class T, class Epilogue, bool A_K, bool B_K, u32 GROUPS, u32 ACROSS, bool TRANSPOSED,
          u32 STAGES>
struct WarpgroupTile {
    enum : u32 {
        CONSUMERS = GROUPS * GROUP_THREADS,
        THREADS = CONSUMERS + WARP,
        DOWN = 64 * GROUPS,
        BM = TRANSPOSED ? ACROSS : DOWN,
        BN = TRANSPOSED ? DOWN : ACROSS,
        DEPTH = 64,
    };
    enum : bool { LEFT_LINES = TRANSPOSED ? !B_K : !A_K, RIGHT_LINES = TRANSPOSED ? !A_K : !B_K };
    using Left = TiledOperand<DOWN, LEFT_LINES>;
    using Right = TiledOperand<ACROSS, RIGHT_LINES>;
    using Product = SumsF32<T, ACROSS>;
    // If TRANSPOSED, lanes write columns: a pitch of 4 floats more than a multiple of the banks avoids bank conflicts.
    using Sums = TileSums<Epilogue, BM, BN, 1, CONSUMERS, BN + (TRANSPOSED ? 4 : 8)>;
    enum : u32 {
        STAGE_BYTES = Left::BYTES + Right::BYTES,
        BARRIERS = STAGES * STAGE_BYTES,
        SHARED_BYTES = BARRIERS + 2 * 8 * STAGES + SWIZZLED_ROWS,
    };
    static_assert(Sums::SUM_BYTES <= BARRIERS, "sums take the place of the stages");
    static_assert(STAGE_BYTES % SWIZZLED_ROWS == 0, "tiles begin on 1,024 bytes");

    static __device__ __forceinline__ void run(const LinearArguments& p, const TensorMap& a_map, const TensorMap& b_map,
                                               unsigned char* dynamic) {
        const u32 base = align_to_swizzle(shared_address(dynamic));
        unsigned char* shared = dynamic + (base - shared_address(dynamic));
        const u32 thread = threadIdx.x;
        const u32 warp = thread / WARP;
        const u32 full = base + BARRIERS;
        const u32 free = full + 8 * STAGES;
        prepare_barriers<STAGES>(full, free, CONSUMERS / WARP);

        const u32 tiles_down = (p.m + BM - 1) / BM;
        const u32 all_tiles = tiles_down * ((p.n + BN - 1) / BN);
        const u32 tile = blockIdx.x % all_tiles;
        const u32 split = blockIdx.x / all_tiles;
        const u32 first_row = tile % tiles_down * BM;
        const u32 first_col = tile / tiles_down * BN;
        const u32 trips_in_all = (p.k + DEPTH - 1) / DEPTH;
        const u32 trips_each = (trips_in_all + p.splits - 1) / p.splits;
        const u32 first_trip = min(split * trips_each, trips_in_all);
        const u32 trips = min(trips_each, trips_in_all - first_trip);
        Ring<STAGES> ring;

        if (warp == CONSUMERS / WARP) {
            if (thread % WARP == 0) {
                const TensorMap& left = TRANSPOSED ? b_map : a_map;
                const TensorMap& right = TRANSPOSED ? a_map : b_map;
                const u32 left_line = TRANSPOSED ? first_col : first_row;
                const u32 right_line = TRANSPOSED ? first_row : first_col;
                for (u32 trip = 0; trip < trips; ++trip) {
                    if (trip >= STAGES) barrier_wait(free + 8 * ring.stage, ring.parity ^ 1);
                    const u32 stage = base + ring.stage * STAGE_BYTES;
                    const u32 barrier = full + 8 * ring.stage;
                    barrier_expect(barrier, STAGE_BYTES);
                    Left::load(stage, left, left_line, (first_trip + trip) * DEPTH, barrier);
                    Right::load(stage + Left::BYTES, right, right_line, (first_trip + trip) * DEPTH, barrier);
                    ring.advance();
                }
            }
            return;
        }

        const u32 group = warp / 4;
        Product product;
        product.clear();
        float row_sum = 0.0f;
        const bool sums_rows = Epilogue::SUMS_ROWS && p.bias != nullptr && first_col == 0 && thread < BM;
        u32 before = 0;
        for (u32 trip = 0; trip < trips; ++trip) {
            barrier_wait(full + 8 * ring.stage, ring.parity);
            const u32 stage = base + ring.stage * STAGE_BYTES;
            products_begin();
#pragma unroll
            for (u32 k = 0; k < DEPTH / 16; ++k) {
                multiply<LEFT_LINES, RIGHT_LINES>(product, Left::at(stage + group * Left::LINES_BYTES + k * Left::STEP_BYTES),
                                                  Right::at(stage + Left::BYTES + k * Right::STEP_BYTES));
            }
            products_commit();
            if (Epilogue::SUMS_ROWS && sums_rows) {
                const unsigned char* lines = shared + ring.stage * STAGE_BYTES + thread / 64 * Left::LINES_BYTES;
#pragma unroll 8
                for (u32 k = 0; k < DEPTH; ++k) {
                    row_sum += load_float(*reinterpret_cast<const T*>(lines + swizzled(k, thread % 64 * 2)));
                }
            }
            // The previous wgmma group has completed, so its stage is free.
            products_wait<1>();
            if (trip > 0 && thread % WARP == 0) barrier_arrive(free + 8 * before);
            before = ring.stage;
            ring.advance();
        }
        products_wait<0>();
        // All consumers must have read the last stage before the sums overwrite it.
        meet(1, CONSUMERS);

        float* sums = reinterpret_cast<float*>(shared);
        const u32 row = group * 64 + warp % 4 * 16 + thread % WARP / 4;
        const u32 col = thread % 4 * 2;
#pragma unroll
        for (u32 piece = 0; piece < ACROSS / 8; ++piece) {
#pragma unroll
            for (u32 below = 0; below < 2; ++below) {
                const float2 pair = product.pair(piece, below);
                const u32 down = row + 8 * below;
                const u32 across = 8 * piece + col;
                if (TRANSPOSED) {
                    sums[across * Sums::SUM_PITCH + down] = pair.x;
                    sums[(across + 1) * Sums::SUM_PITCH + down] = pair.y;
                } else {
                    *reinterpret_cast<float2*>(sums + down * Sums::SUM_PITCH + across) = pair;
                }
            }
        }
        meet(1, CONSUMERS);
        const bool whole = first_row + BM <= p.m && first_col + BN <= p.n && p.out_pitch % Epilogue::GROUP == 0;
        Sums::finish(p, sums, tile, split, first_row, first_col, whole, sums_rows, row_sum);
    }
};

// Commits the TMA stores of iteration `trip`, and waits until those of the previous iteration have been read from
// shared memory. Then the previous stage is free.
__device__ __forceinline__ void send_off(u32 trip, u32 free) {
    commit_stores();
    wait_until_read<1>();
    if (trip > 0) barrier_arrive(free);
}

// Applies the SGD step to the two weights at `at`.
template <class T>
__device__ __forceinline__ void step_pair(unsigned char* at, float scale, float2 slope) {
    u32* pair = reinterpret_cast<u32*>(at);
    const u32 both = *pair;
    const float low = __fmaf_rn(-scale, slope.x, load_float(T{static_cast<u16>(both)}));
    const float high = __fmaf_rn(-scale, slope.y, load_float(T{static_cast<u16>(both >> 16)}));
    *pair = Stored<T>::of(low).bits | static_cast<u32>(Stored<T>::of(high).bits) << 16;
}

// Applies the SGD step to the bias of output `row + line`. Its gradient is the sum of column `line` of dY, of the 64
// columns at `lines`.
template <class T, u32 EXAMPLES>
__device__ __forceinline__ void step_bias(const LinearArguments& p, const unsigned char* lines, u32 row, u32 line) {
    float sum = 0.0f;
#pragma unroll 8
    for (u32 k = 0; k < EXAMPLES; ++k) {
        sum += load_float(*reinterpret_cast<const T*>(lines + swizzled(k, line * 2)));
    }
    p.bias[row + line] = __fmaf_rn(-p.scale, sum, p.bias[row + line]);
}

// W -= scale * dY^T X for at most 64 examples, and likewise the bias. The weights have type T, without f32 master
// weights. Tiles of 128 x 128 weights are loaded into shared memory, updated there, and stored.
template <class T>
struct StreamedUpdate {
    enum : u32 {
        CONSUMERS = 2 * GROUP_THREADS,
        THREADS = CONSUMERS + WARP,
        SIDE = 128,
        // Four boxes of 64 x 64.
        BOX_BYTES = 64 * SWIZZLED_ROW,
        WEIGHT_BYTES = 4 * BOX_BYTES,
        // With 32 examples a stage is smaller, and there are four stages instead of three.
        MOST_STAGES = 4,
        ROOM = 196608,
        SHARED_BYTES = ROOM + 2 * 8 * MOST_STAGES + SWIZZLED_ROWS,
    };

    template <u32 EXAMPLES, u32 STAGES>
    static __device__ __forceinline__ void run(const LinearArguments& p, const TensorMap& a_map, const TensorMap& b_map,
                                               const TensorMap& out_map, unsigned char* dynamic) {
        enum : u32 {
            // Bytes of 64 lines of an operand.
            LINES_BYTES = EXAMPLES * SWIZZLED_ROW,
            OPERAND_BYTES = 2 * LINES_BYTES,
            STAGE_BYTES = WEIGHT_BYTES + 2 * OPERAND_BYTES,
        };
        static_assert(STAGES * STAGE_BYTES <= ROOM, "stages fit");
        const u32 base = align_to_swizzle(shared_address(dynamic));
        unsigned char* shared = dynamic + (base - shared_address(dynamic));
        const u32 thread = threadIdx.x;
        const u32 warp = thread / WARP;
        const u32 full = base + ROOM;
        const u32 free = full + 8 * STAGES;
        prepare_barriers<STAGES>(full, free, 2);

        const u32 tiles_down = (p.m + SIDE - 1) / SIDE;
        const u32 tiles_across = (p.n + SIDE - 1) / SIDE;
        // Concurrent blocks process neighbouring tiles, along the rows of the weights, so that complete rows of memory
        // are read.
        const u32 all_tiles = tiles_down * tiles_across;
        Ring<STAGES> ring;

        if (warp == CONSUMERS / WARP) {
            if (thread % WARP == 0) {
                u32 trip = 0;
                for (u32 tile = blockIdx.x; tile < all_tiles; tile += gridDim.x, ++trip) {
                    const u32 row = tile / tiles_across * SIDE;
                    const u32 col = tile % tiles_across * SIDE;
                    if (trip >= STAGES) barrier_wait(free + 8 * ring.stage, ring.parity ^ 1);
                    const u32 stage = base + ring.stage * STAGE_BYTES;
                    const u32 barrier = full + 8 * ring.stage;
                    barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
                    for (u32 box = 0; box < 4; ++box) {
                        copy_tile(stage + box * BOX_BYTES, out_map, col + box % 2 * 64, row + box / 2 * 64, barrier);
                    }
#pragma unroll
                    for (u32 box = 0; box < 2; ++box) {
                        const u32 at = stage + WEIGHT_BYTES + box * LINES_BYTES;
                        copy_tile(at, a_map, row + 64 * box, 0, barrier);
                        copy_tile(at + OPERAND_BYTES, b_map, col + 64 * box, 0, barrier);
                    }
                    ring.advance();
                }
            }
            return;
        }

        const u32 group = warp / 4;
        const u32 lane = thread % WARP;
        const u32 in_group = thread % GROUP_THREADS;
        u32 before = 0;
        u32 trip = 0;
        for (u32 tile = blockIdx.x; tile < all_tiles; tile += gridDim.x, ++trip) {
            const u32 row = tile / tiles_across * SIDE + 64 * group;
            const u32 col = tile % tiles_across * SIDE;
            const u32 offset = ring.stage * STAGE_BYTES;
            SumsF32<T, SIDE> product;
            product.clear();
            barrier_wait(full + 8 * ring.stage, ring.parity);
            const u32 left = base + offset + WEIGHT_BYTES + group * LINES_BYTES;
            const u32 right = base + offset + WEIGHT_BYTES + OPERAND_BYTES;
            products_begin();
#pragma unroll
            for (u32 k = 0; k < EXAMPLES / 16; ++k) {
                multiply<true, true>(product, operand_at(left + k * 2 * SWIZZLED_ROWS, LINES_BYTES, SWIZZLED_ROWS),
                                     operand_at(right + k * 2 * SWIZZLED_ROWS, LINES_BYTES, SWIZZLED_ROWS));
            }
            products_commit();
            if (p.bias != nullptr && col == 0 && in_group < 64 && row + in_group < p.m) {
                step_bias<T, EXAMPLES>(p, shared + offset + WEIGHT_BYTES + group * LINES_BYTES, row, in_group);
            }
            products_wait<0>();

            // The two boxes of this warpgroup's 64 rows.
            unsigned char* weights = shared + offset + 2 * group * BOX_BYTES;
            const u32 patch_row = warp % 4 * 16 + lane / 4;
#pragma unroll
            for (u32 piece = 0; piece < SIDE / 8; ++piece) {
#pragma unroll
                for (u32 below = 0; below < 2; ++below) {
                    const float2 slope = product.pair(piece, below);
                    step_pair<T>(weights + piece / 8 * BOX_BYTES +
                                     swizzled(patch_row + 8 * below, piece % 8 * 16 + lane % 4 * 4),
                                 p.scale, slope);
                }
            }
            show_to_engines();
            meet(1 + group, GROUP_THREADS);
            if (in_group == 0) {
                const u32 from = base + offset + 2 * group * BOX_BYTES;
                store_tile(out_map, col, row, from);
                store_tile(out_map, col + 64, row, from + BOX_BYTES);
                send_off(trip, free + 8 * before);
            }
            before = ring.stage;
            ring.advance();
        }
        // The block must not exit before TMA has read the last tile from its shared memory.
        if (in_group == 0) wait_until_read<0>();
    }
};
