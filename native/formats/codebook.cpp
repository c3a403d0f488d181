// GGUF encodings that store runs of weights as indices into a codebook, and tq2_0.
//
// Entries are small integers, so a weight is an integer times a float32 scale, exact until it is
// rounded to the model's type. runtime/encodings/ggml/codebook.py has the layouts.
#include "codebooks.hpp"
#include "product.hpp"

namespace greenroom {
namespace {

typedef int8_t Sixteen __attribute__((vector_size(16)));  // weights before their scale
typedef uint64_t Runs __attribute__((vector_size(16)));   // two runs of 8 weights
typedef uint32_t Four __attribute__((vector_size(16)));     // four runs of 4 weights, or indices
typedef uint32_t Eight __attribute__((vector_size(32)));
typedef int32_t EightInts __attribute__((vector_size(32)));
typedef float EightFloats __attribute__((vector_size(32)));

constexpr int IQ2_VALUES[] = {8, 25, 43};
constexpr int IQ1_VALUES[] = {-8, 0, 8};  // eight times the codebook's
constexpr int IQ3_XXS_VALUES[] = {4, 12, 20, 28, 36, 44, 52, 62};
constexpr int IQ3_S_VALUES[] = {1, 3, 5, 7, 9, 11, 13, 15};
constexpr auto IQ2_XXS_GRID = codebook<uint64_t>(IQ2_XXS, IQ2_VALUES);
constexpr auto IQ2_XS_GRID = codebook<uint64_t>(IQ2_XS, IQ2_VALUES);
constexpr auto IQ2_S_GRID = codebook<uint64_t>(IQ2_S, IQ2_VALUES);
constexpr auto IQ3_XXS_GRID = codebook<uint32_t>(IQ3_XXS, IQ3_XXS_VALUES);
constexpr auto IQ3_S_GRID = codebook<uint32_t>(IQ3_S, IQ3_S_VALUES);
constexpr auto IQ1_GRID = codebook<uint64_t>(IQ1, IQ1_VALUES);

// The bytes of a run that are negative, by the bits of a field of signs.
constexpr std::array<uint64_t, 256> negative_bytes() {
    std::array<uint64_t, 256> masks{};
    for (int field = 0; field < 256; field++)
        for (int i = 0; i < 8; i++)
            if (field >> i & 1) masks[field] |= (uint64_t)0xff << 8 * i;
    return masks;
}
constexpr auto SIGNS = negative_bytes();

// The same for fields of seven bits: the eighth is set if an odd number of others is.
constexpr std::array<uint64_t, 128> negative_bytes_of_seven() {
    std::array<uint64_t, 128> masks{};
    for (unsigned field = 0; field < 128; field++)
        masks[field] = SIGNS[field | (std::popcount(field) & 1) << 7];
    return masks;
}
constexpr auto SEVEN_SIGNS = negative_bytes_of_seven();

INLINE Sixteen negated(const Sixteen& weights, const Runs& negative) {
    return (weights ^ (Sixteen)negative) - (Sixteen)negative;
}

// Negate weights whose bit in two bytes of signs is set.
INLINE Sixteen with_signs(const Sixteen& weights, const uint8_t* signs) {
#if defined(__AVX512BW__)
    return (Sixteen)_mm_mask_sub_epi8((__m128i)weights, read<uint16_t>(signs), __m128i{},
                                      (__m128i)weights);
#else
    return negated(weights, Runs{SIGNS[signs[0]], SIGNS[signs[1]]});
#endif
}

// The same for two fields of seven bits, the lowest of a word.
INLINE Sixteen with_seven_signs(const Sixteen& weights, uint32_t word) {
    return negated(weights, Runs{SEVEN_SIGNS[word & 127], SEVEN_SIGNS[word >> 7 & 127]});
}

INLINE Ints widened(const Sixteen& a) {
#if defined(__AVX512F__)
    return {(Part<int32_t>)_mm512_cvtepi8_epi32((__m128i)a)};
#elif defined(__AVX2__)
    return {{(Part<int32_t>)_mm256_cvtepi8_epi32((__m128i)a),
             (Part<int32_t>)_mm256_cvtepi8_epi32(_mm_unpackhi_epi64((__m128i)a, (__m128i)a))}};
#else
    int16x8_t low = vmovl_s8(vget_low_s8((int8x16_t)a));
    int16x8_t high = vmovl_s8(vget_high_s8((int8x16_t)a));
    return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)),
             vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))}};
