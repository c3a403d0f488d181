// Kernels that compute a group of experts.
//
// Every thread claims ranges of channels and leaves when no range is left. So a thread that loses
// its core for a while delays one range, not the whole computation.
#include "experts.hpp"

namespace {

using namespace greenroom;

constexpr int64_t BLOCK = 64;        // channels between the projections of one partial sum
constexpr int64_t MANY = 8;          // from so many rows on an expert's weights are widened once
constexpr int64_t WIDENED_ROWS = 16;  // at a time

INLINE int64_t up_rounded(int64_t n, int64_t step) { return (n + step - 1) / step; }

struct Range {
    int64_t start, stop;
};

// The entries of a routing that belong to one of its experts.
INLINE Range entries_of(const Routing& routing, int64_t expert) {
    int64_t low = 0, high = routing.count - 1;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (routing.experts[middle] < expert) low = middle + 1;
        else high = middle;
    }
    return {routing.starts[low], routing.starts[low + 1]};
}

// A product of input rows `entries` with `count` rows (or columns) of an expert's matrix, from
// number `first` on. The matrix has `inputs` columns and `outputs` rows, or is transposed.
struct Product {
    int64_t inputs, outputs, first, count, block;
    bool carry;
    RowsOf rows;
    Range entries;
};

template <class T>
INLINE bool widens(const Product& p) {
    return p.entries.stop - p.entries.start >= MANY && !std::is_same_v<T, float>;
}

template <class T>
void multiply_plain(const T* matrix, const Product& p, uint8_t* scratch) {
    const int64_t K = p.inputs, start = p.entries.start, stop = p.entries.stop;
    const T* w = matrix + p.first * K;
    if (!widens<T>(p)) {
        int64_t row_bytes = K * sizeof(T);
        dots(w, row_bytes, K, p.count, p.block, p.carry, p.rows, p.first, start, stop);
        return;
    }
    const float* wide = (float*)scratch;
    for (int64_t n = 0; n < p.count; n += WIDENED_ROWS) {
        int64_t count = least(WIDENED_ROWS, p.count - n);
        widen(w + n * K, count * K, (float*)scratch);
        dots(wide, 4 * K, K, count, p.block, p.carry, p.rows, p.first + n, start, stop);
    }
}

// Input rows from entry `start` on, and places of results. Rows of x are taken as they are, or, if
// it is null, converted from float32 numbers that are bfloat16 too, to `memory`.
INLINE void take_inputs(
    const Product& p, int64_t start, int64_t tokens, const BFloat16* x_rows, BFloat16* memory,
    const BFloat16** x, float** out) {
    const int64_t K = p.inputs, step = up_rounded(K, PAIRED) * PAIRED;
    for (int64_t t = 0; t < tokens; t++) {
        x[t] = x_rows ? x_rows + p.rows.x_index[start + t] * K : memory + t * step;
        if (!x_rows) narrow(p.rows.input(start + t), K, memory + t * step);
        out[t] = p.rows.result(start + t) + p.first;
    }
}

// Multiply pairs of bfloat16. Inputs are rows of x, or, if it is null, float32 numbers that are
// bfloat16 too.
INLINE void multiply_bfloat16(
    const BFloat16* matrix, const Product& p, const BFloat16* x_rows, uint8_t* scratch,
    const void* next) {
    const int64_t K = p.inputs;
    for (int64_t j = p.entries.start; j < p.entries.stop; j += PAIR_INPUTS) {
        const BFloat16* x[PAIR_INPUTS];
        float* out[PAIR_INPUTS];
        const int64_t tokens = least(PAIR_INPUTS, p.entries.stop - j);
        take_inputs(p, j, tokens, x_rows, (BFloat16*)aligned(scratch), x, out);
        multiply_pairs({matrix + p.first * K, K, p.count, p.block, p.carry, tokens, x, out, next});
    }
}

