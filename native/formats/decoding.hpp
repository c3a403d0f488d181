// Decoding of 32 weights (`decode` in product.hpp), for formats of several families.
//
// Where a vector is one register, codes of four bits are looked up in a table of their 16 weights,
// which is computed once. Elsewhere each weight is computed. The bits are the same.
#pragma once

#include "loads.hpp"
#include "row.hpp"

namespace greenroom {

constexpr bool ONE_REGISTER = PARTS == 1;

// 32 codes, in the low bits of lanes.
struct Codes {
    Ints part[2];
};

// Load codes of four bits: byte i has codes i and i + 16; or each byte has two neighbours. Bits
// above the lowest four may be anything.
INLINE Codes codes_in_halves(const uint8_t* address) {
    Ints both = load_ints<uint8_t>(address);
    return {{both, both >> 4}};
}
INLINE Codes codes_of_neighbours(const uint8_t* address) {
    return {{load_neighbours(address), load_neighbours(address + 8)}};
}

// 0 to 15 in float32.
INLINE Floats code_numbers() {
    return lanes_of<float>([](int i) { return (float)i; });
}

// Decode codes of four bits: weight(codes in float32).
template <class Weight>
INLINE Weights decode_four_bits(const Codes& codes, Weight weight) {
    if constexpr (ONE_REGISTER) {
        Floats table = weight(code_numbers());
        return {{look_up(table, codes.part[0]), look_up(table, codes.part[1])}};
    } else {
        return weights_of(weight(to_floats(codes.part[0] & 15)),
                                  weight(to_floats(codes.part[1] & 15)));
    }
}

// Decode codes of four bits: scale * (code - 8).
INLINE Weights decode_symmetric(const Codes& codes, float scale) {
    return decode_four_bits(codes, [&](const Floats& code) INLINE_LAMBDA {
        return (code - 8) * scale;
    });
}

// Decode codes of four bits: scale * numbers[code].
INLINE Weights decode_from_table(const Codes& codes, const Floats& numbers, float scale) {
    if constexpr (ONE_REGISTER) {
        Floats table = numbers * scale;
        return {{look_up(table, codes.part[0]), look_up(table, codes.part[1])}};
    } else {
        return weights_of(look_up(numbers, codes.part[0]) * scale,
                                  look_up(numbers, codes.part[1]) * scale);
    }
}

// Decode 32 signed bytes: code * scale.
INLINE Weights decode_bytes(const uint8_t* codes, float scale) {
    return weights_of(to_floats(load_ints<int8_t>(codes)) * scale,
                              to_floats(load_ints<int8_t>(codes + LANES)) * scale);
}

// Take bits from each of 32 bytes: (byte >> shift) & mask.
//
// The shift is one of 16-bit numbers: the mask removes what comes from the neighbouring byte.
INLINE HalfBytes bits_at(const uint8_t* address, int shift, uint8_t mask) {
    return (HalfBytes)(read<HalfShorts>(address) >> shift) & mask;
}

// Shift each of 32 bytes below 16 to the left by four bits.
INLINE HalfBytes sixteen_times(const HalfBytes& small) {
    return (HalfBytes)((HalfShorts)small << 4);
}

}  // namespace greenroom
