// GEMMs of a linear layer, fused with the layer's other operations, for four precisions. C[m,n] = op(A) * op(B):
//
//   forward   Y  = X * W^T       m examples, n outputs, k inputs. Then bias and ReLU
//   input     dX = dY * W        m examples, n inputs,  k outputs. Then the gradient of ReLU: zero where the layer's
//             input was not positive
//   gradient  dW = dY^T * X      m outputs,  n inputs,  k examples. Also the sum of dY's rows, the gradient of the
//             bias. Both are written, or subtracted from weights and bias (an SGD step)
//
// One block computes a tile of C. The components:
//
//   Strip      copies a strip of an operand from global to shared memory with cp.async, several stages ahead, 16 bytes
//              at a time (4 if DEALT). Elements outside the matrix become zeros, so the inner loops need no bounds
//              checks, and any size is correct.
//   Product    computes one warp's patch of the tile, by multiply-adds (f32) or on tensor cores (the other precisions).
//              The warps of a block tile C (WM x WN of them) and divide k (WK of them).
//   TileSums   reduction: the patches are written to shared memory and added in warp order. If blocks divide k as well
//              (split-k, `splits`), the blocks write their sums to a workspace, and the last block to arrive adds them
//              in block order. So the same launch always gives the same bits.
//   Epilogue   processes the sums in groups of 16 bytes of a row, in the order of memory, so all its accesses are
//              coalesced. If one warp computes complete sums and its lanes hold complete groups, the groups come
//              directly from registers.
//
// Operand rows are 16-byte aligned; their pitch guarantees it. The padding between width and pitch may be read, but its
// values are not used, and it is not written.
#pragma once

#include "tile_sums.cuh"

// ---- a strip of an operand ----

// LINES lines (rows of op(A) or columns of op(B)) and DEPTH steps of k. Shared memory keeps the operand's layout. With
// DEALT, lines are interleaved by pairs: of each 32 lines, 8t + 2j and the next are stored at 8j + 2t and the next. The
// fragment layout of the tensor cores then gives each lane eight neighbouring columns of C instead of four separate
// pairs.
template <class T, u32 LINES, u32 DEPTH, bool K_CONTIGUOUS, u32 THREADS, u32 PAD_BYTES, bool DEALT>
struct Strip {
    enum : u32 {
        CHUNK_BYTES = DEALT ? 4 : 16,
        PER_CHUNK = CHUNK_BYTES / sizeof(T),
        ROW = K_CONTIGUOUS ? DEPTH : LINES,
        ROWS = K_CONTIGUOUS ? LINES : DEPTH,
        STRIDE = ROW + PAD_BYTES / sizeof(T),
        CHUNKS_PER_ROW = ROW / PER_CHUNK,
        CHUNKS = ROWS * CHUNKS_PER_ROW,
        TRIPS = (CHUNKS + THREADS - 1) / THREADS,
        BYTES = ROWS * STRIDE * sizeof(T),
    };
    static_assert(ROW % PER_CHUNK == 0, "a row is made of chunks");
    static_assert(!DEALT || (!K_CONTIGUOUS && LINES % 32 == 0 && sizeof(T) == 2), "lines are dealt by 32");
    // A thread's chunks are then in one column, STEP rows apart.
    static_assert(THREADS % CHUNKS_PER_ROW == 0, "a pass of all threads takes whole rows");
    enum : u32 { STEP = THREADS / CHUNKS_PER_ROW };

    const T* operand;
    u32 pitch;
    u32 lines;
    u32 end_k;
    // This thread's first chunk of the next strip: its line and step of k, its byte offset in shared memory, and its
    // address in global memory.
    u32 line;
    u32 k;
    u32 place;
    const T* from;

    __device__ __forceinline__ Strip(const void* operand, u32 pitch, u32 first_line, u32 lines, u32 first_k, u32 end_k,
                                     u32 thread)
        : operand(static_cast<const T*>(operand)), pitch(pitch), lines(lines), end_k(end_k) {
        const u32 row = thread / CHUNKS_PER_ROW;
        const u32 col = thread % CHUNKS_PER_ROW * PER_CHUNK;
        line = first_line + (K_CONTIGUOUS ? row : col);
        k = first_k + (K_CONTIGUOUS ? col : row);
        place = (row * STRIDE + (DEALT ? col / 32 * 32 + col % 8 / 2 * 8 + col % 32 / 8 * 2 : col)) * sizeof(T);
        from = this->operand + static_cast<u64>(K_CONTIGUOUS ? line : k) * pitch + (K_CONTIGUOUS ? k : line);
    }

