// Calls of dense layers, and what they share with attention.
#pragma once

#include "encoded.hpp"
#include "formulas.hpp"
#include "plain.hpp"

namespace greenroom {

constexpr int64_t UNIT = 64;  // weight rows that a thread claims at a time

// out [rows, outputs] = x [rows, inputs] @ matrix [outputs, inputs].T + bias, of the model's type.
SHARED(LinearCall,
    int64_t cursor;
    const Matrix* matrix;
    int64_t outputs;
    int64_t inputs;
    const void* x;
    void* out;  // may be null if there are `sums`
    const void* bias;  // or null
    int64_t rows;
    const float* wide;  // float32 inputs of a plain matrix, in place of x; or null
    float* sums;  // of a plain matrix: sums in float32 [rows, outputs]; or null, without `wide`
    int64_t ticket;
    uint8_t* scratch;  // for an encoded matrix: `stride` bytes for each thread
    int64_t stride;
)

// out [rows, columns] = some rows of an encoded matrix, decoded to the model's type.
SHARED(ExpandCall,
    int64_t cursor;
    const Matrix* matrix;
    int64_t rows;
    int64_t columns;
    int64_t first;
    const int64_t* index;  // row numbers, or null: consecutive rows from `first` on
    void* out;
    int64_t ticket;
    uint8_t* scratch;  // `stride` bytes for each thread
    int64_t stride;
)

// The memory of a thread that enters a call.
template <class Call>
INLINE uint8_t* thread_scratch(Call& p) {
    return p.scratch + claim(p.ticket) * p.stride;
}

// The codes or weights of a matrix from row `first` on.
template <class T>
INLINE const uint8_t* row_place(const Matrix& matrix, int64_t K, int64_t first) {
    if (matrix.format) return row_codes(*matrix.layout, matrix.base, first);
    return matrix.base + first * K * sizeof(T);
}

// Multiply pairs of bfloat16: out[t][:n] = x[t] @ rows.T, n rows from number `first` on.
[[gnu::noinline]] inline void multiply_bfloat16(
    const Matrix& matrix, int64_t K, int64_t first, int64_t n, int64_t tokens,
    const BFloat16* const* x, float* const* out, uint8_t* scratch, const void* next) {
    const BFloat16* w = (const BFloat16*)matrix.base + first * K;
    PairsCall call{w, K, n, K, false, tokens, x, out, next};
    if (matrix.format) multiply_rounded(matrix, first, call, scratch);
    else multiply_pairs(call);
}

// Add a bias, if not null, to n float32 sums, and store them in the model's type.
template <class T>
INLINE void store_sums(const float* sums, const T* bias, T* out, int64_t n) {
    over_row(n, [&](int64_t at, int64_t left) INLINE_LAMBDA {
        Floats value = get(sums, at, left);
        if (bias) value = value + get(bias, at, left);
        put(out, at, left, value);
    });
}

}  // namespace greenroom
