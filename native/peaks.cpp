// What this processor can do at most: reads of memory, and products in registers. The rooflines of
// all kernels are measured with them (benchmarks/roofline.py).
#include "arguments.hpp"
#include "region.hpp"

namespace greenroom {

// Units of reading, or of products.
SHARED(PeakCall,
    int64_t cursor;
    int64_t units;
    const uint8_t* memory;  // to read [units, unit_bytes], or factors: CHAINS + 1 vectors
    int64_t unit_bytes;     // a multiple of 64
    int64_t operations;     // a result: multiplications and additions
    int64_t total;          // a result: the sum of all lanes
)

}  // namespace greenroom

namespace {

using namespace greenroom;

constexpr int CHAINS = PARTS == 1 ? 12 : 4;  // sums that do not wait for one another
constexpr int64_t ROUNDS = 4096;             // of a unit
constexpr int64_t AHEAD = 2048;              // bytes

template <class T>
INLINE int64_t sum_of_lanes(const Vector<T>& a) {
    T lanes[LANES];
    store(lanes, a);
    int64_t total = 0;
    for (T lane : lanes) total += (int64_t)lane;
    return total;
}

// Multiply in registers: `add` adds a product of two vectors of type T to one of the sums.
template <class Sum, class T, class Add>
INLINE void multiply(PeakCall& p, int64_t operations, Add add) {
    Vector<Sum> total[CHAINS] = {};
    int64_t units = 0;
    for (; claim(p.cursor) < p.units; units++)
        for (int64_t round = 0; round < ROUNDS; round++) {
            // The compiler does not see that the factors stay the same.
            const uint8_t* memory = p.memory;
            asm volatile("" : "+r"(memory));
            Vector<T> x = load<T>(memory + 64 * CHAINS);
            each<CHAINS>([&](auto i) INLINE_LAMBDA {
                total[i] = add(total[i], load<T>(memory + 64 * i), x);
            });
        }
    each<CHAINS>([&](auto i) INLINE_LAMBDA { claim(p.total, sum_of_lanes(total[i])); });
    claim(p.operations, units * ROUNDS * CHAINS * operations);
}

}  // namespace

// Read memory, as fast as one addition for each four bytes allows.
EXPORT void read_memory(PeakCall* p) {
    Ints total[4] = {};
    for (int64_t unit; (unit = claim(p->cursor)) < p->units;) {
        const uint8_t* memory = p->memory + unit * p->unit_bytes;
        int64_t at = 0;
        for (; at + 256 <= p->unit_bytes; at += 256)
            each<4>([&](auto i) INLINE_LAMBDA {
                prefetch(memory + at + 64 * i + AHEAD);
                total[i] = total[i] + load<int32_t>(memory + at + 64 * i);
            });
        for (; at < p->unit_bytes; at += 64) total[0] = total[0] + load<int32_t>(memory + at);
    }
    each<4>([&](auto i) INLINE_LAMBDA { claim(p->total, sum_of_lanes(total[i])); });
}

// Multiply float32, with one rounding of a product and a sum.
EXPORT void multiply_floats(PeakCall* p) {
    multiply<float, float>(*p, 2 * LANES, [](auto total, auto a, auto b) INLINE_LAMBDA {
        return fma(a, b, total);
    });
}

// Multiply codes of four bits with signed bytes, and add four products to an int32.
EXPORT void multiply_bytes(PeakCall* p) {
    multiply<int32_t, uint8_t>(*p, 2 * 4 * LANES, [](auto total, auto a, auto b) INLINE_LAMBDA {
        return dot_bytes<15>(total, a, as<int8_t>(b));
    });
}
