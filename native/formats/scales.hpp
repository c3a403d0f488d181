// Preparation of a row's scales (`prepare` in product.hpp), for formats of several families.
#pragma once

#include "loads.hpp"
#include "row.hpp"

namespace greenroom {

// Write contiguous scales: one for 2^shift inputs, of type E. floats(address) converts 16 of them.
template <class E, class ToFloats>
INLINE void prepare_contiguous(const Row& row, int shift, ToFloats floats) {
    int64_t count = (row.inputs + (1 << shift) - 1) >> shift;
    prepare_in_vectors(count, [&](int64_t at, int64_t left) INLINE_LAMBDA {
        const uint8_t* place = row.scale + at * sizeof(E);
        if (left == LANES) return row.put(at, floats(place));
        E few[LANES] = {};
        for (int i = 0; i < left; i++) few[i] = read<E>(place + i * sizeof(E));
        row.put(at, floats((const uint8_t*)few));
    });
}

// Write scales of type E that several groups of 32 inputs share, one for each of these groups.
template <class E>
INLINE void prepare_repeated(const Row& row, float factor = 1) {
    int64_t groups = row.inputs / 32, share = row.groups_per_scale;
    const uint8_t* place = row.scale;
    for (int64_t start = 0; start < groups; start += share, place += sizeof(E)) {
        Floats scale = all(to_float(read<E>(place)) * factor);
        // The last vector goes beyond the scale's groups, whose memory is written next or unused.
        for (int64_t at = start; at < start + share && at < groups; at += LANES) row.put(at, scale);
    }
}

// Write the scales at the start of blocks of 32 inputs, in BYTES bytes. put(at, words)
// converts the first four bytes of 16 blocks.
template <int BYTES, class Put>
INLINE void prepare_in_blocks(const Row& row, Put put) {
    prepare_in_vectors(row.inputs / 32, [&](int64_t at, int64_t left) INLINE_LAMBDA {
        const uint8_t* place = row.codes + at * BYTES;
        if (left == LANES) return put(at, gather_words(place, BYTES));
        uint32_t few[LANES] = {};
        for (int i = 0; i < left; i++) few[i] = read<uint32_t>(place + i * BYTES);
        put(at, load<uint32_t>(few));
    });
}

// The same for a float16 scale, and for a float16 scale and minimum.
template <int BYTES>
INLINE void prepare_halves_in_blocks(const Row& row) {
    prepare_in_blocks<BYTES>(row, [&](int64_t at, const Words& words) INLINE_LAMBDA {
        row.put(at, low_halves_to_floats(words));
    });
}

template <int BYTES>
INLINE void prepare_pairs_in_blocks(const Row& row) {
    prepare_in_blocks<BYTES>(row, [&](int64_t at, const Words& words) INLINE_LAMBDA {
        row.put(at, low_halves_to_floats(words), low_halves_to_floats(words >> 16));
    });
}

}  // namespace greenroom
