// bfloat16 in 12 bits (runtime/encodings/bf12.py): products have the bits of bfloat16's.
//
// A row has the signs and mantissas of all weights, one a byte, then the 4-bit codes of their
// exponents, two neighbours a byte. 64 weights lie in an order in which neighbours of 16 bytes,
// joined byte by byte with a second vector, are neighbours again; 32 at the end of a row lie as
// they are. A few weights, whose exponents have no code, are in a list of the whole matrix: number
// in its row, and weight.
#include "../encoded.hpp"
#include "product.hpp"

namespace greenroom {
namespace {

constexpr int64_t SPAN = 64;  // weights that are decoded at a time
constexpr int64_t SPAN_BYTES = SPAN / 2 * 3;

// A matrix's exponents, by code: the parts of them in the two bytes of a weight.
struct Exponents {
    uint8_t low[16], high[16];

    explicit Exponents(const uint8_t* exponents) {
        for (int i = 0; i < 16; i++) {
            low[i] = exponents[i] << 7;
            high[i] = exponents[i] >> 1;
        }
    }
};

// 64 weights: vectors of pairs.
struct Span {
    Words part[2];
};

// Load 64 codes of four bits: each byte has two neighbours, the first in its low half.
INLINE Bytes load_codes(const uint8_t* address) {
    HalfWords both;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        const uint8_t* place = address + p * (REGISTER / 2);
#if defined(__AVX512BW__)
        both.part[p] = (Part<uint16_t>)_mm512_cvtepu8_epi16(read<__m256i>(place));
#elif defined(__AVX2__)
        both.part[p] = (Part<uint16_t>)_mm256_cvtepu8_epi16(read<__m128i>(place));
#else
        both.part[p] = (Part<uint16_t>)vmovl_u8(vld1_u8(place));
#endif
    });
    return as<uint8_t>((both | both << 4) & 0x0f0f);
}

// Join the low and the high bytes of weights: the first eight of each 16, and the last eight.
INLINE Span join(const Bytes& low, const Bytes& high) {
    Span span;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
#if defined(__AVX512BW__)
        __m512i a = (__m512i)low.part[p], b = (__m512i)high.part[p];
        span.part[0].part[p] = (Part<uint32_t>)_mm512_unpacklo_epi8(a, b);
        span.part[1].part[p] = (Part<uint32_t>)_mm512_unpackhi_epi8(a, b);
#elif defined(__AVX2__)
        __m256i a = (__m256i)low.part[p], b = (__m256i)high.part[p];
        span.part[0].part[p] = (Part<uint32_t>)_mm256_unpacklo_epi8(a, b);
        span.part[1].part[p] = (Part<uint32_t>)_mm256_unpackhi_epi8(a, b);
#else
        uint8x16_t a = (uint8x16_t)low.part[p], b = (uint8x16_t)high.part[p];
        span.part[0].part[p] = (Part<uint32_t>)vzip1q_u8(a, b);
        span.part[1].part[p] = (Part<uint32_t>)vzip2q_u8(a, b);
#endif
    });
    return span;
}

// The weights from number `at` on, a multiple of 64, of a row of K weights.
INLINE Span decode_span(const uint8_t* codes, int64_t K, int64_t at, const Exponents& exponents) {
    Bytes rest = load<uint8_t>(codes + at), code = load_codes(codes + K + at / 2);
    return join((rest & 0x7f) | look_up(exponents.low, code),
                (rest & 0x80) | look_up(exponents.high, code));
}

INLINE void store_span(const Span& span, BFloat16* out) {
    store(out, span.part[0]);
    store(out + PAIRED, span.part[1]);
}

// Decode the last weights of a row, from number `at` on.
INLINE void decode_end(
    const uint8_t* codes, int64_t K, int64_t at, const Exponents& exponents, BFloat16* out) {
    for (int64_t i = at; i < K; i++) {
        const int code = codes[K + i / 2] >> i % 2 * 4 & 15, rest = codes[i];
        const uint16_t word = ((rest & 0x80) | exponents.high[code]) << 8 |
                              ((rest & 0x7f) | exponents.low[code]);
        std::memcpy(out + i - at, &word, sizeof word);
    }
}

// A matrix in a slot, and its weights without codes: those of a row before `ends[row]`. No slot's
// content makes it read or write elsewhere.
struct Listed {
    const uint8_t* codes;
    int64_t K, row_bytes, listed;
    Exponents exponents;
    const int32_t* ends;
    const uint32_t* list;

