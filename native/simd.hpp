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
INLINE Vector<T> shift_left(const Vector<T>& a) {
    if constexpr (PARTS == 1) return {a.part[0] << halves_of_part<T>(A, B)};
    Vector<T> result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        result.part[p] = a.part[p] << (p < PARTS / 2 ? A : B);
    });
    return result;
}
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

// Conversions.

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

// Shapes.

// The vector whose two halves are 32 bytes at an address.
template <class T>
INLINE Vector<T> load_twice(const void* address) {
#if defined(__AVX512F__)
    return as<T>(Vector<int64_t>{(Part<int64_t>)_mm512_broadcast_i64x4(read<__m256i>(address))});
#else
    Vector<T> result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        result.part[p] = read<Part<T>>((const char*)address + (p % (PARTS / 2)) * REGISTER);
    });
    return result;
#endif
}

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

// The vector whose lane i is numbers[index(i)], for 4, 8 or 16 numbers in memory and a constant
// function.
template <int COUNT = 16, class Index>
INLINE Floats spread(const float* numbers, Index index) {
    Floats result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        constexpr int lanes = REGISTER / 4, first = p * lanes;
        constexpr bool equal = []<int... I>(std::integer_sequence<int, I...>) {
            return ((Index{}(first + I) == Index{}(first)) && ...);
        }(std::make_integer_sequence<int, lanes>{});
        if constexpr (equal) {
            result.part[p] = part_of(numbers[index(first)]);
        } else {
            constexpr auto all_lanes = std::make_integer_sequence<int, lanes>{};
            [[maybe_unused]] auto picks = [&]<int... I>(std::integer_sequence<int, I...>) {
                return Part<int32_t>{index(first + I)...};
            }(all_lanes);
            [[maybe_unused]] auto one_by_one = [&] {
                return [&]<int... I>(std::integer_sequence<int, I...>) {
                    return Part<float>{numbers[index(first + I)]...};
                }(all_lanes);
            };
#if defined(__AVX512F__)
            if constexpr (COUNT == 4)
                result.part[p] = _mm512_permutevar_ps(
                    _mm512_broadcast_f32x4(read<__m128>(numbers)), (__m512i)picks);
            else if constexpr (COUNT == 8)
                result.part[p] = _mm512_permutexvar_ps(
                    (__m512i)picks, _mm512_castps256_ps512(read<__m256>(numbers)));
            else
                result.part[p] = _mm512_permutexvar_ps((__m512i)picks, read<__m512>(numbers));
#elif defined(__AVX2__)
            if constexpr (COUNT == 4)
                result.part[p] = _mm256_permutevar_ps(
                    _mm256_broadcast_ps((const __m128*)numbers), (__m256i)picks);
            else if constexpr (COUNT == 8)
                result.part[p] =
                    _mm256_permutevar8x32_ps(read<__m256>(numbers), (__m256i)picks);
            else
                result.part[p] = one_by_one();
#else
            result.part[p] = one_by_one();
#endif
        }
    });
    return result;
}

// The vector of eight numbers in memory and eight times another number.
INLINE Floats joined(const float* first, float second) {
#if defined(__AVX512F__)
    return {(Part<float>)_mm512_insertf32x8(
        _mm512_set1_ps(second), read<__m256>(first), 0)};
#else
    Floats result = all(second);
    std::memcpy(&result, first, 32);
    return result;
#endif
}

// The vector that repeats four numbers in memory.
INLINE Floats repeat_four(const float* numbers) {
#if defined(__AVX512F__)
    return {(Part<float>)_mm512_broadcast_f32x4(read<__m128>(numbers))};
#else
    Floats result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
#if defined(__AVX2__)
        result.part[p] = _mm256_broadcast_ps((const __m128*)numbers);
#else
        result.part[p] = vld1q_f32(numbers);
#endif
    });
    return result;
#endif
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

// Sum the lanes of four vectors, each in the order of `lane_sum`, in fewer instructions.
INLINE FourFloats lane_sums(const Floats& a, const Floats& b, const Floats& c, const Floats& d) {
#if defined(__x86_64__)
#if defined(__AVX512F__)
    auto eight = [](const Floats& v, const Floats& w) INLINE_LAMBDA {
        return _mm512_add_ps(_mm512_shuffle_f32x4(v.part[0], w.part[0], 0x44),
                             _mm512_shuffle_f32x4(v.part[0], w.part[0], 0xee));
    };
    __m512 ab = eight(a, b), cd = eight(c, d);
    __m512 four = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88),
                                _mm512_shuffle_f32x4(ab, cd, 0xdd));  // a, b, c, d
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

