// Products with input rows that are packed as integers.
//
// Each 32 neighbouring inputs (64 if their weights share a scale) are divided by a common power of
// two, so that the largest becomes an integer of 15 bits with its sign, stored as two bytes (its
// lower 7 bits and its upper 8), or of 16 bits, stored as int16. Inputs that are bfloat16 numbers
// and at most 64 times smaller than the largest of their neighbours are exact; smaller ones are
// rounded to 2^-15 of that neighbour. Codes of two to eight bits are multiplied with these integers
// and summed exactly; then each lane's sum is multiplied by a scale in float32.
#pragma once

#include <array>

#include "loads.hpp"
#include "row.hpp"

namespace greenroom {

// How a format multiplies integers. A loop iteration takes `unit` inputs of a row.
struct Packing {
    int run = 0;           // inputs are stored as two bytes; runs of so many inputs alternate
                           // between the two halves of an iteration's 128 inputs. 0: 64 inputs as
                           // int16
    int shift = 5;         // a row has one float32 scale for 2^shift inputs
    int offset = 0;        // a weight is scale * factor * (code - offset), minus its minimum
    float factor = 1;
    bool separate_halves = false;  // are the sums of the two halves kept apart?
    int largest = 255;     // code; products of codes below 128 take fewer instructions
    int minima = 0;        // number of minima of an iteration
    const int* minimum_lanes = nullptr;  // the lane of each minimum's sum of inputs

