// GGUF encodings in super-blocks of 256 weights.
//
// A super-block has 8 groups of 32 weights or 16 groups of 16, whose scales (and minima) are small
// integers times one or two float16 factors. runtime/encodings/ggml/ has the layouts.
#include "decoding.hpp"
#include "product.hpp"
#include "tables.hpp"

namespace greenroom {
namespace {

typedef uint32_t Four __attribute__((vector_size(16)));

// The quarter, or half, of a super-block with input `at`.
INLINE int quarter(int64_t at) { return at >> 6 & 3; }
INLINE int half(int64_t at) { return at >> 7 & 1; }

// The address of the block with input `at`.
template <class F>
INLINE const uint8_t* block_at(const Row& row, int64_t at) {
    return row.codes + (at >> 8) * F::block_bytes;
}

INLINE float half_at(const uint8_t* address) { return half_to_float(read<uint16_t>(address)); }

// Words in memory, whose bytes are the scales of a panel's block: number i is byte i % 4 of word
// i / 4.
template <int COUNT>
struct BlockScales {
    alignas(64) uint32_t memory[COUNT][LANES];

    INLINE void put(int i, const Words& four) { store(memory[i], four); }
    INLINE Words from(int number) const {
        return load<uint32_t>(memory[number / 4]) >> 8 * (number % 4);
    }
    INLINE Floats unsigned_byte(int number) const {
        return to_floats(as<int32_t>(from(number) & 255));
    }
    INLINE Floats signed_byte(int number) const {
        return to_floats(as<int32_t>(from(number) << 24) >> 24);
    }
};

// Formats with a minimum for 32 weights.

// Write the scales and minima of q4_k and q5_k: two float16 factors, d and dmin, then eight scales
// and eight minima of 6 bits. The minima are negated.
INLINE void put_scales_and_minima(const Row& row, int block_bytes) {
    for (int64_t block = 0; block < row.inputs / 256; block++) {
        const uint8_t* at = row.codes + block * block_bytes;
        Four head = read<Four>(at);  // d and dmin, then 12 bytes
        Four first = __builtin_shufflevector(head, head, 1, 3, 2, 3) >> Four{0, 0, 0, 4};
        Four second = __builtin_shufflevector(head, head, 1, 1, 2, 2) >> 2;
        Four six = (first & Four{0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f}) |
                   (second & Four{0, 0x30303030, 0, 0x30303030});
        Floats both = to_floats(load_ints<uint8_t>(&six)) * two_halves(at);
        both = both * halves(1.0f, -1.0f);
        store_half(row.ready + 8 * block, both, 0);
        store_half(row.minima() + 8 * block, both, 1);
    }
}

// The scales and minima of a panel's block of q4_k or q5_k: words 0 and 1 have scales, words 2 and
// 3 minima.
struct SixBitScales {
    BlockScales<4> six;
    Floats d, low;

    INLINE explicit SixBitScales(const FourQuads& head) {
        d = low_halves_to_floats(words(head, 0));
        low = -low_halves_to_floats(words(head, 0) >> 16);
        Words a = words(head, 1), b = words(head, 2), c = words(head, 3);
        six.put(0, a & 0x3f3f3f3f);
        six.put(1, (c & 0x0f0f0f0f) | ((a >> 2) & 0x30303030));
        six.put(2, b & 0x3f3f3f3f);
        six.put(3, ((c >> 4) & 0x0f0f0f0f) | ((b >> 2) & 0x30303030));
    }
    INLINE Floats scale(int group) const { return six.unsigned_byte(group) * d; }
    INLINE Floats minimum(int group) const { return six.unsigned_byte(8 + group) * low; }
};

// 32 bytes hold 32 codes in their low four bits, and the next 32 codes in their high bits.
struct Q4K {
    static constexpr int block_inputs = 256, block_bytes = 144;
    static constexpr int span = 256, head = 0, largest = 15;

    INLINE static void prepare(const Row& row) { put_scales_and_minima(row, block_bytes); }

    INLINE static Weights decode(const Row& row, int64_t at) {
        const uint8_t* bytes = block_at<Q4K>(row, at) + 16 + 32 * quarter(at);
        Codes codes;
        each<2>([&](auto i) INLINE_LAMBDA {
            Ints both = load_ints<uint8_t>(bytes + 16 * i);
            codes.part[i] = at & 32 ? both >> 4 : both;
        });
        Floats scale = all(row.ready[at >> 5]), minimum = all(*row.minima(at >> 5));
        return decode_four_bits(codes, [&](const Floats& code) INLINE_LAMBDA {
            return fma(scale, code, minimum);
        });
    }

