// Kernels that quantise keys and values, and decode them.
#include "kv_rows.hpp"

namespace {

using namespace greenroom;

constexpr int64_t ROWS_AT_ONCE = 64;  // of a unit of work

// Call f(source row, target row) for all rows; each thread claims some rows of a head at a time.
template <class F>
INLINE void over_rows(KeyValueCall& p, F f) {
    const int64_t parts = (p.tokens + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    for (int64_t unit; (unit = claim(p.cursor)) < p.heads * parts;) {
        const int64_t head = unit / parts, first = unit % parts * ROWS_AT_ONCE;
        const void* source = moved(p.source, head * p.source_head);
        void* target = moved(p.target, head * p.target_head);
        for (int64_t t = first; t < least(first + ROWS_AT_ONCE, p.tokens); t++)
            f(moved(source, t * p.source_token), moved(target, t * p.target_token));
    }
}

template <class T>
void pack(KeyValueCall& p) {
    with_format(p.format, [&](auto format) INLINE_LAMBDA {
        over_rows(p, [&](const void* source, void* target) INLINE_LAMBDA {
            pack_row_of<format>((const T*)source, p.width, (uint8_t*)target);
        });
    });
}

template <class T>
void expand(KeyValueCall& p) {
    with_format(p.format, [&](auto format) INLINE_LAMBDA {
        over_rows(p, [&](const void* source, void* target) INLINE_LAMBDA {
            expand_row<format>((const uint8_t*)source, p.width, (T*)target);
        });
    });
}

}  // namespace

KERNELS(pack_keys_values, KeyValueCall, pack)
KERNELS(expand_keys_values, KeyValueCall, expand)
