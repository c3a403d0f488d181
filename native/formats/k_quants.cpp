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

// Lanes of the sums of eight groups of 16 inputs.
constexpr int EIGHT_MINIMA[] = {0, 1, 2, 3, 8, 9, 10, 11};

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
        both = both * (row.powers ? joined(row.powers + 8 * block, -1.0f) : halves(1.0f, -1.0f));
        store_half(row.ready + 8 * block, both, 0);
        store_half(row.minima() + 8 * block, both, 1);
    }
}

// Terms of q4_k and q5_k: groups 0 and 2 in one half of an iteration, 1 and 3 in the other.
template <class Add>
INLINE void terms_with_minima(
    const Row& row, int64_t at, const Inputs& x, const Halves& codes, Add add) {
    const float* scales = row.ready + (at >> 5);
    add(constant<0>, to_floats(times(codes.low, x, 0)),
        spread<4>(scales, [](int i) { return i / 8 * 2; }));
    add(constant<0>, to_floats(times(codes.high, x, 1)),
        spread<4>(scales, [](int i) { return i / 8 * 2 + 1; }));
    add(constant<0>, x.sums(), repeat_four(row.minima(at >> 5)));
}

constexpr Packing MINIMA_OF_32{
    .run = 32, .separate_halves = true, .minima = 4, .minimum_lanes = FOUR_MINIMA};

// 32 bytes hold 32 codes in their low four bits, and the next 32 codes in their high bits.
struct Q4K {
    static constexpr int block_inputs = 256, block_bytes = 144;
    static constexpr Packing packing = MINIMA_OF_32;
    static constexpr bool paired = true;

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

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t, Add add) {
        const uint8_t* bytes = block_at<Q4K>(row, at) + 16 + 64 * half(at);
        terms_with_minima(row, at, x, split_bytes(load<uint8_t>(bytes)), add);
    }
};

// Four bits as in q4_k, and a fifth bit from 32 other bytes.
struct Q5K {
    static constexpr int block_inputs = 256, block_bytes = 176;
    static constexpr Packing packing = MINIMA_OF_32;
    static constexpr bool paired = true;

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

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t, Add add) {
        const uint8_t* block = block_at<Q5K>(row, at);
        Halves codes = split_bytes(load<uint8_t>(block + 48 + 64 * half(at)));
        // Bits 0 and 2 are those of the low codes, bits 1 and 3 those of the high ones.
        HalfWords fifth = load_twice<uint16_t>(block + 16) >> 4 * half(at);
        codes.low = codes.low | (as<uint8_t>(shift_left<4, 2>(fifth)) & 16);
        codes.high = codes.high | (as<uint8_t>(shift_left<3, 1>(fifth)) & 16);
        terms_with_minima(row, at, x, codes, add);
    }
};

// Formats with a scale for 16 weights.

// Multiply 32 signed codes by the scales of two groups of 16.
INLINE Weights scaled_by_sixteen(const Row& row, int64_t at, const HalfBytes& codes) {
    const float* scales = row.ready + (at >> 4);
    return weights_of(to_floats(to_ints<int8_t>(codes, 0)) * all(scales[0]),
                              to_floats(to_ints<int8_t>(codes, 1)) * all(scales[1]));
}

// Add the products of 64 codes, in four groups of 16.
template <int HALF, class Add>
INLINE void add_four_groups(
    const Row& row, int64_t at, const Inputs& x, const Bytes& codes, Add add) {
    add(constant<HALF>, to_floats(times(codes, x, HALF) + x.offsets(HALF)),
        spread<4>(row.ready + (at >> 4) + 4 * HALF, [](int i) { return i / 4; }));
}

// Codes of four bits and of two bits, minus 32. 16 scales of eight bits and a float16 factor.
struct Q6K {
    static constexpr int block_inputs = 256, block_bytes = 210;
    static constexpr Packing packing{.run = 64, .shift = 4, .offset = 32, .separate_halves = true};
    static constexpr bool paired = false;

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

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t, Add add) {
        const uint8_t* block = block_at<Q6K>(row, at);
        Halves four = split_bytes(load<uint8_t>(block + 64 * half(at)));
        HalfWords two = load_twice<uint16_t>(block + 128 + 32 * half(at));
        Bytes low = as<uint8_t>(shift_left<4, 2>(two)), high = as<uint8_t>(shift_right<0, 2>(two));
        add_four_groups<0>(row, at, x, four.low | (low & 48), add);
        add_four_groups<1>(row, at, x, four.high | (high & 48), add);
    }
};

