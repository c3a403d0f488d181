// Sums of residuals and RMSNorms, and calls for several tokens.
#pragma once

#include "formulas.hpp"
#include "plain.hpp"

namespace greenroom {

// How an RMSNorm applies its weight to the normalised value (NORMS in dense/norms.py).
enum NormStyle : int64_t { ROUND_THEN_SCALE, SCALE_IN_FLOAT, ONE_PLUS_IN_FLOAT };

// sum = x + y and out = RMSNorm(sum) for one or more rows [columns] of the model's type. Without y
// the norm is that of x; without out no norm is computed.
SHARED(NormCall,
    int64_t cursor;
    const void* x;
    const void* y;
    void* sum;
    void* out;
    const void* weight;
    int64_t columns;
    float eps;
    int64_t style;
    int64_t more;  // rows after the first
)

// A call of a kernel for several tokens, in place of a call for each of them.
SHARED(TokensCall,
    int64_t cursor;
    int64_t done;  // finished units of work
    int64_t tokens;
    float* wide;  // inputs of a product, a row for each token
    float* out;  // results of a product, a row for each token
    const void** calls;  // for each token, the call of the kernel for one token
)

// The call of the kernel for one token.
template <class Call>
INLINE Call& call_of(const TokensCall& p, int64_t token) {
    return *(Call*)p.calls[token];
}

// Compute the RMSNorm of n numbers, rounded to the type of the norm's weight.
template <class T, class X, class Out>
INLINE void normalise(
    const X* x, int64_t n, const T* weight, float eps, int64_t style, Out* out) {
    float total;
    dot_row<1>(x, 0, n, n, false, x, &total);
    Floats scale = all(1 / std::sqrt(total / (float)n + eps));
    auto scaled = [&](auto formula) INLINE_LAMBDA {
        over_row(n, [&](int64_t at, int64_t left) INLINE_LAMBDA {
            Floats value = formula(get(weight, at, left), get(x, at, left) * scale);
            put(out, at, left, rounded<T>(value));
        });
    };
    if (style == ROUND_THEN_SCALE)
        scaled([](const Floats& w, const Floats& v) INLINE_LAMBDA { return w * rounded<T>(v); });
    else if (style == SCALE_IN_FLOAT)
        scaled([](const Floats& w, const Floats& v) INLINE_LAMBDA { return w * v; });
    else
        scaled([](const Floats& w, const Floats& v) INLINE_LAMBDA { return (w + 1) * v; });
}

// Compute residual sums and RMSNorms on one thread.
template <class T>
INLINE void add_and_norm_row(const NormCall& p) {
    const int64_t n = p.columns;
    for (int64_t m = 0; m <= p.more; m++) {
        const T* x = (const T*)p.x + m * n;
        if (p.y) {
            const T* y = (const T*)p.y + m * n;
            T* sum = (T*)p.sum + m * n;
            over_row(n, [&](int64_t at, int64_t left) INLINE_LAMBDA {
                put(sum, at, left, get(x, at, left) + get(y, at, left));
            });
            x = sum;
        }
        if (p.out)
            normalise(x, n, (const T*)p.weight, p.eps, p.style, (T*)p.out + m * n);
    }
}

}  // namespace greenroom
