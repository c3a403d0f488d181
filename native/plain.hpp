// Products of rows with unencoded matrices, in tiles.
//
// A dot product is summed lane by lane, the lanes by halving, and the blocks of `block` elements
// one after another. An element of the result depends on its own row and column only, never on the
// tile that it was computed in, on its neighbours or on the threads.
#pragma once

#include "arguments.hpp"
#include "numbers.hpp"
#include "region.hpp"

namespace greenroom {

// Sizes of tiles, whose sums fit into 16 registers of AVX2, or 32 of AVX-512 and NEON.
constexpr int COLUMNS = 4;                      // of the result, for one row of x
constexpr int ROWS = PARTS == 1 ? 4 : 2;        // of x
constexpr int ROWS_COLUMNS = ROWS;              // of the result, for ROWS rows of x
constexpr int STRIP = PARTS == 1 ? 4 : 2;       // vectors of columns of a transposed matrix

// Are rows of weights read one after another, with hardware prefetch, instead of four side by side
// with software prefetch? (AMD's processors then read twice as fast; Intel's are slower.)
INLINE bool row_by_row() {
#if defined(__x86_64__)
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}

// A row of a float32 matrix; `index` has row numbers, or is null.
INLINE const float* row_of(const float* matrix, const int64_t* index, int64_t i, int64_t columns) {
    return matrix + (index ? index[i] : i) * columns;
}
INLINE float* row_of(float* matrix, const int64_t* index, int64_t i, int64_t columns) {
    return matrix + (index ? index[i] : i) * columns;
}

// Sum products of LANES elements (or the first `left`, if FEW) of weight rows and rows of x.
template <int FEW, class W, class X, int M, int N>
INLINE void dot_step(
    const W* w, int64_t row_bytes, const X* const (&x)[M], int64_t at, int64_t left,
    Floats (&cells)[M][N], int first, int count) {
    auto get = [&](const auto* place) INLINE_LAMBDA {
        if constexpr (FEW) return load_first_as_floats(place, left);
        else return load_as_floats(place);
    };
    Floats xs[M];
    each<M>([&](auto m) INLINE_LAMBDA { xs[m] = get(x[m] + at); });
    each<N>([&](auto n) INLINE_LAMBDA {
        if (n < first || n >= first + count) return;
        Floats weights = get(moved(w, n * row_bytes) + at);
        each<M>([&](auto m) INLINE_LAMBDA { cells[m][n] = fma(xs[m], weights, cells[m][n]); });
    });
}

// Prefetch the N rows after these at element `at`: side by side, or a part of them as they lie.
template <int N, class W>
INLINE void prefetch_rows(const W* w, int64_t row_bytes, int64_t at) {
    if (row_by_row()) {
        const W* place = moved(w, N * row_bytes) + N * at;
        each<N * LANES * sizeof(W) / 64>([&](auto line) INLINE_LAMBDA {
            prefetch(moved(place, 64 * line));
        });
    } else {
        each<N>([&](auto n) INLINE_LAMBDA { prefetch(moved(w, (n + N) * row_bytes) + at); });
    }
}

// The sums of a tile: M rows of N numbers.
template <int M, int N>
class TileSums {
    static constexpr int COUNT = M * N;
    static constexpr bool SIXTEEN = PARTS == 1 && COUNT == LANES;
    using Sum = std::conditional_t<
        SIXTEEN, Floats, std::conditional_t<COUNT % 4 == 0, FourFloats, float>>;
    static constexpr int parts = COUNT * sizeof(float) / sizeof(Sum);
    Sum sums[parts] = {};