    explicit Listed(const RowsCall& call)
        : codes(call.slot + call.layout->codes), K(call.inputs), row_bytes(call.layout->row_bytes),
          listed(call.layout->group_row_bytes / 4), exponents(call.slot + call.layout->zeros),
          ends((const int32_t*)(call.slot + call.layout->scales)),
          list((const uint32_t*)(call.slot + call.layout->groups)) {}

    const uint8_t* row(int64_t n) const { return codes + n * row_bytes; }
    const uint32_t* end(int64_t n) const {
        int64_t end = ends[n];
        return list + (end < 0 ? 0 : least(end, listed));
    }
    const uint32_t* begin(int64_t n) const { return n ? end(n - 1) : list; }
};
INLINE int64_t column_of(const uint32_t* listed) { return *listed & 0xffff; }
INLINE BFloat16 weight_of(const uint32_t* listed) {
    return read<BFloat16>((const char*)listed + 2);
}

// Decode a row to bfloat16.
INLINE void narrow_row(const Listed& matrix, int64_t n, BFloat16* out) {
    const uint8_t* codes = matrix.row(n);
    int64_t at = 0;
    for (; at + SPAN <= matrix.K; at += SPAN)
        store_span(decode_span(codes, matrix.K, at, matrix.exponents), out + at);
    decode_end(codes, matrix.K, at, matrix.exponents, out + at);
    for (auto* listed = matrix.begin(n); listed < matrix.end(n); listed++)
        if (column_of(listed) < matrix.K) out[column_of(listed)] = weight_of(listed);
}

// The lists of N rows, which are read as these are decoded side by side.
template <int N>
struct Lists {
    const uint32_t *next[N], *end[N];
    int64_t nearest;  // column of the next listed weight

    Lists(const Listed& matrix, int64_t row) {
        each<N>([&](auto n) INLINE_LAMBDA {
            next[n] = matrix.begin(row + n);
            end[n] = matrix.end(row + n);
        });
        find_nearest();
    }
    INLINE void find_nearest() {
        nearest = INT64_MAX;
        each<N>([&](auto n) INLINE_LAMBDA {
            if (next[n] < end[n]) nearest = least(nearest, column_of(next[n]));
        });
    }
    // Write the listed weights of columns `at` to `at` + 63.
    [[gnu::cold, gnu::noinline]] void write(int64_t at, BFloat16 (&weights)[N][SPAN]) {
        for (int n = 0; n < N; n++)
            for (; next[n] < end[n] && column_of(next[n]) < at + SPAN; next[n]++)
                if (column_of(next[n]) >= at)
                    weights[n][column_of(next[n]) - at] = weight_of(next[n]);
        find_nearest();
    }
};

// Multiply N rows with one row of x: `pair_tile`, with weights that stay in registers.
template <bool INSTRUCTION, int N>
[[gnu::noinline]] void multiply_tile(
    const Listed& matrix, int64_t row, const PairsCall& p, int64_t column, const uint8_t* ahead) {
    using Operand = PairOperand<INSTRUCTION>;
    const int64_t K = matrix.K;
    const Exponents exponents = matrix.exponents;
    const uint8_t* codes = matrix.row(row);
    const BFloat16* x = *p.x;
    Lists<N> lists(matrix, row);
    TileSums<1, N> sums(p.carry, p.out, column);
    for (int64_t start = 0; start < K; start += p.block) {
        const int64_t stop = least(start + p.block, K);
        int64_t at = start;
        Floats cells[1][N] = {};
        auto add = [&](const Span (&spans)[N], int part) INLINE_LAMBDA {
            const Operand xs(load<uint32_t>(x + at + part * PAIRED));
            each<N>([&](auto n) INLINE_LAMBDA {
                cells[0][n] = Operand(spans[n].part[part]).add_products(xs, cells[0][n]);
            });
        };
        auto replace = [&](Span (&spans)[N]) INLINE_LAMBDA {
            BFloat16 weights[N][SPAN];
            each<N>([&](auto n) INLINE_LAMBDA { store_span(spans[n], weights[n]); });
            lists.write(at, weights);
            each<N>([&](auto n) INLINE_LAMBDA {
                spans[n] = {{load<uint32_t>(weights[n]), load<uint32_t>(weights[n] + PAIRED)}};
            });
        };
        Span spans[N];
        for (; at + SPAN <= stop; at += SPAN) {
            const uint8_t* place = ahead + at / SPAN * (N * SPAN_BYTES);
            each<N * SPAN_BYTES / 64>([&](auto line) INLINE_LAMBDA {
                prefetch(place + 64 * line);
            });
            each<N>([&](auto n) INLINE_LAMBDA {
                spans[n] = decode_span(codes + n * matrix.row_bytes, K, at, exponents);
            });
            if (at + SPAN > lists.nearest) [[unlikely]] replace(spans);
            add(spans, 0);
            add(spans, 1);
        }
        if (at < stop) {
            each<N>([&](auto n) INLINE_LAMBDA {
                BFloat16 weights[SPAN]{};
                decode_end(codes + n * matrix.row_bytes, K, at, exponents, weights);
                spans[n] = {{load<uint32_t>(weights), load<uint32_t>(weights + PAIRED)}};
            });
            if (at + SPAN > lists.nearest) replace(spans);
            add(spans, 0);
        }
        sums.add(cells);
    }
    sums.write(p.out, column);
}

