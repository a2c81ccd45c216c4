// The whole way back through a layer at once, as StreamedBackward, with f32 in memory: in f32x3 or tf32, for up to 32 examples.
//
// A block has 64 inputs, two warps across, and goes down their outputs, four warps down; a warp has 32 inputs and 16 outputs
// of a stage. Warpgroups would want tf32 with k along the rows of shared memory, which the weights are not: so warps multiply
// from registers. Rows and columns of their fragments are dealt so that those of a weight in both products are one register:
// it is read from shared memory once, multiplied by dY, stepped, and written back.
//
//   dX^T = W^T dY^T   rows are inputs, columns examples, k outputs: W^T is the left operand, in A's layout
//   dW^T = X^T dY     rows are inputs, columns outputs, k examples: in the layout of sums, which is A's with outputs 2t and
//                     2t + 1 as its steps t and t + 4
//
// Each warp keeps its 32 inputs of X, split, from beginning to end.
#pragma once

#include "linear_hopper.cuh"

// TERMS: 3 for f32x3, 1 for tf32.
template <u32 TERMS, u32 STAGES>
struct StreamedBackwardF32 {
    enum : u32 {
        EXAMPLES = 32,
        WARPS_ACROSS = 2,
        WARPS_DOWN = 4,
        CONSUMERS = WARPS_ACROSS * WARPS_DOWN * WARP,
        // A warpgroup more asks for copies, and steps the bias: of its registers the others take what it does not need.
        THREADS = CONSUMERS + GROUP_THREADS,
        CONSUMER_REGISTERS = 240,
        COURIER_REGISTERS = 24,
        ACROSS = 32 * WARPS_ACROSS,
        // Outputs of a warp in a stage, and of a block.
        ROWS = 16,
        DOWN = ROWS * WARPS_DOWN,
        // A warp's weights; and 32 outputs of dY, or inputs of X, of all examples.
        PATCH_BYTES = ROWS * SWIZZLED_ROW,
        LINES_BYTES = EXAMPLES * SWIZZLED_ROW,
        WEIGHT_BYTES = WARPS_ACROSS * WARPS_DOWN * PATCH_BYTES,
        STAGE_BYTES = WEIGHT_BYTES + DOWN / 32 * LINES_BYTES,
        INPUTS = STAGES * STAGE_BYTES,
        BARRIERS = INPUTS + WARPS_ACROSS * LINES_BYTES,
        SHARED_BYTES = BARRIERS + 8 * (2 * STAGES + 1) + SWIZZLED_ROWS,
        PITCH = ACROSS + 4,
        // Eights of examples, and of a warp's outputs.
        EIGHTS = EXAMPLES / 8,
        PIECES = ROWS / 8,
    };
    using Sums = TileSums<InputEpilogue<float>, EXAMPLES, ACROSS, WARPS_DOWN, CONSUMERS, PITCH>;
    static_assert(Sums::SUM_BYTES <= BARRIERS, "sums take the place of the stages");

    // A number rounded for the tensor cores, and what it then lacks; of both they drop the bits below. See PatchF32x3 in
    // tensor.cuh. For f32x3 rounding may make a finite number of what is none, but then what it lacks is none: see `whole`.
    static __device__ __forceinline__ void split(u32 bits, u32& big, u32& small) {
        if (TERMS == 3) {
            big = bits + 0x1000;
            small = __float_as_uint(__uint_as_float(bits) - __uint_as_float(big & 0xffffe000u));
        } else {
            big = rounded_to_tf32(bits);
        }
    }

    // Which of eight examples is column `col` of dX^T: no two that are read at once then meet in a bank.
    static __device__ __forceinline__ u32 example_of(u32 col) { return 2 * col % 8 + col / 4; }

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
        prepare_barriers<STAGES>(full, free, CONSUMERS / WARP);

        const auto [strip, part, first_col, first_trip, trips] = share_of_strip<ACROSS, DOWN>(p);
        Ring<STAGES> ring;