// The same for an encoded matrix whose weights are rounded to bfloat16.
INLINE void multiply_rounded(
    const Matrix& matrix, const Product& p, const BFloat16* x_rows, uint8_t* scratch,
    const uint8_t* next) {
    // Decoded weights need room beside them, and more of it in float32.
    const int64_t most = matrix.format->multiply_pairs ? PAIR_INPUTS : PAIR_INPUTS / 2;
    const int64_t K = p.inputs;
    BFloat16* memory = (BFloat16*)aligned(scratch);
    uint8_t* place = scratch + 2 * most * up_rounded(K, PAIRED) * PAIRED + 64;
    for (int64_t j = p.entries.start; j < p.entries.stop; j += most) {
        const BFloat16* x[PAIR_INPUTS];
        float* out[PAIR_INPUTS];
        const int64_t tokens = least(most, p.entries.stop - j);
        take_inputs(p, j, tokens, x_rows, memory, x, out);
        multiply_rounded(
            matrix, p.first, {nullptr, K, p.count, p.block, p.carry, tokens, x, out, next},
            place);
    }
}

// For many rows, strips of the matrix are converted to float32 block by block, once for all rows.
template <class T>
void multiply_transposed(const T* matrix, const Product& p, uint8_t* scratch) {
    constexpr int64_t tile = STRIP * LANES;
    const int64_t K = p.inputs, start = p.entries.start, stop = p.entries.stop;
    const T* w = matrix + p.first;
    float *wide = (float*)scratch, *cells = wide + tile * BLOCK;
    if (!widens<T>(p)) {
        int64_t row_bytes = p.outputs * sizeof(T);
        axpys(w, row_bytes, K, p.count, p.block, p.carry, p.rows, p.first, start, stop, wide);
        return;
    }
    for (int64_t n = 0; n < p.count; n += tile) {
        int64_t count = least(tile, p.count - n);
        for (int64_t k = 0; k < K; k += p.block) {
            int64_t depth = least(p.block, K - k);
            for (int64_t i = 0; i < depth; i++)
                widen(w + n + (k + i) * p.outputs, count, wide + tile * i);
            RowsOf rows = p.rows;
            rows.x += k;
            axpys((const float*)wide, 4 * tile, depth, count, depth, p.carry || k > 0, rows,
                  p.first + n, start, stop, cells);
        }
    }
}

// Input rows of integers are multiplied a few at a time; a result has the same bits for any number
// of rows. Up to `sequential_rows` rows of float32 are multiplied one by one, with weights in
// registers; for more rows, rows of weights are decoded to the scratch memory.
INLINE void multiply_encoded(
    const Matrix& matrix, const Product& p, const float* packed, uint8_t* scratch,
    int64_t sequential_rows, const uint8_t* next) {
    const int64_t start = p.entries.start, stop = p.entries.stop, K = p.inputs;
    const bool integers = matrix.format->planes;
    RowsOf rows = p.rows;
    if (integers) rows.x = packed;
    if (integers || stop - start <= sequential_rows) {
        for (int64_t j = start; j < stop; j += TOKENS) {
            const float* x[TOKENS];
            float* out[TOKENS];
            const int64_t tokens = least(TOKENS, stop - j);
            for (int64_t t = 0; t < tokens; t++) {
                x[t] = rows.input(j + t);
                out[t] = rows.result(j + t) + p.first;
            }
            multiply_rows(
                matrix, K, p.first, p.count, p.block, p.carry, tokens, x, out, scratch, next);
        }
        return;
    }
    for (int64_t n = 0; n < p.count; n += WIDENED_ROWS) {
        int64_t count = least(WIDENED_ROWS, p.count - n);
        const float* w = expanded_rows(matrix, K, p.first + n, count, scratch);
        dots(w, 4 * K, K, count, p.block, p.carry, p.rows, p.first + n, start, stop);
    }
}

// Channels of a unit of up projections, and columns of one of down projections. Its first rows are
// not prefetched, and rows of encoded matrices are short, so their units are larger. A transposed
// matrix is read along its long rows where each expert has one token, and in narrow strips for
// several tokens.
struct Steps {
    int64_t up, down;
};
INLINE Steps steps_of(const ExpertLayer& layer, const Routing& routing) {
    bool several = routing.starts[routing.count] > routing.count;
    if (layer.transposed)
        return several ? Steps{128, 128}
                       : Steps{least(512, up_rounded(layer.inner, 256) * 128),
                               least(1024, up_rounded(layer.hidden, 256) * 128)};
    return layer.up.format && !several ? Steps{64, 128} : Steps{32, 64};
}

// A unit of work: a range of channels of one expert's up or down projection. Its matrix rows are
// one range, or two ranges for gate and up projection, `inner` rows apart.
struct Unit {
    bool up;
    int64_t place;  // of the expert in the group
    Range channels;
    int64_t first, rows, ranges;
};

