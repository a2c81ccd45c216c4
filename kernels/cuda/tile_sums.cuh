// Reduction and epilogue of a GEMM. The patches of a block's warps are in shared memory, WK of them for each position
// of the tile. They are added, with split-k also over blocks, and the epilogue processes the sums.
#pragma once

#include "linear_epilogues.cuh"

template <class Epilogue, u32 BM, u32 BN, u32 WK, u32 THREADS, u32 PITCH>
struct TileSums {
    enum : u32 {
        // Floats from one row of a patch in shared memory to the next, and from one patch to the next.
        SUM_PITCH = PITCH,
        SUM_SIZE = BM * SUM_PITCH,
        SUM_BYTES = WK * SUM_SIZE * 4,
        // Columns that one call of the epilogue processes.
        GROUP = Epilogue::GROUP,
        GROUPS_ACROSS = BN / GROUP,
        GROUPS = BM * GROUPS_ACROSS,
        GROUPS_EACH = (GROUPS + THREADS - 1) / THREADS,
        // Rows from one group of a thread to the next.
        ROWS_APART = THREADS / GROUPS_ACROSS,
        // Floats in the workspace for one split of one tile.
        SPLIT_SIZE = BM * BN + BM,
    };
    static_assert(THREADS % GROUPS_ACROSS == 0, "a thread's groups lie below each other");
    static_assert(THREADS >= BM, "each row has a thread that adds it up");

    // Called by THREADS threads of a block, after all patches have been written to `sums` and a barrier. `whole`: the
    // tile is completely inside the matrix, and its rows are aligned. `sums_rows`: thread i has the sum of row i of
    // op(A) in `row_sum`.
    static __device__ __forceinline__ void finish(const LinearArguments& p, const float* sums, u32 tile, u32 split,
                                                  u32 first_row, u32 first_col, bool whole, bool sums_rows, float row_sum) {
        const u32 thread = threadIdx.x;
        // This thread's first group of the tile.
        const u32 group_row = thread / GROUPS_ACROSS;
        const u32 group_col = thread % GROUPS_ACROSS * GROUP;
        const u32 row = first_row + group_row;
        const u32 col = first_col + group_col;
        const u64 at = static_cast<u64>(row) * p.out_pitch + col;
        const u64 step = static_cast<u64>(ROWS_APART) * p.out_pitch;
        const bool has_group = GROUPS % THREADS == 0 || thread < GROUPS;

        const float* mine = sums + group_row * SUM_PITCH + group_col;
        float* partial = p.workspace + static_cast<u64>(tile) * p.splits * SPLIT_SIZE;
        if (p.splits > 1) {
            float* to = partial + static_cast<u64>(split) * SPLIT_SIZE;
            if (has_group) {
#pragma unroll
                for (u32 i = 0; i < GROUPS_EACH; ++i) {
                    float v[GROUP];
                    add_warps(mine + i * (ROWS_APART * SUM_PITCH), v);
                    write_floats<true>(to + (thread + i * THREADS) * GROUP, GROUP, v);
                }
            }
            if (sums_rows) to[BM * BN + thread] = row_sum;
            if (!arrived_last(p.tickets + tile, p.splits)) return;
        }
        typename Epilogue::Held none;
        if (whole) {
            if (has_group) {
#pragma unroll
                for (u32 i = 0; i < GROUPS_EACH; ++i) {
                    float v[GROUP];
                    if (p.splits > 1) {
                        add_splits(partial + (thread + i * THREADS) * GROUP, p.splits, v);
                    } else {
                        add_warps(mine + i * (ROWS_APART * SUM_PITCH), v);
                    }
                    Epilogue::template apply<true>(p, row + i * ROWS_APART, col, at + i * step, GROUP, v, none, false);
                }
            }
        } else if (has_group && col < p.n) {
            // At the matrix's edge most groups are complete, too.
            const bool inside = group_is_whole<GROUP>(p, col);
#pragma unroll
            for (u32 i = 0; i < GROUPS_EACH; ++i) {
                if (row + i * ROWS_APART >= p.m) break;
                float v[GROUP];
                if (p.splits > 1) {
                    add_splits(partial + (thread + i * THREADS) * GROUP, p.splits, v);
                } else {
                    add_warps(mine + i * (ROWS_APART * SUM_PITCH), v);
                }
                if (inside) {
                    Epilogue::template apply<true>(p, row + i * ROWS_APART, col, at + i * step, GROUP, v, none, false);
                } else {
                    Epilogue::template apply<false>(p, row + i * ROWS_APART, col, at + i * step, p.n - col, v, none, false);
                }
            }
        }
        if (sums_rows && first_row + thread < p.m) {
            if (p.splits > 1) {
                row_sum = 0.0f;
                for (u32 s = 0; s < p.splits; ++s) row_sum += __ldcg(partial + s * SPLIT_SIZE + BM * BN + thread);
            }
            Epilogue::sum(p, first_row + thread, row_sum);
        }
    }

private:
    static __device__ __forceinline__ void add_warps(const float* from, float (&v)[GROUP]) {
#pragma unroll
        for (u32 part = 0; part < GROUP; part += 4) {
            float some[4];
            read_shared(from + part, some);
#pragma unroll
            for (u32 w = 1; w < WK; ++w) {
                float more[4];
                read_shared(from + part + w * SUM_SIZE, more);
#pragma unroll
                for (u32 i = 0; i < 4; ++i) some[i] += more[i];
            }
#pragma unroll
            for (u32 i = 0; i < 4; ++i) v[part + i] = some[i];
        }
    }

    static __device__ __forceinline__ void add_splits(const float* from, u32 splits, float (&v)[GROUP]) {
#pragma unroll
        for (u32 part = 0; part < GROUP; part += 4) {
            float some[4];
            load_four_fresh(from + part, some);
#pragma unroll 4
            for (u32 s = 1; s < splits; ++s) {
                float more[4];
                load_four_fresh(from + part + static_cast<u64>(s) * SPLIT_SIZE, more);
#pragma unroll
                for (u32 i = 0; i < 4; ++i) some[i] += more[i];
            }
#pragma unroll
            for (u32 i = 0; i < 4; ++i) v[part + i] = some[i];
        }
    }

    // Returns whether this block is the last of `all` to arrive. The other blocks' earlier writes are then visible to
    // it, and the ticket is zero again.
    static __device__ __forceinline__ bool arrived_last(u32* ticket, u32 all) {
        __shared__ bool last;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            last = atomicAdd(ticket, 1u) == all - 1;
            if (last) *ticket = 0;
            __threadfence();
        }
        __syncthreads();
        return last;
    }
};