#endif
}

// Four indices: a byte each for the low bits, the others at `shifts` in a word.
INLINE Four indices(const uint8_t* low, uint32_t word, const Four& shifts, uint32_t mask) {
#if defined(__x86_64__)
    Four bytes = (Four)_mm_cvtepu8_epi32(_mm_cvtsi32_si128(read<int32_t>(low)));
#else
    uint8x8_t four = vcreate_u8(read<uint32_t>(low));
    Four bytes = (Four)vmovl_u16(vget_low_u16(vmovl_u8(four)));
#endif
    return bytes | (((word + Four{}) >> shifts) & mask);
}

// Write scales: d * (slope * s + start), for eight integers s.
INLINE void put_eight(float* scales, const Eight& s, float d, float slope, float start) {
    EightFloats values = __builtin_convertvector((EightInts)s, EightFloats);
    values = (values * slope + start) * d;
    std::memcpy(scales, &values, sizeof values);
}

// The eight four-bit integers of a word, from the lowest bits up.
INLINE Eight nibbles(uint32_t word) {
    return ((word + Eight{}) >> Eight{0, 4, 8, 12, 16, 20, 24, 28}) & 15;
}

INLINE float half_at(const uint8_t* address) { return half_to_float(read<uint16_t>(address)); }

// A format is
//     bytes, shift                       of a block; a row has a scale for 2^shift inputs
//     put_scales(block, out)             writes a block's scales as float32
//     weights(block, group)              returns a group of 32 weights before their scales
struct Group {
    Sixteen half[2];
};

struct IQ2XXS {
    static constexpr int bytes = 66, shift = 5;

    INLINE static void put_scales(const uint8_t* block, float* out) {
        Eight first = read<Eight>(block + 2), last = read<Eight>(block + 34);
        Eight s = __builtin_shufflevector(first, last, 1, 3, 5, 7, 9, 11, 13, 15) >> 28;
        put_eight(out, s, half_at(block), 0.25f, 0.125f);
    }

    INLINE static Group weights(const uint8_t* block, int64_t group) {
        const uint8_t* index = block + 2 + 8 * group;
        uint32_t signs = read<uint32_t>(index + 4);
        Runs first{IQ2_XXS_GRID[index[0]], IQ2_XXS_GRID[index[1]]};
        Runs second{IQ2_XXS_GRID[index[2]], IQ2_XXS_GRID[index[3]]};
        return {{with_seven_signs((Sixteen)first, signs),
                 with_seven_signs((Sixteen)second, signs >> 14)}};
    }
};

struct IQ2XS {
    static constexpr int bytes = 74, shift = 4;

    INLINE static void put_scales(const uint8_t* block, float* out) {
        float d = half_at(block);
        put_eight(out, nibbles(read<uint32_t>(block + 66)), d, 0.25f, 0.125f);
        put_eight(out + 8, nibbles(read<uint32_t>(block + 70)), d, 0.25f, 0.125f);
    }

    INLINE static Sixteen two_runs(const uint8_t* run) {
        Runs entries{IQ2_XS_GRID[read<uint16_t>(run) & 511],
                     IQ2_XS_GRID[read<uint16_t>(run + 2) & 511]};
        return negated((Sixteen)entries, Runs{SEVEN_SIGNS[run[1] >> 1], SEVEN_SIGNS[run[3] >> 1]});
    }

    INLINE static Group weights(const uint8_t* block, int64_t group) {
        const uint8_t* run = block + 2 + 8 * group;
        return {{two_runs(run), two_runs(run + 4)}};
    }
};

struct IQ2S {
    static constexpr int bytes = 82, shift = 4;

