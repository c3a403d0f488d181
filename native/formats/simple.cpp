// GGUF encodings in blocks of 32 weights.
//
// A block is a float16 scale d (an e8m0 scale in gguf_mxfp4), in q4_1 and q5_1 a float16 minimum,
// and the codes. Codes of four bits are the last 16 bytes of a block: byte i has code i in its low
// and code i + 16 in its high half. In q5_0 and q5_1, the codes' fifth bits are an int32 before
// them. runtime/encodings/ggml/ has the layouts.
#include "decoding.hpp"
#include "product.hpp"
#include "scales.hpp"
#include "tables.hpp"

namespace greenroom {
namespace {

// The last 16 bytes of the block of BYTES bytes with input `at`.
template <int BYTES>
INLINE const uint8_t* block_codes(const Row& row, int64_t at) {
    return row.codes + at / 32 * BYTES + (BYTES - 16);
}

// Codes of four bits in blocks of BYTES bytes.
template <int BYTES>
struct Blocks {
    static constexpr int block_inputs = 32, block_bytes = BYTES;
    static constexpr int span = 32, head = BYTES % 4, largest = 15;

    INLINE static Codes codes(const Row& row, int64_t at) {
        return codes_in_halves(block_codes<BYTES>(row, at));
    }
    template <class Block>
    INLINE static Quads panel_codes(const Block& block) {
        return quads_in_halves(block.sixteen(BYTES - 16));
    }
};

// scale * (code - 8)
struct Q4_0 : Blocks<18> {
    INLINE static void prepare(const Row& row) { prepare_halves_in_blocks<18>(row); }

    INLINE static Weights decode(const Row& row, int64_t at) {
        return decode_symmetric(codes(row, at), row.ready[at / 32]);
    }

    template <class Block, class S>
    INLINE static void groups(const Block& block, int64_t at, S& sums) {
        Floats scale = block.halves(0);
        sums.add(at / 32, panel_codes(block), scale, scale * -8.0f);
    }
};

// scale * code + minimum
struct Q4_1 : Blocks<20> {
    INLINE static void prepare(const Row& row) { prepare_pairs_in_blocks<20>(row); }

    INLINE static Weights decode(const Row& row, int64_t at) {
        Floats scale = all(row.ready[at / 32]), minimum = all(row.minima()[at / 32]);
        return decode_four_bits(codes(row, at), [&](const Floats& code) INLINE_LAMBDA {
            return fma(scale, code, minimum);
        });
    }

    template <class Block, class S>
    INLINE static void groups(const Block& block, int64_t at, S& sums) {
        Words both = block.words(0);
        sums.add(at / 32, panel_codes(block), low_halves_to_floats(both),
                 low_halves_to_floats(both >> 16));
    }
};

// scale * number of the code
struct GgufMxfp4 : Blocks<17> {
    static constexpr int largest = 24;

    // The scales are halves of e8m0 numbers: 2^(e - 128).
    INLINE static Floats half_e8m0(const Ints& e) {
        Ints small = choose(equal(e, 1), all<int32_t>(0x400000), all<int32_t>(0x200000));
        return as<float>(choose(less(e, 2), small, (e - 1) << 23));
    }

    INLINE static void prepare(const Row& row) {
        prepare_in_blocks<17>(row, [&](int64_t at, const Words& words) INLINE_LAMBDA {
            row.put(at, half_e8m0(as<int32_t>(words & 255)));
        });
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        return decode_from_table(codes(row, at), twice_e2m1(0.0f), row.ready[at / 32]);
    }

    template <class Block, class S>
    INLINE static void groups(const Block& block, int64_t at, S& sums) {
        Floats scale = half_e8m0(block.bytes(0));
        Quads codes = looked_up(TWICE_E2M1, panel_codes(block));
        sums.add(at / 32, codes, scale, scale * -TWICE_E2M1_OFFSET);
    }
};

// scale * number of the code
struct Iq4Nl : Blocks<18> {
    static constexpr int largest = 240;

    INLINE static void prepare(const Row& row) { prepare_halves_in_blocks<18>(row); }

    INLINE static Weights decode(const Row& row, int64_t at) {
        return decode_from_table(codes(row, at), iq4_numbers(), row.ready[at / 32]);
    }

