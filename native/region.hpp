// Threads of a parallel region: every thread enters a kernel with the same arguments, claims units
// of work with an atomic counter, and leaves when no unit is left.
#pragma once

#include "simd.hpp"

namespace greenroom {

// Add to a counter, and return its old value.
INLINE int64_t claim(int64_t& counter, int64_t amount = 1) {
    return __atomic_fetch_add(&counter, amount, __ATOMIC_SEQ_CST);
}

// The value of a counter that other threads change.
INLINE int64_t current(const int64_t& counter) {
    return __atomic_load_n(&counter, __ATOMIC_RELAXED);
}

// Spin until a counter is at least an amount.
INLINE void await(const int64_t& counter, int64_t amount) {
    while (__atomic_load_n(&counter, __ATOMIC_ACQUIRE) < amount) {
    }
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

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
