// Quantised keys and values: a head's key or value of one token is a row of blocks of 32 numbers.
//
// A block begins with a scale (int8), or a scale and an offset (int4), in bfloat16; its codes
// follow. A number is code * scale + offset. Numbers of a row's last block that do not exist have
// any code. A block with NaN or infinity has scale NaN.
#pragma once

#include "arguments.hpp"
#include "formulas.hpp"
#include "region.hpp"
#include "shapes.hpp"

namespace greenroom {

// How keys and values are stored: in the model's type, or quantised (FORMATS in dense/kv_rows.py).
enum KeyValueFormat : int64_t { AS_COMPUTED, INT8, INT4 };

// Rows of keys or values, [heads, tokens, width]: from the model's type to a quantised format, or
// back. Steps are in bytes.
SHARED(KeyValueCall,
    int64_t cursor;
    const void* source;
    int64_t source_head;   // from head to head
    int64_t source_token;  // from token to token
    void* target;
    int64_t target_head;
    int64_t target_token;
    int64_t heads;
    int64_t tokens;
    int64_t width;
    int64_t format;        // KeyValueFormat
)

constexpr int64_t KV_BLOCK = 32;  // numbers that share a scale

template <int64_t FORMAT>
constexpr int64_t kv_block_bytes = FORMAT == INT8 ? 2 + 32 : 4 + 16;

template <int64_t FORMAT>
INLINE int64_t row_bytes(int64_t width) {
    return (width + KV_BLOCK - 1) / KV_BLOCK * kv_block_bytes<FORMAT>;
}

// Call f(constant) with the format as a constant; it must be a quantised one.
template <class F>
INLINE void with_format(int64_t format, F f) {
    if (format == INT8) f(std::integral_constant<int64_t, INT8>{});
    else f(std::integral_constant<int64_t, INT4>{});
}

// The codes from `low` to `high` that are nearest to numbers, as bytes in 32-bit lanes.
INLINE Ints nearest_codes(const Floats& numbers, float low, float high) {
    Floats clamped = at_most(at_least(numbers, low), high);
    return as<int32_t>(clamped + 12582912.0f) & 0xff;  // rounds to an integer, in the low bits
}

INLINE void store_bytes(uint8_t* out, const Ints& codes) {
    typedef uint8_t Narrow __attribute__((vector_size(REGISTER / 4)));
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        Narrow part = __builtin_convertvector(codes.part[p], Narrow);
        std::memcpy(out + p * sizeof part, &part, sizeof part);
    });
}

// The smallest or the largest lane of a vector without NaN.
INLINE float extreme_lane(const Floats& a, bool largest) {
    alignas(64) float lanes[LANES];
    store(lanes, a);
    float best = lanes[0];
    for (int i = 1; i < LANES; i++)
        best = (largest ? lanes[i] > best : lanes[i] < best) ? lanes[i] : best;
    return best;
}

// Quantise the 32 numbers of a block.
template <int64_t FORMAT>
INLINE void pack_block(const float* x, uint8_t* out) {
    const Floats a = load<float>(x), b = load<float>(x + LANES);
    const float fault = lane_sum(a * 0.0f + b * 0.0f);  // 0, or NaN
    float low = 0, span;
    if constexpr (FORMAT == INT8) {
        span = extreme_lane(at_least(at_least(a, -a), at_least(b, -b)), true) / 127;
    } else {
        low = extreme_lane(at_most(a, b), false) + 0.0f;  // never -0
        low = to_float(from_float<BFloat16>(low));
        span = (extreme_lane(at_least(a, b), true) - low) / 15;
    }
    const BFloat16 scale = from_float<BFloat16>(span + fault);
    const float wide = to_float(scale), inverse = wide > 0 ? 1 / wide : 0;
    std::memcpy(out, &scale, 2);
    if constexpr (FORMAT == INT8) {
        store_bytes(out + 2, nearest_codes(a * inverse, -127, 127));
        store_bytes(out + 2 + LANES, nearest_codes(b * inverse, -127, 127));
    } else {
        const BFloat16 offset = from_float<BFloat16>(low);
        std::memcpy(out + 2, &offset, 2);
        const Ints first = nearest_codes((a + -low) * inverse, 0, 15);
        const Ints second = nearest_codes((b + -low) * inverse, 0, 15);
        store_bytes(out + 4, first | (second << 4));
    }
}

// Decode the 32 numbers of a block.
template <int64_t FORMAT, class T>
INLINE void expand_block(const uint8_t* block, T* out) {
    const Floats scale = all(to_float(read<BFloat16>(block)));
    if constexpr (FORMAT == INT8) {
        each<2>([&](auto half) INLINE_LAMBDA {
            Ints codes = load_ints<int8_t>(block + 2 + half * LANES);
            store_rounded(out + half * LANES, to_floats(codes) * scale);
        });
    } else {
        const Floats offset = all(to_float(read<BFloat16>(block + 2)));
        const Ints codes = load_ints<uint8_t>(block + 4);
        store_rounded(out, fma(to_floats(codes & 15), scale, offset));
        store_rounded(out + LANES, fma(to_floats(codes >> 4), scale, offset));
    }
}

// Quantise a row of `width` numbers.
template <int64_t FORMAT, class T>
INLINE void pack_row_of(const T* x, int64_t width, uint8_t* out) {
    float block[KV_BLOCK];
    for (int64_t at = 0; at < width; at += KV_BLOCK, out += kv_block_bytes<FORMAT>) {
        const int64_t n = width - at < KV_BLOCK ? width - at : KV_BLOCK;
        widen(x + at, n, block);
        for (int64_t i = n; i < KV_BLOCK; i++) block[i] = block[0];
        pack_block<FORMAT>(block, out);
    }
}

// Decode a row of `width` numbers.
template <int64_t FORMAT, class T>
INLINE void expand_row(const uint8_t* row, int64_t width, T* out) {
    int64_t at = 0;
    for (; at + KV_BLOCK <= width; at += KV_BLOCK, row += kv_block_bytes<FORMAT>)
        expand_block<FORMAT>(row, out + at);
    if (at < width) {
        T block[KV_BLOCK];
        expand_block<FORMAT>(row, block);
        std::memcpy(out + at, block, sizeof(T) * (width - at));
    }
}

}  // namespace greenroom
