// Kernels that choose tokens' experts and look up the experts' slots. One token takes one thread,
// and less time than Python takes to build a list.
#include "router.hpp"

#include "activations.hpp"
#include "norms.hpp"
#include "region.hpp"

namespace {

using namespace greenroom;

constexpr int64_t MOST_EXPERTS = 4096;  // of a router: arrays for them lie on the stack
constexpr int64_t SORTED = 16;          // std::sort sorts so many numbers by insertion
constexpr int64_t FEW = 3;              // std::nth_element sorts so many numbers by insertion
constexpr int64_t HEAP = 64;            // torch's topk uses a heap for one of so many numbers

// A score and its expert.
struct Scored {
    float score;
    int32_t expert;
};

// Compute the softmax of logits; false, with NaN as the result, if a logit is NaN or the largest
// logit is infinite.
template <class T>
bool softmax(const T* logits, int64_t n, float* scores) {
    float total = exponentials(logits, n, 1.0f, scores);
    over_row(n, [&](int64_t at, int64_t left) INLINE_LAMBDA {
        put(scores, at, left, get(scores, at, left) / all(total));
    });
    return total == total;
}

// Find the `most` largest scores, in descending order, and return how many there are. Of equal
// scores, those of the lowest experts come first.
int64_t top_scores(const float* scores, int64_t n, int64_t most, Scored* best) {
    int64_t count = 0;
    for (int64_t e = 0; e < n; e++) {
        float score = scores[e];
        if (count == most && score <= best[most - 1].score) continue;
        int64_t i = least(count, most - 1);
        for (; i > 0 && best[i - 1].score < score; i--) best[i] = best[i - 1];
        best[i] = {score, (int32_t)e};
        count = least(count + 1, most);
    }
    return count;
}

// The order of torch's topk among equal scores.
//
// A router's logits are rounded to eight bits, so one choice in twenty ends between equal scores:
// too often to return to Python for it. torch's order is that of libstdc++'s std::nth_element (a
// partition around the median of three, repeated) and insertion sort of the elements before the
// nth. The algorithm is written out because other standard libraries have other ones, and torch's
// build, not this one, decides. Trials show whether it is torch's (dense/blocks/router.py).

INLINE void swap(Scored& a, Scored& b) {
    Scored first = a;
    a = b;
    b = first;
}

// Where is the median of three scores? Compares as libstdc++'s __move_median_to_first.
INLINE Scored* median_of(Scored* a, Scored* b, Scored* c) {
    if (a->score > b->score) {
        if (b->score > c->score) return b;
        return a->score > c->score ? c : a;
    }
    if (a->score > c->score) return a;
    return b->score > c->score ? c : b;
}

// Partition a range around its first score, as libstdc++'s __unguarded_partition, and return where
// the second part begins.
Scored* partition(Scored* first, Scored* last) {
    Scored *low = first + 1, *high = last;
    while (true) {
        while (low->score > first->score) low++;
        high--;
        while (first->score > high->score) high--;
        if (low >= high) return low;
        swap(*low, *high);
        low++;
    }
}

// Sort a range in descending order; equal scores keep their order.
void insertion_sort(Scored* first, Scored* last) {
    for (Scored* at = first + 1; at < last; at++)
        for (Scored* i = at; i > first && i->score > (i - 1)->score; i--) swap(*i, *(i - 1));
}

// Put the top_k largest of n > top_k scores first, in the order of torch's topk. Return false if
// torch selects or sorts so many numbers by other means than those written here.
bool select_largest(Scored* scores, int64_t n, int64_t top_k) {
    if (n >= HEAP * top_k || top_k - 1 > SORTED) return false;
    int rounds = 2 * (std::bit_width((uint64_t)n) - 1);  // nth_element continues with a heap
    Scored *first = scores, *last = scores + n;
    while (last - first > FEW) {
        if (rounds-- == 0) return false;
        swap(*first, *median_of(first + 1, first + (last - first) / 2, last - 1));
        Scored* cut = partition(first, last);
        if (cut <= scores + top_k - 1) first = cut;
        else last = cut;
    }
    insertion_sort(first, last);
    insertion_sort(scores, scores + top_k - 1);
    return true;
}

// Compute the sigmoids of logits, and their sums with a bias by which experts are chosen; false if
// one of the sums is NaN.
template <class T>
bool biased_sigmoid(
    const T* logits, const float* bias, int64_t n, float* scores, float* biased) {
    Floats total{};
    over_row(n, [&](int64_t at, int64_t left) INLINE_LAMBDA {
        Floats score = sigmoid(get(logits, at, left)), sum = score + get(bias, at, left);
        put(scores, at, left, score);
        put(biased, at, left, sum);
        total = total + (sum - sum);
    });
    float lanes = lane_sum(total);
    return lanes == lanes;
}

// Choose the experts with the largest scores. `chosen` stays 0 if torch must choose: the last
// chosen score equals the next one and torch's order is unknown, a logit is NaN, the largest of a
// softmax is infinite, or the experts are too many.
template <class T>
void choose_experts(Choice& p) {
    if (claim(p.cursor) != 0 || p.experts > MOST_EXPERTS) return;
    float scores[MOST_EXPERTS], biased[MOST_EXPERTS];
    Scored best[MOST_EXPERTS + 1];
    const T* logits = (const T*)p.logits;
    if (p.bias ? !biased_sigmoid(logits, p.bias, p.experts, scores, biased)
               : !softmax(logits, p.experts, scores))
        return;
    const float* keys = p.bias ? biased : scores;
    int64_t count = top_scores(keys, p.experts, p.top_k + 1, best);
    if (count > p.top_k && best[p.top_k - 1].score == best[p.top_k].score) {
        for (int64_t e = 0; e < p.experts; e++) best[e] = {keys[e], (int32_t)e};
        if (!p.knows_ties || !select_largest(best, p.experts, p.top_k)) return;
    }
    float total = 0;
    for (int64_t i = 0; i < p.top_k; i++) total += scores[best[i].expert];
    total += p.least_sum;
    for (int64_t i = 0; i < p.top_k; i++) {
        float score = scores[best[i].expert];
        float weight = (p.summed ? score / total : score) * p.scale;
        if (p.wide) ((float*)p.weights)[i] = weight;
        else ((T*)p.weights)[i] = from_float<T>(weight);
        p.ids[i] = best[i].expert;
    }
    p.chosen = p.top_k;
}

// For several tokens, each thread claims one at a time.
template <class T>
void choose_for_tokens(TokensCall& p) {
    for (int64_t token; (token = claim(p.cursor)) < p.tokens;)
        choose_experts<T>(call_of<Choice>(p, token));
}

// The choices of tokens, counted for each expert of a layer.
struct Counts {
    int32_t of[MOST_EXPERTS], last[MOST_EXPERTS];  // `last`: the last token, counted from 1