    template <class Block, class S>
    INLINE static void groups(const Block& block, int64_t at, S& sums) {
        SixBitScales of(block.sixteen(0));
        for (int i = 0; i < 8; i += 2) {
            QuadsOfTwo codes = quads_of_two(block.thirty_two(16 + 16 * i));
            sums.add((at >> 5) + i, codes.low, of.scale(i), of.minimum(i));
            sums.add((at >> 5) + i + 1, codes.high, of.scale(i + 1), of.minimum(i + 1));
        }
    }
};

// Four bits as in q4_k, and a fifth bit from 32 other bytes.
struct Q5K {
    static constexpr int block_inputs = 256, block_bytes = 176;
    static constexpr int span = 256, head = 0, largest = 31;

    INLINE static void prepare(const Row& row) { put_scales_and_minima(row, block_bytes); }

    INLINE static Weights decode(const Row& row, int64_t at) {
        const uint8_t* block = block_at<Q5K>(row, at);
        HalfBytes four = bits_at(block + 48 + 32 * quarter(at), at >> 3 & 4, 15);
        HalfBytes fifth = bits_at(block + 16, at >> 5 & 7, 1);
        Floats scale = all(row.ready[at >> 5]), minimum = all(*row.minima(at >> 5));
        HalfBytes codes = four | sixteen_times(fifth);
        return weights_of(fma(scale, to_floats(to_ints<uint8_t>(codes, 0)), minimum),
                                  fma(scale, to_floats(to_ints<uint8_t>(codes, 1)), minimum));
    }

    template <class Block, class S>
    INLINE static void groups(const Block& block, int64_t at, S& sums) {
        SixBitScales of(block.sixteen(0));
        Quads fifth = block.thirty_two(16);  // bit i is that of group i
        for (int i = 0; i < 8; i += 2) {
            QuadsOfTwo codes = quads_of_two(block.thirty_two(48 + 16 * i));
            sums.add((at >> 5) + i, codes.low | bits_of(fifth, i - 4, 16), of.scale(i),
                     of.minimum(i));
            sums.add((at >> 5) + i + 1, codes.high | bits_of(fifth, i - 3, 16), of.scale(i + 1),
                     of.minimum(i + 1));
        }
    }
};

// Formats with a scale for 16 weights.

// Multiply 32 signed codes by the scales of two groups of 16.
INLINE Weights scaled_by_sixteen(const Row& row, int64_t at, const HalfBytes& codes) {
    const float* scales = row.ready + (at >> 4);
    return weights_of(to_floats(to_ints<int8_t>(codes, 0)) * all(scales[0]),
                              to_floats(to_ints<int8_t>(codes, 1)) * all(scales[1]));
}

// Codes of four bits and of two bits, minus 32. 16 scales of eight bits and a float16 factor.
struct Q6K {
    static constexpr int block_inputs = 256, block_bytes = 210;
    static constexpr int span = 256, head = 0, largest = 63;

    INLINE static void prepare(const Row& row) {
        for (int64_t block = 0; block < row.inputs >> 8; block++) {
            const uint8_t* at = row.codes + block * block_bytes;
            row.put(16 * block, to_floats(load_ints<int8_t>(at + 192)) * all(half_at(at + 208)));
        }
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        const uint8_t* block = block_at<Q6K>(row, at);
        int turn = at >> 4 & 4;
        HalfBytes four = bits_at(block + 64 * half(at) + (at & 32), turn, 15);
        HalfBytes two = bits_at(block + 128 + 32 * half(at), turn + (at >> 4 & 2), 3);
        return scaled_by_sixteen(row, at, (four | sixteen_times(two)) - 32);
    }

