// Kernels that run other kernels, or set their calls.
#include "region.hpp"
#include "arguments.hpp"

namespace greenroom {

// A kernel and the call that it receives. If the kernel is null, `call` is the address of an
// int64, and all threads leave if that is 0.
SHARED(Stage,
    void* kernel;
    void* call;
)

// Kernels to run one after another.
SHARED(StagesCall,
    int64_t count;
    void* barrier;  // function at which all threads wait; null: there is one thread
    const Stage* stages;
)

// A copy of int64 numbers in memory.
SHARED(Run,
    int64_t* target;
    const int64_t* source;
    int64_t length;
)

// Copies that set the calls of other kernels.
SHARED(CopyCall,
    int64_t cursor;
    int64_t count;
    const Run* runs;
)

}  // namespace greenroom

using namespace greenroom;

EXPORT void run_stages(StagesCall* p) {
    for (int64_t i = 0; i < p->count; i++) {
        if (i > 0 && p->barrier) ((void (*)())p->barrier)();
        const Stage& stage = p->stages[i];
        if (stage.kernel)
            ((void (*)(void*))stage.kernel)(stage.call);
        else if (*(const int64_t*)stage.call == 0)
            return;
    }
}

EXPORT void copy_calls(CopyCall* p) {
    for (int64_t i; (i = claim(p->cursor)) < p->count;) {
        const Run& run = p->runs[i];
        std::memcpy(run.target, run.source, 8 * run.length);
    }
}
