// Vectors of 64 bytes, on AVX-512, AVX2 and NEON.
//
// A vector has 16 lanes of float32 on every processor. Where registers are shorter it is two or
// four of them. So sums are taken in the same order everywhere, and a result has the same bits.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE [[gnu::always_inline]] inline
#define INLINE_LAMBDA __attribute__((always_inline))

namespace greenroom {

#if defined(__AVX512F__)
constexpr int REGISTER = 64;
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif
constexpr int PARTS = 64 / REGISTER;  // registers of a vector
constexpr int LANES = 16;             // float32 of a vector

// Call f(0), ..., f(N - 1) with constants. Unlike a loop, this leaves arrays in registers.
template <int N, class F>
INLINE void each(F f) {
    [&]<int... I>(std::integer_sequence<int, I...>) INLINE_LAMBDA {
        (f(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, N>{});
}

template <int I>
constexpr std::integral_constant<int, I> constant{};

// A register of numbers of one type.
template <class T>
struct PartOf {
    typedef T type __attribute__((vector_size(REGISTER)));
};
template <class T>
using Part = typename PartOf<T>::type;

// 64 bytes of numbers of one type.
template <class T>
struct Vector {
    static constexpr int lanes = 64 / sizeof(T);
    Part<T> part[PARTS];
};

using Floats = Vector<float>;
using Ints = Vector<int32_t>;
using Words = Vector<uint32_t>;
using Shorts = Vector<int16_t>;
using HalfWords = Vector<uint16_t>;
using Bytes = Vector<uint8_t>;
using SignedBytes = Vector<int8_t>;

// Loads and stores. Addresses need no alignment.

template <class T>
INLINE T read(const void* address) {
    T value;
    std::memcpy(&value, address, sizeof value);
    return value;
}

template <class T>
INLINE Vector<T> load(const void* address) {
    Vector<T> value;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        value.part[p] = read<Part<T>>((const char*)address + p * REGISTER);
    });
    return value;
}

// Load the first n elements of a vector; the others are 0, and are not read.
template <class T>
INLINE Vector<T> load_first(const void* address, int64_t n) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) {
        __mmask16 first = n < 16 ? (1u << (n > 0 ? n : 0)) - 1 : 0xffff;
        return {(Part<T>)_mm512_maskz_loadu_epi32(first, address)};
    }
#endif
#if defined(__AVX512BW__)
    if constexpr (sizeof(T) == 2) {
        __mmask32 first = n < 32 ? (1u << (n > 0 ? n : 0)) - 1 : 0xffffffff;
        return {(Part<T>)_mm512_maskz_loadu_epi16(first, address)};
    }
#endif
    Vector<T> value{};
    if (n > 0) std::memcpy(&value, address, sizeof(T) * (n < value.lanes ? n : value.lanes));
    return value;
}

template <class T>
INLINE void store(void* address, const Vector<T>& value) {
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        std::memcpy((char*)address + p * REGISTER, &value.part[p], REGISTER);
    });
}

template <class T>
INLINE void store_first(void* address, const Vector<T>& value, int64_t n) {
    if (n > 0) std::memcpy(address, &value, sizeof(T) * (n < value.lanes ? n : value.lanes));
}

INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }
INLINE void prefetch_far(const void* address) { __builtin_prefetch(address, 0, 2); }  // to L2

// A register of equal numbers.
template <class T>
INLINE Part<T> part_of(T value) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, float>) return _mm512_set1_ps(value);
#elif defined(__AVX2__)
    if constexpr (std::is_same_v<T, float>) return _mm256_set1_ps(value);
#else
    if constexpr (std::is_same_v<T, float>) return vdupq_n_f32(value);
#endif
    return value + Part<T>{};
}

// A vector of equal numbers.
template <class T>
INLINE Vector<T> all(T value) {
    Vector<T> result;
    each<PARTS>([&](auto p) INLINE_LAMBDA { result.part[p] = part_of(value); });
    return result;
}

// A vector whose lane i is number(i), a constant.
template <class T, class Number>
INLINE Vector<T> lanes_of(Number number) {
    alignas(64) T values[64 / sizeof(T)];
    each<64 / sizeof(T)>([&](auto i) INLINE_LAMBDA { values[i] = number(i); });
    return load<T>(values);
}

// A register whose first half is one constant, and the second another.
template <class T>
INLINE Part<T> halves_of_part(T first, T second) {
    constexpr int half = REGISTER / sizeof(T) / 2;
    return [&]<int... I>(std::integer_sequence<int, I...>) INLINE_LAMBDA {
        return Part<T>{(I < half ? first : second)...};
    }(std::make_integer_sequence<int, 2 * half>{});
}

// Arithmetic, lane by lane.

