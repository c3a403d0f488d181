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

// Split the codes of four blocks of BYTES bytes, of which `left` inputs exist; missing ones are 0.
template <int BYTES>
INLINE Halves four_blocks(const uint8_t* first, int64_t left) {
    constexpr uint8_t zeros[16] = {};
    auto place = [=](int i) { return left > 32 * i ? first + i * BYTES : zeros; };
    return split_bytes(four_quarters<uint8_t>(first, place(1), place(2), place(3)));
}

// Codes of four bits in blocks of BYTES bytes.
template <int BYTES>
struct Blocks {
    static constexpr int block_inputs = 32, block_bytes = BYTES;
    static constexpr bool paired = true;

    INLINE static Codes codes(const Row& row, int64_t at) {
        return codes_in_halves(block_codes<BYTES>(row, at));
    }
    INLINE static Halves codes_of_four(const Row& row, int64_t at, int64_t left) {
        return four_blocks<BYTES>(block_codes<BYTES>(row, at), left);
    }
};

// scale * (code - 8)
struct Q4_0 : Blocks<18> {
    static constexpr Packing packing{.run = 16, .offset = 8, .largest = 15};

    INLINE static void prepare(const Row& row) { prepare_halves_in_blocks<18>(row); }

    INLINE static Weights decode(const Row& row, int64_t at) {
        return decode_symmetric(codes(row, at), row.ready[at / 32]);
    }

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t left, Add add) {
        joint_terms<packing>(row, at, x, left, codes_of_four(row, at, left), add);
    }
};

// scale * code + minimum
struct Q4_1 : Blocks<20> {
    static constexpr Packing packing{
        .run = 16, .largest = 15, .minima = 4, .minimum_lanes = FOUR_MINIMA};

    INLINE static void prepare(const Row& row) { prepare_pairs_in_blocks<20>(row); }

    INLINE static Weights decode(const Row& row, int64_t at) {
        Floats scale = all(row.ready[at / 32]), minimum = all(row.minima()[at / 32]);
        return decode_four_bits(codes(row, at), [&](const Floats& code) INLINE_LAMBDA {
            return fma(scale, code, minimum);
        });
    }

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t left, Add add) {
        joint_terms<packing>(row, at, x, left, codes_of_four(row, at, left), add);
    }
};

// scale * number of the code
struct GgufMxfp4 : Blocks<17> {
    static constexpr Packing packing{.run = 16, .offset = TWICE_E2M1_OFFSET, .largest = 24};

    // The scales are halves of e8m0 numbers: 2^(e - 128).
    INLINE static void prepare(const Row& row) {
        prepare_in_blocks<17>(row, [&](int64_t at, const Words& words, int64_t left) INLINE_LAMBDA {
            Ints e = as<int32_t>(words & 255);
            Ints small = choose(equal(e, 1), all<int32_t>(0x400000), all<int32_t>(0x200000));
            row.put(at, as<float>(choose(less(e, 2), small, (e - 1) << 23)), left);
        });
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        return decode_from_table(codes(row, at), twice_e2m1(0.0f), row.ready[at / 32]);
    }

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t left, Add add) {
        Halves codes = codes_of_four(row, at, left);
        joint_terms<packing>(row, at, x, left, e2m1_bytes(codes), add);
    }
};

// scale * number of the code
struct Iq4Nl : Blocks<18> {
    static constexpr Packing packing{.run = 16, .offset = IQ4_OFFSET};

    INLINE static void prepare(const Row& row) { prepare_halves_in_blocks<18>(row); }

    INLINE static Weights decode(const Row& row, int64_t at) {
        return decode_from_table(codes(row, at), iq4_numbers(), row.ready[at / 32]);
    }

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t left, Add add) {
        joint_terms<packing>(row, at, x, left, iq4_bytes(codes_of_four(row, at, left)), add);
    }
};

