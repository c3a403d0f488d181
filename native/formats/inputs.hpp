// Input rows as integers.
//
// 32 neighbouring inputs are divided by a common scale, and rounded to integers: of 8 bits (one
// plane of bytes), or of 15 bits (two planes: the upper 8 bits, and the lower 7). With two planes
// the scale is a power of two: inputs that are bfloat16 numbers and at most 64 times smaller than
// the largest of their group are then exact, and smaller ones are rounded to 2^-15 of that one.
#pragma once

#include "../numbers.hpp"

namespace greenroom {

constexpr int GROUP = 32;   // inputs with one scale
constexpr int64_t TOKENS = 8;  // input rows that are multiplied at a time

// A group of inputs. It takes the place of 32 float32.
template <int PLANES>
struct PackedGroup {
    int8_t bytes[PLANES][GROUP];
    float scale;
    float sums[2];  // of inputs 0 to 15, and 16 to 31
    uint8_t unused[4 * GROUP - PLANES * GROUP - 12];
};

// Take the lower 8 bits of each lane.
INLINE void store_low_bytes(int8_t* out, const Ints& a) {
#if defined(__AVX512F__)
    __m128i bytes = _mm512_cvtepi32_epi8((__m512i)a.part[0]);
    std::memcpy(out, &bytes, 16);
#else
    alignas(64) int32_t lanes[LANES];
    store(lanes, a);
    for (int i = 0; i < LANES; i++) out[i] = (int8_t)lanes[i];
#endif
}

INLINE int32_t lane_sum(const Ints& a) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)a.part[0]);
#else
    alignas(64) int32_t lanes[LANES];
    store(lanes, a);
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
#endif
}

INLINE int32_t largest_lane(const Ints& a) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)a.part[0]);
#else
    alignas(64) int32_t lanes[LANES];
    store(lanes, a);
    int32_t largest = 0;
    for (int i = 0; i < LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
#endif
}

// A scale, and the factor that makes integers of numbers. `largest` has the bits of a float32
// without sign. The scale is NaN if the number is NaN or infinite.
struct Scale {
    float scale, factor;
};
template <int PLANES>
INLINE Scale scale_for(int32_t largest) {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    const int32_t exponent = largest >> 23, bounded = exponent < 40 ? 40 : exponent;
    if (exponent == 255) return {nan, 0};
    if constexpr (PLANES == 1) {
        if (exponent < 40) return {0, 0};  // below 2^-87
        float number = std::bit_cast<float>(largest);
        return {number / 127, 127 / number};
    } else {
        return {std::bit_cast<float>((bounded - 13) << 23),
                std::bit_cast<float>((254 + 13 - bounded) << 23)};
    }
}

// Pack a row of inputs. `out` may be the row's own place.
template <int PLANES>
[[gnu::noinline]] void pack(const float* x, int64_t inputs, void* out) {
    for (int64_t at = 0; at < inputs; at += GROUP) {
        Floats numbers[2] = {load<float>(x + at), load<float>(x + at + LANES)};
        auto size = [&](int i) INLINE_LAMBDA { return as<int32_t>(numbers[i]) & 0x7fffffff; };
        Scale of = scale_for<PLANES>(largest_lane(at_least(size(0), size(1))));
        auto& group = ((PackedGroup<PLANES>*)out)[at / GROUP];
        each<2>([&](auto i) INLINE_LAMBDA {
            // Rounded to the nearest by adding 1.5 * 2^23.
            Floats moved = fma(numbers[i], all(of.factor), all(12582912.0f));
            Ints integers = at_most(as<int32_t>(moved) - 0x4b400000, PLANES == 1 ? 127 : 16383);
            group.sums[i] = (float)lane_sum(integers) * of.scale;
            store_low_bytes(group.bytes[0] + LANES * i, PLANES == 1 ? integers : integers >> 7);
            if constexpr (PLANES == 2)
                store_low_bytes(group.bytes[1] + LANES * i, integers & 127);
        });
        group.scale = of.scale;
    }
}

// Pack a row for formats with so many planes.
INLINE void pack_row(int64_t planes, const float* x, int64_t inputs, void* out) {
    planes == 1 ? pack<1>(x, inputs, out) : pack<2>(x, inputs, out);
}

}  // namespace greenroom
