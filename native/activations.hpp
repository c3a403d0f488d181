// Rounding, biases and activations that follow an expert's matrix products.
//
// Every operation is rounded to the model's type, as transformers' separate tensor operations are.
#pragma once

#include "arguments.hpp"
#include "formulas.hpp"

namespace greenroom {

// Activations with a formula here (runtime/kernels/activation.py has the same numbers). RAW: there
// is none, and the module's own function is called.
enum Formula : int64_t { RAW, SILU, SILU_FLOAT, CLAMPED, RELU2 };

SHARED(Activation,
    int64_t code;   // a Formula
    float limit;  // to which gate and up projections are clamped
    float alpha;  // factor of the gate within the sigmoid of the clamped formula
)

// Round n float32 sums and add a bias in place, as eager PyTorch does. The bias may be null.
template <class T>
INLINE void round_and_add_bias(float* sums, const T* bias, int64_t n, bool rounds) {
    auto finish = [&](auto formula) INLINE_LAMBDA {
        over_row(n, [&](int64_t at, int64_t left) INLINE_LAMBDA {
            put(sums, at, left, formula(get(sums, at, left), at, left));
        });
    };
    if (bias && rounds)
        finish([&](const Floats& x, int64_t at, int64_t left) INLINE_LAMBDA {
            return rounded<T>(rounded<T>(x) + get(bias, at, left));
        });
    else if (bias)
        finish([&](const Floats& x, int64_t at, int64_t left) INLINE_LAMBDA {
            return x + get(bias, at, left);
        });
    else if (rounds && !std::is_same_v<T, float>)
        finish([&](const Floats& x, int64_t, int64_t) INLINE_LAMBDA { return rounded<T>(x); });
}

INLINE Floats sigmoid(const Floats& x) { return all(1.0f) / (exponential(-x) + 1.0f); }

template <class T>
INLINE Floats silu(const Floats& gate, const Floats& up, float limit) {
    Floats g = at_most(gate, limit), u = at_least(at_most(up, limit), -limit);
    return rounded<T>(rounded<T>(g / (exponential(-g) + 1.0f)) * u);
}

template <class T>
INLINE Floats silu_float(const Floats& gate, const Floats& up) {
    return rounded<T>(gate / (exponential(-gate) + 1.0f) * up);
}

template <class T>
INLINE Floats clamped(const Floats& gate, const Floats& up, float limit, float alpha) {
    Floats g = at_most(gate, limit), u = at_least(at_most(up, limit), -limit);
    Floats inner = rounded<T>(sigmoid(rounded<T>(g * alpha)));
    return rounded<T>(rounded<T>(u + 1.0f) * rounded<T>(g * inner));
}

template <class T>
INLINE Floats squared_relu(const Floats& x) {
    Floats positive = at_least(x, 0.0f);
    return rounded<T>(positive * positive);
}

// Apply a formula to n gate and up projections: two rows, or one row of pairs.
template <class Apply>
INLINE void over_gates(
    const float* gate, const float* up, bool paired, float* out, int64_t n, Apply apply) {
    if (!paired) {
        over_row(n, [&](int64_t at, int64_t left) INLINE_LAMBDA {
            put(out, at, left, apply(get(gate, at, left), get(up, at, left)));
        });
        return;
    }
    over_row(n, [&](int64_t at, int64_t left) INLINE_LAMBDA {
        const float* place = gate + 2 * at;
        Pairs both = left >= LANES
                         ? pairs(load<float>(place), load<float>(place + LANES))
                         : pairs(load_first<float>(place, 2 * left),
                                 load_first<float>(place + LANES, 2 * left - LANES));
        put(out, at, left, apply(both.first, both.second));
    });
}

// Apply an expert's activation to n gate and up projections, in float32.
//
// paired: gate and up values alternate from `gate` on
template <class T>
[[gnu::noinline]] void activate(
    const Activation& activation, const float* gate, const float* up, bool paired, float* out,
    int64_t n) {
    const float limit = activation.limit, alpha = activation.alpha;
    switch (activation.code) {
    case SILU:
        return over_gates(gate, up, paired, out, n,
                          [&](const Floats& g, const Floats& u) INLINE_LAMBDA {
                              return silu<T>(g, u, limit);
                          });
    case SILU_FLOAT:
        return over_gates(gate, up, paired, out, n,
                          [&](const Floats& g, const Floats& u) INLINE_LAMBDA {
                              return silu_float<T>(g, u);
                          });
    case CLAMPED:
        return over_gates(gate, up, paired, out, n,
                          [&](const Floats& g, const Floats& u) INLINE_LAMBDA {
                              return clamped<T>(g, u, limit, alpha);
                          });
    case RELU2:
        return over_row(n, [&](int64_t at, int64_t left) INLINE_LAMBDA {
            put(out, at, left, squared_relu<T>(get(up, at, left)));
        });
    }
}

}  // namespace greenroom