    // Count all choices; return false if an id is no expert of the layer, a token chooses an expert
    // twice or an expert is not loaded.
    bool add(const SlotSearch& p) {
        const int64_t* slot_of = p.tables.slot_of + p.tables.first;
        std::memset(of, 0, p.experts * sizeof *of);
        std::memset(last, 0, p.experts * sizeof *last);
        for (int64_t i = 0; i < p.count * p.top_k; i++) {
            const int64_t expert = p.ids[i];
            const int32_t token = (int32_t)(i / p.top_k) + 1;
            if (expert < 0 || expert >= p.experts || slot_of[expert] < 0) return false;
            if (last[expert] == token) return false;
            last[expert] = token;
            of[expert]++;
        }
        return true;
    }
};

}  // namespace

KERNELS(select, Choice, choose_experts)
KERNELS(select_rows, TokensCall, choose_for_tokens)

// Sort some tokens' choices by expert, look up the experts' slots, and record their use. `found`
// stays 0, and no use is recorded, if an id is no expert of the layer, a token chooses an expert
// twice or an expert is not loaded.
EXPORT void find_slots(SlotSearch* search) {
    SlotSearch& p = *search;
    if (claim(p.cursor) != 0 || p.experts > MOST_EXPERTS) return;
    Counts counts;
    if (!counts.add(p)) return;
    int64_t found = 0, at = 0;
    for (int64_t expert = 0; expert < p.experts; expert++) {
        const int32_t count = counts.of[expert];
        if (!count) continue;
        const int64_t piece = p.tables.first + expert;
        p.tables.last_used[piece] = p.tables.step;
        p.tables.requests[piece]++;
        p.sorted[found] = expert;
        p.slots[found] = p.tables.memory[p.tables.slot_of[piece]];
        p.starts[found++] = at;
        counts.of[expert] = (int32_t)at;  // of the next entry
        at += count;
    }
    p.starts[found] = at;
    for (int64_t rank = 0; rank < p.top_k; rank++)
        for (int64_t token = 0; token < p.count; token++) {
            const int64_t row = token * p.top_k + rank, entry = counts.of[p.ids[row]]++;
            p.tokens[entry] = token;
            p.rows[entry] = row;
        }
    for (int64_t* place : p.found_places) *place = found;
    p.found = found;
}
