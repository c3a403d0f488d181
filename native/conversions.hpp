// Vectors of other types: loads that widen numbers, float16, integers and float32.
#pragma once

#include "vectors.hpp"

namespace greenroom {

INLINE Floats to_floats(const Ints& a) {
    Floats result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        result.part[p] = __builtin_convertvector(a.part[p], Part<float>);
    });
    return result;
}

// Load 16 numbers of one or two bytes as 32-bit integers.
template <class T>
INLINE Ints load_ints(const void* address) {
    Ints result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        const char* place = (const char*)address + p * (REGISTER / 4 * sizeof(T));
#if defined(__AVX512F__)
        __m512i wide;
        if constexpr (std::is_same_v<T, uint8_t>) wide = _mm512_cvtepu8_epi32(read<__m128i>(place));
        if constexpr (std::is_same_v<T, int8_t>) wide = _mm512_cvtepi8_epi32(read<__m128i>(place));
        if constexpr (std::is_same_v<T, uint16_t>)
            wide = _mm512_cvtepu16_epi32(read<__m256i>(place));
        if constexpr (std::is_same_v<T, int16_t>)
            wide = _mm512_cvtepi16_epi32(read<__m256i>(place));
#elif defined(__AVX2__)
        __m256i wide;
        if constexpr (std::is_same_v<T, uint8_t>)
            wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)place));
        if constexpr (std::is_same_v<T, int8_t>)
            wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)place));
        if constexpr (std::is_same_v<T, uint16_t>)
            wide = _mm256_cvtepu16_epi32(read<__m128i>(place));
        if constexpr (std::is_same_v<T, int16_t>)
            wide = _mm256_cvtepi16_epi32(read<__m128i>(place));
#else
        typedef T Short __attribute__((vector_size(REGISTER / 4 * sizeof(T))));
        auto wide = __builtin_convertvector(read<Short>(place), Part<int32_t>);
#endif
        result.part[p] = (Part<int32_t>)wide;
    });
    return result;
}

// Load 32 signed bytes as 16-bit integers.
INLINE Shorts load_shorts(const void* address) {
    Shorts result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        const char* place = (const char*)address + p * REGISTER / 2;
#if defined(__AVX512BW__)
        result.part[p] = (Part<int16_t>)_mm512_cvtepi8_epi16(read<__m256i>(place));
#elif defined(__AVX2__)
        result.part[p] = (Part<int16_t>)_mm256_cvtepi8_epi16(read<__m128i>(place));
#else
        result.part[p] = (Part<int16_t>)vmovl_s8(vld1_s8((const int8_t*)place));
#endif
    });
    return result;
}

// 32 bytes, for codes that become two vectors.
typedef uint8_t HalfBytes __attribute__((vector_size(32)));
typedef uint16_t HalfShorts __attribute__((vector_size(32)));

// Convert the first, or the second, 16 of 32 bytes to 32-bit integers. T: uint8_t or int8_t.
template <class T>
INLINE Ints to_ints(const HalfBytes& bytes, int half) {
    typedef uint8_t Quarter __attribute__((vector_size(16)));
    Quarter both[2];
    std::memcpy(both, &bytes, 32);
    return load_ints<T>(&both[half]);
}

// Load 16 float16 as float32.
INLINE Floats load_halves(const void* address) {
    Floats result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        const char* place = (const char*)address + p * REGISTER / 2;
#if defined(__AVX512F__)
        result.part[p] = _mm512_cvtph_ps(read<__m256i>(place));
#elif defined(__AVX2__)
        result.part[p] = _mm256_cvtph_ps(read<__m128i>(place));
#else
        result.part[p] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)place)));
#endif
    });
    return result;
}

// Store 16 float32 as float16, rounded to the nearest, ties to even.
INLINE void store_halves(void* address, const Floats& a) {
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        char* place = (char*)address + p * REGISTER / 2;
#if defined(__AVX512F__)
        __m256i half = _mm512_cvtps_ph(a.part[p], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
        __m128i half = _mm256_cvtps_ph(a.part[p], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
        float16x4_t half = vcvt_f16_f32(a.part[p]);
#endif
        std::memcpy(place, &half, sizeof half);
    });
}

// Load two float16 as eight equal float32 each.
INLINE Floats two_halves(const void* address) {
#if defined(__AVX512F__)
    __m128 two = _mm_cvtph_ps(_mm_cvtsi32_si128(read<int32_t>(address)));
    __m512i picks = (__m512i)halves_of_part<int32_t>(0, 1);
    return {(Part<float>)_mm512_permutexvar_ps(picks, _mm512_castps128_ps512(two))};
#elif defined(__AVX2__)
    __m128 two = _mm_cvtph_ps(_mm_cvtsi32_si128(read<int32_t>(address)));
    return {(Part<float>)_mm256_broadcastss_ps(two),
            (Part<float>)_mm256_broadcastss_ps(_mm_movehdup_ps(two))};
#else
    uint16x4_t two = vreinterpret_u16_u32(vdup_n_u32(read<uint32_t>(address)));
    float32x4_t wide = vcvt_f32_f16(vreinterpret_f16_u16(two));
    float32x4_t first = vdupq_laneq_f32(wide, 0), second = vdupq_laneq_f32(wide, 1);
    return {first, first, second, second};
#endif
}

// Convert one float16 to float32.
INLINE float half_to_float(uint16_t half) {
#if defined(__x86_64__)
    return _cvtsh_ss(half);
#else
    return (float)std::bit_cast<__fp16>(half);
#endif
}

}  // namespace greenroom
