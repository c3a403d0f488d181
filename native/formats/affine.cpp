// Affine encodings: integer codes in groups, a scale and a zero for each group of a row.
//
// A weight is scale * (code - zero), rounded to the type of the scales.
// runtime/encodings/affine.py has the layouts. A group has 32 inputs or more.
#include "decoding.hpp"
#include "product.hpp"
#include "scales.hpp"

namespace greenroom {
namespace {

enum Kind { SYMMETRIC, AFFINE, INDEXED };

// 16 numbers as float32, of which `left` exist.
template <class N>
INLINE Floats sixteen(const N* numbers, int64_t left) {
    if constexpr (sizeof(N) > 1) {
        return left < LANES ? load_first_as_floats(numbers, left) : load_as_floats(numbers);
    } else {
        if (left >= LANES) return to_floats(load_ints<N>(numbers));
        N first[LANES] = {};
        std::memcpy(first, numbers, left);
        return to_floats(load_ints<N>(first));
    }
}

template <class N>
INLINE float single(N number) {
    if constexpr (sizeof(N) > 1) return to_float(number);
    else return (float)number;
}

// Two float32 in 64 bits.
INLINE uint64_t pair(float first, float second) {
    return std::bit_cast<uint32_t>(first) | (uint64_t)std::bit_cast<uint32_t>(second) << 32;
}

// The lanes of two vectors, taken in turn.
INLINE Weights interleaved(const Floats& a, const Floats& b) {
#if defined(__AVX512F__)
    __m512i low = (__m512i)lanes_of<int32_t>([](int i) { return i / 2 + i % 2 * 16; }).part[0];
    __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    return {{{(Part<float>)_mm512_permutex2var_ps(a.part[0], low, b.part[0])},
             {(Part<float>)_mm512_permutex2var_ps(a.part[0], high, b.part[0])}}};
#else
    Weights result;
    each<PARTS>([&](auto p) INLINE_LAMBDA {
        constexpr int at = 2 * p % PARTS;
        Floats& out = result.part[2 * p / PARTS];
#if defined(__AVX2__)
        __m256 low = _mm256_unpacklo_ps(a.part[p], b.part[p]);
        __m256 high = _mm256_unpackhi_ps(a.part[p], b.part[p]);
        out.part[at] = (Part<float>)_mm256_permute2f128_ps(low, high, 0x20);
        out.part[at + 1] = (Part<float>)_mm256_permute2f128_ps(low, high, 0x31);
#else
        out.part[at] = vzip1q_f32(a.part[p], b.part[p]);
        out.part[at + 1] = vzip2q_f32(a.part[p], b.part[p]);
#endif
    });
    return result;
#endif
}

// Write a scale and a zero for each 32 inputs, side by side. The row has one of each for
// `groups_per_scale` times 32. A store may write up to 14 lanes too many; the next one writes over
// them.
template <class Scale, class Zero>
INLINE void put_pairs(const Row& row) {
    const Scale* scales = (const Scale*)row.scale;
    const Zero* zeros = (const Zero*)row.zero;
    int64_t groups = row.inputs >> 5, share = row.groups_per_scale;
    if (share == 1)
        return prepare_in_vectors(groups, [&](int64_t at, int64_t left) INLINE_LAMBDA {
            Weights both = interleaved(sixteen(scales + at, left), sixteen(zeros + at, left));
            store(row.ready + 2 * at, both.part[0]);
            store(row.ready + 2 * at + LANES, both.part[1]);
        });
    for (int64_t start = 0; start < groups; start += share) {
        Floats pairs = as<float>(all(pair(single(*scales++), single(*zeros++))));
        int64_t end = start + share < groups ? start + share : groups;
        for (int64_t at = start; at < end; at += LANES / 2) store(row.ready + 2 * at, pairs);
    }
}

// Write a scale for each 32 inputs.
template <class Scale>
INLINE void put_scales(const Row& row) {
    if (row.groups_per_scale != 1) return prepare_repeated<Scale>(row);
    prepare_contiguous<Scale>(row, 5, [](const uint8_t* place) INLINE_LAMBDA {
        return load_as_floats((const Scale*)place);
    });
}

// BITS: 4 or 8. Code: type of zeros and, if they have 8 bits, of codes.
template <Kind KIND, int BITS, class Code, class Scale>
struct Affine {
    static constexpr int block_inputs = 8 / BITS, block_bytes = 1;

    INLINE static void prepare(const Row& row) {
        if constexpr (KIND == SYMMETRIC) put_scales<Scale>(row);
        if constexpr (KIND == AFFINE) put_pairs<Scale, Code>(row);
        if constexpr (KIND == INDEXED)
            for (int64_t n = 0; n < (row.inputs >> 5) / row.groups_per_scale; n++) {
                row.ready[2 * n] = to_float(((const Scale*)row.scale)[n]);
                row.ready[2 * n + 1] = (float)((const Code*)row.zero)[n];
            }
    }