// One thread's work on a group of experts.
template <class T>
struct Group {
    GroupCall& call;
    const ExpertLayer& layer;
    Steps steps;
    int64_t ups, downs;      // units of one expert's projections
    int64_t up_total, total;  // units of all experts
    const float* x;
    const float* packed;
    uint8_t* scratch;

    explicit Group(GroupCall& c)
        : call(c), layer(*c.layer), steps(steps_of(layer, *c.routing)),
          ups(up_rounded(layer.inner, steps.up)), downs(up_rounded(layer.hidden, steps.down)),
          up_total(c.up ? c.count * ups : 0), total(up_total + (c.down ? c.count * downs : 0)),
          x((const float*)c.x), packed(c.packed),
          scratch(c.scratch + claim(c.threads) * c.scratch_bytes) {
        if (!c.narrow || !c.up || (takes_rows(layer.up) && takes_rows(layer.second))) return;
        // One token: each thread widens, and packs, a copy of its own.
        Input own = input_row((const T*)c.x, layer.hidden, up_planes(), (float*)scratch);
        x = own.plain;
        packed = own.packed;
        scratch += 8 * layer.hidden;
    }

    static int64_t planes_of(const ExpertMatrix& matrix) {
        return matrix.format ? matrix.format->planes : 0;
    }
    int64_t up_planes() const { return planes_of(layer.up) | planes_of(layer.second); }

    // Are products sums of pairs of bfloat16 numbers, in the up and down projection? Activations
    // are such numbers unless the module's own activation has computed them in float32.
    bool has_pairs(bool up, const ExpertMatrix& matrix) const {
        if (!std::is_same_v<T, BFloat16> || layer.transposed) return false;
        if (matrix.format && !matrix.format->bfloat16) return false;
        return up ? call.pairs : layer.activation.code != RAW || layer.rounds;
    }
    // Is x multiplied where it lies?
    bool takes_rows(const ExpertMatrix& matrix) const {
        return call.narrow && has_pairs(true, matrix);
    }

    int64_t projections() const { return layer.width > layer.inner ? 2 : 1; }

    const uint8_t* slot(int64_t place) const {
        return layer.slots + call.slots[place] * layer.slot_bytes;
    }

    INLINE Unit unit(int64_t number) const {
        if (number < up_total) {
            int64_t start = number % ups * steps.up, stop = least(start + steps.up, layer.inner);
            int64_t ranges = layer.interleaved ? 1 : projections();
            int64_t wide = projections() / ranges;
            Range channels{start, stop};
            return {true, number / ups, channels, start * wide, (stop - start) * wide, ranges};
        }
        number -= up_total;
        int64_t start = number % downs * steps.down;
        int64_t stop = least(start + steps.down, layer.hidden);
        return {false, number / downs, {start, stop}, start, stop - start, 1};
    }

    // The codes or rows that this thread reads after those of its present unit.
    INLINE const uint8_t* next_codes(int64_t number) const {
        Unit next = unit(number);
        const ExpertMatrix& matrix = next.up ? layer.up : layer.down;
        if (!matrix.format)
            return slot(next.place) + matrix.offset +
                   next.first * (next.up ? layer.hidden : layer.inner) * sizeof(T);
        const Layout& layout = next.up ? *layer.up.layout : *layer.down.layout;
        return row_codes(layout, slot(next.place), next.first);
    }

    INLINE Product product(const Unit& unit, int64_t expert) const {
        Range entries = entries_of(*call.routing, expert);
        if (unit.up) {
            RowsOf rows{x, layer.hidden, call.routing->tokens, call.mid, layer.width, nullptr};
            int64_t block = layer.transposed ? BLOCK : layer.hidden;
            return {layer.hidden, layer.width, unit.first, unit.rows, block, false, rows, entries};
        }
        RowsOf rows{call.act, layer.inner, nullptr, call.out, layer.hidden, call.routing->rows};
        return {layer.inner, layer.hidden, unit.first,  unit.rows,
                BLOCK,       call.accumulate != 0, rows, entries};
    }

