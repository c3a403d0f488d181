// Products of bfloat16 rows with bfloat16 matrices, two neighbouring elements at a time.
//
// Lane i of a vector is a 32-bit word with elements 2 i and 2 i + 1 of 32. A step adds the product
// of the odd elements to the lane's sum, then that of the even ones, each with one rounding. So do
// the instruction of AVX512_BF16 and two FMAs; but the instruction takes subnormal numbers as 0.
#pragma once

#include "formulas.hpp"
#include "plain.hpp"

// Are pairs multiplied by one instruction? Set where the processor has it; tests clear it.
EXPORT int64_t pair_instruction;

namespace greenroom {

constexpr int PAIRED = 2 * LANES;               // elements of a vector
constexpr int PAIR_ROWS = 4;                    // of the matrix, side by side
constexpr int PAIR_TILE = PARTS == 1 ? 4 : 2;   // rows of x, side by side
constexpr int64_t PAIR_INPUTS = 32;             // rows of x for which rows of weights are read once

// A vector of pairs as an operand: as it is for the instruction, or the two halves of its words.
template <bool INSTRUCTION>
struct PairOperand {
    Floats odd, even;

    explicit PairOperand(const Words& pairs)
        : odd(as<float>(pairs & 0xffff0000)), even(as<float>(pairs << 16)) {}
    INLINE Floats add_products(const PairOperand& x, const Floats& sum) const {
        return fma(x.even, even, fma(x.odd, odd, sum));
    }
};

#if defined(__AVX512F__)
template <>
struct PairOperand<true> {
    Words pairs;

    explicit PairOperand(const Words& pairs) : pairs(pairs) {}
    // Not an intrinsic: it needs a target attribute, which lambdas do not inherit.
    INLINE Floats add_products(const PairOperand& x, Floats sum) const {
        asm("vdpbf16ps %2, %1, %0"
            : "+v"(sum.part[0]) : "v"(x.pairs.part[0]), "v"(pairs.part[0]));
        return sum;
    }
};
#endif

// What a tile of a product prefetches: `step` bytes from `place` on while it takes a vector of x.
struct Ahead {
    const char* place;
    int64_t step;  // of which up to PAIR_ROWS lines are prefetched