        if (warp >= CONSUMERS / WARP) {
            registers_down<COURIER_REGISTERS>();
            if (warp > CONSUMERS / WARP) step_bias(p, thread - CONSUMERS - WARP);
            if (thread == CONSUMERS) {
                barrier_expect(inputs_are_there, WARPS_ACROSS * LINES_BYTES);
#pragma unroll
                for (u32 across = 0; across < WARPS_ACROSS; ++across) {
                    copy_tile(base + INPUTS + across * LINES_BYTES, x_map, first_col + 32 * across, 0, inputs_are_there);
                }
                for (u32 trip = 0; trip < trips; ++trip) {
                    if (trip >= STAGES) barrier_wait(free + 8 * ring.stage, ring.parity ^ 1);
                    const u32 barrier = full + 8 * ring.stage;
                    const u32 stage = base + ring.stage * STAGE_BYTES;
                    const u32 row = (first_trip + trip) * DOWN;
                    barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
                    for (u32 i = 0; i < WARPS_DOWN * WARPS_ACROSS; ++i) {
                        copy_tile(stage + i * PATCH_BYTES, weight_map, first_col + i % WARPS_ACROSS * 32,
                                  row + i / WARPS_ACROSS * ROWS, barrier);
                    }
#pragma unroll
                    for (u32 i = 0; i < DOWN / 32; ++i) {
                        copy_tile(stage + WEIGHT_BYTES + i * LINES_BYTES, dy_map, row + 32 * i, 0, barrier);
                    }
                    ring.advance();
                }
            }
            return;
        }
        registers_up<CONSUMER_REGISTERS>();

        const u32 across = warp % WARPS_ACROSS;
        const u32 down = warp / WARPS_ACROSS;
        const u32 lane = thread % WARP;
        const u32 g = lane / 4;
        const u32 t = lane % 4;

        // A lane has four neighbouring inputs, 4g to 4g + 3: rows g and g + 8 of the one fragment, and of the other. Steps t and
        // t + 4 of k are examples 2t and 2t + 1 of eight.
        u32 big_x[2][EIGHTS][4];
        u32 small_x[2][EIGHTS][4];
        barrier_wait(inputs_are_there, 0);
#pragma unroll
        for (u32 eight = 0; eight < EIGHTS; ++eight) {
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                u32 bits[4];
                read_four(base + INPUTS + across * LINES_BYTES + swizzled(8 * eight + 2 * t + e, 16 * g), bits);
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    split(bits[i], big_x[i / 2][eight][2 * e + i % 2], small_x[i / 2][eight][2 * e + i % 2]);
                }
            }
        }

        float dx[2][EIGHTS][4] = {};
        float small_dx[2][EIGHTS][4] = {};
        u32 before = 0;
        for (u32 trip = 0; trip < trips; ++trip) {
            const u32 row = (first_trip + trip) * DOWN + down * ROWS;
            const u32 stage = base + ring.stage * STAGE_BYTES;
            const u32 patch = stage + (down * WARPS_ACROSS + across) * PATCH_BYTES;
            const u32 dy = stage + WEIGHT_BYTES + down * ROWS / 32 * LINES_BYTES;
            // Where this warp's outputs are in a row of dY, and this lane's weights of outputs 2t and 2t + 1.
            const u32 outputs = down * ROWS % 32 * 4;
            const u32 own = patch + swizzled(2 * t, 16 * g);
            const u32 next = patch + swizzled(2 * t + 1, 16 * g);
            barrier_wait(full + 8 * ring.stage, ring.parity);
            u32 weights[PIECES][2][4];
#pragma unroll
            for (u32 piece = 0; piece < PIECES; ++piece) {
                read_four(own + piece * SWIZZLED_ROWS, weights[piece][0]);
                read_four(next + piece * SWIZZLED_ROWS, weights[piece][1]);
            }

            float slopes[PIECES][2][4] = {};
            float small_slopes[PIECES][2][4] = {};
#pragma unroll
            for (u32 i = 0; i < EIGHTS; ++i) {
#pragma unroll
                for (u32 piece = 0; piece < PIECES; ++piece) {
                    // Of examples 2t and 2t + 1 output g.
                    u32 big[2], small[2];
#pragma unroll
                    for (u32 e = 0; e < 2; ++e) {
                        const u32 bits = read_one(dy + swizzled(8 * i + 2 * t + e, outputs + 32 * piece + 4 * g));
                        split(bits, big[e], small[e]);
                    }
#pragma unroll
                    for (u32 half = 0; half < 2; ++half) {
                        if (TERMS == 3) {
                            multiply(0.0f, small_x[half][i], big[0], big[1], small_slopes[piece][half]);
                            multiply(0.0f, big_x[half][i], small[0], small[1], small_slopes[piece][half]);
                        }
                        multiply(0.0f, big_x[half][i], big[0], big[1], slopes[piece][half]);
                    }
                }
            }

#pragma unroll
            for (u32 piece = 0; piece < PIECES; ++piece) {
                u32 big_w[2][4];
                u32 small_w[2][4];
#pragma unroll
                for (u32 e = 0; e < 2; ++e) {
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) {
                        u32& weight = weights[piece][e][i];
                        split(weight, big_w[i / 2][2 * e + i % 2], small_w[i / 2][2 * e + i % 2]);
                        const u32 at = i % 2 * 2 + e;
                        const float slope = whole(slopes[piece][i / 2][at], small_slopes[piece][i / 2][at]);
                        weight = __float_as_uint(__fmaf_rn(-p.scale, slope, __uint_as_float(weight)));
                    }
                }
#pragma unroll
                for (u32 i = 0; i < EIGHTS; ++i) {
                    // Of an example, which is column g, outputs 2t and 2t + 1.
                    u32 bits[2], big[2], small[2];
                    read_two(dy + swizzled(8 * i + example_of(g), outputs + 32 * piece + 8 * t), bits[0], bits[1]);
#pragma unroll
                    for (u32 e = 0; e < 2; ++e) split(bits[e], big[e], small[e]);
#pragma unroll
                    for (u32 half = 0; half < 2; ++half) {
                        if (TERMS == 3) {
                            float product[4];
                            multiply_alone(big_w[half], big[0], big[1], product);
                            multiply(0.0f, small_w[half], big[0], big[1], small_dx[half][i]);
                            multiply(0.0f, big_w[half], small[0], small[1], small_dx[half][i]);
#pragma unroll
                            for (u32 r = 0; r < 4; ++r) dx[half][i][r] += product[r];
                        } else {
                            multiply(0.0f, big_w[half], big[0], big[1], dx[half][i]);
                        }
                    }
                }
            }
