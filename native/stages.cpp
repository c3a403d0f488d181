// Kernels that run other kernels, or set their calls.
#include <fcntl.h>

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
    int64_t progress;  // the present stage in the upper half, how many threads compute it below
    int64_t count;
    const Stage* stages;
)

// For how long a thread has waited for a core since it began.
SHARED(Waiting,
    int64_t thread;
    int64_t nanoseconds;
)

// A kernel, and how long its threads have waited for a core when they leave it.
SHARED(MeasuredCall,
    void* kernel;
    void* call;
    int64_t count;
    Waiting* threads;
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

namespace {

INLINE int64_t loaded(const int64_t& word) { return __atomic_load_n(&word, __ATOMIC_SEQ_CST); }

// Replace a word that still has its expected value; otherwise that becomes the present one.
INLINE bool replaced(int64_t& word, int64_t& expected, int64_t desired) {
    return __atomic_compare_exchange_n(
        &word, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

// Go on to a stage, and wake the threads that wait for it.
INLINE bool advanced(StagesCall& p, int64_t& progress, int64_t stage) {
    if (!replaced(p.progress, progress, stage << 32)) return false;
    progress = stage << 32;
    wake(upper(p.progress));
    return true;
}

// Leave a stage. The last thread goes on to the following one, for which the others wait.
INLINE void leave(StagesCall& p, int64_t& progress, int64_t stage) {
    progress = loaded(p.progress);
    for (;;) {
        if (progress == (stage << 32) + 1) {
            if (advanced(p, progress, stage + 1)) return;
        } else if (replaced(p.progress, progress, progress - 1)) {
            wait_change(upper(p.progress), stage);
            progress = loaded(p.progress);
            return;
        }
    }
}

// For how many nanoseconds the calling thread has waited for a core so far.
int64_t waited_so_far() {
    char text[64];
    int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t length = read(file, text, sizeof text);
    close(file);
    int64_t at = 0, waited = 0;  // the second number
    while (at < length && text[at] != ' ') at++;
    while (++at < length && text[at] >= '0' && text[at] <= '9')
        waited = 10 * waited + text[at] - '0';
    return waited;
}

}  // namespace

// A kernel's threads leave it when no unit is left, and they have finished theirs. So a stage is
// complete when the last thread in it leaves. A thread that has no core then holds up nobody: it
// joins at a later stage.
EXPORT void run_stages(StagesCall* p) {
    int64_t progress = loaded(p->progress), number;
    while ((number = progress >> 32) < p->count) {
        const Stage& stage = p->stages[number];
        if (!stage.kernel) {
            advanced(*p, progress, *(const int64_t*)stage.call ? number + 1 : p->count);
            continue;
        }
        if (!replaced(p->progress, progress, progress + 1)) continue;
        ((void (*)(void*))stage.kernel)(stage.call);
        leave(*p, progress, number);
    }
}

EXPORT void run_measured(MeasuredCall* p) {
    ((void (*)(void*))p->kernel)(p->call);
    p->threads[claim(p->count)] = {syscall(SYS_gettid), waited_so_far()};
}

EXPORT void copy_calls(CopyCall* p) {
    for (int64_t i; (i = claim(p->cursor)) < p->count;) {
        const Run& run = p->runs[i];
        std::memcpy(run.target, run.source, 8 * run.length);
    }
}