    INLINE void compute(const Unit& unit, int64_t next_unit) {
        const int64_t expert = call.experts[unit.place];
        const uint8_t* base = slot(unit.place);
        Product product = this->product(unit, expert);
        for (int64_t range = 0; range < unit.ranges; range++, product.first += layer.inner) {
            const ExpertMatrix& matrix = !unit.up ? layer.down : range ? layer.second : layer.up;
            const bool last = range == unit.ranges - 1;
            const bool pairs = has_pairs(unit.up, matrix);
            const bool rows = unit.up && takes_rows(matrix);
            const BFloat16* x_rows = rows ? (const BFloat16*)call.x : nullptr;
            if (matrix.format) {
                const Matrix encoded{matrix.format, matrix.layout, base};
                const uint8_t* next =
                    last ? next_codes(next_unit)
                         : row_codes(*layer.second.layout, base, unit.first + layer.inner);
                if (pairs) multiply_rounded(encoded, product, x_rows, scratch, next);
                else
                    multiply_encoded(encoded, product, unit.up ? packed : call.act, scratch,
                                     call.sequential_rows, next);
            } else if (pairs) {
                const BFloat16* weights = (const BFloat16*)(base + matrix.offset);
                const void* next = last ? (const void*)next_codes(next_unit)
                                        : weights + (unit.first + layer.inner) * layer.hidden;
                multiply_bfloat16(weights, product, x_rows, scratch, next);
            } else if (layer.transposed) {
                multiply_transposed((const T*)(base + matrix.offset), product, scratch);
            } else {
                multiply_plain((const T*)(base + matrix.offset), product, scratch);
            }
        }
        if (unit.up) activate_unit(unit, expert, product.entries);
    }

    // Round a part of an expert's up projection, add its bias and apply the activation.
    INLINE void activate_unit(const Unit& unit, int64_t expert, const Range& entries) {
        const int64_t inner = layer.inner, width = layer.width, start = unit.channels.start;
        for (int64_t j = entries.start; j < entries.stop; j++) {
            float* row = call.mid + j * width;
            for (int64_t range = 0; range < unit.ranges; range++) {
                int64_t at = unit.first + range * inner;
                const T* bias = layer.bias ? (const T*)layer.bias + expert * width + at : nullptr;
                round_and_add_bias(row + at, bias, unit.rows, layer.rounds);
            }
            const float* gate = row + unit.first;
            const float* up = gate + (layer.interleaved ? 1 : width - inner);
            float* act = call.act + j * inner + start;
            const int64_t channels = unit.channels.stop - start;
            activate<T>(layer.activation, gate, up, layer.interleaved, act, channels);
            if (int64_t planes = planes_of(layer.down)) pack_row(planes, act, channels, act);
        }
    }
};

template <class T>
void group(GroupCall& call) {
    Group<T> group(call);
    for (Units units(call.cursor, group.total); units.left(); units.advance()) {
        Unit unit = group.unit(units.number);
        if (!unit.up && call.up) await(call.finished[unit.place], group.ups);
        group.compute(unit, units.next());
        if (unit.up) count(call.finished[unit.place]);
    }
}

}  // namespace

// Bytes of a thread's scratch memory for a group of experts: rows of weights that are widened at a
// time, or a block of a strip and a panel's sums. An encoded product needs three more rows. One
// token's x, widened and packed, lies before them.
EXPORT int64_t expert_scratch_bytes(int64_t hidden, int64_t inner) {
    int64_t rows = (WIDENED_ROWS + 3) * (hidden > inner ? hidden : inner);
    int64_t strip = BLOCK * STRIP * LANES;
    // Narrowed inputs take less, also beside four rows of bfloat16, and half of them beside rows of
    // weights that are rounded.
    static_assert(2 * PAIR_INPUTS + 2 * PAIR_ROWS <= 4 * WIDENED_ROWS + 8);
    static_assert(2 * PAIR_INPUTS <= 4 * WIDENED_ROWS);
    static_assert(PAIR_INPUTS + 4 * PAIR_ROWS + 17 <= 4 * WIDENED_ROWS + 12);
    return 4 * ((rows > strip ? rows : strip) + 1024 + 2 * up_rounded(hidden, LANES) * LANES);
}

// Pack rows of float32 inputs as integers. `out` may be x.
EXPORT void pack_rows(PackCall* p) {
    for (int64_t i; (i = claim(p->cursor)) < p->rows;)
        pack_row(p->planes, p->x + i * p->columns, p->columns, p->out + i * p->columns);
}

KERNELS(compute_group, GroupCall, group)
