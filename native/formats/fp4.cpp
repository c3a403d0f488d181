// 4-bit floats (e2m1) with a scale for 16 inputs in 8-bit floats (e4m3): NVFP4.
//
// nvfp4       codes of neighbours in a byte; scales, and a float32 scale of the matrix, are tensors
//             of their own; the matrix scale multiplies
// ct_nvfp4    the same; the matrix scale divides
// gguf_nvfp4  blocks of 64 inputs: four scales, then four times 8 bytes with codes i and i + 8 each
// gguf_nvfp4_scaled   the same; a float32 scale of the matrix, a tensor of its own, multiplies
#include "decoding.hpp"
#include "product.hpp"
#include "tables.hpp"

namespace greenroom {
namespace {

typedef uint32_t Four __attribute__((vector_size(16)));

alignas(64) constexpr float E2M1[LANES] = {0,  0.5f,  1,  1.5f,  2,  3,  4,  6,
                                           -0.f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

// The numbers of e4m3 without sign, codes of 7 bits. NaN (0x7f) becomes 480.
INLINE Floats magnitudes(const Ints& codes) {
    return choose(less(codes, 8), to_floats(codes) * 0x1p-9f,
                  as<float>((codes << 20) + (120 << 23)));
}

INLINE Floats e4m3(const Ints& codes) {
    Ints size = codes & 127, sign = (codes & 128) << 24;
    Floats number = as<float>(as<int32_t>(magnitudes(size)) | sign);
    return choose(equal(size, 127), all(std::numeric_limits<float>::quiet_NaN()), number);
}

// Load 16 codes, of which `left` exist.
INLINE Ints load_scales(const uint8_t* codes, int64_t left) {
    if (left >= LANES) return load_ints<uint8_t>(codes);
    uint8_t first[LANES] = {};
    std::memcpy(first, codes, left);
    return load_ints<uint8_t>(first);
}

// Load 16 codes, of which 8 bytes hold the first 8 in their low bits and the others in their high.
INLINE Ints load_two_eights(const uint8_t* address) {
#if defined(__AVX512F__)
    __m128i twice = (__m128i)_mm_loaddup_pd((const double*)address);
    return shift_right<0, 4>(Ints{(Part<int32_t>)_mm512_cvtepu8_epi32(twice)});
#elif defined(__AVX2__)
    __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)address));
    return {{(Part<int32_t>)both, (Part<int32_t>)_mm256_srli_epi32(both, 4)}};
#else
    uint16x8_t wide = vmovl_u8(vld1_u8(address));
    uint32x4_t low = vmovl_u16(vget_low_u16(wide)), high = vmovl_u16(vget_high_u16(wide));
    return {{(Part<int32_t>)low, (Part<int32_t>)high, (Part<int32_t>)vshrq_n_u32(low, 4),
             (Part<int32_t>)vshrq_n_u32(high, 4)}};
#endif
}

// Add 32 codes of a panel, with two scales. The matrix scale is in them.
template <class S>
INLINE void add_codes(S& sums, int64_t at, const Quads& codes, const Floats (&scales)[2]) {
    sums.add_halves(at / 32, looked_up(TWICE_E2M1, codes), scales,
                    {scales[0] * -TWICE_E2M1_OFFSET, scales[1] * -TWICE_E2M1_OFFSET});
}

template <bool DIVIDES>
struct NVFP4 {
    static constexpr int block_inputs = 16, block_bytes = 8;
    static constexpr int span = 32, span_bytes = 16, largest = 24;

    INLINE static void prepare(const Row& row) {
        Floats matrix = all(read<float>(row.zero));
        prepare_in_vectors(row.inputs >> 4, [&](int64_t at, int64_t left) INLINE_LAMBDA {
            Floats scales = e4m3(load_scales(row.scale + at, left));
            row.put(at, DIVIDES ? scales / matrix : scales * matrix);
        });
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        Codes codes = codes_of_neighbours(row.codes + (at >> 1));
        Weights weights;
        for (int i = 0; i < 2; i++) {
            Floats table = load<float>(E2M1) * all(row.ready[(at >> 4) + i]);
            weights.part[i] = look_up(table, codes.part[i]);
        }
        return weights;
    }

