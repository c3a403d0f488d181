// Codes of 16 rows: lane i of a vector has four codes of row i.
#pragma once

#include "loads.hpp"

namespace greenroom {

// Codes of 4, or of 32, inputs of 16 rows: part q has inputs 4 q to 4 q + 3 of row i in lane i.
struct FourQuads {
    Bytes part[4];
};
struct Quads {
    Bytes part[8];
};

// Load 16 bytes of each row; row(i) is the address of those of row i.
template <class RowAt>
INLINE FourQuads transposed(RowAt row) {
    auto rows = [&](int i) INLINE_LAMBDA {
        return four_quarters<uint32_t>(row(i), row(4 + i), row(8 + i), row(12 + i));
    };
    Words a = rows(0), b = rows(1), c = rows(2), d = rows(3);
    FourQuads result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        auto put = [&](int i, auto part) INLINE_LAMBDA {
            result.part[i].part[p] = (Part<uint8_t>)part;
        };
#if defined(__AVX512F__)
        __m512i w = (__m512i)a.part[p], x = (__m512i)b.part[p];
        __m512i y = (__m512i)c.part[p], z = (__m512i)d.part[p];
        __m512i wx = _mm512_unpacklo_epi32(w, x), xw = _mm512_unpackhi_epi32(w, x);
        __m512i yz = _mm512_unpacklo_epi32(y, z), zy = _mm512_unpackhi_epi32(y, z);
        put(0, _mm512_unpacklo_epi64(wx, yz));
        put(1, _mm512_unpackhi_epi64(wx, yz));
        put(2, _mm512_unpacklo_epi64(xw, zy));
        put(3, _mm512_unpackhi_epi64(xw, zy));
#elif defined(__AVX2__)
        __m256i w = (__m256i)a.part[p], x = (__m256i)b.part[p];
        __m256i y = (__m256i)c.part[p], z = (__m256i)d.part[p];
        __m256i wx = _mm256_unpacklo_epi32(w, x), xw = _mm256_unpackhi_epi32(w, x);
        __m256i yz = _mm256_unpacklo_epi32(y, z), zy = _mm256_unpackhi_epi32(y, z);
        put(0, _mm256_unpacklo_epi64(wx, yz));
        put(1, _mm256_unpackhi_epi64(wx, yz));
        put(2, _mm256_unpacklo_epi64(xw, zy));
        put(3, _mm256_unpackhi_epi64(xw, zy));
#else
        auto both = [](auto first, auto second) INLINE_LAMBDA {
            struct {
                uint64x2_t low, high;
            } result{(uint64x2_t)vzip1q_u32(first, second), (uint64x2_t)vzip2q_u32(first, second)};
            return result;
        };
        auto wx = both((uint32x4_t)a.part[p], (uint32x4_t)b.part[p]);
        auto yz = both((uint32x4_t)c.part[p], (uint32x4_t)d.part[p]);
        put(0, vzip1q_u64(wx.low, yz.low));
        put(1, vzip2q_u64(wx.low, yz.low));
        put(2, vzip1q_u64(wx.high, yz.high));
        put(3, vzip2q_u64(wx.high, yz.high));
#endif
    });
    return result;
}

// The same for rows that lie `step` bytes apart.
INLINE FourQuads transposed(const uint8_t* first, int64_t step) {
    return transposed([=](int i) INLINE_LAMBDA { return first + i * step; });
}

INLINE Words words(const FourQuads& quads, int i) { return as<uint32_t>(quads.part[i]); }

// The low, or the high, four bits of each byte.
INLINE Bytes low_bits(const Bytes& a) { return a & 15; }
INLINE Bytes high_bits(const Bytes& a) { return as<uint8_t>(as<uint16_t>(a) >> 4) & 15; }

// 16 bytes with codes i in their low and i + 16 in their high bits.
INLINE Quads quads_in_halves(const FourQuads& raw) {
    Quads codes;
    each<4>([&](auto q) INLINE_LAMBDA {
        codes.part[q] = low_bits(raw.part[q]);
        codes.part[4 + q] = high_bits(raw.part[q]);
    });
    return codes;
}

INLINE Quads looked_up(const uint8_t (&table)[16], const Quads& codes) {
    Quads result;
    each<8>([&](auto q) INLINE_LAMBDA { result.part[q] = look_up(table, codes.part[q]); });
    return result;
}

// 32 signed bytes, plus 128.
INLINE Quads shifted_bytes(const FourQuads& low, const FourQuads& high) {
    Quads codes;
    each<4>([&](auto q) INLINE_LAMBDA {
        codes.part[q] = low.part[q] + (uint8_t)128;
        codes.part[4 + q] = high.part[q] + (uint8_t)128;
    });
    return codes;
}

// 16 bytes with two neighbours each.
INLINE Quads quads_of_neighbours(const FourQuads& raw) {
    Quads codes;
    each<4>([&](auto q) INLINE_LAMBDA {
        each<2>([&](auto half) INLINE_LAMBDA {
            Words pair = (words(raw, q) >> 16 * half) & 0xffff;
            Words apart = (pair | pair << 8) & 0x00ff00ff;  // bytes 0 and 1, in bytes 0 and 2
            codes.part[2 * q + half] =
                as<uint8_t>((apart & 0x000f000f) | ((apart << 4) & 0x0f000f00));
        });
    });
    return codes;
}

// A number of type N of each row.
template <class N>
INLINE Words gather(const uint8_t* address, int64_t step) {
    alignas(64) uint32_t numbers[LANES];
    for (int i = 0; i < LANES; i++) numbers[i] = read<N>(address + i * step);
    return load<uint32_t>(numbers);
}

// Codes of 64 inputs: 32 bytes with codes i in their low and i + 32 in their high bits.
struct QuadsOfTwo {
    Quads low, high;
};
INLINE QuadsOfTwo quads_of_two(const Quads& bytes) {
    QuadsOfTwo codes;
    each<8>([&](auto q) INLINE_LAMBDA {
        codes.low.part[q] = low_bits(bytes.part[q]);
        codes.high.part[q] = high_bits(bytes.part[q]);
    });
    return codes;
}

// Bits of all bytes, moved to the right (to the left, if `shift` is negative) and masked.
INLINE Quads bits_of(const Quads& bytes, int shift, uint8_t mask) {
    Quads bits;
    each<8>([&](auto q) INLINE_LAMBDA {
        HalfWords raw = as<uint16_t>(bytes.part[q]);
        bits.part[q] = as<uint8_t>(shift < 0 ? raw << -shift : raw >> shift) & mask;
    });
    return bits;
}
INLINE Quads operator|(const Quads& a, const Quads& b) {
    Quads both;
    each<8>([&](auto q) INLINE_LAMBDA { both.part[q] = a.part[q] | b.part[q]; });
    return both;
}

}  // namespace greenroom
