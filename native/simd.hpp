// Products of integers and look-ups in tables, and all else of vectors (vectors.hpp).
#pragma once

#include "shapes.hpp"

namespace greenroom {

// Add to lane i the products of bytes 4 i to 4 i + 3. Codes have no sign, x has one.
// No code is larger than LARGEST.
template <int LARGEST = 255>
INLINE Ints dot_bytes(Ints total, const Bytes& codes, const SignedBytes& x) {
    each<PARTS>([&](auto p) INLINE_LAMBDA {
#if defined(__AVX512VNNI__)
        total.part[p] = (Part<int32_t>)_mm512_dpbusd_epi32(
            (__m512i)total.part[p], (__m512i)codes.part[p], (__m512i)x.part[p]);
#elif defined(__AVX2__)
        __m256i c = (__m256i)codes.part[p], v = (__m256i)x.part[p];
        if constexpr (LARGEST < 128) {
            total.part[p] += (Part<int32_t>)_mm256_madd_epi16(
                _mm256_maddubs_epi16(c, v), _mm256_set1_epi16(1));
            return;
        }
        // Even and odd bytes apart: _mm256_maddubs_epi16 saturates.
        __m256i even = _mm256_madd_epi16(_mm256_and_si256(c, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8));
        __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(c, 8), _mm256_srai_epi16(v, 8));
        total.part[p] += (Part<int32_t>)even + (Part<int32_t>)odd;
#else
        uint8x16_t c = (uint8x16_t)codes.part[p];
        int8x16_t v = (int8x16_t)x.part[p];
        auto wide = [](uint8x8_t u) { return vreinterpretq_s16_u16(vmovl_u8(u)); };
        int16x8_t cl = wide(vget_low_u8(c)), ch = wide(vget_high_u8(c));
        int16x8_t vl = vmovl_s8(vget_low_s8(v)), vh = vmovl_s8(vget_high_s8(v));
        int32x4_t a = vpaddq_s32(vmull_s16(vget_low_s16(cl), vget_low_s16(vl)),
                                 vmull_s16(vget_high_s16(cl), vget_high_s16(vl)));
        int32x4_t b = vpaddq_s32(vmull_s16(vget_low_s16(ch), vget_low_s16(vh)),
                                 vmull_s16(vget_high_s16(ch), vget_high_s16(vh)));
        total.part[p] += (Part<int32_t>)vpaddq_s32(a, b);
#endif
    });
    return total;
}

// Take apart 16 pairs in two vectors: their first numbers and their second numbers.
struct Pairs {
    Floats first, second;
};
INLINE Pairs pairs(const Floats& a, const Floats& b) {
#if defined(__AVX512F__)
    __m512i even = (__m512i)lanes_of<int32_t>([](int i) { return 2 * i; }).part[0];
    __m512i odd = (__m512i)lanes_of<int32_t>([](int i) { return 2 * i + 1; }).part[0];
    return {{(Part<float>)_mm512_permutex2var_ps(a.part[0], even, b.part[0])},
            {(Part<float>)_mm512_permutex2var_ps(a.part[0], odd, b.part[0])}};
#else
    Pairs result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        constexpr int of = 2 * p % PARTS;
        const Floats& source = p < PARTS / 2 ? a : b;
        Part<float> x = source.part[of], y = source.part[of + 1];
#if defined(__AVX2__)
        auto ordered = [](__m256 v) INLINE_LAMBDA {
            return (Part<float>)_mm256_permute4x64_pd((__m256d)v, 0xd8);
        };
        result.first.part[p] = ordered(_mm256_shuffle_ps(x, y, 0x88));
        result.second.part[p] = ordered(_mm256_shuffle_ps(x, y, 0xdd));
#else
        result.first.part[p] = vuzp1q_f32(x, y);
        result.second.part[p] = vuzp2q_f32(x, y);
#endif
    });
    return result;
#endif
}

// Store the first, or the second, eight lanes of a vector.
INLINE void store_half(float* address, const Floats& a, int half) {
#if defined(__AVX512F__)
    __m256 eight = half ? _mm512_extractf32x8_ps(a.part[0], 1) : _mm512_castps512_ps256(a.part[0]);
    std::memcpy(address, &eight, 32);
#else
    each<PARTS / 2>([&](auto p) INLINE_LAMBDA {
        std::memcpy((char*)address + p * REGISTER, &a.part[half * PARTS / 2 + p], REGISTER);
    });
#endif
}

// Look up codes below 16 in a table of 16 bytes.
INLINE Bytes look_up(const uint8_t (&table)[16], const Bytes& codes) {
    Bytes result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
#if defined(__AVX512BW__)
        __m512i four = _mm512_broadcast_i32x4(read<__m128i>(table));
        result.part[p] = (Part<uint8_t>)_mm512_shuffle_epi8(four, (__m512i)codes.part[p]);
#elif defined(__AVX2__)
        __m256i two = _mm256_broadcastsi128_si256(read<__m128i>(table));
        result.part[p] = (Part<uint8_t>)_mm256_shuffle_epi8(two, (__m256i)codes.part[p]);
#else
        result.part[p] = (Part<uint8_t>)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes.part[p]);
#endif
    });
    return result;
}

// Look up the low four bits of each lane in a table of 16 numbers.
INLINE Floats look_up(const Floats& table, const Ints& codes) {
#if defined(__AVX512F__)
    return {(Part<float>)_mm512_permutexvar_ps((__m512i)codes.part[0], table.part[0])};
#elif defined(__AVX2__)
    Floats result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        __m256i c = (__m256i)codes.part[p];
        __m256 low = _mm256_permutevar8x32_ps(table.part[0], c);
        __m256 high = _mm256_permutevar8x32_ps(table.part[1], c);
        result.part[p] = _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(c, 28)));
    });
    return result;
#else
    // Bytes 4 i to 4 i + 3 of the table are its number i.
    uint8x16x4_t bytes = {(uint8x16_t)table.part[0], (uint8x16_t)table.part[1],
                          (uint8x16_t)table.part[2], (uint8x16_t)table.part[3]};
    Floats result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        Part<int32_t> places = (codes.part[p] & 15) * 0x04040404 + 0x03020100;
        result.part[p] = (Part<float>)vqtbl4q_u8(bytes, (uint8x16_t)places);
    });
    return result;
#endif
}

}  // namespace greenroom
