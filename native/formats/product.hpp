// Loops over rows of an encoded matrix: decode them, or multiply them with input rows.
//
// A format is a class with
//     block_inputs, block_bytes   of one block of its codes
//     prepare(row)                writes the row's scales and minima as float32
//     decode(row, at)             returns the 32 weights from input `at` on
// and, if it multiplies integers, the members that panels.hpp names.
#pragma once

#include "../plain.hpp"
#include "panels.hpp"

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

// Call add(n, values, factors) for row n, for at most 64 inputs in float32.
template <class F, int N, class Add>
INLINE void float_terms(const Row* rows, const float* x, int64_t at, int64_t left, Add add) {
    for (int64_t first = at; first < at + left && first < at + 64; first += 32) {
        Floats xs[2] = {load<float>(x + first), load<float>(x + first + LANES)};
        each<N>([&](auto n) INLINE_LAMBDA {
            Weights weights = F::decode(rows[n], first);
            add(n, xs[0], weights.part[0]);
            add(n, xs[1], weights.part[1]);
        });
    }
}

INLINE void add_four(const FourFloats& sums, float (&totals)[4]) {
    each<4>([&](auto n) INLINE_LAMBDA { totals[n] += sums[(int)n]; });
}

// Multiply N rows with one float32 row x, and write or add N sums.
template <class F, int N>
INLINE void multiply_tile(
    const Row* rows, const float* x, const RowsCall& call, const uint8_t* ahead, float* out) {
    constexpr int unit = 64, ahead_bytes = N * unit * F::block_bytes / F::block_inputs;
    const int64_t inputs = call.inputs, block = call.block;
    Row local[N];  // not in memory
    each<N>([&](auto n) INLINE_LAMBDA {
        local[n] = rows[n];
        local[n].inputs = inputs;
    });
    float totals[N];
    each<N>([&](auto n) INLINE_LAMBDA { totals[n] = call.carry ? out[n] : 0; });
    for (int64_t start = 0; start < inputs; start += block) {
        Floats sums[N] = {};
        for (int64_t at = start; at < least(start + block, inputs); at += unit) {
            const uint8_t* place = ahead + at / unit * ahead_bytes;
            each<(ahead_bytes + 63) / 64>([&](auto line) INLINE_LAMBDA {
                prefetch(place + 64 * line);
            });
            float_terms<F, N>(
                local, x, at, inputs - at,
                [&](auto n, const Floats& value, const Floats& factor) INLINE_LAMBDA {
                    sums[n] = fma(value, factor, sums[n]);
                });
        }
        if constexpr (N == 4) add_four(lane_sums(sums[0], sums[1], sums[2], sums[3]), totals);
        else each<N>([&](auto n) INLINE_LAMBDA { totals[n] += lane_sum(sums[n]); });
    }
    each<N>([&](auto n) INLINE_LAMBDA { out[n] = totals[n]; });
}