    template <class Block, class S>
    INLINE static void groups(const Block& block, int64_t at, S& sums) {
        Floats scale = block.halves(0);
        Quads codes = looked_up(IQ4, panel_codes(block));
        sums.add(at / 32, codes, scale, scale * -IQ4_OFFSET);
    }
};

// Codes of five bits in blocks of BYTES bytes.
template <int BYTES>
struct FiveBits {
    static constexpr int block_inputs = 32, block_bytes = BYTES;
    static constexpr int span = 32, head = BYTES % 4, largest = 31;

    // Load the codes of 32 inputs, converted to float32.
    INLINE static Weights codes(const Row& row, int64_t at) {
        const uint8_t* place = block_codes<BYTES>(row, at);
        Ints four = load_ints<uint8_t>(place);
        return {{to_floats((four & 15) | where_bits(read<uint16_t>(place - 4), 16)),
                 to_floats((four >> 4) | where_bits(read<uint16_t>(place - 2), 16))}};
    }

    // Bits 4 q to 4 q + 3 of a word are the fifth bits of part q.
    template <class Block>
    INLINE static Quads panel_codes(const Block& block) {
        Words fifth = block.words(BYTES - 20);
        Quads codes = quads_in_halves(block.sixteen(BYTES - 16));
        each<8>([&](auto q) INLINE_LAMBDA {
            Words bits = (fifth >> 4 * q) & 15;
            // Bit i moves to bit 8 i + 4, and its other copies are masked.
            Words spread = (bits << 4 | bits << 11 | bits << 18 | bits << 25) & 0x10101010;
            codes.part[q] = codes.part[q] | as<uint8_t>(spread);
        });
        return codes;
    }
};

// scale * (code - 16)
struct Q5_0 : FiveBits<22> {
    INLINE static void prepare(const Row& row) { prepare_halves_in_blocks<22>(row); }

    INLINE static Weights decode(const Row& row, int64_t at) {
        Weights code = codes(row, at);
        Floats scale = all(row.ready[at / 32]);
        return weights_of((code.part[0] - 16) * scale, (code.part[1] - 16) * scale);
    }

    template <class Block, class S>
    INLINE static void groups(const Block& block, int64_t at, S& sums) {
        Floats scale = block.halves(0);
        sums.add(at / 32, panel_codes(block), scale, scale * -16.0f);
    }
};

// scale * code + minimum
struct Q5_1 : FiveBits<24> {
    INLINE static void prepare(const Row& row) { prepare_pairs_in_blocks<24>(row); }

    INLINE static Weights decode(const Row& row, int64_t at) {
        Weights code = codes(row, at);
        Floats scale = all(row.ready[at / 32]), minimum = all(row.minima()[at / 32]);
        return weights_of(fma(scale, code.part[0], minimum),
                          fma(scale, code.part[1], minimum));
    }

    template <class Block, class S>
    INLINE static void groups(const Block& block, int64_t at, S& sums) {
        Words both = block.words(0);
        sums.add(at / 32, panel_codes(block), low_halves_to_floats(both),
                 low_halves_to_floats(both >> 16));
    }
};

// Signed bytes times a scale.
struct Q8_0 {
    static constexpr int block_inputs = 32, block_bytes = 34;
    static constexpr int span = 32, head = 2, largest = 255;

    INLINE static void prepare(const Row& row) { prepare_halves_in_blocks<34>(row); }

    INLINE static Weights decode(const Row& row, int64_t at) {
        return decode_bytes(row.codes + at / 32 * block_bytes + 2, row.ready[at / 32]);
    }

    // The codes are shifted by 128, so that they have no sign.
    template <class Block, class S>
    INLINE static void groups(const Block& block, int64_t at, S& sums) {
        Floats scale = block.halves(0);
        Quads codes = shifted_bytes(block.sixteen(2), block.sixteen(18));
        sums.add(at / 32, codes, scale, scale * -128.0f);
    }
};

}  // namespace
}  // namespace greenroom

GGUF_FORMAT(q8_0, greenroom::Q8_0)
GGUF_FORMAT(q4_0, greenroom::Q4_0)
GGUF_FORMAT(q4_1, greenroom::Q4_1)
GGUF_FORMAT(q5_0, greenroom::Q5_0)
GGUF_FORMAT(q5_1, greenroom::Q5_1)
GGUF_FORMAT(gguf_mxfp4, greenroom::GgufMxfp4)
GGUF_FORMAT(iq4_nl, greenroom::Iq4Nl)
