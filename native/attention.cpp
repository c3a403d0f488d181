// Kernels of attention for one token, and for one token of each of several sequences.
//
// The projections round where separate linear, norm and rotary operations round; scores and sums
// stay float32.
#include "attention.hpp"

#include <optional>

#include "norms.hpp"

namespace {

using namespace greenroom;

constexpr int64_t AHEAD = 5120;  // bytes from a row to what is prefetched before it is decoded

INLINE int64_t planes_of(const Matrix& matrix) { return matrix.format ? matrix.format->planes : 0; }

// Does a matrix of a model of type T take inputs in float32, or packed?
template <class T>
INLINE bool takes_floats(const Matrix& matrix) {
    return matrix.format && !has_pairs<T>(matrix);
}

// One token's input of a product with matrices of any kind.
template <class T>
class OneInput {
    const T* x;
    int64_t K;
    Input wide{};
    uint8_t* scratch;

  public:
    // scratch: a product's, and before it 2 * K float32 if a matrix takes floats
    OneInput(const T* x, int64_t K, bool widens, int64_t planes, uint8_t* memory)
        : x(x), K(K), scratch(memory) {
        if (!widens) return;
        wide = input_row(x, K, planes, (float*)memory);
        scratch += 8 * K;
    }
    // Multiply with n rows of a matrix, from number `first` on.
    INLINE void multiply(
        const Matrix& matrix, int64_t first, int64_t n, float* out, const uint8_t* next) const {
        if constexpr (std::is_same_v<T, BFloat16>)
            if (has_pairs<T>(matrix))
                return multiply_bfloat16(matrix, K, first, n, 1, &x, &out, scratch, next);
        if (matrix.format) multiply_row(matrix, K, first, n, wide, out, scratch, next);
        else multiply_plain_rows((const T*)matrix.base + first * K, n, K, x, out);
    }
};

// Multiply all tokens' inputs with n rows of a matrix, from number `first` on: out[token * step].
//
// row: a token's input, of the model's type; the call has the same in float32. scratch: a
// product's, and before it K float32 if the matrix takes floats
template <class T, class RowOf>
INLINE void multiply_tokens(
    const TokensCall& p, const Matrix& matrix, int64_t K, int64_t first, int64_t n, RowOf row,
    float* out, int64_t step, uint8_t* scratch, const uint8_t* next) {
    if constexpr (std::is_same_v<T, BFloat16>)
        if (has_pairs<T>(matrix)) {
            for (int64_t start = 0; start < p.tokens; start += PAIR_INPUTS) {
                const T* x[PAIR_INPUTS];
                float* outs[PAIR_INPUTS];
                const int64_t tokens = least(PAIR_INPUTS, p.tokens - start);
                for (int64_t t = 0; t < tokens; t++) {
                    x[t] = row(start + t);
                    outs[t] = out + (start + t) * step;
                }
                multiply_bfloat16(matrix, K, first, n, tokens, x, outs, scratch, next);
            }
            return;
        }
    if (!matrix.format) {
        RowsOf rows{p.wide, K, nullptr, out, step, nullptr};
        const T* w = (const T*)matrix.base + first * K;
        return dots(w, K * sizeof(T), K, n, K, false, rows, 0, 0, p.tokens);
    }
    for (int64_t token = 0; token < p.tokens; token++) {
        const float* x = p.wide + token * K;
        if (planes_of(matrix)) pack_row(planes_of(matrix), x, K, scratch);
        multiply_row(matrix, K, first, n, {x, (const float*)scratch}, out + token * step,
                     scratch + 4 * K, next);
    }
}

// Apply rotary position embedding to a row: element i forms a pair with element width / 2 + i.
template <class T>
INLINE void rotate(float* row, const T* cos, const T* sin, int64_t width) {
    const int64_t half = width / 2;
    over_row(half, [&](int64_t at, int64_t left) INLINE_LAMBDA {
        float *low = row, *high = row + half;
        Floats a = get(low, at, left), b = get(high, at, left);
        Floats first = rounded<T>(a * get(cos, at, left)) - rounded<T>(b * get(sin, at, left));
        Floats second = rounded<T>(b * get(cos + half, at, left)) +
                        rounded<T>(a * get(sin + half, at, left));
        put(low, at, left, rounded<T>(first));
        put(high, at, left, rounded<T>(second));
    });
}

// Apply bias, norm and rotation to a head's projection, and store it.
template <class T>
[[gnu::noinline]] void finish_head(const ProjectCall& p, int64_t number, float* row) {
    const Head& head = p.heads[number];
    const T* bias = (const T*)head.bias;
    over_row(p.width, [&](int64_t at, int64_t left) INLINE_LAMBDA {
        Floats value = get(row, at, left);
        if (bias) value = value + get(bias, at, left);
        put(row, at, left, rounded<T>(value));
    });
    if (head.norm) normalise(row, p.width, (const T*)head.norm, p.eps, p.style, row);
    if (head.rotated) rotate(row, (const T*)p.cos, (const T*)p.sin, p.rotary);
    const int64_t key = number - p.query_heads, value = key - p.key_heads;
    void* out = key < 0     ? (T*)p.queries + number * p.width
                : value < 0 ? moved(p.keys, key * p.key_step)
                            : moved(p.values, value * p.value_step);
    if (key < 0 || p.format == AS_COMPUTED) return store_sums<T>(row, nullptr, (T*)out, p.width);
    with_format(p.format, [&](auto format) INLINE_LAMBDA {
        pack_row_of<format>(row, p.width, (uint8_t*)out);
    });
}

INLINE int64_t heads_of(const ProjectCall& p) { return p.query_heads + 2 * p.key_heads; }

// The codes or weights of a head, or of the last one.
template <class T>
INLINE const uint8_t* head_place(const ProjectCall& p, int64_t number) {
    const Head& head = p.heads[least(number, heads_of(p) - 1)];
    return row_place<T>(*head.matrix, p.hidden, head.first);
}

// Each thread claims one head at a time.
template <class T>
void project(ProjectCall& p) {
    bool widens = false;  // does a matrix take float32 inputs?
    int64_t planes = 0;
    for (int64_t i = 0; i < heads_of(p); i++) {
        const Matrix& matrix = *p.heads[i].matrix;
        widens |= takes_floats<T>(matrix);
        planes |= planes_of(matrix);
    }
    uint8_t* scratch = thread_scratch(p);
    OneInput<T> input((const T*)p.x, p.hidden, widens, planes, scratch);
    for (Units units(p.cursor, heads_of(p)); units.left(); units.advance()) {
        const int64_t number = units.number;
        const Head& head = p.heads[number];
        float* row = p.projected + number * p.width;
        input.multiply(*head.matrix, head.first, p.width, row, head_place<T>(p, units.next()));
        finish_head<T>(p, number, row);
    }
}

// For several tokens each plain weight is read once.
template <class T>
void project_rows(TokensCall& p) {
    ProjectCall& one = call_of<ProjectCall>(p, 0);
    const int64_t width = one.width, step = heads_of(one) * width;
    uint8_t* scratch = thread_scratch(one);
    auto row = [&](int64_t token) INLINE_LAMBDA {
        return (const T*)call_of<ProjectCall>(p, token).x;
    };
    for (int64_t number; (number = claim(p.cursor)) < heads_of(one);) {
        const Head& head = one.heads[number];
        float* out = p.out + number * width;
        const uint8_t* next = head_place<T>(one, current(p.cursor));
        multiply_tokens<T>(
            p, *head.matrix, one.hidden, head.first, width, row, out, step, scratch, next);
        for (int64_t token = 0; token < p.tokens; token++)
            finish_head<T>(call_of<ProjectCall>(p, token), number, out + token * step);
    }
}

// Decode a row of keys or values to float32, and prefetch one that follows.
template <int64_t FORMAT, class T>
INLINE void decode_row(const void* row, int64_t width, float* out) {
    const int64_t nbytes = FORMAT == AS_COMPUTED ? width * sizeof(T) : row_bytes<FORMAT>(width);
    for (int64_t at = 0; at < nbytes; at += 64) prefetch(moved(row, AHEAD + at));
    if constexpr (FORMAT == AS_COMPUTED) widen((const T*)row, width, out);
    else expand_row<FORMAT>((const uint8_t*)row, width, out);
}

// Call f(rows, bytes from row to row, first token, tokens) for all tokens of a context, in blocks
// of CONTEXT_BLOCK. Rows are decoded to float32 in `memory`, unless they are of the model's type
// and few queries read them.
template <class T, class F>
INLINE void over_tokens(
    const AttendCall& p, const void* rows, int64_t step, float* memory, F f) {
    for (int64_t first = 0; first < p.context; first += CONTEXT_BLOCK) {
        const int64_t n = least(CONTEXT_BLOCK, p.context - first);
        const void* place = moved(rows, first * step);
        if (p.format == AS_COMPUTED && p.group <= ROWS) {
            f((const T*)place, step, first, n);
            continue;
        }
        auto decode = [&](auto format) INLINE_LAMBDA {
            for (int64_t t = 0; t < n; t++)
                decode_row<format, T>(moved(place, t * step), p.width, memory + t * p.width);
        };
        if (p.format == AS_COMPUTED) decode(std::integral_constant<int64_t, AS_COMPUTED>{});
        else with_format(p.format, decode);
        f((const float*)memory, 4 * p.width, first, n);
    }
}

// Compute the attention of the query heads that share one key head.
template <class T>
[[gnu::noinline]] void attend_key_head(const AttendCall& p, int64_t number) {
    const int64_t context = p.context, width = p.width, group = p.group;
    const int64_t heads = p.key_heads * group, first = number * group;
    float* scores = p.scores + first * context;
    float* x = p.scores + heads * context + first * width;
    float* out = x + heads * width;
    float* cells = p.scores + heads * (context + 2 * width) + number * width;
    float* memory = p.scores + heads * (context + 2 * width) + p.key_heads * width +
                    number * CONTEXT_BLOCK * width;
    widen((const T*)p.queries + first * width, group * width, x);
    over_tokens<T>(
        p, moved(p.keys, number * p.key_step), p.key_row, memory,
        [&](const auto* keys, int64_t row, int64_t start, int64_t n) INLINE_LAMBDA {
            RowsOf rows{x, width, nullptr, scores, context, nullptr};
            dots(keys, row, width, n, width, false, rows, start, 0, group);
        });
    for (int64_t j = 0; j < group; j++) {  // the sums overwrite the queries
        float* row = scores + j * context;
        x[j] = exponentials(row, context, p.scale, row);
    }
    over_tokens<T>(
        p, moved(p.values, number * p.value_step), p.value_row, memory,
        [&](const auto* values, int64_t row, int64_t start, int64_t n) INLINE_LAMBDA {
            RowsOf rows{scores + start, context, nullptr, out, width, nullptr};
            axpys(values, row, n, width, CONTEXT_BLOCK, start > 0, rows, 0, 0, group, cells);
        });
    for (int64_t j = 0; j < group; j++) {
        T* mixed = (T*)p.mixed + (first + j) * width;
        const float* sums = out + j * width;
        Floats total = all(x[j]);
        over_row(width, [&](int64_t at, int64_t left) INLINE_LAMBDA {
            put(mixed, at, left, get(sums, at, left) / total);
        });
    }
}

// The bias of outputs from number `first` on, or null.
template <class T>
INLINE const T* bias_from(const AttendCall& p, int64_t first) {
    return p.bias ? (const T*)p.bias + first : nullptr;
}

// Each thread claims one key head at a time, with the query heads that share it; after all heads,
// UNIT outputs of the projection.
template <class T>
void attend(AttendCall& p) {
    const int64_t K = p.key_heads * p.group * p.width;
    const Matrix& matrix = *p.matrix;
    uint8_t* scratch = thread_scratch(p);
    std::optional<OneInput<T>> input;  // when all heads are computed
    Units units(p.cursor, p.key_heads + (p.outputs + UNIT - 1) / UNIT);
    for (; units.left(); units.advance()) {
        const int64_t n0 = (units.number - p.key_heads) * UNIT;
        if (n0 < 0) {
            attend_key_head<T>(p, units.number);
            count(p.done);
            continue;
        }
        await(p.done, p.key_heads);
        if (!input)
            input.emplace(
                (const T*)p.mixed, K, takes_floats<T>(matrix), planes_of(matrix), scratch);
        alignas(64) float sums[UNIT];
        const int64_t n = least(UNIT, p.outputs - n0), after = units.next() - p.key_heads;
        input->multiply(matrix, n0, n, sums, row_place<T>(matrix, K, after * UNIT));
        store_sums(sums, bias_from<T>(p, n0), (T*)p.out + n0, n);
    }
}

// Compute one key head of one token, and its result in float32.
template <class T>
INLINE void attend_unit(TokensCall& p, int64_t unit, int64_t K) {
    const int64_t key_heads = call_of<AttendCall>(p, 0).key_heads, token = unit / key_heads;
    const AttendCall& one = call_of<AttendCall>(p, token);
    const int64_t head = unit % key_heads, n = one.group * one.width;
    attend_key_head<T>(one, head);
    widen((const T*)one.mixed + head * n, n, p.wide + token * K + head * n);
    count(p.done);
}

// Store all tokens' outputs from number n0 on.
template <class T>
INLINE void store_outputs(const TokensCall& p, int64_t n0, int64_t n) {
    for (int64_t token = 0; token < p.tokens; token++) {
        const AttendCall& one = call_of<AttendCall>(p, token);
        store_sums(p.out + token * one.outputs + n0, bias_from<T>(call_of<AttendCall>(p, 0), n0),
                   (T*)one.out + n0, n);
    }
}

// Each token has its own context. For all tokens each plain weight is read once.
template <class T>
void attend_rows(TokensCall& p) {
    AttendCall& one = call_of<AttendCall>(p, 0);
    const int64_t K = one.key_heads * one.group * one.width, units = p.tokens * one.key_heads;
    const Matrix& matrix = *one.matrix;
    uint8_t* scratch = thread_scratch(one);
    auto row = [&](int64_t token) INLINE_LAMBDA {
        return (const T*)call_of<AttendCall>(p, token).mixed;
    };
    for (;;) {
        const int64_t unit = claim(p.cursor), n0 = (unit - units) * UNIT;
        if (n0 < 0) {
            attend_unit<T>(p, unit, K);
            continue;
        }
        if (n0 >= one.outputs) return;
        await(p.done, units);
        const int64_t n = least(UNIT, one.outputs - n0), claimed = current(p.cursor) - units;
        const uint8_t* next = row_place<T>(matrix, K, claimed * UNIT);
        multiply_tokens<T>(p, matrix, K, n0, n, row, p.out + n0, one.outputs, scratch, next);
        store_outputs<T>(p, n0, n);
    }
}

}  // namespace

KERNELS(project, ProjectCall, project)
KERNELS(project_rows, TokensCall, project_rows)
KERNELS(attend, AttendCall, attend)
KERNELS(attend_rows, TokensCall, attend_rows)