    INLINE static void put_scales(const uint8_t* block, float* out) {
        float d = half_at(block);
        put_eight(out, nibbles(read<uint32_t>(block + 74)), d, 0.25f, 0.125f);
        put_eight(out + 8, nibbles(read<uint32_t>(block + 78)), d, 0.25f, 0.125f);
    }

    INLINE static Group weights(const uint8_t* block, int64_t group) {
        const uint8_t* low = block + 2 + 4 * group;
        Four index = indices(low, block[66 + group] << 8, Four{0, 2, 4, 6}, 0x300);
        Runs first{IQ2_S_GRID[index[0]], IQ2_S_GRID[index[1]]};
        Runs second{IQ2_S_GRID[index[2]], IQ2_S_GRID[index[3]]};
        return {{with_signs((Sixteen)first, low + 32), with_signs((Sixteen)second, low + 34)}};
    }
};

struct IQ3XXS {
    static constexpr int bytes = 98, shift = 5;

    INLINE static void put_scales(const uint8_t* block, float* out) {
        put_eight(out, read<Eight>(block + 66) >> 28, half_at(block), 0.5f, 0.25f);
    }

    INLINE static Sixteen four_runs(const uint8_t* index) {
        return (Sixteen)Four{IQ3_XXS_GRID[index[0]], IQ3_XXS_GRID[index[1]],
                             IQ3_XXS_GRID[index[2]], IQ3_XXS_GRID[index[3]]};
    }

    INLINE static Group weights(const uint8_t* block, int64_t group) {
        const uint8_t* index = block + 2 + 8 * group;
        uint32_t signs = read<uint32_t>(block + 66 + 4 * group);
        return {{with_seven_signs(four_runs(index), signs),
                 with_seven_signs(four_runs(index + 4), signs >> 14)}};
    }
};

struct IQ3S {
    static constexpr int bytes = 110, shift = 5;

    INLINE static void put_scales(const uint8_t* block, float* out) {
        put_eight(out, nibbles(read<uint32_t>(block + 106)), half_at(block), 2, 1);
    }

    INLINE static Sixteen four_runs(const Four& index) {
        return (Sixteen)Four{IQ3_S_GRID[index[0]], IQ3_S_GRID[index[1]], IQ3_S_GRID[index[2]],
                             IQ3_S_GRID[index[3]]};
    }

    INLINE static Group weights(const uint8_t* block, int64_t group) {
        const uint8_t *low = block + 2 + 8 * group, *signs = block + 74 + 4 * group;
        uint32_t high = block[66 + group] << 8;
        Four first = indices(low, high, Four{0, 1, 2, 3}, 256);
        Four second = indices(low + 4, high, Four{4, 5, 6, 7}, 256);
        return {{with_signs(four_runs(first), signs), with_signs(four_runs(second), signs + 2)}};
    }
};

// Bytes of 1, or of -1 where a bit is set, for two runs: at twice the value of bits 3 (first run)
// and 7 (second run).
struct Ones {
    alignas(16) int8_t bytes[288];
};
constexpr Ones make_ones() {
    Ones ones{};
    for (int bits : {0, 8, 128, 136})
        for (int i = 0; i < 16; i++) ones.bytes[2 * bits + i] = bits & (i < 8 ? 8 : 128) ? -1 : 1;
    return ones;
}
constexpr Ones ONES = make_ones();

// Eight times the weights of iq1, plus or minus one.
INLINE Sixteen iq1_weights(uint32_t first, uint32_t second, uint64_t bits) {
    Runs entries{IQ1_GRID[first], IQ1_GRID[second]};
    return (Sixteen)entries + read<Sixteen>(ONES.bytes + 2 * (bits & 136));
}

struct IQ1S {
    static constexpr int bytes = 50, shift = 5;

    INLINE static void put_scales(const uint8_t* block, float* out) {
        Four fields = read<Four>(block + 34);  // each has those of two groups
        Eight twice = __builtin_shufflevector(fields, fields, 0, 0, 1, 1, 2, 2, 3, 3);
        Eight s = (twice >> Eight{12, 28, 12, 28, 12, 28, 12, 28}) & 7;
        put_eight(out, s, half_at(block), 0.25f, 0.125f);
    }

