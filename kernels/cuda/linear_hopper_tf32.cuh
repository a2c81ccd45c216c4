// The GEMMs of linear.cuh in tf32 on compute capability 9.0, in tiles of 128 x 128.
//
// wgmma takes the left operand from registers here, and the right one from shared memory, where tf32 has to be K-major.
// So the four warpgroups of a block process the tiles that TMA loads in two ways:
//
//   two consumers  multiply 64 lines of the left operand each: a thread reads the elements of its fragments from the
//                  tile as loaded, and rounds each of them once, in registers
//   two preparers  rewrite the right operand in turns, rounded to tf32 and K-major; they are also the producers, which
//                  issue the TMA copies
//
// The left operand is A in a forward GEMM. In a gradient, which has many inputs and few outputs, it is B, and the tile
// is computed transposed. Blocks are persistent: the copies for the next tile are in flight while a block writes one.
#pragma once

#include "linear_epilogues.cuh"
#include "hopper.cuh"

// TRANSPOSED, for gradients: the left operand is B, and lines are contiguous in both operands. Otherwise, for forward:
// the left operand is A, and k is contiguous in both.
template <class Epilogue, bool TRANSPOSED>
struct WarpgroupTileTf32 {
    enum : u32 {
        SIDE = 128,
        // Steps of k in a stage: 128 bytes of elements.
        DEPTH = 32,
        STEPS = DEPTH / 8,
        CONSUMERS = 2 * GROUP_THREADS,
        PREPARERS = 2,
        THREADS = CONSUMERS + PREPARERS * GROUP_THREADS,
        // Registers of a thread of a consumer and of a preparer, after setmaxnreg; a block starts with 128 for each
        // thread.
        CONSUMER_REGISTERS = 176,
        PREPARER_REGISTERS = 80,
        GROUP = 4,
        // Number of a consumer thread's groups; a group is four neighbouring columns in a row of C.
        GROUPS = SIDE * SIDE / CONSUMERS / GROUP,
        SPLIT_SIZE = SIDE * SIDE + SIDE,

        TILE_BYTES = SIDE * DEPTH * 4,
        // If lines are contiguous, a tile consists of TMA boxes of 32 lines.
        BOX_BYTES = 32 * SWIZZLED_ROW,
        // Stages hold the tiles as loaded; slots hold the prepared right operand.
        STAGES = 4,
        STAGE_BYTES = 2 * TILE_BYTES,
        SLOTS = 3,
        SLOTS_AT = STAGES * STAGE_BYTES,
        ROW_SUMS_AT = SLOTS_AT + SLOTS * TILE_BYTES,
        BARRIERS_AT = ROW_SUMS_AT + PREPARERS * SIDE * 4,
        FULL_AT = BARRIERS_AT,
        FREE_AT = FULL_AT + 8 * STAGES,
        READY_AT = FREE_AT + 8 * STAGES,
        USED_AT = READY_AT + 8 * SLOTS,
        LAST_AT = USED_AT + 8 * SLOTS,
        SHARED_BYTES = LAST_AT + 8 + SWIZZLED_ROWS,
        // Numbers of the named barriers (`meet`).
        CONSUMERS_MEET = 1,
        SUMS_MEET = 2,
    };
    static_assert(Epilogue::GROUP == GROUP, "f32");

    // A block's unit of work: a tile, or with split-k one split of a tile.
    struct Item {
        u32 tile;
        u32 split;
        u32 first_row;
        u32 first_col;
        u32 first_trip;
        u32 trips;
    };
    static __device__ __forceinline__ u32 tiles(const LinearArguments& p) {
        return (p.m + SIDE - 1) / SIDE * ((p.n + SIDE - 1) / SIDE);
    }
    static __device__ __forceinline__ Item item_at(const LinearArguments& p, u32 number) {
        const u32 tiles_down = (p.m + SIDE - 1) / SIDE;
        const u32 all_tiles = tiles(p);
        const u32 trips_in_all = (p.k + DEPTH - 1) / DEPTH;
        const u32 trips_each = (trips_in_all + p.splits - 1) / p.splits;
        Item item;
        item.tile = number % all_tiles;
        item.split = number / all_tiles;
        item.first_row = item.tile % tiles_down * SIDE;
        item.first_col = item.tile / tiles_down * SIDE;
        item.first_trip = min(item.split * trips_each, trips_in_all);
        item.trips = min(trips_each, trips_in_all - item.first_trip);
        return item;
    }

