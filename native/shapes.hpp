// Vectors made of parts, and sums of lanes.
#pragma once

#include "conversions.hpp"

namespace greenroom {

// The vector whose first half is a constant of lanes, and the second another one.
template <class T>
INLINE Vector<T> halves(T first, T second) {
    Vector<T> result;
    if constexpr (PARTS > 1)
        each<PARTS>([&](auto p) INLINE_LAMBDA {
            result.part[p] = part_of(p < PARTS / 2 ? first : second);
        });
#if defined(__AVX512F__)
    else if constexpr (sizeof(T) == 4)
        result.part[0] = (Part<T>)_mm512_mask_blend_ps(
            0xff00, (__m512)all(first).part[0], (__m512)all(second).part[0]);
#endif
    else
        result = lanes_of<T>([=](int i) { return i < 32 / (int)sizeof(T) ? first : second; });
    return result;
}

// Sum lanes, the upper half of a vector added to its lower half, again and again.
INLINE float lane_sum(const Floats& a) {
#if defined(__AVX512F__)
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.part[0]),
                                 _mm512_extractf32x8_ps(a.part[0], 1));
#elif defined(__AVX2__)
    __m256 eight = _mm256_add_ps(a.part[0], a.part[1]);
#endif
#if defined(__x86_64__)
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
    Part<float> four = (a.part[0] + a.part[2]) + (a.part[1] + a.part[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
#endif
}

typedef float FourFloats __attribute__((vector_size(16)));

#if defined(__AVX512F__)
// Add lanes of four vectors until each has four: those of a, then those of b, c and d.
INLINE __m512 four_lanes(const Floats& a, const Floats& b, const Floats& c, const Floats& d) {
    auto eight = [](const Floats& v, const Floats& w) INLINE_LAMBDA {
        return _mm512_add_ps(_mm512_shuffle_f32x4(v.part[0], w.part[0], 0x44),
                             _mm512_shuffle_f32x4(v.part[0], w.part[0], 0xee));
    };
    __m512 ab = eight(a, b), cd = eight(c, d);
    return _mm512_add_ps(
        _mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}

// Sum the lanes of 16 vectors, each in the order of `lane_sum`: lane i is the sum of vector(i).
template <class V>
INLINE Floats lane_sums(V vector) {
    auto four = [&](int i) INLINE_LAMBDA {
        return four_lanes(vector(i), vector(4 + i), vector(8 + i), vector(12 + i));
    };
    auto two = [&](int i) INLINE_LAMBDA {
        __m512 v = four(i), w = four(i + 1);
        return _mm512_add_ps(_mm512_shuffle_ps(v, w, 0x44), _mm512_shuffle_ps(v, w, 0xee));
    };
    __m512 v = two(0), w = two(2);
    return {_mm512_add_ps(_mm512_shuffle_ps(v, w, 0x88), _mm512_shuffle_ps(v, w, 0xdd))};
}
#endif

// Sum the lanes of four vectors, each in the order of `lane_sum`, in fewer instructions.
INLINE FourFloats lane_sums(const Floats& a, const Floats& b, const Floats& c, const Floats& d) {
#if defined(__x86_64__)
#if defined(__AVX512F__)
    __m512 four = four_lanes(a, b, c, d);
    __m256 first = _mm512_castps512_ps256(four), second = _mm512_extractf32x8_ps(four, 1);
    __m256 even = _mm256_shuffle_ps(first, second, 0x44);
    __m256 odd = _mm256_shuffle_ps(first, second, 0xee);
    __m256 two = _mm256_add_ps(even, odd);  // a, c in the lower half; b, d in the upper half
#else
    auto four = [](const Floats& v, const Floats& w) INLINE_LAMBDA {
        __m256 x = _mm256_add_ps(v.part[0], v.part[1]), y = _mm256_add_ps(w.part[0], w.part[1]);
        return _mm256_add_ps(
            _mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
    };
    __m256 ab = four(a, b), cd = four(c, d);
    __m256 two = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
#endif
    __m128 ac = _mm256_castps256_ps128(two), bd = _mm256_extractf128_ps(two, 1);
    __m128 one = _mm_add_ps(_mm_shuffle_ps(ac, bd, 0x88), _mm_shuffle_ps(ac, bd, 0xdd));
    return (FourFloats)_mm_shuffle_ps(one, one, 0xd8);
#else
    auto two = [](const Floats& v, const Floats& w) INLINE_LAMBDA {
        auto four = [](const Floats& u) INLINE_LAMBDA {
            return (float64x2_t)((u.part[0] + u.part[2]) + (u.part[1] + u.part[3]));
        };
        float64x2_t x = four(v), y = four(w);
        return vaddq_f32((float32x4_t)vzip1q_f64(x, y), (float32x4_t)vzip2q_f64(x, y));
    };
    float32x4_t ab = two(a, b), cd = two(c, d);
    return (FourFloats)vaddq_f32(vuzp1q_f32(ab, cd), vuzp2q_f32(ab, cd));
#endif
}

}  // namespace greenroom