    constexpr int unit() const { return run ? 128 : 64; }
    constexpr int group() const { return shift > 5 ? 1 << shift : 32; }
    // Vectors of packed inputs that an iteration reads: int16; or upper and lower bytes of both
    // halves, then sums of the inputs times -offset, or sums for the minima.
    constexpr int offsets() const { return offset ? 1 + separate_halves : 0; }
    constexpr int vectors() const { return run ? 4 + offsets() + (minima > 0) : 2; }
};

// Lanes of the sums of four groups of 32 inputs, two for each block of 64.
constexpr int FOUR_MINIMA[] = {0, 1, 10, 11};

// An iteration's packed inputs.
struct Inputs {
    const uint8_t* at;
    SignedBytes upper(int half) const { return load<int8_t>(at + 64 * half); }
    SignedBytes lower(int half) const { return load<int8_t>(at + 64 * (2 + half)); }
    Shorts shorts(int half) const { return load<int16_t>(at + 64 * half); }
    Ints offsets(int half = 0) const { return load<int32_t>(at + 64 * (4 + half)); }
    Floats sums() const { return load<float>(at + 64 * 4); }  // for the minima
};

// Both halves of 64 bytes of codes of four bits.
struct Halves {
    Bytes low, high;
};
INLINE Halves split_bytes(const Bytes& raw) {
    return {raw & 15, as<uint8_t>(as<uint16_t>(raw) >> 4) & 15};
}

// Multiply codes, none above LARGEST, with one half of an iteration's inputs.
template <int LARGEST = 255>
INLINE Ints times(const Bytes& codes, const Inputs& x, int half) {
    Ints upper = dot_bytes<LARGEST>(Ints{}, codes, x.upper(half));
    return dot_bytes<LARGEST>(upper << 7, codes, x.lower(half));
}

// Multiply codes with both halves of an iteration's inputs; lane i of both is one sum.
template <int LARGEST = 255>
INLINE Ints times(const Halves& codes, const Inputs& x) {
    Ints upper = dot_bytes<LARGEST>(Ints{}, codes.low, x.upper(0));
    upper = dot_bytes<LARGEST>(upper, codes.high, x.upper(1));
    Ints lower = dot_bytes<LARGEST>(upper << 7, codes.low, x.lower(0));
    return dot_bytes<LARGEST>(lower, codes.high, x.lower(1));
}

// Load four scales, or minima, of an iteration's groups of 32 inputs, of which `left` inputs exist;
// missing ones are 0. (Codes and x are 0 there too, but uninitialised memory may hold NaN, and 0
// times NaN is NaN.) spread(address) makes them a vector.
template <class Spread>
INLINE Floats four_scales(const float* scales, int64_t left, Spread spread) {
    if (left == 128) return spread(scales);
    float few[4] = {};
    for (int i = 0; 32 * i < left; i++) few[i] = scales[i];
    return spread(few);
}

// Call add for both halves of an iteration's codes, in runs of 16 or neighbours, with one vector of
// sums: four lanes belong to a group of 32 inputs, which has a scale, and a minimum if P has.
template <Packing P, class Add>
INLINE void joint_terms(
    const Row& row, int64_t at, const Inputs& x, int64_t left, const Halves& codes, Add add) {
    Ints sums = times<P.largest>(codes, x);
    if constexpr (P.offset != 0) sums = sums + x.offsets();
    add(constant<0>, to_floats(sums), four_scales(row.ready + (at >> 5), left, each_four_times));
    if constexpr (P.minima != 0)
        add(constant<0>, x.sums(), four_scales(row.minima(at >> 5), left, repeat_four));
}

template <Packing P>
constexpr int64_t packed_bytes(int64_t inputs) {
    int64_t units = (inputs + P.unit() - 1) / P.unit();
    return 64 * (units * P.vectors() + 1) + 4 * units * (P.unit() >> P.shift);
}

// The scales of a packed row's inputs, which are powers of two.
template <Packing P>
INLINE float* powers_of(const uint8_t* packed, int64_t inputs) {
    return (float*)(packed + (inputs + P.unit() - 1) / P.unit() * 64 * P.vectors());
}

// Convert neighbours to integers, and return their power of two: NaN if one is NaN or infinite.
template <Packing P>
INLINE float pack_group(const float* x, int32_t* integers) {
    constexpr int top = P.run ? 13 : 14;
    uint32_t largest = 0;
    for (int i = 0; i < P.group(); i++) {
        uint32_t size = std::bit_cast<uint32_t>(x[i]) & 0x7fffffff;
        largest = size > largest ? size : largest;
    }
    uint32_t exponent = largest >> 23, bounded = exponent < 40 ? 40 : exponent;
    float inverse = std::bit_cast<float>((254 + top - bounded) << 23);
    for (int i = 0; i < P.group(); i += LANES) {
        // Rounded to the nearest by adding 1.5 * 2^23.
        Floats moved = fma(load<float>(x + i), all(inverse), all(12582912.0f));
        store(integers + i, at_most(as<int32_t>(moved) - 0x4b400000, (2 << top) - 1));
    }
    return exponent == 255 ? std::numeric_limits<float>::quiet_NaN()
                           : std::bit_cast<float>((bounded - top) << 23);
}

// Write the bytes of an iteration's integers: upper, then lower ones, each in two halves.
template <Packing P>
INLINE void store_bytes(const int32_t* integers, int8_t* out) {
    int8_t upper[128], lower[128];
    for (int i = 0; i < 128; i++) upper[i] = (int8_t)(integers[i] >> 7);
    for (int i = 0; i < 128; i++) lower[i] = (int8_t)(integers[i] & 127);
    if constexpr (P.run == 1) {
        for (int i = 0; i < 64; i++) out[i] = upper[2 * i];
        for (int i = 0; i < 64; i++) out[64 + i] = upper[2 * i + 1];
        for (int i = 0; i < 64; i++) out[128 + i] = lower[2 * i];
        for (int i = 0; i < 64; i++) out[192 + i] = lower[2 * i + 1];
    } else {
        each<128 / P.run>([&](auto r) INLINE_LAMBDA {
            int place = r % 2 * 64 + r / 2 * P.run;
            std::memcpy(out + place, upper + r * P.run, P.run);
            std::memcpy(out + 128 + place, lower + r * P.run, P.run);
        });
    }
}

// Convert an input row to integers.
template <Packing P>
void pack(const float* x, int64_t inputs, uint8_t* out) {
    constexpr int unit = P.unit(), group = P.group();
    float* powers = powers_of<P>(out, inputs);
    for (int64_t number = 0; number * unit < inputs; number++, out += 64 * P.vectors()) {
        float row[unit] = {}, power[unit / group];
        int32_t integers[unit];
        int64_t left = inputs - number * unit;
        std::memcpy(row, x + number * unit, 4 * (left < unit ? left : unit));
        for (int g = 0; g < unit / group; g++) {
            power[g] = pack_group<P>(row + g * group, integers + g * group);
            for (int i = 0; i < group >> P.shift; i++)
                powers[((number * unit + g * group) >> P.shift) + i] = power[g] * P.factor;
        }
        if constexpr (!P.run) {
            int16_t* shorts = (int16_t*)out;
            for (int i = 0; i < unit; i++) shorts[i] = (int16_t)integers[i];
            continue;
        } else {
            store_bytes<P>(integers, (int8_t*)out);
            Inputs packed{out};
            if constexpr (P.offset != 0) {
                Ints first = times(all<uint8_t>(1), packed, 0);
                Ints second = times(all<uint8_t>(1), packed, 1);
                if constexpr (P.separate_halves) {
                    store(out + 256, first * -P.offset);
                    store(out + 320, second * -P.offset);
                } else {
                    store(out + 256, (first + second) * -P.offset);
                }
            }
            if constexpr (P.minima != 0) {
                float sums[LANES] = {};
                constexpr int each = unit / P.minima;
                for (int m = 0; m < P.minima; m++) {
                    int32_t sum = 0;
                    for (int i = 0; i < each; i++) sum += integers[m * each + i];
                    sums[P.minimum_lanes[m]] = (float)sum * power[m * each / group];
                }
                std::memcpy(out + 64 * (4 + P.offsets()), sums, 64);
            }
        }
    }
}

}  // namespace greenroom
