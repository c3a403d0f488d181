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
    static constexpr int span = 32, span_bytes = 32, largest = 255;

    INLINE static void prepare(const Row& row) {
        prepare_contiguous<uint16_t>(row, 6, load_halves);
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        return decode_bytes(row.codes + at, row.ready[at / 64]);
    }

    // The codes are shifted by 128, so that they have no sign.
    template <class S>
    INLINE static void groups(const Panel& panel, int64_t at, S& sums) {
        Words halves = gather<uint16_t>(panel.scales + at / 64 * 2, panel.scale_step);
        Floats scale = low_halves_to_floats(halves);
        const uint8_t* place = panel.codes + at;
        Quads codes =
            shifted_bytes(transposed(place, panel.step), transposed(place + 16, panel.step));
        sums.add(at / 32, codes, scale, scale * -128.0f);
    }
};

// Codes of four bits, two neighbours in a byte.
struct Neighbours {
    static constexpr int block_inputs = 2, block_bytes = 1;
    static constexpr int span = 32, span_bytes = 16, largest = 15;

    INLINE static Codes codes(const Row& row, int64_t at) {
        return codes_of_neighbours(row.codes + at / 2);
    }
    INLINE static Quads panel_codes(const Panel& panel, int64_t at) {
        return quads_of_neighbours(transposed(panel.codes + at / 2, panel.step));
    }
};

// scale * (code - 8)
struct Int4 : Neighbours {
    INLINE static void prepare(const Row& row) {
        prepare_contiguous<uint16_t>(row, 5, load_halves);
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        return decode_symmetric(codes(row, at), row.ready[at / 32]);
    }

    template <class S>
    INLINE static void groups(const Panel& panel, int64_t at, S& sums) {
        Words halves = gather<uint16_t>(panel.scales + at / 32 * 2, panel.scale_step);
        Floats scale = low_halves_to_floats(halves);
        sums.add(at / 32, panel_codes(panel, at), scale, scale * -8.0f);
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
    static constexpr int largest = 24;

    // The scales are e8m0 numbers: 2^(e - 127); 255 is NaN.
    INLINE static Floats e8m0(const Ints& e) {
        Ints bits = choose(equal(e, 0), all<int32_t>(1 << 22), e << 23);
        return as<float>(choose(equal(e, 255), all<int32_t>(0x7fc00000), bits));
    }

    INLINE static void prepare(const Row& row) {
        prepare_contiguous<uint8_t>(row, 5, [](const uint8_t* place) INLINE_LAMBDA {
            return e8m0(load_ints<uint8_t>(place));
        });
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        Floats numbers = twice_e2m1(-0.0f) * 0.5f;
        return decode_from_table(codes(row, at), numbers, row.ready[at / 32]);
    }

    template <class S>
    INLINE static void groups(const Panel& panel, int64_t at, S& sums) {
        Words e = gather<uint8_t>(panel.scales + at / 32, panel.scale_step);
        Floats scale = e8m0(as<int32_t>(e)) * 0.5f;
        Quads codes = looked_up(TWICE_E2M1, panel_codes(panel, at));
        sums.add(at / 32, codes, scale, scale * -TWICE_E2M1_OFFSET);
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
PACKED_FORMAT(int8, greenroom::Int8)
PACKED_FORMAT(int4, greenroom::Int4)
FORMAT(int4_wide, greenroom::Int4Wide)
PACKED_FORMAT(mxfp4, greenroom::Mxfp4)
FORMAT(fp8, greenroom::Fp8)
