// GGUF encodings in super-blocks of 256 weights.
//
// A super-block has 8 groups of 32 weights or 16 groups of 16, whose scales (and minima) are small
// integers times one or two float16 factors. runtime/encodings/ggml/ has the layouts.
#include "product.hpp"

namespace greenroom {
namespace {

typedef uint32_t Four __attribute__((vector_size(16)));

// The quarter of a super-block with input `at`: 0 to 3.
INLINE int quarter(int64_t at) { return at >> 6 & 3; }

// Lanes of the sums of four groups of 32 inputs, two for each block of 64.
constexpr int FOUR_MINIMA[] = {0, 1, 10, 11};

// Decode codes in the low bits of 16 lanes: scale * code + minimum.
template <class T>
INLINE Floats scaled(const Ints& codes, float scale, float minimum) {
    return rounded_weight<T>(fma(all(scale), to_floats(codes), all(minimum)));
}

// Write the scales and minima of q4_k and q5_k: two float16 factors, d and dmin, then eight scales
// and eight minima of 6 bits. The minima are negated.
INLINE void put_scales_and_minima(const Row& row, int block_bytes) {
    for (int64_t block = 0; block < row.inputs / 256; block++) {
        const uint8_t* at = row.codes + block * block_bytes;
        float d = half_to_float(read<uint16_t>(at)), low = half_to_float(read<uint16_t>(at + 2));
        Four head = read<Four>(at);  // d and dmin, then 12 bytes
        Four first = __builtin_shufflevector(head, head, 1, 3, 2, 3) >> Four{0, 0, 0, 4};
        Four second = __builtin_shufflevector(head, head, 1, 1, 2, 2) >> 2;
        Four six = (first & Four{0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f}) |
                   (second & Four{0, 0x30303030, 0, 0x30303030});
        Floats both = to_floats(load_ints<uint8_t>(&six)) * halves(d, -low);
        if (row.powers) both = both * joined(row.powers + 8 * block, 1.0f);
        store_half(row.ready + 8 * block, both, 0);
        store_half(row.minima() + 8 * block, both, 1);
    }
}

// Terms of q4_k and q5_k: groups 0 and 2 in one half of an iteration, 1 and 3 in the other.
template <class Add>
INLINE void terms_with_minima(const Row& row, int64_t at, const Inputs& x, const Halves& codes, Add add) {
    const float* scales = row.ready + at / 32;
    add(constant<0>, to_floats(times(codes.low, x, 0, Ints{})), halves(scales[0], scales[2]));
    add(constant<0>, to_floats(times(codes.high, x, 1, Ints{})), halves(scales[1], scales[3]));
    add(constant<0>, x.sums(), repeat_four(row.minima() + at / 32));
}

// 32 bytes hold 32 codes in their low four bits, and the next 32 codes in their high bits.
struct Q4K {
    static constexpr int block_inputs = 256, block_bytes = 144;
    static constexpr Packing packing{.run = 32, .separate_halves = true, .minima = 4, .minimum_lanes = FOUR_MINIMA};
    static constexpr bool paired = true;

    INLINE static void prepare(const Row& row) { put_scales_and_minima(row, block_bytes); }

    template <class T>
    INLINE static Weights decode(const Row& row, int64_t at) {
        const uint8_t* codes = row.codes + at / 256 * block_bytes + 16 + 32 * quarter(at);
        float scale = row.ready[at / 32], minimum = row.minima()[at / 32];
        Weights weights;
        for (int i = 0; i < 2; i++) {
            Ints both = load_ints<uint8_t>(codes + 16 * i);
            weights.part[i] = scaled<T>(at & 32 ? both >> 4 : both & 15, scale, minimum);
        }
        return weights;
    }

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t, Add add) {
        const uint8_t* codes = row.codes + at / 256 * block_bytes + 16 + 32 * quarter(at);
        terms_with_minima(row, at, x, split_bytes(load<uint8_t>(codes)), add);
    }
};

}  // namespace
}  // namespace greenroom

FORMAT(q4_k, greenroom::Q4K)
