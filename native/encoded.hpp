// Products of rows with encoded matrices, by the code of their formats.
#pragma once

#include "formats/row.hpp"
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

// Multiply some rows of an encoded matrix with one float32 row: out[:rows], or add to it.
//
// scratch: memory for the packed input row, and scratch_bytes(K) bytes. packed: the row whose
// integers are there, or null; the new one is returned, for the next call. next: codes that are
// prefetched, since they are read next.
INLINE const float* multiply_row(
    const Matrix& matrix, int64_t K, int64_t first, int64_t rows, int64_t block, bool carry,
    const float* x, float* out, uint8_t* scratch, const float* packed, const uint8_t* next) {
    uint8_t* place = aligned(scratch);
    int64_t room = matrix.layout->packed_bytes;
    RowsCall call{
        matrix.base, matrix.layout, K, first, 0, block, carry, x, out, place + room, next};
    if (room && packed != x) {
        call.out = (float*)place;
        matrix.format->pack(&call);
        call.out = out;
    }
    if (room) call.x = (const float*)place;
    call.rows = rows;
    matrix.format->multiply(&call);
    return room ? x : nullptr;
}

// Decode rows of an encoded matrix to scratch memory, as float32 [rows, K], and return them.
INLINE const float* expanded_rows(
    const Matrix& matrix, int64_t K, int64_t first, int64_t rows, uint8_t* scratch) {
    float* place = (float*)aligned(scratch);
    RowsCall call{matrix.base, matrix.layout, K, first, rows, K, 0, nullptr, place,
                  (uint8_t*)(place + rows * K), nullptr};
    matrix.format->expand(&call);
    return place;
}

}  // namespace greenroom
