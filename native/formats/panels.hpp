// Products of input rows, packed as integers, with 16 rows of an encoded matrix at a time.
//
// Lane i of every vector belongs to row i of a panel of 16 rows. A sum is taken group after group
// of 32 inputs: of integers within a group, in float32 from group to group. So its bits do not
// depend on the panel, on other input rows, or on where a row was cut.
//
// A format that multiplies integers is a class with
//     span                      inputs that `groups` takes
//     largest                   code
//     groups(place, at, sums)   calls sums.add for each 32 inputs of a span, or sums.add_halves
//                               if 16 inputs share a scale
//
// `place` depends on how the format's matrices lie:
//
//     in the order of panels (panel.hpp)   a PanelBlock. The class has `head`, the bytes of a
//                                          block's head, and a span is a block
//     in rows                              a Panel. The class has `span_bytes`, the bytes of a
//                                          row's codes that `groups` takes
#pragma once

#include "inputs.hpp"
#include "panel.hpp"

namespace greenroom {

// Does a format read the order of panels?
template <class F>
constexpr bool ORDERED = requires { F::head; };

// 16 rows of an encoded matrix: addresses of the first row, and bytes from row to row. A step of 0
// makes all lanes the same row. In the order of panels the codes are those of a panel.
struct Panel {
    const uint8_t* codes;
    int64_t step;
    const uint8_t* scales;  // where they are a tensor of their own
    int64_t scale_step;
    const uint8_t* zeros;  // a second such tensor
};

// The sums of a panel's products with T input rows, [T, 16].
template <int PLANES, int LARGEST, int T>
struct Sums {
    const PackedGroup<PLANES>* x[T];
    Floats total[T];
    const uint8_t* ahead;  // codes that are read next
    int64_t group_bytes;   // of a panel's codes of one group
    bool near;             // do they fit into the first cache, with the present ones?

    INLINE void fetch(int64_t group) const {
        const uint8_t* place = ahead + group * group_bytes;
        for (int64_t at = 0; at < group_bytes; at += 64)
            near ? prefetch(place + at) : prefetch_far(place + at);
    }

    // Multiply the quads from number FIRST to LAST - 1 with those of a group of inputs.
    template <int FIRST, int LAST>
    INLINE static Floats dot(const Quads& codes, const PackedGroup<PLANES>& inputs) {
        Ints sum{};
        each<PLANES>([&](auto plane) INLINE_LAMBDA {
            if constexpr (plane == 1) sum = sum << 7;
            each<LAST - FIRST>([&](auto i) INLINE_LAMBDA {
                constexpr int q = FIRST + i;
                int32_t quad = read<int32_t>(inputs.bytes[plane] + 4 * q);
                sum = dot_bytes<LARGEST>(sum, codes.part[q], as<int8_t>(all<int32_t>(quad)));
            });
        });
        return to_floats(sum);
    }

    // Add a group of weights: scale * code + minimum.
    INLINE void add(int64_t group, const Quads& codes, const Floats& scale, const Floats& minimum) {
        fetch(group);
        each<T>([&](auto t) INLINE_LAMBDA {
            const auto& inputs = x[t][group];
            total[t] = fma(dot<0, 8>(codes, inputs), scale * all(inputs.scale), total[t]);
            total[t] = fma(minimum, all(inputs.sums[0] + inputs.sums[1]), total[t]);
        });
    }