    // Of 128 inputs, 64 bytes have the low bits, and 32 bytes the high bits: those of the first 32
    // inputs lowest.
    template <class Block, class S>
    INLINE static void groups(const Block& block, int64_t at, S& sums) {
        BlockScales<4> of;
        FourQuads scales = block.sixteen(192);
        each<4>([&](auto i) INLINE_LAMBDA { of.put(i, words(scales, i)); });
        Floats d = block.halves(208);
        for (int half = 0; half < 2; half++) {
            Quads two = block.thirty_two(128 + 32 * half);
            auto add = [&](int i, const Quads& codes) INLINE_LAMBDA {
                const int number = 4 * half + i;
                Floats first = of.signed_byte(2 * number) * d;
                Floats second = of.signed_byte(2 * number + 1) * d;
                sums.add_halves((at >> 5) + number, codes, {first, second},
                                {first * -32.0f, second * -32.0f});
            };
            QuadsOfTwo even = quads_of_two(block.thirty_two(64 * half));
            QuadsOfTwo odd = quads_of_two(block.thirty_two(64 * half + 32));
            add(0, even.low | bits_of(two, -4, 48));
            add(1, odd.low | bits_of(two, -2, 48));
            add(2, even.high | bits_of(two, 0, 48));
            add(3, odd.high | bits_of(two, 2, 48));
        }
    }
};

// Codes of two bits and of one bit, minus 4. A float16 factor, and 16 scales of six bits plus 32:
// 8 bytes hold the low four bits of scales i and i + 8, the next 4 bytes the high two bits of
// scales i, i + 4, i + 8 and i + 12.
struct Q3K {
    static constexpr int block_inputs = 256, block_bytes = 110;
    static constexpr int span = 256, head = 0, largest = 7;

    INLINE static void prepare(const Row& row) {
        for (int64_t block = 0; block < row.inputs >> 8; block++) {
            const uint8_t* at = row.codes + block * block_bytes;
            uint64_t low = read<uint64_t>(at + 96);
            uint32_t high = read<uint32_t>(at + 104);
            Four both{(uint32_t)low, (uint32_t)(low >> 32), (uint32_t)low, (uint32_t)(low >> 32)};
            Four six = ((both >> Four{0, 0, 4, 4}) & 0x0f0f0f0f) |
                       (((Four{high, high, high, high} >> Four{0, 2, 4, 6}) & 0x03030303) << 4);
            Floats scales = to_floats(load_ints<uint8_t>(&six) - 32);
            row.put(16 * block, scales * all(half_at(at + 108)));
        }
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        const uint8_t* block = block_at<Q3K>(row, at);
        HalfBytes two = bits_at(block + 32 + 32 * half(at), at >> 4 & 6, 3);
        HalfBytes third = bits_at(block, at >> 5 & 7, 1);
        return scaled_by_sixteen(row, at, (two | (third + third + third + third)) - 4);
    }

    template <class Block, class S>
    INLINE static void groups(const Block& block, int64_t at, S& sums) {
        Words first = block.words(96), second = block.words(100), high = block.words(104);
        BlockScales<4> of;
        each<4>([&](auto i) INLINE_LAMBDA {
            Words low = ((i % 2 ? second : first) >> i / 2 * 4) & 0x0f0f0f0f;
            of.put(i, low | ((high >> 2 * i) & 0x03030303) << 4);
        });
        Floats d = block.halves(108);
        Quads third = block.thirty_two(0);  // bit i is that of group i
        for (int half = 0; half < 2; half++) {
            Quads two = block.thirty_two(32 + 32 * half);
            for (int i = 0; i < 4; i++) {
                const int number = 4 * half + i;
                Floats a = (of.unsigned_byte(2 * number) - 32) * d;
                Floats b = (of.unsigned_byte(2 * number + 1) - 32) * d;
                sums.add_halves((at >> 5) + number,
                                bits_of(two, 2 * i, 3) | bits_of(third, number - 2, 4), {a, b},
                                {a * -4.0f, b * -4.0f});
            }
        }
    }
};

// Codes of two bits, with a minimum for 16 weights.
//
// A byte has the codes of four weights. They are masked, not moved: a code is then 1, 4, 16 or 64
// times too large, and the scales are smaller by that. 16 bytes have a scale in the low four bits
// and a minimum in the high ones; each of the two has a float16 factor. The minima are negated.
struct Q2K {
    static constexpr int block_inputs = 256, block_bytes = 84;
    static constexpr int span = 256, head = 0, largest = 3;

