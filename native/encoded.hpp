// Products of rows with encoded matrices, by the code of their formats.
#pragma once

#include "formats/inputs.hpp"
#include "formats/row.hpp"
#include "formulas.hpp"
#include "pairs.hpp"
#include "region.hpp"

namespace greenroom {

// A matrix. If it is plain, its format is null and `base` is the address of its weights; if it is
// encoded, the offsets in its layout begin at `base`.
SHARED(Matrix,
    const Format* format;
    const Layout* layout;
    const uint8_t* base;
)

INLINE const uint8_t* row_codes(const Layout& layout, const uint8_t* base, int64_t first) {
    return base + layout.codes + first * layout.row_bytes;
}

template <class T>
INLINE T* aligned(T* address) {
    return (T*)(((uintptr_t)address + 63) & ~(uintptr_t)63);
}

// Input rows of products with encoded matrices: float32, and packed as integers for the formats
// that multiply these. Either may be null if no format needs it.
struct Input {
    const float* plain;
    const float* packed;

    const float* of(const Format& format) const { return format.planes ? packed : plain; }
};

// Widen a row of inputs to `place`, and pack it behind, if the format has planes: 2 * K float32.
template <class T>
INLINE Input input_row(const T* x, int64_t K, int64_t planes, float* place) {
    widen(x, K, place);
    if (planes) pack_row(planes, place, K, place + K);
    return {place, place + K};
}

// Multiply some rows of an encoded matrix with input rows: out[t][:rows], or add to it.
//
// x: rows as the format needs them. scratch: scratch_bytes(K) bytes. next: codes that are
// prefetched, since they are read next.
INLINE void multiply_rows(
    const Matrix& matrix, int64_t K, int64_t first, int64_t rows, int64_t block, bool carry,
    int64_t tokens, const float* const* x, float* const* out, uint8_t* scratch,
    const uint8_t* next) {
    RowsCall call{matrix.base, matrix.layout, K,   first,           rows, block, carry,
                  tokens,      x,             out, aligned(scratch), next};
    matrix.format->multiply(&call);
}

// The same for one input row.
INLINE void multiply_row(
    const Matrix& matrix, int64_t K, int64_t first, int64_t rows, const Input& input, float* out,
    uint8_t* scratch, const uint8_t* next) {
    const float* x = input.of(*matrix.format);
    multiply_rows(matrix, K, first, rows, K, false, 1, &x, &out, scratch, next);
}

// Decode rows of an encoded matrix to scratch memory, as float32 [rows, K], and return them.
INLINE const float* expanded_rows(
    const Matrix& matrix, int64_t K, int64_t first, int64_t rows, uint8_t* scratch) {
    float* place = (float*)aligned(scratch);
    RowsCall call{matrix.base, matrix.layout, K,      first,
                  rows,        K,             0,      1,
                  nullptr,     &place,        (uint8_t*)(place + rows * K), nullptr};
    matrix.format->expand(&call);
    return place;
}

// Is a matrix, of a model of type T, multiplied by pairs: is it plain bfloat16, or rounded to it?
template <class T>
INLINE bool has_pairs(const Matrix& matrix) {
    return std::is_same_v<T, BFloat16> && (!matrix.format || matrix.format->bfloat16);
}

// Multiply pairs of rows of an encoded matrix, from number `first` on, that are rounded to
// bfloat16: the call's w are set here. scratch: scratch_bytes(K) bytes.
INLINE void multiply_rounded(
    const Matrix& matrix, int64_t first, const PairsCall& p, uint8_t* scratch) {
    if (auto code = matrix.format->multiply_pairs) {
        RowsCall call{matrix.base, matrix.layout, p.K,     first,   p.rows,
                      p.block,     p.carry,       p.tokens, nullptr, p.out,
                      aligned(scratch), (const uint8_t*)p.next};
        return code(&call, &p);
    }
    float* out[PAIR_INPUTS];
    for (int64_t t = 0; t < p.tokens; t++) out[t] = p.out[t];
    for (int64_t n = 0; n < p.rows; n += PAIR_ROWS) {
        const int64_t rows = least(PAIR_ROWS, p.rows - n);
        const float* wide = expanded_rows(matrix, p.K, first + n, rows, scratch);
        BFloat16* w = (BFloat16*)wide;
        narrow(wide, rows * p.K, w);
        multiply_pairs({w, p.K, rows, p.block, p.carry, p.tokens, p.x, out, w});
        for (int64_t t = 0; t < p.tokens; t++) out[t] += rows;
    }
}

}  // namespace greenroom