    // The same, if each 16 weights have a scale and a minimum.
    INLINE void add_halves(int64_t group, const Quads& codes, const Floats (&scales)[2],
                           const Floats (&minima)[2]) {
        fetch(group);
        each<T>([&](auto t) INLINE_LAMBDA {
            const auto& inputs = x[t][group];
            each<2>([&](auto half) INLINE_LAMBDA {
                Floats product = dot<4 * half, 4 * half + 4>(codes, inputs);
                total[t] = fma(product, scales[half] * all(inputs.scale), total[t]);
                total[t] = fma(minima[half], all(inputs.sums[half]), total[t]);
            });
        });
    }
};

// Multiply a panel with T input rows. Of the 16 sums of each, those from lane `skip` on are written
// to out, or added, `count` of them.
template <class F, int PLANES, int T>
[[gnu::noinline]] void multiply_panel(
    const Panel& panel, const RowsCall& call, const float* const* x, float* const* out,
    int64_t first, int skip, int count, const uint8_t* ahead) {
    Sums<PLANES, F::largest, T> sums;
    const bool whole = count == LANES;
    each<T>([&](auto t) INLINE_LAMBDA {
        sums.x[t] = (const PackedGroup<PLANES>*)x[t];
        sums.total[t] = Floats{};
        if (!call.carry) return;
        float few[LANES] = {};
        if (!whole) std::memcpy(few + skip, out[t] + first + skip, 4 * count);
        sums.total[t] = load<float>(whole ? out[t] + first : few);
    });
    if constexpr (ORDERED<F>) {
        // What lies 4 KiB ahead, mostly of this panel and the next, is read soon.
        constexpr int block = LANES * F::block_bytes;
        sums.ahead = panel.codes + 4096;
        sums.group_bytes = block * GROUP / F::span;
        sums.near = true;
        const uint8_t* codes = panel.codes;
        for (int64_t at = 0; at < call.inputs; at += F::span, codes += block)
            F::groups(PanelBlock<F>{codes, panel.scales}, at, sums);
    } else {
        sums.ahead = ahead;
        sums.group_bytes = LANES * GROUP * F::span_bytes / F::span;
        sums.near = call.inputs / GROUP * sums.group_bytes <= 12 << 10;
        for (int64_t at = 0; at < call.inputs; at += F::span) F::groups(panel, at, sums);
    }
    each<T>([&](auto t) INLINE_LAMBDA {
        if (whole) return store(out[t] + first, sums.total[t]);
        float few[LANES];
        store(few, sums.total[t]);
        std::memcpy(out[t] + first + skip, few + skip, 4 * count);
    });
}

// Multiply a panel with all input rows of a call: TOKENS, 4 or one at a time. A place beyond the
// last row has the last row again.
template <class F, int PLANES>
INLINE void multiply_tokens(
    const Panel& panel, const RowsCall& call, int64_t first, int skip, int count,
    const uint8_t* ahead) {
    // More take more registers than there are, or longer to compile than they save.
    constexpr int most = PLANES == 1 && PARTS == 1 ? TOKENS : 4;
    for (int64_t t = 0; t < call.tokens; t += most) {
        const int64_t left = call.tokens - t;
        const float* x[most];
        float* out[most];
        for (int64_t i = 0; i < most; i++) {
            int64_t token = t + (i < left ? i : left - 1);
            x[i] = call.x[token];
            out[i] = call.out[token];
        }
        auto multiply = left == 1   ? multiply_panel<F, PLANES, 1>
                        : left <= 4 ? multiply_panel<F, PLANES, 4>
                                    : multiply_panel<F, PLANES, most>;
        multiply(panel, call, x, out, first, skip, count, ahead);
    }
}

// The panel of rows from number `first` of a call on. If they do not share scales as a panel must,
// or if `single`, all lanes are the first row.
INLINE Panel panel_of(const RowsCall& call, int64_t first, bool single) {
    const Layout& layout = *call.layout;
    const int64_t row = call.first + first;
    return {
        call.slot + layout.codes + row * layout.row_bytes,
        single ? 0 : layout.row_bytes,
        call.slot + layout.scales + shared_row(row, layout.rows_per_scale) * layout.scale_row_bytes,
        single || layout.rows_per_scale != 1 ? 0 : layout.scale_row_bytes,
        call.slot + layout.zeros + shared_row(row, layout.rows_per_zero) * layout.zero_row_bytes,
    };
}

// Do 16 rows from number `first` of a call on have rows of scales, or zeros, as a panel can?
INLINE bool forms_panel(const RowsCall& call, int64_t first) {
    auto fits = [&](int64_t share) INLINE_LAMBDA {
        const int64_t row = call.first + first;
        return share == 1 || quotient(row, share) == quotient(row + LANES - 1, share);
    };
    const Layout& layout = *call.layout;
    return fits(layout.rows_per_scale) && fits(layout.rows_per_zero);
}

// Multiply rows of a matrix in the order of panels. Rows that are not in this order are arranged on
// the way, 16 at a time.
template <class F, int PLANES>
void multiply_ordered(RowsCall* call) {
    const Layout& layout = *call->layout;
    const int64_t nbytes = (call->inputs + F::span - 1) / F::span * F::block_bytes;
    for (int64_t n = 0, count; n < call->rows; n += count) {
        const int64_t row = call->first + n, share = layout.rows_per_scale;
        const bool ordered = row < layout.panel_rows;
        const int skip = ordered ? row % LANES : 0;
        count = LANES - skip < call->rows - n ? LANES - skip : call->rows - n;
        if (share > 1) {  // rows with other scales of the matrix are another panel
            const int64_t left = share - (row - quotient(row, share) * share);
            count = count < left ? count : left;
        }
        const uint8_t* codes = call->slot + layout.codes + (row - skip) * layout.row_bytes;
        if (!ordered) {
            arrange_panel<F>(codes, layout.row_bytes, nbytes, count, call->scratch);
            codes = call->scratch;
        }
        const uint8_t* scales =
            call->slot + layout.scales + shared_row(row, share) * layout.scale_row_bytes;
        multiply_tokens<F, PLANES>(
            {codes, 0, scales, 0, nullptr}, *call, n - skip, skip, count, nullptr);
    }
}

template <class F, int PLANES>
void multiply_panels(RowsCall* call) {
    const Layout& layout = *call->layout;
    const int64_t rows = call->rows, panel_bytes = LANES * layout.row_bytes;
    auto multiply_one = [&](int64_t first, int skip, int count, bool single, const uint8_t* ahead) {
        Panel panel = panel_of(*call, first, single);
        multiply_tokens<F, PLANES>(panel, *call, first, skip, count, ahead);
    };
    auto multiply = [&](int64_t first, int skip, int count, bool single, const uint8_t* ahead) {
        if (single || forms_panel(*call, first))
            return multiply_one(first, skip, count, single, ahead);
        for (int64_t n = first + skip; n < first + skip + count; n++)
            multiply_one(n, 0, 1, true, ahead);
    };
    int64_t n = 0;
    const uint8_t* start = call->slot + layout.codes + call->first * layout.row_bytes;
    for (int64_t at = 0; at < panel_bytes && rows >= LANES; at += 64) prefetch(start + at);
    for (; n + LANES <= rows; n += LANES) {
        const uint8_t* codes = call->slot + layout.codes + (call->first + n) * layout.row_bytes;
        bool more = n + 2 * LANES <= rows;
        multiply(n, 0, LANES, false, more ? codes + panel_bytes : call->next);
    }
    if (n == rows) return;
    if (n > 0) return multiply(rows - LANES, LANES - (rows - n), rows - n, false, call->next);
    for (; n < rows; n++) multiply(n, 0, 1, true, call->next);
}

}  // namespace greenroom
