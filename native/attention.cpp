// Kernels of attention for one token, and for one token of each of several sequences.
//
// The projections round where separate linear, norm and rotary operations round; scores and sums
// stay float32.
#include "attention.hpp"

#include "norms.hpp"

namespace {

using namespace greenroom;

constexpr int64_t BLOCK = 64;  // tokens of a partial sum of values

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
    T* out = key < 0     ? (T*)p.queries + number * p.width
             : value < 0 ? (T*)moved(p.keys, key * p.key_step)
                         : (T*)moved(p.values, value * p.value_step);
    store_sums<T>(row, nullptr, out, p.width);
}

INLINE int64_t heads_of(const ProjectCall& p) { return p.query_heads + 2 * p.key_heads; }

// The codes of a head, or of the last one.
INLINE const uint8_t* head_codes(const ProjectCall& p, int64_t number) {
    const Head& head = p.heads[least(number, heads_of(p) - 1)];
    const Matrix& matrix = *head.matrix;
    return row_codes(*matrix.layout, matrix.base, head.first);
}

// Each thread claims one head at a time.
template <class T>
void project_plain(ProjectCall& p) {
    for (int64_t number; (number = claim(p.cursor)) < heads_of(p);) {
        const Head& head = p.heads[number];
        float* row = p.projected + number * p.width;
        const T* w = (const T*)head.matrix->base + head.first * p.hidden;
        multiply_plain_rows(w, p.width, p.hidden, (const T*)p.x, row);
        finish_head<T>(p, number, row);
    }
}

template <class T>
void project_encoded(ProjectCall& p) {
    float* place = (float*)thread_scratch(p);
    uint8_t* scratch = (uint8_t*)(place + 2 * p.hidden);
    int64_t planes = 0;
    for (int64_t i = 0; i < heads_of(p); i++) planes |= p.heads[i].matrix->format->planes;
    Input input = input_row((const T*)p.x, p.hidden, planes, place);
    for (Units units(p.cursor, heads_of(p)); units.left(); units.advance()) {
        const int64_t number = units.number;
        const Head& head = p.heads[number];
        float* row = p.projected + number * p.width;
        const uint8_t* next = head_codes(p, units.next());
        multiply_row(*head.matrix, p.hidden, head.first, p.width, input, row, scratch, next);
        finish_head<T>(p, number, row);
    }
}

// For several tokens each weight is read, and converted to float32, once.
template <class T>
void project_rows_plain(TokensCall& p) {
    const ProjectCall& one = call_of<ProjectCall>(p, 0);
    const int64_t K = one.hidden, width = one.width, step = heads_of(one) * width;
    for (int64_t number; (number = claim(p.cursor)) < heads_of(one);) {
        const Head& head = one.heads[number];
        const T* w = (const T*)head.matrix->base + head.first * K;
        RowsOf rows{p.wide, K, nullptr, p.out, step, nullptr};
        dots(w, K * sizeof(T), K, width, K, false, rows, number * width, 0, p.tokens);
        for (int64_t token = 0; token < p.tokens; token++)
            finish_head<T>(
                call_of<ProjectCall>(p, token), number, p.out + token * step + number * width);
    }
}

