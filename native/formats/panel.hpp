// The order of panels, in which encoded matrices are read fastest.
//
// A panel is 16 rows of a matrix, in the place of these rows. It has their blocks in turn: block 0
// of each row, then block 1 of each row. Of 16 blocks it has first the heads of all, row after row;
// then word 0 of all, word 1 of all, and so on; then the tails of all. A word has four bytes. A
// format names the bytes of a block's head; its tail is what the words leave. Both have at most
// three bytes, so one load takes the same part of 16 rows, and a panel is read from its first byte
// to its last.
#pragma once

#include "quads.hpp"
#include "row.hpp"

namespace greenroom {

// The parts of a format's blocks.
template <class F>
struct BlockParts {
    static constexpr int bytes = F::block_bytes, head = F::head;
    static constexpr int words = (bytes - head) / 4, tail = (bytes - head) % 4;
    static constexpr int tail_at = bytes - tail;

    // The first byte of a row's head, word or tail, from the start of 16 blocks on.
    static constexpr int64_t head_of(int row) { return row * head; }
    static constexpr int64_t word_of(int row, int word) {
        return LANES * (head + 4 * word) + 4 * row;
    }
    static constexpr int64_t tail_of(int row) { return LANES * tail_at + row * tail; }

    // The place of a byte of a row's block.
    static constexpr int64_t byte_of(int row, int byte) {
        if (byte < head) return head_of(row) + byte;
        if (byte >= tail_at) return tail_of(row) + byte - tail_at;
        return word_of(row, (byte - head) / 4) + (byte - head) % 4;
    }
};

// One block of each of a panel's 16 rows.
template <class F>
struct PanelBlock {
    const uint8_t* address;
    const uint8_t* scales;  // of the matrix, where they are a tensor of their own

    // Parts that begin at byte `offset` of each row's block.
    INLINE const uint8_t* at(int offset) const { return address + LANES * offset; }
    INLINE Words words(int offset) const { return load<uint32_t>(at(offset)); }
    INLINE Floats halves(int offset) const { return load_halves(at(offset)); }
    INLINE Ints bytes(int offset) const { return load_ints<uint8_t>(at(offset)); }
    INLINE FourQuads sixteen(int offset) const {
        FourQuads result;
        each<4>([&](auto q) INLINE_LAMBDA {
            result.part[q] = load<uint8_t>(at(offset) + 4 * LANES * q);
        });
        return result;
    }
    INLINE Quads thirty_two(int offset) const {
        Quads result;
        each<8>([&](auto q) INLINE_LAMBDA {
            result.part[q] = load<uint8_t>(at(offset) + 4 * LANES * q);
        });
        return result;
    }
};

// Write a panel of the first `nbytes` bytes of `count` rows, which are `step` bytes apart; in the
// place of other rows is the last one. The rows after them are prefetched.
template <class F>
[[gnu::noinline]] void arrange_panel(
    const uint8_t* rows, int64_t step, int64_t nbytes, int64_t count, uint8_t* out) {
    using Parts = BlockParts<F>;
    constexpr int fours = Parts::words / 4;
    const uint8_t* row[LANES];
    for (int i = 0; i < LANES; i++) row[i] = rows + (i < count ? i : count - 1) * step;
    const uint8_t* ahead = rows + LANES * step;
    for (int64_t at = 0; at < nbytes; at += Parts::bytes, out += LANES * Parts::bytes) {
        for (int line = 0; line < LANES * Parts::bytes; line += 64) prefetch(ahead + line);
        ahead += LANES * Parts::bytes;
        for (int i = 0; i < LANES; i++) {
            std::memcpy(out + Parts::head_of(i), row[i] + at, Parts::head);
            std::memcpy(out + Parts::tail_of(i), row[i] + at + Parts::tail_at, Parts::tail);
            for (int word = 4 * fours; word < Parts::words; word++)
                std::memcpy(
                    out + Parts::word_of(i, word), row[i] + at + Parts::head + 4 * word, 4);
        }
        for (int four = 0; four < fours; four++) {
            FourQuads quads = transposed([&](int i) INLINE_LAMBDA {
                return row[i] + at + Parts::head + 16 * four;
            });
            each<4>([&](auto q) INLINE_LAMBDA {
                store(out + Parts::word_of(0, 4 * four + q), quads.part[q]);
            });
        }
    }
}

// Write bytes `start` to `stop` - 1 of a row to their places in a panel.
template <class F>
void arrange_bytes(
    const uint8_t* bytes, int64_t start, int64_t stop, int row, uint8_t* panel) {
    using Parts = BlockParts<F>;
    while (start < stop) {
        const int64_t block = start / Parts::bytes, begin = block * Parts::bytes;
        uint8_t* out = panel + LANES * begin;
        if (start > begin || stop - begin < Parts::bytes) {
            const int64_t end = stop - begin < Parts::bytes ? stop - begin : Parts::bytes;
            for (int64_t i = start - begin; i < end; i++) out[Parts::byte_of(row, i)] = *bytes++;
            start = begin + end;
            continue;
        }
        std::memcpy(out + Parts::head_of(row), bytes, Parts::head);
        for (int word = 0; word < Parts::words; word++)
            std::memcpy(out + Parts::word_of(row, word), bytes + Parts::head + 4 * word, 4);
        std::memcpy(out + Parts::tail_of(row), bytes + Parts::tail_at, Parts::tail);
        bytes += Parts::bytes;
        start += Parts::bytes;
    }
}

// Take a row from a panel.
template <class F>
void restore_row(const uint8_t* panel, int row, int64_t row_bytes, uint8_t* out) {
    using Parts = BlockParts<F>;
    for (int64_t at = 0; at < row_bytes; at += Parts::bytes, panel += LANES * Parts::bytes) {
        std::memcpy(out + at, panel + Parts::head_of(row), Parts::head);
        for (int word = 0; word < Parts::words; word++)
            std::memcpy(out + at + Parts::head + 4 * word, panel + Parts::word_of(row, word), 4);
        std::memcpy(out + at + Parts::tail_at, panel + Parts::tail_of(row), Parts::tail);
    }
}

template <class F>
void arrange(OrderCall* call) {
    const int64_t row_bytes = call->row_bytes, panel_bytes = LANES * row_bytes;
    const int64_t end = call->panel_rows * row_bytes;
    for (int64_t at = call->start, next; at < call->stop; at = next) {
        const uint8_t* bytes = call->rows + at - call->start;
        const int64_t in_panel = at % panel_bytes, first = at - in_panel;
        if (at >= end) {
            next = call->stop;
            std::memcpy(call->panels + at, bytes, next - at);
        } else if (in_panel == 0 && call->stop - at >= panel_bytes) {
            next = at + panel_bytes;
            arrange_panel<F>(bytes, row_bytes, row_bytes, LANES, call->panels + at);
        } else {
            const int64_t row = in_panel / row_bytes, start = in_panel % row_bytes;
            const int64_t left = call->stop - at, whole = row_bytes - start;
            next = at + (left < whole ? left : whole);
            arrange_bytes<F>(bytes, start, start + next - at, row, call->panels + first);
        }
    }
}

template <class F>
void restore(OrderCall* call) {
    const int64_t row_bytes = call->row_bytes;
    for (int64_t at = call->start; at < call->stop; at += row_bytes) {
        const int64_t row = at / row_bytes, lane = row % LANES;
        uint8_t* out = call->rows + at - call->start;
        if (row >= call->panel_rows) std::memcpy(out, call->panels + at, row_bytes);
        else restore_row<F>(call->panels + (row - lane) * row_bytes, lane, row_bytes, out);
    }
}

}  // namespace greenroom
