// Calls of attention for one token.
#pragma once

#include "kv_rows.hpp"
#include "layers.hpp"

namespace greenroom {

constexpr int64_t CONTEXT_BLOCK = 64;  // tokens of a partial sum of values

// A head of queries, keys or values: its rows in a projection's matrix, and what follows.
SHARED(Head,
    const Matrix* matrix;
    int64_t first;         // row of the matrix
    const void* bias;      // of this head, or null
    const void* norm;      // weight of an RMSNorm, or null
    int64_t rotated;
)

// Queries, keys and values of one token, with bias, norm and rotary position embedding.
SHARED(ProjectCall,
    int64_t cursor;
    const void* x;
    int64_t hidden;
    int64_t query_heads;
    int64_t key_heads;
    int64_t width;      // of a head
    float* projected;   // memory [query heads + 2 key heads, width]
    void* queries;      // [query heads, width]
    void* keys;
    void* values;
    int64_t key_step;   // bytes from head to head
    int64_t value_step;
    int64_t format;     // of keys and values: KeyValueFormat
    const void* cos;
    const void* sin;
    int64_t rotary;     // elements of a head that are rotated
    float eps;
    int64_t style;      // of the norms
    int64_t ticket;
    uint8_t* scratch;   // for encoded matrices: `stride` bytes for each thread
    int64_t stride;
    const Head* heads;  // of queries, then keys, then values
)

// Attention of one token, and the output projection.
SHARED(AttendCall,
    int64_t cursor;
    int64_t done;          // key heads that are computed
    const void* queries;   // [key heads * group, width]
    const void* keys;
    const void* values;
    int64_t key_step;      // bytes from head to head
    int64_t key_row;       // bytes from token to token
    int64_t value_step;
    int64_t value_row;
    int64_t format;        // of keys and values: KeyValueFormat
    int64_t context;       // tokens
    int64_t width;         // of a head; a multiple of LANES
    int64_t key_heads;
    int64_t group;         // query heads that share a key head
    float scale;
    // Memory: [heads, context], twice [heads, width], [key heads, width], [key heads,
    // CONTEXT_BLOCK, width].
    float* scores;
    void* mixed;           // memory [heads, width] of the model's type
    const Matrix* matrix;  // of the output projection
    int64_t outputs;
    const void* bias;      // or null
    void* out;             // [outputs]
    int64_t ticket;
    uint8_t* scratch;      // for an encoded matrix: `stride` bytes for each thread
    int64_t stride;
)

}  // namespace greenroom
