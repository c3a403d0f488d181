// Numbers of the model's types, as float32.
#pragma once

#include <cmath>

#include "simd.hpp"

namespace greenroom {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

// Load 16 numbers, converted to float32.
template <class T>
INLINE Floats load_as_floats(const T* address) {
    if constexpr (std::is_same_v<T, float>) return load<float>(address);
    if constexpr (std::is_same_v<T, Float16>) return load_halves(address);
    if constexpr (std::is_same_v<T, BFloat16>)
        return as<float>(load_ints<uint16_t>(address) << 16);
}

// Load the first n numbers, converted to float32; the others are 0, and are not read.
template <class T>
INLINE Floats load_first_as_floats(const T* address, int64_t n) {
    if constexpr (std::is_same_v<T, float>) return load_first<float>(address, n);
#if defined(__AVX512BW__)
    __m256i bits = _mm256_maskz_loadu_epi16((1u << n) - 1, address);
    if constexpr (std::is_same_v<T, Float16>) return {(Part<float>)_mm512_cvtph_ps(bits)};
    return {(Part<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)};
#endif
    T numbers[LANES] = {};
    std::memcpy(numbers, address, sizeof(T) * n);
    return load_as_floats(numbers);
}

// Round float32 to bfloat16, ties to even, as torch does: 16 bits in each lane. NaN becomes 0x7fc0.
INLINE Ints to_bfloat16(const Floats& a) {
    Words bits = as<uint32_t>(a);
    Ints near = as<int32_t>((bits + (((bits >> 16) & 1) + 0x7fff)) >> 16);
    return choose(equal(a, a), near, all<int32_t>(0x7fc0));
}

// Store 16 float32, rounded to a model's type.
template <class T>
INLINE void store_rounded(T* address, const Floats& a) {
    if constexpr (std::is_same_v<T, float>) store(address, a);
    if constexpr (std::is_same_v<T, Float16>) store_halves(address, a);
    if constexpr (std::is_same_v<T, BFloat16>) {
        typedef uint16_t Short __attribute__((vector_size(REGISTER / 2)));
        Ints bits = to_bfloat16(a);
        each<PARTS>([&](auto p) INLINE_LAMBDA {
            Short part = __builtin_convertvector(bits.part[p], Short);
            std::memcpy((char*)address + p * sizeof part, &part, sizeof part);
        });
    }
}

template <class T>
INLINE void store_first_rounded(T* address, const Floats& a, int64_t n) {
    T numbers[LANES];
    store_rounded(numbers, a);
    std::memcpy(address, numbers, sizeof(T) * n);
}

// Round to the nearest number of a model's type; the result is float32.
template <class T>
INLINE Floats rounded(const Floats& a) {
    if constexpr (std::is_same_v<T, float>) return a;
    if constexpr (std::is_same_v<T, BFloat16>) return as<float>(to_bfloat16(a) << 16);
    if constexpr (std::is_same_v<T, Float16>) {
        Float16 numbers[LANES];
        store_rounded(numbers, a);
        return load_as_floats(numbers);
    }
}

// The same for single numbers.

template <class T>
INLINE float to_float(T number) {
    if constexpr (std::is_same_v<T, float>) return number;
    if constexpr (std::is_same_v<T, Float16>) return half_to_float(number.bits);
    if constexpr (std::is_same_v<T, BFloat16>)
        return std::bit_cast<float>((uint32_t)number.bits << 16);
}

template <class T>
INLINE T from_float(float number) {
    if constexpr (std::is_same_v<T, float>) return number;
    if constexpr (std::is_same_v<T, Float16>) {
#if defined(__x86_64__)
        return {(uint16_t)_cvtss_sh(number, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
#else
        return {std::bit_cast<uint16_t>((__fp16)number)};
#endif
    }
    if constexpr (std::is_same_v<T, BFloat16>) {
        uint32_t bits = std::bit_cast<uint32_t>(number);
        if (number != number) return {0x7fc0};
        return {(uint16_t)((bits + ((bits >> 16 & 1) + 0x7fff)) >> 16)};
    }
}

template <class T>
INLINE float rounded(float number) {
    return to_float(from_float<T>(number));
}

// Round a quantised weight to the type of its scales; the result is float32.
//
// For bfloat16, adding 1.5 * 2^16 times its own power of two to a number leaves 8 significant bits,
// ties to even. That is right for zeros and for numbers from 2^-126 to 2^110, as weights are, and
// takes half the instructions.
template <class T>
INLINE Floats rounded_weight(const Floats& a) {
    if constexpr (!std::is_same_v<T, BFloat16>) return rounded<T>(a);
    Floats power = as<float>(as<int32_t>(a) & -(1 << 23));
    return fma(power, all(-98304.0f), fma(power, all(98304.0f), a));
}

}  // namespace greenroom