// Codes of five bits in blocks of BYTES bytes.
template <int BYTES>
struct FiveBits {
    static constexpr int block_inputs = 32, block_bytes = BYTES;
    static constexpr bool paired = true;

    // Load the codes of 32 inputs, converted to float32.
    INLINE static Weights codes(const Row& row, int64_t at) {
        const uint8_t* place = block_codes<BYTES>(row, at);
        Ints four = load_ints<uint8_t>(place);
        return {{to_floats((four & 15) | where_bits(read<uint16_t>(place - 4), 16)),
                 to_floats((four >> 4) | where_bits(read<uint16_t>(place - 2), 16))}};
    }

    INLINE static Halves codes_of_four(const Row& row, int64_t at, int64_t left) {
        const uint8_t* place = block_codes<BYTES>(row, at);
        Halves four = four_blocks<BYTES>(place, left);
        FourWords fifth;
        if (left == 128) {
            fifth = four_words(place - 4, BYTES);
        } else {
            uint32_t few[4] = {};
            for (int i = 0; 32 * i < left; i++) few[i] = read<uint32_t>(place - 4 + i * BYTES);
            fifth = read<FourWords>(few);
        }
        return {plus_bits(four.low, fifth, false, 16), plus_bits(four.high, fifth, true, 16)};
    }
};

// scale * (code - 16)
struct Q5_0 : FiveBits<22> {
    static constexpr Packing packing{.run = 16, .offset = 16, .largest = 31};

    INLINE static void prepare(const Row& row) { prepare_halves_in_blocks<22>(row); }

    INLINE static Weights decode(const Row& row, int64_t at) {
        Weights code = codes(row, at);
        Floats scale = all(row.ready[at / 32]);
        return weights_of((code.part[0] - 16) * scale, (code.part[1] - 16) * scale);
    }

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t left, Add add) {
        joint_terms<packing>(row, at, x, left, codes_of_four(row, at, left), add);
    }
};

// scale * code + minimum
struct Q5_1 : FiveBits<24> {
    static constexpr Packing packing{
        .run = 16, .largest = 31, .minima = 4, .minimum_lanes = FOUR_MINIMA};

    INLINE static void prepare(const Row& row) { prepare_pairs_in_blocks<24>(row); }

    INLINE static Weights decode(const Row& row, int64_t at) {
        Weights code = codes(row, at);
        Floats scale = all(row.ready[at / 32]), minimum = all(row.minima()[at / 32]);
        return weights_of(fma(scale, code.part[0], minimum),
                          fma(scale, code.part[1], minimum));
    }

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t left, Add add) {
        joint_terms<packing>(row, at, x, left, codes_of_four(row, at, left), add);
    }
};

// Signed bytes times a scale.
struct Q8_0 {
    static constexpr int block_inputs = 32, block_bytes = 34;
    static constexpr Packing packing{};
    static constexpr bool paired = false;

    INLINE static void prepare(const Row& row) { prepare_halves_in_blocks<34>(row); }

    INLINE static Weights decode(const Row& row, int64_t at) {
        return decode_bytes(row.codes + at / 32 * block_bytes + 2, row.ready[at / 32]);
    }

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t left, Add add) {
        const uint8_t* first = row.codes + at / 32 * block_bytes + 2;
        each<2>([&](auto i) INLINE_LAMBDA {
            if (left <= 32 * i) return;
            Ints sums = dot_shorts(load_shorts(first + block_bytes * i), x.shorts(i));
            add(constant<0>, to_floats(sums), all(row.ready[at / 32 + i]));
        });
    }
};

}  // namespace
}  // namespace greenroom

FORMAT(q8_0, greenroom::Q8_0)
FORMAT(q4_0, greenroom::Q4_0)
FORMAT(q4_1, greenroom::Q4_1)
FORMAT(q5_0, greenroom::Q5_0)
FORMAT(q5_1, greenroom::Q5_1)
FORMAT(gguf_mxfp4, greenroom::GgufMxfp4)
FORMAT(iq4_nl, greenroom::Iq4Nl)