#define GREENROOM_OPERATOR(op)                                                          \
    template <class T>                                                                  \
    INLINE Vector<T> operator op(const Vector<T>& a, const Vector<T>& b) {              \
        Vector<T> result;                                                               \
        each<PARTS>([&](auto p) INLINE_LAMBDA { result.part[p] = a.part[p] op b.part[p]; }); \
        return result;                                                                  \
    }                                                                                   \
    template <class T>                                                                  \
    INLINE Vector<T> operator op(const Vector<T>& a, std::type_identity_t<T> b) {       \
        return a op all<T>(b);                                                          \
    }
GREENROOM_OPERATOR(+)
GREENROOM_OPERATOR(-)
GREENROOM_OPERATOR(*)
GREENROOM_OPERATOR(/)
GREENROOM_OPERATOR(&)
GREENROOM_OPERATOR(|)
#undef GREENROOM_OPERATOR

INLINE Floats operator-(const Floats& a) {
    Floats result;
    each<PARTS>([&](auto p) INLINE_LAMBDA { result.part[p] = -a.part[p]; });
    return result;
}

// Shifts by one number of bits for all lanes.
template <class T>
INLINE Vector<T> operator<<(const Vector<T>& a, int bits) {
    Vector<T> result;
    each<PARTS>([&](auto p) INLINE_LAMBDA { result.part[p] = a.part[p] << bits; });
    return result;
}

template <class T>
INLINE Vector<T> operator>>(const Vector<T>& a, int bits) {
    Vector<T> result;
    each<PARTS>([&](auto p) INLINE_LAMBDA { result.part[p] = a.part[p] >> bits; });
    return result;
}

template <class T>
INLINE Vector<T> operator>>(const Vector<T>& a, const Vector<T>& bits) {
    Vector<T> result;
    each<PARTS>([&](auto p) INLINE_LAMBDA { result.part[p] = a.part[p] >> bits.part[p]; });
    return result;
}

// Shift the first half of a vector by A bits and the second by B.
template <int A, int B, class T>
INLINE Vector<T> shift_right(const Vector<T>& a) {
    if constexpr (PARTS == 1) return {a.part[0] >> halves_of_part<T>(A, B)};
    Vector<T> result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        result.part[p] = a.part[p] >> (p < PARTS / 2 ? A : B);
    });
    return result;
}

// Reinterpret a vector's bits.
template <class T, class U>
INLINE Vector<T> as(const Vector<U>& a) {
    Vector<T> result;
    each<PARTS>([&](auto p) INLINE_LAMBDA { result.part[p] = (Part<T>)a.part[p]; });
    return result;
}

// Take a's lanes where the condition holds, else b's. A condition compares lanes: see below.
template <class T, class C>
INLINE Vector<T> choose(const Vector<C>& condition, const Vector<T>& a, const Vector<T>& b) {
    Vector<T> result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        result.part[p] = condition.part[p] ? a.part[p] : b.part[p];
    });
    return result;
}

template <class T>
using Condition = Vector<std::conditional_t<
    sizeof(T) == 4, int32_t, std::conditional_t<sizeof(T) == 2, int16_t, int8_t>>>;

#define GREENROOM_COMPARISON(name, op)                                                         \
    template <class T>                                                                         \
    INLINE Condition<T> name(const Vector<T>& a, const Vector<T>& b) {                         \
        Condition<T> result;                                                                   \
        each<PARTS>([&](auto p) INLINE_LAMBDA { result.part[p] = a.part[p] op b.part[p]; }); \
        return result;                                                                         \
    }                                                                                          \
    template <class T>                                                                         \
    INLINE Condition<T> name(const Vector<T>& a, std::type_identity_t<T> b) {                  \
        return name(a, all<T>(b));                                                             \
    }
GREENROOM_COMPARISON(equal, ==)
GREENROOM_COMPARISON(less, <)
GREENROOM_COMPARISON(greater, >)
#undef GREENROOM_COMPARISON

// Clamp to at most, or at least, a limit; NaN stays.
template <class T>
INLINE Vector<T> at_most(const Vector<T>& a, const Vector<T>& limit) {
    return choose(greater(a, limit), limit, a);
}
template <class T>
INLINE Vector<T> at_least(const Vector<T>& a, const Vector<T>& limit) {
    return choose(less(a, limit), limit, a);
}
template <class T>
INLINE Vector<T> at_most(const Vector<T>& a, std::type_identity_t<T> limit) {
    return at_most(a, all<T>(limit));
}
template <class T>
INLINE Vector<T> at_least(const Vector<T>& a, std::type_identity_t<T> limit) {
    return at_least(a, all<T>(limit));
}

// a * b + c with one rounding.
INLINE Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    Floats result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
#if defined(__AVX512F__)
        result.part[p] = _mm512_fmadd_ps(a.part[p], b.part[p], c.part[p]);
#elif defined(__AVX2__)
        result.part[p] = _mm256_fmadd_ps(a.part[p], b.part[p], c.part[p]);
#else
        result.part[p] = vfmaq_f32(c.part[p], a.part[p], b.part[p]);
#endif
    });
    return result;
}

}  // namespace greenroom