    // Issues the asynchronous copies of the next strip. `whole`: the strip is completely inside the matrix; the same
    // for all threads.
    __device__ __forceinline__ void load(u32 to, u32 thread, bool whole) {
        const T* at = from;
        const u64 step = static_cast<u64>(STEP) * pitch;
        if (whole) {
#pragma unroll
            for (u32 trip = 0; trip < TRIPS; ++trip) {
                if (CHUNKS % THREADS != 0 && thread + trip * THREADS >= CHUNKS) break;
                copy_async<CHUNK_BYTES>(to + place + trip * (STEP * STRIDE * static_cast<u32>(sizeof(T))), at, CHUNK_BYTES);
                at += step;
            }
        } else {
#pragma unroll
            for (u32 trip = 0; trip < TRIPS; ++trip) {
                if (CHUNKS % THREADS != 0 && thread + trip * THREADS >= CHUNKS) break;
                const u32 this_line = line + (K_CONTIGUOUS ? trip * STEP : 0);
                const u32 this_k = k + (K_CONTIGUOUS ? 0 : trip * STEP);
                const bool inside = this_line < lines && this_k < end_k;
                const u32 left = K_CONTIGUOUS ? end_k - this_k : lines - this_line;
                const u32 count = inside ? min(left, static_cast<u32>(PER_CHUNK)) : 0;
                copy_async<CHUNK_BYTES>(to + place + trip * (STEP * STRIDE * static_cast<u32>(sizeof(T))),
                                        inside ? at : operand, count * sizeof(T));
                at += step;
            }
        }
        k += DEPTH;
        from += K_CONTIGUOUS ? static_cast<u64>(DEPTH) : static_cast<u64>(DEPTH) * pitch;
    }
};

// ---- a tile ----

template <class P, class Epilogue, bool A_K, bool B_K, u32 FM, u32 FN, u32 WM, u32 WN, u32 WK, u32 WARP_DEPTH, u32 STAGES>
struct LinearTile {
    using T = typename P::T;
    enum : u32 {
        THREADS = WM * WN * WK * WARP,
        BM = FM * WM,
        BN = FN * WN,
        DEPTH = WK * WARP_DEPTH,
    };
    // Whether a lane's sums form complete groups of a row, so that the epilogue can take them from registers.
    enum : bool { DIRECT = !A_K && !B_K && WK == 1 && FN % 32 == 0 };
    using A = Strip<T, BM, DEPTH, A_K, THREADS, P::pad_bytes(A_K, false), false>;
    using B = Strip<T, BN, DEPTH, B_K, THREADS, P::pad_bytes(B_K, DIRECT), DIRECT && sizeof(T) == 2>;
    using Product = typename P::template Product<FM, FN, A_K, B_K, A::STRIDE, B::STRIDE, DIRECT>;
    // The padding spreads the rows of a patch over the banks of shared memory.
    using Sums = TileSums<Epilogue, BM, BN, WK, THREADS, BN + 8>;
    enum : u32 {
        STAGE_BYTES = A::BYTES + B::BYTES,
        SHARED_BYTES = STAGES * STAGE_BYTES > Sums::SUM_BYTES ? STAGES * STAGE_BYTES : Sums::SUM_BYTES,
        GROUP = Epilogue::GROUP,
        // Groups of a thread. The operands that an epilogue loads early stay in registers, so it loads early only for
        // up to eight.
        OWN_GROUPS = DIRECT ? Product::GROUPS : Sums::GROUPS_EACH,
        MAY_HOLD = OWN_GROUPS <= 8,
    };

    static __device__ __forceinline__ u32 tiles(const LinearArguments& p) {
        return (p.m + BM - 1) / BM * ((p.n + BN - 1) / BN);
    }