    // Load 32 codes; those of four bits have other bits above them.
    INLINE static Codes codes(const Row& row, int64_t at) {
        if constexpr (BITS == 4) return codes_of_neighbours(row.codes + (at >> 1));
        else return {{load_ints<Code>(row.codes + at), load_ints<Code>(row.codes + at + LANES)}};
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        if constexpr (KIND == INDEXED)
            return by_index(
                codes(row, at), row.ready, row.group + 4 * at, (row.inputs >> 5) - 1);
        constexpr float middle = std::is_signed_v<Code> ? 0 : 1 << (BITS - 1);
        const float* ready = row.ready + (at >> 5) * (KIND == AFFINE ? 2 : 1);
        Floats scale = all(ready[0]), zero = all(KIND == AFFINE ? ready[1] : middle);
        auto weight = [&](const Floats& code) INLINE_LAMBDA {
            return rounded_weight<Scale>(scale * (code - zero));
        };
        Codes found = codes(row, at);
        if constexpr (BITS == 4) return decode_four_bits(found, weight);
        else return weights_of(weight(to_floats(found.part[0])),
                                       weight(to_floats(found.part[1])));
    }

    // Decode weights whose inputs are in `groups` in any order. A group that does not exist is read
    // as one within the row's scales, up to `last`. The function is long, and a call takes little.
    [[gnu::noinline]] static Weights by_index(
        Codes found, const float* ready, const uint8_t* groups, uint32_t last) {
        Weights weights;
        each<2>([&](auto n) INLINE_LAMBDA {
            alignas(64) uint32_t index[LANES];
            store(index, at_most(load<uint32_t>(groups + 64 * n), last));
            Floats code = to_floats(BITS == 4 ? found.part[n] & 15 : found.part[n]);
            Pairs both = pairs(pairs_at(ready, index), pairs_at(ready, index + 8));
            Floats weight = both.first * (code - both.second);
            weights.part[n] = rounded_weight<Scale>(weight);
        });
        return weights;
    }

    // Load eight pairs. Instructions that gather take longer on processors that mitigate their side
    // channels.
    INLINE static Floats pairs_at(const float* numbers, const uint32_t* index) {
        Vector<uint64_t> result;
        each<PARTS>([&](auto p) INLINE_LAMBDA {
            constexpr int lanes = 8 / PARTS;
            result.part[p] = [&]<int... I>(std::integer_sequence<int, I...>) INLINE_LAMBDA {
                return Part<uint64_t>{
                    read<uint64_t>(numbers + 2 * (uint64_t)index[p * lanes + I])...};
            }(std::make_integer_sequence<int, lanes>{});
        });
        return as<float>(result);
    }
};

template <class S> using Symmetric4 = Affine<SYMMETRIC, 4, uint8_t, S>;
template <class S> using Symmetric8 = Affine<SYMMETRIC, 8, uint8_t, S>;
template <class S> using SignedSymmetric8 = Affine<SYMMETRIC, 8, int8_t, S>;
template <class S> using Affine4 = Affine<AFFINE, 4, uint8_t, S>;
template <class S> using Affine8 = Affine<AFFINE, 8, uint8_t, S>;
template <class S> using SignedAffine8 = Affine<AFFINE, 8, int8_t, S>;
template <class S> using Indexed4 = Affine<INDEXED, 4, uint8_t, S>;
template <class S> using Indexed8 = Affine<INDEXED, 8, uint8_t, S>;
template <class S> using SignedIndexed8 = Affine<INDEXED, 8, int8_t, S>;

}  // namespace
}  // namespace greenroom

// The names of types are those of torch.
using bfloat16 = greenroom::BFloat16;
using float16 = greenroom::Float16;
using float32 = float;

FORMAT(symmetric4_float32, greenroom::Symmetric4<float32>)
FORMAT(symmetric4_bfloat16, greenroom::Symmetric4<bfloat16>)
FORMAT(symmetric4_float16, greenroom::Symmetric4<float16>)
FORMAT(symmetric8_float32, greenroom::Symmetric8<float32>)
FORMAT(symmetric8_bfloat16, greenroom::Symmetric8<bfloat16>)
FORMAT(symmetric8_float16, greenroom::Symmetric8<float16>)
FORMAT(symmetric8_int8_float32, greenroom::SignedSymmetric8<float32>)
FORMAT(symmetric8_int8_bfloat16, greenroom::SignedSymmetric8<bfloat16>)
FORMAT(symmetric8_int8_float16, greenroom::SignedSymmetric8<float16>)
FORMAT(affine4_float32, greenroom::Affine4<float32>)
FORMAT(affine4_bfloat16, greenroom::Affine4<bfloat16>)
FORMAT(affine4_float16, greenroom::Affine4<float16>)
FORMAT(affine8_float32, greenroom::Affine8<float32>)
FORMAT(affine8_bfloat16, greenroom::Affine8<bfloat16>)
FORMAT(affine8_float16, greenroom::Affine8<float16>)
FORMAT(affine8_int8_float32, greenroom::SignedAffine8<float32>)
FORMAT(affine8_int8_bfloat16, greenroom::SignedAffine8<bfloat16>)
FORMAT(affine8_int8_float16, greenroom::SignedAffine8<float16>)
FORMAT(indexed4_float32, greenroom::Indexed4<float32>)
FORMAT(indexed4_bfloat16, greenroom::Indexed4<bfloat16>)
FORMAT(indexed4_float16, greenroom::Indexed4<float16>)
FORMAT(indexed8_float32, greenroom::Indexed8<float32>)
FORMAT(indexed8_bfloat16, greenroom::Indexed8<bfloat16>)
FORMAT(indexed8_float16, greenroom::Indexed8<float16>)
FORMAT(indexed8_int8_float32, greenroom::SignedIndexed8<float32>)
FORMAT(indexed8_int8_bfloat16, greenroom::SignedIndexed8<bfloat16>)
FORMAT(indexed8_int8_float16, greenroom::SignedIndexed8<float16>)
