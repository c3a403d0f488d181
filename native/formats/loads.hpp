// Loads of codes and scales that lie in small blocks or in parts of bytes.
#pragma once

#include "../simd.hpp"

namespace greenroom {

// The vector of four times 16 bytes.
template <class T>
INLINE Vector<T> four_quarters(const void* a, const void* b, const void* c, const void* d) {
#if defined(__AVX512F__)
    __m512i all = _mm512_zextsi128_si512(read<__m128i>(a));
    all = _mm512_mask_broadcast_i32x4(all, 0x00f0, read<__m128i>(b));
    all = _mm512_mask_broadcast_i32x4(all, 0x0f00, read<__m128i>(c));
    all = _mm512_mask_broadcast_i32x4(all, 0xf000, read<__m128i>(d));
    return {(Part<T>)all};
#elif defined(__AVX2__)
    return {(Part<T>)_mm256_set_m128i(read<__m128i>(b), read<__m128i>(a)),
            (Part<T>)_mm256_set_m128i(read<__m128i>(d), read<__m128i>(c))};
#else
    return {read<Part<T>>(a), read<Part<T>>(b), read<Part<T>>(c), read<Part<T>>(d)};
#endif
}

#if defined(__x86_64__)
using FourWords = __m128i;
#else
using FourWords = uint32x4_t;
#endif

// Four numbers of 32 bits, `step` bytes apart.
INLINE FourWords four_words(const uint8_t* address, int step) {
    auto word = [=](int i) { return read<uint32_t>(address + i * step); };
#if defined(__x86_64__)
    __m128i four = _mm_cvtsi32_si128(word(0));
    four = _mm_insert_epi32(four, word(1), 1);
    four = _mm_insert_epi32(four, word(2), 2);
    return _mm_insert_epi32(four, word(3), 3);
#else
    return uint32x4_t{word(0), word(1), word(2), word(3)};
#endif
}

// 16 numbers of 32 bits, `step` bytes apart: one by one, since a gather takes several times as long
// on processors that mitigate its side channels.
INLINE Words gather_words(const uint8_t* address, int step) {
    auto four = [=](int i) INLINE_LAMBDA { return four_words(address + 4 * i * step, step); };
#if defined(__AVX512F__)
    __m256i low = _mm256_set_m128i(four(1), four(0)), high = _mm256_set_m128i(four(3), four(2));
    return {(Part<uint32_t>)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)};
#elif defined(__AVX2__)
    return {(Part<uint32_t>)_mm256_set_m128i(four(1), four(0)),
            (Part<uint32_t>)_mm256_set_m128i(four(3), four(2))};
#else
    return {four(0), four(1), four(2), four(3)};
#endif
}

// 16 codes of four bits, of which each byte holds two neighbours, in the low bits of the lanes. The
// other bits may be anything.
INLINE Ints load_neighbours(const void* address) {
#if defined(__AVX512F__)
    // A product of 64 bits is the byte, and the byte shifted to bring its high half to bit 32.
    __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)address));
    return {(Part<int32_t>)_mm512_mul_epu32(bytes, _mm512_set1_epi64((1 << 28) + 1))};
#else
    Ints result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        const char* place = (const char*)address + p / (PARTS / 2) * 4;
        Part<uint32_t> eight = part_of(read<uint32_t>(place));
#if defined(__AVX2__)
        eight = eight >> Part<uint32_t>{0, 4, 8, 12, 16, 20, 24, 28};
#else
        constexpr int first = p % 2 * 16;
        eight = eight >> Part<uint32_t>{first, first + 4, first + 8, first + 12};
#endif
        result.part[p] = (Part<int32_t>)eight;
    });
    return result;
#endif
}

// The vector with a number in the lanes whose bits are set, the others 0.
INLINE Ints where_bits(uint32_t bits, int32_t number) {
#if defined(__AVX512F__)
    return {(Part<int32_t>)_mm512_maskz_set1_epi32((__mmask16)bits, number)};
#else
    Ints mine = lanes_of<int32_t>([](int i) { return 1 << i; });
    return as<int32_t>(equal(all<int32_t>(bits) & mine, mine)) & number;
#endif
}

// Convert float16 to float32: the first, or the second, 16 of 32.
INLINE Floats halves_to_floats(const HalfWords& a, int second) {
    Floats result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        [[maybe_unused]] int from = second * PARTS + p;  // in half registers
#if defined(__AVX512F__)
        __m512i all = (__m512i)a.part[0];
        result.part[p] = _mm512_cvtph_ps(
            second ? _mm512_extracti64x4_epi64(all, 1) : _mm512_castsi512_si256(all));
#elif defined(__AVX2__)
        __m256i two = (__m256i)a.part[from / 2];
        result.part[p] = _mm256_cvtph_ps(
            from % 2 ? _mm256_extracti128_si256(two, 1) : _mm256_castsi256_si128(two));
#else
        float16x8_t two = (float16x8_t)a.part[from / 2];
        result.part[p] = vcvt_f32_f16(from % 2 ? vget_high_f16(two) : vget_low_f16(two));
#endif
    });
    return result;
}

// Convert the float16 in the low 16 bits of each lane to float32.
INLINE Floats low_halves_to_floats(const Words& a) {
    Floats result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
#if defined(__AVX512F__)
        result.part[p] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)a.part[p]));
#elif defined(__AVX2__)
        __m256i low = _mm256_and_si256((__m256i)a.part[p], _mm256_set1_epi32(0xffff));
        result.part[p] = _mm256_cvtph_ps(_mm_packus_epi32(
            _mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
#else
        result.part[p] = vcvt_f32_f16((float16x4_t)vmovn_u32((uint32x4_t)a.part[p]));
#endif
    });
    return result;
}

}  // namespace greenroom
