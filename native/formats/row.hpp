// Rows of an encoded matrix, the calls that multiply them, and what a format is to other kernels.
#pragma once

#include "../arguments.hpp"
#include "../numbers.hpp"

namespace greenroom {

// Where the parts of an encoded matrix lie in a slot: bytes from the slot's start, and from row to
// row. Scales and up to two other tensors, such as zeros and groups of inputs, may be tensors of
// their own, of which a row serves several rows of codes.
SHARED(Layout,
    int64_t codes, row_bytes;
    int64_t scales, scale_row_bytes, groups_per_scale, rows_per_scale;  // groups of 32 inputs
    int64_t zeros, zero_row_bytes, rows_per_zero;
    int64_t groups, group_row_bytes, rows_per_group;
    int64_t panel_rows;  // so many first rows are in the order of panels (panel.hpp)
)

// One call of a format's code, for some rows of a matrix.
//
// multiply: compute the products out[t][0..rows] with x[t], t < tokens: a float32 row, or its
//           packed groups if the format has planes. `carry`: add them to out. `block`: inputs of
//           a partial sum of float32 products, `inputs` or 64
// expand:   decode rows to float32 out[0] [rows, inputs]
//
// scratch:  scratch_bytes(inputs) bytes
// next:     codes to prefetch after those of the last row, of formats without panels
SHARED(RowsCall,
    const uint8_t* slot;
    const Layout* layout;
    int64_t inputs, first, rows, block, carry, tokens;
    const float* const* x;
    float* const* out;
    uint8_t* scratch;
    const uint8_t* next;
)

// Some bytes of an encoded matrix, in the order of rows and in the order of panels (panel.hpp).
//
// The bytes are those from number `start` to `stop` - 1 of the matrix in the order of rows, and
// `rows` are these bytes alone. `panels` is the whole matrix, of which the first `panel_rows` rows,
// a multiple of 16, are in panels and the others in the order of rows.
SHARED(OrderCall,
    uint8_t* rows;
    uint8_t* panels;
    int64_t row_bytes, panel_rows, start, stop;
)

struct PairsCall;  // pairs.hpp

// The code for one encoding. `arrange` writes the panels of an OrderCall, and `restore` its rows,
// which must be whole ones; both are null if the format reads rows only.
struct Format {
    int64_t planes;  // of input rows that are packed as integers (inputs.hpp); 0: they are float32
    void (*multiply)(RowsCall*);
    void (*expand)(RowsCall*);
    void (*arrange)(OrderCall*);
    void (*restore)(OrderCall*);
    int64_t bfloat16;  // are decoded weights rounded to bfloat16?
    // Multiplies pairs of such weights; null: rows are decoded, and then multiplied.
    void (*multiply_pairs)(RowsCall*, const PairsCall*);
};

// The row of a tensor that several rows of codes share.
//
// The division is a function of its own, since it takes as long as half a row of 4-bit codes: the
// compiler would divide by 1 too.
[[gnu::noinline, gnu::cold]] inline int64_t quotient(int64_t a, int64_t b) { return a / b; }
INLINE int64_t shared_row(int64_t row, int64_t rows_per_row) {
    return rows_per_row == 1 ? row : quotient(row, rows_per_row);
}

// Bytes of a row's scales and minima in float32: one of each for 16 inputs, and the overhang of two
// vectors, which short rows fill in part.
constexpr int64_t ready_bytes(int64_t inputs) { return inputs / 2 + 128; }

// Bytes of a call's scratch memory: the scales of four rows, those of one row and its weights, or
// the codes of 16 rows, of which each has at most 34 bytes for 32 inputs.
constexpr int64_t scratch_bytes(int64_t inputs) { return 17 * inputs + 512; }
static_assert(scratch_bytes(32) >= 4 * ready_bytes(32));

// A row of an encoded matrix. Its scales and minima are converted to float32 before its codes are
// read, which costs less than to convert each scale where it is used.
struct Row {
    const uint8_t* codes;
    float* ready;  // the scales in float32: at most one for 16 inputs
    int64_t inputs;
    const uint8_t* scale;     // the row's first scale, if scales are a tensor of their own
    int64_t groups_per_scale; // groups of 32 inputs with one scale, if that differs between models
    const uint8_t* zero;
    const uint8_t* group;

    // The minima in float32, as many as scales, from number `first` on.
    INLINE float* minima(int64_t first = 0) const { return ready + ((inputs >> 4) + first); }

    // Write 16 scales, or scales and minima, from number `at` of the row on. No store is masked: a
    // load soon after it would have to wait.
    INLINE void put(int64_t at, const Floats& scales) const { store(ready + at, scales); }
    INLINE void put(int64_t at, const Floats& scales, const Floats& lows) const {
        put(at, scales);
        store(minima() + at, lows);  // after the scales, whose last lanes may lie in its place
    }
    // Write the first eight of these.
    INLINE void put_eight(int64_t at, const Floats& scales) const {
        store_half(ready + at, scales, 0);
    }
};

// 32 decoded weights.
struct Weights {
    Floats part[2];
};

INLINE Weights weights_of(const Floats& a, const Floats& b) { return {{a, b}}; }

// Write a row's scales as float32, 16 at a time; the last 16 overlap with those before.
//
// values(at, left) writes 16 scales from number `at` on, of which `left` exist.
template <class Values>
INLINE void prepare_in_vectors(int64_t count, Values values) {
    if (count < LANES) return values(0, count);
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) values(at, LANES);
    if (at < count) values(count - LANES, LANES);
}

}  // namespace greenroom