template <class T>
void project_rows_encoded(TokensCall& p) {
    ProjectCall& one = call_of<ProjectCall>(p, 0);
    const int64_t K = one.hidden, width = one.width, step = heads_of(one) * width;
    float* place = (float*)thread_scratch(one);
    uint8_t* scratch = (uint8_t*)(place + K);
    for (int64_t number; (number = claim(p.cursor)) < heads_of(one);) {
        const Head& head = one.heads[number];
        const Matrix& matrix = *head.matrix;
        const int64_t planes = matrix.format->planes;
        const uint8_t* next = head_codes(one, current(p.cursor));
        for (int64_t token = 0; token < p.tokens; token++) {
            float* row = p.out + token * step + number * width;
            const float* x = p.wide + token * K;
            if (planes) pack_row(planes, x, K, place);
            multiply_row(matrix, K, head.first, width, {x, place}, row, scratch, next);
            finish_head<T>(call_of<ProjectCall>(p, token), number, row);
        }
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
    widen((const T*)p.queries + first * width, group * width, x);
    const T* keys = (const T*)moved(p.keys, number * p.key_step);
    const T* values = (const T*)moved(p.values, number * p.value_step);
    int64_t tiled = context - context % COLUMNS;
    for (int64_t t = 0; t < tiled; t += COLUMNS)
        for (int64_t j = 0; j < group; j++)
            dot_row<COLUMNS>(moved(keys, t * p.key_row), p.key_row, width, width, false,
                             x + j * width, scores + j * context + t);
    for (int64_t t = tiled; t < context; t++)
        for (int64_t j = 0; j < group; j++)
            dot_row<1>(moved(keys, t * p.key_row), p.key_row, width, width, false, x + j * width,
                       scores + j * context + t);
    for (int64_t j = 0; j < group; j++) {  // the sums overwrite the queries
        float* row = scores + j * context;
        x[j] = exponentials(row, context, p.scale, row);
    }
    for (int64_t j = 0; j < group; j++)
        panels(values, p.value_row, context, width, BLOCK, false, scores + j * context,
               out + j * width, cells);
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
void attend_plain(AttendCall& p) {
    const int64_t K = p.key_heads * p.group * p.width;
    for (;;) {
        const int64_t unit = claim(p.cursor), n0 = (unit - p.key_heads) * UNIT;
        if (n0 < 0) {
            attend_key_head<T>(p, unit);
            count(p.done);
            continue;
        }
        if (n0 >= p.outputs) return;
        await(p.done, p.key_heads);
        alignas(64) float sums[UNIT];
        const int64_t n = least(UNIT, p.outputs - n0);
        const T* w = (const T*)p.matrix->base + n0 * K;
        multiply_plain_rows(w, n, K, (const T*)p.mixed, sums);
        store_sums(sums, bias_from<T>(p, n0), (T*)p.out + n0, n);
    }
}

template <class T>
void attend_encoded(AttendCall& p) {
    const int64_t K = p.key_heads * p.group * p.width;
    const Matrix& matrix = *p.matrix;
    float* place = nullptr;
    Input input{};
    Units units(p.cursor, p.key_heads + (p.outputs + UNIT - 1) / UNIT);
    for (; units.left(); units.advance()) {
        const int64_t n0 = (units.number - p.key_heads) * UNIT;
        if (n0 < 0) {
            attend_key_head<T>(p, units.number);
            count(p.done);
            continue;
        }
        await(p.done, p.key_heads);
        if (!place) {
            place = (float*)thread_scratch(p);
            input = input_row((const T*)p.mixed, K, matrix.format->planes, place);
        }
        alignas(64) float sums[UNIT];
        const int64_t n = least(UNIT, p.outputs - n0), after = units.next() - p.key_heads;
        const uint8_t* next = row_codes(*matrix.layout, matrix.base, after * UNIT);
        multiply_row(matrix, K, n0, n, input, sums, (uint8_t*)(place + 2 * K), next);
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

// Each token has its own context. For all tokens each weight is read, and converted, once.
template <class T>
void attend_rows_plain(TokensCall& p) {
    const AttendCall& one = call_of<AttendCall>(p, 0);
    const int64_t K = one.key_heads * one.group * one.width, units = p.tokens * one.key_heads;
    for (;;) {
        const int64_t unit = claim(p.cursor), n0 = (unit - units) * UNIT;
        if (n0 < 0) {
            attend_unit<T>(p, unit, K);
            continue;
        }
        if (n0 >= one.outputs) return;
        await(p.done, units);
        const int64_t n = least(UNIT, one.outputs - n0);
        RowsOf rows{p.wide, K, nullptr, p.out, one.outputs, nullptr};
        const T* w = (const T*)one.matrix->base + n0 * K;
        dots(w, K * sizeof(T), K, n, K, false, rows, n0, 0, p.tokens);
        store_outputs<T>(p, n0, n);
    }
}

template <class T>
void attend_rows_encoded(TokensCall& p) {
    AttendCall& one = call_of<AttendCall>(p, 0);
    const int64_t K = one.key_heads * one.group * one.width, units = p.tokens * one.key_heads;
    const Matrix& matrix = *one.matrix;
    const int64_t planes = matrix.format->planes;
    float* place = nullptr;  // a row of K float32, packed
    for (;;) {
        const int64_t unit = claim(p.cursor), n0 = (unit - units) * UNIT;
        if (n0 < 0) {
            attend_unit<T>(p, unit, K);
            continue;
        }
        if (n0 >= one.outputs) return;
        await(p.done, units);
        if (!place) place = (float*)thread_scratch(one);
        const int64_t n = least(UNIT, one.outputs - n0), claimed = current(p.cursor) - units;
        const uint8_t* next = row_codes(*matrix.layout, matrix.base, claimed * UNIT);
        for (int64_t token = 0; token < p.tokens; token++) {
            const float* x = p.wide + token * K;
            if (planes) pack_row(planes, x, K, place);
            multiply_row(matrix, K, n0, n, {x, place}, p.out + token * one.outputs + n0,
                         (uint8_t*)(place + K), next);
        }
        store_outputs<T>(p, n0, n);
    }
}

template <class T>
void project(ProjectCall& p) {
    p.heads->matrix->format ? project_encoded<T>(p) : project_plain<T>(p);
}

template <class T>
void project_rows(TokensCall& p) {
    bool encoded = call_of<ProjectCall>(p, 0).heads->matrix->format;
    encoded ? project_rows_encoded<T>(p) : project_rows_plain<T>(p);
}

template <class T>
void attend(AttendCall& p) {
    p.matrix->format ? attend_encoded<T>(p) : attend_plain<T>(p);
}

template <class T>
void attend_rows(TokensCall& p) {
    bool encoded = call_of<AttendCall>(p, 0).matrix->format;
    encoded ? attend_rows_encoded<T>(p) : attend_rows_plain<T>(p);
}

}  // namespace

KERNELS(project, ProjectCall, project)
KERNELS(project_rows, TokensCall, project_rows)
KERNELS(attend, AttendCall, attend)
KERNELS(attend_rows, TokensCall, attend_rows)