    INLINE static Group weights(const uint8_t* block, int64_t group) {
        uint32_t field = read<uint16_t>(block + 34 + 2 * group);
        Four index = indices(block + 2 + 4 * group, field << 8, Four{0, 3, 6, 9}, 0x700);
        uint64_t bits = field >> 15 ? 136 : 0;
        return {{iq1_weights(index[0], index[1], bits), iq1_weights(index[2], index[3], bits)}};
    }
};

struct IQ1M {
    static constexpr int bytes = 56, shift = 4;

    INLINE static void put_scales(const uint8_t* block, float* out) {
        constexpr Eight shifts{0, 3, 6, 9, 16, 19, 22, 25};
        uint64_t fields = read<uint64_t>(block + 48);
        float d = half_to_float((fields >> 12 & 0xf) | (fields >> 24 & 0xf0) |
                                (fields >> 36 & 0xf00) | (fields >> 48 & 0xf000));
        put_eight(out, (((uint32_t)fields + Eight{}) >> shifts) & 7, d, 0.25f, 0.125f);
        put_eight(out + 8, (((uint32_t)(fields >> 32) + Eight{}) >> shifts) & 7, d, 0.25f, 0.125f);
    }

    INLINE static Group weights(const uint8_t* block, int64_t group) {
        const uint8_t* fields = block + 32 + 2 * group;
        uint32_t both = read<uint16_t>(fields) << 8;
        Four index = indices(block + 4 * group, both, Four{0, 4, 8, 12}, 0x700);
        return {{iq1_weights(index[0], index[1], fields[0]),
                 iq1_weights(index[2], index[3], fields[1])}};
    }
};

template <class Of>
struct Codebook {
    static constexpr int block_inputs = 256, block_bytes = Of::bytes;

    INLINE static void prepare(const Row& row) {
        float* out = row.ready;
        for (int64_t block = 0; block < row.inputs >> 8; block++, out += 256 >> Of::shift)
            Of::put_scales(row.codes + block * Of::bytes, out);
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        const uint8_t* block = row.codes + (at >> 8) * Of::bytes;
        Group group = Of::weights(block, at >> 5 & 7);
        const float* scales = row.ready + (at >> Of::shift);
        Weights weights;
        each<2>([&](auto n) INLINE_LAMBDA {
            Floats scale = all(scales[Of::shift == 4 ? n : 0]);
            weights.part[n] = to_floats(widened(group.half[n])) * scale;
        });
        return weights;
    }
};

// Codes of two bits, minus one: 128 weights in 32 bytes.
struct TQ20 {
    static constexpr int block_inputs = 256, block_bytes = 66;

    INLINE static void prepare(const Row& row) {
        for (int64_t block = 0; block < row.inputs >> 8; block++)
            put_eight(row.ready + 8 * block, Eight{}, half_at(row.codes + block * 66 + 64), 0, 1);
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        const uint8_t* codes = row.codes + (at >> 8) * block_bytes + (at >> 2 & 32);
        Floats scale = all(row.ready[at >> 5]);
        Weights weights;
        for (int i = 0; i < 2; i++) {
            Ints code = (load_ints<uint8_t>(codes + LANES * i) >> (at >> 4 & 6)) & 3;
            weights.part[i] = to_floats(code - 1) * scale;
        }
        return weights;
    }
};

}  // namespace
}  // namespace greenroom

FORMAT(iq2_xxs, greenroom::Codebook<greenroom::IQ2XXS>)
FORMAT(iq2_xs, greenroom::Codebook<greenroom::IQ2XS>)
FORMAT(iq2_s, greenroom::Codebook<greenroom::IQ2S>)
FORMAT(iq3_xxs, greenroom::Codebook<greenroom::IQ3XXS>)
FORMAT(iq3_s, greenroom::Codebook<greenroom::IQ3S>)
FORMAT(iq1_s, greenroom::Codebook<greenroom::IQ1S>)
FORMAT(iq1_m, greenroom::Codebook<greenroom::IQ1M>)
FORMAT(tq2_0, greenroom::TQ20)