    // Not a loop, whose alignment would cost the loop around it a tenth of its time.
    INLINE void prefetch_step() {
        prefetch(place);
        if (step > 64) prefetch(place + 64);
        if (step > 128) {
            prefetch(place + 128);
            prefetch(place + 192);
        }
        place += step;
    }
};

// Sum products of 32 elements (or the first `left`, if FEW) of N weight rows and M rows of x.
template <bool INSTRUCTION, int FEW, int M, int N>
INLINE void pair_step(
    const BFloat16* w, int64_t K, const BFloat16* const* x, int64_t at, int64_t left,
    Floats (&cells)[M][N], int first = 0, int count = N) {
    using Operand = PairOperand<INSTRUCTION>;
    auto get = [&](const BFloat16* row) INLINE_LAMBDA {
        if constexpr (FEW) return Operand(as<uint32_t>(load_first<uint16_t>(row + at, left)));
        else return Operand(load<uint32_t>(row + at));
    };
    auto step = [&]<int... I>(std::integer_sequence<int, I...>) INLINE_LAMBDA {
        const Operand xs[M] = {get(x[I])...};
        each<N>([&](auto n) INLINE_LAMBDA {
            if (n < first || n >= first + count) return;
            const Operand weights = get(w + n * K);
            each<M>([&](auto m) INLINE_LAMBDA {
                cells[m][n] = weights.add_products(xs[m], cells[m][n]);
            });
        });
    };
    step(std::make_integer_sequence<int, M>{});
}

// Write out[m][column + n], m < M, n < N: x[m] [K] times row n of w; or add them if `carry`.
template <bool INSTRUCTION, int M, int N>
[[gnu::noinline]] void pair_tile(
    const BFloat16* w, int64_t K, int64_t block, bool carry, const BFloat16* const* x,
    float* const* out, int64_t column, Ahead ahead) {
    TileSums<M, N> sums(carry, out, column);
    for (int64_t start = 0; start < K; start += block) {
        int64_t stop = least(start + block, K), left = (stop - start) % PAIRED, end = stop - left;
        Floats cells[M][N] = {};
        if (M == 1 && N > 1 && block >= K && row_by_row()) {
            each<N>([&](auto n) INLINE_LAMBDA {
                for (int64_t at = start; at < end; at += PAIRED) {
                    prefetch(ahead.place + 2 * (n * (end - start) + at));
                    pair_step<INSTRUCTION, 0>(w, K, x, at, 0, cells, n, 1);
                }
            });
        } else {
            for (int64_t at = start; at < end; at += PAIRED) {
                if (M == 1 && !row_by_row()) prefetch_rows<N>((const uint32_t*)w, 2 * K, at / 2);
                else ahead.prefetch_step();
                pair_step<INSTRUCTION, 0>(w, K, x, at, 0, cells);
            }
        }
        if (left > 0) pair_step<INSTRUCTION, 1>(w, K, x, end, left, cells);
        sums.add(cells);
    }
    sums.write(out, column);
}

// Rows of pairs, and of their products.
struct PairsCall {
    const BFloat16* w;  // [rows, K]
    int64_t K, rows, block;
    bool carry;
    int64_t tokens;
    const BFloat16* const* x;
    float* const* out;
    const void* next;  // rows that are read after these
};

// M rows of x, from number `token` on, times PAIR_ROWS rows of the matrix.
template <bool INSTRUCTION, int M>
INLINE void pair_rows(const PairsCall& p, int64_t row, int64_t token, const Ahead& ahead) {
    constexpr int N = PARTS == 1 || M == 1 ? PAIR_ROWS : 2;
    for (int64_t n = row; n < row + PAIR_ROWS; n += N)
        pair_tile<INSTRUCTION, M, N>(
            p.w + n * p.K, p.K, p.block, p.carry, p.x + token, p.out + token, n, ahead);
}

template <bool INSTRUCTION>
INLINE void multiply_pairs(const PairsCall& p) {
    const int64_t K = p.K, tiled = p.rows - p.rows % PAIR_ROWS;
    const int64_t tiles = (p.tokens + PAIR_TILE - 1) / PAIR_TILE, steps = K / PAIRED;
    // Each tile prefetches its share of the following rows.
    const int64_t step = steps ? (2 * K * PAIR_ROWS + tiles * steps - 1) / (tiles * steps) : 0;
    for (int64_t n = 0; n < tiled; n += PAIR_ROWS) {
        bool last = n + PAIR_ROWS >= p.rows;
        Ahead ahead{last ? (const char*)p.next : (const char*)(p.w + (n + PAIR_ROWS) * K), step};
        for (int64_t t = 0; t < p.tokens; t += PAIR_TILE, ahead.place += steps * step) {
            const int64_t count = least(PAIR_TILE, p.tokens - t);
            each<PAIR_TILE>([&](auto m) INLINE_LAMBDA {
                if (count == m + 1) pair_rows<INSTRUCTION, m + 1>(p, n, t, ahead);
            });
        }
    }
    for (int64_t n = tiled; n < p.rows; n++)
        for (int64_t t = 0; t < p.tokens; t++)
            pair_tile<INSTRUCTION, 1, 1>(
                p.w + n * K, K, p.block, p.carry, p.x + t, p.out + t, n, {(const char*)p.next, 0});
}

// Compute out[t][:rows] = x[t] @ w.T, or add to it. A result depends on its own row and token only.
INLINE void multiply_pairs(const PairsCall& p) {
#if defined(__AVX512F__)
    if (pair_instruction) return multiply_pairs<true>(p);
#endif
    multiply_pairs<false>(p);
}

// Convert a row of float32 that are bfloat16 numbers.
INLINE void narrow(const float* x, int64_t n, BFloat16* out) {
    over_row(n, [&](int64_t at, int64_t left) INLINE_LAMBDA {
        put(out, at, left, get(x, at, left));
    });
}

}  // namespace greenroom