  public:
    // They begin with numbers of the results' rows, or with 0.
    INLINE TileSums(bool carry, const float* const* rows, int64_t column) {
        if (!carry) return;
        each<M>([&](auto m) INLINE_LAMBDA {
            std::memcpy((float*)sums + m * N, rows[m] + column, N * sizeof(float));
        });
    }
    // Add the lanes of each cell.
    INLINE void add(const Floats (&cells)[M][N]) {
        auto cell = [&](int i) INLINE_LAMBDA -> const Floats& { return cells[i / N][i % N]; };
#if defined(__AVX512F__)
        if constexpr (SIXTEEN) {
            sums[0] = sums[0] + lane_sums(cell);
            return;
        }
#endif
        each<parts>([&](auto i) INLINE_LAMBDA {
            if constexpr (std::is_same_v<Sum, FourFloats>)
                sums[i] += lane_sums(
                    cell(4 * i), cell(4 * i + 1), cell(4 * i + 2), cell(4 * i + 3));
            if constexpr (std::is_same_v<Sum, float>) sums[i] += lane_sum(cell(i));
        });
    }
    INLINE void write(float* const* rows, int64_t column) const {
        each<M>([&](auto m) INLINE_LAMBDA {
            std::memcpy(rows[m] + column, (const float*)sums + m * N, N * sizeof(float));
        });
    }
};

// Write out[m][n], m < M, n < N: x[m] [K] times row n of w; or add them if `carry`.
template <class W, class X, int M, int N>
[[gnu::noinline]] void dot(
    const W* w, int64_t row_bytes, int64_t K, int64_t block, bool carry, const X* const (&x)[M],
    float* const (&out)[M]) {
    TileSums<M, N> sums(carry, out, 0);
    for (int64_t start = 0; start < K; start += block) {
        int64_t stop = least(start + block, K), left = (stop - start) & (LANES - 1);
        int64_t end = stop - left;
        Floats cells[M][N] = {};
        if (M == 1 && N > 1 && block >= K && row_by_row()) {
            each<N>([&](auto n) INLINE_LAMBDA {
                for (int64_t at = start; at < end; at += LANES)
                    dot_step<0>(w, row_bytes, x, at, 0, cells, n, 1);
            });
        } else {
            for (int64_t at = start; at < end; at += LANES) {
                if constexpr (M == 1 && N > 1) prefetch_rows<N>(w, row_bytes, at);
                dot_step<0>(w, row_bytes, x, at, 0, cells, 0, N);
            }
        }
        if (left > 0) dot_step<1>(w, row_bytes, x, end, left, cells, 0, N);
        sums.add(cells);
    }
    sums.write(out, 0);
}

// One row of x.
template <int N, class W, class X>
INLINE void dot_row(
    const W* w, int64_t row_bytes, int64_t K, int64_t block, bool carry, const X* x, float* out) {
    dot<W, X, 1, N>(w, row_bytes, K, block, carry, {x}, {out});
}

// Rows of x, and of the results: float32 matrices, with row numbers or null.
struct RowsOf {
    const float* x;
    int64_t x_columns;
    const int64_t* x_index;
    float* out;
    int64_t out_columns;
    const int64_t* out_index;

