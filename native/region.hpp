// Threads of a parallel region: every thread enters a kernel with the same arguments, claims units
// of work with an atomic counter, and leaves when no unit is left.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simd.hpp"

namespace greenroom {

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Add to a counter, and return its old value.
INLINE int64_t claim(int64_t& counter, int64_t amount = 1) {
    return __atomic_fetch_add(&counter, amount, __ATOMIC_SEQ_CST);
}

// The value of a counter that other threads change.
INLINE int64_t current(const int64_t& counter) {
    return __atomic_load_n(&counter, __ATOMIC_RELAXED);
}

// How many threads sleep in `wait_change`, of all regions.
inline int64_t sleepers = 0;

// Wait until a number in memory is not `value`. After a while the thread sleeps: the thread that
// changes the number may have lost its core, and gets the core of the one that sleeps.
[[gnu::noinline]] inline void wait_change(const int32_t* number, int32_t value) {
    constexpr int spins = 50000;  // about 100 microseconds; waking a thread takes 50
    for (int i = 0; i < spins; i++)
        if (__atomic_load_n(number, __ATOMIC_ACQUIRE) != value) return;
    claim(sleepers);
    while (__atomic_load_n(number, __ATOMIC_SEQ_CST) == value)
        syscall(SYS_futex, number, FUTEX_WAIT_PRIVATE, value, nullptr);
    claim(sleepers, -1);
}

// Wake the threads that wait for a change of a number.
INLINE void wake(const int32_t* number) {
    if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, number, FUTEX_WAKE_PRIVATE, INT32_MAX);
}

// The halves of a counter on little-endian processors.
INLINE const int32_t* lower(const int64_t& counter) { return (const int32_t*)&counter; }
INLINE const int32_t* upper(const int64_t& counter) { return (const int32_t*)&counter + 1; }

// Wait until a counter, to which other threads `count`, is at least an amount.
INLINE void await(const int64_t& counter, int64_t amount) {
    int64_t value;
    while ((value = __atomic_load_n(&counter, __ATOMIC_ACQUIRE)) < amount)
        wait_change(lower(counter), (int32_t)value);
}

// Add 1 to a counter for which other threads `await`.
INLINE void count(int64_t& counter) {
    claim(counter);
    wake(lower(counter));
}

// The units of work that a thread has claimed: the present one, and the following one, so that its
// codes can be prefetched. The last few units are not claimed ahead: another thread may be idle.
class Units {
    static constexpr int64_t last = 4, none = -1;
    int64_t &cursor, total, following;

  public:
    int64_t number;

    Units(int64_t& cursor, int64_t total)
        : cursor(cursor), total(total), following(claim(cursor)) {
        advance();
    }
    bool left() const { return number < total; }
    void advance() {
        number = following == none ? claim(cursor) : following;
        following = current(cursor) + last < total ? claim(cursor) : none;
    }
    // The unit whose codes this thread reads next, or is likely to.
    int64_t next() const {
        return least(following == none ? current(cursor) : following, total - 1);
    }
};

// An address moved by some bytes.
template <class T>
INLINE T* moved(T* address, int64_t bytes) {
    return (T*)((std::conditional_t<std::is_const_v<T>, const char, char>*)address + bytes);
}

// Export a kernel for each of the model's types: NAME_bfloat16, NAME_float16 and NAME_float32.
#define KERNELS(name, Arguments, function)                                          \
    EXPORT void name##_bfloat16(Arguments* p) { function<greenroom::BFloat16>(*p); } \
    EXPORT void name##_float16(Arguments* p) { function<greenroom::Float16>(*p); }   \
    EXPORT void name##_float32(Arguments* p) { function<float>(*p); }

}  // namespace greenroom
