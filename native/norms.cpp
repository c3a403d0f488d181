// Residual sums and RMSNorms: kernels for one token, and for several.
#include "norms.hpp"

namespace {

using namespace greenroom;

// One thread computes all rows.
template <class T>
void one_thread(NormCall& p) {
    if (claim(p.cursor) == 0) add_and_norm_row<T>(p);
}

// Each thread claims one token at a time. If `wide` is not null, norms are written there too.
template <class T>
void tokens(TokensCall& p) {
    for (int64_t token; (token = claim(p.cursor)) < p.tokens;) {
        const NormCall& one = call_of<NormCall>(p, token);
        add_and_norm_row<T>(one);
        if (p.wide) widen((const T*)one.out, one.columns, p.wide + token * one.columns);
    }
}

}  // namespace

KERNELS(add_and_norm, NormCall, one_thread)
KERNELS(add_and_norm_rows, TokensCall, tokens)