    static __device__ __forceinline__ bool sums_rows(const LinearArguments& p, const Item& item) {
        return Epilogue::SUMS_ROWS && p.bias != nullptr && item.first_col == 0;
    }

    static __device__ __forceinline__ void run(const LinearArguments& p, const TensorMap& a_map, const TensorMap& b_map,
                                               unsigned char* dynamic) {
        const u32 base = align_to_swizzle(shared_address(dynamic));
        const u32 warp = threadIdx.x / WARP;
        if (threadIdx.x == 0) {
            for (u32 stage = 0; stage < STAGES; ++stage) {
                barrier_init(base + FULL_AT + 8 * stage, 1);
                barrier_init(base + FREE_AT + 8 * stage, (CONSUMERS + GROUP_THREADS) / WARP);
            }
            for (u32 slot = 0; slot < SLOTS; ++slot) {
                barrier_init(base + READY_AT + 8 * slot, GROUP_THREADS / WARP);
                barrier_init(base + USED_AT + 8 * slot, CONSUMERS / WARP);
            }
            barriers_are_ready();
        }
        __syncthreads();
        const u32 items = tiles(p) * p.splits;
        if (warp >= CONSUMERS / WARP) {
            registers_down<PREPARER_REGISTERS>();
            prepare(p, TRANSPOSED ? b_map : a_map, TRANSPOSED ? a_map : b_map, base, items);
        } else {
            registers_up<CONSUMER_REGISTERS>();
            consume(p, base, items);
        }
    }

private:
    // ---- producers ----

    // The producer of one preparing warpgroup, which issues the copies for its own iterations. While one warpgroup
    // prepares, the other's producer issues copies.
    struct Courier {
        const LinearArguments& p;
        const TensorMap& left;
        const TensorMap& right;
        u32 base;
        u32 items;
        u32 turn;
        u32 number;
        // Remaining iterations of the current item, and the position of the next one.
        u32 trips = 0;
        u32 left_line = 0;
        u32 right_line = 0;
        u32 k = 0;
        // Number of iterations whose copies this producer has issued or left to the other.
        u32 asked = 0;
        Ring<STAGES> ring;

        __device__ __forceinline__ Courier(const LinearArguments& p, const TensorMap& left, const TensorMap& right, u32 base,
                                           u32 items, u32 turn)
            : p(p), left(left), right(right), base(base), items(items), turn(turn), number(blockIdx.x) {}

        // Advances by one iteration. If it is this producer's turn, issues its copies; returns without advancing if the
        // stage is not free.
        __device__ __forceinline__ void ask() {
            while (trips == 0) {
                if (number >= items) return;
                const Item item = item_at(p, number);
                number += gridDim.x;
                trips = item.trips;
                left_line = TRANSPOSED ? item.first_col : item.first_row;
                right_line = TRANSPOSED ? item.first_row : item.first_col;
                k = item.first_trip * DEPTH;
            }
            if (asked % PREPARERS == turn) {
                if (asked >= STAGES && !barrier_passed(base + FREE_AT + 8 * ring.stage, ring.parity ^ 1)) return;
                const u32 stage = base + ring.stage * STAGE_BYTES;
                const u32 full = base + FULL_AT + 8 * ring.stage;
                barrier_expect(full, STAGE_BYTES);
                load<TRANSPOSED>(stage, left, left_line, k, full);
                load<TRANSPOSED>(stage + TILE_BYTES, right, right_line, k, full);
            }
            ring.advance();
            k += DEPTH;
            --trips;
            ++asked;
        }
        // Issues copies until the phase with this parity has completed.
        __device__ __forceinline__ void ask_until(u32 barrier, u32 parity) {
            while (!barrier_passed(barrier, parity)) ask();
        }
    };
    template <bool LINES>
    static __device__ __forceinline__ void load(u32 to, const TensorMap& map, u32 line, u32 k, u32 barrier) {
        if (LINES) {
#pragma unroll
            for (u32 box = 0; box < SIDE / 32; ++box) copy_tile(to + box * BOX_BYTES, map, line + 32 * box, k, barrier);
        } else {
            copy_tile(to, map, k, line, barrier);
        }
    }