#pragma unroll
            for (u32 piece = 0; piece < PIECES; ++piece) {
                write_four(own + piece * SWIZZLED_ROWS, weights[piece][0]);
                write_four(next + piece * SWIZZLED_ROWS, weights[piece][1]);
            }
            show_to_engines();
            __syncwarp();
            if (lane == 0) {
                store_tile(weight_map, first_col + 32 * across, row, patch);
                send_off(trip, free + 8 * before);
            }
            before = ring.stage;
            ring.advance();
        }
        // The last patches have been read from shared memory before sums overwrite it.
        if (lane == 0) wait_until_read<0>();
        meet(1, CONSUMERS);

        float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
        for (u32 i = 0; i < EIGHTS; ++i) {
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                float* at = sums + down * Sums::SUM_SIZE + (8 * i + example_of(2 * t + e)) * PITCH + 32 * across + 4 * g;
                float v[4];
#pragma unroll
                for (u32 r = 0; r < 4; ++r) v[r] = whole(dx[r / 2][i][r % 2 * 2 + e], small_dx[r / 2][i][r % 2 * 2 + e]);
                *reinterpret_cast<float4*>(at) = make_float4(v[0], v[1], v[2], v[3]);
            }
        }
        meet(1, CONSUMERS);
        const bool inside = EXAMPLES <= p.m && first_col + ACROSS <= p.n && p.out_pitch % Sums::GROUP == 0;
        Sums::finish(p, sums, strip, part, 0, first_col, inside, false, 0.0f);
    }

private:
    // Where both are not finite, an operand is infinite, and the sum of small terms says nothing: an infinite number lacks
    // none. Where only that sum is not, an operand is no number.
    static __device__ __forceinline__ float whole(float big, float small) {
        return TERMS == 3 && (fabsf(small) < infinity() || fabsf(big) < infinity()) ? big + small : big;
    }

    // This block's share of the outputs, for the threads that have nothing else to do.
    static __device__ __forceinline__ void step_bias(const LinearArguments& p, u32 thread) {
        if (p.bias == nullptr) return;
        const u32 each = (p.k + gridDim.x - 1) / gridDim.x;
        const u32 end = min(p.k, (blockIdx.x + 1) * each);
        for (u32 output = blockIdx.x * each + thread; output < end; output += GROUP_THREADS - WARP) {
            const float* from = static_cast<const float*>(p.a) + output;
            float sum = 0.0f;
#pragma unroll 4
            for (u32 example = 0; example < p.m; ++example) sum += __ldg(from + static_cast<u64>(example) * p.a_pitch);
            p.bias[output] = __fmaf_rn(-p.scale, sum, p.bias[output]);
        }
    }
};