    INLINE static void prepare(const Row& row) {
        Floats moves = lanes_of<float>([](int i) { return 1.0f / (1 << i / 2 % 4 * 2); });
        for (int64_t block = 0; block < row.inputs >> 8; block++) {
            const uint8_t* at = row.codes + block * block_bytes;
            Ints both = load_ints<uint8_t>(at);
            Floats d = all(half_at(at + 80)) * moves, low = all(-half_at(at + 82));
            row.put(16 * block, to_floats(both & 15) * d, to_floats(both >> 4) * low);
        }
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        const uint8_t* block = block_at<Q2K>(row, at);
        uint8_t mask = 3 << (at >> 4 & 6);
        HalfBytes codes = read<HalfBytes>(block + 16 + 32 * half(at)) & mask;
        const float *scales = row.ready + (at >> 4), *minima = row.minima(at >> 4);
        return weights_of(
            fma(all(scales[0]), to_floats(to_ints<uint8_t>(codes, 0)), all(minima[0])),
            fma(all(scales[1]), to_floats(to_ints<uint8_t>(codes, 1)), all(minima[1])));
    }

    template <class Block, class S>
    INLINE static void groups(const Block& block, int64_t at, S& sums) {
        FourQuads both = block.sixteen(0);
        BlockScales<4> scales, minima;
        each<4>([&](auto i) INLINE_LAMBDA {
            scales.put(i, words(both, i) & 0x0f0f0f0f);
            minima.put(i, (words(both, i) >> 4) & 0x0f0f0f0f);
        });
        Words factors = block.words(80);
        Floats d = low_halves_to_floats(factors), low = -low_halves_to_floats(factors >> 16);
        for (int half = 0; half < 2; half++) {
            Quads two = block.thirty_two(16 + 32 * half);
            for (int i = 0; i < 4; i++) {
                const int number = 4 * half + i, first = 2 * number;
                sums.add_halves(
                    (at >> 5) + number, bits_of(two, 2 * i, 3),
                    {scales.unsigned_byte(first) * d, scales.unsigned_byte(first + 1) * d},
                    {minima.unsigned_byte(first) * low, minima.unsigned_byte(first + 1) * low});
            }
        }
    }
};

// Codes of four bits that index a table: 16 bytes with codes i and i + 16 for each group of 32. A
// float16 factor, and eight scales of six bits plus 32: 2 bytes hold their high two bits, the next
// 4 bytes their low four bits.
struct Iq4Xs {
    static constexpr int block_inputs = 256, block_bytes = 136;
    static constexpr int span = 256, head = 0, largest = 240;

    INLINE static void prepare(const Row& row) {
        Words low_bits = lanes_of<uint32_t>([](int i) { return i % 8 * 4; });
        Words high_bits = lanes_of<uint32_t>([](int i) { return i % 8 * 2; });
        for (int64_t block = 0; block < row.inputs >> 8; block++) {
            const uint8_t* at = row.codes + block * block_bytes;
            Words low = (all(read<uint32_t>(at + 4)) >> low_bits) & 15;
            Words high = (all<uint32_t>(read<uint16_t>(at + 2)) >> high_bits) & 3;
            Floats scales = to_floats(as<int32_t>(low | high << 4) - 32) * all(half_at(at));
            row.put_eight(8 * block, scales);
        }
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        const uint8_t* bytes = block_at<Iq4Xs>(row, at) + 8 + (at >> 1 & 112);
        return decode_from_table(codes_in_halves(bytes), iq4_numbers(), row.ready[at >> 5]);
    }

    template <class Block, class S>
    INLINE static void groups(const Block& block, int64_t at, S& sums) {
        Words first = block.words(0), low = block.words(4), high = first >> 16;
        Floats d = low_halves_to_floats(first);
        for (int i = 0; i < 8; i++) {
            Ints six = as<int32_t>(((low >> 4 * i) & 15) | ((high >> 2 * i) & 3) << 4);
            Floats scale = to_floats(six - 32) * d;
            FourQuads raw = block.sixteen(8 + 16 * i);
            sums.add((at >> 5) + i, looked_up(IQ4, quads_in_halves(raw)), scale,
                     scale * -IQ4_OFFSET);
        }
    }
};

}  // namespace
}  // namespace greenroom

GGUF_FORMAT(q2_k, greenroom::Q2K)
GGUF_FORMAT(q3_k, greenroom::Q3K)
GGUF_FORMAT(q4_k, greenroom::Q4K)
GGUF_FORMAT(q5_k, greenroom::Q5K)
GGUF_FORMAT(q6_k, greenroom::Q6K)
GGUF_FORMAT(iq4_xs, greenroom::Iq4Xs)
