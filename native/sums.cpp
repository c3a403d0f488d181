// The kernel that sums experts' outputs.
#include "experts.hpp"

#include "plain.hpp"

namespace {

using namespace greenroom;

constexpr int64_t COLUMNS_AT_ONCE = 256;  // of a unit

// Add n expert outputs times a gate weight to sums.
template <class T>
INLINE void add_weighted(
    const SumCall& call, float* sums, const float* y, float weight, int64_t n) {
    auto add = [&](auto formula) INLINE_LAMBDA {
        over_row(n, [&](int64_t at, int64_t left) INLINE_LAMBDA {
            put(sums, at, left, formula(get(sums, at, left), get(y, at, left) * weight));
        });
    };
    if (call.round_product && call.round_sum)
        add([](const Floats& sum, const Floats& product) INLINE_LAMBDA {
            return rounded<T>(sum + rounded<T>(product));
        });
    else if (call.round_product)
        add([](const Floats& sum, const Floats& product) INLINE_LAMBDA {
            return sum + rounded<T>(product);
        });
    else
        add([](const Floats& sum, const Floats& product) INLINE_LAMBDA { return sum + product; });
}

template <class T>
void sum(SumCall& call) {
    const Routing& routing = *call.routing;
    const int64_t hidden = call.hidden;
    for (int64_t start; (start = claim(call.cursor) * COLUMNS_AT_ONCE) < hidden;) {
        const int64_t n = least(COLUMNS_AT_ONCE, hidden - start);
        for (int64_t t = 0; t < call.tokens; t++)
            std::memset(call.sums + t * hidden + start, 0, 4 * n);
        for (int64_t i = 0; i < routing.count; i++) {
            int64_t biases = routing.experts[i] * hidden + start;
            const T* bias = call.bias ? (const T*)call.bias + biases : nullptr;
            for (int64_t j = routing.starts[i]; j < routing.starts[i + 1]; j++) {
                int64_t row = routing.rows[j];
                float* y = call.outputs + row * hidden + start;
                round_and_add_bias(y, bias, n, call.rounds);
                float weight = call.narrow ? to_float(((const T*)call.weights)[row])
                                           : ((const float*)call.weights)[row];
                float* sums = call.sums + routing.tokens[j] * hidden + start;
                add_weighted<T>(call, sums, y, weight, n);
            }
        }
        for (int64_t t = 0; t < call.tokens; t++) {
            int64_t place = t * hidden + start;
            const float* sums = call.sums + place;
            T* result = (T*)call.result + place;
            over_row(n, [&](int64_t at, int64_t left) INLINE_LAMBDA {
                put(result, at, left, get(sums, at, left));
            });
        }
    }
}

}  // namespace

KERNELS(sum_experts, SumCall, sum)