// Codes of two bits and of one bit, minus 4. A float16 factor, and 16 scales of six bits plus 32:
// 8 bytes hold the low four bits of scales i and i + 8, the next 4 bytes the high two bits of
// scales i, i + 4, i + 8 and i + 12.
struct Q3K {
    static constexpr int block_inputs = 256, block_bytes = 110;
    static constexpr Packing packing{.run = 64, .shift = 4, .offset = 4, .separate_halves = true};
    static constexpr bool paired = false;

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

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t, Add add) {
        const uint8_t* block = block_at<Q3K>(row, at);
        HalfWords two = load_twice<uint16_t>(block + 32 + 32 * half(at));
        HalfWords third = load_twice<uint16_t>(block) >> 4 * half(at);
        auto codes = [](const HalfWords& two_bits, const HalfWords& bit) INLINE_LAMBDA {
            return (as<uint8_t>(two_bits) & 3) | (as<uint8_t>(bit) & 4);
        };
        // Bits 0 to 3 of a byte of `third` are those of the four quarters of the iteration.
        Bytes low = codes(shift_right<0, 2>(two), shift_left<2, 1>(third));
        Bytes high = codes(shift_right<4, 6>(two), shift_right<0, 1>(third));
        add_four_groups<0>(row, at, x, low, add);
        add_four_groups<1>(row, at, x, high, add);
    }
};

// Codes of two bits, with a minimum for 16 weights.
//
// A byte has the codes of four weights. They are masked, not moved: a code is then 1, 4, 16 or 64
// times too large, and the scales are smaller by that. 16 bytes have a scale in the low four bits
// and a minimum in the high ones; each of the two has a float16 factor. The minima are negated.
struct Q2K {
    static constexpr int block_inputs = 256, block_bytes = 84;
    static constexpr Packing packing{
        .run = 32, .shift = 4, .separate_halves = true, .minima = 8, .minimum_lanes = EIGHT_MINIMA};
    static constexpr bool paired = true;

    INLINE static void prepare(const Row& row) {
        Floats moves = lanes_of<float>([](int i) { return 1.0f / (1 << i / 2 % 4 * 2); });
        for (int64_t block = 0; block < row.inputs >> 8; block++) {
            const uint8_t* at = row.codes + block * block_bytes;
            Ints both = load_ints<uint8_t>(at);
            Floats d = all(half_at(at + 80)) * moves, low = all(-half_at(at + 82));
            row.put(16 * block, to_floats(both & 15) * d, to_floats(both >> 4) * low, LANES);
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

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t, Add add) {
        Words bytes = load_twice<uint32_t>(block_at<Q2K>(row, at) + 16 + 32 * half(at));
        const float* scales = row.ready + (at >> 4);
        Words low = bytes & halves<uint32_t>(0x03030303, 0x30303030);
        Words high = bytes & halves<uint32_t>(0x0c0c0c0c, 0xc0c0c0c0);
        add(constant<0>, to_floats(times(as<uint8_t>(low), x, 0)),
            spread<8>(scales, [](int i) { return i / 4 + i / 8 * 2; }));
        add(constant<0>, to_floats(times(as<uint8_t>(high), x, 1)),
            spread<8>(scales, [](int i) { return 2 + i / 4 + i / 8 * 2; }));
        add(constant<0>, x.sums(),
            spread<8>(row.minima(at >> 4), [](int i) { return i % 4 + i / 8 * 4; }));
    }
};

// Codes of four bits that index a table: 16 bytes with codes i and i + 16 for each group of 32. A
// float16 factor, and eight scales of six bits plus 32: 2 bytes hold their high two bits, the next
// 4 bytes their low four bits.
struct Iq4Xs {
    static constexpr int block_inputs = 256, block_bytes = 136;
    static constexpr Packing packing{.run = 16, .offset = IQ4_OFFSET};
    static constexpr bool paired = true;

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

    template <class Add>
    INLINE static void terms(
        const Row& row, int64_t at, const Inputs& x, int64_t left, Add add) {
        Bytes raw = load<uint8_t>(block_at<Iq4Xs>(row, at) + 8 + 64 * half(at));
        joint_terms<packing>(row, at, x, left, iq4_bytes(split_bytes(raw)), add);
    }
};

}  // namespace
}  // namespace greenroom

FORMAT(q2_k, greenroom::Q2K)
FORMAT(q3_k, greenroom::Q3K)
FORMAT(q4_k, greenroom::Q4K)
FORMAT(q5_k, greenroom::Q5K)
FORMAT(q6_k, greenroom::Q6K)
FORMAT(iq4_xs, greenroom::Iq4Xs)
