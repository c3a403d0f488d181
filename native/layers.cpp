// Kernels of linear layers for few input rows: of nn.Linear, and of embeddings.
#include "layers.hpp"

namespace {

using namespace greenroom;

constexpr int64_t FEW = 8;  // rows: of weights that are expanded at a time, or of inputs

// An address in an optional vector.
template <class T>
INLINE const T* part(const void* vector, int64_t at) {
    return vector ? (const T*)vector + at : nullptr;
}

// Multiply pairs of bfloat16.
void multiply_bfloat16(LinearCall& p) {
    const Matrix& matrix = *p.matrix;
    const int64_t N = p.outputs, K = p.inputs;
    uint8_t* scratch = thread_scratch(p);
    for (Units units(p.cursor, (N + UNIT - 1) / UNIT); units.left(); units.advance()) {
        const int64_t n0 = units.number * UNIT, n = least(UNIT, N - n0);
        const void* next = row_place<BFloat16>(matrix, K, units.next() * UNIT);
        for (int64_t m0 = 0; m0 < p.rows; m0 += PAIR_INPUTS) {
            alignas(64) float sums[PAIR_INPUTS][UNIT];
            const BFloat16* x[PAIR_INPUTS];
            float* out[PAIR_INPUTS];
            const int64_t rows = least(PAIR_INPUTS, p.rows - m0);
            for (int64_t m = 0; m < rows; m++) {
                x[m] = (const BFloat16*)p.x + (m0 + m) * K;
                out[m] = p.sums ? p.sums + (m0 + m) * N + n0 : sums[m];
            }
            multiply_bfloat16(matrix, K, n0, n, rows, x, out, scratch, next);
            for (int64_t m = 0; p.out && m < rows; m++)
                store_sums(out[m], part<BFloat16>(p.bias, n0),
                           (BFloat16*)p.out + (m0 + m) * N + n0, n);
        }
    }
}

// Multiply with unencoded weights. With `wide` each weight is converted to float32 once.
template <class T>
void multiply_plain(LinearCall& p) {
    const int64_t N = p.outputs, K = p.inputs;
    for (int64_t n0; (n0 = claim(p.cursor) * UNIT) < N;) {
        const T* w = (const T*)p.matrix->base + n0 * K;
        const T* bias = part<T>(p.bias, n0);
        T* out = (T*)p.out + n0;
        const int64_t n = least(UNIT, N - n0);
        if (p.wide) {
            RowsOf rows{p.wide, K, nullptr, p.sums, N, nullptr};
            dots(w, K * sizeof(T), K, n, K, false, rows, n0, 0, p.rows);
        }
        for (int64_t m = 0; m < p.rows; m++) {
            alignas(64) float unit[UNIT];
            float* sums = p.sums ? p.sums + m * N + n0 : unit;
            if (!p.wide) multiply_plain_rows(w, n, K, (const T*)p.x + m * K, sums);
            if (p.out) store_sums(sums, bias, out + m * N, n);
        }
    }
}

template <class T>
void multiply_encoded(LinearCall& p) {
    const Matrix& matrix = *p.matrix;
    const int64_t N = p.outputs, K = p.inputs;
    float* place = (float*)thread_scratch(p);  // a row of K float32, packed in its place
    uint8_t* scratch = (uint8_t*)(place + p.rows * K);
    for (int64_t m = 0; m < p.rows; m++) {
        float* row = place + m * K;
        widen((const T*)p.x + m * K, K, row);
        if (matrix.format->planes) pack_row(matrix.format->planes, row, K, row);
    }
    for (Units units(p.cursor, (N + UNIT - 1) / UNIT); units.left(); units.advance()) {
        const int64_t n0 = units.number * UNIT, n = least(UNIT, N - n0);
        const uint8_t* next = row_codes(*matrix.layout, matrix.base, units.next() * UNIT);
        for (int64_t m0 = 0; m0 < p.rows; m0 += FEW) {
            alignas(64) float sums[FEW][UNIT];
            const float* x[FEW];
            float* out[FEW];
            const int64_t rows = least(FEW, p.rows - m0);
            for (int64_t m = 0; m < rows; m++) {
                x[m] = place + (m0 + m) * K;
                out[m] = sums[m];
            }
            multiply_rows(matrix, K, n0, n, K, false, rows, x, out, scratch, next);
            for (int64_t m = 0; m < rows; m++)
                store_sums(sums[m], part<T>(p.bias, n0), (T*)p.out + (m0 + m) * N + n0, n);
        }
    }
}

template <class T>
void multiply(LinearCall& p) {
    if (has_pairs<T>(*p.matrix) && !p.wide) return multiply_bfloat16(p);
    p.matrix->format ? multiply_encoded<T>(p) : multiply_plain<T>(p);
}

template <class T>
void expand(ExpandCall& p) {
    uint8_t* scratch = thread_scratch(p);
    const int64_t step = p.index ? 1 : FEW;
    for (int64_t n0; (n0 = claim(p.cursor) * step) < p.rows;) {
        int64_t first = p.index ? p.index[n0] : p.first + n0, n = least(step, p.rows - n0);
        const float* rows = expanded_rows(*p.matrix, p.columns, first, n, scratch);
        store_sums<T>(rows, nullptr, (T*)p.out + n0 * p.columns, n * p.columns);
    }
}

}  // namespace

// Bytes of scratch memory of a call for some rows of an encoded matrix.
EXPORT int64_t rows_scratch_bytes(int64_t inputs) { return scratch_bytes(inputs); }

KERNELS(linear, LinearCall, multiply)
KERNELS(expand_rows, ExpandCall, expand)