    const float* input(int64_t j) const { return row_of(x, x_index, j, x_columns); }
    float* result(int64_t j) const { return row_of(out, out_index, j, out_columns); }
};

// Compute out[j, column:column + N] = x[j] @ w.T for rows j0 to j1 - 1 of x, or add to it.
//
// The matrix w has N rows of K elements, which begin `row_bytes` bytes apart.
template <class W>
[[gnu::noinline]] void dots(
    const W* w, int64_t row_bytes, int64_t K, int64_t N, int64_t block, bool carry,
    const RowsOf& rows, int64_t column, int64_t j0, int64_t j1) {
    int64_t tiled = N - N % COLUMNS;
    for (int64_t j = j0; j < j1; j += ROWS) {
        bool many = j1 - j >= ROWS;
        if (many)
            for (int64_t n = 0; n < tiled; n += ROWS_COLUMNS) {
                const float* x[ROWS];
                float* out[ROWS];
                for (int m = 0; m < ROWS; m++) {
                    x[m] = rows.input(j + m);
                    out[m] = rows.result(j + m) + column + n;
                }
                dot<W, float, ROWS, ROWS_COLUMNS>(
                    moved(w, n * row_bytes), row_bytes, K, block, carry, x, out);
            }
        for (int64_t i = j; i < least(j + ROWS, j1); i++) {
            const float* x = rows.input(i);
            float* out = rows.result(i) + column;
            if (!many)
                for (int64_t n = 0; n < tiled; n += COLUMNS)
                    dot_row<COLUMNS>(
                        moved(w, n * row_bytes), row_bytes, K, block, carry, x, out + n);
            for (int64_t n = tiled; n < N; n++)
                dot_row<1>(moved(w, n * row_bytes), row_bytes, K, block, carry, x, out + n);
        }
    }
}

// Compute n products of consecutive rows of w [.., K] with one row x [K] of the same type.
template <class T>
INLINE void multiply_plain_rows(const T* w, int64_t n, int64_t K, const T* x, float* out) {
    int64_t row_bytes = K * sizeof(T), tiled = n - n % COLUMNS;
    for (int64_t i = 0; i < tiled; i += COLUMNS)
        dot_row<COLUMNS>(w + i * K, row_bytes, K, K, false, x, out + i);
    for (int64_t i = tiled; i < n; i++) dot_row<1>(w + i * K, row_bytes, K, K, false, x, out + i);
}

// A tile of x @ w, w transposed: M rows of x, V vectors of columns, or the first `count` columns.
template <class W, int M, int V>
[[gnu::noinline]] void axpy(
    const W* w, int64_t row_bytes, int64_t K, int64_t block, bool carry, int64_t count,
    const float* const (&x)[M], float* const (&out)[M]) {
    bool few = V == 1 && count < LANES;
    auto get = [&](const auto* place) INLINE_LAMBDA {
        return few ? load_first_as_floats(place, count) : load_as_floats(place);
    };
    for (int64_t start = 0; start < K; start += block) {
        Floats cells[M][V] = {};
        for (int64_t at = start; at < least(start + block, K); at++) {
            Floats weights[V];
            each<V>([&](auto v) INLINE_LAMBDA {
                weights[v] = get(moved(w, at * row_bytes) + LANES * v);
            });
            each<M>([&](auto m) INLINE_LAMBDA {
                Floats wide = all(x[m][at]);
                each<V>([&](auto v) INLINE_LAMBDA {
                    cells[m][v] = fma(wide, weights[v], cells[m][v]);
                });
            });
        }
        bool fresh = start == 0 && !carry;
        each<M>([&](auto m) INLINE_LAMBDA {
            each<V>([&](auto v) INLINE_LAMBDA {
                float* place = out[m] + LANES * v;
                Floats sum = (fresh ? Floats{} : get(place)) + cells[m][v];
                if (few) store_first(place, sum, count);
                else store(place, sum);
            });
        });
    }
}

// out[:N] += x[:DEPTH] @ w[:DEPTH, :N], w transposed; N is a multiple of LANES.
template <int DEPTH, class W>
INLINE void panel(const W* w, int64_t row_bytes, int64_t N, const float* x, float* out) {
    Floats xs[DEPTH];
    each<DEPTH>([&](auto k) INLINE_LAMBDA { xs[k] = all(x[k]); });
    for (int64_t at = 0; at < N; at += LANES) {
        Floats value = load<float>(out + at);
        each<DEPTH>([&](auto k) INLINE_LAMBDA {
            const W* source = moved(w, k * row_bytes) + at;
            prefetch(moved(source, DEPTH * row_bytes));
            value = fma(xs[k], load_as_floats(source), value);
        });
        store(out + at, value);
    }
}

// Compute out[:N] = x[:K] @ w, reading along the rows of w, or add to it; N is a multiple of LANES.
//
// The tiles of `axpys` would touch a new page of memory for every few cache lines. cells: memory
// for N float32.
template <class W>
[[gnu::noinline]] void panels(
    const W* w, int64_t row_bytes, int64_t K, int64_t N, int64_t block, bool carry, const float* x,
    float* out, float* cells) {
    if (!carry) std::memset(out, 0, 4 * N);
    for (int64_t start = 0; start < K; start += block) {
        int64_t stop = least(start + block, K), eights = stop - (stop - start) % 8;
        std::memset(cells, 0, 4 * N);
        for (int64_t k = start; k < eights; k += 8)
            panel<8>(moved(w, k * row_bytes), row_bytes, N, x + k, cells);
        for (int64_t k = eights; k < stop; k++)
            panel<1>(moved(w, k * row_bytes), row_bytes, N, x + k, cells);
        for (int64_t n = 0; n < N; n++) out[n] += cells[n];
    }
}

// Compute out[j, column:column + N] = x[j] @ w for rows j0 to j1 - 1 of x, or add to it.
//
// The matrix w has K rows, which begin `row_bytes` bytes apart; N of its columns are used. scratch:
// memory for N float32.
template <class W>
[[gnu::noinline]] void axpys(
    const W* w, int64_t row_bytes, int64_t K, int64_t N, int64_t block, bool carry,
    const RowsOf& rows, int64_t column, int64_t j0, int64_t j1, float* scratch) {
    for (int64_t j = j0; j < j1; j += ROWS) {
        bool many = j1 - j >= ROWS;
        int64_t step = many ? STRIP * LANES : LANES, tiled = N - N % step;
        if (many)
            for (int64_t n = 0; n < tiled; n += step) {
                const float* x[ROWS];
                float* out[ROWS];
                for (int m = 0; m < ROWS; m++) {
                    x[m] = rows.input(j + m);
                    out[m] = rows.result(j + m) + column + n;
                }
                axpy<W, ROWS, STRIP>(w + n, row_bytes, K, block, carry, 0, x, out);
            }
        for (int64_t i = j; i < least(j + ROWS, j1); i++) {
            const float* x = rows.input(i);
            float* out = rows.result(i) + column;
            if (!many) panels(w, row_bytes, K, tiled, block, carry, x, out, scratch);
            for (int64_t n = tiled; n < N; n += LANES)
                axpy<W, 1, 1>(w + n, row_bytes, K, block, carry, N - n, {x}, {out + n});
        }
    }
}

}  // namespace greenroom