    template <class S>
    INLINE static void groups(const Panel& panel, int64_t at, S& sums) {
        Floats matrix = all(read<float>(panel.zeros));
        auto scale = [&](int half) INLINE_LAMBDA {
            Words codes = gather<uint8_t>(panel.scales + at / 16 + half, panel.scale_step);
            Floats each = e4m3(as<int32_t>(codes));
            return (DIVIDES ? each / matrix : each * matrix) * 0.5f;
        };
        Quads codes = quads_of_neighbours(transposed(panel.codes + at / 2, panel.step));
        add_codes(sums, at, codes, {scale(0), scale(1)});
    }
};

template <bool SCALED>
struct GGUF {
    static constexpr int block_inputs = 64, block_bytes = 36;
    static constexpr int span = 64, head = 0, largest = 24;

    // Scales, halved; code 0x7f is 0.
    INLINE static Floats scales_of(const Ints& codes) {
        return choose(equal(codes, 127), Floats{}, magnitudes(codes & 127)) * 0.5f;
    }

    // The first minimum is the matrix scale: a weight's code and block scale are multiplied
    // exactly, and only the last product is rounded.
    INLINE static void prepare(const Row& row) {
        prepare_in_vectors(row.inputs >> 4, [&](int64_t at, int64_t left) INLINE_LAMBDA {
            const uint8_t* block = row.codes + (at >> 2) * block_bytes;
            Four words{};
            if (left >= LANES)
                words = Four{read<uint32_t>(block), read<uint32_t>(block + block_bytes),
                             read<uint32_t>(block + 2 * block_bytes),
                             read<uint32_t>(block + 3 * block_bytes)};
            else
                for (int i = 0; i < left >> 2; i++)
                    words[i] = read<uint32_t>(block + i * block_bytes);
            row.put(at, scales_of(load_ints<uint8_t>(&words)));
        });
        if (SCALED) row.minima()[0] = read<float>(row.scale);
    }

    INLINE static Weights decode(const Row& row, int64_t at) {
        const uint8_t* codes = row.codes + (at >> 6) * block_bytes + 4 + (at >> 1 & 16);
        Weights weights;
        for (int i = 0; i < 2; i++) {
            Floats table = twice_e2m1(0) * all(row.ready[(at >> 4) + i]);
            if constexpr (SCALED) table = table * all(row.minima()[0]);
            weights.part[i] = look_up(table, load_two_eights(codes + 8 * i));
        }
        return weights;
    }

    // 8 bytes have codes i in their low and i + 8 in their high bits.
    template <class Block, class S>
    INLINE static void groups(const Block& block, int64_t at, S& sums) {
        Words four = block.words(0);
        Floats matrix = all(SCALED ? read<float>(block.scales) : 1.0f);
        auto scale = [&](int i) INLINE_LAMBDA {
            return scales_of(as<int32_t>((four >> 8 * i) & 255)) * matrix;
        };
        each<2>([&](auto half) INLINE_LAMBDA {
            FourQuads raw = block.sixteen(4 + 16 * half);
            Quads codes;
            each<4>([&](auto i) INLINE_LAMBDA {
                constexpr int q = i / 2 * 4 + i % 2;
                codes.part[q] = low_bits(raw.part[i]);
                codes.part[q + 2] = high_bits(raw.part[i]);
            });
            add_codes(sums, at + 32 * half, codes, {scale(2 * half), scale(2 * half + 1)});
        });
    }
};

}  // namespace
}  // namespace greenroom

PACKED_FORMAT(nvfp4, greenroom::NVFP4<false>)
PACKED_FORMAT(ct_nvfp4, greenroom::NVFP4<true>)
GGUF_FORMAT(gguf_nvfp4, greenroom::GGUF<false>)
GGUF_FORMAT(gguf_nvfp4_scaled, greenroom::GGUF<true>)
