// The whole way back through a layer at once, for few examples: dX = dY * W, and then W -= scale * dY^T X, with weights that
// are read once. Where they do not fit into the cache, reading them is most of what either costs.
//
// A block has 64 inputs (columns of W), and goes down their outputs. Tiles of weights stream through shared memory and back,
// as in StreamedUpdate; before one is stepped it is multiplied by dY, and the sums of dX stay in registers to the end. Each
// weight belongs to one block, so none is stepped before all who need it have read it.
#pragma once

#include "linear_hopper.cuh"

template <class T, u32 EXAMPLES, u32 STAGES>
struct StreamedBackward {
    enum : u32 {
        // Warpgroups; each has 64 of a tile's outputs.
        GROUPS = 4,
        CONSUMERS = GROUPS * GROUP_THREADS,
        THREADS = CONSUMERS + WARP,
        DOWN = 64 * GROUPS,
        ACROSS = 64,
        // 64 x 64 weights; and 64 outputs of dY, or inputs of X, of all examples.
        WEIGHT_BYTES = 64 * SWIZZLED_ROW,
        LINES_BYTES = EXAMPLES * SWIZZLED_ROW,
        SHARE_BYTES = WEIGHT_BYTES + LINES_BYTES,
        STAGE_BYTES = GROUPS * SHARE_BYTES,
        INPUTS = STAGES * STAGE_BYTES,
        BARRIERS = INPUTS + LINES_BYTES,
        SHARED_BYTES = BARRIERS + 8 * (2 * STAGES + 1) + SWIZZLED_ROWS,
        // Of dX in shared memory: 4 more than a multiple of the banks, because lanes write columns.
        PITCH = ACROSS + 4,
    };
    using Sums = TileSums<InputEpilogue<T>, EXAMPLES, ACROSS, GROUPS, CONSUMERS, PITCH>;
    static_assert(Sums::SUM_BYTES <= BARRIERS, "sums take the place of the stages");

    // `p` is of dX: m examples, n inputs, k outputs. Its bias, if any, is stepped; `scale` is the rate.
    static __device__ __forceinline__ void run(const LinearArguments& p, const TensorMap& dy_map, const TensorMap& x_map,
                                               const TensorMap& weight_map, unsigned char* dynamic) {
        const u32 base = align_to_swizzle(shared_address(dynamic));
        unsigned char* shared = dynamic + (base - shared_address(dynamic));
        const u32 thread = threadIdx.x;
        const u32 warp = thread / WARP;
        const u32 full = base + BARRIERS;
        const u32 free = full + 8 * STAGES;
        const u32 inputs_are_there = free + 8 * STAGES;
        if (thread == 0) barrier_init(inputs_are_there, 1);
        prepare_barriers<STAGES>(full, free, GROUPS);

        const auto [strip, part, first_col, first_trip, trips] = share_of_strip<ACROSS, DOWN>(p);
        Ring<STAGES> ring;

        if (warp == CONSUMERS / WARP) {
            if (thread % WARP == 0) {
                barrier_expect(inputs_are_there, LINES_BYTES);
                copy_tile(base + INPUTS, x_map, first_col, 0, inputs_are_there);
                for (u32 trip = 0; trip < trips; ++trip) {
                    if (trip >= STAGES) barrier_wait(free + 8 * ring.stage, ring.parity ^ 1);
                    const u32 barrier = full + 8 * ring.stage;
                    barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
                    for (u32 group = 0; group < GROUPS; ++group) {
                        const u32 share = base + ring.stage * STAGE_BYTES + group * SHARE_BYTES;
                        const u32 row = (first_trip + trip) * DOWN + 64 * group;
                        copy_tile(share, weight_map, first_col, row, barrier);
                        copy_tile(share + WEIGHT_BYTES, dy_map, row, 0, barrier);
                    }
                    ring.advance();
                }
            }
            return;
        }

        const u32 group = warp / 4;
        const u32 lane = thread % WARP;
        const u32 in_group = thread % GROUP_THREADS;
        const u32 patch_row = warp % 4 * 16 + lane / 4;
        SumsF32<T, EXAMPLES> dx;
        dx.clear();
        barrier_wait(inputs_are_there, 0);
        u32 before = 0;
        for (u32 trip = 0; trip < trips; ++trip) {
            const u32 row = (first_trip + trip) * DOWN + 64 * group;
            const u32 offset = ring.stage * STAGE_BYTES + group * SHARE_BYTES;
            const u32 share = base + offset;
            const u32 dy = share + WEIGHT_BYTES;
            SumsF32<T, ACROSS> slopes;
            slopes.clear();
            barrier_wait(full + 8 * ring.stage, ring.parity);
            products_begin();
#pragma unroll
            for (u32 k = 0; k < EXAMPLES / 16; ++k) {
                multiply<true, true>(slopes, operand_at(dy + k * 2 * SWIZZLED_ROWS, LINES_BYTES, SWIZZLED_ROWS),
                                     operand_at(base + INPUTS + k * 2 * SWIZZLED_ROWS, LINES_BYTES, SWIZZLED_ROWS));
            }
            // dX transposed: its 64 inputs are the rows of the product.
#pragma unroll
            for (u32 k = 0; k < 64 / 16; ++k) {
                multiply<true, false>(dx, operand_at(share + k * 2 * SWIZZLED_ROWS, WEIGHT_BYTES, SWIZZLED_ROWS),
                                      operand_at(dy + k * 32, LINES_BYTES, SWIZZLED_ROWS));
            }
            products_commit();
            if (p.bias != nullptr && strip == 0 && in_group < 64 && row + in_group < p.k) {
                step_bias<T, EXAMPLES>(p, shared + offset + WEIGHT_BYTES, row, in_group);
            }
            // Both have read the weights.
            products_wait<0>();

            unsigned char* weights = shared + offset;
#pragma unroll
            for (u32 piece = 0; piece < ACROSS / 8; ++piece) {
#pragma unroll
                for (u32 below = 0; below < 2; ++below) {
                    const float2 slope = slopes.pair(piece, below);
                    step_pair<T>(weights + swizzled(patch_row + 8 * below, piece * 16 + lane % 4 * 4), p.scale, slope);
                }
            }
            show_to_engines();
            meet(1 + group, GROUP_THREADS);
            if (in_group == 0) {
                store_tile(weight_map, first_col, row, share);
                send_off(trip, free + 8 * before);
            }
            before = ring.stage;
            ring.advance();
        }
        // The last tiles have been read from shared memory before sums overwrite it.
        if (in_group == 0) wait_until_read<0>();
        meet(1 + GROUPS, CONSUMERS);

        float* sums = reinterpret_cast<float*>(shared);
        float* patch = sums + group * Sums::SUM_SIZE + patch_row;
#pragma unroll
        for (u32 piece = 0; piece < EXAMPLES / 8; ++piece) {
#pragma unroll
            for (u32 below = 0; below < 2; ++below) {
                const float2 pair = dx.pair(piece, below);
                float* at = patch + (8 * piece + lane % 4 * 2) * PITCH + 8 * below;
                at[0] = pair.x;
                at[PITCH] = pair.y;
            }
        }
        meet(1 + GROUPS, CONSUMERS);
        const bool whole = EXAMPLES <= p.m && first_col + ACROSS <= p.n && p.out_pitch % Sums::GROUP == 0;
        Sums::finish(p, sums, strip, part, 0, first_col, whole, false, 0.0f);
    }
};