    static __device__ __forceinline__ void run(const LinearArguments& p, u32 block, unsigned char* shared) {
        const u32 thread = threadIdx.x;
        const u32 warp = thread / WARP;
        const u32 lane = thread % WARP;
        const u32 warp_k = warp / (WM * WN);
        const u32 patch_row = warp % WM * FM;
        const u32 patch_col = warp / WM % WN * FN;

        // Neighbouring blocks compute tiles in the same columns of C, so they read the same lines of B, usually the
        // larger operand, at about the same time.
        const u32 tiles_down = (p.m + BM - 1) / BM;
        const u32 all_tiles = tiles(p);
        const u32 tile = block % all_tiles;
        const u32 split = block / all_tiles;
        const u32 first_row = tile % tiles_down * BM;
        const u32 first_col = tile / tiles_down * BN;
        const u32 trips_in_all = (p.k + DEPTH - 1) / DEPTH;
        const u32 trips_each = (trips_in_all + p.splits - 1) / p.splits;
        const u32 first_k = split * trips_each * DEPTH;
        const u32 end_k = min(p.k, first_k + trips_each * DEPTH);
        const u32 trips = first_k < end_k ? (end_k - first_k + DEPTH - 1) / DEPTH : 0;

        const u32 base = shared_address(shared);
        A a(p.a, p.a_pitch, first_row, p.m, first_k, end_k, thread);
        B b(p.b, p.b_pitch, first_col, p.n, first_k, end_k, thread);
        const u32 whole_trips = first_k < end_k ? (end_k - first_k) / DEPTH : 0;
        const bool a_whole = first_row + BM <= p.m;
        const bool b_whole = first_col + BN <= p.n;

        const auto load = [&](u32 trip) {
            if (trip < trips) {
                const u32 stage = base + trip % STAGES * STAGE_BYTES;
                a.load(stage, thread, a_whole && trip < whole_trips);
                b.load(stage + A::BYTES, thread, b_whole && trip < whole_trips);
            }
            commit_copies();
        };

#pragma unroll
        for (u32 trip = 0; trip < STAGES - 1; ++trip) load(trip);

        const bool whole = a_whole && b_whole && p.out_pitch % GROUP == 0;
        const bool direct = DIRECT && p.splits == 1;

        typename Epilogue::Held held[MAY_HOLD ? OWN_GROUPS : 1];
        const bool holds = MAY_HOLD && direct && Epilogue::holds(p);
        if constexpr (DIRECT && MAY_HOLD) {
            if (holds) {
#pragma unroll
                for (u32 i = 0; i < OWN_GROUPS; ++i) {
                    const u32 row = first_row + patch_row + Product::row_of(lane, i);
                    const u32 col = first_col + patch_col + Product::col_of(lane, i);
                    Epilogue::fetch(p, row < p.m && col < p.n, static_cast<u64>(row) * p.out_pitch + col, held[i]);
                }
            }
        }

        Product product;
        float row_sum = 0.0f;
        const bool sums_rows = Epilogue::SUMS_ROWS && p.bias != nullptr && first_col == 0 && thread < BM;
        for (u32 trip = 0; trip < trips; ++trip) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();
            load(trip + STAGES - 1);
            const unsigned char* stage = shared + trip % STAGES * STAGE_BYTES;
            const T* a_stage = reinterpret_cast<const T*>(stage);
            const T* b_stage = reinterpret_cast<const T*>(stage + A::BYTES);
            const T* a_patch =
                a_stage + (A_K ? patch_row * A::STRIDE + warp_k * WARP_DEPTH : warp_k * WARP_DEPTH * A::STRIDE + patch_row);
            const T* b_patch =
                b_stage + (B_K ? patch_col * B::STRIDE + warp_k * WARP_DEPTH : warp_k * WARP_DEPTH * B::STRIDE + patch_col);
            product.template accumulate<WARP_DEPTH>(a_patch, b_patch, lane);
            if (Epilogue::SUMS_ROWS && sums_rows) {
#pragma unroll 8
                for (u32 k = 0; k < DEPTH; ++k) row_sum += load_float(a_stage[k * A::STRIDE + thread]);
            }
        }
        wait_for_copies<0>();
        __syncthreads();

        if constexpr (DIRECT) {
            if (direct) {
#pragma unroll
                for (u32 i = 0; i < OWN_GROUPS; ++i) {
                    const u32 row = first_row + patch_row + Product::row_of(lane, i);
                    const u32 col = first_col + patch_col + Product::col_of(lane, i);
                    const u64 at = static_cast<u64>(row) * p.out_pitch + col;
                    float v[GROUP];
                    product.group(i, v);
                    if (whole || (row < p.m && group_is_whole<GROUP>(p, col))) {
                        Epilogue::template apply<true>(p, row, col, at, GROUP, v, held[MAY_HOLD ? i : 0], holds);
                    } else if (row < p.m && col < p.n) {
                        Epilogue::template apply<false>(p, row, col, at, p.n - col, v, held[MAY_HOLD ? i : 0], holds);
                    }
                }
                if (sums_rows && first_row + thread < p.m) Epilogue::sum(p, first_row + thread, row_sum);
                return;
            }
        }

        float* sums = reinterpret_cast<float*>(shared);
        product.store(sums + warp_k * Sums::SUM_SIZE + patch_row * Sums::SUM_PITCH + patch_col, Sums::SUM_PITCH, lane);
        __syncthreads();
        Sums::finish(p, sums, tile, split, first_row, first_col, whole, sums_rows, row_sum);
    }
};
