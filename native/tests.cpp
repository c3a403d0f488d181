// Formulas and waiting that no kernel has alone, for tests.
#include "arguments.hpp"
#include "formulas.hpp"
#include "region.hpp"

namespace {

using namespace greenroom;

SHARED(ExponentialsTest,
    const void* x;  // [n], of the model's type
    int64_t n;
    float scale;
    float total;  // the result: the sum of `out`
    float* out;   // [n]
)

// A counter that threads await.
SHARED(AwaitTest,
    int64_t counter;
    int64_t amount;
)

template <class T>
void test_exponentials(ExponentialsTest& call) {
    call.total = exponentials((const T*)call.x, call.n, call.scale, call.out);
}

}  // namespace

KERNELS(test_exponentials, ExponentialsTest, test_exponentials)

EXPORT void test_await(AwaitTest* p) { await(p->counter, p->amount); }
EXPORT void test_count(AwaitTest* p) { count(p->counter); }
