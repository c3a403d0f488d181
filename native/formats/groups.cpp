// Encodings whose scales are a tensor of their own, and unencoded weights.
//
// plain    bfloat16, float16 or float32
// int8     signed bytes, a float16 scale for 64 inputs
// int4     4-bit codes, neighbours in a byte, a float16 scale for 32 inputs or more (int4.wide)
// mxfp4    4-bit floats (e2m1), neighbours in a byte, an e8m0 scale for 32 inputs
// fp8      8-bit floats (e4m3), a float32 scale for a block of rows and columns
#include "decoding.hpp"
#include "product.hpp"
#include "scales.hpp"
#include "tables.hpp"

namespace greenroom {
namespace {

// Unencoded weights, of the type in which they are "decoded".
template <class W>
struct Plain {
    static constexpr int block_inputs = 1, block_bytes = sizeof(W);

    INLINE static void prepare(const Row&) {}

    INLINE static Weights decode(const Row& row, int64_t at) {
        const W* weights = (const W*)row.codes + at;
        return {{load_as_floats(weights), load_as_floats(weights + LANES)}};
    }
};

struct Int8 {
    static constexpr int block_inputs = 1, block_bytes = 1;
    static constexpr Packing packing{.shift = 6};
    static constexpr bool paired = false;

    INLINE static void prepare(const Row& row) {
        prepare_contiguous<uint16_t>(row, 6, load_halves);
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        return decode_bytes(row.codes + at, row.ready[at / 64]);
    }

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t, Add add) {
        Ints sums = dot_shorts(load_shorts(row.codes + at), x.shorts(0));
        sums = dot_shorts(sums, load_shorts(row.codes + at + 32), x.shorts(1));
        add(constant<0>, to_floats(sums), all(row.ready[at / 64]));
    }
};

// Codes of four bits, two neighbours in a byte.
struct Neighbours {
    static constexpr int block_inputs = 2, block_bytes = 1;
    static constexpr bool paired = true;

    INLINE static Codes codes(const Row& row, int64_t at) {
        return codes_of_neighbours(row.codes + at / 2);
    }
    INLINE static Halves codes_of_four(const Row& row, int64_t at, int64_t left) {
        const uint8_t* place = row.codes + at / 2;
        if (left == 128) return split_bytes(load<uint8_t>(place));
        return split_bytes(as<uint8_t>(load_first<uint32_t>(place, left / 8)));
    }
};

// scale * (code - 8)
struct Int4 : Neighbours {
    static constexpr Packing packing{.run = 1, .offset = 8, .largest = 15};

    INLINE static void prepare(const Row& row) {
        prepare_contiguous<uint16_t>(row, 5, load_halves);
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        return decode_symmetric(codes(row, at), row.ready[at / 32]);
    }

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t left, Add add) {
        joint_terms<packing>(row, at, x, left, codes_of_four(row, at, left), add);
    }
};

// The same, with groups of more than 32 inputs.
struct Int4Wide : Neighbours {
    INLINE static void prepare(const Row& row) { prepare_repeated<Float16>(row); }

    INLINE static Weights decode(const Row& row, int64_t at) {
        return decode_symmetric(codes(row, at), row.ready[at / 32]);
    }
};

// scale * number of the code
struct Mxfp4 : Neighbours {
    static constexpr Packing packing{
        .run = 1, .offset = TWICE_E2M1_OFFSET, .factor = 0.5f, .largest = 24};

    // The scales are e8m0 numbers: 2^(e - 127); 255 is NaN.
    INLINE static void prepare(const Row& row) {
        prepare_contiguous<uint8_t>(row, 5, [](const uint8_t* place) INLINE_LAMBDA {
            Ints e = load_ints<uint8_t>(place);
            Ints bits = choose(equal(e, 0), all<int32_t>(1 << 22), e << 23);
            return as<float>(choose(equal(e, 255), all<int32_t>(0x7fc00000), bits));
        });
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        Floats numbers = twice_e2m1(-0.0f) * 0.5f;
        return decode_from_table(codes(row, at), numbers, row.ready[at / 32]);
    }

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t left, Add add) {
        Halves codes = codes_of_four(row, at, left);
        joint_terms<packing>(row, at, x, left, e2m1_bytes(codes), add);
    }
};

struct Fp8 {
    static constexpr int block_inputs = 1, block_bytes = 1;

    INLINE static void prepare(const Row& row) { prepare_repeated<float>(row, 256); }

    // Shifted to the place of float16's exponent and fraction, the code's bits are the float16
    // number weight / 2^8. Adding one to the last bit carries into the exponent's highest bit for
    // the NaN code, and only for that; with the highest bit set the number is float16's NaN.
    INLINE static Weights decode(const Row& row, int64_t at) {
        HalfWords moved = (as<uint16_t>(load_shorts(row.codes + at)) << 7) & 0xbfff;
        HalfWords number = moved | ((moved + 0x80) & 0x4000);
        Floats scale = all(row.ready[at / 32]);
        return weights_of(halves_to_floats(number, 0) * scale,
                                  halves_to_floats(number, 1) * scale);
    }
};

}  // namespace
}  // namespace greenroom

FORMAT_OF(plain_float32, greenroom::format_of<greenroom::Plain<float>>())
FORMAT_OF(plain_bfloat16, greenroom::format_of<greenroom::Plain<greenroom::BFloat16>>())
FORMAT_OF(plain_float16, greenroom::format_of<greenroom::Plain<greenroom::Float16>>())
FORMAT(int8, greenroom::Int8)
FORMAT(int4, greenroom::Int4)
FORMAT(int4_wide, greenroom::Int4Wide)
FORMAT(mxfp4, greenroom::Mxfp4)
FORMAT(fp8, greenroom::Fp8)