    // ---- preparing warpgroups ----

    // Row of the prepared tile for `line` of the right operand. A lane's columns in two neighbouring pieces of eight
    // are then four neighbouring columns of C.
    static __device__ __forceinline__ u32 row_of_line(u32 line) {
        return TRANSPOSED ? line : line / 16 * 16 + line % 4 / 2 * 8 + line % 16 / 4 * 2 + line % 2;
    }

    static __device__ __forceinline__ void prepare(const LinearArguments& p, const TensorMap& left, const TensorMap& right,
                                                   u32 base, u32 items) {
        const u32 turn = (threadIdx.x - CONSUMERS) / GROUP_THREADS;
        const u32 warp = threadIdx.x / WARP % 4;
        const u32 lane = threadIdx.x % WARP;
        const bool asks = threadIdx.x % GROUP_THREADS == 0;
        Courier courier(p, left, right, base, items, turn);
        Ring<STAGES> ring;
        Ring<SLOTS> slot;
        u32 done = 0;
        for (u32 number = blockIdx.x; number < items; number += gridDim.x) {
            const Item item = item_at(p, number);
            // Sums over this lane's steps of k, for each of the warp's 32 lines.
            float row_sums[32] = {};
            for (u32 trip = 0; trip < item.trips; ++trip) {
                if (done % PREPARERS == turn) {
                    if (asks) {
                        courier.ask_until(base + FULL_AT + 8 * ring.stage, ring.parity);
                        if (done >= SLOTS) courier.ask_until(base + USED_AT + 8 * slot.stage, slot.parity ^ 1);
                    }
                    __syncwarp();
                    barrier_wait(base + FULL_AT + 8 * ring.stage, ring.parity);
                    if (done >= SLOTS) barrier_wait(base + USED_AT + 8 * slot.stage, slot.parity ^ 1);
                    prepare_tile(base + ring.stage * STAGE_BYTES + TILE_BYTES, base + SLOTS_AT + slot.stage * TILE_BYTES,
                                 warp, lane, row_sums);
                    show_to_engines();
                    __syncwarp();
                    if (lane == 0) {
                        barrier_arrive(base + READY_AT + 8 * slot.stage);
                        barrier_arrive(base + FREE_AT + 8 * ring.stage);
                    }
                }
                ring.advance();
                slot.advance();
                ++done;
            }
            if (sums_rows(p, item)) {
#pragma unroll
                for (u32 i = 0; i < 32; ++i) {
                    const float sum = warp_sum(row_sums[i]);
                    if (lane == i) write_one(base + ROW_SUMS_AT + 4 * (SIDE * turn + 32 * warp + i), __float_as_uint(sum));
                }
                // The consumers read the sums between these two barriers.
                meet(SUMS_MEET, THREADS);
                meet(SUMS_MEET, THREADS);
            }
        }
    }

