// Formulas over rows of numbers, a vector at a time.
#pragma once

#include <cmath>

#include "numbers.hpp"

namespace greenroom {

// Call step(at, left) for each vector of a row of n numbers; `left` of its lanes exist.
template <class Step>
INLINE void over_row(int64_t n, Step step) {
    int64_t at = 0;
    for (; at + LANES <= n; at += LANES) step(at, LANES);
    if (at < n) step(at, n - at);
}

// Load and store a vector of a row, of which `left` lanes exist.
template <class T>
INLINE Floats get(const T* row, int64_t at, int64_t left) {
    return left >= LANES ? load_as_floats(row + at) : load_first_as_floats(row + at, left);
}
template <class T>
INLINE void put(T* row, int64_t at, int64_t left, const Floats& value) {
    if (left >= LANES) store_rounded(row + at, value);
    else store_first_rounded(row + at, value, left);
}

// The exponential function within about 1 ulp (polynomial of Cephes); above 88.7228, infinity.
INLINE Floats exponential(const Floats& x) {
    Floats y = at_most(at_least(x, -87.0f), 88.72f);
    Floats shifted = y * 1.44269504088896341f + 12582912.0f;
    Floats n = shifted - 12582912.0f;
    Floats r = y - n * 0.693359375f - n * -2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // 2^n in two factors: n may be 128. The integer n sits in the low bits of `shifted`.
    Floats scale = as<float>((as<int32_t>(shifted) << 23) + 0x3f000000);
    return choose(greater(x, 88.7228f), all(std::numeric_limits<float>::infinity()),
                  p * scale * 2.0f);
}

// Convert a row to float32.
template <class T>
INLINE void widen(const T* x, int64_t n, float* out) {
    over_row(n, [&](int64_t at, int64_t left) INLINE_LAMBDA {
        put(out, at, left, get(x, at, left));
    });
}

// Compute a row's softmax numerators out[:n] = exp(scale * (x - max(x))), and return their sum.
//
// The sum is NaN if a number is NaN or if the largest number is infinite.
template <class T>
INLINE float exponentials(const T* x, int64_t n, float scale, float* out) {
    Floats lowest = all(-std::numeric_limits<float>::infinity()), top = lowest, total{};
    Ints lane = lanes_of<int32_t>([](int i) { return i; });
    auto existing = [&](const Floats& value, int64_t left, const Floats& other) INLINE_LAMBDA {
        return left >= LANES ? value : choose(less(lane, (int32_t)left), value, other);
    };
    over_row(n, [&](int64_t at, int64_t left) INLINE_LAMBDA {
        top = at_least(top, existing(get(x, at, left), left, lowest));
    });
    float lanes[LANES], largest = lanes[0];
    store(lanes, top);
    largest = lanes[0];
    for (int i = 1; i < LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    over_row(n, [&](int64_t at, int64_t left) INLINE_LAMBDA {
        Floats value = exponential((get(x, at, left) - all(largest)) * all(scale));
        put(out, at, left, value);
        total = total + existing(value, left, Floats{});
    });
    return lane_sum(total);
}

}  // namespace greenroom