// Sum the lanes of each half of a vector in the same way.
struct TwoSums {
    float first, second;
};
INLINE TwoSums half_sums(const Floats& a) {
    alignas(64) float lane[LANES];
    store(lane, a);
    auto four = [&](int i) { return (lane[i] + lane[i + 4]) + (lane[i + 2] + lane[i + 6]); };
    return {four(0) + four(1), four(8) + four(9)};
}

// The same for four vectors.
struct FourTwoSums {
    FourFloats first, second;
};
INLINE FourTwoSums half_sums(
    const Floats& a, const Floats& b, const Floats& c, const Floats& d) {
#if defined(__AVX512F__)
    auto four = [](const Floats& v, const Floats& w) INLINE_LAMBDA {
        return _mm512_add_ps(_mm512_shuffle_f32x4(v.part[0], w.part[0], 0x88),
                             _mm512_shuffle_f32x4(v.part[0], w.part[0], 0xdd));
    };
    __m512 ab = four(a, b), cd = four(c, d);
    __m512 two = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m512 one = _mm512_add_ps(_mm512_shuffle_ps(two, two, 0x88),
                               _mm512_shuffle_ps(two, two, 0xdd));
    auto quarter = [&](auto i) INLINE_LAMBDA { return _mm512_extractf32x4_ps(one, i); };
    return {(FourFloats)_mm_unpacklo_ps(quarter(constant<0>), quarter(constant<2>)),
            (FourFloats)_mm_unpacklo_ps(quarter(constant<1>), quarter(constant<3>))};
#elif defined(__AVX2__)
    auto sums = [&](auto p) INLINE_LAMBDA {
        auto four = [](__m256 x, __m256 y) INLINE_LAMBDA {
            return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20),
                                 _mm256_permute2f128_ps(x, y, 0x31));
        };
        __m256 ab = four(a.part[p], b.part[p]), cd = four(c.part[p], d.part[p]);
        __m256 two = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44),
                                   _mm256_shuffle_ps(ab, cd, 0xee));
        __m256 one = _mm256_add_ps(_mm256_shuffle_ps(two, two, 0x88),
                                   _mm256_shuffle_ps(two, two, 0xdd));
        return (FourFloats)_mm_unpacklo_ps(_mm256_castps256_ps128(one),
                                           _mm256_extractf128_ps(one, 1));
    };
    return {sums(constant<0>), sums(constant<1>)};
#else
    TwoSums all[4] = {half_sums(a), half_sums(b), half_sums(c), half_sums(d)};
    return {{all[0].first, all[1].first, all[2].first, all[3].first},
            {all[0].second, all[1].second, all[2].second, all[3].second}};
#endif
}

// Products of integers.

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

// Add to lane i the products of 16-bit integers 2 i and 2 i + 1.
INLINE Ints dot_shorts(Ints total, const Shorts& codes, const Shorts& x) {
    each<PARTS>([&](auto p) INLINE_LAMBDA {
#if defined(__AVX512VNNI__)
        total.part[p] = (Part<int32_t>)_mm512_dpwssd_epi32(
            (__m512i)total.part[p], (__m512i)codes.part[p], (__m512i)x.part[p]);
#elif defined(__AVX2__)
        total.part[p] +=
            (Part<int32_t>)_mm256_madd_epi16((__m256i)codes.part[p], (__m256i)x.part[p]);
#else
        int16x8_t c = (int16x8_t)codes.part[p], v = (int16x8_t)x.part[p];
        total.part[p] += (Part<int32_t>)vpaddq_s32(
            vmull_s16(vget_low_s16(c), vget_low_s16(v)),
            vmull_s16(vget_high_s16(c), vget_high_s16(v)));
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

// The same with a total of 0, in one instruction.
INLINE Ints dot_shorts(const Shorts& codes, const Shorts& x) {
#if defined(__AVX512BW__)
    return {(Part<int32_t>)_mm512_madd_epi16((__m512i)codes.part[0], (__m512i)x.part[0])};
#else
    return dot_shorts(Ints{}, codes, x);
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