    // Prepares a warp's 32 lines of a tile of the right operand.
    static __device__ __forceinline__ void prepare_tile(u32 from, u32 to, u32 warp, u32 lane, float (&row_sums)[32]) {
        // If TRANSPOSED, a lane has one step of k, and reads four lines at a time; `column` permutes k as `read_left`
        // does. Otherwise a lane has four steps of k, and reads every fourth line.
        const u32 column = TRANSPOSED ? lane / 8 * 8 + lane % 8 / 2 + lane % 2 * 4 : lane;
        const u32 line = 32 * warp + lane / 8;
        // Number of loads before the first store, limited by registers.
        enum : u32 { AT_ONCE = Epilogue::SUMS_ROWS ? 2 : 4 };
#pragma unroll
        for (u32 first = 0; first < 8; first += AT_ONCE) {
            u32 bits[AT_ONCE][4];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) {
                const u32 part = first + i;
                if (TRANSPOSED) {
                    read_four(from + warp * BOX_BYTES + swizzled(lane, 16 * part), bits[i]);
                } else {
                    read_four(from + swizzled(line + 4 * part, lane % 8 * 16), bits[i]);
                }
            }
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) {
                const u32 part = first + i;
                u32 rounded[4];
#pragma unroll
                for (u32 j = 0; j < 4; ++j) rounded[j] = rounded_to_tf32(bits[i][j]);
                if (TRANSPOSED) {
#pragma unroll
                    for (u32 j = 0; j < 4; ++j) {
                        const u32 at = to + 32 * warp * SWIZZLED_ROW + swizzled(row_of_line(4 * part + j), 4 * column);
                        write_one(at, rounded[j]);
                        if (Epilogue::SUMS_ROWS) add_now(row_sums[4 * part + j], bits[i][j]);
                    }
                } else {
                    const u32 at = to + swizzled(row_of_line(line + 4 * part), lane % 8 * 16);
                    write_four(at, rounded);
                }
            }
        }
    }

    // `volatile` makes the compiler add here: a later addition would keep the value in a register.
    static __device__ __forceinline__ void add_now(float& sum, u32 bits) {
        asm volatile("add.f32 %0, %0, %1;" : "+f"(sum) : "f"(__uint_as_float(bits)));
    }

    // ---- consuming warpgroups ----

    // Reads this thread's elements of the left operand, not yet rounded: one fragment for each 8 steps of k. If
    // TRANSPOSED, two neighbouring lines are the fragment's rows lane / 4 and lane / 4 + 8, and two neighbouring steps
    // of k are its columns lane % 4 and lane % 4 + 4, which avoids bank conflicts.
    static __device__ __forceinline__ void read_left(u32 from, u32 first, u32 lane, u32 (&bits)[STEPS][4]) {
        const u32 g = lane / 4;
        const u32 t = lane % 4;
#pragma unroll
        for (u32 step = 0; step < STEPS; ++step) {
            if (TRANSPOSED) {
                const u32 at = from + first / 32 * BOX_BYTES;
                const u32 byte = first % 32 * 4 + 8 * g;
                read_two(at + swizzled(8 * step + 2 * t, byte), bits[step][0], bits[step][1]);
                read_two(at + swizzled(8 * step + 2 * t + 1, byte), bits[step][2], bits[step][3]);
            } else {
                const u32 at = from + (first + g) * SWIZZLED_ROW + 4 * t;
                bits[step][0] = read_one(at + (32 * step ^ 16 * g));
                bits[step][1] = read_one(at + 8 * SWIZZLED_ROW + (32 * step ^ 16 * g));
                bits[step][2] = read_one(at + ((32 * step + 16) ^ 16 * g));
                bits[step][3] = read_one(at + 8 * SWIZZLED_ROW + ((32 * step + 16) ^ 16 * g));
            }
        }
    }

    static __device__ __forceinline__ u64 right_at(u32 address, u32 step) {
        return operand_at(address + 32 * step, SWIZZLED_ROWS, SWIZZLED_ROWS);
    }

    // Group `i` of this thread. If TRANSPOSED, the values of two groups are distributed over two lanes, which exchange
    // them.
    static __device__ __forceinline__ void group(const float (&sums)[SIDE / 2], u32 lane, u32 i, float (&v)[GROUP]) {
        if (TRANSPOSED) {
            // Each of two lanes has two neighbouring columns in the same two rows; after the exchange each has four
            // columns of one row.
            const bool odd = (lane / 4) % 2 != 0;
            const float low = odd ? sums[4 * i] : sums[4 * i + 1];
            const float high = odd ? sums[4 * i + 2] : sums[4 * i + 3];
            const float other_low = __shfl_xor_sync(0xffffffffu, low, 4);
            const float other_high = __shfl_xor_sync(0xffffffffu, high, 4);
            v[0] = odd ? other_low : sums[4 * i];
            v[1] = odd ? other_high : sums[4 * i + 2];
            v[2] = odd ? sums[4 * i + 1] : other_low;
            v[3] = odd ? sums[4 * i + 3] : other_high;
        } else {
            const u32 piece = 8 * (i / 2) + 2 * (i % 2);
            v[0] = sums[piece];
            v[1] = sums[piece + 1];
            v[2] = sums[piece + 4];
            v[3] = sums[piece + 5];
        }
    }

    static __device__ __forceinline__ void consume(const LinearArguments& p, u32 base, u32 items) {
        const u32 thread = threadIdx.x;
        const u32 lane = thread % WARP;
        // This warp's first line of the left operand.
        const u32 first = thread / WARP * 16;
        Ring<STAGES> ring;
        Ring<SLOTS> slot;
        for (u32 number = blockIdx.x; number < items; number += gridDim.x) {
            const Item item = item_at(p, number);
            SumsF32<float, SIDE> product;
            product.clear();
            u32 rounded[STEPS][4], bits[STEPS][4];
            // Waits for the next stage, reads this thread's fragments from it, and frees it.
            const auto take = [&] {
                barrier_wait(base + FULL_AT + 8 * ring.stage, ring.parity);
                read_left(base + ring.stage * STAGE_BYTES, first, lane, bits);
                __syncwarp();
                if (lane == 0) barrier_arrive(base + FREE_AT + 8 * ring.stage);
                ring.advance();
            };
            if (item.trips > 0) take();
            for (u32 trip = 0; trip < item.trips; ++trip) {
#pragma unroll
                for (u32 step = 0; step < STEPS; ++step) {
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) rounded[step][i] = rounded_to_tf32(bits[step][i]);
                }
                barrier_wait(base + READY_AT + 8 * slot.stage, slot.parity);
                const u32 right = base + SLOTS_AT + slot.stage * TILE_BYTES;
                products_begin();
#pragma unroll
                for (u32 step = 0; step < STEPS; ++step) multiply(product, rounded[step], right_at(right, step));
                products_commit();
                if (trip + 1 < item.trips) take();
                products_wait<0>();
                keep(rounded);
                if (lane == 0) barrier_arrive(base + USED_AT + 8 * slot.stage);
                slot.advance();
            }
            float row_sum = 0.0f;
            const bool has_sums = sums_rows(p, item);
            if (has_sums) {
                meet(SUMS_MEET, THREADS);
                if (thread < SIDE) {
#pragma unroll
                    for (u32 turn = 0; turn < PREPARERS; ++turn) {
                        row_sum += __uint_as_float(read_one(base + ROW_SUMS_AT + 4 * (SIDE * turn + thread)));
                    }
                }
                meet(SUMS_MEET, THREADS);
            }
            finish(p, item, base, product.sums, has_sums && thread < SIDE, row_sum);
        }
    }

    static __device__ __forceinline__ void finish(const LinearArguments& p, const Item& item, u32 base,
                                                  const float (&sums)[SIDE / 2], bool has_row_sum, float row_sum) {
        const u32 thread = threadIdx.x;
        const u32 lane = thread % WARP;
        float v[GROUPS][GROUP];
#pragma unroll
        for (u32 i = 0; i < GROUPS; ++i) group(sums, lane, i, v[i]);
        if (p.splits > 1) {
            // Split-k reduction in two levels. First, the last block to arrive of each `at_once` splits adds their
            // sums; then the last of these blocks adds those sums.
            u32 at_once = 2;
            while (at_once * at_once < p.splits) ++at_once;
            const u32 gatherings = (p.splits + at_once - 1) / at_once;
            float* partial = p.workspace + static_cast<u64>(item.tile) * p.splits * SPLIT_SIZE;
            u32* tickets = p.tickets + item.tile * (gatherings + 1);
            u32 ticket = item.split / at_once;
            u32 split = item.split;
            for (u32 apart = 1; apart < p.splits; apart *= at_once) {
                float* own = partial + static_cast<u64>(split) * SPLIT_SIZE;
#pragma unroll
                for (u32 i = 0; i < GROUPS; ++i) write_floats<true>(own + (thread + i * CONSUMERS) * GROUP, GROUP, v[i]);
                if (has_row_sum) own[SIDE * SIDE + thread] = row_sum;
                split -= split % (apart * at_once);
                const u32 count = min(at_once, (p.splits - split + apart - 1) / apart);
                if (!arrived_last(tickets + ticket, count, base)) return;
                add_up(partial + static_cast<u64>(split) * SPLIT_SIZE, static_cast<u64>(apart) * SPLIT_SIZE, count, v);
                if (has_row_sum) {
                    row_sum = 0.0f;
                    const float* from = partial + static_cast<u64>(split) * SPLIT_SIZE + SIDE * SIDE + thread;
                    for (u32 s = 0; s < count; ++s) row_sum += __ldcg(from + static_cast<u64>(s * apart) * SPLIT_SIZE);
                }
                ticket = gatherings;
            }
        }

        const u32 first = thread / WARP * 16;
        const u32 g = lane / 4;
        const u32 t = lane % 4;
        // Position of this thread's first group.
        const u32 row = item.first_row + (TRANSPOSED ? 2 * t + g % 2 : first + g);
        const u32 col = item.first_col + (TRANSPOSED ? first + g / 2 * 4 : 4 * t);
        const bool whole = item.first_row + SIDE <= p.m && item.first_col + SIDE <= p.n && p.out_pitch % GROUP == 0;
        // Loads the operands of several groups before it writes any, so that the loads are in flight simultaneously.
        enum : u32 { AT_ONCE = 8 };
#pragma unroll
        for (u32 next = 0; next < GROUPS; next += AT_ONCE) {
            Early<Epilogue> early[AT_ONCE];
#pragma unroll
            for (u32 i = next; i < next + AT_ONCE; ++i) {
                const u32 this_row = row + 8 * (TRANSPOSED ? i : i % 2);
                const u32 this_col = col + (TRANSPOSED ? 0 : i / 2 * 16);
                early[i - next].read(p, this_row < p.m, this_col, static_cast<u64>(this_row) * p.out_pitch + this_col);
            }
#pragma unroll
            for (u32 i = next; i < next + AT_ONCE; ++i) {
                const u32 this_row = row + 8 * (TRANSPOSED ? i : i % 2);
                const u32 this_col = col + (TRANSPOSED ? 0 : i / 2 * 16);
                const u64 at = static_cast<u64>(this_row) * p.out_pitch + this_col;
                if (whole || (this_row < p.m && group_is_whole<GROUP>(p, this_col))) {
                    early[i - next].template apply<true>(p, this_row, this_col, at, GROUP, v[i]);
                } else if (this_row < p.m && this_col < p.n) {
                    early[i - next].template apply<false>(p, this_row, this_col, at, p.n - this_col, v[i]);
                }
            }
        }
        if (has_row_sum && item.first_row + thread < p.m) Epilogue::sum(p, item.first_row + thread, row_sum);
    }

    // Adds the sums of `count` splits in their order; there are `apart` floats from one to the next.
    static __device__ __forceinline__ void add_up(const float* first, u64 apart, u32 count, float (&v)[GROUPS][GROUP]) {
        const float* from = first + threadIdx.x * GROUP;
        float more[GROUPS][GROUP];
#pragma unroll
        for (u32 i = 0; i < GROUPS; ++i) load_four_fresh(from + i * CONSUMERS * GROUP, v[i]);
        if (count == 1) return;
        from += apart;
#pragma unroll
        for (u32 i = 0; i < GROUPS; ++i) load_four_fresh(from + i * CONSUMERS * GROUP, more[i]);
        // Each register is loaded again as soon as its value has been added, so loads are always in flight. The last
        // iteration repeats the previous loads, and their values are not used.
        for (u32 s = 2; s <= count; ++s) {
            if (s < count) from += apart;
#pragma unroll
            for (u32 i = 0; i < GROUPS; ++i) {
#pragma unroll
                for (u32 j = 0; j < GROUP; ++j) v[i][j] += more[i][j];
                load_four_fresh(from + i * CONSUMERS * GROUP, more[i]);
            }
        }
    }

    // Returns whether this block is the last of `all` to arrive. The other blocks' earlier writes are then visible to
    // it, and the ticket is zero again.
    static __device__ __forceinline__ bool arrived_last(u32* ticket, u32 all, u32 base) {
        __threadfence();
        meet(CONSUMERS_MEET, CONSUMERS);
        if (threadIdx.x == 0) {
            const bool last = atomicAdd(ticket, 1u) == all - 1;
            if (last) *ticket = 0;
            __threadfence();
            write_one(base + LAST_AT, last);
        }
        meet(CONSUMERS_MEET, CONSUMERS);
        return read_one(base + LAST_AT) != 0;
    }
};