template <bool INSTRUCTION>
void multiply_token(const RowsCall& call, const PairsCall& p) {
    const Listed matrix(call);
    const int64_t tiled = call.rows - call.rows % PAIR_ROWS;
    for (int64_t n = 0; n < tiled; n += PAIR_ROWS) {
        const int64_t row = call.first + n, following = row + PAIR_ROWS;
        const uint8_t* ahead = n + PAIR_ROWS < call.rows ? matrix.row(following) : call.next;
        multiply_tile<INSTRUCTION, PAIR_ROWS>(matrix, row, p, n, ahead);
    }
    for (int64_t n = tiled; n < call.rows; n++)
        multiply_tile<INSTRUCTION, 1>(matrix, call.first + n, p, n, call.next);
}

// Multiply rows with bfloat16 rows: one token's at once, more after rows have been decoded.
void multiply_bfloat16(RowsCall* call, const PairsCall* p) {
    if (p->tokens == 1) {
#if defined(__AVX512F__)
        if (pair_instruction) return multiply_token<true>(*call, *p);
#endif
        return multiply_token<false>(*call, *p);
    }
    const Listed matrix(*call);
    BFloat16* w = (BFloat16*)call->scratch;
    float* out[PAIR_INPUTS];
    for (int64_t t = 0; t < p->tokens; t++) out[t] = p->out[t];
    for (int64_t n = 0; n < call->rows; n += PAIR_ROWS) {
        const int64_t rows = least(PAIR_ROWS, call->rows - n), K = call->inputs;
        for (int64_t i = 0; i < rows; i++) narrow_row(matrix, call->first + n + i, w + i * K);
        const void* next = n + rows < call->rows ? matrix.row(call->first + n + rows) : call->next;
        multiply_pairs({w, K, rows, p->block, p->carry, p->tokens, p->x, out, next});
        for (int64_t t = 0; t < p->tokens; t++) out[t] += rows;
    }
}

// Decode rows to float32, rounded to the model's type.
template <class T>
void expand_rows(RowsCall* call) {
    const Listed matrix(*call);
    for (int64_t n = 0; n < call->rows; n++) {
        float* out = *call->out + n * matrix.K;
        BFloat16* half = (BFloat16*)(out + matrix.K) - matrix.K;  // the end of the row's place
        narrow_row(matrix, call->first + n, half);
        widen(half, matrix.K, out);
        round_row<T>(out, matrix.K);
    }
}

template <class T>
void multiply_floats(RowsCall* call) {
    float* weights = (float*)call->scratch;
    const int64_t K = call->inputs;
    RowsCall one = *call;
    one.rows = 1, one.out = &weights;
    for (int64_t n = 0; n < call->rows; n++, one.first++) {
        expand_rows<T>(&one);
        for (int64_t t = 0; t < call->tokens; t++)
            dot_row<1>(weights, 4 * K, K, call->block, call->carry, call->x[t], call->out[t] + n);
    }
}

template <class T>
constexpr Format format() {
    constexpr bool bfloat16 = std::is_same_v<T, BFloat16>;
    return {0, multiply_floats<T>, expand_rows<T>, nullptr, nullptr, bfloat16,
            bfloat16 ? multiply_bfloat16 : nullptr};
}

}  // namespace

FORMAT_OF(bf12_float32, format<float>())
FORMAT_OF(bf12_bfloat16, format<BFloat16>())
FORMAT_OF(bf12_float16, format<Float16>())

}  // namespace greenroom
