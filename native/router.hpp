// Arguments of the kernels that choose tokens' experts and look up the experts' slots.
#pragma once

#include "arguments.hpp"

namespace greenroom {

// The choice of a token's experts from a router's logits. These are numbers of the model's type, or
// float32 where a router computes in float32.
//
// cursor:       0; the first thread to enter raises it
// chosen:       the result: how many experts were chosen, top_k or 0
// summed:       are gate weights divided by their sum?
// wide:         are gate weights float32, rather than of the model's type?
// knows_ties:   does torch choose between equal scores as the code here does?
// ids, weights: the results [top_k], in descending order of what was chosen by
// bias:         null: scores are the softmax of the logits. Else they are their sigmoids, and
//               experts are chosen by score + bias [experts]
// least_sum:    added to the sum that gate weights are divided by
// scale:        factor of the gate weights
SHARED(Choice,
    int64_t cursor, chosen;
    const void* logits;
    int64_t experts, top_k, summed, wide, knows_ties;
    int64_t* ids;
    void* weights;
    const float* bias;
    float least_sum, scale;
)

// The slots of all experts of all layers, for one layer at one step.
//
// first:     number of the layer's first expert in the next three tables
// slot_of:   each expert's slot in the cache, negative if it is not loaded
// last_used: the step of each expert's last use
// requests:  each expert's number of uses
// memory:    the memory slot of each slot of the cache
// step:      the number of this step
SHARED(SlotTables,
    int64_t first;
    const int64_t* slot_of;
    int64_t* last_used;
    int64_t* requests;
    const int64_t* memory;
    int64_t step;
)

// The look-up of the slots of some tokens' experts.
//
// cursor:  0; the first thread to enter raises it
// found:   the result: how many distinct experts were chosen, all of which have slots; or 0
// ids:     the chosen experts [count, top_k]
// count:   of tokens
// experts: of the layer
// sorted, slots: the results [found]: the chosen experts in ascending order, and their memory slots
// starts, tokens, rows: the results: the choices sorted by expert, as in `Routing` (experts.hpp)
// found_places: where `found` is written too, if it is not 0
SHARED(SlotSearch,
    int64_t cursor, found;
    const int64_t* ids;
    int64_t count, top_k, experts;
    SlotTables tables;
    int64_t *sorted, *slots, *starts, *tokens, *rows;
    int64_t* found_places[2];
)

}  // namespace greenroom
