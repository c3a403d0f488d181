// The gated activation between the projections of a dense MLP.
#include "activations.hpp"
#include "region.hpp"

namespace greenroom {

// out [rows, columns] = the activation of gate and up projections; all are of the model's type.
SHARED(ActivateCall,
    int64_t cursor;
    Activation activation;
    const void* gate;
    const void* up;
    void* out;
    int64_t rows;
    int64_t columns;
)

}  // namespace greenroom

namespace {

using namespace greenroom;

constexpr int64_t STEP = 256;  // numbers that a thread claims at a time

template <class T>
void activate_rows(ActivateCall& p) {
    const int64_t total = p.rows * p.columns;
    alignas(64) float gate[STEP], up[STEP], out[STEP];
    for (int64_t at; (at = claim(p.cursor) * STEP) < total;) {
        const int64_t n = least(STEP, total - at);
        widen((const T*)p.gate + at, n, gate);
        widen((const T*)p.up + at, n, up);
        activate<T>(p.activation, gate, up, false, out, n);
        T* result = (T*)p.out + at;
        over_row(n, [&](int64_t i, int64_t left) INLINE_LAMBDA {
            put(result, i, left, get(out, i, left));
        });
    }
}

}  // namespace

KERNELS(activate, ActivateCall, activate_rows)
