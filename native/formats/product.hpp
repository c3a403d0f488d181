// Loops over rows of an encoded matrix: decode them, or multiply them with one input row.
//
// A format is a class with
//     block_inputs, block_bytes   of one block of its codes
//     prepare(row)                writes the row's scales and minima as float32
//     decode(row, at)             returns the 32 weights from input `at` on
// and, if it multiplies integers,
//     packing                     a Packing
//     terms(row, at, x, left, add)  calls add(constant<i>, sums, scales) for an iteration, of which
//                                 `left` inputs exist; i is 0 or 1: the 64 inputs to which the sums
//                                 belong
//     paired                      do the halves of the sums of block 0 belong to blocks 0 and 1?
#pragma once

#include "../plain.hpp"
#include "integers.hpp"

namespace greenroom {

constexpr int ROWS_AT_ONCE = 4;

// Decode a row to float32 out [inputs]; its scales are ready.
template <class F>
[[gnu::noinline]] void expand_row(const Row& row, float* out) {
    for (int64_t at = 0; at < row.inputs; at += 32) {
        Weights weights = F::decode(row, at);
        store(out + at, weights.part[0]);
        store(out + at + LANES, weights.part[1]);
    }
}

// Call add(n, block, values, factors) for row n, for at most 64 inputs in float32.
template <class F, int N, class Add>
INLINE void float_terms(const Row* rows, const float* x, int64_t at, int64_t left, Add add) {
    for (int64_t first = at; first < at + left && first < at + 64; first += 32) {
        Floats xs[2] = {load<float>(x + first), load<float>(x + first + LANES)};
        each<N>([&](auto n) INLINE_LAMBDA {
            Weights weights = F::decode(rows[n], first);
            add(n, constant<0>, xs[0], weights.part[0]);
            add(n, constant<0>, xs[1], weights.part[1]);
        });
    }
}

template <class F>
concept MultipliesIntegers = requires { F::packing; };

template <class F, bool INTEGERS>
constexpr int unit_of() {
    if constexpr (INTEGERS) return F::packing.unit();
    return 64;
}

INLINE void add_four(const FourFloats& sums, float (&totals)[4]) {
    each<4>([&](auto n) INLINE_LAMBDA { totals[n] += sums[(int)n]; });
}

// Add the sums of one or two blocks of 64 inputs of four rows.
template <bool ONE, bool PAIRED>
INLINE void add_sums(const Floats (&sums)[4][2], float (&totals)[4]) {
    if constexpr (!ONE && PAIRED) {
        FourTwoSums two = half_sums(sums[0][0], sums[1][0], sums[2][0], sums[3][0]);
        add_four(two.first, totals);
        return add_four(two.second, totals);
    }
    add_four(lane_sums(sums[0][0], sums[1][0], sums[2][0], sums[3][0]), totals);
    if constexpr (!ONE)
        add_four(lane_sums(sums[0][1], sums[1][1], sums[2][1], sums[3][1]), totals);
}

// Multiply N rows with one input row, and write or add N sums. x: float32, or packed.
template <class F, int N, bool INTEGERS>
INLINE void multiply_tile(
    const Row* rows, const void* x, const RowsCall& call, const uint8_t* ahead, float* out) {
    constexpr int unit = unit_of<F, INTEGERS>();
    constexpr int ahead_bytes = N * unit * F::block_bytes / F::block_inputs;
    int64_t inputs = call.inputs, whole = inputs & -unit;
    Row local[N];  // not in memory
    each<N>([&](auto n) INLINE_LAMBDA {
        local[n] = rows[n];
        local[n].inputs = inputs;
    });

    auto iterate = [&](int64_t at, int64_t left, auto add) INLINE_LAMBDA {
        const uint8_t* place = ahead + at / unit * ahead_bytes;
        each<(ahead_bytes + 63) / 64>([&](auto line) INLINE_LAMBDA {
            prefetch(place + 64 * line);
            if constexpr (INTEGERS) prefetch_far(place + 64 * line + 8192);
        });
        if constexpr (INTEGERS) {
            Inputs packed{(const uint8_t*)x + at / unit * 64 * F::packing.vectors()};
            each<N>([&](auto n) INLINE_LAMBDA {
                F::terms(local[n], at, packed, left,
                         [&](auto block, const Floats& sums, const Floats& scales) INLINE_LAMBDA {
                             add(n, block, sums, scales);
                         });
            });
        } else {
            float_terms<F, N>(local, (const float*)x, at, left, add);
        }
    };

    float totals[N];
    each<N>([&](auto n) INLINE_LAMBDA { totals[n] = call.carry ? out[n] : 0; });
    if (call.block == 64) {
        auto blocks = [&](int64_t at, int64_t left) INLINE_LAMBDA {
            Floats sums[N][2] = {};
            auto add = [&](auto n, auto block, const Floats& value, const Floats& factor)
                INLINE_LAMBDA { sums[n][block] = fma(value, factor, sums[n][block]); };
            iterate(at, left, add);
            if constexpr (N == 4 && unit == 64) return add_sums<true, false>(sums, totals);
            else if constexpr (N == 4) return add_sums<false, F::paired>(sums, totals);
            else each<N>([&](auto n) INLINE_LAMBDA {
                if constexpr (unit == 64) {
                    totals[n] += lane_sum(sums[n][0]);
                } else if constexpr (F::paired) {
                    TwoSums two = half_sums(sums[n][0]);
                    totals[n] = (totals[n] + two.first) + two.second;
                } else {
                    totals[n] = (totals[n] + lane_sum(sums[n][0])) + lane_sum(sums[n][1]);
                }
            });
        };
        for (int64_t at = 0; at < whole; at += unit) blocks(at, unit);
        if constexpr (F::block_inputs % unit != 0)
            if (whole < inputs) blocks(whole, inputs - whole);
    } else {
        Floats sums[N] = {};
        auto grow = [&](auto n, auto, const Floats& value, const Floats& factor) INLINE_LAMBDA {
            sums[n] = fma(value, factor, sums[n]);
        };
        for (int64_t at = 0; at < whole; at += unit) iterate(at, unit, grow);
        if constexpr (F::block_inputs % unit != 0)
            if (whole < inputs) iterate(whole, inputs - whole, grow);
        if constexpr (N == 4) add_four(lane_sums(sums[0], sums[1], sums[2], sums[3]), totals);
        else each<N>([&](auto n) INLINE_LAMBDA { totals[n] += lane_sum(sums[n]); });
    }
    each<N>([&](auto n) INLINE_LAMBDA { out[n] = totals[n]; });
}

// The row of a tensor that several rows of codes share.
//
// The division is a function of its own, since it takes as long as half a row of 4-bit codes: the
// compiler would divide by 1 too.
[[gnu::noinline, gnu::cold]] inline int64_t quotient(int64_t a, int64_t b) { return a / b; }
INLINE int64_t shared_row(int64_t row, int64_t rows_per_row) {
    return rows_per_row == 1 ? row : quotient(row, rows_per_row);
}

// Row number n of a call. Its scales have a place of their own in the scratch memory.
INLINE Row row_of_call(const RowsCall& call, int64_t n, int place, const float* powers) {
    const Layout& layout = *call.layout;
    int64_t row = call.first + n;
    return {
        call.slot + layout.codes + row * layout.row_bytes,
        (float*)(call.scratch + place * ready_bytes(call.inputs)),
        call.inputs,
        call.slot + layout.scales + shared_row(row, layout.rows_per_scale) * layout.scale_row_bytes,
        layout.groups_per_scale,
        powers,
        call.slot + layout.zeros + shared_row(row, layout.rows_per_zero) * layout.zero_row_bytes,
        call.slot + layout.groups + shared_row(row, layout.rows_per_group) * layout.group_row_bytes,
    };
}

// Round a row of weights to a model's type; they stay float32.
template <class T>
INLINE void round_row(float* weights, int64_t inputs) {
    if constexpr (!std::is_same_v<T, float>)
        for (int64_t at = 0; at < inputs; at += LANES)
            store(weights + at, rounded<T>(load<float>(weights + at)));
}

template <class F, class T>
void expand(RowsCall* call) {
    for (int64_t n = 0; n < call->rows; n++) {
        Row row = row_of_call(*call, n, 0, nullptr);
        float* out = call->out + n * call->inputs;
        F::prepare(row);
        expand_row<F>(row, out);
        round_row<T>(out, call->inputs);
    }
}

// Multiply with weights that are decoded to memory, a row at a time, and rounded there.
template <class F, class T>
void multiply_decoded(RowsCall* call) {
    float* weights = (float*)(call->scratch + ready_bytes(call->inputs));
    const int64_t K = call->inputs;
    for (int64_t n = 0; n < call->rows; n++) {
        Row row = row_of_call(*call, n, 0, nullptr);
        F::prepare(row);
        expand_row<F>(row, weights);
        round_row<T>(weights, K);
        dot_row<1>(weights, 4 * K, K, call->block, call->carry, call->x, call->out + n);
    }
}

template <class F, bool INTEGERS>
void multiply(RowsCall* call) {
    const float* powers = nullptr;
    if constexpr (INTEGERS) powers = powers_of<F::packing>((const uint8_t*)call->x, call->inputs);
    const int64_t row_bytes = call->layout->row_bytes;
    int64_t n = 0;
    for (; n + ROWS_AT_ONCE <= call->rows; n += ROWS_AT_ONCE) {
        for (int i = 0; i < ROWS_AT_ONCE; i++) F::prepare(row_of_call(*call, n + i, i, powers));
        Row rows[ROWS_AT_ONCE];  // made again: only the addresses that are used after `prepare`
        each<ROWS_AT_ONCE>([&](auto i) INLINE_LAMBDA {
            rows[i] = row_of_call(*call, n + i, i, powers);
        });
        bool more = n + ROWS_AT_ONCE < call->rows;
        const uint8_t* ahead = more ? rows[0].codes + ROWS_AT_ONCE * row_bytes : call->next;
        multiply_tile<F, ROWS_AT_ONCE, INTEGERS>(rows, call->x, *call, ahead, call->out + n);
    }
    for (; n < call->rows; n++) {
        Row row = row_of_call(*call, n, 0, powers);
        F::prepare(row);
        const uint8_t* ahead = row.codes + row_bytes;
        multiply_tile<F, 1, INTEGERS>(&row, call->x, *call, ahead, call->out + n);
    }
}

inline int64_t no_packed_bytes(int64_t) { return 0; }

// The code for an encoding with the weights as they are, in registers: multiplied as integers if
// the format can.
template <class F>
constexpr Format format_of() {
    if constexpr (MultipliesIntegers<F>)
        return {
            [](RowsCall* call) { pack<F::packing>(call->x, call->inputs, (uint8_t*)call->out); },
            multiply<F, true>,
            expand<F, float>,
            packed_bytes<F::packing>,
        };
    else
        return {nullptr, multiply<F, false>, expand<F, float>, no_packed_bytes};
}

// The code for an encoding whose weights are decoded, and rounded to type T.
template <class F, class T>
constexpr Format decoded_format() {
    return {nullptr, multiply_decoded<F, T>, expand<F, T>, no_packed_bytes};
}

// Define a format under the name of its encoding: format_NAME, and for weights that are decoded to
// a type, format_NAME_TYPE.
#define FORMAT(name, F)                                                         \
    FORMAT_OF(name, greenroom::format_of<F>())                                  \
    FORMAT_OF(name##_float32, (greenroom::decoded_format<F, float>()))          \
    FORMAT_OF(name##_bfloat16, (greenroom::decoded_format<F, greenroom::BFloat16>())) \
    FORMAT_OF(name##_float16, (greenroom::decoded_format<F, greenroom::Float16>()))

#define FORMAT_OF(name, code) \
    EXPORT const greenroom::Format format_##name = code;

}  // namespace greenroom
