// The calls of the kernels that compute experts and sum their outputs.
#pragma once

#include "activations.hpp"
#include "encoded.hpp"

namespace greenroom {

// A router's choices for some tokens, sorted by expert (runtime/kernels/routing.py).
//
// The tokens of experts[i] are those of entries starts[i] to starts[i + 1] - 1. An entry's row is
// token * top_k + rank.
SHARED(Routing,
    int64_t count;           // of experts
    const int64_t* experts;  // ascending
    const int64_t* starts;   // [count + 1]
    const int64_t* tokens;
    const int64_t* rows;
)

// A matrix of each expert: its encoding, or, without one, where it lies in a slot.
SHARED(ExpertMatrix,
    const Format* format;  // null: weights of the model's type, at `offset` bytes
    const Layout* layout;
    int64_t offset;
)

// One MoE layer's experts.
//
// Rows of `up` are up projections, or gate projections first and then up projections, which may
// have an encoding of their own (`second`, else equal to `up`). If they are interleaved, the two
// alternate. A transposed matrix is stored as [inputs, outputs].
SHARED(ExpertLayer,
    const uint8_t* slots;
    int64_t slot_bytes;
    ExpertMatrix up, second, down;
    int64_t hidden;
    int64_t inner;  // channels between the projections
    int64_t width;  // outputs of the up projection: `inner`, or twice as many with a gate
    int64_t interleaved, transposed;
    int64_t rounds;    // are sums rounded to the model's type?
    const void* bias;  // of the up projection [experts, width], or null
    Activation activation;
)

// Compute a group of a step's experts: up projections, then down projections.
//
// The float32 memory has a row for each entry of the routing, and in `out` for each (token, rank).
SHARED(GroupCall,
    int64_t cursor;   // the next unit of work
    int64_t threads;  // that have entered the kernel
    const ExpertLayer* layer;
    const Routing* routing;
    int64_t up, down;         // is that projection computed?
    int64_t accumulate;       // is the result added to `out`?
    int64_t sequential_rows;  // up to so many float32 rows are multiplied with codes one by one
    int64_t narrow;           // is x of the model's type, not float32? One token, or bfloat16 rows
    int64_t pairs;            // are x bfloat16 numbers, of a model of this type?
    const void* x;            // [tokens, hidden]
    const float* packed;      // the same, packed as integers; null if no format multiplies these
    float* mid;               // up projections [entries, width]
    float* act;               // activations [entries, inner]
    float* out;               // [tokens * top_k, hidden]
    uint8_t* scratch;
    int64_t scratch_bytes;   // of each thread
    int64_t count;           // of the group's experts
    const int64_t* experts;  // [count]
    const int64_t* slots;    // where they lie
    int64_t* finished;       // units of their up projections; 0 at the start
)

// Rows of float32 inputs [rows, columns] to be packed as integers (formats/inputs.hpp).
SHARED(PackCall,
    int64_t cursor;
    int64_t planes, rows, columns;
    const float* x;
    float* out;
)

// Sum each token's expert outputs times gate weights, by ascending expert id.
//
// The kernel first rounds the outputs to the model's type and adds biases, in place.
SHARED(SumCall,
    int64_t cursor;
    const Routing* routing;
    int64_t tokens, hidden;
    float* outputs;        // [tokens * top_k, hidden]
    const void* bias;      // [experts, hidden], or null
    const void* weights;   // [tokens * top_k]
    int64_t narrow;        // are gate weights of the model's type, and not float32?
    int64_t rounds;        // are outputs rounded to the model's type?
    int64_t round_product, round_sum;  // are products with gate weights rounded, and sums?
    float* sums;           // memory [tokens, hidden]
    void* result;          // [tokens, hidden], of the model's type
)

}  // namespace greenroom
