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

// Add the products of an iteration, of which `left` inputs exist. A scale is for 16 of them.
template <class Add>
INLINE void add_products(
    const Row& row, int64_t at, const Inputs& x, int64_t left, const Bytes& raw, Add add) {
    Halves codes = e2m1_bytes(split_bytes(raw));
    const float* scales = row.ready + (at >> 4);
    auto twice = [](int i) { return i / 2; };
    Ints sums = times(codes, x) + x.offsets();
    if (left >= 128) return add(constant<0>, to_floats(sums), spread<8>(scales, twice));
    // Missing scales are 0: uninitialised memory may hold NaN, and 0 times NaN is NaN.
    float few[8] = {};
    for (int i = 0; 16 * i < left; i++) few[i] = scales[i];
    add(constant<0>, to_floats(sums), spread<8>(few, twice));
}

template <bool DIVIDES>
struct NVFP4 {
    static constexpr int block_inputs = 16, block_bytes = 8;
    static constexpr Packing packing{
        .run = 1, .shift = 4, .offset = TWICE_E2M1_OFFSET, .factor = 0.5f};
    static constexpr bool paired = true;

    INLINE static void prepare(const Row& row) {
        Floats matrix = all(read<float>(row.zero));
        prepare_in_vectors(row.inputs >> 4, [&](int64_t at, int64_t left) INLINE_LAMBDA {
            Floats scales = e4m3(load_scales(row.scale + at, left));
            row.put(at, DIVIDES ? scales / matrix : scales * matrix, left);
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

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t left, Add add) {
        const uint8_t* codes = row.codes + (at >> 1);
        Bytes raw = left < 128 ? as<uint8_t>(load_first<uint32_t>(codes, left >> 3))
                               : load<uint8_t>(codes);
        add_products(row, at, x, left, raw, add);
    }
};

template <bool SCALED>
struct GGUF {
    static constexpr int block_inputs = 64, block_bytes = 36;
    static constexpr Packing packing{.run = 8, .shift = 4, .offset = TWICE_E2M1_OFFSET};
    static constexpr bool paired = true;

    // Write the scales, halved; code 0x7f is 0.
    //
    // For integer products the matrix scale is in the other scales. Otherwise it is the first
    // minimum: a weight's code and block scale are multiplied exactly, and only the last product is
    // rounded.
    INLINE static void prepare(const Row& row) {
        Floats factor = all(SCALED && row.powers ? 0.5f * read<float>(row.scale) : 0.5f);
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
            Ints codes = load_ints<uint8_t>(&words);
            Floats scales = choose(equal(codes, 127), Floats{}, magnitudes(codes & 127));
            row.put(at, scales * factor, left);
        });
        if (SCALED && !row.powers) row.minima()[0] = read<float>(row.scale);
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

    template <class Add>
    INLINE static void terms(const Row& row, int64_t at, const Inputs& x, int64_t left, Add add) {
        const uint8_t* first = row.codes + (at >> 6) * block_bytes + 4;
        add_products(row, at, x, left, two_blocks(first, left > 64), add);
    }

    // Load the codes of two blocks; 0 for a second one that the row lacks.
    INLINE static Bytes two_blocks(const uint8_t* first, bool both) {
#if defined(__AVX512F__)
        __m512i one = _mm512_castsi256_si512(read<__m256i>(first));
        if (!both) return {(Part<uint8_t>)_mm512_zextsi256_si512(read<__m256i>(first))};
        return {(Part<uint8_t>)_mm512_inserti64x4(one, read<__m256i>(first + block_bytes), 1)};
#else
        Bytes result{};
        each<PARTS>([&](auto p) INLINE_LAMBDA {
            constexpr bool second = p >= PARTS / 2;
            if (both || !second)
                result.part[p] = read<Part<uint8_t>>(
                    first + p * REGISTER + (second ? block_bytes - 32 : 0));
        });
        return result;
#endif
    }
};

}  // namespace
}  // namespace greenroom

FORMAT(nvfp4, greenroom::NVFP4<false>)
FORMAT(ct_nvfp4, greenroom::NVFP4<true>)
FORMAT(gguf_nvfp4, greenroom::GGUF<false>)
FORMAT(gguf_nvfp4_scaled, greenroom::GGUF<true>)