// Row number n of a call. Its scales have a place of their own in the scratch memory.
INLINE Row row_of_call(const RowsCall& call, int64_t n, int place) {
    const Layout& layout = *call.layout;
    int64_t row = call.first + n;
    return {
        call.slot + layout.codes + row * layout.row_bytes,
        (float*)(call.scratch + place * ready_bytes(call.inputs)),
        call.inputs,
        call.slot + layout.scales + shared_row(row, layout.rows_per_scale) * layout.scale_row_bytes,
        layout.groups_per_scale,
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
    const Layout& layout = *call->layout;
    for (int64_t n = 0; n < call->rows; n++) {
        Row row = row_of_call(*call, n, 0);
        if constexpr (ORDERED<F>)
            if (int64_t number = call->first + n; number < layout.panel_rows) {
                const int64_t lane = number % LANES;
                uint8_t* codes = call->scratch + ready_bytes(call->inputs);
                restore_row<F>(row.codes - lane * layout.row_bytes, lane, layout.row_bytes, codes);
                row.codes = codes;
            }
        float* out = *call->out + n * call->inputs;
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
        Row row = row_of_call(*call, n, 0);
        F::prepare(row);
        expand_row<F>(row, weights);
        round_row<T>(weights, K);
        for (int64_t t = 0; t < call->tokens; t++)
            dot_row<1>(weights, 4 * K, K, call->block, call->carry, call->x[t], call->out[t] + n);
    }
}

template <class F>
INLINE void multiply_floats(const RowsCall& call, const float* x, float* out) {
    const int64_t row_bytes = call.layout->row_bytes;
    int64_t n = 0;
    for (; n + ROWS_AT_ONCE <= call.rows; n += ROWS_AT_ONCE) {
        for (int i = 0; i < ROWS_AT_ONCE; i++) F::prepare(row_of_call(call, n + i, i));
        Row rows[ROWS_AT_ONCE];  // made again: only the addresses that are used after `prepare`
        each<ROWS_AT_ONCE>([&](auto i) INLINE_LAMBDA { rows[i] = row_of_call(call, n + i, i); });
        bool more = n + ROWS_AT_ONCE < call.rows;
        const uint8_t* ahead = more ? rows[0].codes + ROWS_AT_ONCE * row_bytes : call.next;
        multiply_tile<F, ROWS_AT_ONCE>(rows, x, call, ahead, out + n);
    }
    for (; n < call.rows; n++) {
        Row row = row_of_call(call, n, 0);
        F::prepare(row);
        multiply_tile<F, 1>(&row, x, call, row.codes + row_bytes, out + n);
    }
}

// Multiply with weights as they are, in float32.
template <class F>
void multiply(RowsCall* call) {
    for (int64_t t = 0; t < call->tokens; t++)
        multiply_floats<F>(*call, call->x[t], call->out[t]);
}

// The code for an encoding with the weights as they are, in registers: multiplied with inputs of so
// many planes of bytes, or of float32.
template <class F, int PLANES = 0>
constexpr Format format_of() {
    if constexpr (PLANES == 0)
        return {0, multiply<F>, expand<F, float>, nullptr, nullptr, 0, nullptr};
    else if constexpr (!ORDERED<F>)
        return {PLANES, multiply_panels<F, PLANES>, expand<F, float>, nullptr, nullptr, 0, nullptr};
    else
        return {PLANES, multiply_ordered<F, PLANES>, expand<F, float>, arrange<F>, restore<F>, 0,
                nullptr};
}

// The code for an encoding whose weights are decoded, and rounded to type T.
template <class F, class T>
constexpr Format decoded_format() {
    constexpr bool bfloat16 = std::is_same_v<T, BFloat16>;
    return {0, multiply_decoded<F, T>, expand<F, T>, nullptr, nullptr, bfloat16, nullptr};
}

#define FORMAT_OF(name, code) \
    EXPORT const greenroom::Format format_##name = code;

// Define a format for weights that are decoded to a type: format_NAME_TYPE.
#define DECODED_FORMATS(name, F)                                                \
    FORMAT_OF(name##_float32, (greenroom::decoded_format<F, float>()))          \
    FORMAT_OF(name##_bfloat16, (greenroom::decoded_format<F, greenroom::BFloat16>())) \
    FORMAT_OF(name##_float16, (greenroom::decoded_format<F, greenroom::Float16>()))

// Define a format under the name of its encoding: format_NAME. It multiplies float32 inputs, or
// inputs of 15 bits.
#define FORMAT(name, F)                              \
    FORMAT_OF(name, (greenroom::format_of<F>()))     \
    DECODED_FORMATS(name, F)
#define PACKED_FORMAT(name, F)                       \
    FORMAT_OF(name, (greenroom::format_of<F, 2>()))  \
    DECODED_FORMATS(name, F)

// The same for an encoding of GGUF. It multiplies inputs of 8 bits; format_NAME_precise multiplies
// inputs of 15 bits.
#define GGUF_FORMAT(name, F)                                   \
    FORMAT_OF(name, (greenroom::format_of<F, 1>()))            \
    FORMAT_OF(name##_precise, (greenroom::format_of<F, 2>()))  \
    DECODED_FORMATS(name, F)

}  // namespace greenroom
